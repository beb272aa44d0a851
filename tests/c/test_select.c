/* test_select.c - the selection of every kernel against brute force, key by key and bit by bit. */
#include "brute_select.h"

/* ---- one problem on all kernels ---- */

typedef struct select_case {
    const char *name;
    int64_t batch, kv_heads, kv_len;
    select_rules rules;
    fdma_tensor score, key_valid;
} select_case;

static fdma_selection select_with(const select_case *test, const char *kernel, int32_t threads) {
    fdma_selection selection = selection_for(test->score);
    fdma_select_args args = {
        .size = sizeof args,
        .score = test->score,
        .key_valid = test->key_valid,
        .selection = &selection,
        .window = test->rules.window,
        .recent = test->rules.recent,
        .sinks = test->rules.sinks,
        .scope = test->rules.scope,
        .gap = test->rules.gap,
        .exec = {.kernel = kernel, .threads = threads},
    };
    CHECK_OK(run_select(&args));
    CHECK_INT(selection.window, test->rules.window);
    CHECK_INT(selection.recent, test->rules.recent);
    CHECK_INT(selection.sinks, test->rules.sinks);
    CHECK(selection.gap == test->rules.gap);
    CHECK_INT(selection.kv_len, test->kv_len);
    // the default is causal scope
    CHECK_INT(selection.scope,
              test->rules.scope == FDMA_SCOPE_GLOBAL ? FDMA_SCOPE_GLOBAL : FDMA_SCOPE_CAUSAL);
    return selection;
}

static fdma_selection brute_force(const select_case *test) {
    fdma_selection want = selection_for(test->score);
    for (int64_t segment = 0; segment < test->batch * test->kv_heads; segment++) {
        const int64_t b = segment / test->kv_heads, at = segment * test->kv_len;
        const uint8_t *valid = test->key_valid.rank > 0
                                   ? (const uint8_t *)test->key_valid.data + b * test->kv_len
                                   : NULL;
        (test->rules.scope == FDMA_SCOPE_CAUSAL ? brute_causal : brute_global)(
            (const float *)test->score.data + at, valid, test->kv_len, &test->rules,
            (int32_t *)want.expiry.data + at, (int32_t *)want.slot.data + at);
        if (test->rules.gap > 0)
            brute_gap((const float *)test->score.data + at, valid, test->kv_len, &test->rules,
                      (int32_t *)want.expiry.data + at, (int32_t *)want.slot.data + at);
    }
    return want;
}

/* Reports the position of the first difference, not only that there is one. */
static void check_keys(const char *what, const select_case *test, const char *kernel,
                       fdma_tensor actual, fdma_tensor want) {
    const int32_t *a = actual.data, *w = want.data;
    int64_t i = 0;
    while (i + 1 < count_of(want) && a[i] == w[i])
        i++;
    test_context(
        "%s, %s of key %d of segment %d: %s, n %d, window %d, recent %d, sinks %d, scope %d, "
        "gap %g",
        kernel, what, (int)(i % test->kv_len), (int)(i / test->kv_len), test->name,
        (int)test->kv_len, (int)test->rules.window, (int)test->rules.recent, (int)test->rules.sinks,
        (int)test->rules.scope, test->rules.gap);
    CHECK_INT(a[i], w[i]);
}

static void check_on_all_kernels(const select_case *test, const kernel_list *kernels,
                                 int32_t threads, const fdma_selection *want) {
    for (int i = 0; i < kernels->count; i++) {
        const fdma_selection got = select_with(test, kernels->name[i], threads);
        check_keys("expiry", test, kernels->name[i], got.expiry, want->expiry);
        check_keys("slot", test, kernels->name[i], got.slot, want->slot);
    }
}

static void fill_scores(select_case *test, score_kind kind, uint64_t *state) {
    test->name = kind_names[kind];
    test->score = new_tensor(FDMA_FLOAT32, test->batch, test->kv_heads, test->kv_len, -1);
    fill_kind(test->score, kind, state);
}

static void fill_padding(select_case *test, uint64_t *state) {
    test->key_valid = new_tensor(FDMA_UINT8, test->batch, test->kv_len, -1, -1);
    for (int64_t i = 0; i < count_of(test->key_valid); i++) {
        const int64_t b = i / test->kv_len, j = i % test->kv_len;
        const int holes = b % 3 == 0 && random_below(state, 3) == 0;
        const int left = b % 3 == 1 && j < test->kv_len / 3;
        const int all = b % 3 == 2;
        ((uint8_t *)test->key_valid.data)[i] = (uint8_t)(holes || left || all ? 0 : 1 + j % 255);
    }
}

