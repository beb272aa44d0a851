/* A tile: up to most_lanes rows of one kv head. A row is a (query, head of the group) pair and
 * stands in one vector lane. Rows are numbered by query first: row = i * group + head. All data of
 * a tile is stored channel by channel or key by key, with the lanes side by side. */
#pragma once

#include "cpu/common/memory.h"

#include <float.h>
#include <math.h>
#include <string.h>

/* The sink logit of row `row` of kv head g; -inf if the call has none. */
static float sink_of_row(const fdma_problem *problem, int64_t g, int64_t row) {
    const int64_t h = g * problem->group + row % problem->group;
    return is_present(&problem->sink_logit) ? *float_at(&problem->sink_logit, h, 0, 0) : -INFINITY;
}

/* The factor of a row's out: 1 / (sum + exp(sink - max)), where `sum` is the sum of the weights
 * exp(logit - max). If the exponential overflows, the factor is 0. It is also 0 in a row without
 * weights. */
static float inverse_of_sum(double max, float sum, float sink) {
    if (isnan(sink) || sink == INFINITY)
        return NAN;
    return sum == 0 ? 0 : (float)(1 / ((double)sum + exp((double)sink - max)));
}

/* The lse of such a row. Without weights it is the sink logit. */
static float lse_of_row(double max, float sum, float sink) {
    if (sum == 0 && sink == -INFINITY)
        return sink;
    const double top = sum == 0 || (double)sink > max ? (double)sink : max;
    const double weights = sum == 0 ? 0 : (double)sum * exp(max - top);
    return (float)(top + log(weights + exp((double)sink - top))); // NaN if sink is NaN or inf
}

enum {
    block_lanes = tile_vectors * vf_width,  /* lanes that one micro-kernel holds in registers */
    most_lanes = tile_blocks * block_lanes, /* lanes of a tile */
    /* Tiles of the backward pass are smaller, because they hold four times as much. */
    backward_blocks = tile_blocks > 8 ? tile_blocks / 3
    : tile_blocks > 4                 ? tile_blocks / 2
                                      : 4,
    key_groups = key_block / group_keys,
    /* v of a key block is divided into strips: a few channels of every key, side by side */
    strip_channels = (int)vf_width > (int)value_channels ? (int)vf_width : (int)value_channels,
    strip_length = key_block / terms * strip_channels,
    block_weights = block_lanes * key_block / terms, /* words of weights of a block of lanes */
    /* blocks of weights and of products: AMX writes one while it reads another */
    held_blocks = (int)key_step > (int)group_keys ? 2 : 1,
};

_Static_assert(key_block % key_step == 0, "steps of keys fill a block");
_Static_assert(key_step % group_keys == 0, "groups of keys fill a step");
_Static_assert(group_keys % terms == 0, "words of keys fill a group");
_Static_assert(strip_channels % value_channels == 0, "registers of channels fill a strip");

typedef struct row_range {
    int64_t b, g;
    int64_t first, count;
    int32_t first_position, last_position;
} row_range;

/* The buffers of a tile, of dim = tile_dim channels or key_block keys. In q and out the lanes of
 * block n begin at n * (entries of a block). The operands of products are made of words of `terms`
 * channels (q, k) or keys (weights, values). */
typedef struct tile_state {
    float *q;         /* [blocks][dim / terms][block_lanes] */
    float *out;       /* [blocks][dim][block_lanes], not yet divided by sum */
    float *weights;   /* [held_blocks][key_block / terms][block_lanes] */
    float *products;  /* [held_blocks][key_step][block_lanes], for products that leave them in
                         memory */
    float *capped;    /* [group_keys][block_lanes] */
    float *pair_bias; /* [key_block][block_lanes]: attn_bias, of one block of lanes; NULL: none */
    float *max; /* [tile lanes], of logits times logit_unit; may lag behind the true maximum: see
                         most_weight */
    float *sum; /* [tile lanes], of the weights of all key blocks before */
    float *block_sum; /* [block_lanes], of the weights of this key block, for one block of lanes */
    float *k_rows;    /* [key_block][padded_row(dim)]: k of a key block */
    float *values;    /* [strips][key_block / terms][strip_channels]: v of a key block */
    float *zeros;     /* [dim] */

    /* Dropout: the codes of the rows, and the shift of a pair's bits. */
    uint32_t *flips, *adds, *shift; /* [tile lanes] */
} tile_state;

