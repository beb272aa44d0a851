/* test_sequences.c - sequences of which only the first kv_used keys exist, and packed sequences
 * (starts): every call equals calls on each sequence alone, cut to its own keys. Memory of no
 * sequence is poisoned. On a device wrong numbers are clamped; test_errors.c checks that the CPU
 * refuses them. */
#include "backend.h"
#include "gradient.h"
#include "scores.h"

/* ---- problems ---- */

typedef enum cut_kind {
    used_any,            /* kv_used: none, one, fewer than queries, as many, all, or any number */
    used_equal,          /* every sequence has equally many keys */
    packed_any,          /* starts: sequences of any length */
    packed_with_empties, /* half of them are empty */
    packed_short,        /* up to four positions each */
    packed_ones,         /* one position each */
    packed_once,         /* nearly everything in one sequence */
    packed_fixed,        /* sequences of 1, 40, 0, 67, 50 and 0 positions; 9 more belong to none */
    cut_count,
} cut_kind;

typedef struct sequence_shape {
    cut_kind cut;
    int64_t batch; /* the number of sequences, packed or not */
    int64_t q_len, kv_len, group, kv_heads, head_dim;
    int64_t window, recent, sinks; /* window -1: dense */
    fdma_scope scope;
    int causal;
    double softcap;
    bool padded;
} sequence_shape;

static const sequence_shape used_shapes[] = {
    {used_any, 5, 100, 300, 2, 2, 64, 40, 0, 0, FDMA_SCOPE_CAUSAL, 1, 0, false},
    {used_any, 6, 70, 400, 4, 1, 128, 60, 20, 3, FDMA_SCOPE_CAUSAL, 1, 0, true},
    {used_any, 4, 260, 260, 2, 1, 96, 50, 0, 0, FDMA_SCOPE_CAUSAL, 1, 2.5, false},
    {used_equal, 3, 200, 700, 3, 1, 64, 140, 10, 0, FDMA_SCOPE_CAUSAL, 1, 0, false},
    {used_any, 5, 1, 900, 4, 2, 128, 100, 0, 0, FDMA_SCOPE_CAUSAL, 1, 0, false},
    {used_any, 5, 3, 600, 2, 1, 64, 70, 16, 2, FDMA_SCOPE_CAUSAL, 1, 0, true},
    {used_any, 4, 150, 300, 2, 2, 128, -1, 0, 0, FDMA_SCOPE_GLOBAL, 1, 0, false},
    {used_any, 4, 90, 200, 2, 1, 64, -1, 0, 0, FDMA_SCOPE_GLOBAL, 0, 0, true},
    {used_any, 5, 1, 800, 4, 1, 64, -1, 0, 0, FDMA_SCOPE_GLOBAL, 1, 0, false},
    {used_any, 3, 12, 500, 1, 2, 256, -1, 0, 0, FDMA_SCOPE_GLOBAL, 1, 0, false},
    {used_any, 4, 120, 250, 2, 1, 128, 40, 0, 1, FDMA_SCOPE_GLOBAL, 0, 0, false},
    {used_any, 4, 120, 250, 1, 2, 64, 30, 0, 0, FDMA_SCOPE_GLOBAL, 1, 0, true},
    {used_any, 3, 50, 40, 2, 1, 64, 20, 0, 0, FDMA_SCOPE_GLOBAL, 1, 0, false},
    {used_any, 3, 60, 200, 2, 1, 192, 900, 0, 0, FDMA_SCOPE_CAUSAL, 1, 0, false},
    {used_equal, 4, 16, 300, 1, 1, 64, 30, 0, 0, FDMA_SCOPE_CAUSAL, 1, 0, false},
    {used_any, 4, 90, 300, 2, 2, 64, 1, 0, 0, FDMA_SCOPE_CAUSAL, 1, 0, false},
    {used_any, 3, 300, 300, 3, 1, 80, 33, 7, 1, FDMA_SCOPE_CAUSAL, 1, 0, true},
    {used_any, 2, 700, 1100, 1, 1, 64, 21, 0, 0, FDMA_SCOPE_CAUSAL, 1, 0, false},
};

