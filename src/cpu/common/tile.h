/* A tile: up to most_lanes rows, a row being a (query, head of the group) pair of one kv head, with
 * the row in the vector lane. Rows count queries first: row = i * group + head. Everything about a
 * tile is stored channel by channel or key by key, with its lanes side by side. */
#ifndef FDMA_CPU_COMMON_TILE_H
#define FDMA_CPU_COMMON_TILE_H

#include "core/plan.h"
#include "cpu/common/unroll.h"
#include "cpu/simd/simd.h"

#include <float.h>
#include <math.h>
#include <string.h>

enum {
    block_lanes = tile_vectors * vf_width,  /* lanes that one micro-kernel holds in registers */
    most_lanes = tile_blocks * block_lanes, /* of a tile */
    key_groups = key_block / score_keys,
    /* v of a block of keys is cut into strips: a few channels of every key, side by side */
    strip_channels = (int)vf_width > (int)value_channels ? (int)vf_width : (int)value_channels,
    strip_length = key_block / terms * strip_channels,
};

_Static_assert(key_block % key_step == 0, "steps of keys fill a block");
_Static_assert(key_step % score_keys == 0, "groups of keys fill a step");
_Static_assert(score_keys % terms == 0, "words of keys fill a group");
_Static_assert(strip_channels % value_channels == 0, "registers of channels fill a strip");

/* Which rows a tile has. */
typedef struct tile_place {
    int64_t b, g;
    int64_t first_row;
    int64_t rows;
    int32_t first_position, last_position;
} tile_place;

/* A tile's state, of dim = tile_dim or key_block entries; lanes of block n begin at n * entries.
 * What the products multiply is made of words of `terms` channels (q, k) or keys (weights, values).
 */
typedef struct tile_state {
    float *q;       /* [blocks][dim / terms][block_lanes] */
    float *out;     /* [blocks][dim][block_lanes], not yet divided by sum */
    float *weights; /* [key_block / terms][block_lanes], of one block at a time */
    float *scores;  /* [key_step][block_lanes], where registers cannot hold them */
    float *capped;  /* [score_keys][block_lanes] */
    float *max;     /* [tile lanes], may lag behind the true maximum: see most_weight */
    float *sum;     /* [tile lanes], of the weights in all lists before */
    float *part;    /* [block_lanes], of those in this list, of one block at a time */
    float *k_rows;  /* [key_block][padded_row(dim)]: k of a block of keys */
    float *values;  /* [strips][key_block / terms][strip_channels]: v of a block of keys */
    float *zeros;   /* [dim] */
} tile_state;

/* head_dim, filled up with channels of 0 to what the products take. */
static int64_t tile_dim(const fdma_problem *problem) {
    return (problem->head_dim + channel_step - 1) / channel_step * channel_step;
}

/* Rows a cache line longer than they need be spread over the sets of the L1 cache. */
static int64_t padded_row(int64_t dim) { return dim / terms + 16; }

static int64_t strips_of(int64_t dim) { return (dim + strip_channels - 1) / strip_channels; }

static tile_state take_tile(fdma_arena *arena, const fdma_problem *problem, int64_t lanes) {
    const size_t dim = (size_t)tile_dim(problem) * sizeof(float);
    const size_t padded = (size_t)padded_row(tile_dim(problem)) * sizeof(float);
    const size_t strips = (size_t)strips_of(tile_dim(problem)) * sizeof(float);
    tile_state tile;
    tile.q = fdma_arena_take(arena, (size_t)lanes * dim / terms);
    tile.out = fdma_arena_take(arena, (size_t)lanes * dim);
    tile.weights = fdma_arena_take(arena, sizeof(float) * block_lanes * key_block / terms);
    tile.scores = fdma_arena_take(arena, sizeof(float) * block_lanes * key_step);
    tile.capped = fdma_arena_take(arena, sizeof(float) * block_lanes * score_keys);
    tile.max = fdma_arena_take(arena, sizeof(float) * (size_t)lanes);
    tile.sum = fdma_arena_take(arena, sizeof(float) * (size_t)lanes);
    tile.part = fdma_arena_take(arena, sizeof(float) * block_lanes);
    tile.k_rows = fdma_arena_take(arena, key_block * padded);
    tile.values = fdma_arena_take(arena, strips * strip_length);
    tile.zeros = fdma_arena_take(arena, dim);
    return tile;
}

/* How many lanes the tiles of a problem have. Large tiles share the copies of k and v among more
 * rows, small ones among more threads. Which keys a tile lists shows in the order of sums, and
 * where v is not finite: tiles depend neither on the number of threads nor on the batch. */
