/* The rows of a tile: (query, head of the group) pairs of one kv head, the heads of a query side by
 * side. Loading q, the softmax of a warp's rows, and writing out. */
#ifndef FDMA_CUDA_FORWARD_SM80_ROWS_CUH
#define FDMA_CUDA_FORWARD_SM80_ROWS_CUH

#include "cuda/device/softmax.cuh"
#include "cuda/forward/sm80/tile.cuh"

/* Weights may grow to 2 to this before the maximum that they stand against is raised, so that what
 * is summed already is almost never rescaled. Far below what float16 holds. */
static constexpr float most_growth = 8;

/* Rows of one (b, g) from `first` on; row r is head r % group of query r / group. */
struct row_place {
    int32_t b, g;
    int32_t first, total;
};

__device__ static inline row_place place_of(const forward_plan &plan, int32_t head, int32_t first) {
    return {head / plan.kv_heads, head % plan.kv_heads, first, plan.q_len * plan.group};
}

/* Of a row, or of the last one where there is no such row. */
__device__ static inline int32_t position_of(const forward_plan &plan, const row_place &place,
                                             int32_t row) {
    return min(row, place.total - 1) / plan.group + plan.kv_len - plan.q_len;
}

/* Rows change places in a warp's tiles, so that a lane's accumulators are of neighbours: mostly
 * heads of one query. Tile row r of a warp's is its row_order(r)th. */
template <typename shape> __device__ static inline int row_order(int r) {
    return r % 8 * (2 * shape::row_tiles) + r / 8;
}

/* A row's offset in a tensor, in elements; `row` is one of the place's. */
__device__ static inline int64_t row_offset(const head_view &view, const forward_plan &plan,
                                            const row_place &place, int32_t row) {
    const int32_t i = row / plan.group, h = place.g * plan.group + row % plan.group;
    return place.b * view.batch + i * view.row + h * view.head;
}

__device__ static inline int64_t lse_offset(const forward_plan &plan, const row_place &place,
                                            int32_t row) {
    const int32_t i = row / plan.group, h = place.g * plan.group + row % plan.group;
    return place.b * plan.lse_batch + h * plan.lse_head + i;
}

/* The positions of `rows` rows of a place. */
template <int rows>
__device__ static inline void list_positions(int32_t *position, const forward_plan &plan,
                                             const row_place &place) {
    for (int r = threadIdx.x; r < rows; r += blockDim.x)
        position[r] = position_of(plan, place, place.first + r);
}

/* q, or another tensor of its shape, of `tiles` warps' rows; lanes of one row side by side in
 * `threads` threads. */
template <typename shape, int tiles, int threads>
__device__ static inline void load_queries(char *to, const head_view &view,
                                           const forward_plan &plan, const row_place &place,
                                           bool aligned) {
    using layout = row_layout<shape::head_dim>;
    constexpr int warp_rows = shape::row_tiles * mma_rows;
#pragma unroll 1
    for (int r = threadIdx.x / layout::copiers; r < tiles * warp_rows;
         r += threads / layout::copiers) {
        const int32_t row =
            place.first + r / warp_rows * warp_rows + row_order<shape>(r % warp_rows);
        const bool there = row < place.total;
        const int64_t offset = there ? row_offset(view, plan, place, row) : 0;
        const char *const from = (const char *)view.data + 2 * offset;
        if (aligned)
            copy_row<shape::head_dim>(to, r, from, plan.head_dim / chunk_channels, there);
        else
            copy_row_slowly<shape::head_dim>(to, r, from, plan.head_dim / chunk_channels, there);
    }
}

/* How products become logits, which are exponents of 2. */
struct logit_form {
    float share; // what softcap multiplies before tanh; 0: no softcap
    float scale;
};

__device__ static inline logit_form form_of(const forward_plan &plan) {
    // a softcap beyond all logits does nothing, one far below them makes them all 0
    const float least = 1e-30f, most = 1e30f;
    const float cap = fminf(fmaxf(plan.softcap, least), most);
    if (plan.softcap > 0)
        return {fminf(plan.scale / cap, most), cap * log2_e};
    return {0, fminf(plan.scale * log2_e, FLT_MAX)};
}

/* The softmax and out of a warp's rows. Slot 2 t + x: rows lane / 4 + 8 x of row tile t. */
template <typename shape> struct warp_rows {
    static constexpr int slots = 2 * shape::row_tiles;
    float max[slots], sum[slots]; // sum: of this lane's columns
    float out[shape::row_tiles][shape::head_dim / 8][4];
};

template <typename shape> __device__ static inline void start_rows(warp_rows<shape> &rows) {
#pragma unroll
    for (int s = 0; s < warp_rows<shape>::slots; s++) {
        rows.max[s] = least_max;
        rows.sum[s] = 0;
    }
#pragma unroll
    for (int t = 0; t < shape::row_tiles; t++)
#pragma unroll
        for (int d = 0; d < shape::head_dim / 8; d++)
            rows.out[t][d][0] = rows.out[t][d][1] = rows.out[t][d][2] = rows.out[t][d][3] = 0;
}

/* What the keys of a block bring, in shared memory. */
template <int keys> struct key_facts {
    alignas(8) float bias[keys];
    alignas(8) int32_t expiry[keys];
};

