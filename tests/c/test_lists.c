/* test_lists.c - compares the tile lists of every kernel, entry by entry, with lists made from the
 * definition of expiry; and checks that they list only keys of the sequence, for any selection. */
#include "scores.h"

/* Which keys queries see: the scope of the selection and causal masking. */
typedef struct sight {
    const char *name;
    fdma_scope scope;
    int causal;
} sight;

static const sight sights[] = {
    {"causal", FDMA_SCOPE_CAUSAL, 1},
    {"global, causal", FDMA_SCOPE_GLOBAL, 1},
    {"global", FDMA_SCOPE_GLOBAL, 0},
};

typedef struct lists_case {
    int64_t batch, kv_heads, q_len, kv_len, window, tile_len;
    int64_t recent, sinks;
    double gap;
    const sight *sight;
    fdma_selection selection;
} lists_case;

/* ---- selections ---- */

/* Every third key is not valid, the second sequence begins with padding, the third has no keys. */
static fdma_tensor some_padding(const lists_case *test) {
    const fdma_tensor valid = new_tensor(FDMA_UINT8, test->batch, test->kv_len, -1, -1);
    for (int64_t i = 0; i < count_of(valid); i++) {
        const int64_t b = i / test->kv_len, j = i % test->kv_len;
        ((uint8_t *)valid.data)[i] = b == 0 ? j % 3 != 1 : b == 1 && j >= test->kv_len / 3;
    }
    return valid;
}

static void select_keys(lists_case *test, score_kind kind, int padded, uint64_t *state) {
    fdma_select_args args = {
        .size = sizeof args,
        .score = new_tensor(FDMA_FLOAT32, test->batch, test->kv_heads, test->kv_len, -1),
        .key_valid = padded ? some_padding(test) : (fdma_tensor){0},
        .selection = &test->selection,
        .window = test->window,
        .recent = test->recent,
        .sinks = test->sinks,
        .scope = test->sight->scope,
        .gap = test->gap,
    };
    fill_kind(args.score, kind, state);
    test->selection = selection_for(args.score);
    CHECK_OK(run_select(&args));
}

/* ---- brute force ---- */

static int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }

static int64_t tiles_of(const lists_case *test) {
    return test->q_len / test->tile_len + (test->q_len % test->tile_len != 0);
}

/* The width that the header asks for. */
static int64_t width_of(const lists_case *test) {
    const int64_t slots = lesser(test->window, test->kv_len) + test->recent;
    return lesser(slots + lesser(test->tile_len - 1, test->kv_len), test->kv_len);
}

static int keeps(const lists_case *test, const int32_t *expiry, int64_t j, int64_t p) {
    return test->sight->causal ? j <= p && p < expiry[j] : expiry[j] == test->kv_len;
}

static int compare_ints(const void *left, const void *right) {
    const int64_t x = *(const int64_t *)left, y = *(const int64_t *)right;
    return x < y ? -1 : x > y;
}

/* Lists the keys alive at p by their slots, which are 0, 1, ...; with a gap, -1 stands for slots
 * without a key. Returns the number of entries. */
static int32_t brute_alive(const lists_case *test, int64_t at, int64_t p, int32_t *list) {
    const int32_t *const expiry = (const int32_t *)test->selection.expiry.data + at;
    const int32_t *const slot = (const int32_t *)test->selection.slot.data + at;
    int64_t *const found = malloc((size_t)(test->kv_len + 1) * sizeof *found);
    int32_t alive = 0;
    for (int64_t j = 0; j < test->kv_len; j++)
        if (keeps(test, expiry, j, p))
            found[alive++] = (int64_t)slot[j] << 32 | j;
    qsort(found, (size_t)alive, sizeof *found, compare_ints);
    int32_t used = 0;
    for (int32_t n = 0; n < alive; n++) {
        while (test->gap > 0 && used < found[n] >> 32)
            list[used++] = -1;
        CHECK_INT(found[n] >> 32, used);
        list[used++] = (int32_t)(found[n] & INT32_MAX);
    }
    free(found);
    return used;
}

/* The list of the tile with positions p0 to p1: the keys that p0 keeps, then the keys that later
 * positions keep. */
