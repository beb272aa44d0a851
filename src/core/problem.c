/* Public argument structs -> validated problems. Section by section: struct versions, sizes,
 * options, tensors, overlaps; the first thing that is wrong is reported, nothing is written. */
#include "core/problem.h"

#include "core/checks.h"
#include "core/error.h"

fdma_status fdma_check_score(const void *caller, check_depth depth, fdma_problem *problem) {
    fdma_score_args args;
    FDMA_TRY(
        fdma_copy_args("fdma_score_args", caller, FIRST_SIZE(fdma_score_args), &args, sizeof args));
    FDMA_TRY(fdma_check_exec(&args.exec, depth));
    FDMA_TRY(fdma_check_reserved("reserved", args.reserved));
    FDMA_TRY(fdma_check_form("v", &args.v, 4, takes_floats));
    *problem = (fdma_problem){
        .operation = operation_score,
        .dtype = args.v.dtype,
        .batch = args.v.shape[0],
        .kv_len = args.v.shape[1],
        .kv_heads = args.v.shape[2],
        .head_dim = args.v.shape[3],
        .v = args.v,
        .dt_proj = args.dt_proj,
        .a = args.a,
        .key_valid = args.key_valid,
        .score = args.score,
        .bias = args.bias,
        .bias_form = args.bias_form,
        .exec = args.exec,
    };
    const int64_t batch = problem->batch, heads = problem->kv_heads, len = problem->kv_len;
    FDMA_TRY(fdma_check_sizes(problem));
    FDMA_TRY(fdma_check_head_dim(problem->head_dim));
    FDMA_REQUIRE((unsigned)args.bias_form <= FDMA_BIAS_NONE, FDMA_INVALID_ARGUMENT,
                 "bias_form: is %d, want one of fdma_bias_form", (int)args.bias_form);
    FDMA_REQUIRE(args.bias_form != FDMA_BIAS_NONE || !is_present(&args.bias), FDMA_INVALID_ARGUMENT,
                 "bias: is given, want none with FDMA_BIAS_NONE");
    const unsigned weights = 1u << args.v.dtype | takes_float32;
    const tensor_rule rules[] = {
        {"v", &args.v, takes_floats, 4, {batch, len, heads, problem->head_dim}, .output = false},
        {"dt_proj", &args.dt_proj, weights, 2, {heads, heads * problem->head_dim}, .output = false},
        {"a", &args.a, weights, 1, {heads}, .output = false},
        {"key_valid", &args.key_valid, takes_uint8, 2, {batch, len}, .optional = true},
        {"score", &args.score, takes_wide_floats, 3, {batch, heads, len}, true, true},
        {"bias", &args.bias, takes_wide_floats, 3, {batch, heads, len}, true, true},
    };
    return fdma_check_rules(problem, rules, COUNT(rules), depth);
}

fdma_status fdma_check_select(const void *caller, check_depth depth, fdma_problem *problem) {
    fdma_select_args args;
    fdma_selection selection;
    FDMA_TRY(fdma_copy_args("fdma_select_args", caller, FIRST_SIZE(fdma_select_args), &args,
                            sizeof args));
    FDMA_TRY(fdma_copy_args("selection", args.selection, sizeof selection, &selection,
                            sizeof selection));
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
        .score = args.score,
        .key_valid = args.key_valid,
        .expiry = selection.expiry,
        .slot = selection.slot,
        .window = args.window,
        .selected = true,
        .exec = args.exec,
    };
    const int64_t batch = problem->batch, heads = problem->kv_heads, len = problem->kv_len;
    FDMA_TRY(fdma_check_sizes(problem));
    FDMA_REQUIRE(args.window >= 1, FDMA_INVALID_ARGUMENT,
                 "window: is %lld, want 1 or more, or FDMA_WINDOW_ALL for all keys",
                 (long long)args.window);
    FDMA_TRY(fdma_settle_scope(args.scope, true, &problem->scope));
    const tensor_rule rules[] = {
        {"score", &args.score, takes_wide_floats, 3, {batch, heads, len}, .output = false},
        {"key_valid", &args.key_valid, takes_uint8, 2, {batch, len}, .optional = true},
        {"expiry", &selection.expiry, takes_int32, 3, {batch, heads, len}, .output = true},
        {"slot", &selection.slot, takes_int32, 3, {batch, heads, len}, true, true},
    };
    return fdma_check_rules(problem, rules, COUNT(rules), depth);
}

