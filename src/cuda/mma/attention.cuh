/* Attention of a tile of query rows with mma.sync: loading rows and keys, logits, masks, the online
 * softmax and dropout. The rows are (query, head of the group) pairs of one kv head, the heads of a
 * query side by side. */
#pragma once

#include "cuda/device/softmax.cuh"
#include "cuda/mma/tile.cuh"
#include "cuda/plan/plan.cuh"

/* The rows of (b, g) from `first` on. Row r is head r % group of query r / group. */
struct row_range {
    int32_t b, g;
    int32_t first;
    int32_t total; // rows of (b, g); a tile's last rows may be past the end
};

__device__ static row_range row_range_of(const forward_plan &plan, int32_t head, int32_t first) {
    return {head / plan.kv_heads, head % plan.kv_heads, first, plan.q_len * plan.group};
}

/* The position of a row in a sequence of kv_len keys; past the end, the position of the last
 * row. */
__device__ static int32_t row_position(const forward_plan &plan, const row_range &range,
                                       int32_t kv_len, int32_t row) {
    return min(row, range.total - 1) / plan.group + kv_len - plan.q_len;
}

/* Maps row r of the warp's tiles to a row of the warp in the order of the range. Rows are permuted
 * so that a lane's accumulators belong to neighbours, mostly heads of one query. */
template <typename shape> __device__ static int row_order(int r) {
    return r % 8 * (2 * shape::row_tiles) + r / 8;
}

/* The offset of a row in a tensor of q's shape, in elements. */
__device__ static int64_t row_offset(const head_view &view, const forward_plan &plan,
                                     const row_range &range, int32_t row) {
    const int32_t i = row / plan.group, h = range.g * plan.group + row % plan.group;
    return range.b * view.batch + i * view.row + h * view.head;
}

/* The sink logit of a row, which may be past the end, as an exponent of 2. */
__device__ static float sink_of_row(const forward_plan &plan, const row_range &range, int32_t row) {
    return sink_exponent(plan, range.g * plan.group + row % plan.group);
}

/* The address of the lse of a row, if it is wanted. */
__device__ static float *lse_at(const forward_plan &plan, const row_range &range, int32_t row) {
    return plan.lse.at(range.b, range.g * plan.group + row % plan.group) + row / plan.group;
}

template <int rows>
__device__ static void write_positions(int32_t *position, const forward_plan &plan,
                                       const row_range &range, int32_t kv_len) {
    for (int r = threadIdx.x; r < rows; r += blockDim.x)
        position[r] = row_position(plan, range, kv_len, range.first + r);
}

/* Starts copying the rows of `warps` warps, of q or of another tensor of its shape, with `threads`
 * threads. Rows past the end become zeros. */
template <typename shape, int warps, int threads>
__device__ static void load_queries(char *to, const head_view &view, const forward_plan &plan,
                                    const row_range &range, bool aligned) {
    using layout = row_layout<shape::head_dim>;
    constexpr int warp_size = shape::row_tiles * mma_rows;
#pragma unroll 1
    for (int r = threadIdx.x / layout::copiers; r < warps * warp_size;
         r += threads / layout::copiers) {
        const int32_t row =
            range.first + r / warp_size * warp_size + row_order<shape>(r % warp_size);
        const bool there = row < range.total;
        const int64_t offset = there ? row_offset(view, plan, range, row) : 0;
        const char *const from = (const char *)view.data + 2 * offset;
        copy_row<shape::head_dim>(to, r, from, plan.head_dim / vec_channels, there, aligned);
    }
}

/* ---- the online softmax ---- */

/* The online softmax of a warp's rows, for accumulators of mma.sync: products become logits, logits
 * of keys that are not kept become -inf, and logits become weights.
 *
 * `shape` is defined in mma/tile.cuh. Logits are exponents of 2. Source: arXiv:2205.14135,
 * algorithm 1; arXiv:2307.08691. */

/* A row's logits may exceed its row_max by this much before row_max is raised, so that sums are
 * rarely rescaled. Weights then reach 2^8, far below the largest float16. */
