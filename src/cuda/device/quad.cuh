/* An exchange of words between the four lanes of a quad, so that each lane can store 16 contiguous
 * bytes of a row of accumulators. */
#ifndef FDMA_CUDA_DEVICE_QUAD_CUH
#define FDMA_CUDA_DEVICE_QUAD_CUH

#include <stdint.h>

static constexpr int quad_channels = 32; // of 16 bits, that a quad stores at once: 8 per lane

/* Moves words[i] of lane l of a quad to words[l] of lane i. */
__device__ static void transpose_quad(uint32_t (&words)[4]) {
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2) {
        const bool upper = (threadIdx.x & bit) != 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if ((i & bit) != 0)
                continue;
            const uint32_t sent = upper ? words[i] : words[i | bit];
            const uint32_t received = __shfl_xor_sync(~0u, sent, bit);
            words[i] = upper ? received : words[i];
            words[i | bit] = upper ? words[i | bit] : received;
        }
    }
}

#endif
