/* The CPU kernels on AVX-512, and those of the points that differ in their products alone. */
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

static const fdma_kernel kernels[] = {
    VECTOR_KERNELS("cpu/avx512", fdma_missing_avx512, fdma_refuses_decode),
    PRODUCT_KERNELS("cpu/avx512", fdma_missing_avx512, fdma_refuses_slow),
};

const kernel_table fdma_cpu_avx512 = {kernels, sizeof kernels / sizeof kernels[0]};

static const fdma_kernel amx_kernels[] = {
    VECTOR_KERNELS("cpu/amx", fdma_missing_amx, fdma_refuses_decode_singles)};

const kernel_table fdma_cpu_amx_vectors = {amx_kernels, sizeof amx_kernels / sizeof amx_kernels[0]};

static const fdma_kernel avx512bf16_kernels[] = {
    VECTOR_KERNELS("cpu/avx512bf16", fdma_missing_avx512bf16, fdma_refuses_decode_singles)};

const kernel_table fdma_cpu_avx512bf16_vectors = {
    avx512bf16_kernels, sizeof avx512bf16_kernels / sizeof avx512bf16_kernels[0]};
