/* operation_cases.h - calls of every operation that has kernels, at sizes below, at and above the
 * sizes of tiles and blocks, and a loop that checks each call by each kernel. */
#pragma once

#include "calls.h"
#include "gradient.h"

/* ---- forward and backward ---- */

typedef struct shape {
    int64_t q_len, kv_len, group, kv_heads;
    int64_t window; /* -1: dense */
    int causal;
    int64_t head_dim; /* for backward; forward has every head_dim */
} shape;

static const shape forward_shapes[] = {
    {1, 130, 1, 2, -1, 1, 0},    {1, 300, 4, 2, 40, 1, 0},   {1, 7, 3, 2, -1, 0, 0},
    {5, 5, 1, 2, 3, 1, 0},       {5, 121, 3, 2, -1, 0, 0},   {5, 250, 4, 2, 30, 0, 0},
    {65, 65, 1, 2, -1, 1, 0},    {65, 90, 3, 1, 20, 1, 0},   {65, 40, 4, 1, -1, 1, 0},
    {65, 33, 3, 1, 12, 0, 0},    {200, 200, 1, 1, 33, 1, 0}, {200, 241, 3, 1, -1, 1, 0},
    {200, 203, 4, 1, 130, 1, 0},
};
static const int64_t head_dims[] = {8, 24, 40, 64, 128, 256};

static const shape shapes[] = {
    {1, 130, 1, 2, -1, 1, 64},   {1, 300, 4, 2, 40, 1, 128},   {5, 5, 1, 2, 3, 1, 8},
    {5, 121, 3, 2, -1, 0, 24},   {5, 250, 4, 2, 30, 0, 40},    {65, 65, 1, 2, -1, 1, 64},
    {65, 90, 3, 1, 20, 1, 128},  {65, 40, 4, 1, -1, 1, 40},    {65, 33, 3, 1, 12, 0, 256},
    {200, 200, 1, 1, 33, 1, 64}, {130, 203, 4, 1, 130, 1, 24},
};

/* If padded, the last key is padding, and every fifth one before it. */
static inline problem problem_of(const shape *n, int64_t head_dim, fdma_dtype dtype, bool padded) {
    problem x = {.batch = 1,
                 .q_len = n->q_len,
                 .kv_len = n->kv_len,
                 .q_heads = n->group * n->kv_heads,
                 .kv_heads = n->kv_heads,
                 .head_dim = head_dim,
                 .window = n->window,
                 .scope = n->causal ? FDMA_SCOPE_CAUSAL : FDMA_SCOPE_GLOBAL,
                 .causal = n->causal,
                 .softcap = n->q_len == 5 ? 2 : 0,
                 .dtype = dtype};
    problem_fill(&x, 50);
    if (padded) {
        x.key_valid = new_tensor(FDMA_UINT8, 1, n->kv_len, -1, -1);
        for (int64_t j = 0; j < n->kv_len; j++)
            ((uint8_t *)x.key_valid.data)[j] = (n->kv_len - 1 - j) % 5 != 0;
    }
    problem_select(&x);
    return x;
}

static inline call forward_call(const problem *x, const char *kernel) {
    return (call){.operation = operation_forward,
                  .args.forward = problem_args(x, kernel),
                  .selection = x->selection};
}

/* A mask, shared by all heads, with some empty rows and some empty columns. */
static inline fdma_tensor mask_of(const problem *x) {
    const fdma_tensor mask = new_tensor(FDMA_UINT8, 1, 1, x->q_len, x->kv_len);
    for (int64_t n = 0; n < count_of(mask); n++) {
        const int64_t i = n / x->kv_len, j = n % x->kv_len;
        ((uint8_t *)mask.data)[n] = i % 9 != 4 && j % 7 != 3 && (i + 3 * j) % 4 == 1;
    }
    return mask;
}

static inline fdma_tensor pair_bias_of(const problem *x, bool for_each_query) {
    const fdma_tensor bias =
        new_tensor(x->dtype, 1, x->q_heads, for_each_query ? x->q_len : 1, x->kv_len);
    uint64_t state = 4;
    fill_random(bias, &state, 1);
    return bias;
}

