/* The CPU kernels on AVX2. */
#define FDMA_POINT_AVX2

#include "cpu/isa/isa.h"

#include "cpu/backward/backward.h"
#include "cpu/decode/decode.h"
#include "cpu/forward/forward.h"
#include "cpu/lists/lists.h"
#include "cpu/merge/merge.h"
#include "cpu/score/score.h"
#include "cpu/score/score_backward.h"
#include "cpu/select/select.h"

static const fdma_kernel kernels[] = {
    VECTOR_KERNELS("cpu/avx2", fdma_missing_avx2, fdma_refuses_decode),
    PRODUCT_KERNELS("cpu/avx2", fdma_missing_avx2, fdma_refuses_wide),
};

const kernel_table fdma_cpu_avx2 = {kernels, sizeof kernels / sizeof kernels[0]};
