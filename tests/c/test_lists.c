/* test_lists.c - compares the tile lists of every kernel, entry by entry, with lists made from the
 * definition of expiry; and checks that they list only keys of the sequence, for any selection. */
#include "brute.h"
#include "scores.h"

/* Which keys queries see: the scope of the selection and causal masking. */
typedef struct sight {
    fdma_scope scope;
    int causal;
} sight;

static const sight sights[] = {
    {FDMA_SCOPE_CAUSAL, 1}, {FDMA_SCOPE_GLOBAL, 1}, {FDMA_SCOPE_GLOBAL, 0}};

/* Every third key is not valid, the second sequence begins with padding, the third has no keys. */
static fdma_tensor some_padding(const problem *x) {
    const fdma_tensor valid = new_tensor(FDMA_UINT8, x->batch, x->kv_len, -1, -1);
    for (int64_t i = 0; i < count_of(valid); i++) {
        const int64_t b = i / x->kv_len, j = i % x->kv_len;
        ((uint8_t *)valid.data)[i] = b == 0 ? j % 3 != 1 : b == 1 && j >= x->kv_len / 3;
    }
    return valid;
}

static void select_keys(problem *x, const sight *how, score_kind kind, bool padded,
                        uint64_t *state) {
    x->scope = how->scope;
    x->causal = how->causal;
    x->score = new_tensor(FDMA_FLOAT32, x->batch, x->kv_heads, x->kv_len, -1);
    x->key_valid = padded ? some_padding(x) : (fdma_tensor){0};
    fill_kind(x->score, kind, state);
    x->selection = selected_by(x, NULL);
}

/* The width that the header asks for. */
static int64_t width_of(const problem *x, int64_t tile_len) {
    const int64_t slots = lesser(x->window, x->kv_len) + x->recent;
    return lesser(slots + lesser(tile_len - 1, x->kv_len), x->kv_len);
}

/* A call with lists of that width, and `wider` entries more. */
static fdma_lists_args args_of(const problem *x, int64_t tile_len, int64_t wider,
                               const char *kernel) {
    fdma_lists_args args = lists_args(x, tile_len, kernel);
    args.list = new_output(FDMA_INT32, x->batch, x->kv_heads, args.list.shape[2],
                           width_of(x, tile_len) + wider);
    args.exec.threads = 1;
    return args;
}

static fdma_lists_args list_with(const problem *x, int64_t tile_len, const char *kernel,
                                 int32_t threads) {
    fdma_lists_args args = args_of(x, tile_len, 0, kernel);
    args.exec.threads = threads;
    test_context("%s, %d threads, scope %d, causal %d, q_len %d, kv_len %d, window %d, tile_len %d",
                 kernel, threads, (int)x->scope, x->causal, (int)x->q_len, (int)x->kv_len,
                 (int)x->window, (int)tile_len);
    CHECK_OK(run_lists(&args));
    return args;
}

/* Compares all bytes: memory without entries holds guard bytes in both. */
static void check_same(const fdma_lists_args *actual, const fdma_lists_args *want) {
    CHECK_BYTES(actual->count.data, want->count.data, bytes_of(want->count));
    CHECK_BYTES(actual->list.data, want->list.data, bytes_of(want->list));
}

/* Replaces slots beyond the number of slots that the selection declares: these are refused, see
 * test_small_window.c. */
static void fold_slots(const problem *x) {
    int32_t *const slot = x->selection.slot.data;
    for (int64_t i = 0; i < count_of(x->selection.slot); i++)
        if (slot[i] >= x->window + x->recent)
            slot[i] %= (int32_t)(x->window + x->recent);
}

/* Checks one length with every window, number of queries and tile, with the kinds of scores in
 * turn. */
