/* The entry points. Each checks its arguments, and chooses and runs a kernel for each step. */
#include "fdma.h"

#include "core/adapter.h"
#include "core/cache.h"
#include "core/checks.h"
#include "core/error.h"
#include "core/operations.h"
#include "core/prefill.h"
#include "core/steps.h"
#include "cpu/cpu.h"
#include "cpu/parallel.h"
#include "cuda/cuda.h"
#include "reference/reference.h"

#include <string.h>

/* In order of preference. */
static const kernel_backend *const backends[] = {&fdma_cuda_backend, &fdma_cpu_backend,
                                                 &fdma_reference_backend, NULL};

typedef struct prepared_call {
    call_steps steps; /* of fdma_prefill(): of one of its parts */
    adapted_kernel kernels[most_steps];
    const char *names[operation_attention]; /* of the first kernel chosen for each operation */
    size_t workspace;                       /* bytes that the call needs */
} prepared_call;

static const kernel_backend *backend_of(const fdma_problem *problem) {
    return problem->exec.device != FDMA_CPU ? &fdma_cuda_backend : &fdma_cpu_backend;
}

static fdma_status check_on_device(const fdma_problem *problem, check_depth depth) {
    FDMA_TRY(fdma_check_cuda(problem, depth));
    return is_present(&problem->mask_lists) ? fdma_cuda_check_mask_lists(problem) : FDMA_OK;
}

/* Chooses a kernel for each step, and raises the workspace of the call to what they need. */
static fdma_status choose_kernels(check_depth depth, prepared_call *call) {
    for (int i = 0; i < call->steps.count; i++) {
        const fdma_problem *const step = &call->steps.problems[i];
        adapted_kernel *const chosen = &call->kernels[i];
        chosen->adapters = backend_of(step)->adapters;
        FDMA_TRY(fdma_choose_kernel(backends, step, &chosen->kernel));
        if (step->operation == operation_select)
            fdma_link_select(chosen->kernel, &call->steps);
        if (call->names[step->operation] == NULL)
            call->names[step->operation] = chosen->kernel->name;
        const size_t bytes = call->steps.scratch + fdma_adapted_workspace(chosen, step, depth);
        call->workspace = bytes > call->workspace ? bytes : call->workspace;
    }
    return FDMA_OK;
}

/* The steps of a part of fdma_prefill(). With check_shapes their workspace also serves shorter
 * parts. */
static fdma_status prepare_part(const prefill_part *part, check_depth depth, prepared_call *call) {
    FDMA_TRY(fdma_split_part(part, &call->steps));
    for (int i = 0; i < call->steps.count; i++)
        call->steps.problems[i].any_len = depth == check_shapes;
    return choose_kernels(depth, call);
}

static fdma_status prepare_prefill(check_depth depth, prepared_call *call) {
    const fdma_problem *const whole = &call->steps.whole;
    prefill_part part = {0};
    fdma_begin_prefill(&call->steps);
    call->workspace = call->steps.scratch;
    FDMA_TRY(fdma_split_scores(&call->steps));
    FDMA_TRY(choose_kernels(depth, call));
    for (int n = 0;
         depth == check_all ? fdma_next_part(whole, &part) : fdma_largest_part(whole, n, &part);
         n++)
        FDMA_TRY(prepare_part(&part, depth, call));
    return FDMA_OK;
}

static fdma_status prepare(fdma_operation operation, const void *args, check_depth depth,
                           prepared_call *call) {
    fdma_problem *const whole = &call->steps.whole;
    memset(call->names, 0, sizeof call->names);
    call->workspace = 0;
    FDMA_TRY(fdma_check_call(operation, args, depth, whole));
    if (whole->exec.device != FDMA_CPU)
        FDMA_TRY(check_on_device(whole, depth));
    if (operation == operation_prefill)
        return prepare_prefill(depth, call);
    FDMA_TRY(fdma_split_call(backend_of(whole), &call->steps));
    return choose_kernels(depth, call);
}

