/* Public argument structs -> validated problems. Section by section: struct versions, sizes,
 * options, tensors, overlaps; the first thing that is wrong is reported, nothing is written. */
#include "core/problem.h"

#include "core/error.h"

#include <float.h>
#include <math.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof(array)[0])
#define FIRST_SIZE(type) (offsetof(type, exec) + sizeof(fdma_exec))

fdma_status fdma_copy_args(const char *name, const void *args, size_t first_size, void *known,
                           size_t known_size) {
    FDMA_REQUIRE(args != NULL, FDMA_INVALID_ARGUMENT, "%s: is NULL", name);
    size_t size;
    memcpy(&size, args, sizeof size);
    FDMA_REQUIRE(size >= first_size && size < 4096, FDMA_INVALID_ARGUMENT,
                 "%s: size is %zu, want sizeof the struct, %zu", name, size, known_size);
    const uint8_t *const bytes = args;
    for (size_t i = known_size; i < size; i++)
        FDMA_REQUIRE(bytes[i] == 0, FDMA_UNSUPPORTED,
                     "%s: size is %zu and byte %zu is set; this library knows %zu bytes", name,
                     size, i, known_size);
    memset(known, 0, known_size);
    memcpy(known, args, size < known_size ? size : known_size);
    return FDMA_OK;
}

static fdma_status check_exec(const fdma_exec *exec, check_depth depth) {
    FDMA_REQUIRE(exec->threads >= 0, FDMA_INVALID_ARGUMENT, "exec.threads: is %d, want 0 or more",
                 exec->threads);
    FDMA_REQUIRE(exec->device >= 0, FDMA_INVALID_ARGUMENT, "exec.device: is %d, want 0 or more",
                 exec->device);
    FDMA_REQUIRE(exec->reserved[0] == 0 && exec->reserved[1] == 0, FDMA_INVALID_ARGUMENT,
                 "exec.reserved: is set, want 0");
    FDMA_REQUIRE(depth == check_shapes || exec->workspace_size == 0 || exec->workspace != NULL,
                 FDMA_INVALID_ARGUMENT,
                 "exec.workspace: is NULL, want %zu bytes as exec.workspace_size says",
                 exec->workspace_size);
    return FDMA_OK;
}

static fdma_status check_sizes(const fdma_problem *problem) {
    FDMA_REQUIRE(problem->kv_heads >= 1 && problem->kv_heads <= INT32_MAX, FDMA_INVALID_ARGUMENT,
                 "kv_heads: is %lld, want 1 to %d", (long long)problem->kv_heads, INT32_MAX);
    FDMA_REQUIRE(problem->kv_len <= INT32_MAX, FDMA_INVALID_ARGUMENT,
                 "kv_len: is %lld, want at most %d", (long long)problem->kv_len, INT32_MAX);
    return FDMA_OK;
}

static fdma_status check_head_dim(int64_t head_dim) {
    FDMA_REQUIRE(head_dim >= 8 && head_dim <= 256 && head_dim % 8 == 0, FDMA_UNSUPPORTED,
                 "head_dim: is %lld, supported: multiples of 8 from 8 to 256", (long long)head_dim);
    return FDMA_OK;
}

static fdma_status check_reserved(int32_t reserved) {
    FDMA_REQUIRE(reserved == 0, FDMA_INVALID_ARGUMENT, "reserved: is %d, want 0", reserved);
    return FDMA_OK;
}

/* The stride of an axis of length 1 is never needed, and may be anything. */
static void settle_strides(fdma_problem *problem) {
    fdma_tensor *const tensors[] = {
        &problem->q,     &problem->k,       &problem->v,    &problem->out,       &problem->lse,
        &problem->score, &problem->dt_proj, &problem->a,    &problem->key_valid, &problem->bias,
        &problem->slot,  &problem->expiry,  &problem->list, &problem->count};
    for (size_t t = 0; t < COUNT(tensors); t++)
        for (int axis = 0; is_present(tensors[t]) && axis < tensors[t]->rank - 1; axis++)
            if (tensors[t]->shape[axis] == 1)
                tensors[t]->stride[axis] = 0;
}

static fdma_status check_rules(fdma_problem *problem, const tensor_rule *rules, size_t count,
                               check_depth depth) {
    FDMA_TRY(fdma_check_tensors(rules, count, depth == check_all));
    if (depth == check_all)
        FDMA_TRY(fdma_check_overlaps(rules, count));
    settle_strides(problem);
    return FDMA_OK;
}