static void check_length(const sight *how, int64_t n, bool padded, uint64_t *state) {
    const int64_t windows[] = {1, 2, n / 3 + 1, n > 1 ? n - 1 : 1, n, n + 5, FDMA_WINDOW_ALL};
    const int64_t queries[] = {n, 1, n / 2, how->scope == FDMA_SCOPE_GLOBAL ? n + 7 : n - 1};
    static const int64_t tile_lens[] = {1, 3, 128, INT64_MAX};
    const int count = TEST_COUNT(windows) * TEST_COUNT(queries) * TEST_COUNT(tile_lens);
    const kernel_list kernels = kernels_of("lists");
    for (int i = 0; i < count; i++) {
        const int rest = i / TEST_COUNT(tile_lens);
        const int64_t tile_len = tile_lens[i % TEST_COUNT(tile_lens)];
        problem x = {.batch = padded ? 3 : 1,
                     .kv_heads = 2,
                     .q_len = queries[rest % TEST_COUNT(queries)],
                     .kv_len = n,
                     .window = windows[rest / TEST_COUNT(queries)]};
        x.recent = how->scope == FDMA_SCOPE_CAUSAL && i % 3 == 1 ? n / 4 + i % 2 : 0;
        x.sinks = i % 5 == 1;
        x.gap = how->scope == FDMA_SCOPE_CAUSAL && i % 2 == 1 ? 0.25 * (1 + i % 7) : 0;
        select_keys(&x, how, (score_kind)(i % kind_count), padded, state);
        const fdma_lists_args want = args_of(&x, tile_len, 0, NULL);
        brute_lists(&x, &want);
        for (int k = 0; k < kernels.count; k++) {
            const fdma_lists_args got = list_with(&x, tile_len, kernels.name[k], 1);
            check_same(&got, &want);
        }
        test_free_all();
    }
}

static void check_lengths(const sight *how) {
    static const int64_t lengths[] = {1, 2, 8, 29, 140};
    uint64_t state = 1;
    for (int l = 0; l < TEST_COUNT(lengths); l++) {
        check_length(how, lengths[l], false, &state);
        check_length(how, lengths[l], true, &state);
    }
}

static void causal_scope(void) { check_lengths(&sights[0]); }
static void global_scope_with_causal_masking(void) { check_lengths(&sights[1]); }
static void global_scope(void) { check_lengths(&sights[2]); }

/* Large enough that each of eight threads works on one (b, g) or on two. The contents of a
 * selection do not change that. */
static void threads_change_nothing(const char *kernel) {
    static const int32_t threads[] = {2, 3, 8};
    uint64_t state = 2;
    for (int i = 0; i < TEST_COUNT(sights) * 2; i++) {
        const int s = i / 2;
        problem x = {.batch = 1,
                     .kv_heads = 1 + s % 2,
                     .q_len = 3000,
                     .kv_len = s == 1 ? 2700 : 3300,
                     .window = 500,
                     .gap = s == 0 ? 0.5 : 0};
        select_keys(&x, &sights[s], kind_iid, false, &state);
        if (i % 2)
            corrupt(x.selection.slot, near_keys, &state);
        fold_slots(&x);
        const fdma_lists_args want = list_with(&x, 1, kernel, 1);
        for (int t = 0; t < TEST_COUNT(threads); t++) {
            const fdma_lists_args got = list_with(&x, 1, kernel, threads[t]);
            check_same(&got, &want);
        }
        test_free_all();
    }
}

/* Lists may be wider than needed and lie apart. The memory between them does not change. */
static void strided_tensors(const char *kernel) {
    enum { wider = 5, apart = 7, tile_len = 8 };
    uint64_t state = 3;
    problem x = {.batch = 2, .kv_heads = 3, .q_len = 50, .kv_len = 60, .window = 9};
    select_keys(&x, &sights[0], kind_few_values, false, &state);
    const fdma_lists_args want = args_of(&x, tile_len, 0, NULL);
    brute_lists(&x, &want);
    fdma_lists_args args = args_of(&x, tile_len, wider, kernel);
    args.list = with_gaps(args.list, apart);
    args.count = with_gaps(args.count, 1);
    CHECK_OK(run_lists(&args));
    args.list.shape[3] = width_of(&x, tile_len);
    check_gapped(args.list, want.list, wider + apart);
    check_gapped(args.count, want.count, 1);
}