static const sequence_shape packed_shapes[] = {
    {packed_any, 9, 700, 700, 2, 2, 64, 50, 0, 0, FDMA_SCOPE_CAUSAL, 1, 0, false},
    {packed_any, 5, 800, 800, 4, 1, 128, 90, 20, 3, FDMA_SCOPE_CAUSAL, 1, 0, true},
    {packed_with_empties, 6, 520, 520, 2, 1, 256, 140, 0, 0, FDMA_SCOPE_CAUSAL, 1, 2.5, false},
    {packed_any, 60, 900, 900, 1, 2, 96, 130, 0, 2, FDMA_SCOPE_CAUSAL, 1, 0, false},
    {packed_any, 4, 1100, 1100, 3, 1, 64, 260, 0, 0, FDMA_SCOPE_CAUSAL, 1, 0, false},
    {packed_with_empties, 5, 640, 640, 2, 2, 128, -1, 0, 0, FDMA_SCOPE_GLOBAL, 1, 0, false},
    {packed_any, 7, 640, 640, 2, 1, 64, -1, 0, 0, FDMA_SCOPE_GLOBAL, 0, 0, true},
    {packed_any, 4, 500, 500, 1, 2, 192, -1, 0, 0, FDMA_SCOPE_GLOBAL, 0, 1.5, false},
    {packed_any, 6, 600, 600, 2, 1, 128, 40, 0, 1, FDMA_SCOPE_GLOBAL, 0, 0, false},
    {packed_with_empties, 6, 600, 600, 2, 2, 64, 70, 0, 0, FDMA_SCOPE_GLOBAL, 1, 0, true},
    {packed_any, 5, 400, 400, 4, 1, 64, 900, 0, 0, FDMA_SCOPE_CAUSAL, 1, 0, false},
    {packed_any, 5, 400, 400, 1, 1, 256, 900, 0, 0, FDMA_SCOPE_GLOBAL, 0, 0, false},
    {packed_ones, 300, 300, 300, 2, 1, 64, 5, 0, 0, FDMA_SCOPE_CAUSAL, 1, 0, false},
    {packed_short, 200, 300, 300, 2, 1, 128, -1, 0, 0, FDMA_SCOPE_GLOBAL, 0, 0, false},
    {packed_once, 300, 500, 500, 2, 1, 64, 30, 5, 0, FDMA_SCOPE_CAUSAL, 1, 0, false},
    {packed_any, 4, 13, 13, 4, 2, 64, 3, 0, 0, FDMA_SCOPE_CAUSAL, 1, 0, false},
    {packed_any, 3, 16, 16, 2, 1, 128, -1, 0, 0, FDMA_SCOPE_GLOBAL, 0, 0, false},
    {packed_any, 0, 200, 200, 2, 1, 64, 20, 0, 0, FDMA_SCOPE_CAUSAL, 1, 0, false},
};

/* Checked in every dtype. */
static const sequence_shape small_shapes[] = {
    {packed_fixed, 6, 167, 167, 2, 2, 64, -1, 0, 0, FDMA_SCOPE_GLOBAL, 1, 0, false},
    {packed_fixed, 6, 167, 167, 1, 2, 24, -1, 0, 0, FDMA_SCOPE_GLOBAL, 0, 0, true},
    {packed_fixed, 6, 167, 167, 4, 2, 32, 12, 0, 0, FDMA_SCOPE_CAUSAL, 1, 0, true},
    {packed_fixed, 6, 167, 167, 2, 2, 64, 9, 7, 3, FDMA_SCOPE_CAUSAL, 1, 2.5, false},
    {packed_fixed, 6, 167, 167, 3, 2, 128, 55, 0, 2, FDMA_SCOPE_CAUSAL, 1, 0, false},
    {packed_fixed, 6, 167, 167, 1, 2, 40, 20, 0, 1, FDMA_SCOPE_GLOBAL, 0, 0, true},
    {packed_fixed, 6, 167, 167, 2, 2, 8, 1, 0, 0, FDMA_SCOPE_GLOBAL, 1, 0, false},
    {packed_fixed, 6, 167, 167, 1, 2, 16, 300, 0, 0, FDMA_SCOPE_CAUSAL, 1, 0, true},
};

static fdma_tensor new_used(const sequence_shape *n, uint64_t *state) {
    const fdma_tensor tensor = new_tensor(FDMA_INT32, n->batch, -1, -1, -1);
    const int64_t len = n->kv_len, queries = n->q_len < len ? n->q_len : len;
    const int64_t first = random_below(state, 6);
    int32_t *const used = tensor.data;
    for (int64_t b = 0; b < n->batch; b++) {
        const int64_t choices[] = {0,       1,   random_below(state, queries),
                                   queries, len, random_below(state, len + 1)};
        const int64_t choice = n->cut == used_equal ? 5 : (first + b) % TEST_COUNT(choices);
        used[b] = n->cut == used_equal && b > 0 ? used[0] : (int32_t)choices[choice];
    }
    return tensor;
}

static int64_t length_of(cut_kind cut, int64_t kv_len, int64_t count, uint64_t *state) {
    switch (cut) {
    case packed_any:
        return random_below(state, 2 * kv_len / (count + 1) + 2);
    case packed_with_empties:
        return random_below(state, 2) * random_below(state, 4 * kv_len / (count + 1) + 2);
    case packed_short:
        return random_below(state, 5);
    case packed_ones:
        return 1;
    default:
        return random_below(state, 50) == 0 && kv_len > 2 ? kv_len - 2 : 1;
    }
}

/* `count` sequences. The last one ends at the last position, or some positions belong to none. */
static fdma_tensor new_starts(cut_kind cut, int64_t kv_len, int64_t count, uint64_t *state) {
    static const int32_t fixed[] = {0, 1, 41, 41, 108, 158, 158};
    if (cut == packed_fixed)
        return new_list(fixed, TEST_COUNT(fixed));
    const fdma_tensor tensor = new_tensor(FDMA_INT32, count + 1, -1, -1, -1);
    int32_t *const starts = tensor.data;
    for (int64_t n = 1; n <= count; n++)
        starts[n] = (int32_t)lesser(starts[n - 1] + length_of(cut, kv_len, count, state), kv_len);
    if (count > 0 && random_below(state, 2))
        starts[count] = (int32_t)kv_len;
    return tensor;
}

