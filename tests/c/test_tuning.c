/* test_tuning.c - calls that follow a tuning make its choices, their results are within the usual
 * tolerance of the reference, and their workspace suffices when the tuning changes. */
#include "scores.h"
#include "tunings.h"

#include "cpu/parallel.h"

static const problem long_one = SIZES(2, 700, 760, 4, 2, 40, 90, 1);
static const problem few_rows = SIZES(2, 3, 3000, 4, 2, 40, 700, 1);

static size_t workspace_of(const fdma_forward_args *args) {
    size_t bytes = 0;
    CHECK_OK(fdma_forward_workspace(args, &bytes));
    return bytes;
}

static const char *kernel_of(const fdma_forward_args *args) {
    const char *name = "";
    CHECK_OK(fdma_forward_kernel(args, &name));
    return name;
}

static tuning_class class_of(const problem *x) {
    const fdma_forward_args args = problem_args(x, NULL);
    return class_of_call(operation_forward, &args);
}

/* Another CPU kernel that runs the call, if there is one: scalar kernels run everywhere. */
static void choose_other_kernel(tuning_choice *choice) {
    snprintf(choice->kernel, sizeof choice->kernel, "%s", "cpu/scalar/tile");
}

/* ---- choices take effect ---- */

static void entries_name_the_kernel(void) {
    const problem x = new_problem(&few_rows, FDMA_FLOAT32, 5);
    const fdma_forward_args args = problem_args(&x, NULL);
    tuning_choice choice = {.kernel = ""};
    const char *const rules = kernel_of(&args);
    CHECK(strstr(rules, "/decode") != NULL);
    choose_other_kernel(&choice);
    tune_class(class_of(&x), choice);
    CHECK(strcmp(kernel_of(&args), "cpu/scalar/tile") == 0);
    CHECK_OK(fdma_tuning_load(NULL));
    CHECK(strcmp(kernel_of(&args), rules) == 0);
}

/* A class that differs in any field has no entry, so its calls follow the rules. */
static void other_classes_follow_the_rules(void) {
    const problem x = new_problem(&few_rows, FDMA_FLOAT32, 5);
    const fdma_forward_args args = problem_args(&x, NULL);
    const tuning_class calls = class_of(&x);
    const char *const rules = kernel_of(&args);
    tuning_class others[7];
    tuning_choice choice = {.kernel = ""};
    choose_other_kernel(&choice);
    for (int n = 0; n < TEST_COUNT(others); n++)
        others[n] = calls;
    others[0].operation = operation_backward;
    others[1].dtype = FDMA_FLOAT16;
    others[2].causal = 0;
    others[3].head_dim = 48;
    others[4].rows *= 2;
    others[5].keys *= 2;
    others[6].kept *= 2;
    for (int n = 0; n < TEST_COUNT(others); n++) {
        test_context("%d", n);
        tune_class(others[n], choice);
        CHECK(strcmp(kernel_of(&args), rules) == 0);
    }
    tune_class(calls, choice);
    CHECK(strcmp(kernel_of(&args), choice.kernel) == 0);
    CHECK_OK(fdma_tuning_load(NULL));
}

/* If a kernel does not take a call with more rows than decode takes, the rules choose one. */
static void kernels_may_refuse(void) {
    const problem x = new_problem(&long_one, FDMA_FLOAT32, 5);
    const fdma_forward_args args = problem_args(&x, NULL);
    const char *const rules = kernel_of(&args);
    tune_class(class_of(&x), (tuning_choice){.kernel = "cpu/scalar/decode"});
    CHECK(strcmp(kernel_of(&args), rules) == 0);
    CHECK_OK(fdma_tuning_load(NULL));
}

/* The size of the workspace shows the plan: it holds a tile for each thread, and a partial result
 * for each split. */
static void entries_change_the_plan(void) {
    const problem tiles = new_problem(&long_one, FDMA_FLOAT32, 5);
    const problem splits = new_problem(&few_rows, FDMA_FLOAT32, 5);
    fdma_forward_args many = problem_args(&tiles, NULL), few = problem_args(&splits, NULL);
    const size_t tile_bytes = workspace_of(&many), split_bytes = workspace_of(&few);
    tune_class(class_of(&tiles), (tuning_choice){.tile_rows = 65536});
    CHECK(workspace_of(&many) >= tile_bytes);
    CHECK_INT(workspace_of(&few), split_bytes);
    tune_class(class_of(&splits), (tuning_choice){.split_keys = 100});
    CHECK(workspace_of(&few) > split_bytes);
    CHECK_INT(workspace_of(&many), tile_bytes);
    few.exec.threads = 4;
    CHECK_OK(fdma_tuning_load(NULL));
    const size_t rules = workspace_of(&few);
    tune_class(class_of(&splits), (tuning_choice){.thread_work = 1});
    CHECK(fdma_thread_count(4, 4) == 1 || workspace_of(&few) > rules);
    CHECK_OK(fdma_tuning_load(NULL));
}

