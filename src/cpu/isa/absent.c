/* Rows of the points that are for other architectures than this build's. They never run; they are
 * there so that a call that asks for one by name hears what this machine lacks. */
#include "cpu/isa/isa.h"

#define ABSENT_ROWS(name, missing)                                                                 \
    {name, operation_score, missing, NULL, NULL, NULL, false},                                     \
        {name, operation_select, missing, NULL, NULL, NULL, false},                                \
        {name, operation_lists, missing, NULL, NULL, NULL, false},                                 \
        {name "/decode", operation_forward, missing, NULL, NULL, NULL, false},                     \
        {name "/tile", operation_forward, missing, NULL, NULL, NULL, false},                       \
        {name, operation_backward, missing, NULL, NULL, NULL, false},                              \
        {name, operation_score_backward, missing, NULL, NULL, NULL, false},                        \
        {name, operation_merge, missing, NULL, NULL, NULL, false}, {                               \
        name, operation_merge_backward, missing, NULL, NULL, NULL, false                           \
    }

#if !defined(FDMA_HAVE_AVX2)
static const char *missing_x86(void) { return "x86-64"; }
#endif

#if !defined(FDMA_HAVE_NEON)
static const char *missing_arm(void) { return "aarch64"; }
#endif

static const fdma_kernel rows[] = {
#if !defined(FDMA_HAVE_AVX2)
    ABSENT_ROWS("cpu/avx512", missing_x86),     ABSENT_ROWS("cpu/amx", missing_x86),
    ABSENT_ROWS("cpu/avx512bf16", missing_x86), ABSENT_ROWS("cpu/avx2", missing_x86),
#endif
#if !defined(FDMA_HAVE_NEON)
    ABSENT_ROWS("cpu/neon", missing_arm),       ABSENT_ROWS("cpu/neonbf16", missing_arm),
#endif
};

const kernel_table fdma_cpu_absent = {rows, sizeof rows / sizeof rows[0]};
