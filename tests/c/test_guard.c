/* test_guard.c - every kernel row touches its tensors and its workspace, and no byte outside. Each
 * lies between pages of its own that nobody may touch; inputs may not be written either. Where they
 * lie in their pages does not show in the results. */
#define _GNU_SOURCE /* mmap */

#include "problem.h"

#include "fence.h"

/* ---- the fences themselves ---- */

static void read_byte(void *at) { (void)*(volatile unsigned char *)at; }
static void write_byte(void *at) { *(volatile unsigned char *)at = 1; }

static void a_step_outside_is_seen(void) {
    const fence start = fence_new(24, 2, FENCE_START), end = fence_new(24, 2, FENCE_END);
    const fence off = fence_new(24, 2, FENCE_OFF);
    CHECK(fence_kills(read_byte, start.data - 1) && fence_kills(write_byte, start.data - 1));
    CHECK(fence_kills(read_byte, end.data + 24) && fence_kills(write_byte, end.data + 24));
    CHECK(fence_kills(read_byte, off.data - 3));
    CHECK_INT((uintptr_t)off.data % 4, 2);
    CHECK(!fence_kills(read_byte, start.data) && !fence_kills(read_byte, end.data + 23));
    CHECK(!fence_kills(write_byte, start.data) && !fence_kills(write_byte, end.data + 23));

    uint16_t values[5] = {0};
    const int64_t shape[] = {5};
    const fdma_tensor tensor = fdma_dense_tensor(values, FDMA_FLOAT16, 1, shape);
    CHECK(fence_kills(write_byte, fence_input(tensor, FENCE_END).data));
    CHECK(!fence_kills(write_byte, fence_output(tensor, FENCE_END).data));

    CHECK(fence_intact(off));
    off.data[-1] = 0;
    CHECK(!fence_intact(off));
    off.data[-1] = test_guard_byte;
    fence_free_all();
}

/* ---- forward ---- */

typedef struct shape {
    int64_t q_len, kv_len, group, kv_heads;
    int64_t window; /* -1: dense */
    int causal;
} shape;

static const shape shapes[] = {
    {1, 130, 1, 2, -1, 1},    {1, 300, 4, 2, 40, 1},   {1, 7, 3, 2, -1, 0},
    {5, 5, 1, 2, 3, 1},       {5, 121, 3, 2, -1, 0},   {5, 250, 4, 2, 30, 0},
    {65, 65, 1, 2, -1, 1},    {65, 90, 3, 1, 20, 1},   {65, 40, 4, 1, -1, 1},
    {65, 33, 3, 1, 12, 0},    {200, 200, 1, 1, 33, 1}, {200, 241, 3, 1, -1, 1},
    {200, 203, 4, 1, 130, 1},
};

static const int64_t head_dims[] = {8, 24, 40, 64, 128, 256};

/* Every other case has keys that are not valid, its last one among them. */
static problem problem_of(int s, int64_t head_dim, fdma_dtype dtype) {
    const shape *const n = &shapes[s];
    problem x = {.batch = 1,
                 .q_len = n->q_len,
                 .kv_len = n->kv_len,
                 .q_heads = n->group * n->kv_heads,
                 .kv_heads = n->kv_heads,
                 .head_dim = head_dim,
                 .window = n->window,
                 .scope = n->causal ? FDMA_SCOPE_CAUSAL : FDMA_SCOPE_GLOBAL,
                 .causal = n->causal,
                 .dtype = dtype};
    problem_fill(&x, (uint64_t)s + 50);
    if ((s + head_dim / 8) % 2) {
        x.key_valid = new_tensor(FDMA_UINT8, 1, n->kv_len, -1, -1);
        for (int64_t j = 0; j < n->kv_len; j++) {
            ((uint8_t *)x.key_valid.data)[j] = (n->kv_len - 1 - j) % 5 != 0;
        }
    }
    problem_select(&x);
    return x;
}

