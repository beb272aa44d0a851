/* Elements of the 16-bit types and of float32: conversion and packing. */
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

/* The type of the kernels for FDMA_FLOAT16. A build that only checks how kernels compile skips
 * them: the kernels of bfloat16 differ only in the types of a few instructions. */
#if defined(FDMA_ONE_ELEMENT)
using float16 = __nv_bfloat16;
#else
using float16 = __half;
#endif

template <typename T> __host__ __device__ constexpr bool is_bfloat16() { return false; }
template <> __host__ __device__ constexpr bool is_bfloat16<__nv_bfloat16>() { return true; }

__device__ static float to_float(float x) { return x; }
__device__ static float to_float(__half x) { return __half2float(x); }
__device__ static float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T> __device__ T from_float(float x);
template <> __device__ inline float from_float(float x) { return x; }
template <> __device__ inline __half from_float(float x) { return __float2half_rn(x); }
template <> __device__ inline __nv_bfloat16 from_float(float x) { return __float2bfloat16_rn(x); }

template <typename T> __device__ T from_float_toward_zero(float x);
template <> __device__ inline __half from_float_toward_zero(float x) { return __float2half_rz(x); }
template <> __device__ inline __nv_bfloat16 from_float_toward_zero(float x) {
    return __float2bfloat16_rz(x);
}

/* The name of an element's type in PTX, and the packing of two elements into one register, `low`
 * first in memory. */
template <typename element> struct element_type;

template <> struct element_type<__half> {
    static constexpr const char ptx[] = "f16";
    static __device__ uint32_t pack(float low, float high) {
        const __half2 both = __floats2half2_rn(low, high);
        return *(const uint32_t *)&both;
    }
};

template <> struct element_type<__nv_bfloat16> {
    static constexpr const char ptx[] = "bf16";
    static __device__ uint32_t pack(float low, float high) {
        const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
        return *(const uint32_t *)&both;
    }
};

/* The two elements of a register. */
template <typename element> __device__ static float2 unpack(uint32_t pair);
template <> __device__ inline float2 unpack<__half>(uint32_t pair) {
    return __half22float2(*(const __half2 *)&pair);
}
template <> __device__ inline float2 unpack<__nv_bfloat16>(uint32_t pair) {
    return __bfloat1622float2(*(const __nv_bfloat162 *)&pair);
}

static constexpr int vec_channels = 8;
static constexpr int vec_bytes = 16;

/* Loads a vector. `aligned`: `from` is aligned to 16 bytes. */
template <typename element>
__device__ static void load_vec(float (&to)[vec_channels], const element *from, bool aligned) {
    alignas(16) element raw[vec_channels];
    if (aligned)
#pragma unroll
        for (int x = 0; x < (int)(sizeof raw / sizeof(uint4)); x++)
            ((uint4 *)raw)[x] = ((const uint4 *)from)[x];
    else
#pragma unroll
        for (int x = 0; x < vec_channels; x++)
            raw[x] = from[x];
#pragma unroll
    for (int x = 0; x < vec_channels; x++)
        to[x] = to_float(raw[x]);
}

template <typename element>
__device__ static void store_vec(element *to, const float (&from)[vec_channels], bool aligned) {
    alignas(16) element raw[vec_channels];
#pragma unroll
    for (int x = 0; x < vec_channels; x++)
        raw[x] = from_float<element>(from[x]);
    if (aligned)
#pragma unroll
        for (int x = 0; x < (int)(sizeof raw / sizeof(uint4)); x++)
            ((uint4 *)to)[x] = ((const uint4 *)raw)[x];
    else
#pragma unroll
        for (int x = 0; x < vec_channels; x++)
            to[x] = raw[x];
}
