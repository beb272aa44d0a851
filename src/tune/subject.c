/* The calls that fdma_tune() measures. They are calls of fdma.h, so that it measures what programs
 * run. */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE // clock_gettime()
#endif
#include "tune/subject.h"

#include "core/element.h"
#include "core/error.h"
#include "core/kernel.h"
#include "core/operations.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Unsigned, because sizes that are refused only later may overflow. */
static void *take(fdma_arena *arena, size_t bytes, const int64_t shape[4]) {
    for (int axis = 0; axis < 4; axis++)
        bytes *= (size_t)shape[axis];
    return fdma_arena_take(arena, bytes);
}

static fdma_tensor take_4d(fdma_arena *arena, fdma_dtype dtype, const fdma_tune_args *args,
                           int64_t len, int64_t heads) {
    void *const data = take(arena, fdma_dtype_size(dtype),
                            (const int64_t[]){args->batch, len, heads, args->head_dim});
    return fdma_tensor_4d(data, dtype, args->batch, len, heads, args->head_dim);
}

static fdma_tensor take_3d(fdma_arena *arena, fdma_dtype dtype, const fdma_tune_args *args,
                           int64_t heads, int64_t len) {
    void *const data =
        take(arena, fdma_dtype_size(dtype), (const int64_t[]){args->batch, heads, len, 1});
    return fdma_tensor_3d(data, dtype, args->batch, heads, len);
}

/* Takes the tensors of both calls; without memory in the arena they get no data. */
static void take_tensors(fdma_arena *arena, const fdma_tune_args *args, tuning_subject *subject) {
    const bool selects = args->window < args->kv_len;
    const fdma_dtype dtype = args->dtype;
    fdma_forward_args *const forward = &subject->forward;
    fdma_backward_args *const backward = &subject->backward;
    *forward = (fdma_forward_args){.size = sizeof *forward, .causal = args->causal};
    forward->q = take_4d(arena, dtype, args, args->q_len, args->q_heads);
    forward->k = take_4d(arena, dtype, args, args->kv_len, args->kv_heads);
    forward->v = take_4d(arena, dtype, args, args->kv_len, args->kv_heads);
    forward->out = take_4d(arena, dtype, args, args->q_len, args->q_heads);
    forward->lse = take_3d(arena, FDMA_FLOAT32, args, args->q_heads, args->q_len);
    forward->exec.threads = args->threads;
    subject->selection = (fdma_selection){.size = sizeof subject->selection};
    if (selects) {
        subject->selection.expiry = take_3d(arena, FDMA_INT32, args, args->kv_heads, args->kv_len);
        subject->selection.slot = take_3d(arena, FDMA_INT32, args, args->kv_heads, args->kv_len);
        subject->selection.window = args->window;
        subject->selection.kv_len = args->kv_len;
        subject->selection.scope = args->causal ? FDMA_SCOPE_CAUSAL : FDMA_SCOPE_GLOBAL;
        forward->selection = &subject->selection;
    }
    *backward = (fdma_backward_args){
        .size = sizeof *backward,
        .out = forward->out,
        .lse = forward->lse,
        .q = forward->q,
        .k = forward->k,
        .v = forward->v,
        .selection = forward->selection,
        .causal = args->causal,
        .exec = forward->exec,
    };
    if (args->backward) {
        backward->dout = take_4d(arena, dtype, args, args->q_len, args->q_heads);
        backward->dq = take_4d(arena, dtype, args, args->q_len, args->q_heads);
        backward->dk = take_4d(arena, dtype, args, args->kv_len, args->kv_heads);
        backward->dv = take_4d(arena, dtype, args, args->kv_len, args->kv_heads);
    }
}

/* Random numbers in [-1, 1). A tensor repeats them after a prime number of elements. */
static void fill_random(const fdma_tensor *tensor) {
    enum { period = 65521 };
    uint64_t state = 1;
    const size_t element = fdma_dtype_size(tensor->dtype);
    size_t count = 1, done = 0;
    for (int axis = 0; axis < tensor->rank; axis++)
        count *= (size_t)tensor->shape[axis];
    for (; done < count && done < period; done++) {
        state = state * 6364136223846793005 + 1442695040888963407; // Knuth's linear generator
        fdma_store(tensor, (int64_t)done, (double)(state >> 40) / (1 << 23) - 1);
    }
    while (done < count) {
        const size_t more = count - done < done ? count - done : done;
        memcpy((char *)tensor->data + done * element, tensor->data, more * element);
        done += more;
    }
}

static fdma_status no_memory(size_t bytes) {
    return fdma_fail(FDMA_INVALID_ARGUMENT,
                     "fdma_tune_args: the shape needs %zu bytes of memory, want so much to be free",
                     bytes);
}

static fdma_status lend(tuning_subject *subject, fdma_exec *exec, size_t bytes) {
    if (bytes > subject->workspace_size) {
        free(subject->workspace);
        subject->workspace = malloc(bytes);
        subject->workspace_size = subject->workspace != NULL ? bytes : 0;
        if (subject->workspace == NULL)
            return no_memory(bytes);
    }
    exec->workspace = subject->workspace;
    exec->workspace_size = subject->workspace_size;
    return FDMA_OK;
}

