/* Argument structs of gradients and of merging -> validated problems; as core/problem.c. */
#include "core/checks.h"
#include "core/error.h"

static fdma_status check_backward_tensors(const fdma_backward_args *args, fdma_problem *problem,
                                          check_depth depth) {
    const int64_t batch = problem->batch, q_len = problem->q_len, kv_len = problem->kv_len;
    const int64_t q_heads = problem->q_heads, heads = problem->kv_heads, dim = problem->head_dim;
    const unsigned same = 1u << problem->dtype;
    const bool dense = !problem->selected;
    const tensor_rule rules[] = {
        {"dout", &args->dout, same, 4, {batch, q_len, q_heads, dim}, .output = false},
        {"dlse", &args->dlse, takes_wide_floats, 3, {batch, q_heads, q_len}, .optional = true},
        {"out", &args->out, same, 4, {batch, q_len, q_heads, dim}, .output = false},
        {"lse", &args->lse, takes_wide_floats, 3, {batch, q_heads, q_len}, .output = false},
        {"q", &args->q, same, 4, {batch, q_len, q_heads, dim}, .output = false},
        {"k", &args->k, same, 4, {batch, kv_len, heads, dim}, .output = false},
        {"v", &args->v, same, 4, {batch, kv_len, heads, dim}, .output = false},
        {"bias", &args->bias, takes_wide_floats, 3, {batch, heads, kv_len}, .optional = true},
        {"key_valid", &args->key_valid, takes_uint8, 2, {batch, kv_len}, .optional = true},
        {"expiry", &problem->expiry, takes_int32, 3, {batch, heads, kv_len}, .optional = dense},
        {"slot", &problem->slot, takes_int32, 3, {batch, heads, kv_len}, .optional = true},
        {"dq", &args->dq, same, 4, {batch, q_len, q_heads, dim}, .output = true},
        {"dk", &args->dk, same, 4, {batch, kv_len, heads, dim}, .output = true},
        {"dv", &args->dv, same, 4, {batch, kv_len, heads, dim}, .output = true},
        {"dbias", &args->dbias, takes_wide_floats, 3, {batch, heads, kv_len}, true, true},
    };
    return fdma_check_rules(problem, rules, COUNT(rules), depth);
}

fdma_status fdma_check_backward(const void *caller, check_depth depth, fdma_problem *problem) {
    fdma_backward_args args;
    FDMA_TRY(fdma_copy_args("fdma_backward_args", caller, FIRST_SIZE(fdma_backward_args), &args,
                            sizeof args));
    FDMA_TRY(fdma_check_exec(&args.exec, depth));
    *problem = (fdma_problem){
        .operation = operation_backward,
        .dout = args.dout,
        .dlse = args.dlse,
        .out = args.out,
        .lse = args.lse,
        .q = args.q,
        .k = args.k,
        .v = args.v,
        .bias = args.bias,
        .key_valid = args.key_valid,
        .dq = args.dq,
        .dk = args.dk,
        .dv = args.dv,
        .dbias = args.dbias,
        .causal = args.causal != 0,
        .deterministic = args.deterministic != 0,
        .accumulate = args.accumulate != 0,
        .exec = args.exec,
    };
    const attention_options options = {args.selection, args.scale, args.softcap, args.reserved};
    FDMA_TRY(fdma_settle_attention(&options, problem));
    return check_backward_tensors(&args, problem, depth);
}

static fdma_status check_score_backward_tensors(const fdma_score_backward_args *args,
                                                fdma_problem *problem, check_depth depth) {
    const int64_t batch = problem->batch, len = problem->kv_len, heads = problem->kv_heads;
    const int64_t dim = problem->head_dim, width = heads * dim;
    const unsigned same = 1u << problem->dtype, weights = same | takes_float32;
    const unsigned as_dt_proj = 1u << args->dt_proj.dtype, as_a = 1u << args->a.dtype;
    const tensor_rule rules[] = {
        {"dbias", &args->dbias, takes_wide_floats, 3, {batch, heads, len}, .output = false},
        {"v", &args->v, same, 4, {batch, len, heads, dim}, .output = false},
        {"dt_proj", &args->dt_proj, weights, 2, {heads, width}, .output = false},
        {"a", &args->a, weights, 1, {heads}, .output = false},
        {"key_valid", &args->key_valid, takes_uint8, 2, {batch, len}, .optional = true},
        {"dv", &args->dv, same, 4, {batch, len, heads, dim}, true, true},
        {"ddt_proj", &args->ddt_proj, as_dt_proj, 2, {heads, width}, .output = true},
        {"da", &args->da, as_a, 1, {heads}, .output = true},
    };
    return fdma_check_rules(problem, rules, COUNT(rules), depth);
}