/* head_dim, rounded up to whole steps of the products; the channels beyond it are 0. */
static int64_t tile_dim(const fdma_problem *problem) {
    return round_up(problem->head_dim, channel_step);
}

/* Rows are one cache line longer than needed, which spreads them over the sets of the L1 cache. */
static int64_t padded_row(int64_t dim) { return dim / terms + 16; }

static tile_state take_tile(fdma_arena *arena, const fdma_problem *problem, int64_t lanes) {
    const int64_t dim = tile_dim(problem);
    tile_state tile;
    tile.q = take_floats(arena, lanes * dim / terms);
    tile.out = take_floats(arena, lanes * dim);
    tile.weights = take_floats(arena, held_blocks * block_weights);
    tile.products = take_floats(arena, held_blocks * block_lanes * key_step);
    tile.capped = take_floats(arena, block_lanes * group_keys);
    tile.pair_bias = NULL;
    if (is_present(&problem->attn_bias))
        tile.pair_bias = take_floats(arena, block_lanes * key_block);
    tile.max = take_floats(arena, lanes);
    tile.sum = take_floats(arena, lanes);
    tile.block_sum = take_floats(arena, block_lanes);
    tile.k_rows = take_floats(arena, key_block * padded_row(dim));
    tile.values = take_floats(arena, divide_up(dim, strip_channels) * strip_length);
    tile.zeros = take_floats(arena, dim);
    const int64_t coded = problem->dropout.threshold != 0 ? lanes : 0;
    tile.flips = take_codes(arena, coded);
    tile.adds = take_codes(arena, coded);
    tile.shift = take_codes(arena, coded);
    return tile;
}

/* The lanes of each tile of a problem. Large tiles share each copy of k and v among more rows,
 * small ones give work to more threads. The keys that a tile lists decide the order of its sums,
 * and where 0 * inf gives NaN, so the size depends neither on the number of threads nor on the
 * batch. */
static int64_t lanes_of_tiles(const fdma_problem *problem) {
    enum { fewest_blocks = 4, wanted_tiles = 8 };
    const int64_t blocks = max(divide_up(problem->q_len * problem->group, block_lanes), 1);
    int64_t n = min(blocks, tile_blocks);
    while (n > fewest_blocks && divide_up(blocks, n) < wanted_tiles)
        n--;
    return n * block_lanes;
}

static int64_t tiles_of(const fdma_problem *problem, int64_t lanes) {
    return divide_up(problem->q_len * problem->group, lanes);
}

/* The position of a row; -1 if it stands before every key. Without a causal mask every row stands
 * at the last key. */
static int32_t row_position(const fdma_problem *problem, int64_t row) {
    const int64_t p = query_position(problem, row / problem->group);
    return (int32_t)(!problem->causal ? problem->kv_len - 1 : p < -1 ? -1 : p);
}

/* All rows of one (b, g), numbered by `head`; their positions are not set. */
static row_range rows_of_head(const fdma_problem *problem, int64_t head) {
    return (row_range){.b = head / problem->kv_heads, .g = head % problem->kv_heads};
}

static row_range rows_of_tile(const fdma_problem *problem, int64_t head, int64_t lanes,
                              int64_t index) {
    row_range rows = rows_of_head(problem, head);
    rows.first = index * lanes;
    rows.count = min(problem->q_len * problem->group - rows.first, lanes);
    rows.first_position = row_position(problem, rows.first);
    rows.last_position = row_position(problem, rows.first + rows.count - 1);
    return rows;
}