static fdma_status select_keys(const fdma_tune_args *args, tuning_subject *subject,
                               const fdma_tensor *score) {
    fdma_select_args select = {
        .size = sizeof select,
        .score = *score,
        .selection = &subject->selection,
        .window = args->window,
        .scope = subject->selection.scope,
        .exec.threads = args->threads,
    };
    size_t bytes;
    fill_random(score);
    FDMA_TRY(fdma_select_workspace(&select, &bytes));
    FDMA_TRY(lend(subject, &select.exec, bytes));
    return fdma_select(&select);
}

/* Only the selection needs scores, so they share memory with the later gradients or workspace. */
static fdma_status make_tensors(const fdma_tune_args *args, tuning_subject *subject) {
    fdma_arena arena = {0};
    take_tensors(&arena, args, subject);
    take_3d(&arena, FDMA_FLOAT32, args, args->kv_heads, args->kv_len);
    const size_t bytes = fdma_arena_size(&arena);
    subject->tensors = malloc(bytes);
    if (subject->tensors == NULL)
        return no_memory(bytes);
    const fdma_problem memory = {.exec = {.workspace = subject->tensors}};
    arena = fdma_arena_of(&memory);
    take_tensors(&arena, args, subject);
    const fdma_tensor score = take_3d(&arena, FDMA_FLOAT32, args, args->kv_heads, args->kv_len);
    const fdma_tensor *const inputs[] = {&subject->forward.q, &subject->forward.k,
                                         &subject->forward.v};
    for (size_t n = 0; n < sizeof inputs / sizeof *inputs; n++)
        fill_random(inputs[n]);
    if (args->backward)
        fill_random(&subject->backward.dout);
    return subject->forward.selection != NULL ? select_keys(args, subject, &score) : FDMA_OK;
}

/* Checks everything before memory is taken. */
static fdma_status check_shape(const fdma_tune_args *args, tuning_subject *subject) {
    const struct {
        const char *name;
        int64_t value;
    } sizes[] = {{"batch", args->batch},       {"q_len", args->q_len},
                 {"kv_len", args->kv_len},     {"q_heads", args->q_heads},
                 {"kv_heads", args->kv_heads}, {"head_dim", args->head_dim},
                 {"window", args->window}};
    for (size_t n = 0; n < sizeof sizes / sizeof *sizes; n++)
        FDMA_REQUIRE(sizes[n].value >= 1, FDMA_INVALID_ARGUMENT, "%s: is %lld, want 1 or more",
                     sizes[n].name, (long long)sizes[n].value);
    FDMA_REQUIRE(args->dtype == FDMA_FLOAT32 || args->dtype == FDMA_FLOAT16 ||
                     args->dtype == FDMA_BFLOAT16,
                 FDMA_INVALID_ARGUMENT, "dtype: is %d, want FDMA_FLOAT32, _FLOAT16 or _BFLOAT16",
                 (int)args->dtype);
    fdma_arena none = {0};
    size_t bytes;
    take_tensors(&none, args, subject);
    FDMA_TRY(fdma_forward_workspace(&subject->forward, &bytes));
    return args->backward ? fdma_backward_workspace(&subject->backward, &bytes) : FDMA_OK;
}

fdma_status fdma_begin_subject(const fdma_tune_args *args, tuning_subject *subject) {
    *subject = (tuning_subject){.rows = 0};
    FDMA_TRY(check_shape(args, subject));
    FDMA_TRY(fdma_new_tuning(1, &subject->trial));
    subject->rows = args->q_len * (args->q_heads / args->kv_heads);
    return make_tensors(args, subject);
}

void fdma_end_subject(tuning_subject *subject) {
    fdma_try_tuning(NULL);
    free(subject->trial);
    free(subject->workspace);
    free(subject->tensors);
}

static bool is_backward(const tuning_subject *subject) {
    return subject->operation == operation_backward;
}

fdma_status fdma_measure_operation(tuning_subject *subject, fdma_operation operation) {
    const void *const args = operation == operation_backward ? (const void *)&subject->backward
                                                             : (const void *)&subject->forward;
    fdma_problem problem;
    FDMA_TRY(fdma_check_call(operation, args, check_shapes, &problem));
    subject->operation = operation;
    subject->calls = fdma_class_of(&problem);
    return FDMA_OK;
}

fdma_status fdma_set_choice(tuning_subject *subject, const tuning_choice *choice,
                            const char **kernel) {
    size_t bytes;
    subject->trial->entries[0] = (tuning_entry){.calls = subject->calls, .choice = *choice};
    subject->trial->count = fdma_has_choice(choice) ? 1 : 0;
    fdma_try_tuning(subject->trial);
    if (is_backward(subject)) {
        FDMA_TRY(fdma_backward_workspace(&subject->backward, &bytes));
        FDMA_TRY(lend(subject, &subject->backward.exec, bytes));
        return fdma_backward_kernel(&subject->backward, kernel);
    }
    FDMA_TRY(fdma_forward_workspace(&subject->forward, &bytes));
    FDMA_TRY(lend(subject, &subject->forward.exec, bytes));
    return fdma_forward_kernel(&subject->forward, kernel);
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

fdma_status fdma_time_calls(tuning_subject *subject, int64_t calls, double *seconds) {
    const double start = now();
    for (int64_t n = 0; n < calls; n++)
        FDMA_TRY(is_backward(subject) ? fdma_backward(&subject->backward)
                                      : fdma_forward(&subject->forward));
    *seconds = (now() - start) / (double)calls;
    return FDMA_OK;
}