/* Calls that force a kernel, have a mask or use dropout were not measured. */
static void other_calls_follow_the_rules(void) {
    const problem x = new_problem(&few_rows, FDMA_FLOAT32, 5);
    fdma_forward_args args = problem_args(&x, "cpu"), drops = problem_args(&x, NULL);
    fdma_forward_args masked = problem_args(&x, NULL);
    tuning_choice choice = {.kernel = ""};
    masked.attn_mask = new_tensor(FDMA_UINT8, 1, 1, 1, x.kv_len);
    drops.dropout = 0.5;
    const char *const forced = kernel_of(&args), *const with_mask = kernel_of(&masked);
    const char *const dropping = kernel_of(&drops);
    choose_other_kernel(&choice);
    tune_class(class_of(&x), choice);
    CHECK(strcmp(kernel_of(&args), forced) == 0);
    CHECK(strcmp(kernel_of(&masked), with_mask) == 0 || strcmp(with_mask, choice.kernel) == 0);
    CHECK(strcmp(kernel_of(&drops), dropping) == 0 || strcmp(dropping, choice.kernel) == 0);
    CHECK_OK(fdma_tuning_load(NULL));
}

/* The attention step of a fused call has the same class as the call alone. */
static void fused_calls_follow(void) {
    problem x = new_problem(&few_rows, FDMA_FLOAT32, 5);
    fdma_selection made = selection_for(x.score);
    fdma_attention_args args = {.size = sizeof args, .window = x.window, .causal = 1};
    fdma_attention_kernels names = {.size = sizeof names};
    tuning_choice choice = {.kernel = ""};
    args.q = x.q, args.k = x.k, args.v = x.v;
    args.dt_proj = new_tensor(FDMA_FLOAT32, 2, 80, -1, -1);
    args.a = new_tensor(FDMA_FLOAT32, 2, -1, -1, -1);
    args.out = new_output(x.dtype, x.batch, x.q_len, x.q_heads, x.head_dim);
    args.selection = &made;
    choose_other_kernel(&choice);
    tune_class(class_of(&x), choice);
    CHECK_OK(fdma_attention_kernel(&args, &names));
    CHECK(strcmp(names.forward, "cpu/scalar/tile") == 0);
    CHECK_OK(run_attention(&args));
    CHECK_OK(fdma_tuning_load(NULL));
}

/* ---- results ---- */

/* The results of a choice are near the reference's, and the same for any number of threads and
 * batch. */
static void check_forward(const problem *x, tuning_choice choice, attended want) {
    tune_class(class_of(x), choice);
    test_context("%s", fdma_tuning_line(0));
    const attended one = problem_attend(x, NULL, 1);
    check_close_results(x, one, want);
    check_same_results(problem_attend(x, NULL, 4), one);
    const problem last = last_problem(x);
    check_same_results(problem_attend(&last, NULL, 1),
                       (attended){last_of(one.out), last_of(one.lse)});
}

static void check_forward_choices(const problem *sizes, fdma_dtype dtype) {
    static const int64_t sets[][3] = {
        {1, 1, 1}, {64, 100, 0}, {100, 256, 10}, {0, 4096, 50}, {65536, 1 << 30, 1000000}};
    const problem x = new_problem(sizes, dtype, 5);
    const attended want = problem_attend(&x, "reference", 1);
    const kernel_list kernels = kernels_for("forward", dtype);
    for (int kernel = 0; kernel < kernels.count; kernel++)
        for (int n = 0; n < TEST_COUNT(sets); n++) {
            tuning_choice choice = {
                .tile_rows = sets[n][0], .split_keys = sets[n][1], .thread_work = sets[n][2]};
            if (strncmp(kernels.name[kernel], "cpu/", 4) == 0)
                snprintf(choice.kernel, sizeof choice.kernel, "%s", kernels.name[kernel]);
            check_forward(&x, choice, want);
        }
    CHECK_OK(fdma_tuning_load(NULL));
}

