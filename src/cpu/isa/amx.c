/* The CPU kernels in the vocabulary of avx512, with products of bfloat16 tiles. */
#include "cpu/simd/amx_shape.h"
#include "cpu/simd/avx512.h"
#include "cpu/simd/bf16_pairs.h"

#include "cpu/isa/isa.h"
#include "cpu/kernels/product_tiles.h"

#include "cpu/kernels/backward.h"
#include "cpu/kernels/forward.h"
#include "cpu/kernels/lists.h"
#include "cpu/kernels/merge.h"
#include "cpu/kernels/score.h"
#include "cpu/kernels/score_backward.h"
#include "cpu/kernels/select.h"

static const kernel_row rows[] = {CPU_ROWS("cpu/amx", fdma_missing_amx, fdma_refuses_singles)};

const kernel_table fdma_cpu_amx = {rows, sizeof rows / sizeof rows[0]};