static constexpr float most_growth = 8;

struct logit_params {
    float softcap_scale; // multiplies the product inside tanh; 0: no softcap
    float scale;         // multiplies the product, or its tanh
};

__device__ static logit_params logit_params_of(const forward_plan &plan) {
    // the plan has such a softcap already, but without this clamp d128 and d256 spill (nvcc 13.0)
    const float least = 1e-30f, most = 1e30f;
    const float cap = fminf(fmaxf(plan.softcap, least), most);
    if (plan.softcap > 0)
        return {fminf(plan.scale / cap, most), cap * log2_e};
    return {0, fminf(plan.scale * log2_e, FLT_MAX)};
}

/* The softmax and the output of a warp's rows. A lane has 2 * row_tiles rows: row 2 t + x of the
 * lane is row lane / 4 + 8 x of row tile t. */
template <typename shape> struct row_state {
    static constexpr int rows = 2 * shape::row_tiles;
    float row_max[rows];
    float row_sum[rows]; // over this lane's columns only
    float out[shape::row_tiles][shape::head_dim / 8][4];
};

template <typename shape> __device__ static void clear_rows(row_state<shape> &state) {
#pragma unroll
    for (int r = 0; r < row_state<shape>::rows; r++) {
        state.row_max[r] = least_max;
        state.row_sum[r] = 0;
    }
    clear_sums(state.out);
}

template <int keys> struct key_records {
    alignas(8) float bias[keys];
    alignas(8) int32_t expiry[keys];
    alignas(8) int32_t from[keys]; // see copy_record()
};

template <typename shape>
__device__ static void find_logits(float (&s)[shape::row_tiles][shape::keys / 8][4],
                                   const float *bias_of, const logit_params &params) {
    if (params.softcap_scale > 0) {
#pragma unroll
        for (int x = 0; x < shape::row_tiles * shape::keys / 2; x++)
            (&s[0][0][0])[x] = tanh_of((&s[0][0][0])[x] * params.softcap_scale);
    }
#pragma unroll
    for (int n = 0; n < shape::keys / 8; n++) {
        const float2 bias = ((const float2 *)bias_of)[n * 4 + threadIdx.x % 4];
#pragma unroll
        for (int t = 0; t < shape::row_tiles; t++)
#pragma unroll
            for (int x = 0; x < 4; x++)
                s[t][n][x] = fmaf(s[t][n][x], params.scale, x % 2 == 0 ? bias.x : bias.y);
    }
}

/* Sets logits to -inf in column tile n where a row does not keep the key. `position` is of the
 * warp's rows. If `arrives`, a key is kept only from its position in from_of on. */
template <typename shape>
__device__ static void mask_columns(float (&s)[shape::row_tiles][shape::keys / 8][4], int n,
                                    const int32_t *expiry_of, const int32_t *from_of,
                                    const int32_t *position, bool arrives) {
    constexpr int rows = 2 * shape::row_tiles;
    const int lane = threadIdx.x % warp_lanes;
    const int2 first = ((const int2 *)from_of)[n * 4 + lane % 4];
    const int2 expiry = ((const int2 *)expiry_of)[n * 4 + lane % 4];
    const int32_t from[2] = {arrives ? first.x : INT32_MIN, arrives ? first.y : INT32_MIN};
    const int32_t end[2] = {expiry.x, expiry.y};
#pragma unroll
    for (int r = 0; r < rows; r++) {
        const int32_t p = position[lane / 4 * rows + r];
#pragma unroll
        for (int x = 0; x < 2; x++) {
            float &logit = s[r / 2][n][r % 2 * 2 + x];
            logit = from[x] <= p && p < end[x] ? logit : -INFINITY;
        }
    }
}

/* mask_columns() for every column tile. It first finds the tiles that need it: most key blocks have
 * none, most of the others few. */