static void forward_agrees_with_the_reference(void) {
    for (int type = 0; type < test_dtype_count; type++) {
        check_forward_choices(&long_one, test_dtypes[type]);
        test_free_all();
        check_forward_choices(&few_rows, test_dtypes[type]);
        test_free_all();
    }
}

static void check_backward_choices(fdma_dtype dtype) {
    static const problem sizes = SIZES(2, 300, 330, 4, 2, 40, 50, 1);
    static const int64_t tile_rows[] = {1, 64, 100, 200, 65536};
    const problem x = new_problem(&sizes, dtype, 5);
    const gradient_problem p = gradient_of(&x, 1);
    const fdma_backward_args args = gradient_args(&p, NULL);
    const tuning_class calls = class_of_call(operation_backward, &args);
    const kernel_list kernels = kernels_for("backward", dtype);
    for (int kernel = 0; kernel < kernels.count; kernel++)
        for (int n = 0; n < TEST_COUNT(tile_rows); n++) {
            tuning_choice choice = {.tile_rows = tile_rows[n], .thread_work = n};
            if (strncmp(kernels.name[kernel], "cpu/", 4) == 0)
                snprintf(choice.kernel, sizeof choice.kernel, "%s", kernels.name[kernel]);
            tune_class(calls, choice);
            test_context("%s", fdma_tuning_line(0));
            const gradients one = gradient_run(&p, NULL, 1);
            check_expected(&p, one);
            check_same_gradients(gradient_run(&p, NULL, 4), one);
        }
    CHECK_OK(fdma_tuning_load(NULL));
}

static void backward_agrees_with_the_reference(void) {
    for (int type = 0; type < test_dtype_count; type++) {
        check_backward_choices(test_dtypes[type]);
        test_free_all();
    }
}

/* ---- workspace ---- */

/* Puts the choice into a tuning of this thread's calls, for all classes of fewer keys than the call
 * has and of at most as many rows. The call as a whole follows the rules. */
static fdma_tuning *try_smaller_classes(fdma_operation operation, const void *args,
                                        tuning_choice choice) {
    enum { room = 4096 };
    const tuning_class most = class_of_call(operation, args);
    fdma_tuning *tuning;
    CHECK_OK(fdma_new_tuning(room, &tuning));
    for (int64_t rows = 1; rows <= 2 * most.rows; rows *= 2)
        for (int64_t keys = 1; keys < most.keys; keys *= 2)
            for (int64_t kept = 1; kept <= keys && tuning->count < room; kept *= 2) {
                tuning_class calls = most;
                calls.rows = rows, calls.keys = keys, calls.kept = kept;
                tuning->entries[tuning->count++] = entry_of(calls, choice);
            }
    CHECK(tuning->count < room);
    fdma_try_tuning(tuning);
    return tuning;
}

static void end_tuning(fdma_tuning *tuning) {
    fdma_try_tuning(NULL);
    free(tuning);
}

/* Sequences of many lengths, in a workspace whose size was asked for without data. The calls follow
 * the tuning in it, and give the results of a far larger workspace. */
static void check_lengths(const problem *x, tuning_choice choice) {
    fdma_forward_args args = problem_args(x, NULL), large = problem_args(x, NULL);
    fdma_forward_args asked = args;
    fdma_tuning *const tuning = try_smaller_classes(operation_forward, &args, choice);
    asked.kv_used.data = asked.starts.data = NULL;
    const size_t bytes = workspace_of(&asked);
    exec_alloc(&args.exec, bytes);
    exec_alloc(&large.exec, 64 * bytes + 100000);
    CHECK_OK(fdma_forward(&args));
    CHECK_OK(fdma_forward(&large));
    CHECK(same_tensor(args.out, large.out));
    end_tuning(tuning);
    check_close_results(x, (attended){args.out, args.lse}, problem_attend(x, "reference", 1));
}

static void check_all_lengths(const problem *sizes, const int32_t *used) {
    static const int64_t tile_rows[] = {1, 100, 65536};
    for (int n = 0; n < TEST_COUNT(tile_rows); n++) {
        problem x = *sizes;
        const tuning_choice choice = {.tile_rows = tile_rows[n], .split_keys = 64 << 2 * n};
        x.dtype = FDMA_FLOAT32;
        x.kv_used = new_tensor(FDMA_INT32, x.batch, -1, -1, -1);
        memcpy(x.kv_used.data, used, bytes_of(x.kv_used));
        problem_fill(&x, 6);
        problem_select(&x);
        check_lengths(&x, choice);
        test_free_all();
    }
}

