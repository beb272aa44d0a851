/* The operations, and how a kernel of each is judged: it runs on the problem's inputs, and its
 * outputs are compared with the reference's. Which errors pass, check/tolerance.h says. */
#pragma once

#include "check/run.h"
#include "check/tolerance.h"

typedef struct check_operation {
    const char *name;                        /* as in fdma_kernel_info.operation */
    bool (*applies)(const check_problem *);  /* whether the problem is worth running */
    const char *outputs[check_output_limit]; /* none of those that are exact, such as select */
    size_t like[check_output_limit]; /* offset of the tensor that an output has the shape of */
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

/*! check_judge() - runs the kernel; `error` is that of its worst output. */
fdma_status check_judge(const check_problem *problem, const check_operation *operation,
                        const char *kernel, check_error *error);
