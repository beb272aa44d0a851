/* test_select_partitions.c - selection with its keys cut into partitions of any size, far smaller
 * than a call cuts: compares it bit for bit with the reference, and with one partition. Then tests
 * calls that cut. */
#include "cpu/select/partitions.h"
#include "reference/reference.h"
#include "scores.h"

/* ---- one problem, cut in some way ---- */

static fdma_problem new_problem(int64_t batch, int64_t kv_heads, int64_t kv_len, int64_t window) {
    return (fdma_problem){
        .operation = operation_select,
        .dtype = FDMA_FLOAT32,
        .batch = batch,
        .kv_heads = kv_heads,
        .kv_len = kv_len,
        .window = window,
        .slots = window,
        .scope = FDMA_SCOPE_CAUSAL,
        .score = new_tensor(FDMA_FLOAT32, batch, kv_heads, kv_len, -1),
        .expiry = new_output(FDMA_INT32, batch, kv_heads, kv_len, -1),
        .slot = new_output(FDMA_INT32, batch, kv_heads, kv_len, -1),
    };
}

static void select_reference(fdma_problem *problem) {
    const kernel_backend *const backends[] = {&fdma_reference_backend, NULL};
    const fdma_kernel *row;
    for (int32_t i = 0; (row = fdma_kernel_at(backends, i)) != NULL; i++) {
        if (row->operation == operation_select) {
            exec_alloc(&problem->exec, row->workspace(problem));
            CHECK_INT(row->run(problem), FDMA_OK);
        }
    }
}

/* As a call does it, except for the number of partitions. */
static void select_cut(fdma_problem *problem, int64_t partitions, int32_t threads) {
    problem->exec = (fdma_exec){.threads = threads};
    select_context select = cut_partitions(problem, partitions);
    exec_alloc(&problem->exec, lay_out_select(&select));
    lay_out_select(&select);
    select_partitions(&select);
}

static void check_cut(const fdma_problem *want, int64_t partitions, int32_t threads, int named) {
    fdma_problem got = *want;
    got.expiry = new_output(FDMA_INT32, want->batch, want->kv_heads, want->kv_len, -1);
    got.slot = new_output(FDMA_INT32, want->batch, want->kv_heads, want->kv_len, -1);
    const fdma_tensor slot = got.slot;
    if (!named)
        got.slot = (fdma_tensor){0};
    test_context("kv_len %d, window %d, recent %d, sinks %d, %d partitions, %d threads, scope %d%s",
                 (int)want->kv_len, (int)want->window, (int)want->recent, (int)want->sinks,
                 (int)partitions, threads, (int)want->scope, named ? "" : ", no slots");
    select_cut(&got, partitions, threads);
    CHECK(same_tensor(got.expiry, want->expiry));
    if (named)
        CHECK(same_tensor(slot, want->slot));
}

/* ---- tests ---- */

static fdma_problem random_problem(uint64_t *state) {
    const int64_t n = 1 + random_below(state, random_below(state, 8) ? 160 : 1200);
    const int64_t windows[] = {
        1, 7, 64, n / 10 + 1, n > 1 ? n - 1 : 1, n, n + 3, random_below(state, n) + 1};
    fdma_problem problem = new_problem(1 + random_below(state, 2), 1 + random_below(state, 2), n,
                                       windows[random_below(state, TEST_COUNT(windows))]);
    problem.scope = random_below(state, 4) ? FDMA_SCOPE_CAUSAL : FDMA_SCOPE_GLOBAL;
    problem.recent = problem.scope == FDMA_SCOPE_CAUSAL && random_below(state, 4) == 0
                         ? random_below(state, n + 2)
                         : 0;
    problem.sinks = random_below(state, 4) == 0 ? random_below(state, problem.window + 1) : 0;
    problem.slots = problem.window + problem.recent;
    fill_kinds(problem.score, 1 + random_below(state, 2 * n), state);
    if (random_below(state, 3) == 0)
        problem.key_valid = new_padding(problem.batch, n, state);
    return problem;
}