/* The problem in fenced memory; the caller owns the selection that args point to. */
static fdma_forward_args fence_forward(const problem *x, const char *kernel, fence_place place,
                                       fdma_selection *selection) {
    fdma_forward_args args = problem_args(x, kernel);
    args.q = fence_input(args.q, place);
    args.k = fence_input(args.k, place);
    args.v = fence_input(args.v, place);
    args.bias = fence_input(args.bias, place);
    args.key_valid = fence_input(args.key_valid, place);
    args.out = fence_output(args.out, place);
    args.lse = fence_output(args.lse, place);
    if (args.selection != NULL) {
        *selection = x->selection;
        selection->expiry = fence_input(selection->expiry, place);
        selection->slot = fence_input(selection->slot, place);
        args.selection = selection;
    }
    return args;
}

/* Returns whether the kernel took the problem. The name of a point stands for its decode: problems
 * of more rows are left to its tiles, which have a name of their own. */
static int check_forward(const problem *x, const char *kernel) {
    const fdma_forward_args plain = problem_args(x, kernel);
    const char *picked = "";
    if (fdma_forward_kernel(&plain, &picked) != FDMA_OK ||
        (strcmp(picked, kernel) != 0 && strstr(picked, "/decode") == NULL)) {
        return 0;
    }
    const attended want = problem_attend(x, kernel, 1);
    for (int place = 0; place < fence_places; place++) {
        fdma_selection selection;
        fdma_forward_args args = fence_forward(x, kernel, (fence_place)place, &selection);
        size_t bytes = 0;
        args.exec.threads = 1 + place; /* so much scratch */
        CHECK_OK(fdma_forward_workspace(&args, &bytes));
        fence_workspace(&args.exec, bytes, (fence_place)place);
        CHECK_OK(fdma_forward(&args));
        check_same_results((attended){args.out, args.lse}, want);
        fence_free_all();
    }
    return 1;
}

/* Large problems take turns: one type each, and none by the reference, which is slow. */
static int is_skipped(int s, int d, int type, const char *kernel) {
    const int64_t size = shapes[s].q_len * shapes[s].group * head_dims[d];
    const int plain = strcmp(kernel, "reference") == 0;
    return (plain && size > 65 * 64) || (size > 65 * 128 && (s + d) % problem_dtype_count != type);
}

static int check_shapes_of(const char *kernel, int type) {
    int ran = 0;
    for (int s = 0; s < TEST_COUNT(shapes); s++) {
        for (int d = 0; d < TEST_COUNT(head_dims); d++) {
            if (is_skipped(s, d, type, kernel)) {
                continue;
            }
            test_context("%s forward %s, shape %d, head_dim %d", kernel,
                         dtype_name(problem_dtypes[type]), s, (int)head_dims[d]);
            const problem x = problem_of(s, head_dims[d], problem_dtypes[type]);
            ran += check_forward(&x, kernel);
            test_free_all();
        }
    }
    return ran;
}

static void forward_stays_inside(void) {
    const kernel_list kernels = kernels_of("forward");
    for (int i = 0; i < kernels.count; i++) {
        int ran = 0;
        for (int type = 0; type < problem_dtype_count; type++) {
            ran += check_shapes_of(kernels.name[i], type);
        }
        test_context("%s forward", kernels.name[i]);
        CHECK(ran > 0);
    }
}

static void run_in_child(void *context) {
    const fdma_forward_args *const args = context;
    _exit(fdma_forward(args) != FDMA_OK);
}

/* A row of k too few, on either side: every kernel reads it, and the fences say so. */
static void forward_outside_is_seen(void) {
    const kernel_list kernels = kernels_of("forward");
    for (int i = 0; i < kernels.count; i++) {
        test_context("%s forward", kernels.name[i]);
        problem x = problem_of(3, 24, FDMA_FLOAT32);
        x.key_valid = (fdma_tensor){0};
        x.window = -1;
        fdma_selection selection;
        fdma_forward_args args = fence_forward(&x, kernels.name[i], FENCE_END, &selection);
        size_t bytes = 0;
        CHECK_OK(fdma_forward_workspace(&args, &bytes));
        fence_workspace(&args.exec, bytes, FENCE_END);
        CHECK(!fence_kills(run_in_child, &args));
        const size_t row = (size_t)(x.kv_heads * x.head_dim) * sizeof(float);
        args.k.data = (char *)args.k.data + row;
        CHECK(fence_kills(run_in_child, &args));
        args.k.data = fence_input(x.k, FENCE_START).data;
        args.k.data = (char *)args.k.data - row;
        CHECK(fence_kills(run_in_child, &args));
        fence_free_all();
        test_free_all();
    }
}

