/* Entries for the points of other architectures. They never run: a call that asks for one by name
 * gets a message about what this machine lacks. */
#include "cpu/isa/isa.h"

#undef CPU_KERNEL
#define CPU_KERNEL(NAME, OPERATION, MISSING, REFUSES, FUNCTION)                                    \
    {.name = NAME, .operation = operation_##OPERATION, .missing = MISSING}

#define ABSENT_KERNELS(NAME, MISSING)                                                              \
    VECTOR_KERNELS(NAME, MISSING), DECODE_KERNELS(NAME, MISSING, NULL, NULL),                      \
        PRODUCT_KERNELS(NAME, MISSING, NULL)

#if !defined(FDMA_HAVE_AVX2)
static const char *missing_x86(void) { return "x86-64"; }
#endif

#if !defined(FDMA_HAVE_NEON)
static const char *missing_arm(void) { return "aarch64"; }
#endif

static const fdma_kernel kernels[] = {
#if !defined(FDMA_HAVE_AVX2)
    ABSENT_KERNELS("cpu/avx512", missing_x86),     ABSENT_KERNELS("cpu/amx", missing_x86),
    ABSENT_KERNELS("cpu/avx512bf16", missing_x86), ABSENT_KERNELS("cpu/avx2", missing_x86),
#endif
#if !defined(FDMA_HAVE_NEON)
    ABSENT_KERNELS("cpu/neon", missing_arm),       ABSENT_KERNELS("cpu/neonbf16", missing_arm),
#endif
};

const kernel_table fdma_cpu_absent = {kernels, sizeof kernels / sizeof kernels[0]};