/* ---- tests ---- */

static void compare_lengths(fdma_scope scope, int padded) {
    static const int64_t lengths[] = {1, 2, 3, 8, 17, 64, 97};
    const kernel_list kernels = kernels_of("select");
    uint64_t state = 1;
    for (int kind = 0; kind < kind_count; kind++) {
        for (int l = 0; l < TEST_COUNT(lengths); l++) {
            const int64_t n = lengths[l];
            const int64_t windows[] = {1, 2,     n / 3 + 1,      n > 1 ? n - 1 : 1,
                                       n, n + 5, FDMA_WINDOW_ALL};
            for (int w = 0; w < TEST_COUNT(windows); w++) {
                select_case test = {.batch = padded ? 3 : 1,
                                    .kv_heads = 2,
                                    .kv_len = n,
                                    .rules = {.window = windows[w], .scope = scope}};
                fill_scores(&test, (score_kind)kind, &state);
                if (padded)
                    fill_padding(&test, &state);
                const fdma_selection want = brute_force(&test);
                check_on_all_kernels(&test, &kernels, 1, &want);
                test_free_all();
            }
        }
    }
}

static void causal_scope(void) { compare_lengths(FDMA_SCOPE_CAUSAL, 0); }
static void causal_scope_with_padding(void) { compare_lengths(FDMA_SCOPE_CAUSAL, 1); }
static void global_scope(void) { compare_lengths(FDMA_SCOPE_GLOBAL, 0); }
static void global_scope_with_padding(void) { compare_lengths(FDMA_SCOPE_GLOBAL, 1); }

static void newest_keys_and_sinks(void) {
    const int cases = test_repeats(900);
    const kernel_list kernels = kernels_of("select");
    uint64_t state = 7;
    for (int i = 0; i < cases; i++) {
        const int64_t n = 1 + random_below(&state, 60), window = 1 + random_below(&state, n + 3);
        const int64_t recent[] = {0, 1, 2, n - 1, n, n + 4, random_below(&state, n)};
        const int64_t sinks[] = {0, 0, 1, window, random_below(&state, window)};
        const bool is_global = random_below(&state, 5) == 0;
        select_case test = {.batch = 1 + random_below(&state, 3),
                            .kv_heads = 2,
                            .kv_len = n,
                            .rules = {.window = window}};
        test.rules.scope = is_global ? FDMA_SCOPE_GLOBAL : FDMA_SCOPE_CAUSAL;
        test.rules.recent = is_global ? 0 : recent[random_below(&state, TEST_COUNT(recent))];
        test.rules.sinks = sinks[random_below(&state, TEST_COUNT(sinks))];
        fill_scores(&test, (score_kind)random_below(&state, kind_count), &state);
        if (random_below(&state, 2))
            fill_padding(&test, &state);
        const fdma_selection want = brute_force(&test);
        check_on_all_kernels(&test, &kernels, 1, &want);
        test_free_all();
    }
}

static int64_t count_earlier(const select_case *test, const fdma_selection *with_gap) {
    select_case without = *test;
    without.rules.gap = 0;
    const fdma_selection by_window = brute_force(&without);
    const int32_t *const x = with_gap->expiry.data, *const y = by_window.expiry.data;
    int64_t count = 0;
    for (int64_t i = 0; i < count_of(by_window.expiry); i++)
        count += x[i] < y[i];
    return count;
}

/* Gaps of every size with every kind of scores, with and without the other rules. */
static void keys_too_far_below_the_best(void) {
    static const double gaps[] = {1e-45, 0.1, 0.5, 1, 2, 6, 3e38};
    const int cases = test_repeats(900);
    const kernel_list kernels = kernels_of("select");
    uint64_t state = 9;
    int64_t earlier = 0;
    for (int i = 0; i < cases; i++) {
        const int64_t n = 1 + random_below(&state, 60), window = 1 + random_below(&state, n + 3);
        const int64_t windows[] = {window, window, n, FDMA_WINDOW_ALL};
        const int64_t recent[] = {0, 0, 1, 2, n - 1, n + 4, random_below(&state, n)};
        const int64_t sinks[] = {0, 0, 1, window, random_below(&state, window)};
        select_case test = {.batch = 1 + random_below(&state, 3), .kv_heads = 2, .kv_len = n};
        test.rules = (select_rules){.window = windows[random_below(&state, 4)],
                                    .recent = recent[random_below(&state, TEST_COUNT(recent))],
                                    .sinks = sinks[random_below(&state, TEST_COUNT(sinks))],
                                    .scope = FDMA_SCOPE_CAUSAL,
                                    .gap = gaps[random_below(&state, TEST_COUNT(gaps))]};
        if (test.rules.sinks > test.rules.window)
            test.rules.sinks = test.rules.window;
        fill_scores(&test, (score_kind)random_below(&state, kind_count), &state);
        if (random_below(&state, 2))
            fill_padding(&test, &state);
        const fdma_selection want = brute_force(&test);
        earlier += count_earlier(&test, &want);
        check_on_all_kernels(&test, &kernels, 1 + i % 3, &want);
        test_free_all();
    }
    CHECK(earlier > cases);
}