/* ---- score ---- */

static const int64_t lengths[] = {1, 63, 64, 65, 131};
static const int64_t head_counts[] = {1, 2, 5};

typedef struct score_case {
    int64_t kv_len, kv_heads, head_dim;
    fdma_dtype dtype, weights;
    int padded;
    fdma_bias_form form;
} score_case;

static fdma_score_args new_score(const score_case *n, const char *kernel) {
    uint64_t state = 9;
    fdma_score_args args = {
        .size = sizeof args,
        .v = new_tensor(n->dtype, 1, n->kv_len, n->kv_heads, n->head_dim),
        .dt_proj = new_tensor(n->weights, n->kv_heads, n->kv_heads * n->head_dim, -1, -1),
        .a = new_tensor(n->weights, n->kv_heads, -1, -1, -1),
        .score = new_output(FDMA_FLOAT32, 1, n->kv_heads, n->kv_len, -1),
        .bias_form = n->form,
        .exec = {.kernel = kernel},
    };
    fill_random(args.v, &state, 1);
    fill_random(args.dt_proj, &state, 1);
    fill_random(args.a, &state, 1);
    if (n->form != FDMA_BIAS_NONE) {
        args.bias = new_output(FDMA_FLOAT32, 1, n->kv_heads, n->kv_len, -1);
    }
    if (n->padded) {
        args.key_valid = new_tensor(FDMA_UINT8, 1, n->kv_len, -1, -1);
        for (int64_t j = 0; j < n->kv_len; j++) {
            ((uint8_t *)args.key_valid.data)[j] = (n->kv_len - j) % 3 != 0;
        }
    }
    return args;
}

static int check_score(const score_case *n, const char *kernel) {
    fdma_score_args plain = new_score(n, kernel);
    const char *picked = "";
    if (fdma_score_kernel(&plain, &picked) != FDMA_OK || strcmp(picked, kernel) != 0) {
        return 0;
    }
    CHECK_OK(run_score(&plain));
    for (int place = 0; place < fence_places; place++) {
        const fdma_score_args from = new_score(n, kernel);
        fdma_score_args args = from;
        size_t bytes = 0;
        args.v = fence_input(from.v, (fence_place)place);
        args.dt_proj = fence_input(from.dt_proj, (fence_place)place);
        args.a = fence_input(from.a, (fence_place)place);
        args.key_valid = fence_input(from.key_valid, (fence_place)place);
        args.score = fence_output(from.score, (fence_place)place);
        args.bias = fence_output(from.bias, (fence_place)place);
        args.exec.threads = 1 + place;
        CHECK_OK(fdma_score_workspace(&args, &bytes));
        fence_workspace(&args.exec, bytes, (fence_place)place);
        CHECK_OK(fdma_score(&args));
        CHECK(same_tensor(args.score, plain.score));
        CHECK(same_tensor(args.bias, plain.bias));
        fence_free_all();
    }
    return 1;
}

/* Every length x heads x head_dim x type; validity and what is beside it take turns. */
static void score_stays_inside(void) {
    const int sizes = TEST_COUNT(lengths) * TEST_COUNT(head_counts) * TEST_COUNT(head_dims);
    const kernel_list kernels = kernels_of("score");
    for (int i = 0; i < kernels.count; i++) {
        int ran = 0;
        for (int c = 0; c < sizes * problem_dtype_count; c++) {
            const int size = c / problem_dtype_count, rest = size / TEST_COUNT(lengths);
            const fdma_dtype dtype = problem_dtypes[c % problem_dtype_count];
            const score_case n = {.kv_len = lengths[size % TEST_COUNT(lengths)],
                                  .kv_heads = head_counts[rest % TEST_COUNT(head_counts)],
                                  .head_dim = head_dims[rest / TEST_COUNT(head_counts)],
                                  .dtype = dtype,
                                  .weights = size % 2 ? dtype : FDMA_FLOAT32,
                                  .padded = size % 4 >= 2,
                                  .form = (fdma_bias_form)(size % 3)};
            test_context("%s score %s, kv_len %d, %d heads of %d", kernels.name[i],
                         dtype_name(dtype), (int)n.kv_len, (int)n.kv_heads, (int)n.head_dim);
            ran += check_score(&n, kernels.name[i]);
            test_free_all();
        }
        test_context("%s score", kernels.name[i]);
        CHECK(ran > 0);
    }
}

