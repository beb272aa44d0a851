/* What the machine could do: loops of fused multiply-adds in registers, and loops that read memory,
 * one for each instruction set. Measured beside a kernel they say how much of the machine it
 * uses. */
#ifndef FDMA_TOOLS_BENCH_PEAK_H
#define FDMA_TOOLS_BENCH_PEAK_H

#include <stddef.h>
#include <stdint.h>

typedef struct peak_loop {
    float (*run)(int64_t rounds);
    uint64_t (*read)(const void *bytes, size_t count);
    double flops; /* of a round */
    int64_t rounds;
    int threads;
} peak_loop;

/*! prepare_peak() - the loop for a kernel's instruction set, some 20 ms long.
 *  Returns 0, or -1 where no loop belongs to that kernel. */
int prepare_peak(const char *kernel, int threads, peak_loop *peak);

/*! measure_peak() - runs the loop on all its threads; GFLOP/s of all together. */
double measure_peak(const peak_loop *peak);

/*! measure_read() - milliseconds that the loop's threads, each a part, take to read `count` bytes
 *  from the first to the last. */
double measure_read(const peak_loop *peak, const void *bytes, size_t count);

#endif /* FDMA_TOOLS_BENCH_PEAK_H */
