/* The products of attention and of its gradients on Hopper's tensor cores: 64 rows of a warpgroup
 * against a block of rows in shared memory.
 *
 * A block of rows lies in panels of 64 channels, each [rows][128 bytes], the eight 16-byte chunks
 * of a row permuted by the row's number: the 128-byte swizzle (PTX, asynchronous warpgroup level
 * matrix shared memory layout). Panels begin at multiples of 1024 bytes, where the pattern begins.
 *
 * Accumulators: thread t of a warp holds of rows t / 4 and t / 4 + 8 the columns 8 n + 2 (t % 4)
 * and the one after it, at [4 n + 2 * (the later row) + (the later column)]. */
#ifndef FDMA_CUDA_DEVICE_WGMMA_CUH
#define FDMA_CUDA_DEVICE_WGMMA_CUH

#include "cuda/device/ptx.cuh"
#include "cuda/device/ptx_wgmma.cuh"

static constexpr int panel_channels = 64; // of 16 bits: one line of the swizzle
static constexpr int line_bytes = 128;    // a row of a panel
static constexpr int chunk_bytes = 16;    // what the swizzle moves
static constexpr int swizzle_rows = 8;    // after which the pattern repeats
static constexpr int step_k = 16;         // channels or keys of one wgmma

/* Where chunk `chunk` of row `row` of a panel lies. */
__device__ static inline uint32_t swizzled(uint32_t row, uint32_t chunk) {
    return row * line_bytes + ((chunk ^ row % swizzle_rows) * chunk_bytes);
}

/* A matrix in shared memory, from `address` on. panel_bytes: from panel to panel, where the
 * product goes along channels. */
__device__ static inline uint64_t describe_matrix(uint32_t address, uint32_t panel_bytes) {
    const uint64_t swizzle_128 = 1;
    return (uint64_t)(address & 0x3ffff) >> 4 | (uint64_t)(panel_bytes >> 4) << 16 |
           (uint64_t)(swizzle_rows * line_bytes >> 4) << 32 | swizzle_128 << 62;
}

/* A matrix [16][columns] in shared memory without a swizzle, whose rows 8 to 15 are those before
 * them again: eight columns of eight rows are 128 bytes, `octet_bytes` after those before them. */
__device__ static inline uint64_t describe_octets(uint32_t address, uint32_t octet_bytes) {
    return (uint64_t)(address & 0x3ffff) >> 4 | (uint64_t)(octet_bytes >> 4) << 32;
}

template <typename element, int accumulate, int transpose_a = 0, int transpose_b = 0,
          int accumulators>
__device__ static inline void multiply(float (&d)[accumulators], uint64_t a, uint64_t b) {
    if constexpr (accumulators == 16)
        wgmma_m64n32k16<element, accumulate, transpose_a, transpose_b>(d, a, b);
    else if constexpr (accumulators == 32)
        wgmma_m64n64k16<element, accumulate, transpose_a, transpose_b>(d, a, b);
    else
        wgmma_m64n128k16<element, accumulate, transpose_a, transpose_b>(d, a, b);
}

template <typename element, int accumulators>
__device__ static inline void multiply(float (&d)[accumulators], const uint32_t (&a)[4],
                                       uint64_t b) {
    if constexpr (accumulators == 32)
        wgmma_m64n64k16<element>(d, a, b);
    else if constexpr (accumulators == 64)
        wgmma_m64n128k16<element>(d, a, b);
    else
        wgmma_m64n256k16<element>(d, a, b);
}

/* S = Q K^T, begun: q [64 rows of q_rows][channels], k [2 * accumulators keys of
 * key_rows][channels]. */
template <typename element, int channels, int q_rows, int key_rows, int accumulators>
__device__ static inline void begin_abt(float (&scores)[accumulators], uint32_t q, uint32_t k) {
    const uint64_t a = describe_matrix(q, 0), b = describe_matrix(k, 0);
    multiply<element, 0>(scores, a, b);
#pragma unroll
    for (int c = step_k; c < channels; c += step_k) {
        const int panel = c / panel_channels, inside = c % panel_channels * 2;
        multiply<element, 1>(scores, a + ((panel * q_rows * line_bytes + inside) >> 4),
                             b + ((panel * key_rows * line_bytes + inside) >> 4));
    }
}

/* O += P V, begun: weights as the accumulators of S in pairs, v [16 * steps keys of key_rows]
 * [2 * accumulators channels]. */
template <typename element, int key_rows, int steps, int accumulators>
__device__ static inline void
begin_ab(float (&out)[accumulators], const uint32_t (&weights)[key_rows / step_k][4], uint32_t v) {
    const uint64_t b = describe_matrix(v, key_rows * line_bytes);
#pragma unroll
    for (int j = 0; j < steps; j++)
        multiply<element>(out, weights[j], b + (j * step_k * line_bytes >> 4));
}

/* D = A^T B, begun: a [16 * steps rows][64], b [16 * steps rows of b_rows][2 * accumulators
 * channels]. */
template <typename element, int b_rows, int steps, int accumulators>
__device__ static inline void begin_atb(float (&d)[accumulators], uint32_t a_address,
                                        uint32_t b_address) {
    const uint64_t a = describe_matrix(a_address, 0);
    const uint64_t b = describe_matrix(b_address, b_rows * line_bytes);
    multiply<element, 0, 1, 1>(d, a, b);
#pragma unroll
    for (int j = 1; j < steps; j++)
        multiply<element, 1, 1, 1>(d, a + (j * step_k * line_bytes >> 4),
                                   b + (j * step_k * line_bytes >> 4));
}

/* D += A B, begun: a [64 rows][16 * steps], one panel; b [16 * steps rows of b_rows][2 *
 * accumulators channels]. */
template <typename element, int b_rows, int steps, int accumulators>
__device__ static inline void begin_ab(float (&d)[accumulators], uint32_t a_address,
                                       uint32_t b_address) {
    const uint64_t a = describe_matrix(a_address, 0);
    const uint64_t b = describe_matrix(b_address, b_rows * line_bytes);
#pragma unroll
    for (int j = 0; j < steps; j++)
        multiply<element, 1, 0, 1>(d, a + (j * step_k * 2 >> 4),
                                   b + (j * step_k * line_bytes >> 4));
}

#endif