static int64_t lanes_of_tiles(const fdma_problem *problem) {
    enum { fewest_blocks = 4, wanted_tiles = 8 };
    const int64_t rows = problem->q_len * problem->group;
    const int64_t blocks = rows > 0 ? (rows + block_lanes - 1) / block_lanes : 1;
    int64_t n = blocks < tile_blocks ? blocks : tile_blocks;
    while (n > fewest_blocks && (blocks + n - 1) / n < wanted_tiles)
        n--;
    return n * block_lanes;
}

static int64_t tiles_of(const fdma_problem *problem, int64_t lanes) {
    return (problem->q_len * problem->group + lanes - 1) / lanes;
}

/* The position of a row, -1 where it sees nothing; without causality every row stands at the last
 * key. */
static int32_t row_position(const fdma_problem *problem, int64_t row) {
    const int64_t p = query_position(problem, row / problem->group);
    return (int32_t)(!problem->causal ? problem->kv_len - 1 : p < -1 ? -1 : p);
}

static tile_place place_tile(const fdma_problem *problem, int64_t b, int64_t g, int64_t lanes,
                             int64_t index) {
    const int64_t first = index * lanes, all = problem->q_len * problem->group;
    const int64_t rows = all - first < lanes ? all - first : lanes;
    return (tile_place){
        .b = b,
        .g = g,
        .first_row = first,
        .rows = rows,
        .first_position = row_position(problem, first),
        .last_position = row_position(problem, first + rows - 1),
    };
}

static int64_t row_offset(const fdma_problem *problem, const fdma_tensor *tensor,
                          const tile_place *place, int64_t lane) {
    const int64_t row = place->first_row + lane;
    const int64_t i = row / problem->group, h = place->g * problem->group + row % problem->group;
    return place->b * tensor->stride[0] + i * tensor->stride[1] + h * tensor->stride[2];
}

static void *row_at(const fdma_tensor *tensor, int64_t offset) {
    return (uint8_t *)tensor->data + offset * (int64_t)fdma_dtype_size(tensor->dtype);
}

/* The channels at [b, n, head] of a tensor shaped as q or as k. */
static void *head_row(const fdma_tensor *tensor, int64_t b, int64_t n, int64_t head) {
    return row_at(tensor, b * tensor->stride[0] + n * tensor->stride[1] + head * tensor->stride[2]);
}

/* `count` channels, at most vf_width, of a row in any dtype. */
static inline vf load_channels(const void *row, fdma_dtype dtype, int64_t d, int64_t count) {
    if (dtype == FDMA_FLOAT32)
        return vf_load_first((const float *)row + d, count);
    return dtype == FDMA_FLOAT16 ? vf_load_first_f16((const uint16_t *)row + d, count)
                                 : vf_load_first_bf16((const uint16_t *)row + d, count);
}

static inline void store_channels(void *row, fdma_dtype dtype, int64_t d, vf x, int64_t count) {
    if (dtype == FDMA_FLOAT32)
        vf_store_first((float *)row + d, x, count);
    else if (dtype == FDMA_FLOAT16)
        vf_store_first_f16((uint16_t *)row + d, x, count);
    else
        vf_store_first_bf16((uint16_t *)row + d, x, count);
}

/* How many of a vector's channels from d on there are. */
static inline int64_t channels_at(int64_t d, int64_t dim) {
    return d > dim ? 0 : dim - d < vf_width ? dim - d : vf_width;
}

static void load_row(float *to, const void *row, fdma_dtype dtype, int64_t dim) {
    for (int64_t d = 0; d < dim; d += vf_width) {
        const int64_t count = channels_at(d, dim);
        vf_store_first(to + d, load_channels(row, dtype, d, count), count);
    }
}

/* `count` words, at most vf_width, of a row of q or k. */
static inline vf load_words(const void *row, fdma_dtype dtype, int64_t word, int64_t count) {
    if (terms == 2) // pairs of 16-bit channels, as they lie
        return vf_load_first((const float *)row + word, count);
    return load_channels(row, dtype, word, count);
}

/* Where a lane is in a state of so many entries. */
static int64_t lane_offset(int64_t entries, int64_t lane) {
    return lane / block_lanes * entries * block_lanes + lane % block_lanes;
}

/* Lanes of the blocks that have rows. */
static int64_t used_lanes(const tile_place *place) {
    return (place->rows + block_lanes - 1) / block_lanes * block_lanes;
}

/* Where the rows of vf_width lanes are; lanes without a row get the last one's. */
static void find_lanes(const fdma_problem *problem, const fdma_tensor *tensor,
                       const tile_place *place, int64_t first, void *row[vf_width]) {
    const int64_t group = problem->group, last = place->rows - 1;
    const int64_t base = place->first_row + (first < last ? first : last);
    const int64_t origin = place->b * tensor->stride[0] + place->g * group * tensor->stride[2];
    int64_t i = base / group, head = base % group;
    for (int64_t lane = 0; lane < vf_width; lane++) {
        row[lane] = row_at(tensor, origin + i * tensor->stride[1] + head * tensor->stride[2]);
        if (first + lane >= last)
            continue;
        i += head == group - 1;
        head = head == group - 1 ? 0 : head + 1;
    }
}

