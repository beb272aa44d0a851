/* fdma_lists_args -> a problem. */
#include "core/checks.h"
#include "core/error.h"

static fdma_status check_options(const fdma_lists_args *args, const fdma_selection *selection,
                                 const fdma_problem *problem) {
    FDMA_TRY(fdma_check_sizes(problem));
    FDMA_REQUIRE(args->q_len >= 0, FDMA_INVALID_ARGUMENT, "q_len: is %lld, want 0 or more",
                 (long long)args->q_len);
    FDMA_REQUIRE(args->tile_len >= 1, FDMA_INVALID_ARGUMENT, "tile_len: is %lld, want 1 or more",
                 (long long)args->tile_len);
    FDMA_TRY(fdma_check_reserved("reserved", args->reserved));
    return fdma_check_selection(selection, problem);
}

/* The most keys that a tile can list: those that its first position keeps, and those that arrive
 * after it. */
static int64_t most_listed(const fdma_problem *problem) {
    const int64_t len = problem->kv_len;
    const int64_t kept = problem->window < len ? problem->window : len;
    const int64_t arriving = problem->tile_len - 1 < len ? problem->tile_len - 1 : len;
    return kept + arriving < len ? kept + arriving : len;
}

fdma_status fdma_check_lists(const void *caller, check_depth depth, fdma_problem *problem) {
    fdma_lists_args args;
    fdma_selection selection;
    FDMA_TRY(FDMA_COPY_ARGS(fdma_lists_args, caller, &args));
    FDMA_TRY(fdma_copy_selection(args.selection, &selection));
    FDMA_TRY(fdma_check_exec(&args.exec, depth));
    FDMA_TRY(fdma_check_form("expiry", &selection.expiry, 3, takes_int32));
    FDMA_TRY(fdma_check_form("list", &args.list, 4, takes_int32));
    *problem = (fdma_problem){
        .operation = operation_lists,
        .dtype = FDMA_INT32,
        .batch = selection.expiry.shape[0],
        .kv_heads = selection.expiry.shape[1],
        .kv_len = selection.expiry.shape[2],
        .q_len = args.q_len,
        .tile_len = args.tile_len,
        .expiry = selection.expiry,
        .slot = selection.slot,
        .window = selection.window,
        .scope = selection.scope,
        .causal = args.causal != 0,
        .selected = true,
        .exec = args.exec,
    };
    fdma_take_tensors(problem, &args);
    FDMA_TRY(check_options(&args, &selection, problem));
    FDMA_REQUIRE(args.list.shape[3] >= most_listed(problem), FDMA_INVALID_ARGUMENT,
                 "list: axis 3 has %lld elements, want %lld or more", (long long)args.list.shape[3],
                 (long long)most_listed(problem));
    return fdma_check_tensors(problem, depth);
}
