/* The online softmax of a warp's rows, for accumulators of mma.sync: products become logits, logits
 * of keys that are not kept become -inf, and logits become weights.
 *
 * `shape` is defined in mma/tile.cuh. Logits are exponents of 2. Source: arXiv:2205.14135,
 * algorithm 1; arXiv:2307.08691. */
#pragma once

#include "cuda/device/softmax.cuh"
#include "cuda/mma/tile.cuh"
#include "cuda/plan/plan.cuh"

/* A row's logits may exceed its row_max by this much before row_max is raised, so that sums are
 * rarely rescaled. Weights then reach 2^8, far below the largest float16. */
static constexpr float most_growth = 8;

struct logit_params {
    float softcap_scale; // multiplies the product inside tanh; 0: no softcap
    float scale;         // multiplies the product, or its tanh
};

__device__ static logit_params logit_params_of(const forward_plan &plan) {
    // a softcap beyond all logits does nothing, one far below them makes them all 0
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
