/* Elements of the 16-bit types and of float32, one or two at a time. */
#ifndef FDMA_CUDA_DEVICE_ELEMENT_CUH
#define FDMA_CUDA_DEVICE_ELEMENT_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>

__device__ static inline float to_float(float x) { return x; }
__device__ static inline float to_float(__half x) { return __half2float(x); }
__device__ static inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

#endif