/* A caller whose version of the selection has no gap gets one without a gap. */
static void selections_of_callers_without_gap(void) {
    select_case test = {.batch = 1, .kv_heads = 1, .kv_len = 9, .rules = {.window = 4}};
    uint64_t state = 10;
    fill_scores(&test, kind_iid, &state);
    fdma_selection selection = selection_for(test.score);
    fdma_select_args args = {
        .size = sizeof args, .score = test.score, .selection = &selection, .window = 4};
    selection.size = offsetof(fdma_selection, gap);
    selection.gap = 77;
    CHECK_OK(run_select(&args));
    CHECK(selection.gap == 77); // not a field of their version
    args.gap = 1;
    CHECK_INT(fdma_select(&args), FDMA_INVALID_ARGUMENT);
    CHECK(strstr(fdma_last_error(), "want sizeof the struct") != NULL);
    selection.size = sizeof selection;
    CHECK_OK(run_select(&args));
    CHECK(selection.gap == 1);
    args.gap = 0;
    CHECK_OK(run_select(&args));
    CHECK(selection.gap == 0);
}

/* A window, or recent, that is at least the length keeps every key to the end. */
static void rules_that_keep_all(void) {
    const select_rules rules[] = {
        {FDMA_WINDOW_ALL, 5, 3, FDMA_SCOPE_CAUSAL, 0},
        {FDMA_WINDOW_ALL, INT64_MAX, FDMA_WINDOW_ALL, FDMA_SCOPE_CAUSAL, 0},
        {1, INT64_MAX, 1, FDMA_SCOPE_CAUSAL, 0},
        {20, 20, 0, FDMA_SCOPE_CAUSAL, 0}};
    const kernel_list kernels = kernels_of("select");
    uint64_t state = 8;
    for (int r = 0; r < TEST_COUNT(rules); r++) {
        select_case test = {.batch = 1, .kv_heads = 1, .kv_len = 40, .rules = rules[r]};
        fill_scores(&test, kind_iid, &state);
        for (int i = 0; i < kernels.count; i++) {
            const fdma_selection got = select_with(&test, kernels.name[i], 1);
            for (int32_t j = 0; j < 40; j++) {
                CHECK_INT(((int32_t *)got.expiry.data)[j], 40);
                CHECK_INT(((int32_t *)got.slot.data)[j], j);
            }
        }
    }
}

static void longer_sequences(void) {
    const kernel_list kernels = kernels_of("select");
    uint64_t state = 2;
    for (int kind = 0; kind < kind_count; kind++) {
        select_case test = {
            .batch = 1,
            .kv_heads = 2,
            .kv_len = 601,
            .rules = {.window = 100, .scope = kind % 2 ? FDMA_SCOPE_GLOBAL : FDMA_SCOPE_CAUSAL}};
        fill_scores(&test, (score_kind)kind, &state);
        const fdma_selection want = brute_force(&test);
        check_on_all_kernels(&test, &kernels, 1, &want);
        check_on_all_kernels(&test, &kernels, 3, &want);
        test_free_all();
    }
}

/* At every position the live keys are in different slots, all below `window`. */
static void slots_hold_one_key_at_a_time(void) {
    const kernel_list kernels = kernels_of("select");
    uint64_t state = 3;
    for (int i = 0; i < kernels.count; i++) {
        test_context("%s", kernels.name[i]);
        select_case test = {
            .batch = 1, .kv_heads = 1, .kv_len = 400, .rules = {37, 0, 0, FDMA_SCOPE_CAUSAL, 0}};
        fill_scores(&test, kind_iid, &state);
        const fdma_selection got = select_with(&test, kernels.name[i], 0);
        const int32_t *expiry = got.expiry.data, *slot = got.slot.data;
        for (int32_t p = 0; p < test.kv_len; p++) {
            uint8_t taken[37] = {0};
            int live = 0;
            for (int32_t j = 0; j <= p; j++) {
                if (p < expiry[j]) {
                    live++;
                    CHECK(slot[j] >= 0 && slot[j] < 37 && !taken[slot[j]]++);
                }
            }
            CHECK_INT(live, p < 37 ? p + 1 : 37);
        }
        test_free_all();
    }
}

