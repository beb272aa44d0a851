/* Common definitions for sm90's forward kernel (forward.cu) and its launch (host.cu): the
 * configuration, shared memory with its barriers, the order of the row tiles, and what a consumer's
 * thread does with its two rows: softmax, dropout and attn_bias. */
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
 * dropout serves calls without one of them, too, and those without attn_bias. blocks: see below. */
template <typename element_, int most_channels, bool softcap, bool mask, bool drops_, bool pairs,
          int blocks_ = 1>
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
    // thread blocks of a multiprocessor. Of two, one computes while the other waits for its queries
    // or writes its results, but they have registers for 64 channels and one copy of the weights
    static constexpr int blocks = blocks_;
    static constexpr bool takes_turns = blocks == 1; // the consumers, at issuing products
    // keys of a key block. A consumer's S and out take (key_rows + channels) / 2 registers, its two
    // copies of the weights key_rows / 2, and attn_bias key_rows / 2
    static constexpr int key_rows = channels > 128 || has_pairs || blocks == 2 ? 64 : 128;
    // attn_bias of a key block before its S, otherwise of 16 keys when it is added
    static constexpr bool loads_pairs_ahead = has_pairs && channels <= 128;
    static constexpr int short_keys = key_rows == 128 ? 64 : key_rows; // of a tile's last block
    static constexpr int most_stages = blocks == 2      ? 10
                                       : channels > 128 ? 5
                                       : channels > 64  ? 768 / key_rows
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
    static constexpr int producer_registers = blocks == 2 ? 48 : is_tight ? 40 : 56;
    static constexpr int consumer_registers = blocks == 2 ? 96 : is_tight ? 232 : 224;
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
 * The first key block of a tile needs neither, because there is no O before it. With two thread
 * blocks of a multiprocessor consumers take no turns. There, at the barriers 1 and 2, the 128
 * threads of consumer 0 and of consumer 1 find out whether one of their rows must raise row_max.
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
    // limits for the shared memory of a block, and of a multiprocessor, on 9.0
    static constexpr int most_bytes = config::blocks == 1 ? 227 * 1024 : 113 * 1024;
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
    int32_t blocks; // of a multiprocessor
    size_t shared_bytes;
};

/* Built for the head_dims of the build matrix, of which most_channels is one. */
template <int most_channels>
forward_kernel fdma_cuda_sm90_kernel(const forward_plan &plan, bool is_float16);

/* ---- the softmax of a thread's two rows ---- */

/* The most that a thread's weights of a row may sum to in one key block before row_max is raised:
 * large enough that sums are almost never rescaled, and small enough for every weight to fit
 * float16. */
static constexpr float most_sum = 32768;

/* From here on float32 has no fractions, and the rounding error of a product may exceed the
 * exponents of weights. The product must then be rounded before row_max is subtracted, so that the
 * two errors cancel; a fused multiply-add would not round it. */
static constexpr float most_row_max = 1 << 24;

/* The base that is subtracted from the logits of a row. It is not -inf, because -inf - -inf is
 * NaN. */
__device__ static float base_of(float row_max) { return row_max == -INFINITY ? 0 : row_max; }

/* Who raises row_max together: nobody, the threads of a warp, or all of a consumer. */
enum raising { none_raises, warp_raises, consumer_raises };

/* The state of a thread's two rows: row_max, and this thread's share of row_sum, the sum of
 * 2^(logit - row_max). Logits are unit * products. Both are in the order of accumulators: [8
 * columns][row][2 columns]. NaN never becomes a maximum; it shows in the sum. */
struct row_softmax {
    float row_max[2] = {-INFINITY, -INFINITY};
    float row_sum[2] = {0, 0};

