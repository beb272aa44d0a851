/* Common definitions for sm90's forward kernel (forward.cu) and its launch (host.cu): the
 * configuration, shared memory with its barriers, and the order of the row tiles. */
#pragma once

#include "cuda/device/gather.cuh"
#include "cuda/device/softmax.cuh"
#include "cuda/device/view.cuh"
#include "cuda/plan/plan.cuh"

#include <stdint.h>

/* Division by a number that the host knows, as a multiplication: a division of integers takes about
 * 20 instructions. Source: T. Granlund and P. Montgomery, Division by Invariant Integers using
 * Multiplication. */

/* Divides numbers from 0 to 2^31 - 1. With 2^(s - 1) < value <= 2^s, shift is 31 + s, and factor is
 * 2^shift / value, rounded up. So n * factor / 2^shift is too large by less than n / 2^shift, which
 * is less than 1 / value: the quotient never reaches the next integer. */
struct divisor {
    int32_t value;
    uint32_t factor, shift;

    __device__ int32_t divide(int32_t n) const {
        return (int32_t)((uint64_t)(uint32_t)n * factor >> shift);
    }

    __device__ int32_t remainder(int32_t n) const { return n - divide(n) * value; }
};

/* ---- carried keys ---- */

/* Rows of k or v in two pieces, carried keys and keys of the call (fdma.h, "Streams"), as sources
 * of gather_rows(). The index of a row counts units from a base. If the pieces are near each other
 * they have the same base, so that the copies cost the same as with one piece. Otherwise the
 * highest bit of an index selects one of two bases. */

/* The strides of rows. The rows of keys below carried_len are in the first piece, from its row 0
 * on; the rows of the other keys are in the second one, from its row 0 on. */
struct row_strides {
    uint32_t carried_len;  // 0: there is one piece, the unit is its stride, and a key is its index
    uint32_t unit;         // bytes
    uint32_t shift;        // the logarithm of the unit, if there are two pieces
    uint32_t carried, own; // units between two rows of a piece
    bool is_far;           // the pieces have bases of their own
};

/* The rows of one (b, g). Indices are modulo 2^32. */
struct piece_rows {
    const char *base;
    uint32_t carried, own; // the index of key 0 if it were in either piece
};

/* The rows of one (b, g) in pieces with bases of their own. */
struct far_rows {
    const char *carried, *own;
    uint32_t unit;

    static constexpr uint32_t of_own = 1u << 31; // marks the index of a row of the second piece

    __device__ const char *at(uint32_t n) const {
        return (const char *)mad_wide_u32(n & ~of_own, unit,
                                          (uint64_t)((n & of_own) != 0 ? own : carried));
    }

    __device__ far_rows operator+(int bytes) const { return {carried + bytes, own + bytes, unit}; }
};

__device__ static piece_rows rows_of(const row_strides &strides, const head_view &carried,
                                     const head_view &own, int32_t b, int32_t g) {
    const char *const second = rows_of(own, b, g);
    if (strides.carried_len == 0)
        return {second, 0, 0};
    const char *const first = rows_of(carried, b, g), *const base = first < second ? first : second;
    return {base, (uint32_t)((uint64_t)(first - base) >> strides.shift),
            (uint32_t)((uint64_t)(second - base) >> strides.shift) -
                strides.carried_len * strides.own};
}

/* The index of a key's row; no_row stays no_row. */
__device__ static uint32_t index_of(const row_strides &strides, const piece_rows &rows,
                                    uint32_t key) {
    if (strides.carried_len == 0 || key == no_row)
        return key;
    return key < strides.carried_len ? rows.carried + key * strides.carried
                                     : rows.own + key * strides.own;
}

__device__ static uint32_t far_index_of(const row_strides &strides, uint32_t key) {
    if (key == no_row)
        return key;
    return key < strides.carried_len ? key * strides.carried
                                     : far_rows::of_own + (key - strides.carried_len) * strides.own;
}

/* element: of q, k, v and out. most_channels: head_dim, rounded up to a shape that is built.
 * softcap, mask, drops and pairs: with softcap, attn_mask, dropout and attn_bias. The code of
 * softcap in the loop would cost calls without it 7%. With `pairs`, a config with softcap and
 * dropout serves calls without one of them, too, and those without attn_bias. */
