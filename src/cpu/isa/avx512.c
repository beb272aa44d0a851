/* The CPU kernels in the vocabulary of avx512. */
#define FDMA_POINT_AVX512

#include "cpu/isa/isa.h"

#include "cpu/backward/backward.h"
#include "cpu/decode/decode.h"
#include "cpu/forward/forward.h"
#include "cpu/lists/lists.h"
#include "cpu/merge/merge.h"
#include "cpu/score/score.h"
#include "cpu/score/score_backward.h"
#include "cpu/select/select.h"

static const fdma_kernel rows[] = {CPU_DECODE("cpu/avx512", fdma_missing_avx512),
                                   CPU_ROWS("cpu/avx512", fdma_missing_avx512, fdma_refuses_slow)};

const kernel_table fdma_cpu_avx512 = {rows, sizeof rows / sizeof rows[0]};
