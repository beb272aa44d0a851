/* The CPU kernels on AVX-512, and the vector kernels of points that differ only in their
 * products. */
#define FDMA_POINT_AVX512

#include "cpu/isa/every_kernel.h"

KERNEL_TABLE(fdma_cpu_avx512, VECTOR_KERNELS("cpu/avx512", fdma_missing_avx512),
             DECODE_KERNELS("cpu/avx512", fdma_missing_avx512, fdma_refuses_slow_decode,
                            fdma_refuses_slow),
             PRODUCT_KERNELS("cpu/avx512", fdma_missing_avx512, fdma_refuses_slow));

KERNEL_TABLE(fdma_cpu_amx_vectors, VECTOR_KERNELS("cpu/amx", fdma_missing_amx),
             DECODE_KERNELS("cpu/amx", fdma_missing_amx, fdma_refuses_decode_singles,
                            fdma_refuses_singles));

KERNEL_TABLE(fdma_cpu_avx512bf16_vectors,
             VECTOR_KERNELS("cpu/avx512bf16", fdma_missing_avx512bf16));
