/* test_packed_shapes.c - packed sequences of many lengths by every kernel, against the kernel
 * "reference": empty ones, sequences of one key, shorter and longer than the window, beginning
 * anywhere in a tile, and positions that belong to none. On a device also invalid starts, which the
 * host does not read. */
#include "backend.h"
#include "gradient.h"
#include "scores.h"

typedef enum cut_kind {
    cut_random,
    cut_with_empties,
    cut_short, /* up to four positions each */
    cut_ones,  /* one position each */
    cut_once,  /* nearly everything in one sequence */
    cut_count,
} cut_kind;

static int64_t length_of(cut_kind kind, int64_t kv_len, int64_t count, uint64_t *state) {
    switch (kind) {
    case cut_random:
        return random_below(state, 2 * kv_len / (count + 1) + 2);
    case cut_with_empties:
        return random_below(state, 2) * random_below(state, 4 * kv_len / (count + 1) + 2);
    case cut_short:
        return random_below(state, 5);
    case cut_ones:
        return 1;
    default:
        return random_below(state, 50) == 0 && kv_len > 2 ? kv_len - 2 : 1;
    }
}

/* `count` sequences. The last one ends at the last position, or some positions belong to none. */
static fdma_tensor new_starts(cut_kind kind, int64_t kv_len, int64_t count, uint64_t *state) {
    const fdma_tensor tensor = new_tensor(FDMA_INT32, count + 1, -1, -1, -1);
    int32_t *const starts = tensor.data;
    starts[0] = 0;
    for (int64_t n = 1; n <= count; n++) {
        const int64_t next = starts[n - 1] + length_of(kind, kv_len, count, state);
        starts[n] = (int32_t)(next < kv_len ? next : kv_len);
    }
    if (count > 0 && random_below(state, 2))
        starts[count] = (int32_t)kv_len;
    return tensor;
}

/* ---- select and lists ---- */

static fdma_selection select_by(const problem *x, fdma_tensor starts, const char *kernel) {
    fdma_selection selection = selection_for(x->score);
    fdma_select_args args = {.size = sizeof args,
                             .score = x->score,
                             .key_valid = x->key_valid,
                             .starts = starts,
                             .selection = &selection,
                             .window = x->window,
                             .recent = x->recent,
                             .sinks = x->sinks,
                             .scope = x->scope,
                             .gap = x->gap,
                             .exec = {.kernel = kernel, .threads = 2}};
    if (is_device_kernel(kernel) && !call_takes(operation_select, &args))
        return (fdma_selection){0};
    CHECK_OK(run_select(&args));
    return selection;
}

/* Runs every kernel with `starts`, which are equivalent to the starts of the problem. Returns how
 * many kernels take it. */
static int check_selection(const problem *x, fdma_tensor starts) {
    const kernel_list kernels = kernels_of("select");
    int taken = 0;
    for (int kernel = 0; kernel < kernels.count; kernel++) {
        test_context("%s: kv_len %d, %d sequences, window %d, recent %d, sinks %d, scope %d, "
                     "gap %g%s",
                     kernels.name[kernel], (int)x->kv_len, (int)starts.shape[0] - 1, (int)x->window,
                     (int)x->recent, (int)x->sinks, (int)x->scope, x->gap,
                     x->key_valid.rank > 0 ? ", padding" : "");
        const fdma_selection found = select_by(x, starts, kernels.name[kernel]);
        if (found.size == 0)
            continue;
        CHECK(same_tensor(found.expiry, x->selection.expiry));
        CHECK(same_tensor(found.slot, x->selection.slot));
        taken++;
    }
    CHECK(taken > 0);
    return taken;
}

static fdma_lists_args lists_by(const problem *x, int64_t tile_len, const char *kernel) {
    const int64_t tiles = (x->kv_len + tile_len - 1) / tile_len;
    fdma_lists_args args = {.size = sizeof args,
                            .selection = &x->selection,
                            .starts = x->starts,
                            .list = new_output(FDMA_INT32, 1, x->kv_heads, tiles, x->kv_len),
                            .count = new_output(FDMA_INT32, 1, x->kv_heads, tiles, 2),
                            .q_len = x->kv_len,
                            .tile_len = tile_len,
                            .causal = 1,
                            .exec = {.kernel = kernel, .threads = 2}};
    CHECK_OK(run_lists(&args));
    return args;
}

