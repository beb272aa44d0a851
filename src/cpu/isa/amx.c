/* The CPU kernels in the vocabulary of avx512, with products of bfloat16 tiles. */
#include "cpu/simd/amx_shape.h"
#include "cpu/simd/avx512.h"
#include "cpu/simd/bf16_pairs.h"

#include "cpu/isa/isa.h"
#include "cpu/kernels/product_tiles.h"

#include "cpu/kernels/forward.h"
#include "cpu/kernels/score.h"
#include "cpu/kernels/select.h"

static const kernel_row rows[] = {
    {"cpu/amx", operation_score, fdma_missing_amx, fdma_refuses_wide, score_workspace, run_score},
    {"cpu/amx", operation_select, fdma_missing_amx, fdma_refuses_wide, select_workspace,
     run_select},
    {"cpu/amx", operation_forward, fdma_missing_amx, fdma_refuses_singles, forward_workspace,
     run_forward},
};

const kernel_table fdma_cpu_amx = {rows, sizeof rows / sizeof rows[0]};
