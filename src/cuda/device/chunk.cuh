/* Rows of channels, eight at a time, for kernels that only move and add: row_lanes lanes side by
 * side take a row. */
#ifndef FDMA_CUDA_DEVICE_CHUNK_CUH
#define FDMA_CUDA_DEVICE_CHUNK_CUH

#include "cuda/device/element.cuh"
#include "cuda/device/head_view.cuh"

static constexpr int row_threads = 256;
static constexpr int row_lanes = 8;
static constexpr int block_rows = row_threads / row_lanes;
static constexpr int chunk = 8; // channels that a lane takes at once

/* Eight elements of a row; aligned: to 16 bytes. */
template <typename element>
__device__ static inline void load_chunk(float (&to)[chunk], const element *from, bool aligned) {
    alignas(16) element raw[chunk];
    if (aligned)
#pragma unroll
        for (int x = 0; x < (int)(sizeof raw / sizeof(uint4)); x++)
            ((uint4 *)raw)[x] = ((const uint4 *)from)[x];
    else
#pragma unroll
        for (int x = 0; x < chunk; x++)
            raw[x] = from[x];
#pragma unroll
    for (int x = 0; x < chunk; x++)
        to[x] = to_float(raw[x]);
}

template <typename element>
__device__ static inline void store_chunk(element *to, const float (&from)[chunk], bool aligned) {
    alignas(16) element raw[chunk];
#pragma unroll
    for (int x = 0; x < chunk; x++)
        raw[x] = from_float<element>(from[x]);
    if (aligned)
#pragma unroll
        for (int x = 0; x < (int)(sizeof raw / sizeof(uint4)); x++)
            ((uint4 *)to)[x] = ((const uint4 *)raw)[x];
    else
#pragma unroll
        for (int x = 0; x < chunk; x++)
            to[x] = raw[x];
}

/* A row's first element, of head `head` of all sequences' heads. */
template <typename element>
__device__ static inline element *row_of(const head_view &view, int64_t head, int64_t heads,
                                         int64_t row) {
    return (element *)view.data + head / heads * view.batch + row * view.row +
           head % heads * view.head;
}

/* Adds up over the lanes of a row. */
__device__ static inline float row_sum(float x) {
    for (int step = row_lanes / 2; step > 0; step /= 2)
        x += __shfl_xor_sync(~0u, x, step);
    return x;
}

/* A launch over rows of all heads. */
static inline launch_shape over_rows(int64_t rows, int64_t heads) {
    return {grid_of((rows + block_rows - 1) / block_rows, heads), dim3(row_threads)};
}

#endif