template <typename element_, int most_channels, bool softcap, bool mask, bool drops_, bool pairs>
struct forward_config {
    using element = element_;
    static constexpr bool has_softcap = softcap, has_mask = mask, drops = drops_;
    static constexpr bool has_pairs = pairs;
    static constexpr int channels = most_channels;
    static constexpr int panels = channels / panel_channels;
    static constexpr int row_bytes = panels * line_bytes;
    static constexpr int consumers = 2;                     // warpgroups
    static constexpr int warpgroup_rows = 64;               // of a wgmma
    static constexpr int rows = consumers * warpgroup_rows; // (query, head of the group) pairs
    // keys of a key block. A consumer's S and out take (key_rows + channels) / 2 registers, its two
    // copies of the weights key_rows / 2, and attn_bias key_rows / 2
    static constexpr int key_rows = channels > 128 || has_pairs ? 64 : 128;
    // attn_bias of a key block before its S, otherwise of 16 keys when it is added
    static constexpr bool loads_pairs_ahead = has_pairs && channels <= 128;
    static constexpr int short_keys = key_rows == 128 ? 64 : key_rows; // of a tile's last block
    static constexpr int most_stages = channels > 128  ? 5
                                       : channels > 64 ? 768 / key_rows
                                                       : 1536 / key_rows;
    // stages that fit in shared memory, where dropout's codes and more masks cost one stage
    static constexpr int kv_stages =
        most_stages - ((drops || has_pairs) && channels > 64 && channels <= 128 ? 1 : 0) -
        (drops && channels > 128 ? 1 : 0);
    // 3 do not fit with 128 channels. The producer is at most as many key blocks ahead
    static constexpr int mask_stages = has_pairs && channels <= 128 ? 6 : channels > 64 ? 2 : 4;
    static constexpr int threads = (consumers + 1) * warpgroup_threads;
    // with 40 registers the producer waits until its copies have read their address registers,
    // which costs 10%; with softcap the consumers need the rest
    static constexpr bool is_tight = has_softcap && channels != 128 && !has_pairs;
    static constexpr int producer_registers = is_tight ? 40 : 56;
    static constexpr int consumer_registers = is_tight ? 232 : 224;
    static constexpr int warp_keys = key_rows / warpgroup_warps; // that a producer's warp loads
};

/* A range of positions relative to the tile's first: from <= p < end. */
struct position_range {
    int16_t from, end;
};

static constexpr int16_t past_tile = INT16_MAX;

static constexpr int octet_keys = 8; // of a core matrix of wgmma, 16 bytes
static constexpr int bias_terms = 3; // 8 bits of the significand each: a float32

/* The biases of eight keys as a matrix to be multiplied by ones: the sum of a key's terms is bias /
 * scale. wgmma reads 16 rows. The rows after bias_terms are the octets that follow. wgmma
 * multiplies them by 0, so nothing here may be inf or NaN, because 0 * inf is NaN. */
struct bias_octet {
    __nv_bfloat16 terms[bias_terms][octet_keys];
};

/* The mask of a key block: biases, and the positions at which each key is kept. */
template <class config> struct alignas(16) block_mask {
    static constexpr int octets = config::key_rows / octet_keys;
    union {
        bias_octet octet[octets + 2]; // the last ones are 0
        float bias[config::key_rows]; // with softcap: times log2(e), in the order of mask_index()
    };
    position_range kept[config::key_rows];               // in the order of mask_index()
    uint32_t code[config::drops ? config::key_rows : 1]; // of dropout, in the same order
    // for each warp of the producer one bit per 16 keys: some row does not keep all of them
    uint8_t is_partial[warpgroup_warps];
    // the same, with attn_bias: it cannot be read four keys at a time
    uint8_t is_scattered[warpgroup_warps];
    // with attn_bias, in the same order as `kept`; -1: no row keeps it
    alignas(config::has_pairs ? 16 : 4) int32_t key[config::has_pairs ? config::key_rows : 1];
};