/* ---- select ---- */

typedef struct select_case {
    int64_t kv_len, window;
    fdma_scope scope;
    int padded, slotted;
} select_case;

static fdma_select_args new_select(const select_case *n, const char *kernel,
                                   fdma_selection *selection) {
    uint64_t state = 17;
    *selection = (fdma_selection){.size = sizeof *selection,
                                  .expiry = new_output(FDMA_INT32, 2, 3, n->kv_len, -1)};
    if (n->slotted) {
        selection->slot = new_output(FDMA_INT32, 2, 3, n->kv_len, -1);
    }
    fdma_select_args args = {.size = sizeof args,
                             .score = new_tensor(FDMA_FLOAT32, 2, 3, n->kv_len, -1),
                             .selection = selection,
                             .window = n->window,
                             .scope = n->scope,
                             .exec = {.kernel = kernel}};
    fill_random(args.score, &state, 1);
    if (n->padded) {
        args.key_valid = new_tensor(FDMA_UINT8, 2, n->kv_len, -1, -1);
        for (int64_t j = 0; j < 2 * n->kv_len; j++) {
            ((uint8_t *)args.key_valid.data)[j] = random_below(&state, 4) > 0;
        }
    }
    return args;
}

static int check_select(const select_case *n, const char *kernel) {
    fdma_selection want, selection;
    fdma_select_args plain = new_select(n, kernel, &want);
    const char *picked = "";
    if (fdma_select_kernel(&plain, &picked) != FDMA_OK || strcmp(picked, kernel) != 0) {
        return 0;
    }
    CHECK_OK(run_select(&plain));
    for (int place = 0; place < fence_places; place++) {
        fdma_select_args args = new_select(n, kernel, &selection);
        size_t bytes = 0;
        args.score = fence_input(args.score, (fence_place)place);
        args.key_valid = fence_input(args.key_valid, (fence_place)place);
        selection.expiry = fence_output(selection.expiry, (fence_place)place);
        selection.slot = fence_output(selection.slot, (fence_place)place);
        args.exec.threads = 1 + place;
        CHECK_OK(fdma_select_workspace(&args, &bytes));
        fence_workspace(&args.exec, bytes, (fence_place)place);
        CHECK_OK(fdma_select(&args));
        CHECK(same_tensor(selection.expiry, want.expiry));
        CHECK(same_tensor(selection.slot, want.slot));
        fence_free_all();
    }
    return 1;
}

static void select_stays_inside(void) {
    static const int64_t key_counts[] = {1, 5, 65, 200, 1030};
    static const int64_t windows[] = {1, 7, 64, 199, 300};
    const int sizes = TEST_COUNT(key_counts) * TEST_COUNT(windows);
    const kernel_list kernels = kernels_of("select");
    for (int i = 0; i < kernels.count; i++) {
        int ran = 0;
        for (int c = 0; c < sizes * 8; c++) {
            const select_case n = {.kv_len = key_counts[c / 8 % TEST_COUNT(key_counts)],
                                   .window = windows[c / 8 / TEST_COUNT(key_counts)],
                                   .scope = c & 1 ? FDMA_SCOPE_GLOBAL : FDMA_SCOPE_CAUSAL,
                                   .padded = c & 2,
                                   .slotted = c & 4};
            test_context("%s select, kv_len %d, window %d", kernels.name[i], (int)n.kv_len,
                         (int)n.window);
            ran += check_select(&n, kernels.name[i]);
            test_free_all();
        }
        test_context("%s select", kernels.name[i]);
        CHECK(ran > 0);
    }
}

/* ---- lists ---- */

typedef struct lists_case {
    int64_t q_len, tile_len;
    select_case keys;
    int causal;
} lists_case;

