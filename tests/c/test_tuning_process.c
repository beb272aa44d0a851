/* test_tuning_process.c - the tuning as state of the process: FDMA_TUNING, threads that call while
 * it changes, children after fork(), and fdma_tune(), which measures it. */
#define _GNU_SOURCE /* setenv */

#include "errors.h"
#include "tunings.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>

static const problem sizes = SIZES(1, 2, 1000, 2, 1, 16, 200, 1);

static problem small_problem(void) { return new_problem(&sizes, FDMA_FLOAT32, 5); }

/* Writes a file with one entry, for the class of the problem. Afterwards the process has no
 * tuning. */
static void write_tuning(const char *path, const problem *x, int64_t split_keys) {
    const fdma_forward_args args = problem_args(x, NULL);
    tune_class(class_of_call(operation_forward, &args), (tuning_choice){.split_keys = split_keys});
    CHECK_OK(fdma_tuning_save(path));
    CHECK_OK(fdma_tuning_load(NULL));
}

/* ---- the environment ---- */

/* Runs `check` in a child, whose process has not read FDMA_TUNING yet. `said` gets its stderr. */
static void run_child(const char *variable, bool (*check)(void), char *said) {
    const file_name errors = test_file(9);
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        setenv("FDMA_TUNING", variable, 1);
        const bool right = freopen(errors.text, "w", stderr) != NULL && check();
        fflush(stderr);
        _exit(right && test_state.failures == 0 ? 0 : 1);
    }
    int status = -1;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    read_text(errors.text, said);
    remove(errors.text);
}

static bool calls_work(void) {
    const problem x = small_problem();
    CHECK_INT(fdma_score(NULL), FDMA_INVALID_ARGUMENT); /* score follows no tuning */
    char before[512];
    snprintf(before, sizeof before, "%s", fdma_last_error());
    problem_attend(&x, NULL, 1);
    return strcmp(fdma_last_error(), before) == 0; /* a call that succeeds leaves the message */
}

static file_name environment_file;

static bool writes_the_file(void) {
    const problem x = small_problem();
    write_tuning(environment_file.text, &x, 64);
    return true;
}

static bool has_no_entry(void) { return calls_work() && fdma_tuning_line(0) == NULL; }

static bool has_an_entry(void) {
    return calls_work() && fdma_tuning_line(0) != NULL && fdma_tuning_line(1) == NULL;
}

static bool loads_none(void) {
    CHECK_OK(fdma_tuning_load(NULL)); /* FDMA_TUNING is not read any more */
    return has_no_entry();
}

/* Runs first, before this process reads FDMA_TUNING. */
static void the_environment_names_a_file(void) {
    char said[longest_text];
    environment_file = test_file(0);
    run_child("", writes_the_file, said);
    run_child(environment_file.text, has_an_entry, said);
    CHECK(said[0] == '\0');
    run_child(environment_file.text, loads_none, said);
    CHECK(said[0] == '\0');
    run_child("", has_no_entry, said);
    CHECK(said[0] == '\0');
    run_child("not-there", has_no_entry, said);
    CHECK_WORD(said, "FDMA_TUNING");
    CHECK_WORD(said, "not-there");
    CHECK(strchr(said, '\n') == said + strlen(said) - 1); /* one line, once */
    remove(environment_file.text);
}

/* ---- threads ---- */

enum { callers = 3, changes = 300 };

typedef struct concurrent_calls {
    const problem *x;
    attended want[3]; /* by either tuning, and by the rules */
    _Atomic int wrong, done;
    _Atomic bool stop;
    fdma_forward_args args[callers];
} concurrent_calls;

typedef struct caller {
    concurrent_calls *all;
    int index;
} caller;

/* Each call follows one tuning throughout, and its workspace is never too small. */
static void *call_again(void *context) {
    const caller *const self = context;
    concurrent_calls *const all = self->all;
    fdma_forward_args *const args = &all->args[self->index];
    while (!all->stop) {
        int same = 0;
        if (fdma_forward(args) == FDMA_OK)
            for (int n = 0; n < 3; n++)
                same |= memcmp(args->out.data, all->want[n].out.data, bytes_of(args->out)) == 0;
        all->wrong += !same;
        all->done++;
    }
    return NULL;
}

