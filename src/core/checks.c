/* The checks that operations share; those of one operation are in the file of its name. */
#include "core/checks.h"

#include "core/error.h"
#include "core/tensors.h"

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

fdma_status fdma_copy_selection(const fdma_selection *caller, fdma_selection *selection) {
    return fdma_copy_args("selection", caller, sizeof *selection, selection, sizeof *selection);
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

static fdma_tensor *member_of(fdma_problem *problem, const tensor_entry *entry) {
    return (fdma_tensor *)((char *)problem + entry->member);
}

void fdma_take_tensors(fdma_problem *problem, const void *args) {
    const tensor_table table = fdma_tensors[problem->operation];
    for (size_t t = 0; t < table.count; t++)
        if (!table.entries[t].in_selection)
            *member_of(problem, &table.entries[t]) = *tensor_at(args, table.entries[t].offset);
}

/* The length that a letter of tensor_entry.dims stands for. */
static int64_t length_of(const fdma_problem *problem, char dim) {
    switch (dim) {
    case 'b':
        return problem->batch;
    case 'i':
        return problem->q_len;
    case 'j':
        return problem->kv_len;
    case 'h':
        return problem->q_heads;
    case 'g':
        return problem->kv_heads;
    case 'd':
        return problem->head_dim;
    case 'c':
        return problem->kv_heads * problem->head_dim;
    case 't':
        return count_tiles(problem);
    case 'w':
        return problem->list.shape[3];
    default:
        return dim - '0';
    }
}

static unsigned dtypes_of(const fdma_problem *problem, tensor_dtypes dtypes) {
    switch (dtypes) {
    case dtypes_same:
        return 1u << problem->dtype;
    case dtypes_weight:
        return 1u << problem->dtype | takes_float32;
    case dtypes_wide:
        return takes_wide_floats;
    case dtypes_int32:
        return takes_int32;
    case dtypes_uint8:
        return takes_uint8;
    case dtypes_as_dt_proj:
        return 1u << problem->dt_proj.dtype;
    default:
        return 1u << problem->a.dtype;
    }
}

static bool is_output(const tensor_entry *entry) {
    return entry->role == role_output || entry->role == role_optional_output;
}

static bool may_be_absent(const fdma_problem *problem, const tensor_entry *entry) {
    return entry->role == role_optional || entry->role == role_optional_output ||
           (entry->role == role_selected && !problem->selected);
}

static fdma_status check_tensor(const fdma_problem *problem, const tensor_entry *entry,
                                check_depth depth) {
    const fdma_tensor *const tensor = tensor_at(problem, entry->member);
    if (may_be_absent(problem, entry) && !is_present(tensor))
        return FDMA_OK;
    FDMA_TRY(fdma_check_form(entry->name, tensor, (int32_t)strlen(entry->dims),
                             dtypes_of(problem, entry->dtypes)));
    for (int axis = 0; axis < tensor->rank; axis++) {
        const int64_t want = length_of(problem, entry->dims[axis]);
        FDMA_REQUIRE(tensor->shape[axis] == want, FDMA_INVALID_ARGUMENT,
                     "%s: axis %d has %lld elements, want %lld", entry->name, axis,
                     (long long)tensor->shape[axis], (long long)want);
    }
    return fdma_check_layout(entry->name, tensor, is_output(entry), depth == check_all);
}

/* The stride of an axis of length 0 or 1 is never needed, and may be anything. */
static void settle_strides(fdma_tensor *tensor) {
    for (int axis = 0; axis < tensor->rank - 1; axis++)
        if (tensor->shape[axis] <= 1)
            tensor->stride[axis] = 0;
}

fdma_status fdma_check_tensors(fdma_problem *problem, check_depth depth) {
    const tensor_table table = fdma_tensors[problem->operation];
    named_tensor tensors[most_tensors] = {0};
    for (size_t t = 0; t < table.count; t++) {
        const tensor_entry *const entry = &table.entries[t];
        FDMA_TRY(check_tensor(problem, entry, depth));
        tensors[t] = (named_tensor){entry->name, member_of(problem, entry), is_output(entry)};
    }
    if (depth == check_all)
        FDMA_TRY(fdma_check_overlaps(tensors, table.count, &problem->exec));
    for (size_t t = 0; t < table.count; t++)
        settle_strides(member_of(problem, &table.entries[t]));
    return FDMA_OK;
}

static bool is_among(const char *name, const char *const *names) {
    for (; *names != NULL; names++)
        if (strcmp(name, *names) == 0)
            return true;
    return false;
}

fdma_status fdma_check_fused(fdma_operation operation, const void *args,
                             const fdma_selection *selection, const fdma_exec *exec,
                             const char *const *unread) {
    const tensor_table table = fdma_tensors[operation];
    named_tensor tensors[most_tensors] = {0};
    size_t count = 0;
    for (size_t t = 0; t < table.count; t++) {
        const tensor_entry *const entry = &table.entries[t];
        const void *const base = entry->in_selection ? (const void *)selection : args;
        if (base != NULL && !is_among(entry->name, unread))
            tensors[count++] =
                (named_tensor){entry->name, tensor_at(base, entry->offset), is_output(entry)};
    }
    return fdma_check_overlaps(tensors, count, exec);
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

fdma_status fdma_settle_values(fdma_problem *problem) {
    FDMA_TRY(fdma_check_form("v", &problem->v, 4, takes_floats));
    problem->dtype = problem->v.dtype;
    problem->batch = problem->v.shape[0];
    problem->kv_len = problem->v.shape[1];
    problem->kv_heads = problem->v.shape[2];
    problem->head_dim = problem->v.shape[3];
    FDMA_TRY(fdma_check_sizes(problem));
    return fdma_check_head_dim(problem->head_dim);
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
    FDMA_TRY(fdma_copy_selection(options->selection, &selection));
    FDMA_TRY(fdma_check_selection(&selection, problem));
    problem->expiry = selection.expiry;
    problem->slot = selection.slot;
    problem->window = selection.window;
    problem->scope = selection.scope;
    return FDMA_OK;
}
