/* Words that the four lanes of a quad exchange, so that accumulators go out 16 bytes at a time. */
#ifndef FDMA_CUDA_DEVICE_QUAD_CUH
#define FDMA_CUDA_DEVICE_QUAD_CUH

#include <stdint.h>

/* words[i] of lane l of a quad becomes words[l] of lane i. */
__device__ static inline void transpose_quad(uint32_t (&words)[4]) {
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2) {
        const bool upper = (threadIdx.x & bit) != 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if ((i & bit) != 0)
                continue;
            const uint32_t sent = upper ? words[i] : words[i | bit];
            const uint32_t got = __shfl_xor_sync(~0u, sent, bit);
            words[i] = upper ? got : words[i];
            words[i | bit] = upper ? words[i | bit] : got;
        }
    }
}

#endif