static void calls_go_on_while_the_tuning_changes(void) {
    const problem x = small_problem();
    const file_name names[] = {test_file(1), test_file(2)};
    concurrent_calls all = {.x = &x};
    caller selves[callers];
    pthread_t threads[callers];
    write_tuning(names[0].text, &x, 64);
    write_tuning(names[1].text, &x, 300);
    all.want[2] = problem_attend(&x, NULL, 1);
    for (int n = 0; n < callers; n++) { /* each workspace serves some of the choices only */
        size_t bytes = 0;
        all.args[n] = problem_args(&x, NULL);
        CHECK_OK(fdma_tuning_load(n > 0 ? names[n - 1].text : NULL));
        CHECK_OK(fdma_forward_workspace(&all.args[n], &bytes));
        exec_alloc(&all.args[n].exec, bytes);
        if (n > 0)
            all.want[n - 1] = problem_attend(&x, NULL, 1);
    }
    CHECK(!same_tensor(all.want[0].out, all.want[1].out));
    for (int n = 0; n < callers; n++) {
        selves[n] = (caller){&all, n};
        CHECK(pthread_create(&threads[n], NULL, call_again, &selves[n]) == 0);
    }
    for (int n = 0; n < changes || all.done < changes; n++)
        CHECK_OK(fdma_tuning_load(n % 3 < 2 ? names[n % 3].text : NULL));
    all.stop = true;
    for (int n = 0; n < callers; n++)
        pthread_join(threads[n], NULL);
    CHECK_INT(all.wrong, 0);
    CHECK_OK(fdma_tuning_load(NULL));
    remove(names[0].text);
    remove(names[1].text);
}

static void children_inherit_the_tuning(void) {
    const problem x = small_problem();
    const file_name name = test_file(1);
    write_tuning(name.text, &x, 64);
    CHECK_OK(fdma_tuning_load(name.text));
    const attended want = problem_attend(&x, NULL, 1);
    const char *const line = fdma_tuning_line(0);
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        const bool same = same_tensor(problem_attend(&x, NULL, 2).out, want.out);
        const bool cleared = fdma_tuning_load(NULL) == FDMA_OK && fdma_tuning_line(0) == NULL;
        _exit(same && cleared && !same_tensor(problem_attend(&x, NULL, 1).out, want.out) ? 0 : 1);
    }
    int status = -1;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(fdma_tuning_line(0) == line);
    CHECK_OK(fdma_tuning_load(NULL));
    remove(name.text);
}

/* ---- fdma_tune() ---- */

static fdma_tune_args small_shape(void) {
    return (fdma_tune_args){.size = sizeof(fdma_tune_args),
                            .dtype = FDMA_BFLOAT16,
                            .causal = 1,
                            .batch = 1,
                            .q_len = 70,
                            .kv_len = 90,
                            .q_heads = 4,
                            .kv_heads = 2,
                            .head_dim = 16,
                            .window = 20,
                            .threads = 2,
                            .seconds = 1e-3};
}

typedef struct reports {
    int count[2], final[2]; /* of forward and backward */
    char kept[2][tuning_line];
} reports;

static void note_trial(void *context, const fdma_tune_trial *trial) {
    reports *const seen = context;
    const int backward = strcmp(trial->operation, "backward") == 0;
    CHECK(trial->size == sizeof *trial && trial->seconds > 0 && trial->ratio > 0);
    CHECK(strncmp(trial->kernel, "cpu/", 4) == 0);
    seen->count[backward]++;
    CHECK_INT(seen->final[backward], 0); /* nothing follows the final one */
    if (trial->final) {
        seen->final[backward]++;
        snprintf(seen->kept[backward], tuning_line, "%s", trial->choice);
    }
}

/* Choices that are kept are in the tuning, and others are not. The test does not check which choice
 * is fastest here. */
