/* The entry points: each checks its arguments, chooses a kernel and runs it. */
#include "fdma.h"

#include "core/attention.h"
#include "core/error.h"
#include "core/kernel.h"
#include "core/problem.h"
#include "cpu/cpu.h"
#include "cuda/cuda.h"
#include "reference/reference.h"

#include <string.h>

#define TEXT_OF(number) #number
#define VERSION_OF(major, minor, patch) TEXT_OF(major) "." TEXT_OF(minor) "." TEXT_OF(patch)

/* In the order of preference. */
static const kernel_backend backends[] = {fdma_cuda_tables, fdma_cpu_tables, fdma_reference_tables,
                                          NULL};

const char *fdma_version(void) {
    return VERSION_OF(FDMA_VERSION_MAJOR, FDMA_VERSION_MINOR, FDMA_VERSION_PATCH);
}

static fdma_status workspace_of(const fdma_problem *problem, size_t *bytes) {
    const fdma_kernel *kernel;
    FDMA_REQUIRE(bytes != NULL, FDMA_INVALID_ARGUMENT, "bytes: is NULL");
    FDMA_TRY(fdma_choose_kernel(backends, problem, &kernel));
    *bytes = kernel->workspace(problem);
    return FDMA_OK;
}

static fdma_status check_workspace(size_t given, size_t wanted) {
    FDMA_REQUIRE(given >= wanted, FDMA_WORKSPACE_TOO_SMALL,
                 "exec.workspace_size: is %zu bytes, want %zu", given, wanted);
    return FDMA_OK;
}

/* False where all outputs are empty, so that kernels need not test for that. */
static bool has_work(const fdma_problem *problem) {
    const bool any_query = problem->batch > 0 && problem->q_len > 0;
    const bool any_key = problem->batch > 0 && problem->kv_len > 0;
    switch (problem->operation) {
    case operation_score:
        return any_key && (is_present(&problem->score) || is_present(&problem->bias));
    case operation_select:
        return any_key;
    case operation_backward: // without queries, the gradients of keys are 0
        return any_query || any_key;
    case operation_score_backward: // without keys, those of the weights are 0
        return true;
    case operation_merge:
    case operation_merge_backward:
        return any_query && problem->q_heads > 0;
    default:
        return any_query;
    }
}

static fdma_status run(const fdma_problem *problem) {
    const fdma_kernel *kernel;
    FDMA_TRY(fdma_choose_kernel(backends, problem, &kernel));
    FDMA_TRY(check_workspace(problem->exec.workspace_size, kernel->workspace(problem)));
    if (!has_work(problem))
        return FDMA_OK;
    return kernel->on_device ? fdma_run_cuda(kernel, problem) : kernel->run(problem);
}

static fdma_status prepare(problem_check *check, const void *args, check_depth depth,
                           fdma_problem *problem) {
    FDMA_TRY(check(args, depth, problem));
    return problem->exec.device != FDMA_CPU ? fdma_check_cuda(problem, depth) : FDMA_OK;
}

static fdma_status call(problem_check *check, const void *args) {
    fdma_problem problem;
    FDMA_TRY(prepare(check, args, check_all, &problem));
    return run(&problem);
}

static fdma_status ask_workspace(problem_check *check, const void *args, size_t *bytes) {
    fdma_problem problem;
    FDMA_TRY(prepare(check, args, check_shapes, &problem));
    return workspace_of(&problem, bytes);
}

static fdma_status kernel_of(const fdma_problem *problem, const char **name) {
    const fdma_kernel *kernel;
    FDMA_TRY(fdma_choose_kernel(backends, problem, &kernel));
    *name = kernel->name;
    return FDMA_OK;
}

static fdma_status ask_kernel(problem_check *check, const void *args, const char **name) {
    fdma_problem problem;
    FDMA_TRY(prepare(check, args, check_shapes, &problem));
    FDMA_REQUIRE(name != NULL, FDMA_INVALID_ARGUMENT, "name: is NULL");
    return kernel_of(&problem, name);
}

