/* One wrapper per PTX instruction, named after it. All inline assembly is here and in
 * ptx_wgmma.cuh. Source: PTX ISA 9.0. */
#pragma once

#include "cuda/device/element.cuh"

/* d += a b^T: a is 16 x 16 and b 8 x 16, both contiguous along k; d is 16 x 8 in float32. */
template <typename element>
__device__ static void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.%10.%10.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1),
                   "C"(element_type<element>::ptx));
}

/* Waits until the kernel ahead in the stream has ended and its writes are visible. For kernels
 * launched with start_early. */
__device__ static void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* Lets the next kernel in the stream start, if it is launched with start_early. Call it after
 * griddepcontrol_wait(), so that every kernel before this one has ended by then. It may come
 * earlier if the kernel before this one has called both in that order, and the next one does not
 * depend on it. */
__device__ static void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ static uint32_t shared_address(const void *pointer) {
    return (uint32_t)__cvta_generic_to_shared(pointer);
}

__device__ static void mbarrier_init(uint64_t *barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(arrivals)
                 : "memory");
}

__device__ static void mbarrier_arrive(uint64_t *barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
                 : "memory");
}

/* Arrives, and makes the phase wait for `bytes` bytes of bulk copies too. */
__device__ static void mbarrier_arrive_expect_tx(uint64_t *barrier, uint32_t bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
        "r"(bytes)
        : "memory");
}

/* Copies `bytes` bytes to shared memory. These and both addresses are multiples of 16. The bytes
 * count for the barrier's mbarrier_arrive_expect_tx(). */
__device__ static void cp_async_bulk(uint32_t shared, const void *global, uint32_t bytes,
                                     uint64_t *barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], "
                 "%2, [%3];" ::"r"(shared),
                 "l"(global), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

/* Copies the box at these coordinates of a tensor map of rank 4 to shared memory. Its bytes count
 * as in cp_async_bulk(). */
__device__ static void cp_async_bulk_tensor(uint32_t shared, const void *map, int32_t x, int32_t y,
                                            int32_t z, int32_t w, uint64_t *barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(shared),
                 "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(shared_address(barrier))
                 : "memory");
}

/* Adds float32 numbers in shared memory to those in device memory. `bytes` and both addresses are
 * multiples of 16. */
__device__ static void cp_reduce_async_bulk_add(float *global, uint32_t shared, uint32_t bytes) {
    asm volatile(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global),
        "r"(shared), "r"(bytes)
        : "memory");
}