/* The caller makes its selection. */
static problem problem_of(const sequence_shape *n, fdma_dtype dtype, uint64_t seed) {
    const bool is_packed = n->cut >= packed_any;
    problem x = {.batch = is_packed ? 1 : n->batch,
                 .q_len = n->q_len,
                 .kv_len = n->kv_len,
                 .q_heads = n->group * n->kv_heads,
                 .kv_heads = n->kv_heads,
                 .head_dim = n->head_dim,
                 .window = n->window,
                 .recent = n->recent,
                 .sinks = n->sinks,
                 .scope = n->scope,
                 .causal = n->causal,
                 .softcap = n->softcap,
                 .dtype = dtype};
    problem_fill(&x, seed);
    fill_kinds(x.score, 1 + random_below(&seed, 200), &seed);
    if (is_packed)
        x.starts = new_starts(n->cut, n->kv_len, n->batch, &seed);
    else
        x.kv_used = new_used(n, &seed);
    if (x.window >= 0 && x.scope == FDMA_SCOPE_CAUSAL && random_below(&seed, 3) == 0)
        x.gap = 0.25 * (double)(1 + random_below(&seed, 8));
    if (n->padded)
        x.key_valid = new_padding(x.batch, x.kv_len, &seed);
    return x;
}

/* ---- sequences alone ---- */

/* The keys of one sequence and the queries that may attend to them. */
typedef struct piece {
    int64_t b, first, kv_len, first_query, q_len;
} piece;

typedef struct piece_list {
    piece *piece;
    int count;
} piece_list;

/* With kv_used only queries at the position of an existing key can be in a cut call with causal
 * scope. */
static piece_list pieces_of(const problem *x) {
    const int32_t *const used = x->kv_used.data, *const starts = x->starts.data;
    const int64_t most = used != NULL ? x->batch : count_of(x->starts);
    piece_list list = {.piece = test_alloc((size_t)most * sizeof(piece))};
    for (int64_t b = 0; used != NULL && b < x->batch; b++) {
        const int64_t q_len = x->causal && used[b] < x->q_len ? used[b] : x->q_len;
        list.piece[list.count++] = (piece){b, 0, used[b], x->q_len - q_len, q_len};
    }
    for (int64_t n = 0; starts != NULL && n + 1 < most; n++) {
        const int64_t first = starts[n], length = starts[n + 1] - first;
        if (length > 0)
            list.piece[list.count++] = (piece){0, first, length, first, length};
    }
    return list;
}

static fdma_tensor keys_of(fdma_tensor tensor, piece n, int axis) {
    return positions_of(sequence_of(tensor, n.b), axis, n.first, n.first + n.kv_len);
}

static fdma_tensor queries_of(fdma_tensor tensor, piece n, int axis) {
    return positions_of(sequence_of(tensor, n.b), axis, n.first_query, n.first_query + n.q_len);
}

static problem alone(const problem *x, piece n) {
    problem one = problem_sequence(x, n.b);
    one.kv_len = one.selection.kv_len = n.kv_len;
    one.q_len = n.q_len;
    one.starts = one.kv_used = (fdma_tensor){0};
    one.q = queries_of(x->q, n, 1);
    one.k = keys_of(x->k, n, 1);
    one.v = keys_of(x->v, n, 1);
    one.score = keys_of(x->score, n, 2);
    one.bias = keys_of(x->bias, n, 2);
    one.key_valid = keys_of(x->key_valid, n, 1);
    one.selection.slot = keys_of(x->selection.slot, n, 2);
    one.selection.expiry = keys_of(x->selection.expiry, n, 2);
    if (n.first > 0 && x->window >= 0) {
        one.selection.expiry = gathered(one.selection.expiry);
        for (int64_t i = 0; i < count_of(one.selection.expiry); i++)
            ((int32_t *)one.selection.expiry.data)[i] -= (int32_t)n.first;
    }
    return one;
}

/* Gives the problem the selections of its sequences alone. Keys of no sequence are not kept. */
static void select_alone(problem *x) {
    const piece_list pieces = pieces_of(x);
    if (x->window < 0)
        return;
    fdma_selection all = selection_for(x->score);
    fill_tensor_with(all.slot, -1);
    for (int64_t i = 0; i < count_of(all.expiry); i++)
        ((int32_t *)all.expiry.data)[i] = (int32_t)(i % x->kv_len);
    for (int p = 0; p < pieces.count; p++) {
        const piece n = pieces.piece[p];
        const problem one = alone(x, n);
        const fdma_selection own = selected_by(&one, "reference");
        for (int64_t i = 0; i < count_of(own.expiry); i++)
            ((int32_t *)own.expiry.data)[i] += (int32_t)n.first;
        copy_elements(keys_of(all.expiry, n, 2), own.expiry);
        copy_elements(keys_of(all.slot, n, 2), own.slot);
    }
    all.window = x->window, all.recent = x->recent, all.sinks = x->sinks;
    all.scope = x->scope, all.gap = x->gap, all.kv_len = x->kv_len;
    x->selection = all;
}

