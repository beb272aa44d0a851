/* Tiles of 16-bit elements for mma.sync: rows of head_dim channels in shared memory, how they get
 * there, and the two products of attention.
 *
 * A shape names head_dim, row_tiles (of 16 rows, a warp's) and keys (of a block). Accumulators are
 * [row tile][column tile of 8][4]; a lane's four are rows lane / 4 and lane / 4 + 8, of each the
 * columns 2 * (lane % 4) and the next (PTX ISA, "Matrix fragments for mma.m16n8k16"). */
#ifndef FDMA_CUDA_FORWARD_SM80_TILE_CUH
#define FDMA_CUDA_FORWARD_SM80_TILE_CUH

#include "cuda/device/ptx.cuh"
#include "cuda/plan/plan.cuh"

enum {
    warp_lanes = 32,
    chunk_bytes = 16, // what a lane copies at once, and a row of a matrix that ldmatrix loads
    chunk_channels = 8,
    mma_rows = 16,
};

/* Rows in shared memory. The chunks of a row change places by its number, so that a column of
 * chunks of 8 rows lies in different banks. */
template <int head_dim> struct row_layout {
    static constexpr int row_bytes = head_dim * 2;
    static constexpr int chunks = head_dim / chunk_channels;
    static constexpr int turned = row_bytes % 128 == 0 ? 8 : 4; // chunks that change places
    static constexpr int copiers = turned;                      // lanes that copy a row together

    __device__ static inline int turn(int row) { return turned == 8 ? row & 7 : (row >> 1) & 3; }

    __device__ static inline uint32_t offset(int row, int chunk) {
        return row * row_bytes + (chunk ^ turn(row)) * chunk_bytes;
    }
};

/* The address that a lane gives ldmatrix for its row of the first 16, `chunk` 0 or 1; those of
 * later rows and chunks follow from it by constants. `chunk` 2 or 3: of multiples of 4 chunks
 * later. */
template <int head_dim> struct lane_address {
    using layout = row_layout<head_dim>;
    uint32_t row, turn;

    __device__ inline lane_address(const void *rows, int lane_row, int chunk)
        : row(shared_address(rows) + lane_row * layout::row_bytes),
          turn((chunk ^ layout::turn(lane_row)) * chunk_bytes) {}

    /* The same, from which nothing is computed ahead. */
    __device__ inline lane_address afresh() const {
        lane_address other = *this;
        other.turn = opaque(turn);
        return other;
    }

    __device__ inline uint32_t at(int rows, int chunks) const {
        const int inside = chunks % layout::turned, before = chunks - inside;
        return row + (turn ^ (inside * chunk_bytes)) + rows * layout::row_bytes +
               before * chunk_bytes;
    }
};

/* For a matrix of 16 rows x 16 channels as four of 8 x 8: down first, then right; or right first.
 */
template <int head_dim>
__device__ static inline lane_address<head_dim> down_first(const void *at, int first_chunk = 0) {
    const int lane = threadIdx.x % warp_lanes;
    return lane_address<head_dim>(at, lane % 16, lane / 16 + first_chunk);
}

template <int head_dim>
__device__ static inline lane_address<head_dim> right_first(const void *at) {
    const int lane = threadIdx.x % warp_lanes;
    return lane_address<head_dim>(at, lane % 8 + lane / 16 * 8, lane / 8 % 2);
}

