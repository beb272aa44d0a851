/* Forward, backward and decode of bfloat16 on NEON with FEAT_BF16: products of pairs. The other
 * kernels of this point are in neon.c. */
#define FDMA_POINT_NEONBF16

#include "cpu/isa/isa.h"

#include "cpu/backward/backward.h"
#include "cpu/decode/cached.h"
#include "cpu/forward/forward.h"

KERNEL_TABLE(fdma_cpu_neonbf16,
             DECODE_KERNELS("cpu/neonbf16", fdma_missing_neonbf16, fdma_refuses_decode_singles,
                            fdma_refuses_singles),
             PRODUCT_KERNELS("cpu/neonbf16", fdma_missing_neonbf16, fdma_refuses_singles));
