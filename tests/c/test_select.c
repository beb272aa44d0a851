/* test_select.c - the selection of every kernel against brute force, key by key and bit by bit. */
#include "brute.h"
#include "scores.h"

static fdma_selection select_with(const problem *x, const char *kernel, int32_t threads) {
    fdma_selection selection = selection_for(x->score);
    fdma_select_args args = select_args(x, &selection, kernel);
    args.exec.threads = threads;
    CHECK_OK(run_select(&args));
    CHECK_INT(selection.window, x->window);
    CHECK_INT(selection.recent, x->recent);
    CHECK_INT(selection.sinks, x->sinks);
    CHECK(selection.gap == x->gap);
    CHECK_INT(selection.kv_len, x->kv_len);
    // the default is causal scope
    CHECK_INT(selection.scope,
              x->scope == FDMA_SCOPE_GLOBAL ? FDMA_SCOPE_GLOBAL : FDMA_SCOPE_CAUSAL);
    return selection;
}

/* Reports the position of the first difference, not only that there is one. */
static void check_keys(const char *what, const problem *x, const char *kernel, fdma_tensor actual,
                       fdma_tensor want) {
    const int32_t *a = actual.data, *w = want.data;
    int64_t i = 0;
    while (i + 1 < count_of(want) && a[i] == w[i])
        i++;
    test_context("%s, %s of key %d of segment %d: n %d, window %d, recent %d, sinks %d, scope %d, "
                 "gap %g",
                 kernel, what, (int)(i % x->kv_len), (int)(i / x->kv_len), (int)x->kv_len,
                 (int)x->window, (int)x->recent, (int)x->sinks, (int)x->scope, x->gap);
    CHECK_INT(a[i], w[i]);
}

static void check_on_all_kernels(const problem *x, int32_t threads, const fdma_selection *want) {
    const kernel_list kernels = kernels_of("select");
    for (int i = 0; i < kernels.count; i++) {
        const fdma_selection got = select_with(x, kernels.name[i], threads);
        check_keys("expiry", x, kernels.name[i], got.expiry, want->expiry);
        check_keys("slot", x, kernels.name[i], got.slot, want->slot);
    }
}

static void fill_padding(problem *x, uint64_t *state) {
    x->key_valid = new_tensor(FDMA_UINT8, x->batch, x->kv_len, -1, -1);
    for (int64_t i = 0; i < count_of(x->key_valid); i++) {
        const int64_t b = i / x->kv_len, j = i % x->kv_len;
        const int holes = b % 3 == 0 && random_below(state, 3) == 0;
        const int left = b % 3 == 1 && j < x->kv_len / 3;
        const int all = b % 3 == 2;
        ((uint8_t *)x->key_valid.data)[i] = (uint8_t)(holes || left || all ? 0 : 1 + j % 255);
    }
}

/* A problem with these sizes and rules: scores of a kind, and padding or none. */
static problem scored(problem sizes, score_kind kind, bool padded, uint64_t *state) {
    sizes.score = new_tensor(FDMA_FLOAT32, sizes.batch, sizes.kv_heads, sizes.kv_len, -1);
    fill_kind(sizes.score, kind, state);
    if (padded)
        fill_padding(&sizes, state);
    return sizes;
}

static void compare_lengths(fdma_scope scope, bool padded) {
    static const int64_t lengths[] = {1, 2, 3, 8, 17, 64, 97};
    uint64_t state = 1;
    for (int kind = 0; kind < kind_count; kind++) {
        for (int l = 0; l < TEST_COUNT(lengths); l++) {
            const int64_t n = lengths[l];
            const int64_t windows[] = {1, 2,     n / 3 + 1,      n > 1 ? n - 1 : 1,
                                       n, n + 5, FDMA_WINDOW_ALL};
            for (int w = 0; w < TEST_COUNT(windows); w++) {
                const problem sizes = {.batch = padded ? 3 : 1,
                                       .kv_heads = 2,
                                       .kv_len = n,
                                       .window = windows[w],
                                       .scope = scope};
                const problem x = scored(sizes, (score_kind)kind, padded, &state);
                const fdma_selection want = brute_selection(&x);
                check_on_all_kernels(&x, 1, &want);
                test_free_all();
            }
        }
    }
}

static void causal_scope(void) { compare_lengths(FDMA_SCOPE_CAUSAL, false); }
static void causal_scope_with_padding(void) { compare_lengths(FDMA_SCOPE_CAUSAL, true); }
static void global_scope(void) { compare_lengths(FDMA_SCOPE_GLOBAL, false); }
static void global_scope_with_padding(void) { compare_lengths(FDMA_SCOPE_GLOBAL, true); }

