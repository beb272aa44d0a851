/* Forward, backward and decode of bfloat16 on AVX-512 BF16: products of pairs. The other kernels of
 * this point are in avx512.c. */
#define FDMA_POINT_AVX512BF16

#include "cpu/isa/isa.h"

#include "cpu/backward/backward.h"
#include "cpu/decode/cached.h"
#include "cpu/forward/forward.h"

KERNEL_TABLE(fdma_cpu_avx512bf16,
             DECODE_KERNELS("cpu/avx512bf16", fdma_missing_avx512bf16, fdma_refuses_decode_singles,
                            fdma_refuses_singles),
             PRODUCT_KERNELS("cpu/avx512bf16", fdma_missing_avx512bf16, fdma_refuses_singles));
