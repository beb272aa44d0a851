/* A ring of buffers in shared memory that one party fills and another empties, and the waits for
 * its barriers. */
#ifndef FDMA_CUDA_DEVICE_RING_CUH
#define FDMA_CUDA_DEVICE_RING_CUH

#include "cuda/device/ptx.cuh"

/* Until the phase of this parity is over: the first phase of a barrier has parity 0, and the one
 * before it, of parity 1, counts as over. A debug build traps where that takes seconds. */
__device__ static inline void wait(uint64_t *barrier, uint32_t parity) {
#ifdef NDEBUG
    while (!mbarrier_try_wait(barrier, parity)) {
    }
#else
    const uint32_t most_tries = 20000000; // of 0.1 us and more
    for (uint32_t tries = 0; !mbarrier_try_wait(barrier, parity); tries++)
        if (tries == most_tries)
            __trap();
#endif
}

/* Where a party stands in a ring: the next buffer, and how often it has been round. */
template <int buffers> struct ring_place {
    int32_t index = 0;
    uint32_t parity = 0;

    __device__ inline void advance(void) {
        index++;
        if (index == buffers) {
            index = 0;
            parity ^= 1;
        }
    }
};

#endif
