/* fdma_backward_args -> a problem. */
#include "core/checks.h"
#include "core/error.h"

fdma_status fdma_check_backward(const void *caller, check_depth depth, fdma_problem *problem) {
    fdma_backward_args args;
    FDMA_TRY(FDMA_COPY_ARGS(fdma_backward_args, caller, &args));
    FDMA_TRY(fdma_check_exec(&args.exec, depth));
    *problem = (fdma_problem){
        .operation = operation_backward,
        .causal = args.causal != 0,
        .deterministic = args.deterministic != 0,
        .accumulate = args.accumulate != 0,
        .exec = args.exec,
    };
    fdma_take_tensors(problem, &args);
    const attention_options options = {args.selection, args.scale, args.softcap, args.reserved};
    FDMA_TRY(fdma_settle_attention(&options, problem));
    return fdma_check_tensors(problem, depth);
}