fdma_status fdma_check_score_backward(const void *caller, check_depth depth,
                                      fdma_problem *problem) {
    fdma_score_backward_args args;
    FDMA_TRY(fdma_copy_args("fdma_score_backward_args", caller,
                            FIRST_SIZE(fdma_score_backward_args), &args, sizeof args));
    FDMA_TRY(fdma_check_exec(&args.exec, depth));
    FDMA_TRY(fdma_check_form("v", &args.v, 4, takes_floats));
    *problem = (fdma_problem){
        .operation = operation_score_backward,
        .dtype = args.v.dtype,
        .batch = args.v.shape[0],
        .kv_len = args.v.shape[1],
        .kv_heads = args.v.shape[2],
        .head_dim = args.v.shape[3],
        .dbias = args.dbias,
        .v = args.v,
        .dt_proj = args.dt_proj,
        .a = args.a,
        .key_valid = args.key_valid,
        .dv = args.dv,
        .ddt_proj = args.ddt_proj,
        .da = args.da,
        .bias_form = args.bias_form,
        .accumulate = args.accumulate != 0,
        .exec = args.exec,
    };
    FDMA_TRY(fdma_check_sizes(problem));
    FDMA_TRY(fdma_check_head_dim(problem->head_dim));
    FDMA_TRY(fdma_check_form("dt_proj", &args.dt_proj, 2, takes_floats));
    FDMA_TRY(fdma_check_form("a", &args.a, 1, takes_floats));
    FDMA_REQUIRE((unsigned)args.bias_form < FDMA_BIAS_NONE, FDMA_INVALID_ARGUMENT,
                 "bias_form: is %d, want FDMA_BIAS_EXP or FDMA_BIAS_LINEAR", (int)args.bias_form);
    return check_score_backward_tensors(&args, problem, depth);
}

static fdma_problem merge_problem(fdma_operation operation, const fdma_tensor *out,
                                  const fdma_exec *exec) {
    return (fdma_problem){
        .operation = operation,
        .dtype = out->dtype,
        .batch = out->shape[0],
        .q_len = out->shape[1],
        .q_heads = out->shape[2],
        .head_dim = out->shape[3],
        .exec = *exec,
    };
}

fdma_status fdma_check_merge(const void *caller, check_depth depth, fdma_problem *problem) {
    fdma_merge_args args;
    FDMA_TRY(
        fdma_copy_args("fdma_merge_args", caller, FIRST_SIZE(fdma_merge_args), &args, sizeof args));
    FDMA_TRY(fdma_check_exec(&args.exec, depth));
    FDMA_TRY(fdma_check_form("out", &args.out, 4, takes_floats));
    *problem = merge_problem(operation_merge, &args.out, &args.exec);
    problem->out = args.out;
    problem->lse = args.lse;
    problem->part[0] = (fdma_partial){.out = args.out_a, .lse = args.lse_a};
    problem->part[1] = (fdma_partial){.out = args.out_b, .lse = args.lse_b};
    FDMA_TRY(fdma_check_head_dim(problem->head_dim));
    const int64_t batch = problem->batch, len = problem->q_len, heads = problem->q_heads;
    const int64_t dim = problem->head_dim;
    const unsigned same = 1u << problem->dtype;
    const tensor_rule rules[] = {
        {"out_a", &args.out_a, same, 4, {batch, len, heads, dim}, .output = false},
        {"lse_a", &args.lse_a, takes_wide_floats, 3, {batch, heads, len}, .output = false},
        {"out_b", &args.out_b, same, 4, {batch, len, heads, dim}, .output = false},
        {"lse_b", &args.lse_b, takes_wide_floats, 3, {batch, heads, len}, .output = false},
        {"out", &args.out, same, 4, {batch, len, heads, dim}, .output = true},
        {"lse", &args.lse, takes_wide_floats, 3, {batch, heads, len}, true, true},
    };
    return fdma_check_rules(problem, rules, COUNT(rules), depth);
}

fdma_status fdma_check_merge_backward(const void *caller, check_depth depth,
                                      fdma_problem *problem) {
    fdma_merge_backward_args args;
    FDMA_TRY(fdma_copy_args("fdma_merge_backward_args", caller,
                            FIRST_SIZE(fdma_merge_backward_args), &args, sizeof args));
    FDMA_TRY(fdma_check_exec(&args.exec, depth));
    FDMA_TRY(fdma_check_form("dout", &args.dout, 4, takes_floats));
    *problem = merge_problem(operation_merge_backward, &args.dout, &args.exec);
    problem->dout = args.dout;
    problem->dlse = args.dlse;
    problem->part[0] = (fdma_partial){args.out_a, args.lse_a, args.dout_a, args.dlse_a};
    problem->part[1] = (fdma_partial){args.out_b, args.lse_b, args.dout_b, args.dlse_b};
    FDMA_TRY(fdma_check_head_dim(problem->head_dim));
    const int64_t batch = problem->batch, len = problem->q_len, heads = problem->q_heads;
    const int64_t dim = problem->head_dim;
    const unsigned same = 1u << problem->dtype;
    const tensor_rule rules[] = {
        {"dout", &args.dout, same, 4, {batch, len, heads, dim}, .output = false},
        {"dlse", &args.dlse, takes_wide_floats, 3, {batch, heads, len}, .optional = true},
        {"out_a", &args.out_a, same, 4, {batch, len, heads, dim}, .output = false},
        {"lse_a", &args.lse_a, takes_wide_floats, 3, {batch, heads, len}, .output = false},
        {"out_b", &args.out_b, same, 4, {batch, len, heads, dim}, .output = false},
        {"lse_b", &args.lse_b, takes_wide_floats, 3, {batch, heads, len}, .output = false},
        {"dout_a", &args.dout_a, same, 4, {batch, len, heads, dim}, .output = true},
        {"dlse_a", &args.dlse_a, takes_wide_floats, 3, {batch, heads, len}, .output = true},
        {"dout_b", &args.dout_b, same, 4, {batch, len, heads, dim}, .output = true},
        {"dlse_b", &args.dlse_b, takes_wide_floats, 3, {batch, heads, len}, .output = true},
    };
    return fdma_check_rules(problem, rules, COUNT(rules), depth);
}