static fdma_status run_steps(const prepared_call *call) {
    for (int i = 0; i < call->steps.count; i++)
        if (fdma_has_work(&call->steps.problems[i]))
            FDMA_TRY(fdma_run_adapted(&call->kernels[i], &call->steps.problems[i]));
    return FDMA_OK;
}

static fdma_status run_part(const prepared_call *call) {
    for (int i = 0; i < call->steps.count; i++) {
        if (call->steps.problems[i].operation == operation_forward)
            fdma_hide_missing_pages(&call->steps);
        FDMA_TRY(fdma_run_adapted(&call->kernels[i], &call->steps.problems[i]));
    }
    return FDMA_OK;
}

/* Scores that are not given have a bias already. */
static fdma_status fill_prompt_bias(const fdma_problem *whole) {
    if (!whole->prefill.is_scored || is_empty(&whole->bias) || !is_present(&whole->bias))
        return FDMA_OK;
    if (whole->exec.device != FDMA_CPU)
        return fdma_cuda_fill_prompt_bias(whole);
    fdma_fill_prompt_bias(whole);
    return FDMA_OK;
}

/* Every part has been prepared once before, so that nothing is written if one is refused. */
static fdma_status run_prefill(prepared_call *call) {
    const fdma_problem *const whole = &call->steps.whole;
    prefill_part part = {0};
    FDMA_TRY(fdma_split_scores(&call->steps));
    FDMA_TRY(choose_kernels(check_all, call));
    FDMA_TRY(run_steps(call));
    FDMA_TRY(fill_prompt_bias(whole));
    if (whole->exec.device != FDMA_CPU)
        FDMA_TRY(fdma_cuda_list_requests(whole));
    while (fdma_next_part(whole, &part)) {
        FDMA_TRY(prepare_part(&part, check_all, call));
        FDMA_TRY(run_part(call));
    }
    return FDMA_OK;
}

static fdma_status run_all(prepared_call *call) {
    return call->steps.whole.operation == operation_prefill ? run_prefill(call) : run_steps(call);
}

static fdma_status run_prepared(prepared_call *call) {
    const fdma_exec *const exec = &call->steps.whole.exec;
    int before;
    if (exec->device == FDMA_CPU)
        return run_all(call);
    const int cancellation = fdma_defer_cancellation(); // the driver may hold locks and wait
    fdma_status status = fdma_enter_cuda(exec, &before);
    if (status == FDMA_OK) {
        status = run_all(call);
        fdma_leave_cuda(exec, before);
    }
    fdma_allow_cancellation(cancellation);
    return status;
}

/* Records in the caller's selection the rules and the kv_len it was made for. The last step of a
 * fused call counts carried keys, the first does not. */
static void note_selection(const fdma_problem *last) {
    if (last->made == NULL)
        return;
    last->made->window = last->window;
    last->made->recent = last->recent;
    last->made->sinks = last->sinks;
    last->made->kv_len = last->kv_len;
    last->made->scope = last->scope;
    if (has_gap_field(last->made))
        last->made->gap = last->gap;
}

static int32_t most_threads_of(const prepared_call *call) {
    return fdma_thread_count(call->steps.whole.exec.threads, INT64_MAX);
}

/* True if a step would need another workspace size on one thread. */
static bool depends_on_threads(const prepared_call *call) {
    for (int i = 0; i < call->steps.count; i++) {
        fdma_problem alone = call->steps.problems[i];
        alone.exec.threads = 1;
        if (fdma_adapted_workspace(&call->kernels[i], &alone, check_all) !=
            fdma_adapted_workspace(&call->kernels[i], &call->steps.problems[i], check_all))
            return true;
    }
    return false;
}

