/* The wgmma instructions of src/cuda/device/ptx_wgmma.cuh on the emulated device. Each warp
 * multiplies its 16 rows as soon as the instruction is issued. */
#pragma once

#include "cuda/device/ptx.cuh"

static inline void wgmma_fence() {}
static inline void wgmma_commit_group() { __syncwarp(); }
template <int pending> static void wgmma_wait_group() { __syncwarp(); }

/* A descriptor of a matrix in shared memory. A matrix consists of octets: eight lines of 16 bytes,
 * or with the swizzle eight lines of 128 bytes, where bits 7 to 9 of the address permute the
 * vectors of 16 bytes. Source: PTX ISA, matrix descriptors and canonical layouts. */
struct matrix_view {
    uint32_t start, leading, stride;
    bool swizzled;
};

static inline matrix_view view_of(uint64_t descriptor) {
    const uint64_t mode = descriptor >> 62;
    if (mode > 1)
        emulated_fail("a swizzle that is not emulated");
    return {(uint32_t)(descriptor & 0x3fff) << 4, (uint32_t)(descriptor >> 16 & 0x3fff) << 4,
            (uint32_t)(descriptor >> 32 & 0x3fff) << 4, mode == 1};
}

/* The element at `along` in the contiguous dimension and `across` in the other. k_major: the
 * contiguous dimension is the one summed over. */
template <typename element>
static inline float element_at(const matrix_view &view, int along, int across, bool k_major) {
    const uint32_t line = (uint32_t)along / 8, octet = (uint32_t)across / 8;
    uint32_t offset = (uint32_t)along % 8 * 2 + (uint32_t)across % 8 * (view.swizzled ? 128 : 16);
    if (view.swizzled)
        offset += line % 8 * 16 + line / 8 * (k_major ? 0 : view.leading) + octet * view.stride;
    else if (k_major)
        offset += line * view.leading + octet * view.stride;
    else
        offset += line * view.stride + octet * view.leading;
    uint32_t address = view.start + offset;
    if (view.swizzled)
        address ^= (address >> 7 & 7) << 4;
    return float_of<element>(at_shared(address));
}

struct wgmma_operands {
    float *d;
    const uint32_t *a; // NULL: in shared memory
    uint64_t a_matrix, b_matrix;
};

/* The sum of a row of a warp and a column, which a lane holds. */
static inline float *sum_at(void *const *lanes, int row, int column) {
    const int lane = row % 8 * 4 + column % 8 / 2;
    return &((const wgmma_operands *)lanes[lane])->d[column / 8 * 4 + row / 8 * 2 + column % 2];
}

template <typename element, int columns, int accumulate, int transpose_a, int transpose_b>
static void wgmma_warp(void *const *lanes, uint32_t) {
    const wgmma_operands *const first = (const wgmma_operands *)lanes[0];
    const int warp = (int)(threadIdx.x / 32 % 4);
    static thread_local float a[16][16], b[16][columns], d[16][columns];
    if (first->a == NULL) {
        const matrix_view view = view_of(first->a_matrix);
        for (int row = 0; row < 16; row++)
            for (int k = 0; k < 16; k++)
                a[row][k] = transpose_a ? element_at<element>(view, warp * 16 + row, k, false)
                                        : element_at<element>(view, k, warp * 16 + row, true);
    } else {
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 8; i++)
                a[lane / 4 + i / 2 % 2 * 8][lane % 4 * 2 + i % 2 + i / 4 * 8] =
                    unpacked<element>(((const wgmma_operands *)lanes[lane])->a, i);
    }
    const matrix_view view = view_of(first->b_matrix);
    for (int k = 0; k < 16; k++)
        for (int column = 0; column < columns; column++)
            b[k][column] = transpose_b ? element_at<element>(view, column, k, false)
                                       : element_at<element>(view, k, column, true);
    for (int row = 0; row < 16; row++)
        for (int column = 0; column < columns; column++)
            d[row][column] = accumulate ? *sum_at(lanes, row, column) : 0;
    for (int row = 0; row < 16; row++)
        for (int k = 0; k < 16; k++)
            for (int column = 0; column < columns; column++) // vectors; the order of each sum stays
                d[row][column] += a[row][k] * b[k][column];
    for (int row = 0; row < 16; row++)
        for (int column = 0; column < columns; column++)
            *sum_at(lanes, row, column) = d[row][column];
}

template <typename element, int columns, int accumulate, int transpose_a, int transpose_b>
static void wgmma(float *d, const uint32_t *a, uint64_t a_matrix, uint64_t b_matrix) {
    wgmma_operands mine = {d, a, a_matrix, b_matrix};
    emulated_collective(~0u, &mine,
                        wgmma_warp<element, columns, accumulate, transpose_a, transpose_b>);
}

template <typename element, int accumulate, int transpose_a = 0, int transpose_b = 0>
static void wgmma_m64n32k16(float (&d)[16], uint64_t a, uint64_t b) {
    wgmma<element, 32, accumulate, transpose_a, transpose_b>(d, NULL, a, b);
}

template <typename element, int accumulate, int transpose_a = 0, int transpose_b = 0>
static void wgmma_m64n64k16(float (&d)[32], uint64_t a, uint64_t b) {
    wgmma<element, 64, accumulate, transpose_a, transpose_b>(d, NULL, a, b);
}

template <typename element, int accumulate, int transpose_a = 0, int transpose_b = 0>
static void wgmma_m64n128k16(float (&d)[64], uint64_t a, uint64_t b) {
    wgmma<element, 128, accumulate, transpose_a, transpose_b>(d, NULL, a, b);
}

template <typename element>
static void wgmma_m64n64k16(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
    wgmma<element, 64, 1, 0, 1>(d, a, 0, b);
}

template <typename element>
static void wgmma_m64n128k16(float (&d)[64], const uint32_t (&a)[4], uint64_t b) {
    wgmma<element, 128, 1, 0, 1>(d, a, 0, b);
}

template <typename element>
static void wgmma_m64n256k16(float (&d)[128], const uint32_t (&a)[4], uint64_t b) {
    wgmma<element, 256, 1, 0, 1>(d, a, 0, b);
}
