/* The matrix products of attention and its gradients on Hopper's tensor cores. A warpgroup
 * multiplies 64 rows by a block of rows in shared memory. The functions only issue wgmma; the
 * caller fences, commits and waits.
 *
 * A block of rows is stored in panels of 64 channels, each [rows][128 bytes]. A row of a panel is
 * eight vectors of 16 bytes, permuted by the row's number: the 128-byte swizzle (PTX ISA,
 * asynchronous warpgroup level matrix shared memory layout). Panels begin at multiples of 1024
 * bytes, where the pattern begins.
 *
 * Accumulators: thread t of a warp holds columns 8 n + 2 (t % 4) and the next one of rows t / 4 and
 * t / 4 + 8, at index 4 n + 2 * (0 or 1 for the row) + (0 or 1 for the column). */
#pragma once

#include "cuda/device/element.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/ptx_wgmma.cuh"

static constexpr int warpgroup_threads = 128;
static constexpr int warpgroup_warps = 4;
static constexpr int panel_channels = 64; // 16-bit elements in one line of the swizzle
static constexpr int line_bytes = 128;    // a row of a panel
static constexpr int swizzle_rows = 8;    // period of the pattern
static constexpr int wgmma_k = 16;        // channels or keys that one wgmma sums over

__device__ static uint32_t swizzled(uint32_t row, uint32_t vec) {
    return row * line_bytes + ((vec ^ row % swizzle_rows) * vec_bytes);
}

/* The descriptor of a matrix in shared memory. Only its lower word depends on the address, and no
 * address within shared memory carries out of it. */
struct matrix {
    uint32_t low, high;

    /* The matrix that begins this many bytes later. */
    __device__ matrix after(uint32_t bytes) const { return {low + (bytes >> 4), high}; }

    __device__ uint64_t descriptor(void) const { return (uint64_t)high << 32 | low; }
};

/* The matrix that begins at `address`. panel_bytes: the distance of two panels; wgmma reads it only
 * if channels are the matrix's M or N dimension. */
__device__ static matrix matrix_at(uint32_t address, uint32_t panel_bytes) {
    const uint32_t swizzle_128 = 1;
    return {(address & 0x3ffff) >> 4 | panel_bytes >> 4 << 16,
            swizzle_rows * line_bytes >> 4 | swizzle_128 << 30};
}

/* A matrix [16][columns] without a swizzle, whose rows 8 to 15 repeat rows 0 to 7. Eight columns of
 * eight rows are 128 bytes; the next eight columns follow after `octet_bytes`. */
__device__ static matrix octets_at(uint32_t address, uint32_t octet_bytes) {
    return {(address & 0x3ffff) >> 4, octet_bytes >> 4};
}

template <typename element, int accumulate, int transpose_a = 0, int transpose_b = 0,
          int accumulators>
__device__ static void multiply(float (&d)[accumulators], matrix a, matrix b) {
    const uint64_t left = a.descriptor(), right = b.descriptor();
    if constexpr (accumulators == 16)
        wgmma_m64n32k16<element, accumulate, transpose_a, transpose_b>(d, left, right);
    else if constexpr (accumulators == 32)
        wgmma_m64n64k16<element, accumulate, transpose_a, transpose_b>(d, left, right);
    else
        wgmma_m64n128k16<element, accumulate, transpose_a, transpose_b>(d, left, right);
}

template <typename element, int accumulators>
__device__ static void multiply(float (&d)[accumulators], const uint32_t (&a)[4], matrix b) {
    if constexpr (accumulators == 32)
        wgmma_m64n64k16<element>(d, a, b.descriptor());
    else if constexpr (accumulators == 64)
        wgmma_m64n128k16<element>(d, a, b.descriptor());
    else
        wgmma_m64n256k16<element>(d, a, b.descriptor());
}

/* Issues S = Q K^T, or S += Q K^T if `adds`. q: 64 rows of a block of q_rows; k: 2 * accumulators
 * keys of a block of key_rows. */
template <typename element, int channels, int q_rows, int key_rows, bool adds = false,
          int accumulators>