fdma_status fdma_check_score(const fdma_score_args *caller, check_depth depth,
                             fdma_problem *problem) {
    fdma_score_args args;
    FDMA_TRY(
        fdma_copy_args("fdma_score_args", caller, FIRST_SIZE(fdma_score_args), &args, sizeof args));
    FDMA_TRY(check_exec(&args.exec, depth));
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
    FDMA_TRY(check_sizes(problem));
    FDMA_TRY(check_head_dim(problem->head_dim));
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
    return check_rules(problem, rules, COUNT(rules), depth);
}

fdma_status fdma_check_select(const fdma_select_args *caller, check_depth depth,
                              fdma_problem *problem) {
    fdma_select_args args;
    fdma_selection selection;
    FDMA_TRY(fdma_copy_args("fdma_select_args", caller, FIRST_SIZE(fdma_select_args), &args,
                            sizeof args));
    FDMA_TRY(fdma_copy_args("selection", args.selection, sizeof selection, &selection,
                            sizeof selection));
    FDMA_TRY(check_exec(&args.exec, depth));
    FDMA_TRY(check_reserved(args.reserved));
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
        .scope = args.scope,
        .selected = true,
        .exec = args.exec,
    };
    const int64_t batch = problem->batch, heads = problem->kv_heads, len = problem->kv_len;
    FDMA_TRY(check_sizes(problem));
    FDMA_REQUIRE(args.window >= 0, FDMA_INVALID_ARGUMENT, "window: is %lld, want 0 or more",
                 (long long)args.window);
    FDMA_REQUIRE((unsigned)args.scope <= FDMA_SCOPE_GLOBAL, FDMA_INVALID_ARGUMENT,
                 "scope: is %d, want one of fdma_scope", (int)args.scope);
    const tensor_rule rules[] = {
        {"score", &args.score, takes_wide_floats, 3, {batch, heads, len}, .output = false},
        {"key_valid", &args.key_valid, takes_uint8, 2, {batch, len}, .optional = true},
        {"expiry", &selection.expiry, takes_int32, 3, {batch, heads, len}, .output = true},
        {"slot", &selection.slot, takes_int32, 3, {batch, heads, len}, true, true},
    };
    return check_rules(problem, rules, COUNT(rules), depth);
}

/* A selection is only good for the keys, the window and the scope it was made for. */
static fdma_status check_selection(const fdma_selection *selection, const fdma_problem *problem,
                                   int64_t window) {
    const int64_t kv_len = problem->kv_len;
    FDMA_TRY(check_reserved(selection->reserved));
    FDMA_REQUIRE(selection->kv_len == kv_len, FDMA_INVALID_ARGUMENT,
                 "selection: was made for kv_len %lld, want %lld", (long long)selection->kv_len,
                 (long long)kv_len);
    FDMA_REQUIRE(selection->window >= 0, FDMA_INVALID_ARGUMENT,
                 "selection: its window is %lld, want 0 or more", (long long)selection->window);
    FDMA_REQUIRE(window == 0 || window == selection->window, FDMA_INVALID_ARGUMENT,
                 "selection: was made for window %lld, want %lld", (long long)selection->window,
                 (long long)window);
    FDMA_REQUIRE((unsigned)selection->scope <= FDMA_SCOPE_GLOBAL, FDMA_INVALID_ARGUMENT,
                 "selection: its scope is %d, want one of fdma_scope", (int)selection->scope);
    FDMA_REQUIRE(problem->causal || selection->scope == FDMA_SCOPE_GLOBAL, FDMA_INVALID_ARGUMENT,
                 "selection: its scope is causal, want global where causal is 0");
    FDMA_REQUIRE(selection->scope == FDMA_SCOPE_GLOBAL || problem->q_len <= kv_len,
                 FDMA_INVALID_ARGUMENT,
                 "q_len: is %lld, want at most kv_len, %lld, with causal scope",
                 (long long)problem->q_len, (long long)kv_len);
    return FDMA_OK;
}

static fdma_status check_lists_options(const fdma_lists_args *args, const fdma_selection *selection,
                                       const fdma_problem *problem) {
    FDMA_TRY(check_sizes(problem));
    FDMA_REQUIRE(args->q_len >= 0, FDMA_INVALID_ARGUMENT, "q_len: is %lld, want 0 or more",
                 (long long)args->q_len);
    FDMA_REQUIRE(args->tile_len >= 1, FDMA_INVALID_ARGUMENT, "tile_len: is %lld, want 1 or more",
                 (long long)args->tile_len);
    FDMA_TRY(check_reserved(args->reserved));
    return check_selection(selection, problem, 0);
}

/* The most keys that a tile can visit: what its first position keeps, and what arrives after. */
static int64_t most_listed(const fdma_problem *problem) {
    const int64_t len = problem->kv_len;
    const int64_t kept = problem->window < len ? problem->window : len;
    const int64_t arriving = problem->tile_len - 1 < len ? problem->tile_len - 1 : len;
    return kept + arriving < len ? kept + arriving : len;
}