/* Products become logits. */
template <typename shape>
__device__ static inline void find_logits(float (&s)[shape::row_tiles][shape::keys / 8][4],
                                          const float *bias_of, const logit_form &form) {
    if (form.share > 0) {
#pragma unroll
        for (int x = 0; x < shape::row_tiles * shape::keys / 2; x++)
            (&s[0][0][0])[x] = tanh_of((&s[0][0][0])[x] * form.share);
    }
#pragma unroll
    for (int n = 0; n < shape::keys / 8; n++) {
        const float2 bias = ((const float2 *)bias_of)[n * 4 + threadIdx.x % 4];
#pragma unroll
        for (int t = 0; t < shape::row_tiles; t++)
#pragma unroll
            for (int x = 0; x < 4; x++)
                s[t][n][x] = fmaf(s[t][n][x], form.scale, x % 2 == 0 ? bias.x : bias.y);
    }
}

/* -inf in the columns of tile n where a row does not keep the key; position: of the warp's rows. */
template <typename shape>
__device__ static inline void cut_columns(float (&s)[shape::row_tiles][shape::keys / 8][4], int n,
                                          const int32_t *expiry_of, const int32_t *key_of,
                                          const int32_t *position, bool causal) {
    constexpr int slots = 2 * shape::row_tiles;
    const int lane = threadIdx.x % warp_lanes;
    const int2 key = ((const int2 *)key_of)[n * 4 + lane % 4];
    const int2 expiry = ((const int2 *)expiry_of)[n * 4 + lane % 4];
    const int32_t from[2] = {causal ? key.x : INT32_MIN, causal ? key.y : INT32_MIN};
    const int32_t end[2] = {expiry.x, expiry.y};
#pragma unroll
    for (int slot = 0; slot < slots; slot++) {
        const int32_t p = position[lane / 4 * slots + slot];
#pragma unroll
        for (int x = 0; x < 2; x++) {
            float &logit = s[slot / 2][n][slot % 2 * 2 + x];
            logit = from[x] <= p && p < end[x] ? logit : -INFINITY;
        }
    }
}

/* The same in all columns. Most blocks are whole, of most others few columns are cut. */
template <typename shape>
__device__ static inline void cut_logits(float (&s)[shape::row_tiles][shape::keys / 8][4],
                                         const int32_t *expiry_of, const int32_t *key_of,
                                         const int32_t *position, bool causal) {
    const int32_t first = position[0], last = position[shape::row_tiles * mma_rows - 1];
    bool some = false;
#pragma unroll
    for (int from = 0; from < shape::keys; from += warp_lanes) {
        const int column = from + opaque(threadIdx.x) % warp_lanes % shape::keys;
        some |= expiry_of[column] <= last || (causal && key_of[column] > first);
    }
    if (!__any_sync(~0u, some))
        return;
#pragma unroll
    for (int from = 0; from < shape::keys; from += warp_lanes) {
        const int column = from + opaque(threadIdx.x) % warp_lanes % shape::keys;
        const bool cut = expiry_of[column] <= last || (causal && key_of[column] > first);
        const uint32_t columns = __ballot_sync(~0u, cut);
        if (columns == 0)
            continue;
#pragma unroll
        for (int n = from; n < from + warp_lanes && n < shape::keys; n += 8)
            if ((columns >> (n - from) & 0xff) != 0)
                cut_columns<shape>(s, n / 8, expiry_of, key_of, position, causal);
    }
}

/* Raises the maximum of the rows that have outgrown theirs, and rescales what was summed under the
 * old one. top: of a lane's columns. */
template <typename shape>
__device__ static inline void raise_max(warp_rows<shape> &rows,
                                        const float (&top)[2 * shape::row_tiles]) {
#pragma unroll
    for (int s = 0; s < 2 * shape::row_tiles; s++) {
        const float most = quad_max(top[s]), old = rows.max[s];
        rows.max[s] = most > old + most_growth ? most : old;
        const float factor = growth_factor(old, rows.max[s]);
        rows.sum[s] *= factor;
#pragma unroll
        for (int d = 0; d < shape::head_dim / 8; d++) {
            rows.out[s / 2][d][s % 2 * 2] *= factor;
            rows.out[s / 2][d][s % 2 * 2 + 1] *= factor;
        }
    }
}

/* The greatest logits of a lane's columns; whether one has outgrown its row's maximum. */
template <typename shape>
__device__ static inline bool find_top(float (&top)[2 * shape::row_tiles],
                                       const float (&s)[shape::row_tiles][shape::keys / 8][4],
                                       const warp_rows<shape> &rows) {
    bool outgrown = false;
#pragma unroll
    for (int r = 0; r < 2 * shape::row_tiles; r++) {
        top[r] = -INFINITY;
#pragma unroll
        for (int n = 0; n < shape::keys / 8; n++)
            top[r] = fmaxf(top[r], fmaxf(s[r / 2][n][r % 2 * 2], s[r / 2][n][r % 2 * 2 + 1]));
        outgrown |= top[r] > rows.max[r] + most_growth;
    }
    return outgrown;
}

/* Logits become weights. A logit of NaN makes its weight NaN, and with it the row. */
template <typename shape>
__device__ static inline void weigh(float (&s)[shape::row_tiles][shape::keys / 8][4],
                                    warp_rows<shape> &rows) {
    float top[2 * shape::row_tiles];
    if (__any_sync(~0u, find_top(top, s, rows)))
        raise_max<shape>(rows, top);
#pragma unroll
    for (int r = 0; r < 2 * shape::row_tiles; r++) {
        float part = 0; // errors grow with the number of blocks, not of keys
#pragma unroll
        for (int n = 0; n < shape::keys / 8; n++)
#pragma unroll
            for (int x = r % 2 * 2; x < r % 2 * 2 + 2; x++) {
                s[r / 2][n][x] = ex2_approx(s[r / 2][n][x] - rows.max[r]);
                part += s[r / 2][n][x];
            }
        rows.sum[r] += part;
    }
}

#endif
