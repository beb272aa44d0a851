/* Where the gradients of a key go when its slot is done with it. */
#ifndef FDMA_CUDA_SM90_BACKWARD_ROWS_CUH
#define FDMA_CUDA_SM90_BACKWARD_ROWS_CUH

#include "cuda/device/quad.cuh"
#include "cuda/device/softmax.cuh"
#include "cuda/sm90/backward_tile.cuh"

template <typename element> __device__ static inline float2 unpack(uint32_t pair);
template <> __device__ inline float2 unpack<__half>(uint32_t pair) {
    return __half22float2(*(const __half2 *)&pair);
}
template <> __device__ inline float2 unpack<__nv_bfloat16>(uint32_t pair) {
    return __bfloat1622float2(*(const __nv_bfloat162 *)&pair);
}

template <typename element> __device__ static inline uint32_t add_pairs(uint32_t x, uint32_t y) {
    const float2 a = unpack<element>(x), b = unpack<element>(y);
    return element_type<element>::pack(a.x + b.x, a.y + b.y);
}

/* One of a thread's rows, whose sums its quad holds together. */
struct key_row {
    int32_t key, border;
    int32_t slot; // of the block's
    bool is_written;
};

/* Row i of a thread's sums, times factor, to a row of 16-bit elements; a warp together. */
template <typename element, int held>
__device__ static inline void write_row(element *to, int32_t head_dim, bool is_written, bool adds,
                                        int i, float factor, const float (&sums)[held]) {
    constexpr int span = 32; // channels that a quad writes at once: 8 a lane
#pragma unroll
    for (int c = 0; c < 2 * held; c += span) {
        // opaque: what is compared once would be kept, in more predicates than there are
        const int channel = opaque(c + 8 * (threadIdx.x % 4));
        uint32_t words[4];
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const int at = (c / 8 + n) * 4 + 2 * i;
            words[n] = element_type<element>::pack(sums[at] * factor, sums[at + 1] * factor);
        }
        transpose_quad(words);
        if (!is_written || channel >= head_dim)
            continue;
        uint4 *const place = (uint4 *)(to + channel);
        if (adds) {
            const uint4 old = *place;
            words[0] = add_pairs<element>(old.x, words[0]);
            words[1] = add_pairs<element>(old.y, words[1]);
            words[2] = add_pairs<element>(old.z, words[2]);
            words[3] = add_pairs<element>(old.w, words[3]);
        }
        *place = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

template <int held>
__device__ static inline void carry_sums(float *to, int32_t head_dim, int i, float factor,
                                         const float (&sums)[held]) {
#pragma unroll
    for (int c = 0; c < held; c += 4) {
        const int channel = opaque(2 * c + 2 * (threadIdx.x % 4)), at = c + 2 * i;
        if (channel < head_dim)
            red_add_v2(to + channel, sums[at] * factor, sums[at + 1] * factor);
    }
}

template <typename element>
__device__ static inline element *row_at(const head_view &view, const backward_item &item,
                                         int32_t key) {
    return (element *)view.data + item.b * view.batch + item.g * view.head + max(key, 0) * view.row;
}

/* Row i of a thread's dk and dv, where no border takes them. */
template <typename element, int held>
__device__ static inline void write_sums(const backward_plan &plan, const backward_pass &pass,
                                         const backward_item &item, const key_row &row, int i,
                                         const float (&dk)[held], const float (&dv)[held]) {
    const int32_t head_dim = plan.forward.head_dim;
    const bool adds = plan.accumulate || pass.is_diagonal;
    const bool is_own = row.is_written && row.border == 0;
    write_row(row_at<element>(plan.dk, item, row.key), head_dim, is_own, adds, i,
              plan.forward.scale, dk);
    write_row(row_at<element>(plan.dv, item, row.key), head_dim, is_own, adds, i, 1, dv);
}

/* Its dbias, and to a border what it takes. */
template <int held>
__device__ static inline void write_rest(const backward_plan &plan, const backward_pass &pass,
                                         const backward_item &item, const key_row &row, int i,
                                         float dbias, const float (&dk)[held],
                                         const float (&dv)[held]) {
    const bool is_first = threadIdx.x % 4 == 0; // of the quad
    if (!row.is_written)
        return;
    if (row.border > 0) {
        const int32_t head_dim = plan.forward.head_dim;
        const int64_t at = carry_row(plan, item.head, row.border, item.first_slot + row.slot);
        if (is_first)
            atomicAdd(&plan.carry.dbias[at], dbias);
        carry_sums(plan.carry.dk + at * head_dim, head_dim, i, plan.forward.scale, dk);
        carry_sums(plan.carry.dv + at * head_dim, head_dim, i, 1, dv);
    } else if (plan.dbias != NULL && is_first) {
        float *const to =
            plan.dbias + item.b * plan.dbias_batch + item.g * plan.dbias_head + row.key;
        *to = pass.is_diagonal ? *to + dbias : dbias;
    }
}

#endif