fdma_status fdma_score(const fdma_score_args *args) { return call(fdma_check_score, args); }

fdma_status fdma_score_workspace(const fdma_score_args *args, size_t *bytes) {
    return ask_workspace(fdma_check_score, args, bytes);
}

fdma_status fdma_score_kernel(const fdma_score_args *args, const char **name) {
    return ask_kernel(fdma_check_score, args, name);
}

static void record_selection(fdma_selection *selection, const fdma_problem *problem) {
    selection->window = problem->window;
    selection->kv_len = problem->kv_len;
    selection->scope = problem->scope;
}

fdma_status fdma_select(const fdma_select_args *args) {
    fdma_problem problem;
    FDMA_TRY(prepare(fdma_check_select, args, check_all, &problem));
    FDMA_TRY(run(&problem));
    record_selection(args->selection, &problem);
    return FDMA_OK;
}

fdma_status fdma_select_workspace(const fdma_select_args *args, size_t *bytes) {
    return ask_workspace(fdma_check_select, args, bytes);
}

fdma_status fdma_select_kernel(const fdma_select_args *args, const char **name) {
    return ask_kernel(fdma_check_select, args, name);
}

fdma_status fdma_lists(const fdma_lists_args *args) { return call(fdma_check_lists, args); }

fdma_status fdma_lists_workspace(const fdma_lists_args *args, size_t *bytes) {
    return ask_workspace(fdma_check_lists, args, bytes);
}

fdma_status fdma_lists_kernel(const fdma_lists_args *args, const char **name) {
    return ask_kernel(fdma_check_lists, args, name);
}

fdma_status fdma_forward(const fdma_forward_args *args) { return call(fdma_check_forward, args); }

fdma_status fdma_forward_workspace(const fdma_forward_args *args, size_t *bytes) {
    return ask_workspace(fdma_check_forward, args, bytes);
}

fdma_status fdma_forward_kernel(const fdma_forward_args *args, const char **name) {
    return ask_kernel(fdma_check_forward, args, name);
}

fdma_status fdma_backward(const fdma_backward_args *args) {
    return call(fdma_check_backward, args);
}

fdma_status fdma_backward_workspace(const fdma_backward_args *args, size_t *bytes) {
    return ask_workspace(fdma_check_backward, args, bytes);
}

fdma_status fdma_backward_kernel(const fdma_backward_args *args, const char **name) {
    return ask_kernel(fdma_check_backward, args, name);
}

fdma_status fdma_score_backward(const fdma_score_backward_args *args) {
    return call(fdma_check_score_backward, args);
}

fdma_status fdma_score_backward_workspace(const fdma_score_backward_args *args, size_t *bytes) {
    return ask_workspace(fdma_check_score_backward, args, bytes);
}

fdma_status fdma_score_backward_kernel(const fdma_score_backward_args *args, const char **name) {
    return ask_kernel(fdma_check_score_backward, args, name);
}

fdma_status fdma_merge(const fdma_merge_args *args) { return call(fdma_check_merge, args); }

fdma_status fdma_merge_workspace(const fdma_merge_args *args, size_t *bytes) {
    return ask_workspace(fdma_check_merge, args, bytes);
}

fdma_status fdma_merge_kernel(const fdma_merge_args *args, const char **name) {
    return ask_kernel(fdma_check_merge, args, name);
}

fdma_status fdma_merge_backward(const fdma_merge_backward_args *args) {
    return call(fdma_check_merge_backward, args);
}

fdma_status fdma_merge_backward_workspace(const fdma_merge_backward_args *args, size_t *bytes) {
    return ask_workspace(fdma_check_merge_backward, args, bytes);
}

fdma_status fdma_merge_backward_kernel(const fdma_merge_backward_args *args, const char **name) {
    return ask_kernel(fdma_check_merge_backward, args, name);
}

typedef struct attention_problems {
    fdma_problem score, select, forward;
} attention_problems;

