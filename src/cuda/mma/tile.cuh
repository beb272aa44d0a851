/* Tiles of 16-bit elements for mma.sync: the layout of rows of head_dim channels in shared memory,
 * copies to it, and the two matrix products of attention.
 *
 * The template parameter `shape` has head_dim, row_tiles (tiles of 16 rows of a warp) and keys (of
 * a key block). Accumulators are [row tile][tile of 8 columns][4]: two of a lane's four elements
 * are in row lane / 4 and two in row lane / 4 + 8, at columns 2 * (lane % 4) and the next. Source:
 * PTX ISA, "Matrix fragments for mma.m16n8k16". */
#pragma once

#include "cuda/device/element.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/view.cuh"

#ifndef FDMA_HEAD_DIM
#define FDMA_HEAD_DIM 128 // in an editor, where no build defines it
#endif

enum { warp_lanes = 32, mma_rows = 16 };

/* Rows in shared memory. A vector is the 16 bytes that a lane copies at once, and one row of an 8 x
 * 8 matrix of ldmatrix. The vectors of a row are permuted by its number, so that the same vector of
 * 8 consecutive rows lies in different banks. */
template <int head_dim> struct row_layout {
    static constexpr int row_bytes = head_dim * 2;
    static constexpr int vecs = head_dim / vec_channels;
    static constexpr int period = row_bytes % 128 == 0 ? 8 : 4; // vectors permuted among themselves
    static constexpr int copiers = period;                      // lanes that copy a row together

    __device__ static int swizzle(int row) { return period == 8 ? row & 7 : (row >> 1) & 3; }

    __device__ static uint32_t offset(int row, int vec) {
        return row * row_bytes + (vec ^ swizzle(row)) * vec_bytes;
    }
};

/* The address that a lane passes to ldmatrix, from its row among the first 16 and its vector, 0 or
 * 1. Addresses of later rows and vectors differ from it by constants. A first vector of 2 or 3 is
 * allowed if the later ones are multiples of 4 away. */
template <int head_dim> struct lane_address {
    using layout = row_layout<head_dim>;
    uint32_t row, swizzle;

    __device__ lane_address(const void *rows, int lane_row, int vec)
        : row(shared_address(rows) + lane_row * layout::row_bytes),
          swizzle((vec ^ layout::swizzle(lane_row)) * vec_bytes) {}

    /* The same address, hidden from the compiler, which would hoist address arithmetic out of a
     * loop and need too many registers. */
    __device__ lane_address unhoisted() const {
        lane_address other = *this;
        other.swizzle = opaque(swizzle);
        return other;
    }

    __device__ uint32_t at(int rows, int vecs) const {
        const int inside = vecs % layout::period, before = vecs - inside;
        return row + (swizzle ^ (inside * vec_bytes)) + rows * layout::row_bytes +
               before * vec_bytes;
    }
};

/* ldmatrix loads 16 rows x 16 channels as four 8 x 8 matrices. Their order is down first, then
 * right, for the left operand of a product, and for the right one if it is transposed. */
template <int head_dim>
__device__ static lane_address<head_dim> down_first(const void *rows, int first_vec = 0) {
    const int lane = threadIdx.x % warp_lanes;
    return lane_address<head_dim>(rows, lane % 16, lane / 16 + first_vec);
}

/* Right first, then down: for a right operand that is not transposed. */
template <int head_dim> __device__ static lane_address<head_dim> right_first(const void *rows) {
    const int lane = threadIdx.x % warp_lanes;
    return lane_address<head_dim>(rows, lane % 8 + lane / 16 * 8, lane / 8 % 2);
}

template <int tiles, int columns>
__device__ static void clear_sums(float (&sums)[tiles][columns][4]) {
#pragma unroll
    for (int x = 0; x < tiles * columns * 4; x++)
        (&sums[0][0][0])[x] = 0;
}

/* s = Q K^T. q is at the warp's first row, k at the first key of the block. */
template <typename shape>
__device__ static void mma_abt(float (&s)[shape::row_tiles][shape::keys / 8][4],
                               const lane_address<shape::head_dim> &q,
                               const lane_address<shape::head_dim> &k) {
    clear_sums(s);
#pragma unroll
    for (int vec = 0; vec < shape::head_dim / vec_channels; vec += 2) {
        uint32_t rows[shape::row_tiles][4];
#pragma unroll
        for (int t = 0; t < shape::row_tiles; t++)
            ldmatrix_x4(rows[t], q.at(t * mma_rows, vec));
#pragma unroll
        for (int n = 0; n < shape::keys / 8; n += 2) {
            uint32_t keys[4];
            ldmatrix_x4(keys, k.at(n * 8, vec));
#pragma unroll
            for (int t = 0; t < shape::row_tiles; t++) {
                mma_m16n8k16<typename shape::element>(s[t][n], rows[t], keys[0], keys[1]);
                mma_m16n8k16<typename shape::element>(s[t][n + 1], rows[t], keys[2], keys[3]);
            }
        }
    }
}