/* Random windows, newest keys and sinks. */
static problem random_rules(uint64_t *state) {
    const int64_t n = 1 + random_below(state, 60), window = 1 + random_below(state, n + 3);
    const int64_t recent[] = {0, 0, 1, 2, n - 1, n, n + 4, random_below(state, n)};
    const int64_t sinks[] = {0, 0, 1, window, random_below(state, window)};
    return (problem){.batch = 1 + random_below(state, 3),
                     .kv_heads = 2,
                     .kv_len = n,
                     .window = window,
                     .recent = recent[random_below(state, TEST_COUNT(recent))],
                     .sinks = sinks[random_below(state, TEST_COUNT(sinks))],
                     .scope = FDMA_SCOPE_CAUSAL};
}

static problem random_scores(problem sizes, uint64_t *state) {
    const score_kind kind = (score_kind)random_below(state, kind_count);
    return scored(sizes, kind, random_below(state, 2), state);
}

static void newest_keys_and_sinks(void) {
    const int cases = test_repeats(900);
    uint64_t state = 7;
    for (int i = 0; i < cases; i++) {
        problem sizes = random_rules(&state);
        if (random_below(&state, 5) == 0)
            sizes.scope = FDMA_SCOPE_GLOBAL, sizes.recent = 0;
        const problem x = random_scores(sizes, &state);
        const fdma_selection want = brute_selection(&x);
        check_on_all_kernels(&x, 1, &want);
        test_free_all();
    }
}

static int64_t count_earlier(const problem *x, const fdma_selection *with_gap) {
    problem without = *x;
    without.gap = 0;
    const fdma_selection by_window = brute_selection(&without);
    const int32_t *const earlier = with_gap->expiry.data, *const later = by_window.expiry.data;
    int64_t count = 0;
    for (int64_t i = 0; i < count_of(by_window.expiry); i++)
        count += earlier[i] < later[i];
    return count;
}

/* Gaps of every size with every kind of scores, with and without the other rules. */
static void keys_too_far_below_the_best(void) {
    static const double gaps[] = {1e-45, 0.1, 0.5, 1, 2, 6, 3e38};
    const int cases = test_repeats(900);
    uint64_t state = 9;
    int64_t earlier = 0;
    for (int i = 0; i < cases; i++) {
        problem sizes = random_rules(&state);
        const int64_t windows[] = {sizes.window, sizes.window, sizes.kv_len, FDMA_WINDOW_ALL};
        sizes.window = windows[random_below(&state, TEST_COUNT(windows))];
        sizes.sinks = lesser(sizes.sinks, sizes.window);
        sizes.gap = gaps[random_below(&state, TEST_COUNT(gaps))];
        const problem x = random_scores(sizes, &state);
        const fdma_selection want = brute_selection(&x);
        earlier += count_earlier(&x, &want);
        check_on_all_kernels(&x, 1 + i % 3, &want);
        test_free_all();
    }
    CHECK(earlier > cases);
}

