/* One wrapper per PTX instruction, named after it. Inline assembly lives here alone.
 * Source: PTX ISA 9.0. */
#ifndef FDMA_CUDA_DEVICE_PTX_CUH
#define FDMA_CUDA_DEVICE_PTX_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

/* d += a b^T: a is 16 x 16, b 8 x 16, both with k fastest; d 16 x 8 in float32. */
__device__ static inline void mma_m16n8k16(float (&d)[4], uint4 a, uint2 b, __nv_bfloat16) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
}

__device__ static inline void mma_m16n8k16(float (&d)[4], uint4 a, uint2 b, __half) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
}

/* 16 bytes that are read once: they need no place in L1. */
__device__ static inline uint4 ld_global_nc_no_allocate(const void *address) {
    uint4 x;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(address));
    return x;
}

/* Waits until the kernel ahead in the stream has ended and its writes can be seen; for kernels
 * launched with after_dependency. */
__device__ static inline void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* Lets the kernel behind in the stream start, if it was launched with after_dependency. What it does
 * before its own wait may rely only on what this kernel has itself waited for. */
__device__ static inline void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#endif
