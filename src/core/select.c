/* fdma_select_args -> a problem. */
#include "core/checks.h"
#include "core/error.h"

fdma_status fdma_check_select(const void *caller, check_depth depth, fdma_problem *problem) {
    fdma_select_args args;
    fdma_selection selection;
    FDMA_TRY(FDMA_COPY_ARGS(fdma_select_args, caller, &args));
    FDMA_TRY(fdma_copy_selection(args.selection, &selection));
    FDMA_TRY(fdma_check_exec(&args.exec, depth));
    FDMA_TRY(fdma_check_reserved("reserved", args.reserved));
    FDMA_TRY(fdma_check_reserved("selection.reserved", selection.reserved));
    FDMA_TRY(fdma_check_form("score", &args.score, 3, takes_wide_floats));
    *problem = (fdma_problem){
        .operation = operation_select,
        .dtype = args.score.dtype,
        .batch = args.score.shape[0],
        .kv_heads = args.score.shape[1],
        .kv_len = args.score.shape[2],
        .expiry = selection.expiry,
        .slot = selection.slot,
        .window = args.window,
        .selected = true,
        .exec = args.exec,
    };
    fdma_take_tensors(problem, &args);
    FDMA_TRY(fdma_check_sizes(problem));
    FDMA_REQUIRE(args.window >= 1, FDMA_INVALID_ARGUMENT,
                 "window: is %lld, want 1 or more, or FDMA_WINDOW_ALL for all keys",
                 (long long)args.window);
    FDMA_TRY(fdma_settle_scope(args.scope, true, &problem->scope));
    return fdma_check_tensors(problem, depth);
}