template <typename shape>
__device__ static void mask_logits(float (&s)[shape::row_tiles][shape::keys / 8][4],
                                   const int32_t *expiry_of, const int32_t *from_of,
                                   const int32_t *position, bool arrives) {
    const int32_t first = position[0], last = position[shape::row_tiles * mma_rows - 1];
    bool some = false;
#pragma unroll
    for (int from = 0; from < shape::keys; from += warp_lanes) {
        const int column = from + opaque(threadIdx.x) % warp_lanes % shape::keys;
        some |= expiry_of[column] <= last || (arrives && from_of[column] > first);
    }
    if (!__any_sync(~0u, some))
        return;
#pragma unroll
    for (int from = 0; from < shape::keys; from += warp_lanes) {
        const int column = from + opaque(threadIdx.x) % warp_lanes % shape::keys;
        const bool masked = expiry_of[column] <= last || (arrives && from_of[column] > first);
        const uint32_t columns = __ballot_sync(~0u, masked);
        if (columns == 0)
            continue;
#pragma unroll
        for (int n = from; n < from + warp_lanes && n < shape::keys; n += 8)
            if ((columns >> (n - from) & 0xff) != 0)
                mask_columns<shape>(s, n / 8, expiry_of, from_of, position, arrives);
    }
}

/* Raises row_max of the rows whose logits exceed it too far, and rescales the sums that depend on
 * the old one. `top` has the greatest logits of this lane's columns. */
template <typename shape>
__device__ static void raise_max(row_state<shape> &state,
                                 const float (&top)[2 * shape::row_tiles]) {
#pragma unroll
    for (int r = 0; r < 2 * shape::row_tiles; r++) {
        const float most = quad_max(top[r]), old = state.row_max[r];
        state.row_max[r] = most > old + most_growth ? most : old;
        const float factor = growth_factor(old, state.row_max[r]);
        state.row_sum[r] *= factor;
#pragma unroll
        for (int d = 0; d < shape::head_dim / 8; d++) {
            state.out[r / 2][d][r % 2 * 2] *= factor;
            state.out[r / 2][d][r % 2 * 2 + 1] *= factor;
        }
    }
}

/* Finds the greatest logits of this lane's columns. True if one exceeds its row_max too far. */
template <typename shape>
__device__ static bool find_top(float (&top)[2 * shape::row_tiles],
                                const float (&s)[shape::row_tiles][shape::keys / 8][4],
                                const row_state<shape> &state) {
    bool outgrown = false;
#pragma unroll
    for (int r = 0; r < 2 * shape::row_tiles; r++) {
        top[r] = -INFINITY;
#pragma unroll
        for (int n = 0; n < shape::keys / 8; n++)
            top[r] = fmaxf(top[r], fmaxf(s[r / 2][n][r % 2 * 2], s[r / 2][n][r % 2 * 2 + 1]));
        outgrown |= top[r] > state.row_max[r] + most_growth;
    }
    return outgrown;
}

/* Turns logits into weights, and adds them to the rows' sums. A logit of NaN makes its weight NaN,
 * and with it the row. */
template <typename shape>
__device__ static void weigh(float (&s)[shape::row_tiles][shape::keys / 8][4],
                             row_state<shape> &state) {
    float top[2 * shape::row_tiles];
    if (__any_sync(~0u, find_top(top, s, state)))
        raise_max<shape>(state, top);
#pragma unroll
    for (int r = 0; r < 2 * shape::row_tiles; r++) {
        float block_sum = 0; // so that errors grow with the number of blocks, not of keys
#pragma unroll
        for (int n = 0; n < shape::keys / 8; n++)
#pragma unroll
            for (int x = r % 2 * 2; x < r % 2 * 2 + 2; x++) {
                s[r / 2][n][x] = ex2_approx(s[r / 2][n][x] - state.row_max[r]);
                block_sum += s[r / 2][n][x];
            }
        state.row_sum[r] += block_sum;
    }
}

/* ---- partial results of the warps of a thread block ---- */

/* Writes those of a warp to the arrays max, sum and out of shared memory, in the order of the
 * range. `rows` of them have an out. */