static void check_lists(const problem *x, int64_t tile_len) {
    const kernel_list kernels = kernels_of("lists");
    const fdma_lists_args want = lists_by(x, tile_len, "reference");
    for (int kernel = 0; kernel < kernels.count; kernel++) {
        test_context("%s: tiles of %d", kernels.name[kernel], (int)tile_len);
        const fdma_lists_args found = lists_by(x, tile_len, kernels.name[kernel]);
        CHECK(same_tensor(found.list, want.list));
        CHECK(same_tensor(found.count, want.count));
    }
}

/* Random rules, often with a window longer than the sequences. The reference selects. */
static problem random_selection(int64_t most, cut_kind kind, uint64_t *state) {
    const int64_t kv_len = 1 + random_below(state, most), kv_heads = 1 + random_below(state, 3);
    const int64_t count = random_below(state, kind == cut_ones ? kv_len + 1 : kv_len / 8 + 3);
    problem x = {.batch = 1, .q_len = kv_len, .kv_len = kv_len, .kv_heads = kv_heads};
    x.window = 1 + random_below(state, random_below(state, 4) ? kv_len / 8 + 2 : kv_len + 3);
    x.scope = random_below(state, 3) ? FDMA_SCOPE_CAUSAL : FDMA_SCOPE_GLOBAL;
    x.sinks = random_below(state, 2) * random_below(state, x.window + 1);
    if (x.scope == FDMA_SCOPE_CAUSAL)
        x.recent = random_below(state, 2) * random_below(state, kv_len / 4 + 2);
    if (x.scope == FDMA_SCOPE_CAUSAL && random_below(state, 3) == 0)
        x.gap = 0.25 * (double)(1 + random_below(state, 8));
    x.score = new_tensor(FDMA_FLOAT32, 1, kv_heads, kv_len, -1);
    fill_kinds(x.score, 1 + random_below(state, 200), state);
    if (random_below(state, 3) == 0)
        x.key_valid = new_padding(1, kv_len, state);
    x.starts = new_starts(kind, kv_len, count, state);
    problem_select(&x);
    return x;
}

static void selections_are_those_of_the_reference(void) {
    const int cases = test_repeats(test_backend.run != NULL ? 2000 : 100);
    uint64_t state = 4;
    for (int i = 0; i < cases && test_state.failures < test_reports; i++) {
        static const int64_t longest[] = {3, 40, 300, 3000};
        const problem x =
            random_selection(longest[i / cut_count % 4], (cut_kind)(i % cut_count), &state);
        check_selection(&x, x.starts);
        check_lists(&x, 1 + random_below(&state, 200));
        test_free_all();
    }
}

/* So many sequences that their numbers have two digits, and so many keys that every way to divide
 * them among thread blocks occurs. */
static void long_selections_are_those_of_the_reference(void) {
    static const int64_t lens[] = {1500, 2600, 9000, 20000, 40000, 70000};
    uint64_t state = 9;
    for (int i = 0; i < 2 * TEST_COUNT(lens); i++) {
        const int64_t kv_len = lens[i / 2], count = i % 2 ? 700 : 9;
        problem x = {.batch = 1, .q_len = kv_len, .kv_len = kv_len, .kv_heads = 2};
        x.window = i % 3 ? 300 : 20;
        x.scope = i % 5 == 4 ? FDMA_SCOPE_GLOBAL : FDMA_SCOPE_CAUSAL;
        x.recent = x.scope == FDMA_SCOPE_CAUSAL && i % 4 == 1 ? 40 : 0;
        x.gap = x.scope == FDMA_SCOPE_CAUSAL && i % 3 == 1 ? 0.5 : 0;
        x.score = new_tensor(FDMA_FLOAT32, 1, 2, kv_len, -1);
        fill_kinds(x.score, 400, &state);
        x.starts = new_starts(cut_with_empties, kv_len, count, &state);
        problem_select(&x);
        check_selection(&x, x.starts);
        test_free_all();
    }
}

/* ---- forward and backward ---- */

