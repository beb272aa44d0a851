/* The CPU kernels in the vocabulary of avx2. */
#include "cpu/simd/avx2.h"
#include "cpu/simd/singles.h"

#include "cpu/isa/isa.h"
#include "cpu/kernels/product.h"

#include "cpu/kernels/backward.h"
#include "cpu/kernels/forward.h"
#include "cpu/kernels/lists.h"
#include "cpu/kernels/merge.h"
#include "cpu/kernels/score.h"
#include "cpu/kernels/score_backward.h"
#include "cpu/kernels/select.h"

static const kernel_row rows[] = {CPU_ROWS("cpu/avx2", fdma_missing_avx2, fdma_refuses_wide)};

const kernel_table fdma_cpu_avx2 = {rows, sizeof rows / sizeof rows[0]};
