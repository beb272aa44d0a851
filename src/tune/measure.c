/* fdma_tune(): finds the choice that makes calls of a shape fastest.
 *
 * Choices are measured in stages: kernels; then the tiles or the splits of the best one; then the
 * work for which a thread is woken. In each round of a stage the rules and all choices take turns,
 * and the ratios of a round compare neighbours in time, so that a slower machine slows both down.
 * The best of many is partly luck, so it is measured once more, alone. */
#include "core/error.h"
#include "core/integers.h"
#include "core/operations.h"
#include "cpu/cpu.h"
#include "cpu/parallel.h"
#include "tune/subject.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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
    FDMA_TRY(fdma_set_choice(session->subject, &measured->choice, &measured->kernel));
    return fdma_time_calls(session->subject, calls, seconds);
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
        FDMA_TRY(fdma_set_choice(session->subject, &choice, &ran));
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
    FDMA_TRY(fdma_measure_operation(session->subject, operation));
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
    fdma_status status = fdma_begin_subject(&args, &subject);
    if (status == FDMA_OK)
        status = tune_subject(&args, &subject);
    fdma_end_subject(&subject);
    return status;
}
