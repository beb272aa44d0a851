/* Rows of the points that are for other architectures than this build's. They never run; they are
 * there so that a call that asks for one by name hears what this machine lacks. */
#include "cpu/isa/isa.h"

#if !defined(FDMA_HAVE_AVX2)
static const char *missing_x86(void) { return "x86-64"; }
#endif

#if !defined(FDMA_HAVE_NEON)
static const char *missing_arm(void) { return "aarch64"; }
#endif

static const kernel_row rows[] = {
#if !defined(FDMA_HAVE_AVX2)
    {"cpu/avx512", operation_score, missing_x86, NULL, NULL, NULL},
    {"cpu/avx512", operation_select, missing_x86, NULL, NULL, NULL},
    {"cpu/avx512", operation_forward, missing_x86, NULL, NULL, NULL},
    {"cpu/amx", operation_score, missing_x86, NULL, NULL, NULL},
    {"cpu/amx", operation_select, missing_x86, NULL, NULL, NULL},
    {"cpu/amx", operation_forward, missing_x86, NULL, NULL, NULL},
    {"cpu/avx512bf16", operation_score, missing_x86, NULL, NULL, NULL},
    {"cpu/avx512bf16", operation_select, missing_x86, NULL, NULL, NULL},
    {"cpu/avx512bf16", operation_forward, missing_x86, NULL, NULL, NULL},
    {"cpu/avx2", operation_score, missing_x86, NULL, NULL, NULL},
    {"cpu/avx2", operation_select, missing_x86, NULL, NULL, NULL},
    {"cpu/avx2", operation_forward, missing_x86, NULL, NULL, NULL},
#endif
#if !defined(FDMA_HAVE_NEON)
    {"cpu/neon", operation_score, missing_arm, NULL, NULL, NULL},
    {"cpu/neon", operation_select, missing_arm, NULL, NULL, NULL},
    {"cpu/neon", operation_forward, missing_arm, NULL, NULL, NULL},
#endif
};

const kernel_table fdma_cpu_absent = {rows, sizeof rows / sizeof rows[0]};
