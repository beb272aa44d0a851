/* The operations, and the judgement of their kernels: a kernel runs on the problem's inputs, and
 * its outputs are compared with the reference's. check/tolerance.h says which errors pass. */
#pragma once

#include "check/run.h"
#include "check/tolerance.h"

typedef struct check_operation {
    const char *name;                        /* as in fdma_kernel_info.operation */
    bool (*applies)(const check_problem *);  /* whether the problem is worth running */
    const char *outputs[check_output_limit]; /* without exact outputs, such as select's */
    size_t like[check_output_limit];         /* offset of a tensor that has the output's shape */
} check_operation;

extern const check_operation check_operations[check_operation_count];

/*! check_find_operation() - the operation of that name, or NULL. */
const check_operation *check_find_operation(const char *name);

/*! check_make_outputs() - outputs of an operation, in the dtypes and shapes of the problem's
 *  inputs. They hold NaN, so that elements that a kernel does not write are seen; dv of
 *  score_backward holds what it is added to. `in_layout`: in the memory layout of the case, else
 *  contiguous. */
void check_make_outputs(const check_problem *problem, const check_operation *operation,
                        bool in_layout, fdma_tensor outputs[check_output_limit]);

/*! check_judge() - runs the kernel; `error` belongs to its worst output. */
fdma_status check_judge(const check_problem *problem, const check_operation *operation,
                        const char *kernel, check_error *error);
