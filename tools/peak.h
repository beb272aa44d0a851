/* What the machine could do: loops of fused multiply-adds in registers, one for each instruction
 * set. Measured beside a kernel they say how much of the machine the kernel uses. */
#ifndef FDMA_TOOLS_PEAK_H
#define FDMA_TOOLS_PEAK_H

#include <stdint.h>

typedef struct peak_loop {
    float (*run)(int64_t rounds);
    double flops; /* of a round */
    int64_t rounds;
    int threads;
} peak_loop;

/*! prepare_peak() - the loop for a kernel's instruction set, some 20 ms long.
 *  Returns 0, or -1 where no loop belongs to that kernel. */
int prepare_peak(const char *kernel, int threads, peak_loop *peak);

/*! measure_peak() - runs the loop on all its threads; GFLOP/s of all together. */
double measure_peak(const peak_loop *peak);

#endif /* FDMA_TOOLS_PEAK_H */
