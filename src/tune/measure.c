/* fdma_tune(): finds the choice that makes calls of a shape fastest.
 *
 * Choices are measured in stages: kernels; then the tiles or the splits of the best one; then the
 * work for which a thread is woken. In each round of a stage the rules and all choices take turns,
 * and the ratios of a round compare neighbours in time, so that a slower machine slows both down.
 * The best of many is partly luck, so it is measured once more, alone. */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE // clock_gettime()
#endif
#include "core/element.h"
#include "core/error.h"
#include "core/integers.h"
#include "core/kernel.h"
#include "core/operations.h"
#include "cpu/cpu.h"
#include "cpu/parallel.h"
#include "tune/tune.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct tuning_subject {
    fdma_operation operation; /* forward or backward: the one that is measured */
    fdma_forward_args forward;
    fdma_backward_args backward; /* backward of the forward call */
    fdma_selection selection;
    tuning_class calls;
    int64_t rows;    /* rows of a kv head */
    void *tensors;   /* memory that the subject owns */
    void *workspace; /* as large as the measured call needs */
    size_t workspace_size;
    fdma_tuning *trial; /* the measured choice, as its only entry */
} tuning_subject;

/* ---- the calls that are measured: calls of fdma.h, as programs make them ---- */

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

/* Checks the shape, and makes the tensors. The subject must be ended even after an error, and must
 * not move. */
static fdma_status begin_subject(const fdma_tune_args *args, tuning_subject *subject) {
    *subject = (tuning_subject){.rows = 0};
    FDMA_TRY(check_shape(args, subject));
    FDMA_TRY(fdma_new_tuning(1, &subject->trial));
    subject->rows = args->q_len * (args->q_heads / args->kv_heads);
    return make_tensors(args, subject);
}

static void end_subject(tuning_subject *subject) {
    fdma_try_tuning(NULL);
    free(subject->trial);
    free(subject->workspace);
    free(subject->tensors);
}

static bool is_backward(const tuning_subject *subject) {
    return subject->operation == operation_backward;
}

static fdma_status measure_operation(tuning_subject *subject, fdma_operation operation) {
    const void *const args = operation == operation_backward ? (const void *)&subject->backward
                                                             : (const void *)&subject->forward;
    fdma_problem problem;
    FDMA_TRY(fdma_check_call(operation, args, check_shapes, &problem));
    subject->operation = operation;
    subject->calls = fdma_class_of(&problem);
    return FDMA_OK;
}