template <typename config, typename memory>
__device__ static void stage_rows(memory &shared, const row_state<config> &state, int32_t rows) {
    const int warp = threadIdx.x / warp_lanes, lane = threadIdx.x % warp_lanes;
#pragma unroll
    for (int r = 0; r < row_state<config>::rows; r++) {
        const int row = lane / 4 * row_state<config>::rows + r;
        const float sum = quad_sum(state.row_sum[r]);
        if (lane % 4 == 0) {
            shared.max[warp][row] = state.row_max[r];
            shared.sum[warp][row] = sum;
        }
#pragma unroll
        for (int d = 0; d < config::head_dim / 8 && row < rows; d++)
            *(float2 *)&shared.out[warp][row][d * 8 + lane % 4 * 2] =
                make_float2(state.out[r / 2][d][r % 2 * 2], state.out[r / 2][d][r % 2 * 2 + 1]);
    }
}

/* Row r of all warps. */
template <typename config> struct merged_warps {
    float row_max, row_sum;
    float factor[config::warps]; // weight of each warp's out

    template <typename memory>
    __device__ merged_warps(const memory &shared, int r) : row_max(least_max), row_sum(0) {
        for (int w = 0; w < config::warps; w++)
            row_max = fmaxf(row_max, shared.max[w][r]);
        for (int w = 0; w < config::warps; w++) {
            factor[w] = ex2_approx(shared.max[w][r] - row_max);
            row_sum += factor[w] * shared.sum[w][r];
        }
    }

    template <typename memory> __device__ float out(const memory &shared, int r, int d) const {
        float sum = 0;
        for (int w = 0; w < config::warps; w++)
            sum += factor[w] * shared.out[w][r][d];
        return sum;
    }
};

/* ---- keys ---- */

/* The keys that a tile of query rows visits: its range of a tile list, and loading a key block into
 * shared memory. */

/* The inputs of a tile. Shared memory holds them to save registers. */
struct tile_inputs {
    row_range range;
    tile_list keys;
    row_source k, v;
    logit_params logits;
};

__device__ static row_source key_source_of(const forward_plan &plan, const head_view &own,
                                           const head_view &carried, int32_t b, int32_t g,
                                           bool aligned) {
    row_source source = source_of(own, b, g, plan.head_dim, aligned);
    if (plan.carried_len > 0) {
        source.carried_len = plan.carried_len;
        source.carried = rows_of(carried, b, g);
        source.carried_stride = 2 * carried.row;
    }
    return source;
}

/* The inputs of a tile with the first `rows` rows of a range. */
__device__ static tile_inputs tile_inputs_of(const forward_plan &plan, const row_range &range,
                                             int32_t rows, bool aligned) {
    const int32_t kv_len = key_count(plan, range.b);
    const int32_t last = row_position(plan, range, kv_len, range.first + rows - 1);
    return {range, tile_list_of(plan, range.b, range.g, range.first / plan.group, last),
            key_source_of(plan, plan.k, plan.k_carried, range.b, range.g, aligned),
            key_source_of(plan, plan.v, plan.v_carried, range.b, range.g, aligned),
            logit_params_of(plan)};
}

template <typename config> __device__ static int32_t own_entry(const tile_list &keys, int32_t n) {
    const int32_t column = threadIdx.x;
    return column < config::keys ? entry_at(keys, n * config::keys + column) : -1;
}

/* Writes the entry to shared memory, which has the entries of three key blocks. */
template <int keys>
__device__ static void store_entry(int32_t (&key)[3][keys], int32_t n, int32_t entry) {
    const uint32_t column = opaque(threadIdx.x);
    if (column < keys)
        key[n % 3][column] = entry;
}

/* Starts copying the record of an entry. Without records every row keeps a key; no row keeps an
 * entry that is no key. `from` is only set if not causal, in packed sequences: the first position
 * of the key's sequence. */
template <int keys>
__device__ static void copy_record(key_records<keys> &records, int column, const tile_list &from,
                                   int32_t entry) {
    const bool there = is_key(entry, from.kv_len);
    if (there && from.records != NULL) {
        cp_async_4(shared_address(&records.bias[column]), &from.records[entry].bias);
        cp_async_4(shared_address(&records.expiry[column]), &from.records[entry].expiry);
    } else {
        records.bias[column] = 0;
        records.expiry[column] = there ? INT32_MAX : INT32_MIN;
    }
    if (there && from.ranges != NULL)
        cp_async_4(shared_address(&records.from[column]), &from.ranges[entry].x);
}