static attended attend_alone(const problem *x, const char *kernel) {
    const piece_list pieces = pieces_of(x);
    const fdma_forward_args whole = problem_args(x, kernel);
    fill_tensor_with(whole.out, 0);
    fill_tensor_with(whole.lse, -(double)INFINITY);
    for (int p = 0; p < pieces.count; p++) {
        const problem one = alone(x, pieces.piece[p]);
        fdma_forward_args args = problem_args(&one, kernel);
        args.out = queries_of(whole.out, pieces.piece[p], 1);
        args.lse = queries_of(whole.lse, pieces.piece[p], 2);
        CHECK_OK(run_forward(&args));
    }
    return (attended){.out = whole.out, .lse = whole.lse};
}

static gradients differentiate_alone(const gradient_problem *p, const char *kernel) {
    const piece_list pieces = pieces_of(&p->x);
    const fdma_backward_args whole = gradient_args(p, kernel);
    const gradients all = gradient_outputs(&whole);
    for (int t = 0; t < TEST_COUNT(all.all); t++)
        fill_tensor_with(all.all[t], 0);
    for (int i = 0; i < pieces.count; i++) {
        const piece n = pieces.piece[i];
        const gradient_problem one = {.x = alone(&p->x, n),
                                      .out = queries_of(p->out, n, 1),
                                      .lse = queries_of(p->lse, n, 2),
                                      .dout = queries_of(p->dout, n, 1),
                                      .dlse = queries_of(p->dlse, n, 2)};
        fdma_backward_args args = gradient_args(&one, kernel);
        args.dq = queries_of(all.dq, n, 1);
        args.dk = keys_of(all.dk, n, 1);
        args.dv = keys_of(all.dv, n, 1);
        args.dbias = keys_of(all.dbias, n, 2);
        CHECK_OK(run_backward(&args));
    }
    return all;
}

/* Marks the keys of each sequence. */
static const uint8_t *existing_keys(const problem *x) {
    const piece_list pieces = pieces_of(x);
    uint8_t *const exists = test_alloc((size_t)(x->batch * x->kv_len));
    for (int p = 0; p < pieces.count; p++)
        memset(exists + pieces.piece[p].b * x->kv_len + pieces.piece[p].first, 1,
               (size_t)pieces.piece[p].kv_len);
    return exists;
}

/* Poisons the keys of no sequence. Behind kv_used a selection may hold anything. */
static void poison_rest(problem *x) {
    const uint8_t *const exists = existing_keys(x);
    x->selection.expiry = copy_tensor(x->selection.expiry);
    x->selection.slot = copy_tensor(x->selection.slot);
    for (int64_t n = 0; n < x->batch * x->kv_heads * x->kv_len; n++) {
        const int64_t b = n / x->kv_len / x->kv_heads, g = n / x->kv_len % x->kv_heads;
        const int64_t j = n % x->kv_len;
        if (exists[b * x->kv_len + j])
            continue;
        spoil_key(x->k, b, j, g, NAN);
        spoil_key(x->v, b, j, g, NAN);
        ((float *)x->score.data)[n] = ((float *)x->bias.data)[n] = NAN;
        if (x->window >= 0 && x->kv_used.rank > 0) {
            ((int32_t *)x->selection.expiry.data)[n] = INT32_MAX;
            ((int32_t *)x->selection.slot.data)[n] = INT32_MIN;
        }
    }
}

/* ---- every kernel ---- */

static void set_context(const problem *x, const char *operation, const char *kernel) {
    test_context("%s %s, %s, %d %s sequences, q_len %d, kv_len %d, window %d, recent %d, sinks %d, "
                 "scope %d, gap %g%s",
                 kernel, operation, dtype_name(x->dtype), pieces_of(x).count,
                 x->starts.rank > 0 ? "packed" : "cut", (int)x->q_len, (int)x->kv_len,
                 (int)x->window, (int)x->recent, (int)x->sinks, (int)x->scope, x->gap,
                 x->key_valid.rank > 0 ? ", padding" : "");
}

static void check_selection(const problem *x) {
    const kernel_list kernels = kernels_of("select");
    int taken = 0;
    for (int kernel = 0; kernel < kernels.count; kernel++) {
        fdma_selection found = selection_for(x->score);
        fdma_select_args args = select_args(x, &found, kernels.name[kernel]);
        set_context(x, "select", kernels.name[kernel]);
        if (x->starts.rank > 0 && !call_takes(operation_select, &args))
            continue;
        CHECK_OK(run_select(&args));
        check_same_selection(&found, &x->selection);
        CHECK_INT(found.kv_len, x->kv_len);
        taken++;
    }
    CHECK(taken > 0);
}

