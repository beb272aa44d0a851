/* The CPU kernels in the vocabulary of scalar. */
#include "cpu/simd/scalar.h"
#include "cpu/simd/singles.h"

#include "cpu/isa/isa.h"
#include "cpu/kernels/product.h"

#include "cpu/kernels/forward.h"
#include "cpu/kernels/score.h"
#include "cpu/kernels/select.h"

static const kernel_row rows[] = {
    {"cpu/scalar", operation_score, fdma_missing_scalar, fdma_refuses_wide, score_workspace,
     run_score},
    {"cpu/scalar", operation_select, fdma_missing_scalar, fdma_refuses_wide, select_workspace,
     run_select},
    {"cpu/scalar", operation_forward, fdma_missing_scalar, fdma_refuses_wide, forward_workspace,
     run_forward},
};

const kernel_table fdma_cpu_scalar = {rows, sizeof rows / sizeof rows[0]};