/* s = Q K^T; q, k: the warp's first row, the block's first key. */
template <typename shape>
__device__ static inline void multiply_keys(float (&s)[shape::row_tiles][shape::keys / 8][4],
                                            const lane_address<shape::head_dim> &q,
                                            const lane_address<shape::head_dim> &k) {
#pragma unroll
    for (int x = 0; x < shape::row_tiles * shape::keys / 2; x++)
        (&s[0][0][0])[x] = 0;
#pragma unroll
    for (int chunk = 0; chunk < shape::head_dim / chunk_channels; chunk += 2) {
        uint32_t rows[shape::row_tiles][4];
#pragma unroll
        for (int t = 0; t < shape::row_tiles; t++)
            ldmatrix_x4(rows[t], q.at(t * mma_rows, chunk));
#pragma unroll
        for (int n = 0; n < shape::keys / 8; n += 2) {
            uint32_t keys[4];
            ldmatrix_x4(keys, k.at(n * 8, chunk));
#pragma unroll
            for (int t = 0; t < shape::row_tiles; t++) {
                mma_m16n8k16<typename shape::element>(s[t][n], rows[t], keys[0], keys[1]);
                mma_m16n8k16<typename shape::element>(s[t][n + 1], rows[t], keys[2], keys[3]);
            }
        }
    }
}

/* out += P V; accumulators of two column tiles are the left factor of 16 keys. Where out has only
 * a part of v's column tiles, they are pairs with equal gaps between, from v's own column on. */
template <typename shape, int columns>
__device__ static inline void add_values(float (&out)[shape::row_tiles][columns][4],
                                         const float (&p)[shape::row_tiles][shape::keys / 8][4],
                                         const lane_address<shape::head_dim> &v) {
    using type = element_type<typename shape::element>;
    constexpr int spread = shape::head_dim / chunk_channels / columns;
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

/* Rows of a tensor on their way to shared memory. */
struct row_source {
    const char *data; // of this sequence and head
    int64_t stride;   // bytes
    int32_t chunks;   // of head_dim; those above are zero
    bool aligned;     // every chunk to 16 bytes
};

__device__ static inline row_source source_of(const head_view &view, int32_t b, int32_t g,
                                              int32_t head_dim, bool aligned) {
    return {(const char *)view.data + 2 * (b * view.batch + g * view.head), 2 * view.row,
            head_dim / chunk_channels, aligned};
}

__device__ static inline const char *row_at(const row_source &source, uint32_t row) {
    return source.data + row * source.stride;
}

/* One row, or zeros, by the lanes that share it. */
template <int head_dim>
__device__ static inline void copy_row(char *rows, int row, const char *from, int32_t chunks,
                                       bool there) {
    using layout = row_layout<head_dim>;
#pragma unroll
    for (int x = 0; x < layout::chunks; x += layout::copiers) {
        const int chunk = x + threadIdx.x % layout::copiers;
        cp_async_16(shared_address(rows + layout::offset(row, chunk)), from + chunk * chunk_bytes,
                    there && chunk < chunks ? chunk_bytes : 0);
    }
}

/* The same for rows that are aligned to their elements alone. */
template <int head_dim>
__device__ static inline void copy_row_slowly(char *rows, int row, const char *from, int32_t chunks,
                                              bool there) {
    using layout = row_layout<head_dim>;
#pragma unroll 1
    for (int x = threadIdx.x % layout::copiers * 2; x < layout::row_bytes; x += layout::copiers * 2)
        *(uint16_t *)(rows + layout::offset(row, x / chunk_bytes) + x % chunk_bytes) =
            there && x < chunks * chunk_bytes ? *(const uint16_t *)(from + x) : (uint16_t)0;
}

/* One row out of shared memory, by the lanes that share it. */
template <int head_dim>
__device__ static inline void store_row(char *to, const char *rows, int row, int32_t chunks,
                                        bool aligned) {
    using layout = row_layout<head_dim>;
    for (int chunk = threadIdx.x % layout::copiers; chunk < chunks; chunk += layout::copiers) {
        const char *const from = rows + layout::offset(row, chunk);
        if (aligned)
            *(uint4 *)(to + chunk * chunk_bytes) = *(const uint4 *)from;
        else
            for (int e = 0; e < chunk_bytes; e += 2)
                *(uint16_t *)(to + chunk * chunk_bytes + e) = *(const uint16_t *)(from + e);
    }
}

#endif