static fdma_status check_steps(const attention_steps *steps, check_depth depth,
                               attention_problems *problems) {
    FDMA_TRY(prepare(fdma_check_score, &steps->score, depth, &problems->score));
    FDMA_TRY(prepare(fdma_check_select, &steps->select, depth, &problems->select));
    return prepare(fdma_check_forward, &steps->forward, depth, &problems->forward);
}

/* A struct that a query fills in begins with its size, which the caller has set. */
static fdma_status check_names(const char *name, const void *names, size_t known) {
    size_t size;
    FDMA_REQUIRE(names != NULL, FDMA_INVALID_ARGUMENT, "%s: is NULL", name);
    memcpy(&size, names, sizeof size);
    FDMA_REQUIRE(size >= known, FDMA_INVALID_ARGUMENT, "%s: size is %zu, want %zu", name, size,
                 known);
    return FDMA_OK;
}

/* What passes between the steps, and the most that one of them needs. */
static fdma_status steps_bytes(size_t scratch, const fdma_problem *const *steps, size_t count,
                               size_t *bytes) {
    size_t most = 0;
    for (size_t i = 0; i < count; i++) {
        size_t step;
        FDMA_TRY(workspace_of(steps[i], &step));
        most = step > most ? step : most;
    }
    *bytes = scratch + most;
    return FDMA_OK;
}

static fdma_status attention_bytes(const attention_steps *steps, const attention_problems *problems,
                                   size_t *bytes) {
    const fdma_problem *const each[] = {&problems->score, &problems->select, &problems->forward};
    return steps_bytes(steps->scratch, each, sizeof each / sizeof each[0], bytes);
}

fdma_status fdma_attention_workspace(const fdma_attention_args *args, size_t *bytes) {
    attention_steps steps;
    attention_problems problems;
    FDMA_REQUIRE(bytes != NULL, FDMA_INVALID_ARGUMENT, "bytes: is NULL");
    FDMA_TRY(fdma_split_attention(args, &steps));
    FDMA_TRY(check_steps(&steps, check_shapes, &problems));
    return attention_bytes(&steps, &problems, bytes);
}

fdma_status fdma_attention_kernel(const fdma_attention_args *args, fdma_attention_kernels *names) {
    attention_steps steps;
    attention_problems problems;
    fdma_attention_kernels found = {.size = sizeof found};
    FDMA_TRY(check_names("fdma_attention_kernels", names, sizeof *names));
    FDMA_TRY(fdma_split_attention(args, &steps));
    FDMA_TRY(check_steps(&steps, check_shapes, &problems));
    FDMA_TRY(kernel_of(&problems.score, &found.score));
    FDMA_TRY(kernel_of(&problems.select, &found.select));
    FDMA_TRY(kernel_of(&problems.forward, &found.forward));
    found.size = names->size;
    *names = found;
    return FDMA_OK;
}

fdma_status fdma_attention(const fdma_attention_args *args) {
    attention_steps steps;
    attention_problems problems;
    size_t wanted;
    FDMA_TRY(fdma_split_attention(args, &steps));
    FDMA_TRY(check_steps(&steps, check_shapes, &problems));
    FDMA_TRY(attention_bytes(&steps, &problems, &wanted));
    FDMA_TRY(check_workspace(args->exec.workspace_size, wanted));
    FDMA_TRY(check_steps(&steps, check_all, &problems));
    FDMA_TRY(fdma_check_attention_overlaps(args));
    FDMA_TRY(run(&problems.score));
    FDMA_TRY(run(&problems.select));
    FDMA_TRY(run(&problems.forward));
    if (steps.given != NULL)
        record_selection(steps.given, &problems.select);
    return FDMA_OK;
}

typedef struct backward_problems {
    fdma_problem score, backward, score_backward;
} backward_problems;

static fdma_status check_backward_steps(const backward_steps *steps, check_depth depth,
                                        backward_problems *problems) {
    FDMA_TRY(prepare(fdma_check_backward, &steps->backward, depth, &problems->backward));
    if (steps->needs_score)
        FDMA_TRY(prepare(fdma_check_score, &steps->score, depth, &problems->score));
    return steps->learns ? prepare(fdma_check_score_backward, &steps->score_backward, depth,
                                   &problems->score_backward)
                         : FDMA_OK;
}