/* The first positions at which the keys of a block may be kept, if by_position: if causal, the keys
 * themselves. */
template <int keys>
__device__ static const int32_t *first_positions(const key_records<keys> &records,
                                                 const int32_t *entries, const tile_list &list) {
    return list.ranges == NULL ? entries : records.from;
}

template <int keys>
__device__ static void copy_records(key_records<keys> &records, const tile_list &from,
                                    const int32_t *entries) {
    const uint32_t column = opaque(threadIdx.x);
    if (column < keys)
        copy_record(records, column, from, entries[column]);
}

/* copy_block() if some keys are carried, or rows are not aligned. It needs few registers, because
 * it processes one row after the other. */
template <typename config>
__device__ static void copy_rows_one_by_one(char *to, const int32_t *keys, const row_source &source,
                                            int32_t kv_len) {
    constexpr int copiers = row_layout<config::head_dim>::copiers;
#pragma unroll 1
    for (int n = opaque(threadIdx.x) / copiers; n < config::keys; n += config::threads / copiers) {
        const bool there = is_key(keys[n], kv_len);
        copy_row<config::head_dim>(to, n, row_of_key(source, there ? keys[n] : 0), source.vecs,
                                   there, source.aligned);
    }
}

/* Starts copying the rows of k or v of a key block. An entry that is no key becomes zeros, because
 * its weight is 0, but 0 times the memory's contents may be NaN. */
template <typename config>
__device__ static void copy_block(char *to, const int32_t *keys, const row_source &source,
                                  int32_t kv_len) {
    using layout = row_layout<config::head_dim>;
    constexpr int copiers = layout::copiers, step = config::threads / copiers;
    static_assert(step % 8 == 0, "all rows of a lane are swizzled alike");
    const uint32_t thread = opaque(threadIdx.x);
    const int first = thread / copiers, lane = thread % copiers;
    if (!source.aligned || source.carried_len > 0) {
        copy_rows_one_by_one<config>(to, keys, source, kv_len);
        return;
    }
    const row_source from = source; // a copy in registers, otherwise each cp.async would read it
                                    // again
    const uint32_t at = shared_address(to) + layout::offset(first, lane);
    int32_t key[config::keys / step];
#pragma unroll
    for (int n = 0; n < config::keys / step; n++)
        key[n] = keys[first + n * step];
#pragma unroll
    for (int n = 0; n < config::keys / step; n++) {
        const bool there = is_key(key[n], kv_len);
        const char *const row = row_at(from, there ? key[n] : 0) + lane * vec_bytes;
#pragma unroll
        for (int x = 0; x < layout::vecs; x += copiers)
            cp_async_16(at + n * step * layout::row_bytes + x * vec_bytes, row + x * vec_bytes,
                        there && x + lane < from.vecs ? vec_bytes : 0);
    }
}

/* ---- masks and biases of pairs ---- */

/* attn_mask and attn_bias in a warp's logits. They are read for each pair of a row and a key. */

/* A row of attention: query i of head h of a sequence, and its position. */
struct pair_row {
    int32_t b, h, i, position;
};

/* Row `row` of a range; past its end, the last one. */
__device__ static pair_row pair_row_of(const forward_plan &plan, const row_range &range,
                                       int32_t row) {
    const int32_t own = min(row, range.total - 1);
    const int32_t i = own / plan.group, h = range.g * plan.group + own % plan.group;
    return {range.b, h, i, query_position(plan, range.b, i)};
}

/* The keys of a block that a row keeps by attn_mask, a bit each. */
template <int keys> struct row_bits {
    static constexpr int words = keys < 32 ? 1 : keys / 32;
    uint32_t word[words];

    __device__ bool has(int column) const { return word[column / 32] >> column % 32 & 1; }
};

