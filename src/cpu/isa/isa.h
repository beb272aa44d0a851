/* The points of the CPU's build matrix: their tables of kernels, and the conditions of each
 * kernel. */
#pragma once

#include "core/kernel.h"

#define KNOWS_STARTS(operation)                                                                    \
    ((operation) == operation_cache_store || (operation) == operation_probabilities ||             \
     (operation) == operation_rotate || (operation) == operation_rotate_backward)
#define CPU_TRAITS(operation)                                                                      \
    ((KNOWS_STARTS(operation) ? 0u : trait_one_sequence) |                                         \
     ((operation) == operation_backward ? trait_checks_selection : 0u))

#define CPU_KERNEL(NAME, OPERATION, MISSING, REFUSES, FUNCTION)                                    \
    {.name = NAME,                                                                                 \
     .operation = operation_##OPERATION,                                                           \
     .missing = MISSING,                                                                           \
     .refuses = REFUSES,                                                                           \
     .workspace = FUNCTION##_workspace,                                                            \
     .run = run_##FUNCTION,                                                                        \
     .traits = CPU_TRAITS(operation_##OPERATION)}

/* Kernels that depend on the vocabulary alone. They compute in float32. */
#define VECTOR_KERNELS(NAME, MISSING)                                                              \
    CPU_KERNEL(NAME, score, MISSING, fdma_refuses_wide, score),                                    \
        CPU_KERNEL(NAME, select, MISSING, fdma_refuses_wide, select),                              \
        CPU_KERNEL(NAME, cache_store, MISSING, fdma_refuses_wide, cache_store),                    \
        CPU_KERNEL(NAME, cache_copy, MISSING, fdma_refuses_wide, cache_copy),                      \
        CPU_KERNEL(NAME, score_backward, MISSING, fdma_refuses_wide, score_backward),              \
        CPU_KERNEL(NAME, merge, MISSING, fdma_refuses_wide, merge),                                \
        CPU_KERNEL(NAME, merge_backward, MISSING, fdma_refuses_wide, merge),                       \
        CPU_KERNEL(NAME, probabilities, MISSING, fdma_refuses_wide, probabilities),                \
        CPU_KERNEL(NAME, rotary_table, MISSING, fdma_refuses_wide_table, rotary_table),            \
        CPU_KERNEL(NAME, rotate, MISSING, fdma_refuses_wide, rotate),                              \
        CPU_KERNEL(NAME, rotate_backward, MISSING, fdma_refuses_wide, rotate)

/* Kernels for few rows. REFUSES_ROWS is the `refuses` of forward. */
#define DECODE_KERNELS(NAME, MISSING, REFUSES_ROWS, REFUSES)                                       \
    CPU_KERNEL(NAME "/decode", forward, MISSING, REFUSES_ROWS, decode),                            \
        CPU_KERNEL(NAME, decode, MISSING, REFUSES, cached)

/* Kernels that also depend on the products. */
#define PRODUCT_KERNELS(NAME, MISSING, REFUSES)                                                    \
    CPU_KERNEL(NAME "/tile", forward, MISSING, REFUSES, forward),                                  \
        CPU_KERNEL(NAME, backward, MISSING, REFUSES, backward)

#define KERNEL_TABLE(TABLE, ...)                                                                   \
    static const fdma_kernel TABLE##_kernels[] = {__VA_ARGS__};                                    \
    const kernel_table TABLE = {TABLE##_kernels, sizeof TABLE##_kernels / sizeof TABLE##_kernels[0]}

extern const kernel_table fdma_cpu_avx512;
extern const kernel_table fdma_cpu_amx, fdma_cpu_amx_vectors;
extern const kernel_table fdma_cpu_avx512bf16, fdma_cpu_avx512bf16_vectors;
extern const kernel_table fdma_cpu_avx2;
extern const kernel_table fdma_cpu_neon;
extern const kernel_table fdma_cpu_neonbf16, fdma_cpu_neonbf16_vectors;
extern const kernel_table fdma_cpu_absent; /* points of other architectures */
extern const kernel_table fdma_cpu_scalar;

const char *fdma_missing_avx512(void);
const char *fdma_missing_avx512bf16(void);
const char *fdma_missing_amx(void);
const char *fdma_missing_avx2(void);
const char *fdma_missing_neon(void);
const char *fdma_missing_neonbf16(void);
const char *fdma_missing_scalar(void);

const char *fdma_refuses_wide(const fdma_problem *problem);
const char *fdma_refuses_wide_table(const fdma_problem *problem);
const char *fdma_refuses_slow(const fdma_problem *problem);
const char *fdma_refuses_singles(const fdma_problem *problem);
const char *fdma_refuses_decode(const fdma_problem *problem);
const char *fdma_refuses_slow_decode(const fdma_problem *problem);
const char *fdma_refuses_decode_singles(const fdma_problem *problem);