static void strided_tensors(void) {
    enum { gap = 13 };
    const kernel_list kernels = kernels_of("select");
    uint64_t state = 4;
    select_case test = {
        .batch = 2, .kv_heads = 3, .kv_len = 50, .rules = {9, 0, 0, FDMA_SCOPE_CAUSAL, 0}};
    fill_scores(&test, kind_few_values, &state);
    const fdma_selection want = brute_force(&test);
    for (int i = 0; i < kernels.count; i++) {
        fdma_selection got = selection_for(test.score);
        got.expiry = with_gaps(got.expiry, gap);
        fdma_select_args args = {.size = sizeof args,
                                 .score = with_gaps(test.score, gap),
                                 .selection = &got,
                                 .window = test.rules.window,
                                 .exec = {.kernel = kernels.name[i]}};
        test_context("%s", kernels.name[i]);
        CHECK_OK(run_select(&args));
        check_gapped(got.expiry, want.expiry, gap);
        check_keys("slot", &test, kernels.name[i], got.slot, want.slot);
    }
}

static void without_slots(void) {
    const kernel_list kernels = kernels_of("select");
    uint64_t state = 5;
    for (int scope = FDMA_SCOPE_CAUSAL; scope <= FDMA_SCOPE_GLOBAL; scope++) {
        select_case test = {
            .batch = 1, .kv_heads = 1, .kv_len = 80, .rules = {11, 0, 2, (fdma_scope)scope, 0}};
        test.rules.recent = scope == FDMA_SCOPE_CAUSAL ? 6 : 0;
        fill_scores(&test, kind_iid, &state);
        const fdma_selection want = brute_force(&test);
        for (int i = 0; i < kernels.count; i++) {
            fdma_selection got = selection_for(test.score);
            got.slot = (fdma_tensor){0};
            fdma_select_args args = {.size = sizeof args,
                                     .score = test.score,
                                     .selection = &got,
                                     .window = 11,
                                     .recent = test.rules.recent,
                                     .sinks = test.rules.sinks,
                                     .scope = (fdma_scope)scope,
                                     .exec = {.kernel = kernels.name[i]}};
            CHECK_OK(run_select(&args));
            check_keys("expiry", &test, kernels.name[i], got.expiry, want.expiry);
        }
    }
}

static void invalid_scores_do_not_matter(void) {
    const kernel_list kernels = kernels_of("select");
    uint64_t state = 6;
    select_case test = {
        .batch = 3, .kv_heads = 1, .kv_len = 90, .rules = {20, 0, 0, FDMA_SCOPE_CAUSAL, 0}};
    fill_scores(&test, kind_iid, &state);
    fill_padding(&test, &state);
    const fdma_selection want = brute_force(&test);
    int replaced = 0;
    for (int64_t i = 0; i < count_of(test.score); i++) {
        if (!((const uint8_t *)test.key_valid.data)[i]) {
            ((float *)test.score.data)[i] = i % 2 ? INFINITY : NAN;
            replaced++;
        }
    }
    CHECK(replaced > 0);
    check_on_all_kernels(&test, &kernels, 1, &want);
}

static void no_keys(void) {
    const kernel_list kernels = kernels_of("select");
    const int64_t sizes[][3] = {{1, 1, 0}, {0, 2, 9}, {3, 1, 0}};
    for (int i = 0; i < kernels.count; i++) {
        for (int s = 0; s < TEST_COUNT(sizes); s++) {
            select_case test = {.batch = sizes[s][0],
                                .kv_heads = sizes[s][1],
                                .kv_len = sizes[s][2],
                                .rules = {.window = 4}};
            test.score = new_tensor(FDMA_FLOAT32, test.batch, test.kv_heads, test.kv_len, -1);
            select_with(&test, kernels.name[i], 0);
        }
    }
}

static const test_entry tests[] = {
    TEST(causal_scope),
    TEST(causal_scope_with_padding),
    TEST(global_scope),
    TEST(global_scope_with_padding),
    TEST(newest_keys_and_sinks),
    TEST(keys_too_far_below_the_best),
    TEST(selections_of_callers_without_gap),
    TEST(rules_that_keep_all),
    TEST(longer_sequences),
    TEST(slots_hold_one_key_at_a_time),
    TEST(strided_tensors),
    TEST(without_slots),
    TEST(invalid_scores_do_not_matter),
    TEST(no_keys),
};

int main(void) { return test_run(tests, TEST_COUNT(tests)); }