/* The distance, in words, from a row's bits of the first 32 entries of a list to its bits of the 32
 * entries that include `entry`. */
__device__ static int64_t words_before(const forward_plan &plan, int64_t entry) {
    const int64_t step = (int64_t)plan.kept.mask_heads * list_queries * (list_queries / 32);
    return entry / list_queries * step + entry % list_queries / 32;
}

/* The bits of a row for key block n. `first`: its bits for the first key block. */
template <int keys>
__device__ static row_bits<keys> load_bits(const forward_plan &plan, const uint32_t *first,
                                           int32_t n) {
    const int64_t entry = (int64_t)n * keys;
    const uint32_t *const words = first + words_before(plan, entry);
    row_bits<keys> bits;
#pragma unroll
    for (int w = 0; w < row_bits<keys>::words; w++)
        bits.word[w] = keys < 32 ? words[w] >> entry % 32 : words[w];
    return bits;
}

/* The inputs of add_pairs() for the rows of a tile. */
template <int rows> struct pair_rows {
    int64_t bias[rows];         // offset of the row in attn_bias, in elements
    const uint32_t *bits[rows]; // of attn_mask, for the first key block
};

template <int rows>
__device__ static void write_pair_rows(pair_rows<rows> &to, const forward_plan &plan,
                                       const row_range &range, const tile_list &list) {
    for (int r = threadIdx.x; r < rows; r += blockDim.x) {
        const pair_row row = pair_row_of(plan, range, range.first + r);
        to.bias[r] =
            plan.pair_bias.data == NULL ? 0 : plan.pair_bias.offset(row.b, row.h, row.i, 0);
        to.bits[r] = list.bits == NULL ? NULL : kept_bits(plan, list, 0, row.h, row.i);
    }
}

/* True if a row keeps the key of a column: by its bit, or without attn_mask by the records. `first`
 * as from first_positions(). */
template <int keys>
__device__ static bool keeps_pair(const forward_plan &plan, int32_t position, const tile_list &list,
                                  const row_bits<keys> &bits, const key_records<keys> &records,
                                  const int32_t *entries, const int32_t *first, int column) {
    if (list.bits != NULL)
        return bits.has(column);
    return is_key(entries[column], list.kv_len) && position < records.expiry[column] &&
           (!plan.by_position || first[column] <= position);
}

template <typename element>
__device__ static float pair_exponent(const forward_plan &plan, const pair_row &row, int32_t key) {
    return log2_e * pair_bias<element>(plan.pair_bias, row.b, row.h, row.i, key);
}

/* Adds attn_bias to the logits of a warp's rows for key block n, and sets them to -inf where the
 * row does not keep the key. first_row: the warp's first row in the tile. */
template <typename config>
__device__ static void add_pairs(float (&s)[config::row_tiles][config::keys / 8][4],
                                 const forward_plan &plan, const tile_list &list,
                                 const pair_rows<config::rows> &of_row, const int32_t *position,
                                 int32_t first_row, const key_records<config::keys> &records,
                                 const int32_t *entries, int32_t n) {
    using element = typename config::element;
    constexpr int rows = 2 * config::row_tiles;
    const int32_t *const first = first_positions(records, entries, list);
    const bool has_bias = plan.pair_bias.data != NULL;
    const int lane = threadIdx.x % warp_lanes;
#pragma unroll
    for (int r = 0; r < rows; r++) {
        const int row = first_row + lane / 4 * rows + r;
        const int64_t bias = of_row.bias[row];
        row_bits<config::keys> bits = {};
        if (list.bits != NULL)
            bits = load_bits<config::keys>(plan, of_row.bits[row], n);
#pragma unroll
        for (int x = 0; x < config::keys / 4; x++) {
            const int column = x / 2 * 8 + lane % 4 * 2 + x % 2;
            float &logit = s[r / 2][x / 2][r % 2 * 2 + x % 2];
            if (!keeps_pair(plan, position[row], list, bits, records, entries, first, column))
                logit = -INFINITY;
            else if (has_bias)
                logit += log2_e * bias_at<element>(plan.pair_bias,
                                                   bias + entries[column] * plan.pair_bias.key);
        }
    }
}

