/* The CPU kernels in the vocabulary of avx512. */
#include "cpu/simd/avx512.h"
#include "cpu/simd/avx512_shape.h"
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

static const kernel_row rows[] = {CPU_ROWS("cpu/avx512", fdma_missing_avx512, fdma_refuses_slow)};

const kernel_table fdma_cpu_avx512 = {rows, sizeof rows / sizeof rows[0]};