static void brute_tile(const lists_case *test, int64_t at, int64_t p0, int64_t p1, int32_t *list,
                       int32_t *count) {
    const int32_t *const expiry = (const int32_t *)test->selection.expiry.data + at;
    count[0] = count[1] = brute_alive(test, at, p0, list);
    for (int64_t j = 0; j < test->kv_len; j++) {
        int kept = 0;
        for (int64_t p = p0 + 1; p <= p1 && !kept; p++)
            kept = keeps(test, expiry, j, p);
        if (kept && !keeps(test, expiry, j, p0))
            list[count[1]++] = (int32_t)j;
    }
}

typedef struct tile_lists {
    fdma_tensor list, count;
} tile_lists;

static tile_lists new_lists(const lists_case *test, int64_t width) {
    const int64_t tiles = tiles_of(test);
    return (tile_lists){
        .list = new_output(FDMA_INT32, test->batch, test->kv_heads, tiles, width),
        .count = new_output(FDMA_INT32, test->batch, test->kv_heads, tiles, 2),
    };
}

static tile_lists brute_force(const lists_case *test) {
    const int64_t width = width_of(test), tiles = tiles_of(test);
    const tile_lists want = new_lists(test, width);
    for (int64_t n = 0; n < test->batch * test->kv_heads * tiles; n++) {
        const int64_t first = n % tiles * test->tile_len, origin = test->kv_len - test->q_len;
        const int64_t last = first + lesser(test->tile_len, test->q_len - first) - 1;
        brute_tile(test, n / tiles * test->kv_len, origin + first, origin + last,
                   (int32_t *)want.list.data + n * width, (int32_t *)want.count.data + 2 * n);
    }
    return want;
}

/* ---- the kernels ---- */

static fdma_lists_args lists_args(const lists_case *test, const tile_lists *to, const char *kernel,
                                  int32_t threads) {
    return (fdma_lists_args){
        .size = sizeof(fdma_lists_args),
        .selection = &test->selection,
        .list = to->list,
        .count = to->count,
        .q_len = test->q_len,
        .tile_len = test->tile_len,
        .causal = test->sight->causal,
        .exec = {.kernel = kernel, .threads = threads},
    };
}

static tile_lists list_with(const lists_case *test, const char *kernel, int32_t threads) {
    const tile_lists lists = new_lists(test, width_of(test));
    fdma_lists_args args = lists_args(test, &lists, kernel, threads);
    test_context("%s, %d threads, %s, q_len %d, kv_len %d, window %d, tile_len %d", kernel, threads,
                 test->sight->name, (int)test->q_len, (int)test->kv_len, (int)test->window,
                 (int)test->tile_len);
    CHECK_OK(run_lists(&args));
    return lists;
}

/* Compares all bytes: memory without entries holds guard bytes in both. */
static void check_same(const tile_lists *actual, const tile_lists *want) {
    CHECK_BYTES(actual->count.data, want->count.data, bytes_of(want->count));
    CHECK_BYTES(actual->list.data, want->list.data, bytes_of(want->list));
}

static void check_case(const lists_case *test, const kernel_list *kernels) {
    const tile_lists want = brute_force(test);
    for (int k = 0; k < kernels->count; k++) {
        const tile_lists got = list_with(test, kernels->name[k], 1);
        check_same(&got, &want);
    }
}

/* Replaces slots beyond the number of slots that the selection declares. */
static void fold_slots(const lists_case *test) {
    int32_t *const slot = test->selection.slot.data;
    for (int64_t i = 0; i < count_of(test->selection.slot); i++)
        if (slot[i] >= test->window + test->recent)
            slot[i] %= (int32_t)(test->window + test->recent);
}

/* ---- tests ---- */

/* Checks one length with every window, number of queries and tile, with the kinds of scores in
 * turn. */