/* ---- dropout ---- */

/* Dropout in accumulators of mma.sync. Shared memory holds the codes, to save registers; see
 * core/dropout.h for their definition. */

/* The codes of a tile's rows and of the keys of two blocks. */
template <typename shape> struct tile_codes {
    row_code row[shape::rows];
    alignas(8) uint32_t key[2][shape::keys];
    bool is_paired; // rows 2 n and 2 n + 1 share a code: a query at an even position, and the next
};

struct no_codes {};

template <typename shape, bool drops> struct codes_of {
    using type = no_codes;
};
template <typename shape> struct codes_of<shape, true> {
    using type = tile_codes<shape>;
};

template <typename shape>
__device__ static void write_row_codes(tile_codes<shape> &codes, const forward_plan &plan,
                                       const row_range &range, int32_t kv_len) {
    for (int r = threadIdx.x; r < shape::rows; r += shape::threads) {
        const int32_t row = min(range.first + r, range.total - 1);
        const int32_t position = row_position(plan, range, kv_len, row);
        codes.row[r] =
            row_code_of(plan, range.b, range.g * plan.group + row % plan.group, position);
    }
    if (threadIdx.x == 0)
        codes.is_paired = plan.group == 1 && (kv_len - plan.q_len) % 2 == 0;
}

template <typename shape>
__device__ static void write_key_codes(tile_codes<shape> &codes, const forward_plan &plan,
                                       const row_range &range, const int32_t *entries, int32_t n) {
    const uint32_t column = opaque(threadIdx.x);
    if (column < shape::keys)
        codes.key[n % 2][column] = key_code_of(plan, range.b, range.g, entries[column]);
}

/* True if a pair is dropped, at an even position or at an odd one. */
__device__ static bool drops(uint32_t mixed, bool is_odd, uint32_t threshold) {
    return (is_odd ? mixed >> 16 : mixed & 0xffff) < threshold;
}

/* Clears the elements of dropped pairs, and multiplies the others by `factor`. `codes` and
 * `position` are of the warp's rows: a lane has `rows` consecutive ones. */
template <typename shape, bool is_paired>
__device__ static void drop_elements(float (&x)[shape::row_tiles][shape::keys / 8][4],
                                     const row_code *codes, const int32_t *position,
                                     const uint32_t *key_codes, uint32_t threshold, float factor) {
    constexpr int rows = 2 * shape::row_tiles;
    const int lane = threadIdx.x % warp_lanes;
#pragma unroll
    for (int n = 0; n < shape::keys / 8; n++) {
        const uint2 keys = ((const uint2 *)key_codes)[n * 4 + lane % 4];
        uint32_t mixed[2];
#pragma unroll
        for (int r = 0; r < rows; r++) {
            const bool is_odd = is_paired ? r % 2 != 0 : position[lane / 4 * rows + r] % 2 != 0;
            if (!is_paired || r % 2 == 0) {
                const row_code code = codes[lane / 4 * rows + r];
                mixed[0] = dropout_mix(code, keys.x);
                mixed[1] = dropout_mix(code, keys.y);
            }
#pragma unroll
            for (int c = 0; c < 2; c++) {
                float &one = x[r / 2][n][r % 2 * 2 + c];
                one = drops(mixed[c], is_odd, threshold) ? 0 : one * factor;
            }
        }
    }
}

/* drop_elements() for block n, whose rows may share codes. `first` is the warp's first row. */
template <typename shape>
__device__ static void drop_elements(float (&x)[shape::row_tiles][shape::keys / 8][4],
                                     const tile_codes<shape> &codes, const int32_t *position,
                                     int first, int32_t n, uint32_t threshold, float factor) {
    const row_code *const rows = codes.row + first;
    if (codes.is_paired)
        drop_elements<shape, true>(x, rows, position + first, codes.key[n % 2], threshold, factor);
    else
        drop_elements<shape, false>(x, rows, position + first, codes.key[n % 2], threshold, factor);
}