static fdma_lists_args new_lists(const lists_case *n, const char *kernel,
                                 fdma_selection *selection) {
    const int64_t tiles = (n->q_len + n->tile_len - 1) / n->tile_len;
    const int64_t window = n->keys.window < n->keys.kv_len ? n->keys.window : n->keys.kv_len;
    const int64_t most = window + n->tile_len - 1;
    fdma_select_args select = new_select(&n->keys, "reference", selection);
    CHECK_OK(run_select(&select));
    return (fdma_lists_args){
        .size = sizeof(fdma_lists_args),
        .selection = selection,
        .list = new_output(FDMA_INT32, 2, 3, tiles, most < n->keys.kv_len ? most : n->keys.kv_len),
        .count = new_output(FDMA_INT32, 2, 3, tiles, 2),
        .q_len = n->q_len,
        .tile_len = n->tile_len,
        .causal = n->causal,
        .exec = {.kernel = kernel},
    };
}

static int check_lists(const lists_case *n, const char *kernel) {
    fdma_selection selection, fenced;
    fdma_lists_args plain = new_lists(n, kernel, &selection);
    const char *picked = "";
    if (fdma_lists_kernel(&plain, &picked) != FDMA_OK || strcmp(picked, kernel) != 0) {
        return 0;
    }
    const fdma_lists_args unwritten = {.list = copy_tensor(plain.list),
                                       .count = copy_tensor(plain.count)};
    CHECK_OK(run_lists(&plain));
    for (int place = 0; place < fence_places; place++) {
        fdma_lists_args args = plain;
        size_t bytes = 0;
        fenced = selection;
        fenced.expiry = fence_input(selection.expiry, (fence_place)place);
        fenced.slot = fence_input(selection.slot, (fence_place)place);
        args.selection = &fenced;
        args.list = fence_output(unwritten.list, (fence_place)place);
        args.count = fence_output(unwritten.count, (fence_place)place);
        args.exec.threads = 1 + place;
        CHECK_OK(fdma_lists_workspace(&args, &bytes));
        fence_workspace(&args.exec, bytes, (fence_place)place);
        CHECK_OK(fdma_lists(&args));
        CHECK(same_tensor(args.list, plain.list));
        CHECK(same_tensor(args.count, plain.count));
        fence_free_all();
    }
    return 1;
}

static void lists_stay_inside(void) {
    static const int64_t key_counts[] = {1, 5, 65, 200};
    static const int64_t windows[] = {1, 7, 64, 300};
    static const int64_t tile_lens[] = {1, 3, 128};
    const int sizes = TEST_COUNT(key_counts) * TEST_COUNT(windows) * TEST_COUNT(tile_lens);
    const kernel_list kernels = kernels_of("lists");
    for (int i = 0; i < kernels.count; i++) {
        int ran = 0;
        for (int c = 0; c < sizes * 3; c++) {
            const int rest = c / 3 / TEST_COUNT(tile_lens);
            const int64_t kv_len = key_counts[rest % TEST_COUNT(key_counts)];
            const lists_case n = {
                .q_len = c % 3 == 1 ? kv_len + 4 : (kv_len + 1) / 2,
                .tile_len = tile_lens[c / 3 % TEST_COUNT(tile_lens)],
                .keys = {.kv_len = kv_len,
                         .window = windows[rest / TEST_COUNT(key_counts)],
                         .scope = c % 3 ? FDMA_SCOPE_GLOBAL : FDMA_SCOPE_CAUSAL,
                         .padded = c & 1,
                         .slotted = 1},
                .causal = c % 3 < 2,
            };
            test_context("%s lists, kv_len %d, window %d, tile_len %d", kernels.name[i],
                         (int)kv_len, (int)n.keys.window, (int)n.tile_len);
            ran += check_lists(&n, kernels.name[i]);
            test_free_all();
        }
        test_context("%s lists", kernels.name[i]);
        CHECK(ran > 0);
    }
}

static const test_entry tests[] = {
    TEST(a_step_outside_is_seen), TEST(forward_outside_is_seen), TEST(forward_stays_inside),
    TEST(score_stays_inside),     TEST(select_stays_inside),     TEST(lists_stay_inside),
};

int main(void) {
    fence_watch();
    return test_run(tests, TEST_COUNT(tests));
}