/* out += P V. The accumulators of two column tiles of P are the left operand for 16 keys. If out
 * has only some of v's column tiles, it has pairs of them at equal distances, and v points to the
 * first. */
template <typename shape, int columns>
__device__ static void mma_ab(float (&out)[shape::row_tiles][columns][4],
                              const float (&p)[shape::row_tiles][shape::keys / 8][4],
                              const lane_address<shape::head_dim> &v) {
    using type = element_type<typename shape::element>;
    constexpr int spread = shape::head_dim / vec_channels / columns;
#pragma unroll
    for (int n = 0; n < shape::keys / 8; n += 2) {
        uint32_t weights[shape::row_tiles][4];
#pragma unroll
        for (int t = 0; t < shape::row_tiles; t++)
#pragma unroll
            for (int x = 0; x < 4; x++)
                weights[t][x] =
                    type::pack(p[t][n + x / 2][x % 2 * 2], p[t][n + x / 2][x % 2 * 2 + 1]);
#pragma unroll
        for (int d = 0; d < columns; d += 2) {
            uint32_t values[4];
            ldmatrix_x4_trans(values, v.at(n * 8, d * spread));
#pragma unroll
            for (int t = 0; t < shape::row_tiles; t++) {
                mma_m16n8k16<typename shape::element>(out[t][d], weights[t], values[0], values[1]);
                mma_m16n8k16<typename shape::element>(out[t][d + 1], weights[t], values[2],
                                                      values[3]);
            }
        }
    }
}

/* The rows of one sequence and head in global memory. If some keys are carried, the rows of the
 * first carried_len keys are in `carried`. */
struct row_source {
    const char *data;
    int64_t stride;      // bytes
    int32_t vecs;        // of head_dim; a layout's vectors beyond them are zero
    bool aligned;        // every vector is aligned to 16 bytes
    int32_t carried_len; // 0: there are none
    const char *carried;
    int64_t carried_stride;
};

__device__ static row_source source_of(const head_view &view, int32_t b, int32_t g,
                                       int32_t head_dim, bool aligned) {
    return {rows_of(view, b, g), 2 * view.row, head_dim / vec_channels, aligned, 0, NULL, 0};
}

__device__ static const char *row_at(const row_source &source, uint32_t row) {
    return source.data + row * source.stride;
}

__device__ static const char *row_of_key(const row_source &source, uint32_t key) {
    return key < (uint32_t)source.carried_len ? source.carried + key * source.carried_stride
                                              : row_at(source, key - source.carried_len);
}

/* Copies a row that is aligned to its elements only. */
template <int head_dim>
__device__ static void copy_row_unaligned(char *rows, int row, const char *from, int32_t vecs,
                                          bool there) {
    using layout = row_layout<head_dim>;
#pragma unroll 1
    for (int x = threadIdx.x % layout::copiers * 2; x < layout::row_bytes; x += layout::copiers * 2)
        *(uint16_t *)(rows + layout::offset(row, x / vec_bytes) + x % vec_bytes) =
            there && x < vecs * vec_bytes ? *(const uint16_t *)(from + x) : (uint16_t)0;
}

/* Starts copying a row to shared memory, or zeros if !there, with `copiers` lanes. `aligned`: every
 * vector is aligned to 16 bytes. */
template <int head_dim>
__device__ static void copy_row(char *rows, int row, const char *from, int32_t vecs, bool there,
                                bool aligned) {
    using layout = row_layout<head_dim>;
    if (!aligned) {
        copy_row_unaligned<head_dim>(rows, row, from, vecs, there);
        return;
    }
#pragma unroll
    for (int x = 0; x < layout::vecs; x += layout::copiers) {
        const int vec = x + threadIdx.x % layout::copiers;
        cp_async_16(shared_address(rows + layout::offset(row, vec)), from + vec * vec_bytes,
                    there && vec < vecs ? vec_bytes : 0);
    }
}

template <int head_dim>
__device__ static void store_row(char *to, const char *rows, int row, int32_t vecs, bool aligned) {
    using layout = row_layout<head_dim>;
    for (int vec = threadIdx.x % layout::copiers; vec < vecs; vec += layout::copiers) {
        const char *const from = rows + layout::offset(row, vec);
        if (aligned)
            *(uint4 *)(to + vec * vec_bytes) = *(const uint4 *)from;
        else
            for (int e = 0; e < vec_bytes; e += 2)
                *(uint16_t *)(to + vec * vec_bytes + e) = *(const uint16_t *)(from + e);
    }
}