/* Large problems have one dtype each. The slow reference runs none of them. */
static inline bool make_forward(call *x, int c, int type, const char *kernel) {
    const int s = c / TEST_COUNT(head_dims), d = c % TEST_COUNT(head_dims);
    const shape *const n = &forward_shapes[s];
    const int64_t size = n->q_len * n->group * head_dims[d];
    if ((strcmp(kernel, "reference") == 0 && size > 65 * 64) ||
        (size > 65 * 128 && (s + d) % test_dtype_count != type)) {
        return false;
    }
    const problem p =
        problem_of(n, head_dims[d], test_dtypes[type], (s + head_dims[d] / 8) % 2 != 0);
    *x = forward_call(&p, kernel);
    x->args.forward.selection = p.window >= 0 ? &x->selection : NULL;
    if (c % 3 == 1)
        x->args.forward.attn_mask = mask_of(&p);
    if (c % 4 == 1)
        x->args.forward.attn_bias = pair_bias_of(&p, c % 8 == 1);
    return true;
}

static inline bool make_backward(call *x, int s, int type, const char *kernel) {
    const problem p = problem_of(&shapes[s], shapes[s].head_dim, test_dtypes[type], s % 2 != 0);
    const gradient_problem gradient = gradient_of(&p, s % 3);
    x->args.backward = gradient_args(&gradient, kernel);
    x->selection = p.selection;
    x->args.backward.selection = p.window >= 0 ? &x->selection : NULL;
    if (s % 3 != 0)
        x->args.backward.attn_mask = mask_of(&p);
    if (s % 2 != 0) {
        x->args.backward.attn_bias = pair_bias_of(&p, s % 4 == 1);
        x->args.backward.dattn_bias = new_output(s % 3 == 0 ? FDMA_FLOAT32 : p.dtype, 1, p.q_heads,
                                                 s % 4 == 1 ? p.q_len : 1, p.kv_len);
    }
    return true;
}

/* ---- score and its gradients ---- */

static const int64_t lengths[] = {1, 63, 64, 65, 131};
static const int64_t head_counts[] = {1, 2, 5};

/* Covers every length, number of heads and head_dim; form, padding and dtype of the weights vary
 * too. */
static inline bool make_score(call *x, int c, int type, const char *kernel) {
    const int rest = c / TEST_COUNT(lengths);
    const int64_t kv_len = lengths[c % TEST_COUNT(lengths)];
    const int64_t heads = head_counts[rest % TEST_COUNT(head_counts)];
    const int64_t head_dim = head_dims[rest / TEST_COUNT(head_counts)];
    const call_sizes n = {.batch = 1, .kv_len = kv_len, .kv_heads = heads, .head_dim = head_dim};
    uint64_t state = 9;
    fdma_score_args *const args = &x->args.score;
    (void)kernel;
    args->bias_form = (fdma_bias_form)(c % 3);
    call_make(x, &n, test_dtypes[type], true);
    args->dt_proj.dtype = args->a.dtype = c % 2 ? test_dtypes[type] : FDMA_FLOAT32;
    args->dt_bias.dtype = c % 3 ? test_dtypes[type] : FDMA_FLOAT32;
    if (args->bias_form == FDMA_BIAS_NONE)
        args->bias = (fdma_tensor){0};
    if (c % 4 < 2)
        args->key_valid = (fdma_tensor){0};
    call_alloc(x, &state);
    for (int64_t j = 0; j < count_of(args->key_valid); j++)
        ((uint8_t *)args->key_valid.data)[j] = (kv_len - j) % 3 != 0;
    return true;
}

static inline bool make_score_backward(call *x, int s, int type, const char *kernel) {
    const call_sizes n = {.batch = 2,
                          .kv_len = shapes[s].kv_len,
                          .kv_heads = shapes[s].kv_heads,
                          .head_dim = shapes[s].head_dim};
    uint64_t state = 3;
    fdma_score_backward_args *const args = &x->args.score_backward;
    (void)kernel;
    args->bias_form = s % 3 ? FDMA_BIAS_EXP : FDMA_BIAS_LINEAR;
    call_make(x, &n, test_dtypes[type], true);
    args->key_valid = (fdma_tensor){0};
    args->a.dtype = args->da.dtype = s % 2 ? test_dtypes[type] : FDMA_FLOAT32;
    args->dt_bias.dtype = args->ddt_bias.dtype = s % 3 ? test_dtypes[type] : FDMA_FLOAT32;
    call_alloc(x, &state);
    return true;
}

/* ---- select ---- */

typedef struct select_case {
    int64_t kv_len, window, recent, sinks;
    fdma_scope scope;
    double gap;
    int padded, slotted;
} select_case;

