/* How a kernel of each operation is judged: it runs on the problem's inputs, and its outputs are
 * compared with the reference's. */
#ifndef FDMA_TOOLS_CHECK_JUDGE_H
#define FDMA_TOOLS_CHECK_JUDGE_H

#include "check/compare.h"

typedef struct check_operation {
    const char *name;                       /* as in fdma_kernel_info.operation */
    bool (*applies)(const check_problem *); /* whether the problem is worth running */
    fdma_status (*judge)(const check_problem *, const char *kernel, check_error *);
} check_operation;

enum { check_operation_count = 8 };
extern const check_operation check_operations[check_operation_count];

/*! check_find_operation() - the operation of that name, or NULL. */
const check_operation *check_find_operation(const char *name);

#endif /* FDMA_TOOLS_CHECK_JUDGE_H */
