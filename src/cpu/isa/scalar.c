/* The CPU kernels in the scalar vocabulary, for any CPU. */
#include "cpu/isa/every_kernel.h"

KERNEL_TABLE(fdma_cpu_scalar, VECTOR_KERNELS("cpu/scalar", fdma_missing_scalar),
             DECODE_KERNELS("cpu/scalar", fdma_missing_scalar, fdma_refuses_decode,
                            fdma_refuses_wide),
             PRODUCT_KERNELS("cpu/scalar", fdma_missing_scalar, fdma_refuses_wide));
