/* Vectors: eight consecutive channels of a row, 16 bytes of a 16-bit type. */
#pragma once

#include "cuda/device/element.cuh"

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
