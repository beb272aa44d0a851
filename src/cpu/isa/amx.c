/* The CPU kernels in the vocabulary of avx512, with products of bfloat16 tiles. */
#define FDMA_POINT_AMX

#include "cpu/isa/isa.h"

#include "cpu/backward/backward.h"
#include "cpu/forward/forward.h"
#include "cpu/lists/lists.h"
#include "cpu/merge/merge.h"
#include "cpu/score/score.h"
#include "cpu/score/score_backward.h"
#include "cpu/select/select.h"

static const fdma_kernel rows[] = {CPU_ROWS("cpu/amx", fdma_missing_amx, fdma_refuses_singles)};

const kernel_table fdma_cpu_amx = {rows, sizeof rows / sizeof rows[0]};