__device__ static void issue_abt(float (&products)[accumulators], uint32_t q, uint32_t k) {
    const matrix a = matrix_at(q, 0), b = matrix_at(k, 0);
    multiply<element, adds>(products, a, b);
#pragma unroll
    for (int c = wgmma_k; c < channels; c += wgmma_k) {
        const int panel = c / panel_channels, inside = c % panel_channels * 2;
        multiply<element, 1>(products, a.after(panel * q_rows * line_bytes + inside),
                             b.after(panel * key_rows * line_bytes + inside));
    }
}

/* Issues O += P V with P in registers, as the accumulators of S packed in pairs. v: 16 * steps keys
 * of a block of key_rows, 2 * accumulators channels. */
template <typename element, int key_rows, int steps, int accumulators>
__device__ static void issue_ab(float (&out)[accumulators],
                                const uint32_t (&weights)[key_rows / wgmma_k][4], uint32_t v) {
    const matrix b = matrix_at(v, key_rows * line_bytes);
#pragma unroll
    for (int j = 0; j < steps; j++)
        multiply<element>(out, weights[j], b.after(j * wgmma_k * line_bytes));
}

/* Issues D = A^T B. a: 16 * steps rows of 64 columns; b: 16 * steps rows of a block of b_rows,
 * 2 * accumulators channels. */
template <typename element, int b_rows, int steps, int accumulators>
__device__ static void issue_atb(float (&d)[accumulators], uint32_t a_address, uint32_t b_address) {
    const matrix a = matrix_at(a_address, 0), b = matrix_at(b_address, b_rows * line_bytes);
    multiply<element, 0, 1, 1>(d, a, b);
#pragma unroll
    for (int j = 1; j < steps; j++)
        multiply<element, 1, 1, 1>(d, a.after(j * wgmma_k * line_bytes),
                                   b.after(j * wgmma_k * line_bytes));
}

/* Issues D += A B. a: 64 rows of 16 * steps columns, one panel; b: 16 * steps rows of a block of
 * b_rows, 2 * accumulators channels. */
template <typename element, int b_rows, int steps, int accumulators>
__device__ static void issue_ab(float (&d)[accumulators], uint32_t a_address, uint32_t b_address) {
    const matrix a = matrix_at(a_address, 0), b = matrix_at(b_address, b_rows * line_bytes);
#pragma unroll
    for (int j = 0; j < steps; j++)
        multiply<element, 1, 0, 1>(d, a.after(j * wgmma_k * 2), b.after(j * wgmma_k * line_bytes));
}

static constexpr int quad_channels = 32; // channels of 16 bits that a quad stores at once: 8 per
                                         // lane

/* Moves words[i] of lane l of a quad to words[l] of lane i, so that each lane can store 16
 * contiguous bytes of a row of accumulators. */
__device__ static void transpose_quad(uint32_t (&words)[4]) {
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2) {
        const bool upper = (threadIdx.x & bit) != 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if ((i & bit) != 0)
                continue;
            const uint32_t sent = upper ? words[i] : words[i | bit];
            const uint32_t received = __shfl_xor_sync(~0u, sent, bit);
            words[i] = upper ? received : words[i];
            words[i | bit] = upper ? words[i | bit] : received;
        }
    }
}

static constexpr int pair_channels = 16; // channels of 16 bits that a quad stores at once: 4 per
                                         // lane

/* Exchanges words between the even and the odd lane of a pair, so that a quad stores 32 contiguous
 * bytes of a row of accumulators. Before, words[n] has two columns of the n-th octet of columns.
 * Afterwards, both words have the four columns from pair_channel() on. This takes half the
 * instructions of transpose_quad(), which needs half as many stores. */
__device__ static void transpose_pair(uint32_t (&words)[2]) {
    const bool is_odd = (threadIdx.x & 1) != 0;
    const uint32_t received = __shfl_xor_sync(~0u, is_odd ? words[0] : words[1], 1);
    words[0] = is_odd ? received : words[0];
    words[1] = is_odd ? words[1] : received;
}

/* The first channel that this lane stores, among the pair_channels of its quad. */
__device__ static int pair_channel(void) { return (threadIdx.x & 1) * 8 + (threadIdx.x & 2) * 2; }