typedef struct packed_shape {
    int64_t kv_len, sequences;
    cut_kind kind;
    int64_t group, kv_heads, head_dim;
    int64_t window, recent, sinks; /* window -1: dense */
    fdma_scope scope;
    int causal;
    double softcap;
    int padded;
} packed_shape;

static const packed_shape packed_shapes[] = {
    {700, 9, cut_random, 2, 2, 64, 50, 0, 0, FDMA_SCOPE_CAUSAL, 1, 0, 0},
    {800, 5, cut_random, 4, 1, 128, 90, 20, 3, FDMA_SCOPE_CAUSAL, 1, 0, 1},
    {520, 6, cut_with_empties, 2, 1, 256, 140, 0, 0, FDMA_SCOPE_CAUSAL, 1, 2.5, 0},
    {900, 60, cut_random, 1, 2, 96, 130, 0, 2, FDMA_SCOPE_CAUSAL, 1, 0, 0},
    {1100, 4, cut_random, 3, 1, 64, 260, 0, 0, FDMA_SCOPE_CAUSAL, 1, 0, 0},
    {640, 5, cut_with_empties, 2, 2, 128, -1, 0, 0, FDMA_SCOPE_GLOBAL, 1, 0, 0},
    {640, 7, cut_random, 2, 1, 64, -1, 0, 0, FDMA_SCOPE_GLOBAL, 0, 0, 1},
    {500, 4, cut_random, 1, 2, 192, -1, 0, 0, FDMA_SCOPE_GLOBAL, 0, 1.5, 0},
    {600, 6, cut_random, 2, 1, 128, 40, 0, 1, FDMA_SCOPE_GLOBAL, 0, 0, 0},
    {600, 6, cut_with_empties, 2, 2, 64, 70, 0, 0, FDMA_SCOPE_GLOBAL, 1, 0, 1},
    {400, 5, cut_random, 4, 1, 64, 900, 0, 0, FDMA_SCOPE_CAUSAL, 1, 0, 0},
    {400, 5, cut_random, 1, 1, 256, 900, 0, 0, FDMA_SCOPE_GLOBAL, 0, 0, 0},
    {300, 300, cut_ones, 2, 1, 64, 5, 0, 0, FDMA_SCOPE_CAUSAL, 1, 0, 0},
    {300, 200, cut_short, 2, 1, 128, -1, 0, 0, FDMA_SCOPE_GLOBAL, 0, 0, 0},
    {500, 300, cut_once, 2, 1, 64, 30, 5, 0, FDMA_SCOPE_CAUSAL, 1, 0, 0},
    {13, 4, cut_random, 4, 2, 64, 3, 0, 0, FDMA_SCOPE_CAUSAL, 1, 0, 0},
    {16, 3, cut_random, 2, 1, 128, -1, 0, 0, FDMA_SCOPE_GLOBAL, 0, 0, 0},
    {200, 0, cut_random, 2, 1, 64, 20, 0, 0, FDMA_SCOPE_CAUSAL, 1, 0, 0},
};

static problem packed_problem(const packed_shape *shape, fdma_dtype dtype, uint64_t seed) {
    problem x = {.batch = 1,
                 .q_len = shape->kv_len,
                 .kv_len = shape->kv_len,
                 .q_heads = shape->group * shape->kv_heads,
                 .kv_heads = shape->kv_heads,
                 .head_dim = shape->head_dim,
                 .window = shape->window,
                 .recent = shape->recent,
                 .sinks = shape->sinks,
                 .scope = shape->scope,
                 .causal = shape->causal,
                 .softcap = shape->softcap,
                 .dtype = dtype};
    problem_fill(&x, seed);
    x.starts = new_starts(shape->kind, shape->kv_len, shape->sequences, &seed);
    if (shape->padded)
        x.key_valid = new_padding(1, shape->kv_len, &seed);
    problem_select(&x);
    return x;
}

