/* The CPU kernels in the vocabulary of scalar. */
#include "cpu/isa/isa.h"

#include "cpu/backward/backward.h"
#include "cpu/decode/decode.h"
#include "cpu/forward/forward.h"
#include "cpu/lists/lists.h"
#include "cpu/merge/merge.h"
#include "cpu/score/score.h"
#include "cpu/score/score_backward.h"
#include "cpu/select/select.h"

static const fdma_kernel rows[] = {CPU_DECODE("cpu/scalar", fdma_missing_scalar),
                                   CPU_ROWS("cpu/scalar", fdma_missing_scalar, fdma_refuses_wide)};

const kernel_table fdma_cpu_scalar = {rows, sizeof rows / sizeof rows[0]};