/* Dropout's code of a row. The bits of its pairs are the upper half of dropout_product() if its
 * position is odd; if it is even, the lower half xor the upper one. */
struct alignas(16) drop_code {
    row_code code;
    uint32_t fold; // a factor that moves the lower half to the upper one; 0 if odd
};

/* The index of a key in a mask. Of each 16 keys, the four in the columns of a thread's accumulators
 * are neighbours: 2 q, 2 q + 1, 2 q + 8 and 2 q + 9 for lane q of a quad. */
__device__ static int32_t mask_index(int32_t column) {
    const int32_t inside = column % 16;
    return column - inside + inside % 8 / 2 * 4 + inside / 8 * 2 + inside % 2;
}

/* `rows` consecutive rows of one kv head. Row r is query r / group of head r % group. */
struct row_tile {
    int32_t b, g;
    int32_t first_row, end_row; // of this kv head's rows
    int32_t query;              // of first_row
    int32_t first, last;        // positions of its first and last row; 0 if all rows see the same
                                // keys
};

/* The data of a tile for the consumers. */
struct tile_header {
    row_tile tile;
    int32_t entries; // of the tile's list; -1: there are no more tiles
};

/* Two, because the producer writes the header of a tile while consumers still read the previous
 * one. */
static constexpr int tile_headers = 2;

/* The key blocks of a tile: `whole` of key_rows keys, at least one, and then perhaps one of
 * short_keys. */
struct block_count {
    int32_t whole;
    bool has_short;
};

template <class config> __device__ static block_count count_blocks(int32_t entries) {
    const int32_t full = entries / config::key_rows, rest = entries % config::key_rows;
    const bool has_short =
        config::short_keys < config::key_rows && full > 0 && 0 < rest && rest <= config::short_keys;
    return {has_short ? full : max(full + (rest > 0), 1), has_short};
}

/* Shared memory, and its barriers. P: the 128 threads of the producer. C: the 256 threads of both
 * consumers, in 8 warps.
 *
 * name          arrivals  who arrives                               who waits             phase
 * q_ready       129       P: each thread, when its copies of q are  C: before a tile      tile
 *                         complete; thread 0 once more, when it
 *                         has written the header
 * q_free        256       C: each thread, when the tile's last S    P: before it loads q  tile
 *                         is complete
 * kv_ready[i]   128       P: each thread, when its copies of k or   C: before S or O      use of
 *                         v are complete                                                  stage i
 * kv_free[i]    8         C: lane 0 of each warp, when the S or O   P: before it loads    use of
 *                         that reads the stage is complete          k or v                stage i
 * mask_ready[i] 128       P: each thread, when it has written the   C: before S, which    use of
 *                         mask of its key                           adds the biases       stage i
 * mask_free[i]  256       C: each thread, when it has masked S, or  P: before it writes   use of
 *                         with dropout when it has dropped weights  the mask              stage i
 *
 * A key block uses a kv stage for k, another for v, and a mask stage. P loads k one key block ahead
 * of v, so C waits for k of the first block and for v of each: all earlier loads are complete then.
 * P waits for the opposite parity of q_free, kv_free and mask_free, so that its first waits pass at
 * once. The header that says that there are no more tiles is one more phase of q_ready.
 *
 * The named barriers 1 and 2 pass the right to issue products from consumer to consumer. Their
 * arrivals are 128 threads that arrive and 128 that wait.
 *
 * number        arrivals  who arrives                               who waits             phase
 * 0             384       all, by __syncthreads(), when the mbarriers are initialised     once
 * 1             256       consumer 1: at the start of the kernel,   consumer 0: before    key
 *                         and when it has issued S and O            it issues S and O     block
 * 2             256       consumer 0: when it has issued S and O    consumer 1: before    key
 *                                                                   it issues S and O     block
 *
 * The first key block of a tile needs neither, because there is no O before it.
 *
 * mask comes before kv because compute-sanitizer takes the matrix of biases to be 4 KB long, and
 * would find it past the end of shared memory. */