/* A caller whose version of the selection has no gap gets one without a gap. */
static void selections_of_callers_without_gap(void) {
    const problem sizes = {.batch = 1, .kv_heads = 1, .kv_len = 9, .window = 4};
    uint64_t state = 10;
    const problem x = scored(sizes, kind_iid, false, &state);
    fdma_selection selection = selection_for(x.score);
    fdma_select_args args = select_args(&x, &selection, NULL);
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
static void rules_that_keep_all(const char *kernel) {
    static const int64_t rules[][3] = {/* window, recent, sinks */
                                       {FDMA_WINDOW_ALL, 5, 3},
                                       {FDMA_WINDOW_ALL, INT64_MAX, FDMA_WINDOW_ALL},
                                       {1, INT64_MAX, 1},
                                       {20, 20, 0}};
    uint64_t state = 8;
    for (int r = 0; r < TEST_COUNT(rules); r++) {
        const problem sizes = {.batch = 1,
                               .kv_heads = 1,
                               .kv_len = 40,
                               .window = rules[r][0],
                               .recent = rules[r][1],
                               .sinks = rules[r][2],
                               .scope = FDMA_SCOPE_CAUSAL};
        const problem x = scored(sizes, kind_iid, false, &state);
        const fdma_selection got = select_with(&x, kernel, 1);
        for (int32_t j = 0; j < 40; j++) {
            CHECK_INT(((int32_t *)got.expiry.data)[j], 40);
            CHECK_INT(((int32_t *)got.slot.data)[j], j);
        }
    }
}

static void longer_sequences(void) {
    uint64_t state = 2;
    for (int kind = 0; kind < kind_count; kind++) {
        const problem sizes = {.batch = 1,
                               .kv_heads = 2,
                               .kv_len = 601,
                               .window = 100,
                               .scope = kind % 2 ? FDMA_SCOPE_GLOBAL : FDMA_SCOPE_CAUSAL};
        const problem x = scored(sizes, (score_kind)kind, false, &state);
        const fdma_selection want = brute_selection(&x);
        check_on_all_kernels(&x, 1, &want);
        check_on_all_kernels(&x, 3, &want);
        test_free_all();
    }
}

/* At every position the live keys are in different slots, all below `window`. */
static void slots_hold_one_key_at_a_time(const char *kernel) {
    const problem sizes = {.batch = 1, .kv_heads = 1, .kv_len = 400, .window = 37};
    uint64_t state = 3;
    const problem x = scored(sizes, kind_iid, false, &state);
    const fdma_selection got = select_with(&x, kernel, 0);
    const int32_t *expiry = got.expiry.data, *slot = got.slot.data;
    for (int32_t p = 0; p < x.kv_len; p++) {
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
}

static void strided_tensors(const char *kernel) {
    enum { gap = 13 };
    const problem sizes = {.batch = 2, .kv_heads = 3, .kv_len = 50, .window = 9};
    uint64_t state = 4;
    const problem x = scored(sizes, kind_few_values, false, &state);
    const fdma_selection want = brute_selection(&x);
    fdma_selection got = selection_for(x.score);
    got.expiry = with_gaps(got.expiry, gap);
    fdma_select_args args = select_args(&x, &got, kernel);
    args.score = with_gaps(x.score, gap);
    CHECK_OK(run_select(&args));
    check_gapped(got.expiry, want.expiry, gap);
    check_keys("slot", &x, kernel, got.slot, want.slot);
}

static void without_slots(const char *kernel) {
    for (int scope = FDMA_SCOPE_CAUSAL; scope <= FDMA_SCOPE_GLOBAL; scope++) {
        const problem sizes = {.batch = 1,
                               .kv_heads = 1,
                               .kv_len = 80,
                               .window = 11,
                               .recent = scope == FDMA_SCOPE_CAUSAL ? 6 : 0,
                               .sinks = 2,
                               .scope = (fdma_scope)scope};
        uint64_t state = 5;
        const problem x = scored(sizes, kind_iid, false, &state);
        const fdma_selection want = brute_selection(&x);
        fdma_selection got = selection_for(x.score);
        got.slot = (fdma_tensor){0};
        fdma_select_args args = select_args(&x, &got, kernel);
        CHECK_OK(run_select(&args));
        check_keys("expiry", &x, kernel, got.expiry, want.expiry);
    }
}

static void invalid_scores_do_not_matter(void) {
    const problem sizes = {.batch = 3, .kv_heads = 1, .kv_len = 90, .window = 20};
    uint64_t state = 6;
    const problem x = scored(sizes, kind_iid, true, &state);
    const fdma_selection want = brute_selection(&x);
    int replaced = 0;
    for (int64_t i = 0; i < count_of(x.score); i++) {
        if (!((const uint8_t *)x.key_valid.data)[i]) {
            ((float *)x.score.data)[i] = i % 2 ? INFINITY : NAN;
            replaced++;
        }
    }
    CHECK(replaced > 0);
    check_on_all_kernels(&x, 1, &want);
}

static void no_keys(const char *kernel) {
    static const int64_t sizes[][3] = {{1, 1, 0}, {0, 2, 9}, {3, 1, 0}};
    uint64_t state = 1;
    for (int s = 0; s < TEST_COUNT(sizes); s++) {
        const problem n = {
            .batch = sizes[s][0], .kv_heads = sizes[s][1], .kv_len = sizes[s][2], .window = 4};
        const problem x = scored(n, kind_iid, false, &state);
        select_with(&x, kernel, 0);
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
    EACH_KERNEL_ONCE("select", rules_that_keep_all),
    TEST(longer_sequences),
    EACH_KERNEL_ONCE("select", slots_hold_one_key_at_a_time),
    EACH_KERNEL_ONCE("select", strided_tensors),
    EACH_KERNEL_ONCE("select", without_slots),
    TEST(invalid_scores_do_not_matter),
    EACH_KERNEL_ONCE("select", no_keys),
};

int main(void) { return test_run(tests, TEST_COUNT(tests)); }
