/* The checks that operations share; see core/problem.c and core/gradients.c for the operations. */
#include "core/checks.h"

#include "core/error.h"

#include <float.h>
#include <math.h>
#include <string.h>

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

fdma_status fdma_check_exec(const fdma_exec *exec, check_depth depth) {
    FDMA_REQUIRE(exec->threads >= 0, FDMA_INVALID_ARGUMENT, "exec.threads: is %d, want 0 or more",
                 exec->threads);
    FDMA_REQUIRE(exec->device >= 0, FDMA_INVALID_ARGUMENT,
                 "exec.device: is %d, want FDMA_CPU or FDMA_CUDA(n)", exec->device);
    FDMA_REQUIRE(exec->reserved[0] == 0 && exec->reserved[1] == 0, FDMA_INVALID_ARGUMENT,
                 "exec.reserved: is set, want 0");
    FDMA_REQUIRE(depth == check_shapes || exec->workspace_size == 0 || exec->workspace != NULL,
                 FDMA_INVALID_ARGUMENT,
                 "exec.workspace: is NULL, want %zu bytes as exec.workspace_size says",
                 exec->workspace_size);
    return FDMA_OK;
}

fdma_status fdma_check_sizes(const fdma_problem *problem) {
    FDMA_REQUIRE(problem->kv_heads >= 1 && problem->kv_heads <= INT32_MAX, FDMA_INVALID_ARGUMENT,
                 "kv_heads: is %lld, want 1 to %d", (long long)problem->kv_heads, INT32_MAX);
    FDMA_REQUIRE(problem->kv_len <= INT32_MAX, FDMA_INVALID_ARGUMENT,
                 "kv_len: is %lld, want at most %d", (long long)problem->kv_len, INT32_MAX);
    return FDMA_OK;
}

fdma_status fdma_check_head_dim(int64_t head_dim) {
    FDMA_REQUIRE(head_dim >= 8 && head_dim <= 256 && head_dim % 8 == 0, FDMA_UNSUPPORTED,
                 "head_dim: is %lld, supported: multiples of 8 from 8 to 256", (long long)head_dim);
    return FDMA_OK;
}

fdma_status fdma_check_reserved(const char *name, int32_t reserved) {
    FDMA_REQUIRE(reserved == 0, FDMA_INVALID_ARGUMENT, "%s: is %d, want 0", name, reserved);
    return FDMA_OK;
}

fdma_status fdma_settle_scope(fdma_scope given, bool causal, fdma_scope *scope) {
    FDMA_REQUIRE((unsigned)given <= FDMA_SCOPE_GLOBAL, FDMA_INVALID_ARGUMENT,
                 "scope: is %d, want one of fdma_scope", (int)given);
    *scope = given != FDMA_SCOPE_DEFAULT ? given : causal ? FDMA_SCOPE_CAUSAL : FDMA_SCOPE_GLOBAL;
    return FDMA_OK;
}

/* The stride of an axis of length 0 or 1 is never needed, and may be anything. */
static void settle_strides(fdma_problem *problem) {
#define ADDRESS(name, member) &problem->member,
    fdma_tensor *const tensors[] = {FDMA_PROBLEM_TENSORS(ADDRESS)};
#undef ADDRESS
    for (size_t t = 0; t < COUNT(tensors); t++)
        for (int axis = 0; is_present(tensors[t]) && axis < tensors[t]->rank - 1; axis++)
            if (tensors[t]->shape[axis] <= 1)
                tensors[t]->stride[axis] = 0;
}

fdma_status fdma_check_rules(fdma_problem *problem, const tensor_rule *rules, size_t count,
                             check_depth depth) {
    FDMA_TRY(fdma_check_tensors(rules, count, depth == check_all));
    if (depth == check_all)
        FDMA_TRY(fdma_check_overlaps(rules, count));
    settle_strides(problem);
    return FDMA_OK;
}

fdma_status fdma_check_selection(const fdma_selection *selection, const fdma_problem *problem) {
    const int64_t kv_len = problem->kv_len;
    FDMA_TRY(fdma_check_reserved("selection.reserved", selection->reserved));
    FDMA_REQUIRE(selection->kv_len == kv_len, FDMA_INVALID_ARGUMENT,
                 "selection: was made for kv_len %lld, want %lld", (long long)selection->kv_len,
                 (long long)kv_len);
    FDMA_REQUIRE(selection->window >= 1, FDMA_INVALID_ARGUMENT,
                 "selection: its window is %lld, want 1 or more", (long long)selection->window);
    FDMA_REQUIRE(selection->scope == FDMA_SCOPE_CAUSAL || selection->scope == FDMA_SCOPE_GLOBAL,
                 FDMA_INVALID_ARGUMENT,
                 "selection: its scope is %d, want FDMA_SCOPE_CAUSAL or FDMA_SCOPE_GLOBAL",
                 (int)selection->scope);
    FDMA_REQUIRE(problem->causal || selection->scope == FDMA_SCOPE_GLOBAL, FDMA_INVALID_ARGUMENT,
                 "selection: its scope is causal, want global where causal is 0");
    FDMA_REQUIRE(selection->scope == FDMA_SCOPE_GLOBAL || problem->q_len <= kv_len,
                 FDMA_INVALID_ARGUMENT,
                 "q_len: is %lld, want at most kv_len, %lld, with causal scope",
                 (long long)problem->q_len, (long long)kv_len);
    return FDMA_OK;
}

static fdma_status check_options(const attention_options *args, const fdma_problem *problem) {
    FDMA_TRY(fdma_check_sizes(problem));
    FDMA_TRY(fdma_check_head_dim(problem->head_dim));
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
    return fdma_check_reserved("reserved", args->reserved);
}

fdma_status fdma_settle_attention(const attention_options *options, fdma_problem *problem) {
    FDMA_TRY(fdma_check_form("q", &problem->q, 4, takes_floats));
    FDMA_TRY(fdma_check_form("k", &problem->k, 4, takes_floats));
    problem->dtype = problem->q.dtype;
    problem->batch = problem->q.shape[0];
    problem->q_len = problem->q.shape[1];
    problem->kv_len = problem->k.shape[1];
    problem->q_heads = problem->q.shape[2];
    problem->kv_heads = problem->k.shape[2];
    problem->head_dim = problem->q.shape[3];
    FDMA_TRY(check_options(options, problem));
    problem->group = problem->q_heads / problem->kv_heads;
    problem->scale = options->scale != 0 ? options->scale : 1 / sqrt((double)problem->head_dim);
    problem->softcap = options->softcap;
    problem->selected = options->selection != NULL;
    if (!problem->selected)
        return FDMA_OK;
    fdma_selection selection;
    FDMA_TRY(fdma_copy_args("selection", options->selection, sizeof selection, &selection,
                            sizeof selection));
    FDMA_TRY(fdma_check_selection(&selection, problem));
    problem->expiry = selection.expiry;
    problem->slot = selection.slot;
    problem->window = selection.window;
    problem->scope = selection.scope;
    return FDMA_OK;
}
