/* The CPU kernels in the vocabulary of neon, with products of bfloat16 pairs. */
#include "cpu/simd/neon.h"
#include "cpu/simd/neon_bf16_pairs.h"

#include "cpu/isa/isa.h"
#include "cpu/kernels/product.h"

#include "cpu/kernels/backward.h"
#include "cpu/kernels/forward.h"
#include "cpu/kernels/lists.h"
#include "cpu/kernels/merge.h"
#include "cpu/kernels/score.h"
#include "cpu/kernels/score_backward.h"
#include "cpu/kernels/select.h"

static const kernel_row rows[] = {
    CPU_ROWS("cpu/neonbf16", fdma_missing_neonbf16, fdma_refuses_singles)};

const kernel_table fdma_cpu_neonbf16 = {rows, sizeof rows / sizeof rows[0]};
