/* The CPU kernels in the vocabulary of neon, with products of bfloat16 pairs. */
#define FDMA_POINT_NEONBF16

#include "cpu/isa/isa.h"

#include "cpu/backward/backward.h"
#include "cpu/forward/forward.h"
#include "cpu/lists/lists.h"
#include "cpu/merge/merge.h"
#include "cpu/score/score.h"
#include "cpu/score/score_backward.h"
#include "cpu/select/select.h"

static const fdma_kernel rows[] = {
    CPU_ROWS("cpu/neonbf16", fdma_missing_neonbf16, fdma_refuses_singles)};

const kernel_table fdma_cpu_neonbf16 = {rows, sizeof rows / sizeof rows[0]};
