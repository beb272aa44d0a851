/* The PTX instructions of src/cuda/device/ptx.cuh on the emulated device. */
#pragma once

#include "cuda/device/element.cuh"

static inline void *at_shared(uint32_t address) { return emulated_shared_pointer(address); }

/* The toolkit's host conversions are slow. */
template <typename element> static inline float float_of(const void *from) {
    if constexpr (is_bfloat16<element>()) {
        uint16_t bits;
        memcpy(&bits, from, sizeof bits);
        return same_bits<float>((uint32_t)bits << 16);
    } else {
        _Float16 x;
        memcpy(&x, from, sizeof x);
        return (float)x;
    }
}

template <typename element> static inline float unpacked(const uint32_t *words, int i) {
    return float_of<element>((const char *)words + 2 * i);
}

struct mma_operands {
    float *d;
    const uint32_t *a;
    uint32_t b[2];
};

template <typename element> static inline void mma_warp(void *const *lanes, uint32_t) {
    float a[16][16], b[16][8], d[16][8];
    for (int lane = 0; lane < 32; lane++) {
        const mma_operands *const mine = (const mma_operands *)lanes[lane];
        for (int i = 0; i < 8; i++)
            a[lane / 4 + i / 2 % 2 * 8][lane % 4 * 2 + i % 2 + i / 4 * 8] =
                unpacked<element>(mine->a, i);
        for (int i = 0; i < 4; i++) {
            b[lane % 4 * 2 + i % 2 + i / 2 * 8][lane / 4] = unpacked<element>(mine->b, i);
            d[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2] = mine->d[i];
        }
    }
    for (int row = 0; row < 16; row++)
        for (int x = 0; x < 16; x++)
            for (int column = 0; column < 8; column++) // vectors; the order of each sum stays
                d[row][column] += a[row][x] * b[x][column];
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++)
            ((const mma_operands *)lanes[lane])->d[i] =
                d[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
}

template <typename element>
static void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    mma_operands mine = {d, a, {b0, b1}};
    emulated_collective(~0u, &mine, mma_warp<element>);
}

static inline void griddepcontrol_wait() {}
static inline void griddepcontrol_launch_dependents() {}

static inline uint32_t shared_address(const void *pointer) {
    return emulated_shared_address(pointer);
}

/* A barrier in shared memory: its phase, its expected and pending arrivals, and the bytes that it
 * waits for. */
struct mbarrier {
    uint64_t phase : 8, expected : 12, pending : 12, bytes : 32;
};

static inline void mbarrier_init(uint64_t *barrier, uint32_t arrivals) {
    *(mbarrier *)barrier = {0, arrivals, arrivals, 0};
}

static inline void mbarrier_end_phase(mbarrier *b) {
    if (b->pending == 0 && b->bytes == 0) {
        b->phase = b->phase + 1;
        b->pending = b->expected;
    }
}

static inline void mbarrier_arrive_expect_tx(uint64_t *barrier, uint32_t bytes) {
    mbarrier *const b = (mbarrier *)barrier;
    if (b->pending == 0)
        emulated_fail("an mbarrier without pending arrivals");
    b->bytes = b->bytes + bytes;
    b->pending = b->pending - 1;
    mbarrier_end_phase(b);
}

static inline void mbarrier_arrive(uint64_t *barrier) { mbarrier_arrive_expect_tx(barrier, 0); }

static inline void mbarrier_complete_tx(uint64_t *barrier, uint32_t bytes) {
    mbarrier *const b = (mbarrier *)barrier;
    if (b->bytes < bytes)
        emulated_fail("more bytes than an mbarrier expects");
    b->bytes = b->bytes - bytes;
    mbarrier_end_phase(b);
}

static inline void cp_async_bulk(uint32_t shared, const void *global, uint32_t bytes,
                                 uint64_t *barrier) {
    if (shared % 16 != 0 || (uintptr_t)global % 16 != 0 || bytes % 16 != 0)
        emulated_fail("cp.async.bulk of 16 bytes");
    memcpy(at_shared(shared), global, bytes);
    mbarrier_complete_tx(barrier, bytes);
}

static inline void cp_async_bulk_tensor(uint32_t shared, const void *map, int32_t x, int32_t y,
                                        int32_t z, int32_t w, uint64_t *barrier) {
    enum { line_bytes = 128, swizzle_rows = 8, vec_bytes = 16 };
    const emulated_map *const from = (const emulated_map *)map;
    const uint64_t at[] = {(uint64_t)x, (uint64_t)y, (uint64_t)z, (uint64_t)w};
    if (shared % (swizzle_rows * line_bytes) != 0)
        emulated_fail("cp.async.bulk.tensor into swizzled lines");
    for (uint64_t row = 0; row < from->box_rows; row++)
        for (uint64_t n = 0; n < line_bytes / 2; n++) {
            const bool is_there = at[0] + n < from->shape[0] && at[1] + row < from->shape[1] &&
                                  at[2] < from->shape[2] && at[3] < from->shape[3];
            const uint64_t inside = (n / 8 ^ row % swizzle_rows) * vec_bytes + n % 8 * 2;
            char *const to = (char *)at_shared((uint32_t)(shared + row * line_bytes + inside));
            memset(to, 0, 2);
            if (is_there)
                memcpy(to,
                       from->data + 2 * (at[0] + n) + from->strides[0] * (at[1] + row) +
                           from->strides[1] * at[2] + from->strides[2] * at[3],
                       2);
        }
    mbarrier_complete_tx(barrier, (uint32_t)(from->box_rows * line_bytes));
}

