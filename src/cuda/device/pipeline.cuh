/* A pipeline of stages in shared memory that a producer fills and consumers empty, and the wait for
 * its barriers. */
#pragma once

#include "cuda/device/ptx.cuh"

/* Waits until the phase of this parity is over. The first phase of a barrier has parity 0; the
 * phase before it, of parity 1, counts as over. A debug build traps after some seconds. */
__device__ static void wait(uint64_t *barrier, uint32_t parity) {
#ifdef NDEBUG
    while (!mbarrier_try_wait(barrier, parity)) {
    }
#else
    const uint32_t most_tries = 20000000; // each takes 0.1 us or more
    for (uint32_t tries = 0; !mbarrier_try_wait(barrier, parity); tries++)
        if (tries == most_tries)
            __trap();
#endif
}

/* Arrives once for each warp, after the reads of all its lanes. */
__device__ static void release(uint64_t *barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        mbarrier_arrive(barrier);
}

/* The state of a producer or a consumer in a pipeline: its stage, and the parity of that stage's
 * current phase. */
template <int stages> struct pipeline_state {
    int32_t stage = 0;
    uint32_t parity = 0;

    __device__ void advance(void) {
        stage++;
        if (stage == stages) {
            stage = 0;
            parity ^= 1;
        }
    }
};
