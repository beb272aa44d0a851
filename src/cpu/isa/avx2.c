/* The CPU kernels on AVX2. */
#define FDMA_POINT_AVX2

#include "cpu/isa/every_kernel.h"

KERNEL_TABLE(fdma_cpu_avx2, VECTOR_KERNELS("cpu/avx2", fdma_missing_avx2),
             DECODE_KERNELS("cpu/avx2", fdma_missing_avx2, fdma_refuses_decode, fdma_refuses_wide),
             PRODUCT_KERNELS("cpu/avx2", fdma_missing_avx2, fdma_refuses_wide));