static fdma_status prepare_run(fdma_operation operation, const void *args, prepared_call *call) {
    FDMA_TRY(prepare(operation, args, check_all, call));
    FDMA_REQUIRE(call->steps.lent >= call->workspace || !depends_on_threads(call),
                 FDMA_WORKSPACE_TOO_SMALL,
                 "exec.workspace_size: is %s, want %zu or more with %d threads",
                 fdma_count_text((int64_t)call->steps.lent, "byte").text, call->workspace,
                 most_threads_of(call));
    FDMA_REQUIRE(call->steps.lent >= call->workspace, FDMA_WORKSPACE_TOO_SMALL,
                 "exec.workspace_size: is %s, want %zu or more",
                 fdma_count_text((int64_t)call->steps.lent, "byte").text, call->workspace);
    return fdma_check_slots(&call->steps.whole);
}

static fdma_status run(fdma_operation operation, const void *args) {
    prepared_call call;
    FDMA_TRY(prepare_run(operation, args, &call));
    FDMA_TRY(run_prepared(&call));
    if (operation != operation_prefill) // whose selections are its own
        note_selection(&call.steps.problems[call.steps.count - 1]);
    return FDMA_OK;
}

static fdma_status ask_workspace(fdma_operation operation, const void *args, size_t *bytes) {
    prepared_call call;
    FDMA_REQUIRE(bytes != NULL, FDMA_INVALID_ARGUMENT,
                 "bytes: is NULL, want the address of a size_t");
    FDMA_TRY(prepare(operation, args, check_shapes, &call));
    *bytes = call.workspace;
    return FDMA_OK;
}

/* Names of the kernels of a call's steps, indexed by operation. */
static fdma_status ask_kernels(fdma_operation operation, const void *args, const char **names) {
    prepared_call call;
    FDMA_TRY(prepare(operation, args, check_shapes, &call));
    memcpy(names, call.names, sizeof call.names);
    return FDMA_OK;
}

static fdma_status ask_kernel(fdma_operation operation, const void *args, const char **name) {
    const char *names[operation_attention];
    FDMA_REQUIRE(name != NULL, FDMA_INVALID_ARGUMENT,
                 "name: is NULL, want the address of a const char *");
    FDMA_TRY(ask_kernels(operation, args, names));
    *name = names[operation];
    return FDMA_OK;
}

static fdma_status require_mask(const fdma_problem *problem) {
    FDMA_REQUIRE(is_present(&problem->attn_mask), FDMA_INVALID_ARGUMENT,
                 "attn_mask: is absent, want it for mask_lists");
    return FDMA_OK;
}

/* The lists are an input of forward, but the output of fdma_mask_lists(). */
static fdma_status check_lists_apart(const fdma_problem *problem) {
    const named_tensor tensors[] = {
        {"attn_mask", &problem->attn_mask, false},  {"key_valid", &problem->key_valid, false},
        {"starts", &problem->starts, false},        {"kv_used", &problem->kv_used, false},
        {"expiry", &problem->expiry, false},        {"slot", &problem->slot, false},
        {"mask_lists", &problem->mask_lists, true},
    };
    return fdma_check_overlaps(tensors, sizeof tensors / sizeof tensors[0], &problem->exec);
}

fdma_status fdma_score(const fdma_score_args *args) { return run(operation_score, args); }

fdma_status fdma_score_workspace(const fdma_score_args *args, size_t *bytes) {
    return ask_workspace(operation_score, args, bytes);
}

fdma_status fdma_score_kernel(const fdma_score_args *args, const char **name) {
    return ask_kernel(operation_score, args, name);
}

fdma_status fdma_select(const fdma_select_args *args) { return run(operation_select, args); }

fdma_status fdma_select_workspace(const fdma_select_args *args, size_t *bytes) {
    return ask_workspace(operation_select, args, bytes);
}

fdma_status fdma_select_kernel(const fdma_select_args *args, const char **name) {
    return ask_kernel(operation_select, args, name);
}

fdma_status fdma_forward(const fdma_forward_args *args) { return run(operation_forward, args); }

