/* calls.h - a call of any operation: its tensors, found through the library's own list
 * (core/signatures.h), its workspace, and the kernels that can be forced to run it. */
#pragma once

#include "fixture.h"

#include "core/signatures.h"

enum { operation_count = operation_prefill + 1, kernel_limit = 32 };

static inline bool is_device_kernel(const char *name) {
    return strncmp(name, "cuda", 4) == 0 && (name[4] == '/' || name[4] == '\0');
}

/* run: makes a call on a device, with copies of its tensors there; device.h sets it, else it is
 * NULL. fill: the byte that fills the workspace before a call. */
static struct {
    fdma_status (*run)(fdma_operation operation, void *args);
    unsigned char fill;
} test_backend = {.fill = 0xa5};

/* ---- operations, through pointers to their argument structs ---- */

typedef struct operation_info {
    const char *name;
    fdma_status (*call)(const void *args);
    fdma_status (*workspace)(const void *args, size_t *bytes);
    fdma_status (*kernel)(const void *args, const char **name); /* fused: of forward or backward */
    size_t args_size;
    size_t exec;      /* offset of that field */
    size_t selection; /* offset of the pointer to the selection; 0: there is none */
} operation_info;

static fdma_status run_operation(fdma_operation operation, void *args);

/* Defines run_forward() and the like. They call with workspace of exactly the size that the
 * operation asks for. */
#define DEFINE_OPERATION(name)                                                                     \
    static inline fdma_status untyped_##name(const void *args) { return fdma_##name(args); }       \
    static inline fdma_status untyped_##name##_workspace(const void *args, size_t *bytes) {        \
        return fdma_##name##_workspace(args, bytes);                                               \
    }                                                                                              \
    static inline fdma_status run_##name(fdma_##name##_args *args) {                               \
        return run_operation(operation_##name, args);                                              \
    }
#define DEFINE_SINGLE_OPERATION(operation)                                                         \
    DEFINE_OPERATION(operation)                                                                    \
    static inline fdma_status untyped_##operation##_kernel(const void *args, const char **name) {  \
        return fdma_##operation##_kernel(args, name);                                              \
    }
#define DEFINE_FUSED_OPERATION(operation, step)                                                    \
    DEFINE_OPERATION(operation)                                                                    \
    static inline fdma_status untyped_##operation##_kernel(const void *args, const char **name) {  \
        fdma_##operation##_kernels names = {.size = sizeof names, .step = *name};                  \
        const fdma_status status = fdma_##operation##_kernel(args, &names);                        \
        *name = names.step;                                                                        \
        return status;                                                                             \
    }

DEFINE_SINGLE_OPERATION(score)
DEFINE_SINGLE_OPERATION(select)
DEFINE_SINGLE_OPERATION(forward)
DEFINE_SINGLE_OPERATION(backward)
DEFINE_SINGLE_OPERATION(score_backward)
DEFINE_SINGLE_OPERATION(merge)
DEFINE_SINGLE_OPERATION(merge_backward)
DEFINE_SINGLE_OPERATION(decode)
DEFINE_SINGLE_OPERATION(cache_store)
DEFINE_SINGLE_OPERATION(cache_copy)
DEFINE_SINGLE_OPERATION(probabilities)
DEFINE_SINGLE_OPERATION(rotary_table)
DEFINE_SINGLE_OPERATION(rotate)
DEFINE_SINGLE_OPERATION(rotate_backward)
DEFINE_FUSED_OPERATION(attention, forward)
DEFINE_FUSED_OPERATION(attention_backward, backward)
DEFINE_FUSED_OPERATION(prefill, decode)