static inline void fill_select(call *x, const select_case *n) {
    const call_sizes sizes = {.batch = 2, .kv_len = n->kv_len, .kv_heads = 3};
    uint64_t state = 17;
    fdma_select_args *const args = &x->args.select;
    x->operation = operation_select;
    args->window = n->window;
    args->recent = n->recent;
    args->sinks = n->sinks;
    args->scope = n->scope;
    args->gap = n->gap;
    call_make(x, &sizes, FDMA_FLOAT32, true);
    if (!n->slotted)
        x->selection.slot = (fdma_tensor){0};
    if (!n->padded)
        args->key_valid = (fdma_tensor){0};
    call_alloc(x, &state);
    for (int64_t j = 0; j < count_of(args->key_valid); j++)
        ((uint8_t *)args->key_valid.data)[j] = random_below(&state, 4) > 0;
}

static const int64_t select_lens[] = {1, 5, 65, 200, 1030};
static const int64_t select_windows[] = {1, 7, 64, 199, 300};

static inline bool make_select(call *x, int c, int type, const char *kernel) {
    const select_case n = {.kv_len = select_lens[c / 8 % TEST_COUNT(select_lens)],
                           .window = select_windows[c / 8 / TEST_COUNT(select_lens)],
                           .recent = c & 1 || c % 3 == 0 ? 0 : 1 + c % 40,
                           .sinks = c % 5 == 0,
                           .scope = c & 1 ? FDMA_SCOPE_GLOBAL : FDMA_SCOPE_CAUSAL,
                           .gap = c % 4 == 2 || c % 8 == 4 ? 0.5 : 0,
                           .padded = c & 2,
                           .slotted = c & 4};
    (void)type, (void)kernel;
    fill_select(x, &n);
    return true;
}

/* ---- merge and its gradients ---- */

static inline bool make_merge(call *x, int s, int type, const char *kernel) {
    const call_sizes n = {.batch = 2,
                          .q_len = shapes[s].q_len,
                          .q_heads = shapes[s].kv_heads * shapes[s].group,
                          .head_dim = shapes[s].head_dim};
    uint64_t state = 4;
    (void)kernel;
    call_make(x, &n, test_dtypes[type], true);
    call_alloc(x, &state);
    return true;
}

/* ---- probabilities ---- */

static inline bool make_probabilities(call *x, int s, int type, const char *kernel) {
    const problem p = problem_of(&shapes[s], shapes[s].head_dim, test_dtypes[type], s % 2 != 0);
    const fdma_forward_args forward = problem_args(&p, kernel);
    uint64_t state = 5;
    x->selection = p.selection;
    x->args.probabilities = (fdma_probabilities_args){
        .size = sizeof x->args.probabilities,
        .q = p.q,
        .k = p.k,
        .bias = p.bias,
        .key_valid = p.key_valid,
        .lse = forward.lse,
        .probability = new_output(FDMA_FLOAT32, p.batch, p.q_heads, p.q_len, p.kv_len),
        .selection = p.window >= 0 ? &x->selection : NULL,
        .softcap = p.softcap,
        .causal = p.causal,
    };
    fill_random(forward.lse, &state, 1);
    return true;
}

/* ---- rotary embedding ---- */

static inline bool make_rotary_table(call *x, int s, int type, const char *kernel) {
    const call_sizes n = {.q_len = shapes[s].kv_len, .head_dim = shapes[s].head_dim};
    uint64_t state = 6;
    (void)kernel;
    call_make(x, &n, test_dtypes[type], s % 2 != 0);
    call_alloc(x, &state);
    x->args.rotary_table.base = 10000;
    x->args.rotary_table.first = 1000 * s;
    return true;
}

/* Some cases have no optional tensors, others all but starts. */
static inline bool make_rotate(call *x, int s, int type, const char *kernel) {
    const call_sizes n = {.batch = 2,
                          .q_len = shapes[s].kv_len,
                          .q_heads = shapes[s].kv_heads * shapes[s].group,
                          .kv_heads = shapes[s].kv_heads,
                          .head_dim = shapes[s].head_dim,
                          .with_pairs = true};
    uint64_t state = 7;
    (void)kernel;
    call_make(x, &n, test_dtypes[type], s % 3 != 0);
    call_alloc(x, &state);
    const fdma_tensor positions = *call_tensor_named(x, "positions");
    for (int64_t at = 0; at < count_of(positions); at++)
        ((int32_t *)positions.data)[at] = (int32_t)(at % n.q_len);
    if (x->operation == operation_rotate)
        x->args.rotate.interleaved = s % 2;
    else
        x->args.rotate_backward.interleaved = s % 2;
    return true;
}

