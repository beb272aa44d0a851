/* test_kv_used.c - sequences in which only the first kv_used keys exist. Compares every kernel of
 * the CPU or of a device with calls of the kernel "reference" on each sequence cut to those keys.
 * The memory behind them is poisoned. */
#include "used_problem.h"

static const used_shape used_shapes[] = {
    {5, 100, 300, 2, 2, 64, 40, 0, 0, FDMA_SCOPE_CAUSAL, 1, 0, 0, 0},
    {6, 70, 400, 4, 1, 128, 60, 20, 3, FDMA_SCOPE_CAUSAL, 1, 0, 1, 0},
    {4, 260, 260, 2, 1, 96, 50, 0, 0, FDMA_SCOPE_CAUSAL, 1, 2.5, 0, 0},
    {3, 200, 700, 3, 1, 64, 140, 10, 0, FDMA_SCOPE_CAUSAL, 1, 0, 0, 1},
    {5, 1, 900, 4, 2, 128, 100, 0, 0, FDMA_SCOPE_CAUSAL, 1, 0, 0, 0},
    {5, 3, 600, 2, 1, 64, 70, 16, 2, FDMA_SCOPE_CAUSAL, 1, 0, 1, 0},
    {4, 150, 300, 2, 2, 128, -1, 0, 0, FDMA_SCOPE_GLOBAL, 1, 0, 0, 0},
    {4, 90, 200, 2, 1, 64, -1, 0, 0, FDMA_SCOPE_GLOBAL, 0, 0, 1, 0},
    {5, 1, 800, 4, 1, 64, -1, 0, 0, FDMA_SCOPE_GLOBAL, 1, 0, 0, 0},
    {3, 12, 500, 1, 2, 256, -1, 0, 0, FDMA_SCOPE_GLOBAL, 1, 0, 0, 0},
    {4, 120, 250, 2, 1, 128, 40, 0, 1, FDMA_SCOPE_GLOBAL, 0, 0, 0, 0},
    {4, 120, 250, 1, 2, 64, 30, 0, 0, FDMA_SCOPE_GLOBAL, 1, 0, 1, 0},
    {3, 50, 40, 2, 1, 64, 20, 0, 0, FDMA_SCOPE_GLOBAL, 1, 0, 0, 0},
    {3, 60, 200, 2, 1, 192, 900, 0, 0, FDMA_SCOPE_CAUSAL, 1, 0, 0, 0},
    {4, 16, 300, 1, 1, 64, 30, 0, 0, FDMA_SCOPE_CAUSAL, 1, 0, 0, 1},
    {4, 90, 300, 2, 2, 64, 1, 0, 0, FDMA_SCOPE_CAUSAL, 1, 0, 0, 0},
    {3, 300, 300, 3, 1, 80, 33, 7, 1, FDMA_SCOPE_CAUSAL, 1, 0, 1, 0},
    {2, 700, 1100, 1, 1, 64, 21, 0, 0, FDMA_SCOPE_CAUSAL, 1, 0, 0, 0},
};

/* ---- select and lists ---- */

static fdma_selection select_by(const problem *x, const char *kernel) {
    fdma_selection found = selection_for(x->score);
    fdma_select_args args = {.size = sizeof args,
                             .score = x->score,
                             .key_valid = x->key_valid,
                             .selection = &found,
                             .window = x->window,
                             .recent = x->recent,
                             .sinks = x->sinks,
                             .scope = x->scope,
                             .exec = {.kernel = kernel, .threads = 2},
                             .kv_used = x->kv_used,
                             .gap = x->gap};
    CHECK_OK(run_select(&args));
    return found;
}

static void check_selection(const problem *x) {
    const kernel_list kernels = kernels_of("select");
    for (int kernel = 0; kernel < kernels.count; kernel++) {
        test_context("%s select, kv_len %d, window %d, scope %d, gap %g", kernels.name[kernel],
                     (int)x->kv_len, (int)x->window, (int)x->scope, x->gap);
        const fdma_selection found = select_by(x, kernels.name[kernel]);
        CHECK(same_tensor(found.expiry, x->selection.expiry));
        CHECK(same_tensor(found.slot, x->selection.slot));
        CHECK_INT(found.kv_len, x->kv_len);
    }
}