__device__ static void cp_async_bulk_commit_group(void) {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/* Waits until this thread's bulk operations have read shared memory. */
__device__ static void cp_async_bulk_wait_group_read(void) {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

/* Waits until at most the `pending` latest groups of this thread's bulk operations are
 * incomplete. */
template <int pending> __device__ static void cp_async_bulk_wait_group(void) {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(pending) : "memory");
}

__device__ static bool mbarrier_try_wait(uint64_t *barrier, uint32_t parity) {
    uint32_t done;
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, done;\n"
                 "}"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
    return done != 0;
}

/* Makes barriers that this thread initialised visible to asynchronous operations. */
__device__ static void fence_mbarrier_init(void) {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/* Copies 16 bytes to shared memory, bypassing L1. Reads only the first `bytes`; the rest is 0. */
__device__ static void cp_async_16(uint32_t shared, const void *global, uint32_t bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
                 "r"(bytes)
                 : "memory");
}

/* Arrives at `barrier` once all earlier cp.async of this thread are done. The barrier's count must
 * include this arrival. */
__device__ static void cp_async_mbarrier_arrive_noinc(uint64_t *barrier) {
    asm volatile(
        "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier))
        : "memory");
}

/* Orders earlier ordinary writes to shared memory before accesses by wgmma or TMA. */
__device__ static void fence_proxy_async(void) {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

template <uint32_t registers> __device__ static void setmaxnreg_dec(void) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

template <uint32_t registers> __device__ static void setmaxnreg_inc(void) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

__device__ static void bar_sync(uint32_t barrier, uint32_t threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ static void bar_arrive(uint32_t barrier, uint32_t threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ static uint64_t mad_wide_u32(uint32_t a, uint32_t b, uint64_t c) {
    uint64_t d;
    asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(d) : "r"(a), "r"(b), "l"(c));
    return d;
}

/* Returns x, but hides its value from the compiler. Values that depend on it are computed again at
 * each use, instead of being kept in registers from an earlier use. */
__device__ static uint32_t opaque(uint32_t x) {
    asm volatile("" : "+r"(x));
    return x;
}

/* Keeps words in their registers up to here, because wgmma reads them until a wait for it. */
template <int n> __device__ static void hold(const uint32_t (&words)[n][4]) {
#pragma unroll
    for (int i = 0; i < n; i++)
        asm volatile("" ::"r"(words[i][0]), "r"(words[i][1]), "r"(words[i][2]), "r"(words[i][3]));
}

/* A copy of x in another register. */
__device__ static uint32_t mov_b32(uint32_t x) {
    uint32_t y;
    asm volatile("mov.b32 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

/* The lowest `count` bits, or all 32. */
__device__ static uint32_t low_bits(uint32_t count) {
    uint32_t bits;
    asm("bmsk.clamp.b32 %0, 0, %1;" : "=r"(bits) : "r"(count));
    return bits;
}

/* Selects four bytes of low (0 to 3) and high (4 to 7), one digit of the selector for each. A digit
 * with 8 added stands for eight copies of that byte's sign. */
__device__ static uint32_t prmt(uint32_t low, uint32_t high, uint32_t selector) {
    uint32_t bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selector));
    return bytes;
}

/* 2^x; 0 for -inf. Subnormal results are 0. */
__device__ static float ex2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ static void cp_async_4(uint32_t shared, const void *global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(global) : "memory");
}

__device__ static void cp_async_commit_group(void) {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Waits until at most the `pending` latest groups of this thread are still in flight. */
template <int pending> __device__ static void cp_async_wait_group(void) {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

/* Loads two or four matrices of 8 x 8 elements. Lane 8 m + r passes the address of row r of matrix
 * m. */
__device__ static void ldmatrix_x2(uint32_t (&to)[2], uint32_t shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(to[0]), "=r"(to[1])
                 : "r"(shared));
}

__device__ static void ldmatrix_x4(uint32_t (&to)[4], uint32_t shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared));
}

__device__ static void ldmatrix_x4_trans(uint32_t (&to)[4], uint32_t shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared));
}

template <typename memory> __device__ static memory &shared_memory(void) {
    extern __shared__ uint4 dynamic_shared[];
    return *reinterpret_cast<memory *>(dynamic_shared);
}

__device__ static uint32_t lanemask_lt(void) {
    uint32_t mask;
    asm("mov.u32 %0, %%lanemask_lt;" : "=r"(mask));
    return mask;
}

/* The lanes that agree with this one in the bits `bit` of `word`, by vote.sync.ballot. In assembly,
 * because the compiler would shift the bit down first, twice. */
__device__ static uint32_t vote_ballot_same(uint32_t word, uint32_t bit) {
    uint32_t same;
    asm volatile("{\n"
                 ".reg .pred set;\n"
                 ".reg .b32 masked;\n"
                 "and.b32 masked, %1, %2;\n"
                 "setp.ne.u32 set, masked, 0;\n"
                 "vote.sync.ballot.b32 %0, set, 0xffffffff;\n"
                 "@!set not.b32 %0, %0;\n"
                 "}"
                 : "=r"(same)
                 : "r"(word), "r"(bit));
    return same;
}