fdma_status fdma_check_lists(const fdma_lists_args *caller, check_depth depth,
                             fdma_problem *problem) {
    fdma_lists_args args;
    fdma_selection selection;
    FDMA_TRY(
        fdma_copy_args("fdma_lists_args", caller, FIRST_SIZE(fdma_lists_args), &args, sizeof args));
    FDMA_TRY(fdma_copy_args("selection", args.selection, sizeof selection, &selection,
                            sizeof selection));
    FDMA_TRY(check_exec(&args.exec, depth));
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
    return check_rules(problem, rules, COUNT(rules), depth);
}

static fdma_status check_forward_options(const fdma_forward_args *args,
                                         const fdma_problem *problem) {
    FDMA_TRY(check_sizes(problem));
    FDMA_TRY(check_head_dim(problem->head_dim));
    FDMA_REQUIRE(problem->q_heads % problem->kv_heads == 0 && problem->q_heads > 0,
                 FDMA_INVALID_ARGUMENT, "q_heads: is %lld, want a multiple of kv_heads, %lld",
                 (long long)problem->q_heads, (long long)problem->kv_heads);
    FDMA_REQUIRE(args->scale >= 0 && args->scale < INFINITY, FDMA_INVALID_ARGUMENT,
                 "scale: is %g, want a finite number, 0 or more", args->scale);
    FDMA_REQUIRE(args->scale <= FLT_MAX, FDMA_INVALID_ARGUMENT,
                 "scale: is %g, want a number of float32, at most %g", args->scale,
                 (double)FLT_MAX);
    FDMA_REQUIRE(args->softcap >= 0 && args->softcap < INFINITY, FDMA_INVALID_ARGUMENT,
                 "softcap: is %g, want a finite number, 0 or more", args->softcap);
    FDMA_REQUIRE(args->window == 0 || args->selection != NULL, FDMA_INVALID_ARGUMENT,
                 "window: is %lld, want 0 where selection is NULL", (long long)args->window);
    return check_reserved(args->reserved);
}

static fdma_status check_forward_tensors(const fdma_forward_args *args,
                                         const fdma_selection *selection, fdma_problem *problem,
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
        {"expiry", &selection->expiry, takes_int32, 3, {batch, heads, kv_len}, .optional = dense},
        {"slot", &selection->slot, takes_int32, 3, {batch, heads, kv_len}, .optional = true},
        {"out", &args->out, same, 4, {batch, q_len, q_heads, dim}, .output = true},
        {"lse", &args->lse, takes_wide_floats, 3, {batch, q_heads, q_len}, true, true},
    };
    return check_rules(problem, rules, COUNT(rules), depth);
}

fdma_status fdma_check_forward(const fdma_forward_args *caller, check_depth depth,
                               fdma_problem *problem) {
    fdma_forward_args args;
    fdma_selection selection = {0};
    FDMA_TRY(fdma_copy_args("fdma_forward_args", caller, FIRST_SIZE(fdma_forward_args), &args,
                            sizeof args));
    FDMA_TRY(check_exec(&args.exec, depth));
    FDMA_TRY(fdma_check_form("q", &args.q, 4, takes_floats));
    FDMA_TRY(fdma_check_form("k", &args.k, 4, takes_floats));
    const int64_t head_dim = args.q.shape[3];
    *problem = (fdma_problem){
        .operation = operation_forward,
        .dtype = args.q.dtype,
        .batch = args.q.shape[0],
        .q_len = args.q.shape[1],
        .kv_len = args.k.shape[1],
        .q_heads = args.q.shape[2],
        .kv_heads = args.k.shape[2],
        .head_dim = head_dim,
        .q = args.q,
        .k = args.k,
        .v = args.v,
        .out = args.out,
        .lse = args.lse,
        .bias = args.bias,
        .key_valid = args.key_valid,
        .scale = args.scale != 0 ? args.scale : 1 / sqrt((double)head_dim),
        .softcap = args.softcap,
        .causal = args.causal != 0,
        .selected = args.selection != NULL,
        .exec = args.exec,
    };
    FDMA_TRY(check_forward_options(&args, problem));
    problem->group = problem->q_heads / problem->kv_heads;
    if (problem->selected) {
        FDMA_TRY(fdma_copy_args("selection", args.selection, sizeof selection, &selection,
                                sizeof selection));
        FDMA_TRY(check_selection(&selection, problem, args.window));
        problem->expiry = selection.expiry;
        problem->slot = selection.slot;
        problem->window = selection.window;
        problem->scope = selection.scope;
    }
    return check_forward_tensors(&args, &selection, problem, depth);
}