    /* Raises row_max to the maximum of the logits, if that is greater. rescale: the factor for all
     * earlier weights. */
    template <int registers>
    __device__ void raise(const float (&logits)[registers], float (&rescale)[2]) {
#pragma unroll
        for (int row = 0; row < 2; row++) {
            float most[4]; // four independent maxima, to cut the latency to a quarter
#pragma unroll
            for (int i = 0; i < registers / 2; i++) {
                const float logit = logits[i / 2 * 4 + 2 * row + i % 2];
                most[i % 4] = i < 4 ? logit : fmaxf(most[i % 4], logit);
            }
            const float maximum = quad_max(fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3])));
            const bool exceeds = maximum > row_max[row];
            rescale[row] = exceeds ? ex2_approx(row_max[row] - maximum) : 1;
            row_max[row] = exceeds ? maximum : row_max[row];
            row_sum[row] *= rescale[row];
        }
    }

    /* weights = 2^(logit - row_max), in pairs, and adds them to row_sum. Returns false and adds
     * nothing if row_max must be raised first. This needs no maximum of the logits, because a
     * row_max that is too low shows in the sum of the weights. barrier: of consumer_raises. */
    template <typename element, raising together, int registers>
    __device__ bool weigh(const float (&products)[registers], float unit,
                          uint32_t (&weights)[registers / 8][4], uint32_t barrier = 0) {
        const float base[2] = {base_of(row_max[0]), base_of(row_max[1])};
        float partial[2][2] = {{0, 0}, {0, 0}}; // two sums per row, to halve the latency
#pragma unroll
        for (int i = 0; i < registers; i += 8) {
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const int row = k % 2;
                const float low = ex2_approx(fmaf(products[i + 2 * k], unit, -base[row]));
                const float high = ex2_approx(fmaf(products[i + 2 * k + 1], unit, -base[row]));
                partial[row][0] += low;
                partial[row][1] += high;
                weights[i / 8][k] = element_type<element>::pack(low, high);
            }
        }
        const float sum[2] = {partial[0][0] + partial[0][1], partial[1][0] + partial[1][1]};
        const bool is_low =
            fmaxf(sum[0], sum[1]) > most_sum ||
            !(fmaxf(fabsf(row_max[0]), fabsf(row_max[1])) < most_row_max); // true for -inf too
        if (together == warp_raises && __any_sync(~0u, is_low))
            return false;
        if (together == consumer_raises && bar_red_or(barrier, warpgroup_threads, is_low))
            return false;
        row_sum[0] += sum[0];
        row_sum[1] += sum[1];
        return true;
    }
};

/* Dropout's code of a row of a tile; arbitrary past the last row. */
__device__ static drop_code drop_code_of(const forward_plan &plan, const row_tile &tile,
                                         int32_t row) {
    const int32_t position = query_position(plan, tile.b, row / plan.group);
    const int32_t head = tile.g * plan.group + row % plan.group;
    return {row_code_of(plan, tile.b, head, position), position % 2 != 0 ? 0 : 1u << 16};
}

/* Clears the weights of dropped pairs. rows: codes of this thread's two rows. keys: codes of the
 * keys of a block, in the order of mask_index(). threshold: as in dropout_params. */
template <int steps>
__device__ static void drop_pairs(const drop_code (&rows)[2], const uint32_t *keys,
                                  uint32_t threshold, uint32_t (&weights)[steps][4]) {
    const uint32_t limit = threshold << 16;
#pragma unroll
    for (int i = 0; i < steps; i++) {
        const uint4 four = ((const uint4 *)keys)[i * 4 + threadIdx.x % 4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const drop_code &row = rows[k % 2];
            const uint32_t low = dropout_product(row.code, k < 2 ? four.x : four.z);
            const uint32_t high = dropout_product(row.code, k < 2 ? four.y : four.w);
            if ((low ^ low * row.fold) < limit)
                weights[i][k] &= 0xffff0000;
            if ((high ^ high * row.fold) < limit)
                weights[i][k] &= 0xffff;
        }
    }
}

/* ---- attn_bias ----
 *
 * The producer puts the keys of a block into the order of mask_index(), in which a consumer's
 * thread has four successive ones of each 16, and says where these are neighbours in memory. The
 * thread reads the biases of its two rows itself, and adds them to its products. */

/* attn_bias of a key block for a thread's two rows, of each 16 keys four: as they are in memory if
 * they are neighbours, otherwise one in each word. */
template <class config> struct pair_biases {
    uint32_t word[2][config::loads_pairs_ahead ? config::key_rows / 4 : 1];
};

struct no_pair_biases {};

/* attn_bias of a thread's two rows. */
struct pair_rows {
    const char *row[2];
};

/* attn_bias of a thread's rows `own_row` and own_row + 8 of a kv head. Past the last row it is the
 * last row's. */
template <typename element>
__device__ static pair_rows find_pair_rows(const forward_plan &plan, const divisor &group,
                                           const row_tile &tile, int32_t own_row) {
    const pair_view &bias = plan.pair_bias;
    const int64_t size = bias.dtype == pair_view::float32 ? sizeof(float) : sizeof(element);
    pair_rows pairs;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int32_t row = min(own_row + 8 * i, tile.end_row - 1), query = group.divide(row);
        const int32_t h = tile.g * plan.group + group.remainder(row);
        pairs.row[i] = (const char *)bias.data + size * bias.offset(tile.b, h, query, 0);
    }
    return pairs;
}