/* The name of a point alone would let a sequence of one position be decoded, which adds in another
 * order; on a device other keys of a tile change the order. */
static bool gives_bits_alone(const char *kernel) {
    return test_backend.run == NULL && (is_reference(kernel) || strstr(kernel, "/tile") != NULL);
}

static void check_attention(const problem *x) {
    const attended want = attend_alone(x, "reference");
    const kernel_list kernels = kernels_for("forward", x->dtype);
    int taken = 0;
    for (int kernel = 0; kernel < kernels.count; kernel++) {
        const char *const name = kernels.name[kernel];
        set_context(x, "forward", name);
        if (!problem_is_taken(x, name))
            continue;
        const attended found = problem_attend(x, name, 2);
        check_close_results(x, found, want);
        if (gives_bits_alone(name))
            check_same_results(found, is_reference(name) ? want : attend_alone(x, name));
        taken++;
    }
    CHECK(taken > 0);
}

/* Deterministic gradients have the same bits in every run. The CPU has one form of them. */
static void check_gradients(const problem *x) {
    gradient_problem p = gradient_of(x, 1);
    const gradient_problem wide = widened_problem(&p);
    const kernel_list kernels = kernels_for("backward", x->dtype);
    int taken = 0;
    *p.expected = (expected_gradients){1, differentiate_alone(&wide, "reference"),
                                       differentiate_alone(&p, "reference/float32")};
    for (int kernel = 0; kernel < kernels.count; kernel++) {
        const char *const name = kernels.name[kernel];
        fdma_backward_args args = gradient_args(&p, name);
        set_context(x, "backward", name);
        if (!call_takes(operation_backward, &args))
            continue;
        taken++;
        p.deterministic = 0;
        const gradients found = gradient_run(&p, name, 2);
        check_expected(&p, found);
        p.deterministic = 1;
        if (test_backend.run == NULL) {
            if (!is_reference(name) || x->kv_used.rank > 0)
                check_same_gradients(found, differentiate_alone(&p, name));
            continue;
        }
        const gradients first = gradient_run(&p, name, 1);
        check_expected(&p, first);
        check_same_gradients(gradient_run(&p, name, 1), first);
    }
    CHECK(taken > 0);
}

/* A call that adds gradients leaves those of keys that do not exist unchanged, except for dbias,
 * which it overwrites. */
static void check_added_gradients(const problem *x, const char *kernel) {
    const uint8_t *const exists = existing_keys(x);
    const gradient_problem p = gradient_of(x, 0);
    fdma_backward_args args = gradient_args(&p, kernel);
    if (!call_takes(operation_backward, &args))
        return;
    args.accumulate = 1;
    fill_tensor_with(args.dq, 3);
    fill_tensor_with(args.dk, 3);
    fill_tensor_with(args.dv, 3);
    set_context(x, "backward that adds", kernel);
    CHECK_OK(run_backward(&args));
    for (int64_t i = 0; i < count_of(args.dk); i++) {
        if (!exists[i / (x->kv_heads * x->head_dim)]) {
            CHECK_NEAR(load_double(args.dk.data, x->dtype, i), 3, 0);
            CHECK_NEAR(load_double(args.dv.data, x->dtype, i), 3, 0);
        }
    }
    for (int64_t i = 0; i < count_of(args.dbias); i++)
        if (!exists[i / x->kv_len / x->kv_heads * x->kv_len + i % x->kv_len])
            CHECK_NEAR(load_double(args.dbias.data, args.dbias.dtype, i), 0, 0);
}

static void check_shape(const sequence_shape *shape, fdma_dtype dtype, uint64_t seed) {
    problem x = problem_of(shape, dtype, seed);
    select_alone(&x);
    const problem sound = x;
    poison_rest(&x);
    if (x.window >= 0)
        check_selection(&sound); // its score is poisoned, too
    check_attention(&x);
    check_gradients(&x);
    const kernel_list kernels = kernels_for("backward", x.dtype);
    const int last = test_backend.run != NULL ? kernels.count : 1;
    for (int kernel = 0; kernel < last && x.kv_used.rank > 0; kernel++)
        check_added_gradients(&x, kernels.name[kernel]);
    test_free_all();
}

enum { all_shapes = TEST_COUNT(used_shapes) + TEST_COUNT(packed_shapes) };

static const sequence_shape *shape_of_case(int n) {
    const int s = n % all_shapes;
    return s < TEST_COUNT(used_shapes) ? &used_shapes[s]
                                       : &packed_shapes[s - TEST_COUNT(used_shapes)];
}

static fdma_dtype dtype_of_case(int n) {
    return test_dtypes[first_dtype() + n % (test_dtype_count - first_dtype())];
}

static void cut_sequences_are_as_alone(void) {
    for (int n = 0; n < test_repeats(2) * TEST_COUNT(used_shapes); n += test_step(3))
        check_shape(&used_shapes[n % TEST_COUNT(used_shapes)], dtype_of_case(n), (uint64_t)n + 3);
}