/* Rows of q's shape, transposed; lanes without a row repeat the last one. Those `left_out`, if not
 * NULL, become 0. */
static void pack_rows(const fdma_problem *problem, const fdma_tensor *tensor,
                      const tile_place *place, float *packed, const uint8_t *left_out,
                      const float *zeros) {
    const int64_t words = problem->head_dim / terms, tile_words = tile_dim(problem) / terms;
    for (int64_t first = 0; first < used_lanes(place); first += vf_width) {
        void *row[vf_width];
        const void *from[vf_width];
        float *const to = packed + lane_offset(tile_words, first);
        find_lanes(problem, tensor, place, first, row);
        for (int64_t lane = 0; lane < vf_width; lane++)
            from[lane] = left_out && left_out[first + lane] ? zeros : row[lane];
        for (int64_t w = 0; w < tile_words; w += vf_width) {
            const int64_t count = channels_at(w, words);
            const int64_t tile_count = channels_at(w, tile_words);
            vf x[vf_width];
            UNROLL
            for (int lane = 0; lane < vf_width; lane++)
                x[lane] = load_words(from[lane], problem->dtype, w, count);
            vf_transpose(x);
            UNROLL
            for (int n = 0; n < vf_width; n++)
                if (n < tile_count)
                    vf_store(to + (w + n) * block_lanes, x[n]);
        }
    }
}

static void pack_queries(const fdma_problem *problem, const tile_place *place, tile_state *tile) {
    pack_rows(problem, &problem->q, place, tile->q, NULL, NULL);
}

static void clear_tile(tile_state *tile, const tile_place *place, int64_t dim) {
    for (int64_t d = 0; d < dim; d++)
        tile->zeros[d] = 0;
    for (int64_t lane = 0; lane < used_lanes(place); lane++) {
        tile->max[lane] = -FLT_MAX;
        tile->sum[lane] = 0;
    }
}

static void write_lse(const fdma_problem *problem, const tile_place *place,
                      const tile_state *tile) {
    const fdma_tensor *const lse = &problem->lse;
    for (int64_t lane = 0; lane < place->rows; lane++) {
        const int64_t row = place->first_row + lane;
        const int64_t h = place->g * problem->group + row % problem->group;
        const double sum = (double)tile->sum[lane], max = (double)tile->max[lane];
        float *const to = (float *)lse->data + place->b * lse->stride[0] + h * lse->stride[1];
        to[row / problem->group] = sum == 0 ? -INFINITY : (float)(max + log(sum));
    }
}

/* A vector of lanes, each times its factor, to their rows of a tensor of q's shape; `add`: to what
 * they hold. */
INLINE void write_lanes(const fdma_problem *problem, const fdma_tensor *tensor,
                        const tile_place *place, const float *from, int64_t first, vf factor,
                        bool add) {
    const int64_t dim = problem->head_dim;
    const int64_t rows = place->rows - first < vf_width ? place->rows - first : vf_width;
    const float *const lanes = from + lane_offset(tile_dim(problem), first);
    void *row[vf_width];
    find_lanes(problem, tensor, place, first, row);
    for (int64_t d = 0; d < dim; d += vf_width) {
        const int64_t count = channels_at(d, dim);
        vf x[vf_width];
        UNROLL
        for (int c = 0; c < vf_width; c++)
            x[c] = vf_mul(vf_load(lanes + (d + (c < count ? c : 0)) * block_lanes), factor);
        vf_transpose(x);
        UNROLL
        for (int lane = 0; lane < vf_width; lane++) {
            if (lane >= rows)
                continue;
            if (add)
                x[lane] = vf_add(load_channels(row[lane], problem->dtype, d, count), x[lane]);
            store_channels(row[lane], problem->dtype, d, x[lane], count);
        }
    }
}

/* Divides by the sums; a row that kept nothing has sum 0 and becomes 0. */
static void write_out(const fdma_problem *problem, const tile_place *place,
                      const tile_state *tile) {
    for (int64_t first = 0; first < place->rows; first += vf_width) {
        float inverse[vf_width];
        for (int64_t lane = 0; lane < vf_width; lane++)
            inverse[lane] = tile->sum[first + lane] == 0 ? 0 : 1 / tile->sum[first + lane];
        write_lanes(problem, &problem->out, place, tile->out, first, vf_load(inverse), false);
    }
}

#endif
