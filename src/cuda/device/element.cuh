/* Elements of the 16-bit types, and float32. */
#ifndef FDMA_CUDA_DEVICE_ELEMENT_CUH
#define FDMA_CUDA_DEVICE_ELEMENT_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>

template <typename T> __host__ __device__ constexpr bool is_bfloat16() { return false; }
template <> __host__ __device__ constexpr bool is_bfloat16<__nv_bfloat16>() { return true; }

__device__ static inline float to_float(float x) { return x; }
__device__ static inline float to_float(__half x) { return __half2float(x); }
__device__ static inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T> __device__ T from_float_toward_zero(float x);
template <> __device__ inline __half from_float_toward_zero(float x) { return __float2half_rz(x); }
template <> __device__ inline __nv_bfloat16 from_float_toward_zero(float x) {
    return __float2bfloat16_rz(x);
}

#endif