fdma_status fdma_forward_workspace(const fdma_forward_args *args, size_t *bytes) {
    return ask_workspace(operation_forward, args, bytes);
}

fdma_status fdma_forward_kernel(const fdma_forward_args *args, const char **name) {
    return ask_kernel(operation_forward, args, name);
}

fdma_status fdma_mask_lists_size(const fdma_forward_args *args, size_t *bytes) {
    prepared_call call;
    FDMA_REQUIRE(bytes != NULL, FDMA_INVALID_ARGUMENT,
                 "bytes: is NULL, want the address of a size_t");
    FDMA_TRY(prepare(operation_forward, args, check_shapes, &call));
    const fdma_problem *const problem = &call.steps.whole;
    FDMA_TRY(require_mask(problem));
    *bytes = problem->exec.device == FDMA_CPU ? 0 : fdma_cuda_mask_lists_size(problem);
    return FDMA_OK;
}

fdma_status fdma_mask_lists(const fdma_forward_args *args) {
    prepared_call call;
    FDMA_TRY(prepare_run(operation_forward, args, &call));
    fdma_problem *const problem = &call.steps.whole;
    FDMA_TRY(require_mask(problem));
    if (problem->exec.device == FDMA_CPU) // whose kernels need no lists
        return FDMA_OK;
    FDMA_TRY(fdma_cuda_check_mask_lists(problem)); // they may be absent
    FDMA_TRY(check_lists_apart(problem));
    problem->only_mask_lists = true;
    return run_prepared(&call);
}

fdma_status fdma_probabilities(const fdma_probabilities_args *args) {
    return run(operation_probabilities, args);
}

fdma_status fdma_probabilities_workspace(const fdma_probabilities_args *args, size_t *bytes) {
    return ask_workspace(operation_probabilities, args, bytes);
}

fdma_status fdma_probabilities_kernel(const fdma_probabilities_args *args, const char **name) {
    return ask_kernel(operation_probabilities, args, name);
}

fdma_status fdma_backward(const fdma_backward_args *args) { return run(operation_backward, args); }

fdma_status fdma_backward_workspace(const fdma_backward_args *args, size_t *bytes) {
    return ask_workspace(operation_backward, args, bytes);
}

fdma_status fdma_backward_kernel(const fdma_backward_args *args, const char **name) {
    return ask_kernel(operation_backward, args, name);
}

fdma_status fdma_score_backward(const fdma_score_backward_args *args) {
    return run(operation_score_backward, args);
}

fdma_status fdma_score_backward_workspace(const fdma_score_backward_args *args, size_t *bytes) {
    return ask_workspace(operation_score_backward, args, bytes);
}

fdma_status fdma_score_backward_kernel(const fdma_score_backward_args *args, const char **name) {
    return ask_kernel(operation_score_backward, args, name);
}

fdma_status fdma_merge(const fdma_merge_args *args) { return run(operation_merge, args); }

fdma_status fdma_merge_workspace(const fdma_merge_args *args, size_t *bytes) {
    return ask_workspace(operation_merge, args, bytes);
}

fdma_status fdma_merge_kernel(const fdma_merge_args *args, const char **name) {
    return ask_kernel(operation_merge, args, name);
}

fdma_status fdma_merge_backward(const fdma_merge_backward_args *args) {
    return run(operation_merge_backward, args);
}

fdma_status fdma_merge_backward_workspace(const fdma_merge_backward_args *args, size_t *bytes) {
    return ask_workspace(operation_merge_backward, args, bytes);
}

fdma_status fdma_merge_backward_kernel(const fdma_merge_backward_args *args, const char **name) {
    return ask_kernel(operation_merge_backward, args, name);
}

fdma_status fdma_rotary_table(const fdma_rotary_table_args *args) {
    return run(operation_rotary_table, args);
}

fdma_status fdma_rotary_table_workspace(const fdma_rotary_table_args *args, size_t *bytes) {
    return ask_workspace(operation_rotary_table, args, bytes);
}