/* A lane's row in a tensor of q's shape. */
static void *row_of_lane(const fdma_problem *problem, const fdma_tensor *tensor,
                         const row_range *rows, int64_t lane) {
    const int64_t row = rows->first + lane, first_head = rows->g * problem->group;
    return head_row(tensor, rows->b, row / problem->group, first_head + row % problem->group);
}

/* A lane's element of a float32 tensor of lse's shape. */
static float *float_of_lane(const fdma_problem *problem, const fdma_tensor *tensor,
                            const row_range *rows, int64_t lane) {
    const int64_t row = rows->first + lane, first_head = rows->g * problem->group;
    return float_at(tensor, rows->b, first_head + row % problem->group, row / problem->group);
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

/* Number of channels from d to d + vf_width - 1 that exist. */
static inline int64_t channels_at(int64_t d, int64_t dim) {
    return d > dim ? 0 : dim - d < vf_width ? dim - d : vf_width;
}

/* <x, y> of two rows, in double precision. Four sums hide the latency of an addition. */
static double product_of_rows(const void *x, const void *y, fdma_dtype dtype, int64_t dim) {
    double sum[4] = {0};
    for (int64_t d = 0; d < dim; d += vf_width) {
        const int64_t count = channels_at(d, dim);
        float left[vf_width], right[vf_width];
        vf_store(left, load_channels(x, dtype, d, count));
        vf_store(right, load_channels(y, dtype, d, count));
        for (int64_t n = 0; n < count; n++)
            sum[n % 4] += (double)left[n] * (double)right[n];
    }
    return sum[0] + sum[1] + (sum[2] + sum[3]);
}

/* Writes a row of channels times a factor; with `add` adds them to the row. */
static inline void write_row(const fdma_problem *problem, void *to, const float *from, float factor,
                             bool add) {
    for (int64_t d = 0; d < problem->head_dim; d += vf_width) {
        const int64_t count = channels_at(d, problem->head_dim);
        vf x = vf_mul(vf_load_first(from + d, count), vf_set(factor));
        if (add)
            x = vf_add(load_channels(to, problem->dtype, d, count), x);
        store_channels(to, problem->dtype, d, x, count);
    }
}

static inline void load_row(float *to, const void *row, fdma_dtype dtype, int64_t dim) {
    for (int64_t d = 0; d < dim; d += vf_width) {
        const int64_t count = channels_at(d, dim);
        vf_store_first(to + d, load_channels(row, dtype, d, count), count);
    }
}

/* `count` words, at most vf_width, of a row of q or k. */
static inline vf load_words(const void *row, fdma_dtype dtype, int64_t word, int64_t count) {
    if (terms == 2) // two 16-bit channels, as they are in memory
        return vf_load_first((const float *)row + word, count);
    return load_channels(row, dtype, word, count);
}

/* The offset of a lane in a buffer of tile_state with `entries` entries per lane. */
static int64_t lane_offset(int64_t entries, int64_t lane) {
    return lane / block_lanes * entries * block_lanes + lane % block_lanes;
}

static int64_t used_lanes(const row_range *rows) { return round_up(rows->count, block_lanes); }

/* The addresses of the rows in vf_width lanes; lanes beyond the last row get its address. */
static void find_lanes(const fdma_problem *problem, const fdma_tensor *tensor,
                       const row_range *rows, int64_t first, void *row[vf_width]) {
    const int64_t group = problem->group, last = rows->count - 1;
    const int64_t base = rows->first + min(first, last);
    const int64_t origin = rows->b * tensor->stride[0] + rows->g * group * tensor->stride[2];
    int64_t i = base / group, head = base % group;
    for (int64_t lane = 0; lane < vf_width; lane++) {
        row[lane] = row_at(tensor, origin + i * tensor->stride[1] + head * tensor->stride[2]);
        if (first + lane >= last)
            continue;
        i += head == group - 1;
        head = head == group - 1 ? 0 : head + 1;
    }
}

/* Transposes the rows of a tensor of q's shape into lanes; lanes beyond the last row repeat it.
 * Rows that are left_out (which may be NULL) become 0. */
static void pack_rows(const fdma_problem *problem, const fdma_tensor *tensor, const row_range *rows,
                      float *packed, const uint8_t *left_out, const float *zeros) {
    const int64_t words = problem->head_dim / terms, tile_words = tile_dim(problem) / terms;
    for (int64_t first = 0; first < used_lanes(rows); first += vf_width) {
        void *row[vf_width];
        const void *from[vf_width];
        float *const to = packed + lane_offset(tile_words, first);
        find_lanes(problem, tensor, rows, first, row);
        for (int64_t lane = 0; lane < vf_width; lane++)
            from[lane] = left_out != NULL && left_out[first + lane] ? zeros : row[lane];
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

static void clear_tile(tile_state *tile, const row_range *rows, int64_t dim) {
    for (int64_t d = 0; d < dim; d++)
        tile->zeros[d] = 0;
    for (int64_t lane = 0; lane < used_lanes(rows); lane++) {
        tile->max[lane] = -FLT_MAX;
        tile->sum[lane] = 0;
    }
}

/* The maximum of a lane's logits. */
static double max_of_lane(const tile_state *tile, int64_t lane) {
    return (double)tile->max[lane] * (terms == 2 ? 0.69314718055994531 : 1); // log(2)
}

static void write_lse(const fdma_problem *problem, const row_range *rows, const tile_state *tile) {
    for (int64_t lane = 0; lane < rows->count; lane++) {
        const float sink = sink_of_row(problem, rows->g, rows->first + lane);
        *float_of_lane(problem, &problem->lse, rows, lane) =
            lse_of_row(max_of_lane(tile, lane), tile->sum[lane], sink);
    }
}

/* Writes a vector of lanes, each times its factor, to their rows of a tensor of q's shape; with
 * `add` adds them to the rows. */
INLINE void write_lanes(const fdma_problem *problem, const fdma_tensor *tensor,
                        const row_range *rows, const float *from, int64_t first, vf factor,
                        bool add) {
    const int64_t dim = problem->head_dim;
    const int64_t used = min(rows->count - first, vf_width);
    const float *const lanes = from + lane_offset(tile_dim(problem), first);
    void *row[vf_width];
    find_lanes(problem, tensor, rows, first, row);
    for (int64_t d = 0; d < dim; d += vf_width) {
        const int64_t count = channels_at(d, dim);
        vf x[vf_width];
        UNROLL
        for (int c = 0; c < vf_width; c++)
            x[c] = vf_mul(vf_load(lanes + (d + (c < count ? c : 0)) * block_lanes), factor);
        vf_transpose(x);
        UNROLL
        for (int lane = 0; lane < vf_width; lane++) {
            if (lane >= used)
                continue;
            if (add)
                x[lane] = vf_add(load_channels(row[lane], problem->dtype, d, count), x[lane]);
            store_channels(row[lane], problem->dtype, d, x[lane], count);
        }
    }
}

/* Writes out, divided by the sums and by the probability of keeping a pair. */
static void write_out(const fdma_problem *problem, const row_range *rows, const tile_state *tile) {
    const float scale = (float)dropout_scale(problem->dropout.threshold);
    for (int64_t first = 0; first < rows->count; first += vf_width) {
        float inverse[vf_width];
        for (int64_t lane = 0; lane < vf_width; lane++) {
            const int64_t at = first + lane;
            const float sink = sink_of_row(problem, rows->g, rows->first + at);
            inverse[lane] = scale * inverse_of_sum(max_of_lane(tile, at), tile->sum[at], sink);
        }
        write_lanes(problem, &problem->out, rows, tile->out, first, vf_load(inverse), false);
    }
}