static inline bool mbarrier_try_wait(uint64_t *barrier, uint32_t parity) {
    const bool done = ((const volatile mbarrier *)barrier)->phase % 2 != parity;
    if (!done)
        emulated_poll();
    return done;
}

static inline void fence_mbarrier_init() {}

static inline void cp_async_16(uint32_t shared, const void *global, uint32_t bytes) {
    if (shared % 16 != 0 || (bytes > 0 && (uintptr_t)global % 16 != 0) || bytes > 16)
        emulated_fail("cp.async of 16 bytes");
    emulated_copy_later(at_shared(shared), global, bytes, 16 - bytes);
}

static inline void cp_async_mbarrier_arrive_noinc(uint64_t *barrier) {
    emulated_finish_copies(0);
    mbarrier_arrive(barrier);
}

static inline void fence_proxy_async() {}
static inline void cp_async_bulk_commit_group() {}
template <int> static inline void cp_async_bulk_wait_group() {}
static inline void cp_async_bulk_wait_group_read() {}
template <uint32_t registers> static void setmaxnreg_dec() {}
template <uint32_t registers> static void setmaxnreg_inc() {}

static inline void bar_sync(uint32_t barrier, uint32_t threads) {
    emulated_barrier(barrier, threads, true, false);
}

static inline void bar_arrive(uint32_t barrier, uint32_t threads) {
    emulated_barrier(barrier, threads, false, false);
}

static inline bool bar_red_or(uint32_t barrier, uint32_t threads, bool predicate) {
    return emulated_barrier(barrier, threads, true, predicate).any;
}

static inline uint64_t mad_wide_u32(uint32_t a, uint32_t b, uint64_t c) {
    return (uint64_t)a * b + c;
}

static inline uint32_t opaque(uint32_t x) { return x; }
template <int n> static void hold(const uint32_t (&)[n][4]) {}
static inline uint32_t low_bits(uint32_t count) { return count < 32 ? (1u << count) - 1 : ~0u; }
static inline uint32_t prmt(uint32_t low, uint32_t high, uint32_t selector) {
    const uint64_t bytes = (uint64_t)high << 32 | low;
    uint32_t result = 0;
    for (int i = 0; i < 4; i++) {
        const uint32_t digit = selector >> 4 * i & 15, byte = bytes >> 8 * (digit & 7) & 0xff;
        result |= (digit < 8 ? byte : byte >> 7 ? 0xff : 0) << 8 * i;
    }
    return result;
}
static inline uint32_t mov_b32(uint32_t x) { return x; }

static inline float ex2_approx(float x) {
    const float y = exp2f(x);
    return y < 0x1p-126f ? 0 : y;
}

static inline void cp_async_4(uint32_t shared, const void *global) {
    if (shared % 4 != 0 || (uintptr_t)global % 4 != 0)
        emulated_fail("cp.async of 4 bytes");
    emulated_copy_later(at_shared(shared), global, 4, 0);
}

static inline void cp_async_commit_group() { emulated_commit(); }
template <int pending> static void cp_async_wait_group() { emulated_finish_copies(pending); }

/* Matrices of 8 x 8 elements: lane 8 m + r holds the address of row r of matrix m. */
struct matrix_operands {
    uint32_t words[4];
    uint32_t shared;
};

template <int count, bool stores, bool transposed>
static inline void move_matrices(void *const *lanes, uint32_t) {
    for (int m = 0; m < count; m++)
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 2; i++) {
                const int row = transposed ? lane % 4 * 2 + i : lane / 4;
                const int column = transposed ? lane / 4 : lane % 4 * 2 + i;
                const uint32_t shared = ((const matrix_operands *)lanes[8 * m + row])->shared;
                if (shared % 16 != 0)
                    emulated_fail("a row of a matrix that is not aligned to 16 bytes");
                uint16_t *const in_memory = (uint16_t *)at_shared(shared) + column;
                uint16_t *const in_lane =
                    (uint16_t *)&((matrix_operands *)lanes[lane])->words[m] + i;
                if (stores)
                    *in_memory = *in_lane;
                else
                    *in_lane = *in_memory;
            }
}

static inline void ldmatrix_x2(uint32_t (&to)[2], uint32_t shared) {
    matrix_operands mine = {{}, shared};
    emulated_collective(~0u, &mine, move_matrices<2, false, false>);
    memcpy(to, mine.words, sizeof to);
}