fdma_status fdma_rotary_table_kernel(const fdma_rotary_table_args *args, const char **name) {
    return ask_kernel(operation_rotary_table, args, name);
}

fdma_status fdma_rotate(const fdma_rotate_args *args) { return run(operation_rotate, args); }

fdma_status fdma_rotate_workspace(const fdma_rotate_args *args, size_t *bytes) {
    return ask_workspace(operation_rotate, args, bytes);
}

fdma_status fdma_rotate_kernel(const fdma_rotate_args *args, const char **name) {
    return ask_kernel(operation_rotate, args, name);
}

fdma_status fdma_rotate_backward(const fdma_rotate_backward_args *args) {
    return run(operation_rotate_backward, args);
}

fdma_status fdma_rotate_backward_workspace(const fdma_rotate_backward_args *args, size_t *bytes) {
    return ask_workspace(operation_rotate_backward, args, bytes);
}

fdma_status fdma_rotate_backward_kernel(const fdma_rotate_backward_args *args, const char **name) {
    return ask_kernel(operation_rotate_backward, args, name);
}

fdma_status fdma_attention(const fdma_attention_args *args) {
    return run(operation_attention, args);
}

fdma_status fdma_attention_workspace(const fdma_attention_args *args, size_t *bytes) {
    return ask_workspace(operation_attention, args, bytes);
}

static fdma_status fill_bytes(int32_t device, void *data, int byte, size_t bytes) {
    if (device == FDMA_CPU) {
        memset(data, byte, bytes);
        return FDMA_OK;
    }
    const int cancellation = fdma_defer_cancellation();
    const fdma_status status = fdma_fill_cuda(device, data, byte, bytes);
    fdma_allow_cancellation(cancellation);
    return status;
}

fdma_status fdma_cache_init(fdma_cache *cache, void *memory) {
    FDMA_TRY(fdma_take_cache_memory(cache, memory));
    return fdma_empty_cache(cache, fill_bytes);
}

fdma_status fdma_cache_drop(const fdma_cache *cache, int64_t sequence) {
    return fdma_empty_sequence(cache, sequence, fill_bytes);
}

fdma_status fdma_cache_store(const fdma_cache_store_args *args) {
    return run(operation_cache_store, args);
}

fdma_status fdma_cache_store_workspace(const fdma_cache_store_args *args, size_t *bytes) {
    return ask_workspace(operation_cache_store, args, bytes);
}

fdma_status fdma_cache_store_kernel(const fdma_cache_store_args *args, const char **name) {
    return ask_kernel(operation_cache_store, args, name);
}

fdma_status fdma_cache_copy(const fdma_cache_copy_args *args) {
    return run(operation_cache_copy, args);
}

fdma_status fdma_cache_copy_workspace(const fdma_cache_copy_args *args, size_t *bytes) {
    return ask_workspace(operation_cache_copy, args, bytes);
}

fdma_status fdma_cache_copy_kernel(const fdma_cache_copy_args *args, const char **name) {
    return ask_kernel(operation_cache_copy, args, name);
}

fdma_status fdma_decode(const fdma_decode_args *args) { return run(operation_decode, args); }

fdma_status fdma_decode_workspace(const fdma_decode_args *args, size_t *bytes) {
    return ask_workspace(operation_decode, args, bytes);
}

fdma_status fdma_decode_kernel(const fdma_decode_args *args, const char **name) {
    return ask_kernel(operation_decode, args, name);
}

fdma_status fdma_prefill(const fdma_prefill_args *args) { return run(operation_prefill, args); }

fdma_status fdma_prefill_workspace(const fdma_prefill_args *args, size_t *bytes) {
    return ask_workspace(operation_prefill, args, bytes);
}

fdma_status fdma_attention_backward(const fdma_attention_backward_args *args) {
    return run(operation_attention_backward, args);
}

fdma_status fdma_attention_backward_workspace(const fdma_attention_backward_args *args,
                                              size_t *bytes) {
    return ask_workspace(operation_attention_backward, args, bytes);
}

