/* Forward and backward of bfloat16 on AMX: products of tiles. The other kernels of this point are
 * in avx512.c. */
#define FDMA_POINT_AMX

#include "cpu/isa/isa.h"

#include "cpu/backward/backward.h"
#include "cpu/forward/forward.h"

KERNEL_TABLE(fdma_cpu_amx, PRODUCT_KERNELS("cpu/amx", fdma_missing_amx, fdma_refuses_singles));
