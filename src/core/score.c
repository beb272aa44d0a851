/* fdma_score_args and fdma_score_backward_args -> a problem. */
#include "core/checks.h"
#include "core/error.h"

fdma_status fdma_check_score(const void *caller, check_depth depth, fdma_problem *problem) {
    fdma_score_args args;
    FDMA_TRY(FDMA_COPY_ARGS(fdma_score_args, caller, &args));
    FDMA_TRY(fdma_check_exec(&args.exec, depth));
    FDMA_TRY(fdma_check_reserved("reserved", args.reserved));
    *problem = (fdma_problem){
        .operation = operation_score,
        .bias_form = args.bias_form,
        .exec = args.exec,
    };
    fdma_take_tensors(problem, &args);
    FDMA_TRY(fdma_settle_values(problem));
    FDMA_REQUIRE((unsigned)args.bias_form <= FDMA_BIAS_NONE, FDMA_INVALID_ARGUMENT,
                 "bias_form: is %d, want one of fdma_bias_form", (int)args.bias_form);
    FDMA_REQUIRE(args.bias_form != FDMA_BIAS_NONE || !is_present(&args.bias), FDMA_INVALID_ARGUMENT,
                 "bias: is given, want none with FDMA_BIAS_NONE");
    return fdma_check_tensors(problem, depth);
}

fdma_status fdma_check_score_backward(const void *caller, check_depth depth,
                                      fdma_problem *problem) {
    fdma_score_backward_args args;
    FDMA_TRY(FDMA_COPY_ARGS(fdma_score_backward_args, caller, &args));
    FDMA_TRY(fdma_check_exec(&args.exec, depth));
    *problem = (fdma_problem){
        .operation = operation_score_backward,
        .bias_form = args.bias_form,
        .accumulate = args.accumulate != 0,
        .exec = args.exec,
    };
    fdma_take_tensors(problem, &args);
    FDMA_TRY(fdma_settle_values(problem));
    // their dtypes are those of ddt_proj and da
    FDMA_TRY(fdma_check_form("dt_proj", &args.dt_proj, 2, takes_floats));
    FDMA_TRY(fdma_check_form("a", &args.a, 1, takes_floats));
    FDMA_REQUIRE((unsigned)args.bias_form < FDMA_BIAS_NONE, FDMA_INVALID_ARGUMENT,
                 "bias_form: is %d, want FDMA_BIAS_EXP or FDMA_BIAS_LINEAR", (int)args.bias_form);
    return fdma_check_tensors(problem, depth);
}