static void packed_sequences_are_as_alone(void) {
    const int types = test_dtype_count - first_dtype();
    for (int n = 0; n < types * TEST_COUNT(small_shapes); n++)
        check_shape(&small_shapes[n / types], dtype_of_case(n), 31);
    for (int n = 0; n < TEST_COUNT(packed_shapes); n += test_step(3))
        check_shape(&packed_shapes[n], dtype_of_case(n), (uint64_t)n + 11);
}

/* ---- selections of packed sequences ---- */

/* Random rules, often with a window longer than the sequences. */
static problem random_selection(int64_t most, cut_kind cut, uint64_t *state) {
    const int64_t kv_len = 1 + random_below(state, most), kv_heads = 1 + random_below(state, 3);
    const int64_t count = random_below(state, cut == packed_ones ? kv_len + 1 : kv_len / 8 + 3);
    problem x = {.batch = 1, .q_len = kv_len, .kv_len = kv_len, .kv_heads = kv_heads};
    x.dtype = FDMA_FLOAT32;
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
    x.starts = new_starts(cut, kv_len, count, state);
    return x;
}

static void selections_of_packed_sequences(void) {
    static const int64_t longest[] = {3, 40, 300, 3000};
    const int cuts = packed_fixed - packed_any;
    const int cases = test_repeats(test_backend.run != NULL ? 2000 : 100);
    uint64_t state = 4;
    for (int i = 0; i < cases && test_state.failures < test_reports; i++) {
        const cut_kind cut = (cut_kind)(packed_any + i % cuts);
        problem x = random_selection(longest[i / cuts % 4], cut, &state);
        select_alone(&x);
        check_selection(&x);
        test_free_all();
    }
}

/* So many sequences that their numbers have two digits, and so many keys that every way to divide
 * them among thread blocks occurs. */
static void long_selections_of_packed_sequences(void) {
    static const int64_t lens[] = {1500, 2600, 9000, 20000, 40000, 70000};
    uint64_t state = 9;
    for (int i = 0; i < 2 * TEST_COUNT(lens); i++) {
        const int64_t kv_len = lens[i / 2], count = i % 2 ? 700 : 9;
        problem x = {.batch = 1, .q_len = kv_len, .kv_len = kv_len, .kv_heads = 2};
        x.dtype = FDMA_FLOAT32;
        x.window = i % 3 ? 300 : 20;
        x.scope = i % 5 == 4 ? FDMA_SCOPE_GLOBAL : FDMA_SCOPE_CAUSAL;
        x.recent = x.scope == FDMA_SCOPE_CAUSAL && i % 4 == 1 ? 40 : 0;
        x.gap = x.scope == FDMA_SCOPE_CAUSAL && i % 3 == 1 ? 0.5 : 0;
        x.score = new_tensor(FDMA_FLOAT32, 1, 2, kv_len, -1);
        fill_kinds(x.score, 400, &state);
        x.starts = new_starts(packed_with_empties, kv_len, count, &state);
        select_alone(&x);
        check_selection(&x);
        test_free_all();
    }
}

/* Fewer keys may be divided into more splits. */
static void long_sequences_are_cut(void) {
    static const int32_t used[] = {16384};
    for (int64_t head_dim = 8; head_dim <= 64; head_dim += 56) {
        const sequence_shape n = {used_any,          1, 1, 16400, 2, 1, head_dim, -1, 0, 0,
                                  FDMA_SCOPE_GLOBAL, 1, 0, false};
        problem x = problem_of(&n, backend_dtype(), (uint64_t)head_dim);
        memcpy(x.kv_used.data, used, sizeof used);
        poison_rest(&x);
        check_attention(&x);
        test_free_all();
    }
}

/* ---- calls that must be equal ---- */

/* The calls of every kernel on x give the same bits as those on y. Both have the out and lse of
 * x. */
static void check_equal_calls(const problem *x, const problem *y, bool with_select) {
    const kernel_list forward = kernels_for("forward", x->dtype), select = kernels_of("select");
    const kernel_list backward = kernels_for("backward", x->dtype);
    gradient_problem p = gradient_of(x, 1), r = p;
    p.deterministic = r.deterministic = 1;
    r.x = *y;
    for (int kernel = 0; kernel < select.count && x->window >= 0 && with_select; kernel++) {
        fdma_select_args args = select_args(x, &p.x.selection, select.name[kernel]);
        if (x->starts.rank > 0 && !call_takes(operation_select, &args))
            continue;
        const fdma_selection one = selected_by(x, select.name[kernel]);
        const fdma_selection other = selected_by(y, select.name[kernel]);
        check_same_selection(&one, &other);
    }
    for (int kernel = 0; kernel < forward.count; kernel++)
        if (problem_is_taken(x, forward.name[kernel]))
            check_same_results(problem_attend(x, forward.name[kernel], 2),
                               problem_attend(y, forward.name[kernel], 2));
    for (int kernel = 0; kernel < backward.count; kernel++) {
        fdma_backward_args args = gradient_args(&p, backward.name[kernel]);
        if (call_takes(operation_backward, &args))
            check_same_gradients(gradient_run(&r, backward.name[kernel], 2),
                                 gradient_run(&p, backward.name[kernel], 2));
    }
}

