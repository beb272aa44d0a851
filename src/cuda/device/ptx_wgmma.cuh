/* The wrappers of wgmma, Hopper's warpgroup matrix product: one per instruction and shape.
 * Source: PTX ISA 9.0, asynchronous warpgroup level matrix instructions. */
#pragma once

#include "cuda/device/element.cuh"

/* Orders earlier accesses to registers and shared memory before the wgmma that follow. */
__device__ static void wgmma_fence(void) { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ static void wgmma_commit_group(void) {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* Waits until at most the `pending` latest groups are still in flight. */
template <int pending> __device__ static void wgmma_wait_group(void) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

/* The names of the first operands of an instruction: %0, %1, ... */
#define NAMES_10(tens)                                                                             \
    "%" #tens "0, %" #tens "1, %" #tens "2, %" #tens "3, %" #tens "4, "                            \
    "%" #tens "5, %" #tens "6, %" #tens "7, %" #tens "8, %" #tens "9, "
#define NAMES_16 NAMES_10() "%10, %11, %12, %13, %14, %15"
#define NAMES_32 NAMES_10() NAMES_10(1) NAMES_10(2) "%30, %31"
#define NAMES_60 NAMES_10() NAMES_10(1) NAMES_10(2) NAMES_10(3) NAMES_10(4) NAMES_10(5)
#define NAMES_64 NAMES_60 "%60, %61, %62, %63"
#define NAMES_120 NAMES_60 NAMES_10(6) NAMES_10(7) NAMES_10(8) NAMES_10(9) NAMES_10(10) NAMES_10(11)
#define NAMES_128 NAMES_120 "%120, %121, %122, %123, %124, %125, %126, %127"

/* The accumulators for these names: d from n on. */
#define SUMS_8(d, n)                                                                               \
    "+f"(d[n]), "+f"(d[n + 1]), "+f"(d[n + 2]), "+f"(d[n + 3]), "+f"(d[n + 4]), "+f"(d[n + 5]),    \
        "+f"(d[n + 6]), "+f"(d[n + 7])
#define SUMS_16(d, n) SUMS_8(d, n), SUMS_8(d, n + 8)
#define SUMS_32(d, n) SUMS_16(d, n), SUMS_16(d, n + 16)
#define SUMS_64(d, n) SUMS_32(d, n), SUMS_32(d, n + 32)
#define SUMS_128(d, n) SUMS_64(d, n), SUMS_64(d, n + 64)

/* D = A B + D, or D = A B with accumulate 0, by a whole warpgroup. A [64 x 16] and B [16 x n] are
 * in shared memory, both contiguous along k unless transposed; or A is in registers, and B
 * contiguous along n. */

template <typename element, int accumulate, int transpose_a = 0, int transpose_b = 0>
__device__ static void wgmma_m64n32k16(float (&d)[16], uint64_t a, uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.%21.%21 {" NAMES_16 "}, "
                 "%16, %17, %18, 1, 1, %19, %20;"
                 : SUMS_16(d, 0)
                 : "l"(a), "l"(b), "n"(accumulate), "n"(transpose_a), "n"(transpose_b),
                   "C"(element_type<element>::ptx));
}

template <typename element, int accumulate, int transpose_a = 0, int transpose_b = 0>
__device__ static void wgmma_m64n64k16(float (&d)[32], uint64_t a, uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.%37.%37 {" NAMES_32 "}, "
                 "%32, %33, %34, 1, 1, %35, %36;"
                 : SUMS_32(d, 0)
                 : "l"(a), "l"(b), "n"(accumulate), "n"(transpose_a), "n"(transpose_b),
                   "C"(element_type<element>::ptx));
}

template <typename element, int accumulate, int transpose_a = 0, int transpose_b = 0>
__device__ static void wgmma_m64n128k16(float (&d)[64], uint64_t a, uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.%69.%69 {" NAMES_64 "}, "
                 "%64, %65, %66, 1, 1, %67, %68;"
                 : SUMS_64(d, 0)
                 : "l"(a), "l"(b), "n"(accumulate), "n"(transpose_a), "n"(transpose_b),
                   "C"(element_type<element>::ptx));
}

template <typename element>
__device__ static void wgmma_m64n64k16(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.%37.%37 {" NAMES_32 "}, "
                 "{%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
                 : SUMS_32(d, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),
                   "C"(element_type<element>::ptx));
}

template <typename element>
__device__ static void wgmma_m64n128k16(float (&d)[64], const uint32_t (&a)[4], uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.%69.%69 {" NAMES_64 "}, "
                 "{%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
                 : SUMS_64(d, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),
                   "C"(element_type<element>::ptx));
}

template <typename element>
__device__ static void wgmma_m64n256k16(float (&d)[128], const uint32_t (&a)[4], uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.%133.%133 {" NAMES_128 "}, "
                 "{%128, %129, %130, %131}, %132, 1, 1, 1, 1;"
                 : SUMS_128(d, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),
                   "C"(element_type<element>::ptx));
}