static fdma_status backward_bytes(const backward_steps *steps, const backward_problems *problems,
                                  size_t *bytes) {
    const fdma_problem *each[3] = {&problems->backward};
    size_t count = 1;
    if (steps->needs_score)
        each[count++] = &problems->score;
    if (steps->learns)
        each[count++] = &problems->score_backward;
    return steps_bytes(steps->scratch, each, count, bytes);
}

fdma_status fdma_attention_backward_workspace(const fdma_attention_backward_args *args,
                                              size_t *bytes) {
    backward_steps steps;
    backward_problems problems;
    FDMA_REQUIRE(bytes != NULL, FDMA_INVALID_ARGUMENT, "bytes: is NULL");
    FDMA_TRY(fdma_split_attention_backward(args, &steps));
    FDMA_TRY(check_backward_steps(&steps, check_shapes, &problems));
    return backward_bytes(&steps, &problems, bytes);
}

fdma_status fdma_attention_backward_kernel(const fdma_attention_backward_args *args,
                                           fdma_attention_backward_kernels *names) {
    backward_steps steps;
    backward_problems problems;
    fdma_attention_backward_kernels found = {.size = sizeof found};
    FDMA_TRY(check_names("fdma_attention_backward_kernels", names, sizeof *names));
    FDMA_TRY(fdma_split_attention_backward(args, &steps));
    FDMA_TRY(check_backward_steps(&steps, check_shapes, &problems));
    if (steps.needs_score)
        FDMA_TRY(kernel_of(&problems.score, &found.score));
    FDMA_TRY(kernel_of(&problems.backward, &found.backward));
    if (steps.learns)
        FDMA_TRY(kernel_of(&problems.score_backward, &found.score_backward));
    found.size = names->size;
    *names = found;
    return FDMA_OK;
}

fdma_status fdma_attention_backward(const fdma_attention_backward_args *args) {
    backward_steps steps;
    backward_problems problems;
    size_t wanted;
    FDMA_TRY(fdma_split_attention_backward(args, &steps));
    FDMA_TRY(check_backward_steps(&steps, check_shapes, &problems));
    FDMA_TRY(backward_bytes(&steps, &problems, &wanted));
    FDMA_TRY(check_workspace(args->exec.workspace_size, wanted));
    FDMA_TRY(check_backward_steps(&steps, check_all, &problems));
    FDMA_TRY(fdma_check_attention_backward_overlaps(args));
    if (steps.needs_score)
        FDMA_TRY(run(&problems.score));
    FDMA_TRY(run(&problems.backward));
    return steps.learns ? run(&problems.score_backward) : FDMA_OK;
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
    FDMA_TRY(check_names("fdma_kernel_info", info, sizeof *info));
    FDMA_REQUIRE(kernel != NULL, FDMA_INVALID_ARGUMENT, "index: is %d, want 0 to %d", index,
                 fdma_kernel_count() - 1);
    info->name = kernel->name;
    info->operation = fdma_operation_name(kernel->operation);
    info->missing = kernel->missing();
    return FDMA_OK;
}

int32_t fdma_device_count(void) { return 1 + fdma_cuda_count(); }

fdma_status fdma_describe_device(int32_t device, fdma_device_info *info) {
    FDMA_TRY(check_names("fdma_device_info", info, sizeof *info));
    const int32_t last = fdma_device_count() - 1;
    FDMA_REQUIRE(device >= 0, FDMA_INVALID_ARGUMENT, "device: is %d, want FDMA_CPU or FDMA_CUDA(n)",
                 device);
    FDMA_REQUIRE(device <= last, FDMA_INVALID_ARGUMENT, "device: is %s, the last here is %s",
                 fdma_device_text(device).text, fdma_device_text(last).text);
    return device == FDMA_CPU ? fdma_describe_cpu(info) : fdma_describe_cuda(device, info);
}