/* Behind the keys that exist a selection may hold anything: no call refuses it, and none uses it.
 * Some of its slots are slots of keys that exist, others are outside of every table. */
static void selections_are_read_as_far_as_keys_exist(void) {
    for (int n = 0; n < TEST_COUNT(used_shapes); n++) {
        problem sound = problem_of(&used_shapes[n], dtype_of_case(n), (uint64_t)n + 70);
        const uint8_t *const exists = existing_keys(&sound);
        uint64_t state = (uint64_t)n + 1;
        select_alone(&sound);
        for (int how = n % 3; how < corruption_count && sound.window >= 0; how += 3) {
            problem x = sound;
            fdma_tensor *const tensors[] = {&x.selection.expiry, &x.selection.slot};
            for (int t = 0; t < TEST_COUNT(tensors); t++) {
                const int32_t *const held = tensors[t]->data;
                *tensors[t] = copy_tensor(*tensors[t]);
                corrupt(*tensors[t], (corruption)how, &state);
                for (int64_t i = 0; i < count_of(*tensors[t]); i++)
                    if (exists[i / x.kv_len / x.kv_heads * x.kv_len + i % x.kv_len])
                        ((int32_t *)tensors[t]->data)[i] = held[i];
            }
            test_context("shape %d, corruption %d", n, how);
            check_equal_calls(&sound, &x, false);
        }
        test_free_all();
    }
}

static void all_keys_are_those_without_kv_used(void) {
    for (int n = 0; n < TEST_COUNT(used_shapes); n++) {
        problem x = problem_of(&used_shapes[n], backend_dtype(), (uint64_t)n + 80);
        test_context("shape %d", n);
        fill_tensor_with(x.kv_used, (double)x.kv_len);
        select_alone(&x);
        problem y = x;
        y.kv_used = (fdma_tensor){0};
        if (x.q_len <= x.kv_len) // else a selection with causal scope has no such call
            check_equal_calls(&x, &y, true);
        test_free_all();
    }
}

/* Numbers that the CPU refuses. The problem gets the numbers that a device replaces them by. */
static fdma_tensor wrong_numbers(problem *x, uint64_t *state) {
    const bool is_packed = x->starts.rank > 0;
    const int64_t count = is_packed ? 1 + random_below(state, 60) : x->batch;
    const fdma_tensor wrong = new_tensor(FDMA_INT32, count, -1, -1, -1);
    fdma_tensor *const clamped = is_packed ? &x->starts : &x->kv_used;
    const int32_t kv_len = (int32_t)x->kv_len;
    int32_t most = 0;
    *clamped = copy_tensor(wrong);
    for (int64_t n = 0; n < count; n++) {
        const int32_t values[] = {(int32_t)(uint32_t)random_bits(state), INT32_MIN, INT32_MAX, -1,
                                  kv_len + 1};
        int32_t *const given = (int32_t *)wrong.data + n;
        *given = is_packed && random_below(state, 40)
                     ? (int32_t)random_below(state, kv_len + 20) - 10
                     : values[random_below(state, TEST_COUNT(values))];
        if (!is_packed)
            most = 0;
        if ((n > 0 || !is_packed) && *given > most) // the first start is 0
            most = *given < kv_len ? *given : kv_len;
        ((int32_t *)clamped->data)[n] = most;
    }
    return wrong;
}

static void wrong_numbers_are_clamped(void) {
    for (int n = 0; n < 2 * all_shapes; n += test_step(5)) {
        uint64_t state = (uint64_t)n + 20;
        problem x = problem_of(shape_of_case(n), dtype_of_case(n), state + 100);
        test_context("shape %d", n);
        const fdma_tensor wrong = wrong_numbers(&x, &state);
        select_alone(&x);
        poison_rest(&x);
        problem y = x;
        *(x.starts.rank > 0 ? &y.starts : &y.kv_used) = wrong;
        check_equal_calls(&x, &y, true);
        test_free_all();
    }
}

/* With a selection that is corrupt, or was made with other numbers, calls stay inside their
 * tensors. */
static void corrupt_selections_stay_inside(void) {
    for (int n = 0; n < all_shapes; n += test_step(3)) {
        uint64_t state = (uint64_t)n + 90;
        problem x = problem_of(shape_of_case(n), dtype_of_case(n), state), other = x;
        if (x.window < 0)
            continue;
        select_alone(&x);
        gradient_problem p = gradient_of(&x, 0);
        const kernel_list kernels = kernels_for("backward", x.dtype);
        for (int how = 0; how <= corruption_count; how++) {
            p.deterministic = how % 2;
            if (x.kv_used.rank > 0)
                p.x.kv_used = new_used(shape_of_case(n), &state);
            else
                p.x.starts = how % 3 ? wrong_numbers(&other, &state) : x.starts;
            for (int kernel = 0; kernel < kernels.count; kernel++) {
                fdma_backward_args args = gradient_args(&p, kernels.name[kernel]);
                test_context("%s, shape %d, corruption %d", kernels.name[kernel], n, how);
                if (call_takes(operation_backward, &args))
                    gradient_run(&p, kernels.name[kernel], 1);
                if (problem_is_taken(&p.x, kernels.name[kernel]))
                    problem_attend(&p.x, kernels.name[kernel], 1);
            }
            corrupt(p.x.selection.expiry, (corruption)(how % corruption_count), &state);
            corrupt(p.x.selection.slot, (corruption)(state % corruption_count), &state);
        }
        test_free_all();
    }
}

