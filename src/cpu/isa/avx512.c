/* The CPU kernels in the vocabulary of avx512. */
#include "cpu/simd/avx512.h"
#include "cpu/simd/avx512_shape.h"
#include "cpu/simd/singles.h"

#include "cpu/isa/isa.h"
#include "cpu/kernels/product.h"

#include "cpu/kernels/forward.h"
#include "cpu/kernels/score.h"
#include "cpu/kernels/select.h"

static const kernel_row rows[] = {
    {"cpu/avx512", operation_score, fdma_missing_avx512, fdma_refuses_wide, score_workspace,
     run_score},
    {"cpu/avx512", operation_select, fdma_missing_avx512, fdma_refuses_wide, select_workspace,
     run_select},
    {"cpu/avx512", operation_forward, fdma_missing_avx512, fdma_refuses_avx512, forward_workspace,
     run_forward},
};

const kernel_table fdma_cpu_avx512 = {rows, sizeof rows / sizeof rows[0]};
