/* Where the gradients of a key go when its slot is done with it. */
#ifndef FDMA_CUDA_BACKWARD_SM90_ROWS_CUH
#define FDMA_CUDA_BACKWARD_SM90_ROWS_CUH

#include "cuda/backward/sm90/tile.cuh"
#include "cuda/device/quad.cuh"
#include "cuda/device/softmax.cuh"

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
    int32_t slot;    // of the block's
    int32_t channel; // the first that the thread has sums of
    bool is_written;
};

static constexpr int quad_span = 32; // channels that a quad writes at once: 8 a lane

/* What this lane's channels of a row hold, if it is to be added to; else 0. */
template <typename element, int spans>
__device__ static inline void load_row(const element *from, int32_t channels, bool adds,
                                       uint4 (&old)[spans]) {
#pragma unroll
    for (int n = 0; n < spans; n++) {
        const int channel = opaque(n * quad_span + 8 * (threadIdx.x % 4));
        old[n] = make_uint4(0, 0, 0, 0);
        if (adds && channel < channels)
            old[n] = *(const uint4 *)(from + channel);
    }
}

/* Row i of a thread's sums, times factor, plus `old`, to a row of 16-bit elements; a warp
 * together. */
template <typename element, int held, int spans>
__device__ static inline void write_row(element *to, int32_t channels, bool is_written, int i,
                                        float factor, const float (&sums)[held],
                                        const uint4 (&old)[spans]) {
    static_assert(spans * quad_span == 2 * held, "all channels");
#pragma unroll
    for (int n = 0; n < spans; n++) {
        // opaque: what is compared once would be kept, in more predicates than there are
        const int channel = opaque(n * quad_span + 8 * (threadIdx.x % 4));
        uint32_t words[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const int at = (n * quad_span / 8 + k) * 4 + 2 * i;
            words[k] = element_type<element>::pack(sums[at] * factor, sums[at + 1] * factor);
        }
        transpose_quad(words);
        if (is_written && channel < channels)
            *(uint4 *)(to + channel) = make_uint4(
                add_pairs<element>(old[n].x, words[0]), add_pairs<element>(old[n].y, words[1]),
                add_pairs<element>(old[n].z, words[2]), add_pairs<element>(old[n].w, words[3]));
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
                                         const key_row &row) {
    return (element *)view.data + item.b * view.batch + item.g * view.head +
           max(row.key, 0) * view.row + row.channel;
}

/* Row i of a thread's dk and dv, where no border takes them. */
template <typename element, int held>
__device__ static inline void write_sums(const backward_plan &plan, const backward_pass &pass,
                                         const backward_item &item, const key_row &row, int i,
                                         const float (&dk)[held], const float (&dv)[held]) {
    const int32_t channels = plan.forward.head_dim - row.channel;
    const bool is_own = row.is_written && row.border == 0;
    const bool adds = is_own && (plan.accumulate || pass.is_diagonal);
    element *const to_dk = row_at<element>(plan.dk, item, row);
    element *const to_dv = row_at<element>(plan.dv, item, row);
    uint4 old_dk[2 * held / quad_span], old_dv[2 * held / quad_span]; // all on their way at once
    load_row(to_dk, channels, adds, old_dk);
    load_row(to_dv, channels, adds, old_dv);
    write_row(to_dk, channels, is_own, i, plan.forward.scale, dk, old_dk);
    write_row(to_dv, channels, is_own, i, 1, dv, old_dv);
}

/* Its dbias, and to a border what it takes. */
template <int held>
__device__ static inline void write_rest(const backward_plan &plan, const backward_pass &pass,
                                         const backward_item &item, const key_row &row, int i,
                                         float dbias, const float (&dk)[held],
                                         const float (&dv)[held]) {
    // of the quad, and of consumers
    const bool is_first = threadIdx.x % 4 == 0 && row.channel == 0;
    if (!row.is_written)
        return;
    if (row.border > 0) {
        const int32_t head_dim = plan.forward.head_dim;
        const int64_t at = boundary_row(plan, item.head, row.border, item.first_slot + row.slot);
        if (is_first)
            atomicAdd(&plan.boundary.dbias[at], dbias);
        const int64_t to = at * head_dim + row.channel;
        carry_sums(plan.boundary.dk + to, head_dim - row.channel, i, plan.forward.scale, dk);
        carry_sums(plan.boundary.dv + to, head_dim - row.channel, i, 1, dv);
    } else if (plan.dbias != NULL && is_first) {
        float *const to =
            plan.dbias + item.b * plan.dbias_batch + item.g * plan.dbias_head + row.key;
        *to = pass.is_diagonal ? *to + dbias : dbias;
    }
}

#endif