static fdma_status check_lists_options(const fdma_lists_args *args, const fdma_selection *selection,
                                       const fdma_problem *problem) {
    FDMA_TRY(fdma_check_sizes(problem));
    FDMA_REQUIRE(args->q_len >= 0, FDMA_INVALID_ARGUMENT, "q_len: is %lld, want 0 or more",
                 (long long)args->q_len);
    FDMA_REQUIRE(args->tile_len >= 1, FDMA_INVALID_ARGUMENT, "tile_len: is %lld, want 1 or more",
                 (long long)args->tile_len);
    FDMA_TRY(fdma_check_reserved("reserved", args->reserved));
    return fdma_check_selection(selection, problem);
}

/* The most keys that a tile can visit: what its first position keeps, and what arrives after. */
static int64_t most_listed(const fdma_problem *problem) {
    const int64_t len = problem->kv_len;
    const int64_t kept = problem->window < len ? problem->window : len;
    const int64_t arriving = problem->tile_len - 1 < len ? problem->tile_len - 1 : len;
    return kept + arriving < len ? kept + arriving : len;
}

fdma_status fdma_check_lists(const void *caller, check_depth depth, fdma_problem *problem) {
    fdma_lists_args args;
    fdma_selection selection;
    FDMA_TRY(
        fdma_copy_args("fdma_lists_args", caller, FIRST_SIZE(fdma_lists_args), &args, sizeof args));
    FDMA_TRY(fdma_copy_args("selection", args.selection, sizeof selection, &selection,
                            sizeof selection));
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
        .list = args.list,
        .count = args.count,
        .window = selection.window,
        .scope = selection.scope,
        .causal = args.causal != 0,
        .selected = true,
        .exec = args.exec,
    };
    FDMA_TRY(check_lists_options(&args, &selection, problem));
    const int64_t batch = problem->batch, heads = problem->kv_heads, len = problem->kv_len;
    const int64_t tiles = count_tiles(problem), width = args.list.shape[3];
    FDMA_REQUIRE(width >= most_listed(problem), FDMA_INVALID_ARGUMENT,
                 "list: axis 3 has %lld elements, want %lld or more", (long long)width,
                 (long long)most_listed(problem));
    const tensor_rule rules[] = {
        {"expiry", &selection.expiry, takes_int32, 3, {batch, heads, len}, .output = false},
        {"slot", &selection.slot, takes_int32, 3, {batch, heads, len}, .output = false},
        {"list", &args.list, takes_int32, 4, {batch, heads, tiles, width}, .output = true},
        {"count", &args.count, takes_int32, 4, {batch, heads, tiles, 2}, .output = true},
    };
    return fdma_check_rules(problem, rules, COUNT(rules), depth);
}

static fdma_status check_forward_tensors(const fdma_forward_args *args, fdma_problem *problem,
                                         check_depth depth) {
    const int64_t batch = problem->batch, q_len = problem->q_len, kv_len = problem->kv_len;
    const int64_t q_heads = problem->q_heads, heads = problem->kv_heads, dim = problem->head_dim;
    const unsigned same = 1u << problem->dtype;
    const bool dense = !problem->selected;
    const tensor_rule rules[] = {
        {"q", &args->q, same, 4, {batch, q_len, q_heads, dim}, .output = false},
        {"k", &args->k, same, 4, {batch, kv_len, heads, dim}, .output = false},
        {"v", &args->v, same, 4, {batch, kv_len, heads, dim}, .output = false},
        {"bias", &args->bias, takes_wide_floats, 3, {batch, heads, kv_len}, .optional = true},
        {"key_valid", &args->key_valid, takes_uint8, 2, {batch, kv_len}, .optional = true},
        {"expiry", &problem->expiry, takes_int32, 3, {batch, heads, kv_len}, .optional = dense},
        {"slot", &problem->slot, takes_int32, 3, {batch, heads, kv_len}, .optional = true},
        {"out", &args->out, same, 4, {batch, q_len, q_heads, dim}, .output = true},
        {"lse", &args->lse, takes_wide_floats, 3, {batch, q_heads, q_len}, true, true},
    };
    return fdma_check_rules(problem, rules, COUNT(rules), depth);
}

fdma_status fdma_check_forward(const void *caller, check_depth depth, fdma_problem *problem) {
    fdma_forward_args args;
    FDMA_TRY(fdma_copy_args("fdma_forward_args", caller, FIRST_SIZE(fdma_forward_args), &args,
                            sizeof args));
    FDMA_TRY(fdma_check_exec(&args.exec, depth));
    *problem = (fdma_problem){
        .operation = operation_forward,
        .q = args.q,
        .k = args.k,
        .v = args.v,
        .out = args.out,
        .lse = args.lse,
        .bias = args.bias,
        .key_valid = args.key_valid,
        .causal = args.causal != 0,
        .exec = args.exec,
    };
    const attention_options options = {args.selection, args.scale, args.softcap, args.reserved};
    FDMA_TRY(fdma_settle_attention(&options, problem));
    return check_forward_tensors(&args, problem, depth);
}