/* ---- scores and the fused calls with kv_used ---- */

typedef struct scored_problem {
    problem x;
    fdma_tensor dt_proj, a;
} scored_problem;

static scored_problem new_scored(const sequence_shape *shape, fdma_dtype dtype, uint64_t seed) {
    const int64_t heads = shape->kv_heads;
    scored_problem p = {.x = problem_of(shape, dtype, seed),
                        .dt_proj = new_tensor(FDMA_FLOAT32, heads, heads * shape->head_dim, -1, -1),
                        .a = new_tensor(FDMA_FLOAT32, heads, -1, -1, -1)};
    fill_random(p.dt_proj, &seed, 0.2F);
    fill_random(p.a, &seed, 1);
    select_alone(&p.x);
    poison_rest(&p.x);
    return p;
}

/* A key_valid in which the keys that do not exist are padding. */
static fdma_tensor mask_of(const problem *x) {
    const uint8_t *const exists = existing_keys(x);
    const fdma_tensor mask = new_tensor(FDMA_UINT8, x->batch, x->kv_len, -1, -1);
    for (int64_t n = 0; n < x->batch * x->kv_len; n++) {
        const int valid = x->key_valid.rank == 0 || ((const uint8_t *)x->key_valid.data)[n] != 0;
        ((uint8_t *)mask.data)[n] = (uint8_t)(valid && exists[n]);
    }
    return mask;
}

/* Scores and their gradients treat keys that do not exist like padding. */
static void check_score(const scored_problem *p, const char *kernel) {
    enum { outputs = 5 };
    const problem *const x = &p->x;
    fdma_tensor found[2][outputs], dbias = copy_tensor(x->bias);
    for (int64_t i = 0; i < count_of(dbias); i++)
        ((float *)dbias.data)[i] = (float)(i % 7) - 3;
    for (int masked = 0; masked < 2; masked++) {
        fdma_score_args args = {.size = sizeof args, .v = x->v, .dt_proj = p->dt_proj, .a = p->a};
        args.score = new_output(FDMA_FLOAT32, x->batch, x->kv_heads, x->kv_len, -1);
        args.bias = copy_tensor(args.score);
        args.key_valid = masked ? mask_of(x) : x->key_valid;
        args.kv_used = masked ? (fdma_tensor){0} : x->kv_used;
        args.exec = (fdma_exec){.kernel = kernel, .threads = 2};
        CHECK_OK(run_score(&args));
        fdma_score_backward_args back = {.size = sizeof back, .v = x->v, .dbias = dbias};
        back.dt_proj = p->dt_proj, back.a = p->a;
        back.key_valid = args.key_valid, back.kv_used = args.kv_used;
        back.ddt_proj = copy_tensor(p->dt_proj), back.da = copy_tensor(p->a);
        back.dv = copy_tensor(x->v);
        fill_tensor_with(back.dv, 1);
        back.exec = args.exec;
        CHECK_OK(run_score_backward(&back));
        const fdma_tensor all[] = {args.score, args.bias, back.dv, back.ddt_proj, back.da};
        memcpy(found[masked], all, sizeof all);
    }
    for (int n = 0; n < outputs; n++)
        CHECK(same_tensor(found[0][n], found[1][n]));
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
    args.recent = x.recent, args.sinks = x.sinks, args.gap = x.gap;
    args.bias_form = FDMA_BIAS_LINEAR;
    args.softcap = x.softcap, args.causal = x.causal, args.kv_used = x.kv_used;
    args.exec = (fdma_exec){.kernel = kernel, .threads = 2};
    CHECK_OK(run_attention(&args));
    select_alone(&x);
    check_same_selection(&selection, &x.selection);
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
    const fdma_tensor want[5] = {steps.dq, steps.dk, steps.dv, score.ddt_proj, score.da};
    for (int n = 0; n < TEST_COUNT(want); n++)
        CHECK(same_tensor(to[n], want[n]));
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

static const test_entry tests[] = {
    TEST(selections_of_packed_sequences),
    TEST(packed_sequences_are_as_alone),
    TEST(cut_sequences_are_as_alone),
    TEST(selections_are_read_as_far_as_keys_exist),
    TEST(long_sequences_are_cut),
    TEST(scores_and_fused_calls_are_cut),
    TEST(all_keys_are_those_without_kv_used),
};

/* The CPU refuses wrong numbers. */
static const test_entry device_tests[] = {
    TEST(cut_sequences_are_as_alone),
    TEST(packed_sequences_are_as_alone),
    TEST(selections_of_packed_sequences),
    TEST(long_selections_of_packed_sequences),
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
