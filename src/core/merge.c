/* fdma_merge_args and fdma_merge_backward_args -> a problem. */
#include "core/checks.h"
#include "core/error.h"

/* Sizes and tensors of a problem whose rows are those of `out`, or of its gradient. */
static fdma_status settle_rows(fdma_operation operation, const char *name, const fdma_tensor *out,
                               const fdma_exec *exec, fdma_problem *problem) {
    FDMA_TRY(fdma_check_form(name, out, 4, takes_floats));
    *problem = (fdma_problem){
        .operation = operation,
        .dtype = out->dtype,
        .batch = out->shape[0],
        .q_len = out->shape[1],
        .q_heads = out->shape[2],
        .head_dim = out->shape[3],
        .exec = *exec,
    };
    return fdma_check_head_dim(problem->head_dim);
}

fdma_status fdma_check_merge(const void *caller, check_depth depth, fdma_problem *problem) {
    fdma_merge_args args;
    FDMA_TRY(FDMA_COPY_ARGS(fdma_merge_args, caller, &args));
    FDMA_TRY(fdma_check_exec(&args.exec, depth));
    FDMA_TRY(settle_rows(operation_merge, "out", &args.out, &args.exec, problem));
    fdma_take_tensors(problem, &args);
    return fdma_check_tensors(problem, depth);
}

fdma_status fdma_check_merge_backward(const void *caller, check_depth depth,
                                      fdma_problem *problem) {
    fdma_merge_backward_args args;
    FDMA_TRY(FDMA_COPY_ARGS(fdma_merge_backward_args, caller, &args));
    FDMA_TRY(fdma_check_exec(&args.exec, depth));
    FDMA_TRY(settle_rows(operation_merge_backward, "dout", &args.dout, &args.exec, problem));
    fdma_take_tensors(problem, &args);
    return fdma_check_tensors(problem, depth);
}