/* Writes the key of a producer's lane, and whether each four of 16 keys are neighbours whose biases
 * can be read as one vector. */
template <class config>
__device__ static void write_pair_key(const forward_plan &plan, block_mask<config> *to,
                                      int32_t column, int32_t key) {
    const int32_t n = mask_index(column), lane = threadIdx.x % 32;
    const int32_t first = __shfl_sync(~0u, key, lane / 16 * 16 + lane % 8 / 2 * 2);
    const pair_view &bias = plan.pair_bias;
    const bool is_vector = bias.key == 1 && (uintptr_t)bias.data % 16 == 0 &&
                           (first | bias.query | bias.head | bias.batch) % 4 == 0;
    const uint32_t scattered = __ballot_sync(~0u, !is_vector || key != first + n % 4);
    to->key[n] = key;
    if (lane == 0)
        to->is_scattered[column / config::warp_keys] =
            (scattered & 0xffff) != 0 | (scattered >> 16 != 0) << 1;
}

/* True if each four of 16 keys of a block are neighbours. */
template <class config>
__device__ static bool reads_vectors(const block_mask<config> *from, int group) {
    const int keys = 16 * group, warp = keys / config::warp_keys;
    const uint32_t bits = *(const uint32_t *)from->is_scattered;
    return (bits >> (warp * 8 + keys % config::warp_keys / 16) & 1) == 0;
}

/* Starts to load attn_bias of this lane's four of 16 keys from a row: as one vector, two words of
 * 16-bit elements or four, or one by one. Absent keys get 0. */
template <typename number>
__device__ static void load_four(const char *row, const int4 &keys, int64_t stride, bool is_vector,
                                 uint32_t *four) {
    const int32_t each[4] = {keys.x, keys.y, keys.z, keys.w};
    if (is_vector && sizeof(number) == sizeof(uint16_t)) {
        const uint2 all = *(const uint2 *)(row + keys.x * sizeof(number));
        four[0] = all.x, four[1] = all.y;
    } else if (is_vector) {
        const uint4 all = *(const uint4 *)(row + keys.x * sizeof(number));
        four[0] = all.x, four[1] = all.y, four[2] = all.z, four[3] = all.w;
    } else {
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const uint64_t at =
                mad_wide_u32((uint32_t)each[n], (uint32_t)(stride * sizeof(number)), (uint64_t)row);
            four[n] = each[n] < 0 ? 0 : *(const number *)at;
        }
    }
}

/* Starts to load attn_bias of 16 keys of a block for both rows. */
template <class config>
__device__ static void load_group(const forward_plan &plan, const pair_rows &rows,
                                  const block_mask<config> *from, int group, uint32_t *first,
                                  uint32_t *second) {
    const pair_view &bias = plan.pair_bias;
    const int4 keys = *(const int4 *)&from->key[16 * group + threadIdx.x % 4 * 4];
    const bool is_vector = reads_vectors(from, group);
    if (bias.dtype == pair_view::float32) {
        load_four<uint32_t>(rows.row[0], keys, bias.key, is_vector, first);
        load_four<uint32_t>(rows.row[1], keys, bias.key, is_vector, second);
    } else {
        load_four<uint16_t>(rows.row[0], keys, bias.key, is_vector, first);
        load_four<uint16_t>(rows.row[1], keys, bias.key, is_vector, second);
    }
}

/* Adds attn_bias, times a factor, to the products of 16 keys. first, second: from load_group(). */
template <typename element>
__device__ static void add_group(const pair_view &bias, float factor, bool is_vector,
                                 const uint32_t *first, const uint32_t *second, float *products) {
    const uint32_t *const words[2] = {first, second};
    if (bias.dtype == pair_view::float32) {
#pragma unroll
        for (int k = 0; k < 8; k++)
            products[k] =
                fmaf(__uint_as_float(words[k / 2 % 2][k / 4 * 2 + k % 2]), factor, products[k]);
        return;
    }
#pragma unroll
    for (int k = 0; k < 8; k += 2) {
        const uint32_t *const four = words[k / 2 % 2];
        const uint32_t pair =
            is_vector ? four[k / 4] : prmt(four[k / 4 * 2], four[k / 4 * 2 + 1], 0x5410);
        const float2 both = unpack<element>(pair);
        products[k] = fmaf(both.x, factor, products[k]);
        products[k + 1] = fmaf(both.y, factor, products[k + 1]);
    }
}