#define OPERATION(name, selection)                                                                 \
    [operation_##name] = {#name,                                                                   \
                          untyped_##name,                                                          \
                          untyped_##name##_workspace,                                              \
                          untyped_##name##_kernel,                                                 \
                          sizeof(fdma_##name##_args),                                              \
                          offsetof(fdma_##name##_args, exec),                                      \
                          selection}
#define SELECTION_OF(name) offsetof(fdma_##name##_args, selection)

static const operation_info operations[operation_count] = {
    OPERATION(score, 0),
    OPERATION(select, SELECTION_OF(select)),
    OPERATION(forward, SELECTION_OF(forward)),
    OPERATION(backward, SELECTION_OF(backward)),
    OPERATION(score_backward, 0),
    OPERATION(merge, 0),
    OPERATION(merge_backward, 0),
    OPERATION(decode, 0),
    OPERATION(cache_store, SELECTION_OF(cache_store)),
    OPERATION(cache_copy, 0),
    OPERATION(probabilities, SELECTION_OF(probabilities)),
    OPERATION(rotary_table, 0),
    OPERATION(rotate, 0),
    OPERATION(rotate_backward, 0),
    OPERATION(attention, SELECTION_OF(attention)),
    OPERATION(attention_backward, SELECTION_OF(attention_backward)),
    OPERATION(prefill, 0),
};

static inline fdma_exec *exec_of(fdma_operation operation, void *args) {
    return (fdma_exec *)((char *)args + operations[operation].exec);
}

static inline void exec_alloc(fdma_exec *exec, size_t bytes) {
    exec->workspace = test_alloc_guarded(bytes);
    exec->workspace_size = bytes;
}

static fdma_status run_operation(fdma_operation operation, void *args) {
    fdma_exec *const exec = exec_of(operation, args);
    size_t bytes = 0;
    if (exec->kernel != NULL && is_device_kernel(exec->kernel))
        return test_backend.run(operation, args);
    FDMA_TRY(operations[operation].workspace(args, &bytes));
    exec_alloc(exec, bytes);
    memset(exec->workspace, test_backend.fill, bytes);
    return operations[operation].call(args);
}

/* ---- a call ---- */

/* The arguments of one call, and their selection if they have one. The arguments point to the
 * selection, so copy a call with call_copy(), not by assignment. */
typedef struct call {
    fdma_operation operation;
    any_args args;
    fdma_selection selection;
} call;

static inline fdma_exec *call_exec(call *x) { return exec_of(x->operation, &x->args); }

/* Makes the arguments point to the selection beside them. */
static inline void call_own_selection(call *x) {
    const size_t offset = operations[x->operation].selection;
    fdma_selection *const own = &x->selection;
    if (offset != 0)
        memcpy((char *)&x->args + offset, &own, sizeof own);
}

static inline fdma_selection *selection_of(fdma_operation operation, const void *args) {
    const size_t offset = operations[operation].selection;
    fdma_selection *given = NULL;
    if (offset != 0)
        memcpy(&given, (const char *)args + offset, sizeof given);
    return given;
}

static inline void call_of(call *x, fdma_operation operation, const void *args) {
    const fdma_selection *const given = selection_of(operation, args);
    x->operation = operation;
    memcpy(&x->args, args, operations[operation].args_size);
    x->selection = (fdma_selection){0};
    if (given != NULL) {
        x->selection = *given;
        call_own_selection(x);
    }
}

static inline void call_copy(call *to, const call *from) {
    const fdma_selection *const given = selection_of(from->operation, &from->args);
    memcpy(to, from, sizeof *to);
    if (given != NULL)
        call_own_selection(to);
}

static inline fdma_tensor *call_tensor(call *x, const tensor_entry *entry) {
    void *const base = entry->in_selection ? (void *)&x->selection : (void *)&x->args;
    return (fdma_tensor *)((char *)base + entry->offset);
}

static inline bool is_output(const tensor_entry *entry) {
    return entry->role == role_output || entry->role == role_optional_output;
}

static inline bool is_optional(const tensor_entry *entry) {
    return entry->role == role_optional || entry->role == role_optional_output;
}

/* NULL if the operation has no tensor of that name. */
static inline fdma_tensor *call_tensor_named(call *x, const char *name) {
    const tensor_table table = fdma_tensors[x->operation];
    for (size_t t = 0; t < table.count; t++)
        if (strcmp(table.entries[t].name, name) == 0)
            return call_tensor(x, &table.entries[t]);
    return NULL;
}

/* Fills in the fields of the selection that fdma_select() would have set. */
static inline void call_describe_selection(call *x, int64_t window, fdma_scope scope) {
    x->selection.window = window;
    x->selection.kv_len = x->selection.expiry.shape[2];
    x->selection.scope = scope;
}

/* Gives call `to` the tensors of `from` as inputs of the same names. */
static inline void call_take_inputs(call *to, call *from) {
    const tensor_table table = fdma_tensors[to->operation];
    for (const tensor_entry *entry = table.entries; entry < table.entries + table.count; entry++) {
        const fdma_tensor *const given = call_tensor_named(from, entry->name);
        if (!is_output(entry) && given != NULL)
            *call_tensor(to, entry) = *given;
    }
    if (operations[to->operation].selection != 0 && operations[from->operation].selection != 0)
        call_describe_selection(to, from->selection.window, from->selection.scope);
}

/* Replaces the outputs by copies in memory of their own. */
static inline void call_own_outputs(call *x) {
    const tensor_table table = fdma_tensors[x->operation];
    for (const tensor_entry *entry = table.entries; entry < table.entries + table.count; entry++)
        if (is_output(entry) && call_tensor(x, entry)->rank > 0)
            *call_tensor(x, entry) = copy_tensor(*call_tensor(x, entry));
}

static inline fdma_status call_run(call *x) { return run_operation(x->operation, &x->args); }

static inline void check_same_outputs(call *actual, call *want) {
    const tensor_table table = fdma_tensors[want->operation];
    for (const tensor_entry *entry = table.entries; entry < table.entries + table.count; entry++)
        if (is_output(entry) &&
            !CHECK(same_tensor(*call_tensor(actual, entry), *call_tensor(want, entry))))
            printf("    %s\n", entry->name);
}

/* ---- calls of given sizes ---- */

typedef struct call_sizes {
    int64_t batch, q_len, kv_len, q_heads, kv_heads, head_dim;
    int64_t carried;   /* counted in kv_len too; 0: no carried keys and no tables */
    int64_t sequences; /* of a cache */
    int64_t pages;     /* of a sequence; 0: no page table */
    bool with_pairs;   /* attn_mask and attn_bias with all axes in full */
} call_sizes;

/* The length of an axis, by its letter in core/signatures.c. */
static inline int64_t size_of_axis(const call_sizes *n, char letter) {
    const int64_t sizes[] = {
        ['b'] = n->batch,
        ['i'] = n->q_len,
        ['j'] = n->kv_len,
        ['h'] = n->q_heads,
        ['g'] = n->kv_heads,
        ['d'] = n->head_dim,
        ['c'] = n->kv_heads * n->head_dim,
        ['2'] = 2,
        ['n'] = n->kv_len - n->carried,
        ['r'] = n->carried,
        ['z'] = n->carried,
        ['p'] = n->sequences,
        ['x'] = n->pages,
        ['B'] = n->batch,
        ['H'] = n->q_heads,
        ['I'] = n->q_len,
        ['J'] = n->kv_len,
        ['t'] = n->q_len,
        ['w'] = n->head_dim,
        ['v'] = n->head_dim / 2,
    };
    return sizes[(int)letter];
}

/* `dtype` is the dtype of q, k, v, out and dt_proj; the tensor `a` is always float32. */
static inline fdma_dtype dtype_of_entry(const tensor_entry *entry, fdma_dtype dtype) {
    switch (entry->dtypes) {
    case dtypes_int32:
        return FDMA_INT32;
    case dtypes_uint8:
    case dtypes_mask:
        return FDMA_UINT8;
    case dtypes_int64:
        return FDMA_INT64;
    case dtypes_wide:
    case dtypes_as_a:
        return FDMA_FLOAT32;
    default:
        return strcmp(entry->name, "a") == 0 ? FDMA_FLOAT32 : dtype;
    }
}

/* True for optional int32 lists: they hold sizes and indices, not data. */
static inline bool is_list_of_numbers(const tensor_entry *entry) {
    return is_optional(entry) && entry->rank == 1 && entry->dtypes == dtypes_int32 &&
           strstr(entry->name, ".seen") == NULL;
}

/* Gives a call tensors of these sizes without data, with all optional tensors or none, and sets
 * `size` and the pointer to the selection. Leaves out the int32 lists such as starts, because calls
 * check their contents, and mask_lists, because its size depends on the device. Does not change
 * options. The caller must still call call_describe_selection(). */
static inline void call_make(call *x, const call_sizes *n, fdma_dtype dtype, bool with_optional) {
    const tensor_table table = fdma_tensors[x->operation];
    x->args.size = operations[x->operation].args_size;
    x->selection.size = sizeof x->selection;
    call_own_selection(x);
    for (const tensor_entry *entry = table.entries; entry < table.entries + table.count; entry++) {
        const int32_t rank = (int32_t)strlen(entry->dims);
        int64_t shape[4] = {0};
        if (is_list_of_numbers(entry) || (n->pages == 0 && strchr(entry->dims, 'x') != NULL) ||
            (n->carried == 0 && strpbrk(entry->dims, "rz") != NULL) ||
            (n->carried == 0 && strstr(entry->name, ".seen") != NULL) ||
            (!n->with_pairs && may_broadcast(entry->dims[0])) || entry->dims[0] == 'y')
            continue;
        for (int axis = 0; axis < rank; axis++)
            shape[axis] = size_of_axis(n, entry->dims[axis]);
        if (with_optional || !is_optional(entry))
            *call_tensor(x, entry) =
                fdma_dense_tensor(NULL, dtype_of_entry(entry, dtype), rank, shape);
    }
}

static inline void call_drop_selection(call *x) {
    const size_t offset = operations[x->operation].selection;
    x->selection = (fdma_selection){0};
    if (offset != 0)
        memset((char *)&x->args + offset, 0, sizeof(fdma_selection *));
}

/* A selection without contents, full of guard bytes. */
static inline fdma_selection new_selection(int64_t batch, int64_t kv_heads, int64_t kv_len) {
    return (fdma_selection){.size = sizeof(fdma_selection),
                            .expiry = new_output(FDMA_INT32, batch, kv_heads, kv_len, -1),
                            .slot = new_output(FDMA_INT32, batch, kv_heads, kv_len, -1)};
}

static inline fdma_selection selection_for(fdma_tensor score) {
    return new_selection(score.shape[0], score.shape[1], score.shape[2]);
}

static inline void check_same_selection(const fdma_selection *actual, const fdma_selection *want) {
    CHECK(same_tensor(actual->expiry, want->expiry));
    CHECK(same_tensor(actual->slot, want->slot));
}

/* Selects by random scores with the reference; all kernels select alike. */
static inline void call_select(call *x, int64_t window, fdma_scope scope, uint64_t *state) {
    const int64_t *const n = x->selection.expiry.shape;
    const fdma_tensor score = new_tensor(FDMA_FLOAT32, n[0], n[1], n[2], -1);
    fdma_select_args args = {.size = sizeof args,
                             .score = score,
                             .selection = &x->selection,
                             .window = window,
                             .scope = scope,
                             .exec = {.kernel = "reference"}};
    fill_random(score, state, 1);
    CHECK_OK(run_select(&args));
}

/* Allocates every tensor. Inputs hold random numbers in [-1, 1), and key_valid holds ones. Outputs
 * are full of guard bytes and lie between more of them. A selection that is an input holds no valid
 * contents yet: see call_select(). */
static inline void call_alloc(call *x, uint64_t *state) {
    const tensor_table table = fdma_tensors[x->operation];
    for (const tensor_entry *entry = table.entries; entry < table.entries + table.count; entry++) {
        fdma_tensor *const tensor = call_tensor(x, entry);
        const size_t bytes = bytes_of(*tensor);
        if (tensor->rank == 0)
            continue;
        const bool is_float = tensor->dtype <= FDMA_FLOAT64;
        tensor->data =
            is_float && !is_output(entry) ? test_alloc(bytes) : test_alloc_guarded(bytes);
        if (is_output(entry))
            memset(tensor->data, test_guard_byte, bytes);
        else if (is_float)
            fill_random(*tensor, state, 1);
        else
            memset(tensor->data, 1, bytes);
    }
}

/* ---- kernels ---- */

typedef struct kernel_list {
    const char *name[kernel_limit];
    int count;
} kernel_list;

static inline void set_call_device(fdma_operation operation, void *args, int32_t device) {
    exec_of(operation, args)->device = device;
    if (operation == operation_decode)
        ((fdma_decode_args *)args)->cache.device = device;
    if (operation == operation_cache_store)
        ((fdma_cache_store_args *)args)->cache.device = device;
    if (operation == operation_cache_copy)
        ((fdma_cache_copy_args *)args)->cache.device = device;
    if (operation == operation_prefill)
        ((fdma_prefill_args *)args)->cache.device = device;
}

/* True if a kernel takes the call. A CPU kernel must take every call. */
static inline bool call_takes(fdma_operation operation, void *args) {
    size_t bytes;
    const bool on_device = is_device_kernel(exec_of(operation, args)->kernel);
    set_call_device(operation, args, on_device);
    const fdma_status status = operations[operation].workspace(args, &bytes);
    set_call_device(operation, args, 0);
    CHECK(status == FDMA_OK || (status == FDMA_UNSUPPORTED && on_device));
    return status == FDMA_OK;
}

/* True if a kernel that runs here takes tensors of this dtype, for more rows than decode takes.
 * Only forward, backward and merge are asked: decode takes the dtypes of the forward kernel of the
 * same name, and the other operations take every dtype. */
static inline bool operation_takes(const char *operation, const char *kernel, fdma_dtype dtype) {
    static const fdma_operation asked[] = {operation_forward, operation_backward, operation_merge};
    static const call_sizes n = {
        .batch = 1, .q_len = 32, .kv_len = 32, .q_heads = 1, .kv_heads = 1, .head_dim = 8};
    const char *const like = strcmp(operation, "decode") == 0 ? "forward" : operation;
    for (int i = 0; i < TEST_COUNT(asked); i++) {
        call x = {.operation = asked[i]};
        size_t bytes;
        if (strcmp(operations[asked[i]].name, like) != 0)
            continue;
        call_make(&x, &n, dtype, false);
        call_describe_selection(&x, 4, FDMA_SCOPE_GLOBAL);
        call_exec(&x)->kernel = kernel;
        const fdma_status status = operations[asked[i]].workspace(&x.args, &bytes);
        CHECK(status == FDMA_OK || status == FDMA_UNSUPPORTED);
        return status == FDMA_OK;
    }
    return true;
}

/* The kernel of the definitions: slow, and in double precision for every dtype. */
static inline bool is_reference(const char *kernel) { return strcmp(kernel, "reference") == 0; }

/* The name by which tests force a kernel. A decode kernel takes few rows only, so it is forced by
 * the name of its point, such as cpu/avx2; the tile kernel of that point takes all other calls. */
static inline const char *forced_name(const char *name) {
    static char points[kernel_limit][32];
    const char *const end = strstr(name, "/decode");
    const size_t length = end != NULL ? (size_t)(end - name) : 0;
    int n = 0;
    if (end == NULL || is_device_kernel(name))
        return name;
    while (points[n][0] != 0 && (strncmp(points[n], name, length) != 0 || points[n][length] != 0))
        n++;
    memcpy(points[n], name, length);
    return points[n];
}

/* Keeps the kernels whose names begin with an entry of FDMA_TEST_KERNELS, if the operation has one.
 * tools/gates/run.sh sets it where another build has already tested the others. */
static inline kernel_list narrowed(const kernel_list *all) {
    const char *const beginning = getenv("FDMA_TEST_KERNELS");
    kernel_list named = {.count = 0};
    for (int i = 0; i < all->count && beginning != NULL; i++)
        if (strncmp(all->name[i], beginning, strlen(beginning)) == 0)
            named.name[named.count++] = all->name[i];
    return named.count > 0 ? named : *all;
}

/* True if a kernel takes few calls, or only the selection step of a fused call: see test_cuda_top.c
 * and test_cuda_short.c. */
static inline bool takes_few_calls(const char *name) {
    return strcmp(name, "cuda/sm90/top") == 0 || strcmp(name, "cuda/sm80/short") == 0 ||
           strcmp(name, "cuda/sm80/keep_all") == 0;
}

/* The kernels of an operation that tests run with a dtype: CPU kernels of this machine, or device
 * kernels if the device is tested. A device kernel may still refuse a call: see call_takes(). */
static inline kernel_list kernels_for(const char *operation, fdma_dtype dtype) {
    static bool said[256];
    const bool on_device = test_backend.run != NULL;
    kernel_list list = {.count = 0};
    for (int32_t i = 0; i < fdma_kernel_count() && list.count < kernel_limit; i++) {
        fdma_kernel_info info = {.size = sizeof info};
        CHECK_INT(fdma_describe_kernel(i, &info), FDMA_OK);
        if (strcmp(info.operation, operation) != 0 || is_device_kernel(info.name) != on_device ||
            strcmp(info.name, "reference/float32") == 0 || // source of the tolerances
            takes_few_calls(info.name))
            continue;
        if (info.missing != NULL && !said[i % TEST_COUNT(said)])
            printf("skipped %s %s: this machine lacks %s\n", info.name, operation, info.missing);
        said[i % TEST_COUNT(said)] = info.missing != NULL;
        if (info.missing != NULL)
            continue;
        if (on_device || operation_takes(operation, forced_name(info.name), dtype))
            list.name[list.count++] = forced_name(info.name);
    }
    CHECK(list.count > 0);
    return narrowed(&list);
}

static inline kernel_list kernels_of(const char *operation) {
    return kernels_for(operation, FDMA_FLOAT32);
}

/* The dtypes of tensors under test; on a device, from first_dtype() on. */
static const fdma_dtype test_dtypes[] = {FDMA_FLOAT32, FDMA_FLOAT16, FDMA_BFLOAT16};
enum { test_dtype_count = 3 };

static inline int first_dtype(void) { return test_backend.run != NULL; }

/* With a divided number of cases, case n is tested in one of the dtypes. */
static inline bool is_left_out(int n, int type) {
    return test_divisor() > 1 && (n + type) % (test_dtype_count - first_dtype()) != 0;
}

static inline fdma_dtype backend_dtype(void) { return test_dtypes[first_dtype()]; }

static inline void for_each_kernel(const char *operation,
                                   void (*run)(const char *kernel, fdma_dtype dtype)) {
    for (int type = first_dtype(); type < test_dtype_count; type++) {
        const kernel_list kernels = kernels_for(operation, test_dtypes[type]);
        for (int i = 0; i < kernels.count; i++) {
            test_context("%s %s %s", kernels.name[i], operation, dtype_name(test_dtypes[type]));
            run(kernels.name[i], test_dtypes[type]);
            test_free_all();
        }
    }
}

static inline void test_each_kernel(const test_entry *test) {
    for_each_kernel(test->operation, test->each_kernel);
}

static inline void test_each_kernel_once(const test_entry *test) {
    const kernel_list kernels = kernels_for(test->operation, backend_dtype());
    for (int i = 0; i < kernels.count; i++) {
        test_context("%s %s", kernels.name[i], test->operation);
        test->each_kernel_once(kernels.name[i]);
        test_free_all();
    }
}

/* Entries of a table of tests: a property that is checked with every kernel of an operation, in
 * every dtype or in one. */
#define EACH_KERNEL(of, property)                                                                  \
    {.name = #property, .run_each = test_each_kernel, .operation = of, .each_kernel = property}
#define EACH_KERNEL_ONCE(of, property)                                                             \
    {.name = #property,                                                                            \
     .run_each = test_each_kernel_once,                                                            \
     .operation = of,                                                                              \
     .each_kernel_once = property}
