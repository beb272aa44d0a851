/* The limits of the machine: for each instruction set a loop of multiply-adds in registers, and one
 * that reads memory. Timed in turn with a kernel, they show how much of the machine the kernel
 * uses. */
#pragma once

#include <stddef.h>
#include <stdint.h>

typedef struct peak_loop {
    float (*run)(int64_t rounds);
    uint64_t (*read)(const void *bytes, size_t count);
    double flops; /* operations of one round */
    int64_t rounds;
    int threads;
} peak_loop;

/*! prepare_peak() - the loops of a kernel's instruction set; one run takes some 20 ms.
 *  Returns 0, or -1 if that kernel has none */
int prepare_peak(const char *kernel, int threads, peak_loop *peak);

/*! measure_peak() - runs the loop on all threads. Returns their GFLOP/s together. */
double measure_peak(const peak_loop *peak);

/*! measure_read() - milliseconds in which the threads read `count` bytes, each its own range. */
double measure_read(const peak_loop *peak, const void *bytes, size_t count);