static fdma_lists_args lists_of(const problem *x, int64_t tile_len, const char *kernel) {
    const int64_t tiles = (x->q_len + tile_len - 1) / tile_len;
    return (fdma_lists_args){.size = sizeof(fdma_lists_args),
                             .selection = &x->selection,
                             .list =
                                 new_output(FDMA_INT32, x->batch, x->kv_heads, tiles, x->kv_len),
                             .count = new_output(FDMA_INT32, x->batch, x->kv_heads, tiles, 2),
                             .q_len = x->q_len,
                             .tile_len = tile_len,
                             .causal = x->causal,
                             .exec = {.kernel = kernel, .threads = 2},
                             .kv_used = x->kv_used};
}

/* Global scope lets a cut call have more queries than keys. Under a causal mask lists do not depend
 * on the scope. */
static void check_lists(const problem *x, int64_t tile_len) {
    const kernel_list kernels = kernels_of("lists");
    const fdma_lists_args want = lists_of(x, tile_len, "reference");
    for (int64_t b = 0; b < x->batch; b++) {
        problem cut = cut_sequence(x, b);
        cut.selection.scope = FDMA_SCOPE_GLOBAL;
        cut.q_len = x->q_len;
        fdma_lists_args args = lists_of(&cut, tile_len, "reference");
        args.list = sequence_of(want.list, b);
        args.count = sequence_of(want.count, b);
        CHECK_OK(run_lists(&args));
    }
    for (int kernel = 0; kernel < kernels.count; kernel++) {
        fdma_lists_args found = lists_of(x, tile_len, kernels.name[kernel]);
        test_context("%s: tiles of %d", kernels.name[kernel], (int)tile_len);
        CHECK_OK(run_lists(&found));
        CHECK(same_tensor(found.list, want.list));
        CHECK(same_tensor(found.count, want.count));
    }
}

/* ---- forward and backward ---- */