static void check_length(const kernel_list *kernels, const sight *how, int64_t n, int padded,
                         uint64_t *state) {
    const int64_t windows[] = {1, 2, n / 3 + 1, n > 1 ? n - 1 : 1, n, n + 5, FDMA_WINDOW_ALL};
    const int64_t queries[] = {n, 1, n / 2, how->scope == FDMA_SCOPE_GLOBAL ? n + 7 : n - 1};
    static const int64_t tile_lens[] = {1, 3, 128, INT64_MAX};
    const int count = TEST_COUNT(windows) * TEST_COUNT(queries) * TEST_COUNT(tile_lens);
    for (int i = 0; i < count; i++) {
        const int rest = i / TEST_COUNT(tile_lens);
        lists_case test = {.batch = padded ? 3 : 1,
                           .kv_heads = 2,
                           .q_len = queries[rest % TEST_COUNT(queries)],
                           .kv_len = n,
                           .window = windows[rest / TEST_COUNT(queries)],
                           .tile_len = tile_lens[i % TEST_COUNT(tile_lens)],
                           .sight = how};
        test.recent = how->scope == FDMA_SCOPE_CAUSAL && i % 3 == 1 ? n / 4 + i % 2 : 0;
        test.sinks = i % 5 == 1;
        test.gap = how->scope == FDMA_SCOPE_CAUSAL && i % 2 == 1 ? 0.25 * (1 + i % 7) : 0;
        select_keys(&test, (score_kind)(i % kind_count), padded, state);
        check_case(&test, kernels);
        test_free_all();
    }
}

static void check_lengths(const sight *how) {
    static const int64_t lengths[] = {1, 2, 8, 29, 140};
    const kernel_list kernels = kernels_of("lists");
    uint64_t state = 1;
    for (int l = 0; l < TEST_COUNT(lengths); l++) {
        check_length(&kernels, how, lengths[l], 0, &state);
        check_length(&kernels, how, lengths[l], 1, &state);
    }
}

static void causal_scope(void) { check_lengths(&sights[0]); }
static void global_scope_with_causal_masking(void) { check_lengths(&sights[1]); }
static void global_scope(void) { check_lengths(&sights[2]); }

/* Large enough that each of eight threads works on one (b, g) or on two. The contents of a
 * selection do not change that. */
static void threads_change_nothing(void) {
    static const int32_t threads[] = {2, 3, 8};
    const kernel_list kernels = kernels_of("lists");
    uint64_t state = 2;
    for (int i = 0; i < kernels.count * TEST_COUNT(sights) * 2; i++) {
        const int s = i / 2 % TEST_COUNT(sights);
        const char *const kernel = kernels.name[i / 2 / TEST_COUNT(sights)];
        lists_case test = {.batch = 1,
                           .kv_heads = 1 + s % 2,
                           .q_len = 3000,
                           .kv_len = s == 1 ? 2700 : 3300,
                           .window = 500,
                           .tile_len = 1,
                           .gap = s == 0 ? 0.5 : 0,
                           .sight = &sights[s]};
        select_keys(&test, kind_iid, 0, &state);
        if (i % 2)
            corrupt(test.selection.slot, near_keys, &state);
        fold_slots(&test);
        const tile_lists want = list_with(&test, kernel, 1);
        for (int t = 0; t < TEST_COUNT(threads); t++) {
            const tile_lists got = list_with(&test, kernel, threads[t]);
            check_same(&got, &want);
        }
        test_free_all();
    }
}

/* Lists may be wider than needed and lie apart. The memory between them does not change. */
static void strided_tensors(void) {
    enum { wider = 5, apart = 7 };
    const kernel_list kernels = kernels_of("lists");
    uint64_t state = 3;
    lists_case test = {.batch = 2,
                       .kv_heads = 3,
                       .q_len = 50,
                       .kv_len = 60,
                       .window = 9,
                       .tile_len = 8,
                       .sight = &sights[0]};
    select_keys(&test, kind_few_values, 0, &state);
    const tile_lists want = brute_force(&test);
    for (int k = 0; k < kernels.count; k++) {
        test_context("%s", kernels.name[k]);
        tile_lists got = new_lists(&test, width_of(&test) + wider);
        got.list = with_gaps(got.list, apart);
        got.count = with_gaps(got.count, 1);
        fdma_lists_args args = lists_args(&test, &got, kernels.name[k], 1);
        CHECK_OK(run_lists(&args));
        got.list.shape[3] = width_of(&test);
        check_gapped(got.list, want.list, wider + apart);
        check_gapped(got.count, want.count, 1);
    }
}