static void check_attention(problem *x) {
    const attended want = problem_attend(x, "reference", 1);
    const kernel_list kernels = kernels_for("forward", x->dtype);
    int taken = 0;
    for (int kernel = 0; kernel < kernels.count; kernel++) {
        test_context("%s, %s, kv_len %d, window %d", kernels.name[kernel], dtype_name(x->dtype),
                     (int)x->kv_len, (int)x->window);
        if (!problem_is_taken(x, kernels.name[kernel]))
            continue;
        check_close_results(x, problem_attend(x, kernels.name[kernel], 2), want);
        taken++;
    }
    CHECK(taken > 0);
}

/* Also checks that deterministic gradients are bit-equal from run to run. The reference is slow,
 * and has one way to compute them. */
static void check_gradients(const problem *x) {
    gradient_problem p = gradient_of(x, 1);
    const kernel_list kernels = kernels_for("backward", x->dtype);
    int taken = 0;
    for (int kernel = 0; kernel < kernels.count; kernel++) {
        const char *const name = kernels.name[kernel];
        fdma_backward_args args = gradient_args(&p, name);
        test_context("%s backward, %s, kv_len %d, window %d", name, dtype_name(x->dtype),
                     (int)x->kv_len, (int)x->window);
        if (!call_takes(operation_backward, &args))
            continue;
        p.deterministic = 0;
        taken++;
        check_expected(&p, gradient_run(&p, name, 2));
        if (strcmp(name, "reference") == 0)
            continue;
        p.deterministic = 1;
        const gradients first = gradient_run(&p, name, 2);
        check_expected(&p, first);
        check_same_gradients(gradient_run(&p, name, 1), first);
    }
    CHECK(taken > 0);
}

static void for_each_shape(void (*check)(fdma_dtype dtype, const packed_shape *shape, int n)) {
    for (int n = 0; n < TEST_COUNT(packed_shapes); n++) {
        const int types = test_dtype_count - first_dtype();
        check(test_dtypes[first_dtype() + n % types], &packed_shapes[n], n);
        test_free_all();
    }
}

static void check_shape(fdma_dtype dtype, const packed_shape *shape, int n) {
    problem x = packed_problem(shape, dtype, (uint64_t)n + 11);
    check_attention(&x);
    check_gradients(&x);
}

static void attention_is_that_of_the_reference(void) { for_each_shape(check_shape); }

static void check_unused_keys(fdma_dtype dtype, const packed_shape *shape, int n) {
    problem x = packed_problem(shape, dtype, (uint64_t)n + 50);
    const int32_t end = ((int32_t *)x.starts.data)[shape->sequences];
    const kernel_list kernels = kernels_for("forward", dtype);
    for (int kernel = 0; kernel < kernels.count; kernel++) {
        test_context("%s, keys from %d on", kernels.name[kernel], end);
        if (!problem_is_taken(&x, kernels.name[kernel]))
            continue;
        problem poisoned = x;
        poisoned.k = copy_tensor(x.k);
        poisoned.v = copy_tensor(x.v);
        poisoned.bias = copy_tensor(x.bias);
        for (int64_t key = 0; key < x.kv_heads * (x.kv_len - end); key++) {
            const int64_t j = end + key / x.kv_heads, g = key % x.kv_heads;
            spoil_key(poisoned.k, 0, j, g, NAN);
            spoil_key(poisoned.v, 0, j, g, NAN);
            ((float *)poisoned.bias.data)[g * x.kv_len + j] = NAN;
        }
        check_same_results(problem_attend(&poisoned, kernels.name[kernel], 1),
                           problem_attend(&x, kernels.name[kernel], 1));
    }
}

static void unused_keys_are_not_read(void) { for_each_shape(check_unused_keys); }

/* ---- invalid starts ---- */

/* Wrong starts. `clamped` gets the starts that a device replaces them by. */
static fdma_tensor wrong_starts(int64_t kv_len, uint64_t *state, fdma_tensor *clamped) {
    const int64_t count = random_below(state, 60);
    const fdma_tensor wrong = new_tensor(FDMA_INT32, count + 1, -1, -1, -1);
    int32_t *const from = wrong.data, most = 0;
    *clamped = copy_tensor(wrong);
    for (int64_t n = 0; n <= count; n++) {
        const int32_t values[] = {(int32_t)(uint32_t)random_bits(state), INT32_MIN, INT32_MAX, -1,
                                  (int32_t)random_below(state, kv_len + 20) - 10};
        from[n] = values[random_below(state, 40) ? 4 : random_below(state, TEST_COUNT(values))];
        if (n > 0 && from[n] > most)
            most = from[n] < (int32_t)kv_len ? from[n] : (int32_t)kv_len;
        ((int32_t *)clamped->data)[n] = most;
    }
    return wrong;
}