static void tuning_reports_what_it_keeps(void) {
    reports seen = {.count = {0}};
    fdma_tune_args args = small_shape();
    args.report = note_trial;
    args.context = &seen;
    args.backward = 1;
    CHECK_OK(fdma_tuning_load(NULL));
    CHECK_OK(fdma_tune(&args));
    int entries = 0;
    for (int n = 0; n < 2; n++) {
        const char *const name = n == 0 ? "forward " : "backward ";
        const bool rules = strcmp(seen.kept[n], "rules") == 0;
        CHECK(seen.count[n] > 1);
        CHECK_INT(seen.final[n], 1);
        for (int line = 0; fdma_tuning_line(line) != NULL; line++)
            if (strncmp(fdma_tuning_line(line), name, strlen(name)) == 0)
                entries += CHECK(!rules);
        entries += rules;
    }
    CHECK_INT(entries, 2);
    CHECK_OK(fdma_tuning_load(NULL));
}

/* Calls of this thread follow the tuning of the process again. Covers dense and single queries,
 * too. */
static void tuning_leaves_calls_alone(void) {
    const problem x = small_problem();
    const file_name name = test_file(1);
    write_tuning(name.text, &x, 64);
    fdma_tune_args args = small_shape();
    CHECK_OK(fdma_tuning_load(name.text));
    const attended want = problem_attend(&x, NULL, 1);
    args.window = FDMA_WINDOW_ALL;
    args.causal = 0;
    args.q_len = 1;
    args.dtype = FDMA_FLOAT32;
    CHECK_OK(fdma_tune(&args));
    check_same_results(problem_attend(&x, NULL, 1), want);
    args.kv_len = 0;
    CHECK_INT(fdma_tune(&args), FDMA_INVALID_ARGUMENT);
    check_same_results(problem_attend(&x, NULL, 1), want);
    CHECK_OK(fdma_tuning_load(NULL));
    remove(name.text);
}

static void check_shape(fdma_tune_args args, const char *word, const char *value) {
    const bool odd = args.head_dim % 8 != 0;
    const expectation want = {odd ? FDMA_UNSUPPORTED : FDMA_INVALID_ARGUMENT, {word, value}, 0};
    check_status(fdma_tune(&args), &want);
    CHECK(fdma_tuning_line(0) == NULL);
}

static void wrong_shapes_are_refused(void) {
    const fdma_tune_args right = small_shape();
    fdma_tune_args args = right;
    const expectation no_struct = {FDMA_INVALID_ARGUMENT, {"fdma_tune_args", "NULL"}, 0};
    CHECK_OK(fdma_tuning_load(NULL));
    check_status(fdma_tune(NULL), &no_struct);
#define WITH(FIELD, VALUE, WORD, TEXT)                                                             \
    args = right;                                                                                  \
    args.FIELD = VALUE;                                                                            \
    check_shape(args, WORD, TEXT)
    WITH(size, 8, "fdma_tune_args", "8");
    WITH(dtype, FDMA_FLOAT64, "dtype", "4");
    WITH(batch, 0, "batch", "0");
    WITH(q_len, -1, "q_len", "-1");
    WITH(kv_len, 0, "kv_len", "0");
    WITH(kv_len, INT64_MAX, "kv_len", "2147483647");
    WITH(batch, INT64_MAX, "q", "too large");
    WITH(q_heads, 5, "q_heads", "5");
    WITH(kv_heads, 0, "kv_heads", "0");
    WITH(head_dim, 12, "head_dim", "12");
    WITH(window, 0, "window", "0");
    WITH(threads, -1, "threads", "-1");
    WITH(seconds, -1, "seconds", "-1");
    WITH(seconds, (double)NAN, "seconds", "nan");
#undef WITH
}

static const test_entry tests[] = {
    TEST(the_environment_names_a_file), TEST(calls_go_on_while_the_tuning_changes),
    TEST(children_inherit_the_tuning),  TEST(tuning_reports_what_it_keeps),
    TEST(tuning_leaves_calls_alone),    TEST(wrong_shapes_are_refused),
};

int main(void) { return test_run(tests, TEST_COUNT(tests)); }