__device__ static uint32_t cluster_ctarank(void) {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

/* The address of the same variable in the shared memory of another block of the cluster. */
__device__ static uint32_t mapa(uint32_t shared, uint32_t rank) {
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
    return address;
}

__device__ static void st_shared_cluster(uint32_t address, uint32_t value) {
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

__device__ static void st_shared_cluster(uint32_t address, uint2 value) {
    asm volatile("st.shared::cluster.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(value.x),
                 "r"(value.y)
                 : "memory");
}

__device__ static void st_shared_cluster(uint32_t address, uint4 value) {
    asm volatile("st.shared::cluster.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x),
                 "r"(value.y), "r"(value.z), "r"(value.w)
                 : "memory");
}

__device__ static uint32_t ld_shared_cluster(uint32_t address) {
    uint32_t value;
    asm volatile("ld.relaxed.cluster.shared::cluster.u32 %0, [%1];"
                 : "=r"(value)
                 : "r"(address)
                 : "memory");
    return value;
}

/* Stores to the shared memory of a block of the cluster without waiting. The bytes count for the
 * mbarrier_arrive_expect_tx() of `barrier`, an mbarrier of the same block; both are addresses of
 * mapa(). */
__device__ static void st_async(uint32_t address, float2 value, uint32_t barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, "
                 "[%3];" ::"r"(address),
                 "f"(value.x), "f"(value.y), "r"(barrier)
                 : "memory");
}

__device__ static void st_async(uint32_t address, float4 value, uint32_t barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, "
                 "%4}, [%5];" ::"r"(address),
                 "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(barrier)
                 : "memory");
}

__device__ static void barrier_cluster_arrive(void) {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ static void barrier_cluster_wait(void) {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ static uint32_t ld_relaxed_gpu(const uint32_t *address) {
    uint32_t value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

__device__ static void st_relaxed_gpu(uint32_t *address, uint32_t value) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

/* Stores four matrices of 8 x 8 elements. Lane 8 m + r passes the address of row r of matrix m. */
__device__ static void stmatrix_x4(uint32_t shared, const uint32_t (&from)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared),
                 "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3])
                 : "memory");
}

/* Waits for `threads` threads at a named barrier. True if the predicate holds for any of them. */
__device__ static bool bar_red_or(uint32_t barrier, uint32_t threads, bool predicate) {
    uint32_t any;
    asm volatile("{\n"
                 ".reg .pred mine, any;\n"
                 "setp.ne.u32 mine, %3, 0;\n"
                 "bar.red.or.pred any, %1, %2, mine;\n"
                 "selp.u32 %0, 1, 0, any;\n"
                 "}"
                 : "=r"(any)
                 : "r"(barrier), "r"(threads), "r"((uint32_t)predicate)
                 : "memory");
    return any != 0;
}

/* Adds to four, or two, consecutive floats in device memory, without returning them. */
__device__ static void red_add_v4(float *address, float x, float y, float z, float w) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(x),
                 "f"(y), "f"(z), "f"(w)
                 : "memory");
}

/* Adds to four floats on any device. Before 9.0 it adds one after the other. */
__device__ static void add_four(float *address, float x, float y, float z, float w) {
#if __CUDA_ARCH__ >= 900
    red_add_v4(address, x, y, z, w);
#else
    atomicAdd(address, x);
    atomicAdd(address + 1, y);
    atomicAdd(address + 2, z);
    atomicAdd(address + 3, w);
#endif
}

__device__ static void red_add_v2(float *address, float x, float y) {
    asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(address), "f"(x), "f"(y)
                 : "memory");
}

/* Adds to eight consecutive elements in device memory, at a multiple of 16 bytes, without returning
 * them. words: pairs of elements. */
template <typename element>
__device__ static void red_add_x8(element *address, const uint32_t (&words)[4]) {
    asm volatile("red.relaxed.gpu.global.add.noftz.v4.%5x2 [%0], {%1, %2, %3, %4};" ::"l"(address),
                 "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]),
                 "C"(element_type<element>::ptx)
                 : "memory");
}

/* Orders earlier accesses to device memory, this thread's and those it has observed, before its
 * later stores, as seen by threads that acquire one of these. */
__device__ static void fence_release_gpu(void) { asm volatile("fence.release.gpu;" ::: "memory"); }

__device__ static uint32_t ld_acquire_gpu(const uint32_t *address) {
    uint32_t value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}