template <class config> struct forward_memory {
    alignas(1024) uint8_t q[config::rows * config::row_bytes];
    block_mask<config> mask[config::mask_stages];
    drop_code code[config::drops ? config::rows : 1]; // of the tile's rows
    tile_header header[tile_headers];
    uint64_t q_ready, q_free;
    uint64_t kv_ready[config::kv_stages], kv_free[config::kv_stages];
    uint64_t mask_ready[config::mask_stages], mask_free[config::mask_stages];
    alignas(1024) uint8_t kv[config::kv_stages][config::key_rows * config::row_bytes];
    static constexpr int most_bytes = 227 * 1024; // limit for a block's shared memory on 9.0
};

template <class config> __device__ static void init_barriers(forward_memory<config> *memory) {
    const int consumer_threads = config::consumers * warpgroup_threads;
    const int warps = config::consumers * warpgroup_warps;
    mbarrier_init(&memory->q_ready, warpgroup_threads + 1); // and the header
    mbarrier_init(&memory->q_free, consumer_threads);
    for (int i = 0; i < config::kv_stages; i++) {
        mbarrier_init(&memory->kv_ready[i], warpgroup_threads);
        mbarrier_init(&memory->kv_free[i], warps);
    }
    for (int i = 0; i < config::mask_stages; i++) {
        mbarrier_init(&memory->mask_ready[i], warpgroup_threads);
        mbarrier_init(&memory->mask_free[i], consumer_threads);
    }
    fence_mbarrier_init();
}

struct key_strides {
    row_strides k, v;
};

/* The position of a query of sequence b; 0 if all queries see the same keys. */
__device__ static int32_t row_position(const forward_plan &plan, int32_t b, int32_t query) {
    return plan.by_position ? query_position(plan, b, query) : 0;
}

/* The position of a query relative to the first row of a tile. */
__device__ static int32_t position_in_tile(const forward_plan &plan, const row_tile &tile,
                                           int32_t query) {
    return plan.by_position ? query - tile.query : 0;
}

/* The order in which tiles are computed: from the last position, which has the most work, to the
 * first, for a few heads at a time, so that L2 holds their keys. */
struct tile_order {
    int32_t tiles; // of a head
    int32_t heads; // batch * kv_heads
    divisor group, kv_heads;
    divisor together;      // heads that are computed together
    divisor last_together; // heads of the last group, which may have fewer
    divisor turn;          // tiles of all heads that are computed together
};

/* Tile `index` in this order, below tiles * heads. The order of heads is rotated from one position
 * to the next. Otherwise a thread block would always get the same heads, and heads differ
 * in the cost of their softmax. */
template <class config>
__device__ static row_tile tile_at(const forward_plan &plan, const tile_order &order,
                                   int32_t index) {
    const int32_t first_head = order.turn.divide(index) * order.together.value;
    const bool is_last = first_head + order.together.value > order.heads;
    const divisor together = is_last ? order.last_together : order.together;
    const int32_t n = order.turn.remainder(index);
    const int32_t from_end = together.divide(n); // tiles of the same head that come after it
    const int32_t turned = n + from_end + together.divide(from_end);
    const int32_t head = first_head + together.remainder(turned);
    row_tile tile;
    tile.b = order.kv_heads.divide(head);
    tile.g = order.kv_heads.remainder(head);
    tile.first_row = (order.tiles - 1 - from_end) * config::rows;
    tile.end_row = min(tile.first_row + config::rows, plan.q_len * plan.group);
    tile.query = order.group.divide(tile.first_row);
    tile.first = row_position(plan, tile.b, tile.query);
    tile.last = row_position(plan, tile.b, order.group.divide(tile.end_row - 1));
    return tile;
}

/* The kernel for a plan, with the numbers of its config that its launch needs. */
struct forward_kernel {
    void (*attend)(forward_plan plan, key_strides strides, tile_order order, float softcap_scale,
                   float bias_scale);
    int32_t rows, row_bytes, threads;
    size_t shared_bytes;
};

/* Built for the head_dims of the build matrix, of which most_channels is one. */
template <int most_channels>
forward_kernel fdma_cuda_sm90_kernel(const forward_plan &plan, bool is_float16);
