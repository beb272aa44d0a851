/* The CPU kernels on NEON, and the vector kernels of points that differ only in their products. */
#define FDMA_POINT_NEON

#include "cpu/isa/every_kernel.h"

KERNEL_TABLE(fdma_cpu_neon, VECTOR_KERNELS("cpu/neon", fdma_missing_neon),
             DECODE_KERNELS("cpu/neon", fdma_missing_neon, fdma_refuses_slow_decode,
                            fdma_refuses_slow),
             PRODUCT_KERNELS("cpu/neon", fdma_missing_neon, fdma_refuses_slow));

KERNEL_TABLE(fdma_cpu_neonbf16_vectors, VECTOR_KERNELS("cpu/neonbf16", fdma_missing_neonbf16));