static void workspace_suffices_for_every_length(void) {
    static const int32_t used[] = {700, 1500, 1};
    static const problem many = SIZES(3, 300, 1500, 2, 1, 16, 40, 1);
    static const problem few = SIZES(3, 2, 1500, 2, 1, 16, 400, 1);
    check_all_lengths(&many, used);
    check_all_lengths(&few, used);
}

/* The gradients of packed sequences, in a workspace whose size was asked for without `starts`. */
static void backward_workspace_suffices(void) {
    static const int32_t starts[] = {0, 3, 900, 905, 1500};
    static const int64_t tile_rows[] = {1, 100, 65536};
    static const problem sizes = SIZES(1, 1500, 1500, 2, 1, 16, 40, 1);
    for (int n = 0; n < TEST_COUNT(tile_rows); n++) {
        problem x = sizes;
        x.dtype = FDMA_FLOAT32;
        x.starts = new_tensor(FDMA_INT32, TEST_COUNT(starts), -1, -1, -1);
        memcpy(x.starts.data, starts, sizeof starts);
        problem_fill(&x, 6);
        problem_select(&x);
        const gradient_problem p = gradient_of(&x, 0);
        fdma_backward_args args = gradient_args(&p, NULL), large = gradient_args(&p, NULL);
        size_t bytes = 0;
        fdma_tuning *const tuning = try_smaller_classes(operation_backward, &args,
                                                        (tuning_choice){.tile_rows = tile_rows[n]});
        fdma_backward_args asked = args;
        asked.starts.data = NULL;
        CHECK_OK(fdma_backward_workspace(&asked, &bytes));
        exec_alloc(&args.exec, bytes);
        exec_alloc(&large.exec, 64 * bytes);
        CHECK_OK(fdma_backward(&args));
        CHECK_OK(fdma_backward(&large));
        check_same_gradients(gradient_outputs(&args), gradient_outputs(&large));
        check_expected(&p, gradient_outputs(&args));
        end_tuning(tuning);
        test_free_all();
    }
}

/* A workspace sized before a change of the tuning suffices. If it is too small for the choices, the
 * call follows the rules. */
static void check_change(const problem *x, tuning_choice choice, attended rules) {
    fdma_forward_args before = problem_args(x, NULL), after = problem_args(x, NULL);
    const size_t bytes = workspace_of(&before);
    exec_alloc(&before.exec, bytes);
    tune_class(class_of(x), choice);
    const attended tuned = problem_attend(x, NULL, 1);
    CHECK(!same_tensor(tuned.out, rules.out)); /* else the test shows nothing */
    CHECK_OK(fdma_forward(&before));
    const attended got = {before.out, before.lse};
    check_same_results(got, choice.split_keys < 512 ? rules : tuned);
    exec_alloc(&after.exec, workspace_of(&after));
    CHECK_OK(fdma_tuning_load(NULL));
    CHECK_OK(fdma_forward(&after));
    check_same_results((attended){after.out, after.lse}, rules);
    after.exec.workspace_size = bytes - 1;
    CHECK_INT(fdma_forward(&after), FDMA_WORKSPACE_TOO_SMALL);
}

static void workspace_outlives_the_tuning(void) {
    const problem x = new_problem(&few_rows, FDMA_FLOAT32, 5);
    const attended rules = problem_attend(&x, NULL, 1);
    check_change(&x, (tuning_choice){.split_keys = 64}, rules);   /* needs more than the rules */
    check_change(&x, (tuning_choice){.split_keys = 4096}, rules); /* needs less */
}

static const test_entry tests[] = {
    TEST(entries_name_the_kernel),
    TEST(other_classes_follow_the_rules),
    TEST(kernels_may_refuse),
    TEST(entries_change_the_plan),
    TEST(other_calls_follow_the_rules),
    TEST(fused_calls_follow),
    TEST(forward_agrees_with_the_reference),
    TEST(backward_agrees_with_the_reference),
    TEST(workspace_suffices_for_every_length),
    TEST(backward_workspace_suffices),
    TEST(workspace_outlives_the_tuning),
};

int main(void) { return test_run(tests, TEST_COUNT(tests)); }