static void check_wrong_starts(fdma_dtype dtype, const packed_shape *shape, int n) {
    uint64_t state = (uint64_t)n + 70;
    problem x = packed_problem(shape, dtype, state);
    const fdma_tensor wrong = wrong_starts(x.kv_len, &state, &x.starts);
    problem_select(&x);
    if (x.window > 0)
        check_selection(&x, wrong);
    const attended want = problem_attend(&x, "reference", 1);
    gradient_problem p = gradient_of(&x, 0);
    const gradients expected = reference_gradients(&p);
    x.starts = p.x.starts = wrong;
    const kernel_list forward = kernels_for("forward", dtype);
    for (int kernel = 0; kernel < forward.count; kernel++)
        if (problem_is_taken(&x, forward.name[kernel]))
            check_close_results(&x, problem_attend(&x, forward.name[kernel], 1), want);
    const kernel_list backward = kernels_for("backward", dtype);
    for (int kernel = 0; kernel < backward.count; kernel++) {
        fdma_backward_args args = gradient_args(&p, backward.name[kernel]);
        if (!call_takes(operation_backward, &args))
            continue;
        p.deterministic = 1;
        const gradients found = gradient_run(&p, backward.name[kernel], 1);
        for (int t = 0; t < TEST_COUNT(found.all); t++)
            check_near(found.all[t], expected.all[t], 0.05);
    }
}

static void wrong_starts_are_clamped(void) { for_each_shape(check_wrong_starts); }

/* With a corrupt selection calls stay inside their tensors, for any contents of starts. */
static void check_corrupt_selection(fdma_dtype dtype, const packed_shape *shape, int n) {
    uint64_t state = (uint64_t)n + 90;
    problem x = packed_problem(shape, dtype, state);
    if (x.window < 0)
        return;
    const attended done = problem_attend(&x, "reference", 1);
    gradient_problem p = {.x = x, .out = done.out, .lse = done.lse, .dout = x.q};
    for (int how = 0; how < corruption_count; how++) {
        fdma_tensor clamped;
        p.deterministic = how % 2;
        corrupt(p.x.selection.expiry, (corruption)how, &state);
        corrupt(p.x.selection.slot, (corruption)(state % corruption_count), &state);
        p.x.starts = how % 3 ? wrong_starts(x.kv_len, &state, &clamped) : x.starts;
        const kernel_list kernels = kernels_for("backward", dtype);
        for (int kernel = 0; kernel < kernels.count; kernel++) {
            fdma_backward_args args = gradient_args(&p, kernels.name[kernel]);
            test_context("%s, corruption %d", kernels.name[kernel], how);
            if (!call_takes(operation_backward, &args))
                continue;
            gradient_run(&p, kernels.name[kernel], 1);
            if (problem_is_taken(&p.x, kernels.name[kernel]))
                problem_attend(&p.x, kernels.name[kernel], 1);
        }
        lists_by(&p.x, 64, kernels_of("lists").name[0]);
    }
}

static void corrupt_selections_stay_inside(void) { for_each_shape(check_corrupt_selection); }

static const test_entry tests[] = {
    TEST(selections_are_those_of_the_reference),
    TEST(attention_is_that_of_the_reference),
    TEST(unused_keys_are_not_read),
};

/* The CPU refuses invalid starts. */
static const test_entry device_tests[] = {
    TEST(selections_are_those_of_the_reference),
    TEST(long_selections_are_those_of_the_reference),
    TEST(attention_is_that_of_the_reference),
    TEST(unused_keys_are_not_read),
    TEST(wrong_starts_are_clamped),
    TEST(corrupt_selections_stay_inside),
};

int main(int argc, char **argv) {
    return argc > 1 ? test_run_backend(argc, argv, device_tests, TEST_COUNT(device_tests))
                    : test_run(tests, TEST_COUNT(tests));
}
