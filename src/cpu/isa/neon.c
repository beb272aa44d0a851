/* The CPU kernels on NEON, and those of the points that differ in their products alone. */
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

static const fdma_kernel kernels[] = {
    VECTOR_KERNELS("cpu/neon", fdma_missing_neon, fdma_refuses_decode),
    PRODUCT_KERNELS("cpu/neon", fdma_missing_neon, fdma_refuses_slow),
};

const kernel_table fdma_cpu_neon = {kernels, sizeof kernels / sizeof kernels[0]};

static const fdma_kernel neonbf16_kernels[] = {
    VECTOR_KERNELS("cpu/neonbf16", fdma_missing_neonbf16, fdma_refuses_decode_singles)};

const kernel_table fdma_cpu_neonbf16_vectors = {neonbf16_kernels, sizeof neonbf16_kernels /
                                                                      sizeof neonbf16_kernels[0]};
