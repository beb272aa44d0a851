/* The points of the CPU's build matrix, and what their rows are chosen by. */
#ifndef FDMA_CPU_ISA_ISA_H
#define FDMA_CPU_ISA_ISA_H

#include "core/kernel.h"

/* Decode at a point. It computes in float32 everywhere, so the points that differ only in their
 * products of bfloat16 have none. */
#define CPU_DECODE(name, missing)                                                                  \
    {name "/decode",   operation_forward, missing, fdma_refuses_decode,                            \
     decode_workspace, run_decode,        false}

/* The rows of a point, whose file has included the kernels; `refuses` is that of forward and
 * backward. */
#define CPU_ROWS(name, missing, refuses)                                                            \
    {name, operation_score, missing, fdma_refuses_wide, score_workspace, run_score, false},         \
        {name, operation_select, missing, fdma_refuses_wide, select_workspace, run_select, false},  \
        {name, operation_lists, missing, fdma_refuses_wide, lists_workspace, run_lists, false},     \
        {name "/tile", operation_forward, missing, refuses, forward_workspace, run_forward, false}, \
        {name, operation_backward, missing, refuses, backward_workspace, run_backward, false},      \
        {name,                                                                                      \
         operation_score_backward,                                                                  \
         missing,                                                                                   \
         fdma_refuses_wide,                                                                         \
         score_backward_workspace,                                                                  \
         run_score_backward,                                                                        \
         false},                                                                                    \
        {name, operation_merge, missing, fdma_refuses_wide, merge_workspace, run_merge, false}, {   \
        name, operation_merge_backward, missing, fdma_refuses_wide, merge_workspace, run_merge,     \
            false                                                                                   \
    }

extern const kernel_table fdma_cpu_avx512;
extern const kernel_table fdma_cpu_amx;
extern const kernel_table fdma_cpu_avx512bf16;
extern const kernel_table fdma_cpu_avx2;
extern const kernel_table fdma_cpu_neon;
extern const kernel_table fdma_cpu_neonbf16;
extern const kernel_table fdma_cpu_absent; /* rows of points for other architectures */
extern const kernel_table fdma_cpu_scalar;

const char *fdma_missing_avx512(void);
const char *fdma_missing_avx512bf16(void);
const char *fdma_missing_amx(void);
const char *fdma_missing_avx2(void);
const char *fdma_missing_neon(void);
const char *fdma_missing_neonbf16(void);
const char *fdma_missing_scalar(void);

const char *fdma_refuses_wide(const fdma_problem *problem);
const char *fdma_refuses_slow(const fdma_problem *problem);
const char *fdma_refuses_singles(const fdma_problem *problem);
const char *fdma_refuses_decode(const fdma_problem *problem);

#endif