static void partitions_select_what_the_reference_does(void) {
    const int cases = test_repeats(4000);
    uint64_t state = 1;
    for (int i = 0; i < cases; i++) {
        fdma_problem problem = random_problem(&state);
        const int64_t most = problem.kv_len < 40 ? problem.kv_len : 40;
        select_reference(&problem);
        check_cut(&problem, 1, 1, i % 5 != 0);
        check_cut(&problem, 1 + random_below(&state, most), 1, i % 7 != 0);
        test_free_all();
    }
}

/* Partitions begin and end at every key. */
static void every_boundary(void) {
    uint64_t state = 2;
    for (int kind = 0; kind < kind_count; kind++) {
        fdma_problem problem = new_problem(1, 1, 60, 9);
        fill_kind(problem.score, (score_kind)kind, &state);
        select_reference(&problem);
        for (int64_t partitions = 1; partitions <= problem.kv_len; partitions++)
            check_cut(&problem, partitions, 1, 1);
        test_free_all();
    }
}

static void threads_change_nothing(void) {
    const int cases = test_repeats(600);
    static const int32_t threads[] = {2, 3, 8};
    uint64_t state = 3;
    for (int i = 0; i < cases; i++) {
        fdma_problem problem = random_problem(&state);
        select_reference(&problem);
        check_cut(&problem, 1 + random_below(&state, problem.kv_len), threads[i % 3], i % 4 != 0);
        test_free_all();
    }
}

/* The threshold for the best keys of a long partition is guessed from a sample, here of every third
 * key. In partitions of 2048 only the sampled keys are good, so that the guess is too high, or only
 * they are bad. */
static void guesses_that_fail(void) {
    enum { partition = 2048, partitions = 4 };
    static const int64_t windows[] = {1, 60, 300, 1000};
    uint64_t state = 4;
    for (int w = 0; w < TEST_COUNT(windows); w++) {
        for (int good = 0; good <= 1; good++) {
            fdma_problem problem = new_problem(1, 1, partition * partitions, windows[w]);
            for (int64_t j = 0; j < problem.kv_len; j++) {
                const int sampled = j % partition % 3 == 0 && j % partition < 3 * sample_keys;
                ((float *)problem.score.data)[j] =
                    random_float(&state) + (sampled == good ? 10.0F : 0.0F);
            }
            for (int scope = FDMA_SCOPE_CAUSAL; scope <= FDMA_SCOPE_GLOBAL; scope++) {
                problem.scope = (fdma_scope)scope;
                select_cut(&problem, 1, 1);
                check_cut(&problem, partitions, 1, 1);
            }
            test_free_all();
        }
    }
}

static void long_partitions(void) {
    const int cases = test_repeats(300);
    uint64_t state = 5;
    for (int i = 0; i < cases; i++) {
        const int64_t n = 4000 + random_below(&state, 8000);
        const int64_t window = 1 + random_below(&state, random_below(&state, 2) ? 40 : n / 3);
        fdma_problem problem = new_problem(1, 1, n, window);
        problem.scope = i % 5 ? FDMA_SCOPE_CAUSAL : FDMA_SCOPE_GLOBAL;
        fill_kinds(problem.score, 1 + random_below(&state, n), &state);
        if (i % 3 == 0)
            problem.key_valid = new_padding(1, n, &state);
        select_cut(&problem, 1, 1);
        check_cut(&problem, 2 + random_below(&state, 4), 1 + i % 2, i % 6 != 0);
        test_free_all();
    }
}

static fdma_selection select_with(const fdma_problem *problem, const char *kernel,
                                  int32_t threads) {
    fdma_selection selection = selection_for(problem->score);
    fdma_select_args args = {.size = sizeof args,
                             .score = problem->score,
                             .key_valid = problem->key_valid,
                             .selection = &selection,
                             .window = problem->window,
                             .scope = problem->scope,
                             .exec = {.kernel = kernel, .threads = threads}};
    test_context("%s, %d threads, kv_len %d, window %d", kernel, threads, (int)problem->kv_len,
                 (int)problem->window);
    CHECK_OK(run_select(&args));
    return selection;
}