static void check_attention(const problem *x) {
    const attended want = attend_cut(x);
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

static void check_gradients(const problem *x) {
    gradient_problem p = gradient_of(x, 1);
    const gradient_problem wide = wide_problem(&p);
    const kernel_list kernels = kernels_for("backward", x->dtype);
    int taken = 0;
    *p.expected = (expected_gradients){1, differentiate_cut(&wide, "reference"),
                                       differentiate_cut(&p, "reference/float32")};
    for (int kernel = 0; kernel < kernels.count; kernel++) {
        fdma_backward_args args = gradient_args(&p, kernels.name[kernel]);
        test_context("%s backward, %s, kv_len %d, window %d", kernels.name[kernel],
                     dtype_name(x->dtype), (int)x->kv_len, (int)x->window);
        if (!call_takes(operation_backward, &args))
            continue;
        const gradients found = gradient_run(&p, kernels.name[kernel], 2);
        check_expected(&p, found);
        if (test_backend.run == NULL)
            check_same_gradients(found, differentiate_cut(&p, kernels.name[kernel]));
        taken++;
    }
    CHECK(taken > 0);
}

/* A call that adds gradients leaves those of keys that do not exist unchanged, except for dbias,
 * which it overwrites. */
static void check_added_gradients(const problem *x, const char *kernel) {
    const gradient_problem p = gradient_of(x, 0);
    fdma_backward_args args = gradient_args(&p, kernel);
    if (!call_takes(operation_backward, &args))
        return;
    args.accumulate = 1;
    fill_tensor_with(args.dq, 3);
    fill_tensor_with(args.dk, 3);
    fill_tensor_with(args.dv, 3);
    test_context("%s backward adds, kv_len %d", kernel, (int)x->kv_len);
    CHECK_OK(run_backward(&args));
    for (int64_t i = 0; i < count_of(args.dk); i++) {
        const int64_t key = i / (x->kv_heads * x->head_dim);
        if (key % x->kv_len >= used_by(x, key / x->kv_len)) {
            CHECK_NEAR(load_double(args.dk.data, x->dtype, i), 3, 0);
            CHECK_NEAR(load_double(args.dv.data, x->dtype, i), 3, 0);
        }
    }
    for (int64_t i = 0; i < count_of(args.dbias); i++)
        if (i % x->kv_len >= used_by(x, i / x->kv_len / x->kv_heads))
            CHECK_NEAR(load_double(args.dbias.data, args.dbias.dtype, i), 0, 0);
}

static void sequences_are_cut(void) {
    for (int n = 0; n < test_repeats(2) * TEST_COUNT(used_shapes); n++) {
        const used_shape *const shape = &used_shapes[n % TEST_COUNT(used_shapes)];
        const int types = test_dtype_count - first_dtype();
        problem x = used_problem(shape, test_dtypes[first_dtype() + n % types], (uint64_t)n + 3);
        select_cut(&x);
        const problem sound = x;
        x.selection.expiry = copy_tensor(x.selection.expiry);
        x.selection.slot = copy_tensor(x.selection.slot);
        poison_rest(&x);
        if (x.window >= 0) {
            check_selection(&sound); // its score is poisoned, too
            check_lists(&x, 1 + n * 7 % 64);
        }
        check_attention(&x);
        check_gradients(&x);
        const kernel_list kernels = kernels_for("backward", x.dtype);
        const int last = test_backend.run != NULL ? kernels.count : 1;
        for (int kernel = 0; kernel < last; kernel++)
            check_added_gradients(&x, kernels.name[kernel]);
        test_free_all();
    }
}

/* The calls on x give the same bits as those on `sound`, although x has another selection. */
static void check_same_calls(const problem *x, const problem *sound) {
    const kernel_list forward = kernels_for("forward", x->dtype), lists = kernels_of("lists");
    const kernel_list backward = kernels_for("backward", x->dtype);
    for (int kernel = 0; kernel < forward.count; kernel++)
        if (problem_is_taken(x, forward.name[kernel]))
            check_same_results(problem_attend(x, forward.name[kernel], 2),
                               problem_attend(sound, forward.name[kernel], 2));
    gradient_problem p = gradient_of(sound, 1);
    p.deterministic = 1;
    for (int kernel = 0; kernel < backward.count; kernel++) {
        fdma_backward_args args = gradient_args(&p, backward.name[kernel]);
        if (!call_takes(operation_backward, &args))
            continue;
        p.x = *sound;
        const gradients want = gradient_run(&p, backward.name[kernel], 2);
        p.x = *x;
        check_same_gradients(gradient_run(&p, backward.name[kernel], 2), want);
    }
    for (int kernel = 0; kernel < lists.count; kernel++) {
        fdma_lists_args found = lists_of(x, 64, lists.name[kernel]);
        fdma_lists_args want = lists_of(sound, 64, lists.name[kernel]);
        CHECK_OK(run_lists(&found));
        CHECK_OK(run_lists(&want));
        CHECK(same_tensor(found.list, want.list));
        CHECK(same_tensor(found.count, want.count));
    }
}

/* A selection may hold anything behind the keys that exist: no call refuses it, and none uses it.
 * Some of its slots are slots of keys that exist, others are outside of every table. */
static void selections_are_read_as_far_as_keys_exist(void) {
    for (int n = 0; n < TEST_COUNT(used_shapes); n++) {
        const int types = test_dtype_count - first_dtype();
        problem sound =
            used_problem(&used_shapes[n], test_dtypes[first_dtype() + n % types], (uint64_t)n + 70);
        uint64_t state = (uint64_t)n + 1;
        select_cut(&sound);
        for (int how = n % 3; how < corruption_count && sound.window >= 0; how += 3) {
            problem x = sound;
            corrupt_rest(&x, (corruption)how, &state);
            test_context("shape %d, corruption %d", n, how);
            check_same_calls(&x, &sound);
        }
        test_free_all();
    }
}

/* Fewer keys may be divided into more splits. */
static void long_sequences_are_cut(void) {
    const used_shape shape = {1, 1, 16400, 2, 1, 8, -1, 0, 0, FDMA_SCOPE_GLOBAL, 1, 0, 0, 0};
    problem x = used_problem(&shape, backend_dtype(), 5);
    const int32_t used[] = {16384};
    memcpy(x.kv_used.data, used, sizeof used);
    poison_rest(&x);
    check_attention(&x);
    used_shape wide = shape;
    wide.head_dim = 64;
    test_free_all();
    x = used_problem(&wide, backend_dtype(), 6);
    memcpy(x.kv_used.data, used, sizeof used);
    poison_rest(&x);
    check_attention(&x);
}

/* ---- scores and the fused calls ---- */

typedef struct scored_problem {
    problem x;
    fdma_tensor dt_proj, a;
} scored_problem;

static scored_problem new_scored(const used_shape *shape, fdma_dtype dtype, uint64_t seed) {
    scored_problem p = {.x = used_problem(shape, dtype, seed)};
    p.dt_proj =
        new_tensor(FDMA_FLOAT32, shape->kv_heads, shape->kv_heads * shape->head_dim, -1, -1);
    p.a = new_tensor(FDMA_FLOAT32, shape->kv_heads, -1, -1, -1);
    fill_random(p.dt_proj, &seed, 0.2F);
    fill_random(p.a, &seed, 1);
    select_cut(&p.x);
    poison_rest(&p.x);
    return p;
}

/* A key_valid in which the keys that do not exist are padding. */
static fdma_tensor mask_of(const problem *x) {
    const fdma_tensor mask = new_tensor(FDMA_UINT8, x->batch, x->kv_len, -1, -1);
    for (int64_t n = 0; n < x->batch * x->kv_len; n++) {
        const int valid = x->key_valid.rank == 0 || ((const uint8_t *)x->key_valid.data)[n] != 0;
        ((uint8_t *)mask.data)[n] = (uint8_t)(valid && n % x->kv_len < used_by(x, n / x->kv_len));
    }
    return mask;
}

/* Scores and their gradients treat keys that do not exist like padding. */
static void check_score(const scored_problem *p, const char *kernel) {
    const problem *const x = &p->x;
    fdma_tensor score[2], bias[2], dv[2], ddt_proj[2], da[2], dbias = copy_tensor(x->bias);
    for (int64_t i = 0; i < count_of(dbias); i++)
        ((float *)dbias.data)[i] = (float)(i % 7) - 3;
    for (int masked = 0; masked < 2; masked++) {
        fdma_score_args args = {.size = sizeof args, .v = x->v, .dt_proj = p->dt_proj, .a = p->a};
        args.score = score[masked] = new_output(FDMA_FLOAT32, x->batch, x->kv_heads, x->kv_len, -1);
        args.bias = bias[masked] = copy_tensor(args.score);
        args.key_valid = masked ? mask_of(x) : x->key_valid;
        args.kv_used = masked ? (fdma_tensor){0} : x->kv_used;
        args.exec = (fdma_exec){.kernel = kernel, .threads = 2};
        CHECK_OK(run_score(&args));
        fdma_score_backward_args back = {.size = sizeof back, .v = x->v, .dbias = dbias};
        back.dt_proj = p->dt_proj, back.a = p->a;
        back.key_valid = args.key_valid, back.kv_used = args.kv_used;
        back.ddt_proj = ddt_proj[masked] = copy_tensor(p->dt_proj);
        back.da = da[masked] = copy_tensor(p->a);
        back.dv = dv[masked] = copy_tensor(x->v);
        fill_tensor_with(back.dv, 1);
        back.exec = args.exec;
        CHECK_OK(run_score_backward(&back));
    }
    CHECK(same_tensor(score[0], score[1]));
    CHECK(same_tensor(bias[0], bias[1]));
    CHECK(same_tensor(dv[0], dv[1]));
    CHECK(same_tensor(ddt_proj[0], ddt_proj[1]));
    CHECK(same_tensor(da[0], da[1]));
}

static void check_fused(const scored_problem *p, const char *kernel) {
    problem x = p->x;
    fdma_selection selection = selection_for(x.score);
    fdma_attention_args args = {.size = sizeof args, .q = x.q, .k = x.k, .v = x.v};
    const fdma_forward_args outputs = problem_args(&x, kernel);
    args.dt_proj = p->dt_proj, args.a = p->a, args.key_valid = x.key_valid;
    args.out = outputs.out, args.lse = outputs.lse;
    args.score = x.score = new_output(FDMA_FLOAT32, x.batch, x.kv_heads, x.kv_len, -1);
    args.bias = x.bias = copy_tensor(x.score);
    args.selection = &selection, args.window = x.window, args.scope = x.scope;
    args.recent = x.recent, args.sinks = x.sinks, args.gap = x.gap,
    args.bias_form = FDMA_BIAS_LINEAR;
    args.softcap = x.softcap, args.causal = x.causal, args.kv_used = x.kv_used;
    args.exec = (fdma_exec){.kernel = kernel, .threads = 2};
    CHECK_OK(run_attention(&args));
    select_cut(&x);
    CHECK(same_tensor(selection.expiry, x.selection.expiry));
    CHECK(same_tensor(selection.slot, x.selection.slot));
    check_same_results((attended){.out = args.out, .lse = args.lse}, problem_attend(&x, kernel, 2));
    gradient_problem g = gradient_of(&x, 0);
    g.out = args.out, g.lse = args.lse;
    g.deterministic = 1;
    const gradients steps = gradient_run(&g, kernel, 2);
    const fdma_tensor to[5] = {copy_tensor(steps.dq), copy_tensor(steps.dk), copy_tensor(steps.dv),
                               copy_tensor(p->dt_proj), copy_tensor(p->a)};
    fdma_attention_backward_args back =
        fused_args(&g, p->dt_proj, p->a, FDMA_BIAS_LINEAR, to, kernel);
    back.deterministic = g.deterministic;
    CHECK_OK(run_attention_backward(&back));
    fdma_score_backward_args score = {.size = sizeof score, .v = x.v, .dbias = steps.dbias};
    score.dt_proj = p->dt_proj, score.a = p->a, score.dv = steps.dv, score.kv_used = x.kv_used;
    score.ddt_proj = copy_tensor(p->dt_proj), score.da = copy_tensor(p->a);
    score.key_valid = x.key_valid, score.bias_form = FDMA_BIAS_LINEAR, score.exec = back.exec;
    CHECK_OK(run_score_backward(&score));
    CHECK(same_tensor(to[0], steps.dq));
    CHECK(same_tensor(to[1], steps.dk));
    CHECK(same_tensor(to[2], steps.dv));
    CHECK(same_tensor(to[3], score.ddt_proj));
    CHECK(same_tensor(to[4], score.da));
}

static void scores_and_fused_calls_are_cut(void) {
    for (int n = 0; n < TEST_COUNT(used_shapes); n++) {
        const scored_problem p = new_scored(&used_shapes[n], backend_dtype(), (uint64_t)n + 40);
        const kernel_list kernels = kernels_of("score");
        for (int kernel = 0; kernel < kernels.count; kernel++) {
            test_context("%s, shape %d", kernels.name[kernel], n);
            check_score(&p, kernels.name[kernel]);
        }
        kernel_list attending = kernels_for("backward", backend_dtype());
        if (test_backend.run != NULL) // there the steps of a fused call have no common name
            attending = (kernel_list){.name = {"cuda"}, .count = 1};
        for (int kernel = 0; kernel < attending.count && p.x.window > 0; kernel++) {
            test_context("%s, shape %d", attending.name[kernel], n);
            check_fused(&p, attending.name[kernel]);
        }
        test_free_all();
    }
}

/* ---- all keys, and wrong numbers ---- */

static void check_equal_calls(const problem *x, const problem *y) {
    const kernel_list forward = kernels_for("forward", x->dtype), select = kernels_of("select");
    const kernel_list backward = kernels_for("backward", x->dtype), lists = kernels_of("lists");
    gradient_problem p = gradient_of(x, 0), r = p;
    p.deterministic = r.deterministic = 1;
    r.x = *y;
    for (int kernel = 0; kernel < select.count && x->window >= 0; kernel++) {
        const fdma_selection one = select_by(x, select.name[kernel]);
        const fdma_selection other = select_by(y, select.name[kernel]);
        CHECK(same_tensor(one.expiry, other.expiry) && same_tensor(one.slot, other.slot));
    }
    for (int kernel = 0; kernel < lists.count && x->window >= 0; kernel++) {
        fdma_lists_args one = lists_of(x, 33, lists.name[kernel]);
        fdma_lists_args other = lists_of(y, 33, lists.name[kernel]);
        CHECK(run_lists(&one) == FDMA_OK && run_lists(&other) == FDMA_OK);
        CHECK(same_tensor(one.list, other.list) && same_tensor(one.count, other.count));
    }
    for (int kernel = 0; kernel < forward.count; kernel++)
        if (problem_is_taken(x, forward.name[kernel]))
            check_same_results(problem_attend(x, forward.name[kernel], 2),
                               problem_attend(y, forward.name[kernel], 2));
    for (int kernel = 0; kernel < backward.count; kernel++) {
        fdma_backward_args args = gradient_args(&p, backward.name[kernel]);
        if (call_takes(operation_backward, &args))
            check_same_gradients(gradient_run(&p, backward.name[kernel], 2),
                                 gradient_run(&r, backward.name[kernel], 2));
    }
}

static void all_keys_are_those_without_kv_used(void) {
    for (int n = 0; n < TEST_COUNT(used_shapes); n++) {
        problem x = used_problem(&used_shapes[n], backend_dtype(), (uint64_t)n + 80);
        test_context("shape %d", n);
        fill_tensor_with(x.kv_used, (double)x.kv_len);
        select_cut(&x);
        problem y = x;
        y.kv_used = (fdma_tensor){0};
        if (x.q_len <= x.kv_len) // else a selection with causal scope has no such call
            check_equal_calls(&x, &y);
        test_free_all();
    }
}

/* Numbers that the CPU refuses. x->kv_used gets the numbers that a device replaces them by. */
static fdma_tensor wrong_used(problem *x, uint64_t *state) {
    const fdma_tensor wrong = copy_tensor(x->kv_used);
    for (int64_t b = 0; b < x->batch; b++) {
        const int32_t values[] = {INT32_MIN, INT32_MAX, -1, (int32_t)x->kv_len + 1,
                                  (int32_t)random_bits(state)};
        int32_t *const given = (int32_t *)wrong.data + b;
        *given = values[random_below(state, TEST_COUNT(values))];
        const int32_t most = *given < x->kv_len ? *given : (int32_t)x->kv_len;
        ((int32_t *)x->kv_used.data)[b] = most > 0 ? most : 0;
    }
    return wrong;
}

static void wrong_numbers_are_clamped(void) {
    for (int n = 0; n < 2 * TEST_COUNT(used_shapes); n++) {
        uint64_t state = (uint64_t)n + 20;
        problem x =
            used_problem(&used_shapes[n % TEST_COUNT(used_shapes)], backend_dtype(), state + 100);
        test_context("shape %d", n);
        const fdma_tensor wrong = wrong_used(&x, &state);
        select_cut(&x);
        poison_rest(&x);
        problem y = x;
        y.kv_used = wrong;
        check_equal_calls(&x, &y);
        test_free_all();
    }
}

/* With a selection that is corrupt, or was made with other numbers, calls stay inside their
 * tensors. */
static void corrupt_selections_stay_inside(void) {
    for (int n = 0; n < TEST_COUNT(used_shapes); n++) {
        uint64_t state = (uint64_t)n + 90;
        problem x = used_problem(&used_shapes[n], backend_dtype(), state);
        if (x.window < 0)
            continue;
        select_cut(&x);
        gradient_problem p = gradient_of(&x, 0);
        const kernel_list kernels = kernels_for("backward", x.dtype);
        for (int how = 0; how <= corruption_count; how++) {
            p.deterministic = how % 2;
            p.x.kv_used = new_used(&used_shapes[n], &state);
            for (int kernel = 0; kernel < kernels.count; kernel++) {
                fdma_backward_args args = gradient_args(&p, kernels.name[kernel]);
                test_context("%s, corruption %d", kernels.name[kernel], how);
                if (call_takes(operation_backward, &args))
                    gradient_run(&p, kernels.name[kernel], 1);
                if (problem_is_taken(&p.x, kernels.name[kernel]))
                    problem_attend(&p.x, kernels.name[kernel], 1);
            }
            fdma_lists_args args = lists_of(&p.x, 40, kernels_of("lists").name[0]);
            CHECK_OK(run_lists(&args));
            corrupt(p.x.selection.expiry, (corruption)(how % corruption_count), &state);
            corrupt(p.x.selection.slot, (corruption)(state % corruption_count), &state);
        }
        test_free_all();
    }
}

static const test_entry tests[] = {
    TEST(sequences_are_cut),
    TEST(selections_are_read_as_far_as_keys_exist),
    TEST(long_sequences_are_cut),
    TEST(scores_and_fused_calls_are_cut),
    TEST(all_keys_are_those_without_kv_used),
};

/* The CPU refuses wrong numbers. */
static const test_entry device_tests[] = {
    TEST(sequences_are_cut),
    TEST(long_sequences_are_cut),
    TEST(scores_and_fused_calls_are_cut),
    TEST(all_keys_are_those_without_kv_used),
    TEST(wrong_numbers_are_clamped),
    TEST(corrupt_selections_stay_inside),
};

int main(int argc, char **argv) {
    return argc > 1 ? test_run_backend(argc, argv, device_tests, TEST_COUNT(device_tests))
                    : test_run(tests, TEST_COUNT(tests));
}