/* Entries are keys, or -1 with a gap, and at most as many as fit; the guard bytes around show
 * writes beyond. */
static void check_keys(const lists_case *test, const tile_lists *lists) {
    const int64_t width = lists->list.shape[3];
    for (int64_t n = 0; n < count_of(lists->count) / 2; n++) {
        const int32_t *const count = (const int32_t *)lists->count.data + 2 * n;
        const int32_t *const list = (const int32_t *)lists->list.data + n * width;
        int keys = 0;
        CHECK(count[0] >= 0 && count[0] <= count[1] && count[1] <= width);
        for (int32_t x = 0; x < count[1]; x++)
            keys += list[x] >= (test->gap > 0 ? -1 : 0) && list[x] < test->kv_len;
        CHECK_INT(keys, count[1]);
    }
}

static corruption any_corruption(uint64_t *state) {
    return (corruption)random_below(state, corruption_count);
}

static void corrupt_selections_list_keys(void) {
    const int cases = test_repeats(600);
    const kernel_list kernels = kernels_of("lists");
    uint64_t state = 4;
    for (int i = 0; i < cases; i++) {
        const int64_t n = 1 + random_below(&state, 90);
        lists_case test = {.batch = 1 + i % 2,
                           .kv_heads = 2,
                           .q_len = 1 + random_below(&state, n),
                           .kv_len = n,
                           .window = 1 + random_below(&state, n + 9),
                           .tile_len = 1 + random_below(&state, i % 3 ? 9 : n + 9),
                           .sight = &sights[i % TEST_COUNT(sights)]};
        test.q_len += test.sight->scope == FDMA_SCOPE_GLOBAL ? random_below(&state, n) : 0;
        test.gap = test.sight->scope == FDMA_SCOPE_CAUSAL && i % 2 ? 0.5 : 0;
        select_keys(&test, (score_kind)(i % kind_count), i % 4 == 3, &state);
        if (i % 5 != 1)
            corrupt(test.selection.expiry, any_corruption(&state), &state);
        if (i % 5 != 2)
            corrupt(test.selection.slot, any_corruption(&state), &state);
        fold_slots(&test); // others are refused, see test_small_window.c
        for (int k = 0; k < kernels.count; k++) {
            const tile_lists lists = list_with(&test, kernels.name[k], 1 + i % 3);
            check_keys(&test, &lists);
        }
        test_free_all();
    }
}

/* Without queries or sequences nothing is written. Without keys, or if none is kept, counts are
 * 0. */
static void nothing_to_list(void) {
    static const int64_t sizes[][4] = {/* batch, q_len, kv_len, window */
                                       {1, 0, 9, 4},
                                       {0, 5, 9, 4},
                                       {2, 5, 0, 4}};
    const kernel_list kernels = kernels_of("lists");
    for (int s = 0; s < TEST_COUNT(sizes); s++) {
        lists_case test = {.batch = sizes[s][0],
                           .kv_heads = 2,
                           .q_len = sizes[s][1],
                           .kv_len = sizes[s][2],
                           .window = sizes[s][3],
                           .tile_len = 1,
                           .sight = &sights[1]};
        uint64_t state = 5;
        select_keys(&test, kind_iid, 0, &state);
        for (int k = 0; k < kernels.count; k++) {
            tile_lists lists = new_lists(&test, width_of(&test));
            fdma_lists_args args = lists_args(&test, &lists, kernels.name[k], 1);
            if (count_of(args.list) == 0)
                args.list.data = NULL;
            test_context("%s, sizes %d", kernels.name[k], s);
            CHECK_OK(run_lists(&args));
            for (int64_t n = 0; n < count_of(lists.count); n++)
                CHECK_INT(((const int32_t *)lists.count.data)[n], 0);
        }
    }
}

static const test_entry tests[] = {
    TEST(causal_scope),    TEST(global_scope_with_causal_masking),
    TEST(global_scope),    TEST(threads_change_nothing),
    TEST(strided_tensors), TEST(corrupt_selections_list_keys),
    TEST(nothing_to_list),
};

int main(void) { return test_run(tests, TEST_COUNT(tests)); }