/* Runs every kernel but the reference, which takes too long. With a divided number of cases,
 * `first` chooses one number of threads. */
static void check_calls(const fdma_problem *problem, const kernel_list *kernels, int first) {
    static const int32_t threads[] = {1, 2, 3, 8};
    const int count = test_repeats(TEST_COUNT(threads));
    fdma_problem want = *problem;
    select_cut(&want, 1, 1);
    for (int k = 0; k < kernels->count; k++) {
        for (int t = 0; t < count && strcmp(kernels->name[k], "reference"); t++) {
            const int32_t number = threads[(first + t) % TEST_COUNT(threads)];
            const fdma_selection got = select_with(problem, kernels->name[k], number);
            CHECK(same_tensor(got.expiry, want.expiry));
            CHECK(same_tensor(got.slot, want.slot));
        }
    }
}

static void calls_on_any_number_of_threads(void) {
    enum {
        cut = least_partitions * least_partition_keys,
        widest = least_partition_keys / partition_windows
    };
    static const int64_t lengths[] = {cut + 1, 70001};
    const kernel_list kernels = kernels_of("select");
    uint64_t state = 6;
    for (int l = 0; l < TEST_COUNT(lengths); l++) {
        const int64_t n = lengths[l];
        const int64_t windows[] = {1, 7, 64, widest, widest + 1, 2048, n - 1, n};
        for (int i = 0; i < TEST_COUNT(windows) * kind_count; i++) {
            const score_kind kind = (score_kind)(i / TEST_COUNT(windows));
            fdma_problem problem =
                new_problem(1, 1 + i % 5 / 4, n, windows[i % TEST_COUNT(windows)]);
            problem.scope = i % 7 == 3 ? FDMA_SCOPE_GLOBAL : FDMA_SCOPE_CAUSAL;
            fill_kind(problem.score, kind, &state);
            if (i % 3 == 1)
                problem.key_valid = new_padding(1, n, &state);
            check_calls(&problem, &kernels, i + i / TEST_COUNT(windows));
            test_free_all();
        }
    }
}

/* A long sequence is cut if there are threads to spare. Short sequences, large windows, and as many
 * sequences as threads are not cut. */
static void cuts_where_it_pays(void) {
    static const struct {
        int64_t kv_heads, kv_len, window;
        int32_t threads;
        int64_t partitions;
    } rows[] = {
        {1, 1 << 20, 2048, 1, 1}, {1, 1 << 20, 2048, 2, 3},   {1, 1 << 20, 2048, 4, 5},
        {1, 131072, 2048, 8, 1},  {1, 1 << 20, 65535, 8, 1},  {8, 1 << 20, 2048, 8, 1},
        {0, 1 << 20, 2048, 8, 8}, {2, 1 << 22, 256, 8, 5},    {1, 0, 16, 8, 1},
        {1, 1 << 19, 0, 64, 4},   {1, 1 << 22, 2048, 64, 32}, {1, 1 << 22, 8192, 64, 8},
    };
    for (int r = 0; r < TEST_COUNT(rows); r++) {
        const fdma_problem problem = {.batch = 1,
                                      .kv_heads = rows[r].kv_heads,
                                      .kv_len = rows[r].kv_len,
                                      .window = rows[r].window,
                                      .exec = {.threads = rows[r].threads}};
        test_context("row %d", r);
        const bool has_threads = fdma_thread_count(2, 2) == 2;
        CHECK_INT(count_select_partitions(&problem), has_threads ? rows[r].partitions : 1);
    }
}

static const test_entry tests[] = {
    TEST(partitions_select_what_the_reference_does),
    TEST(every_boundary),
    TEST(threads_change_nothing),
    TEST(guesses_that_fail),
    TEST(long_partitions),
    TEST(calls_on_any_number_of_threads),
    TEST(cuts_where_it_pays),
};

int main(void) { return test_run(tests, TEST_COUNT(tests)); }