static inline void ldmatrix_x4(uint32_t (&to)[4], uint32_t shared) {
    matrix_operands mine = {{}, shared};
    emulated_collective(~0u, &mine, move_matrices<4, false, false>);
    memcpy(to, mine.words, sizeof to);
}

static inline void ldmatrix_x4_trans(uint32_t (&to)[4], uint32_t shared) {
    matrix_operands mine = {{}, shared};
    emulated_collective(~0u, &mine, move_matrices<4, false, true>);
    memcpy(to, mine.words, sizeof to);
}

static inline void stmatrix_x4(uint32_t shared, const uint32_t (&from)[4]) {
    matrix_operands mine = {{from[0], from[1], from[2], from[3]}, shared};
    emulated_collective(~0u, &mine, move_matrices<4, true, false>);
}

extern thread_local uint4 dynamic_shared[];
template <typename memory> static memory &shared_memory() {
    return *reinterpret_cast<memory *>(dynamic_shared);
}

static inline uint32_t lanemask_lt() { return (1u << own_lane()) - 1; }

static inline uint32_t vote_ballot_same(uint32_t word, uint32_t bit) {
    const bool set = (word & bit) != 0;
    const uint32_t all = __ballot_sync(~0u, set);
    return set ? all : ~all;
}

/* ---- clusters ---- */

static inline uint32_t cluster_ctarank() { return emulated_rank; }
static inline uint32_t mapa(uint32_t shared, uint32_t rank) {
    return emulated_map_rank(shared, rank);
}

template <typename T> static inline void st_shared_cluster(uint32_t address, T value) {
    if (address % sizeof value != 0)
        emulated_fail("st.shared::cluster of its size");
    for (size_t i = 0; i < sizeof value / 4; i++)
        __atomic_store_n((uint32_t *)at_shared(address) + i, ((const uint32_t *)&value)[i],
                         __ATOMIC_RELEASE);
}

static inline uint32_t ld_shared_cluster(uint32_t address) {
    emulated_poll();
    return __atomic_load_n((const uint32_t *)at_shared(address), __ATOMIC_ACQUIRE);
}

/* Several blocks may store at once. */
template <typename T> static inline void st_async(uint32_t address, T value, uint32_t barrier) {
    if (address % sizeof value != 0)
        emulated_fail("st.async of its size");
    *(T *)at_shared(address) = value;
    uint64_t *const shared = (uint64_t *)at_shared(barrier);
    uint64_t old = __atomic_load_n(shared, __ATOMIC_ACQUIRE), changed;
    do {
        changed = old;
        mbarrier_complete_tx(&changed, sizeof value);
    } while (!__atomic_compare_exchange_n(shared, &old, changed, false, __ATOMIC_ACQ_REL,
                                          __ATOMIC_ACQUIRE));
}

static inline void barrier_cluster_arrive() { emulated_cluster_arrive(); }
static inline void barrier_cluster_wait() { emulated_cluster_wait(); }

/* ---- device memory ---- */

static inline uint32_t ld_relaxed_gpu(const uint32_t *address) {
    emulated_poll();
    return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}

static inline uint32_t ld_acquire_gpu(const uint32_t *address) { return ld_relaxed_gpu(address); }

static inline void st_relaxed_gpu(uint32_t *address, uint32_t value) {
    __atomic_store_n(address, value, __ATOMIC_RELEASE);
}

static inline void red_add_v4(float *address, float x, float y, float z, float w) {
    const float added[] = {x, y, z, w};
    if ((uintptr_t)address % 16 != 0)
        emulated_fail("red of 16 bytes");
    for (int i = 0; i < 4; i++)
        atomicAdd(address + i, added[i]);
}

static inline void cp_reduce_async_bulk_add(float *global, uint32_t shared, uint32_t bytes) {
    if (shared % 16 != 0 || (uintptr_t)global % 16 != 0 || bytes % 16 != 0)
        emulated_fail("cp.reduce.async.bulk of 16 bytes");
    for (uint32_t i = 0; i < bytes / sizeof(float); i++)
        atomicAdd(global + i, ((const float *)at_shared(shared))[i]);
}

static inline void add_four(float *address, float x, float y, float z, float w) {
    red_add_v4(address, x, y, z, w);
}

static inline void red_add_v2(float *address, float x, float y) {
    if ((uintptr_t)address % 8 != 0)
        emulated_fail("red of 8 bytes");
    atomicAdd(address, x);
    atomicAdd(address + 1, y);
}

/* Not atomic: no two threads of these kernels add to one element. */
template <typename element>
static inline void red_add_x8(element *address, const uint32_t (&words)[4]) {
    if ((uintptr_t)address % 16 != 0)
        emulated_fail("red of 16 bytes");
    for (int i = 0; i < 8; i++)
        address[i] =
            from_float<element>(float_of<element>(address + i) + unpacked<element>(words, i));
}

static inline void fence_release_gpu() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