/* ---- all of them ---- */

/* Fills in the arguments of case `c` for a kernel. Returns false if the case is left out. */
typedef bool make_case(call *x, int c, int type, const char *kernel);

typedef struct operation_cases {
    make_case *make;
    int types; /* the first so many of test_dtypes */
    int count;
    bool all; /* true if every kernel takes every case; otherwise each kernel takes some */
} operation_cases;

static const operation_cases cases_of[] = {
    [operation_score] = {make_score, test_dtype_count,
                         TEST_COUNT(lengths) * TEST_COUNT(head_counts) * TEST_COUNT(head_dims),
                         false},
    [operation_select] = {make_select, 1, TEST_COUNT(select_lens) * TEST_COUNT(select_windows) * 8,
                          false},
    [operation_forward] = {make_forward, test_dtype_count,
                           TEST_COUNT(forward_shapes) * TEST_COUNT(head_dims), false},
    [operation_backward] = {make_backward, test_dtype_count, TEST_COUNT(shapes), true},
    [operation_score_backward] = {make_score_backward, test_dtype_count, TEST_COUNT(shapes), true},
    [operation_merge] = {make_merge, test_dtype_count, TEST_COUNT(shapes), true},
    [operation_merge_backward] = {make_merge, test_dtype_count, TEST_COUNT(shapes), true},
    [operation_probabilities] = {make_probabilities, test_dtype_count, TEST_COUNT(shapes), true},
    [operation_rotary_table] = {make_rotary_table, 1, TEST_COUNT(shapes), true},
    [operation_rotate] = {make_rotate, test_dtype_count, TEST_COUNT(shapes), true},
    [operation_rotate_backward] = {make_rotate, test_dtype_count, TEST_COUNT(shapes), true},
};

/* True if the forced kernel is the one that runs the call. A name without "/decode" also forces the
 * decode kernel of its ISA. */
static inline bool is_taken(call *x) {
    const char *const kernel = call_exec(x)->kernel, *picked = "";
    return operations[x->operation].kernel(&x->args, &picked) == FDMA_OK &&
           (strcmp(picked, kernel) == 0 || strstr(picked, "/decode") != NULL);
}

/* With a divided number of cases, steps through the long lists. No list of sizes and options that
 * the cases combine has a multiple of 7 entries, so each entry still occurs. */
static inline int longer_step(const operation_cases *cases, int step) {
    return step == 1 && test_divisor() > 1 && cases->count > 50 ? 7 : step;
}

/* Checks every `every`-th case of an operation with every kernel that takes it. */
static inline void check_cases(fdma_operation operation, int every, void (*check)(const call *)) {
    const operation_cases *const cases = &cases_of[operation];
    const int step = longer_step(cases, every);
    const char *const name = operations[operation].name;
    for (int type = 0; type < cases->types; type++) {
        const char *const dtype = dtype_name(test_dtypes[type]);
        const kernel_list kernels = kernels_for(name, test_dtypes[type]);
        for (int k = 0; k < kernels.count; k++) {
            int made = 0, ran = 0;
            for (int c = 0; c < cases->count; c += step) {
                call x = {.operation = operation};
                test_context("%s %s %s, case %d", kernels.name[k], name, dtype, c);
                if (cases->make(&x, c, type, kernels.name[k])) {
                    made++;
                    call_exec(&x)->kernel = kernels.name[k];
                    if (is_taken(&x)) {
                        ran++;
                        check(&x);
                    }
                }
                test_free_all();
            }
            test_context("%s %s %s", kernels.name[k], name, dtype);
            CHECK(ran > 0 && (ran == made || !cases->all));
        }
    }
}

/* Checks the cases of every operation: every `few`-th one of those that each kernel takes all of,
 * and every `many`-th one of the longer lists. */
static inline void check_operations(int few, int many, void (*check)(const call *)) {
    for (int operation = 0; operation < TEST_COUNT(cases_of); operation++)
        if (cases_of[operation].make != NULL)
            check_cases((fdma_operation)operation, cases_of[operation].all ? few : many, check);
}
