/* The CPU kernels in the vocabulary of neon. */
#define FDMA_POINT_NEON

#include "cpu/isa/isa.h"

#include "cpu/backward/backward.h"
#include "cpu/decode/decode.h"
#include "cpu/forward/forward.h"
#include "cpu/lists/lists.h"
#include "cpu/merge/merge.h"
#include "cpu/score/score.h"
#include "cpu/score/score_backward.h"
#include "cpu/select/select.h"

static const fdma_kernel rows[] = {CPU_DECODE("cpu/neon", fdma_missing_neon),
                                   CPU_ROWS("cpu/neon", fdma_missing_neon, fdma_refuses_slow)};

const kernel_table fdma_cpu_neon = {rows, sizeof rows / sizeof rows[0]};