/* A struct that a function fills in begins with its size, which the caller has set. */
static fdma_status check_filled(const char *name, const void *filled, size_t known) {
    size_t size;
    FDMA_REQUIRE(filled != NULL, FDMA_INVALID_ARGUMENT, "%s: is NULL, want a struct", name);
    memcpy(&size, filled, sizeof size);
    FDMA_REQUIRE(size >= known, FDMA_INVALID_ARGUMENT,
                 "%s: size is %zu, want sizeof the struct, %zu", name, size, known);
    return FDMA_OK;
}

fdma_status fdma_attention_kernel(const fdma_attention_args *args, fdma_attention_kernels *names) {
    const char *found[operation_attention] = {NULL};
    FDMA_TRY(check_filled("fdma_attention_kernels", names, sizeof *names));
    FDMA_TRY(ask_kernels(operation_attention, args, found));
    names->score = found[operation_score];
    names->select = found[operation_select];
    names->forward = found[operation_forward];
    return FDMA_OK;
}

fdma_status fdma_prefill_kernel(const fdma_prefill_args *args, fdma_prefill_kernels *names) {
    const char *found[operation_attention] = {NULL};
    FDMA_TRY(check_filled("fdma_prefill_kernels", names, sizeof *names));
    FDMA_TRY(ask_kernels(operation_prefill, args, found));
    names->score = found[operation_score];
    names->decode = found[operation_decode];
    names->select = found[operation_select];
    names->forward = found[operation_forward];
    names->cache_store = found[operation_cache_store];
    return FDMA_OK;
}

fdma_status fdma_attention_backward_kernel(const fdma_attention_backward_args *args,
                                           fdma_attention_backward_kernels *names) {
    const char *found[operation_attention] = {NULL};
    FDMA_TRY(check_filled("fdma_attention_backward_kernels", names, sizeof *names));
    FDMA_TRY(ask_kernels(operation_attention_backward, args, found));
    names->score = found[operation_score];
    names->backward = found[operation_backward];
    names->score_backward = found[operation_score_backward];
    return FDMA_OK;
}

int32_t fdma_kernel_count(void) {
    int32_t count = 0;
    while (fdma_kernel_at(backends, count) != NULL)
        count++;
    return count;
}

const char *fdma_kernel_name(int32_t index) {
    const fdma_kernel *const kernel = fdma_kernel_at(backends, index);
    return kernel != NULL ? kernel->name : NULL;
}

fdma_status fdma_describe_kernel(int32_t index, fdma_kernel_info *info) {
    const fdma_kernel *const kernel = fdma_kernel_at(backends, index);
    FDMA_TRY(check_filled("fdma_kernel_info", info, sizeof *info));
    FDMA_REQUIRE(kernel != NULL, FDMA_INVALID_ARGUMENT, "index: is %d, want 0 to %d", index,
                 fdma_kernel_count() - 1);
    info->name = kernel->name;
    info->operation = fdma_operation_name(kernel->operation);
    info->missing = kernel->missing();
    return FDMA_OK;
}

int32_t fdma_device_count(void) { return 1 + fdma_cuda_count(); }

fdma_status fdma_describe_device(int32_t device, fdma_device_info *info) {
    FDMA_TRY(check_filled("fdma_device_info", info, sizeof *info));
    const int32_t last = fdma_device_count() - 1;
    FDMA_REQUIRE(device >= 0, FDMA_INVALID_ARGUMENT, "device: is %d, want FDMA_CPU or FDMA_CUDA(n)",
                 device);
    FDMA_REQUIRE(device <= last, FDMA_INVALID_ARGUMENT,
                 "device: is %s, want at most %s, the last here", fdma_device_text(device).text,
                 fdma_device_text(last).text);
    return device == FDMA_CPU ? fdma_describe_cpu(info) : fdma_describe_cuda(device, info);
}