/* Entries are keys, or -1 with a gap, and at most as many as fit; the guard bytes around show
 * writes beyond. */
static void check_keys(const problem *x, const fdma_lists_args *lists) {
    const int64_t width = lists->list.shape[3];
    for (int64_t n = 0; n < count_of(lists->count) / 2; n++) {
        const int32_t *const count = (const int32_t *)lists->count.data + 2 * n;
        const int32_t *const list = (const int32_t *)lists->list.data + n * width;
        int keys = 0;
        CHECK(count[0] >= 0 && count[0] <= count[1] && count[1] <= width);
        for (int32_t at = 0; at < count[1]; at++)
            keys += list[at] >= (x->gap > 0 ? -1 : 0) && list[at] < x->kv_len;
        CHECK_INT(keys, count[1]);
    }
}

static corruption any_corruption(uint64_t *state) {
    return (corruption)random_below(state, corruption_count);
}

static void corrupt_selections_list_keys(const char *kernel) {
    const int cases = test_repeats(600);
    uint64_t state = 4;
    for (int i = 0; i < cases; i++) {
        const int64_t n = 1 + random_below(&state, 90);
        const sight *const how = &sights[i % TEST_COUNT(sights)];
        problem x = {.batch = 1 + i % 2,
                     .kv_heads = 2,
                     .q_len = 1 + random_below(&state, n),
                     .kv_len = n,
                     .window = 1 + random_below(&state, n + 9)};
        const int64_t tile_len = 1 + random_below(&state, i % 3 ? 9 : n + 9);
        x.q_len += how->scope == FDMA_SCOPE_GLOBAL ? random_below(&state, n) : 0;
        x.gap = how->scope == FDMA_SCOPE_CAUSAL && i % 2 ? 0.5 : 0;
        select_keys(&x, how, (score_kind)(i % kind_count), i % 4 == 3, &state);
        if (i % 5 != 1)
            corrupt(x.selection.expiry, any_corruption(&state), &state);
        if (i % 5 != 2)
            corrupt(x.selection.slot, any_corruption(&state), &state);
        fold_slots(&x);
        const fdma_lists_args lists = list_with(&x, tile_len, kernel, 1 + i % 3);
        check_keys(&x, &lists);
        test_free_all();
    }
}

/* Without queries or sequences nothing is written. Without keys, or if none is kept, counts are
 * 0. */
static void nothing_to_list(const char *kernel) {
    static const int64_t sizes[][3] = {{1, 0, 9}, {0, 5, 9}, {2, 5, 0}}; /* batch, q_len, kv_len */
    for (int s = 0; s < TEST_COUNT(sizes); s++) {
        problem x = {.batch = sizes[s][0],
                     .kv_heads = 2,
                     .q_len = sizes[s][1],
                     .kv_len = sizes[s][2],
                     .window = 4};
        uint64_t state = 5;
        select_keys(&x, &sights[1], kind_iid, false, &state);
        fdma_lists_args args = args_of(&x, 1, 0, kernel);
        if (count_of(args.list) == 0)
            args.list.data = NULL;
        CHECK_OK(run_lists(&args));
        for (int64_t n = 0; n < count_of(args.count); n++)
            CHECK_INT(((const int32_t *)args.count.data)[n], 0);
    }
}

static const test_entry tests[] = {
    TEST(causal_scope),
    TEST(global_scope_with_causal_masking),
    TEST(global_scope),
    EACH_KERNEL_ONCE("lists", threads_change_nothing),
    EACH_KERNEL_ONCE("lists", strided_tensors),
    EACH_KERNEL_ONCE("lists", corrupt_selections_list_keys),
    EACH_KERNEL_ONCE("lists", nothing_to_list),
};

int main(void) { return test_run(tests, TEST_COUNT(tests)); }