/* Makes later calls follow this choice; `kernel` becomes the name of the kernel that will run. */
static fdma_status set_choice(tuning_subject *subject, const tuning_choice *choice,
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

/* Makes `calls` calls, and returns the seconds of one. */
static fdma_status time_calls(tuning_subject *subject, int64_t calls, double *seconds) {
    const double start = now();
    for (int64_t n = 0; n < calls; n++)
        FDMA_TRY(is_backward(subject) ? fdma_backward(&subject->backward)
                                      : fdma_forward(&subject->forward));
    *seconds = (now() - start) / (double)calls;
    return FDMA_OK;
}

enum {
    most_choices = 32, /* choices of a stage */
    fewest_rounds = 5,
    most_rounds = 51,
    stages = 4, /* kernel, tile or split, threads, and the best one again */
};

static const double least_gain = 0.97;   // ratio: smaller gains may be noise
static const double hopeless = 1.5;      // ratio beyond which two calls are enough
static const double least_sample = 1e-3; // seconds: shorter calls are repeated
static const double usual_seconds = 3;   // for each operation

typedef struct measured_choice {
    tuning_choice choice;
    const char *kernel;
    double seconds, ratio; /* medians */
    double times[most_rounds], ratios[most_rounds];
} measured_choice;

/* One operation that is being tuned. */
typedef struct tuning_session {
    const fdma_tune_args *args;
    tuning_subject *subject;
    measured_choice rules, best;
    measured_choice list[most_choices]; /* choices of the stage */
    int count;
} tuning_session;

static void describe(const tuning_choice *choice, char *text, size_t size) {
    const struct {
        const char *name;
        int64_t value;
    } numbers[] = {{"tile_rows", choice->tile_rows},
                   {"split_keys", choice->split_keys},
                   {"thread_work", choice->thread_work}};
    size_t used = 0;
    snprintf(text, size, "rules");
    if (choice->kernel[0] != '\0')
        used = (size_t)snprintf(text, size, "kernel=%s", choice->kernel);
    for (size_t n = 0; n < sizeof numbers / sizeof *numbers; n++)
        if (numbers[n].value > 0)
            used += (size_t)snprintf(text + used, size - used, "%s%s=%lld", used > 0 ? " " : "",
                                     numbers[n].name, (long long)numbers[n].value);
}

static void report(const tuning_session *session, const measured_choice *measured, bool final) {
    char text[tuning_line];
    if (session->args->report == NULL)
        return;
    describe(&measured->choice, text, sizeof text);
    const fdma_tune_trial trial = {
        .size = sizeof trial,
        .operation = fdma_operation_name(session->subject->operation),
        .kernel = measured->kernel,
        .choice = text,
        .seconds = measured->seconds,
        .ratio = measured->ratio,
        .final = final ? 1 : 0,
    };
    session->args->report(session->args->context, &trial);
}

static int compare(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, int64_t count) {
    qsort(values, (size_t)count, sizeof *values, compare);
    return values[count / 2];
}

static fdma_status time_choice(tuning_session *session, measured_choice *measured, int64_t calls,
                               double *seconds) {
    FDMA_TRY(set_choice(session->subject, &measured->choice, &measured->kernel));
    return time_calls(session->subject, calls, seconds);
}

/* Removes the choices that two calls show to be far behind, and adds up the time of the others. */
static fdma_status drop_hopeless(tuning_session *session, double *round) {
    int kept = 0;
    *round = session->rules.seconds;
    for (int n = 0; n < session->count; n++) {
        double first, seconds;
        FDMA_TRY(time_choice(session, &session->list[n], 1, &first)); // it may touch new memory
        FDMA_TRY(time_choice(session, &session->list[n], 1, &seconds));
        seconds = fmin(first, seconds);
        if (seconds > hopeless * session->rules.seconds)
            continue;
        session->list[kept++] = session->list[n];
        *round += seconds;
    }
    session->count = kept;
    return FDMA_OK;
}

static fdma_status run_round(tuning_session *session, int64_t calls, int64_t round) {
    double *const rules = &session->rules.times[round];
    FDMA_TRY(time_choice(session, &session->rules, calls, rules));
    for (int n = 0; n < session->count; n++) {
        measured_choice *const measured = &session->list[n];
        FDMA_TRY(time_choice(session, measured, calls, &measured->times[round]));
        measured->ratios[round] = measured->times[round] / *rules;
    }
    return FDMA_OK;
}

/* Finds the medians of `rounds` rounds, and the best choice if it is a gain. */
static void compare_choices(tuning_session *session, int64_t rounds) {
    const measured_choice *least = &session->best;
    for (int n = 0; n < session->count; n++) {
        measured_choice *const measured = &session->list[n];
        measured->seconds = median(measured->times, rounds);
        measured->ratio = median(measured->ratios, rounds);
        least = measured->ratio < least->ratio ? measured : least;
        report(session, measured, false);
    }
    if (least->ratio < least_gain * session->best.ratio)
        session->best = *least;
    session->rules.seconds = median(session->rules.times, rounds);
}

/* Measures the choices of the list, and takes the best one if it is better than the best so far. */
static fdma_status run_stage(tuning_session *session) {
    const double budget = session->args->seconds > 0 ? session->args->seconds : usual_seconds;
    double round_seconds;
    if (session->count == 0)
        return FDMA_OK;
    FDMA_TRY(drop_hopeless(session, &round_seconds));
    const double shortest = fmax(session->rules.seconds, 1e-9); // the clock's resolution
    const int64_t calls = (int64_t)fmax(1, ceil(least_sample / shortest));
    const double wanted = budget / stages / ((double)calls * round_seconds);
    const int64_t rounds = (int64_t)fmin(fmax(wanted, fewest_rounds), most_rounds);
    for (int64_t round = 0; round < rounds; round++)
        FDMA_TRY(run_round(session, calls, round));
    compare_choices(session, rounds);
    return FDMA_OK;
}

static void add_choice(tuning_session *session, const tuning_choice *choice) {
    if (session->count < most_choices)
        session->list[session->count++] = (measured_choice){.choice = *choice};
}

/* Lists the other kernels of the operation that run here and take the call. Scalar kernels are left
 * out, because they are for machines without others. */
static fdma_status list_kernels(tuning_session *session) {
    static const kernel_backend *const backends[] = {&fdma_cpu_backend, NULL};
    const fdma_kernel *kernel;
    session->count = 0;
    for (int32_t n = 0; (kernel = fdma_kernel_at(backends, n)) != NULL; n++) {
        const char *ran;
        tuning_choice choice = {.kernel = ""};
        if (kernel->operation != session->subject->operation || kernel->missing() != NULL ||
            strncmp(kernel->name, "cpu/scalar", strlen("cpu/scalar")) == 0)
            continue;
        snprintf(choice.kernel, sizeof choice.kernel, "%s", kernel->name);
        FDMA_TRY(set_choice(session->subject, &choice, &ran));
        if (strcmp(ran, kernel->name) == 0 && strcmp(ran, session->rules.kernel) != 0)
            add_choice(session, &choice);
    }
    return FDMA_OK;
}

/* Adds the best choice so far with each value of one of its numbers, `number`. Values ascend; the
 * first one that covers `most` is the last. */
static void list_values(tuning_session *session, tuning_choice *choice, int64_t *number,
                        const int64_t *values, size_t count, int64_t most) {
    for (size_t n = 0; n < count && (n == 0 || values[n - 1] < most); n++) {
        *number = values[n];
        add_choice(session, choice);
    }
}

/* Lists other tiles or, for kernels that split the keys, other splits. */
static void list_tiles(tuning_session *session) {
    static const int64_t rows[] = {32, 64, 96, 128, 192, 256, 384, 512, 768};
    static const int64_t keys[] = {128, 256, 1024, 2048, 4096, 8192};
    tuning_choice choice = session->best.choice;
    session->count = 0;
    if (strstr(session->best.kernel, "/decode") != NULL)
        list_values(session, &choice, &choice.split_keys, keys, sizeof keys / sizeof *keys,
                    session->args->kv_len);
    else
        list_values(session, &choice, &choice.tile_rows, rows, sizeof rows / sizeof *rows,
                    session->subject->rows);
}

static void list_thread_work(tuning_session *session) {
    static const int64_t microseconds[] = {10, 25, 50, 200, 400, 1000, 4000};
    tuning_choice choice = session->best.choice;
    session->count = 0;
    if (fdma_thread_count(session->args->threads, INT32_MAX) > 1)
        list_values(session, &choice, &choice.thread_work, microseconds,
                    sizeof microseconds / sizeof *microseconds, INT64_MAX);
}

static fdma_status time_rules(tuning_session *session) {
    session->rules.ratio = 1;
    FDMA_TRY(time_choice(session, &session->rules, 1, &session->rules.seconds));
    FDMA_TRY(time_choice(session, &session->rules, 1, &session->rules.seconds));
    session->best = session->rules;
    return FDMA_OK;
}

/* Measures the best choice once more, alone, and puts it into the tuning if it is still better. */
static fdma_status settle(tuning_session *session) {
    tuning_entry entry = {.calls = session->subject->calls};
    const measured_choice best = session->best;
    session->best = session->rules;
    session->count = 0;
    if (fdma_has_choice(&best.choice))
        add_choice(session, &best.choice);
    FDMA_TRY(run_stage(session));
    if (!fdma_has_choice(&session->best.choice))
        session->best.seconds = session->rules.seconds;
    entry.choice = session->best.choice;
    fdma_write_line(&entry);
    fdma_try_tuning(NULL);
    FDMA_TRY(fdma_put_entry(&entry));
    report(session, &session->best, true);
    return FDMA_OK;
}

static fdma_status tune_operation(tuning_session *session, fdma_operation operation) {
    FDMA_TRY(measure_operation(session->subject, operation));
    FDMA_TRY(time_rules(session));
    FDMA_TRY(list_kernels(session));
    FDMA_TRY(run_stage(session));
    list_tiles(session);
    FDMA_TRY(run_stage(session));
    list_thread_work(session);
    FDMA_TRY(run_stage(session));
    return settle(session);
}

static fdma_status tune_subject(const fdma_tune_args *args, tuning_subject *subject) {
    static const fdma_operation operations[] = {operation_forward, operation_backward};
    fdma_status status = FDMA_OK;
    for (int n = 0; status == FDMA_OK && n < (args->backward ? 2 : 1); n++) {
        tuning_session *const session = calloc(1, sizeof *session);
        FDMA_REQUIRE(session != NULL, FDMA_INVALID_ARGUMENT,
                     "fdma_tune: needs %zu bytes of memory, want so much to be free",
                     sizeof *session);
        session->args = args;
        session->subject = subject;
        status = tune_operation(session, operations[n]);
        free(session);
    }
    return status;
}

fdma_status fdma_tune(const fdma_tune_args *caller) {
    fdma_tune_args args;
    FDMA_TRY(fdma_copy_struct("fdma_tune_args", caller, sizeof args, &args, sizeof args));
    FDMA_REQUIRE(args.seconds >= 0 && args.seconds < INFINITY, FDMA_INVALID_ARGUMENT,
                 "seconds: is %g, want a finite number, 0 or more", args.seconds);
    tuning_subject subject;
    fdma_status status = begin_subject(&args, &subject);
    if (status == FDMA_OK)
        status = tune_subject(&args, &subject);
    end_subject(&subject);
    return status;
}
