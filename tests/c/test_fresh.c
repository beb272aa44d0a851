/* test_fresh.c - what workspace and outputs held before a call does not show after it, and outputs
 * are written to the last byte. The third time they come from malloc() as they are, so that
 * valgrind sees whatever is used before it is written (tools/gates/run.sh). */
#include "problem.h"

enum { as_it_is = -1 };
static const int fills[] = {0x00, 0xff, as_it_is}; /* 0xff: NaN in every type */

typedef struct shape {
    int64_t q_len, kv_len, q_heads, kv_heads, head_dim;
    int64_t window; /* -1: dense */
    int causal;
    double softcap;
    int padded;
} shape;

static const shape shapes[] = {
    {1, 9, 1, 1, 8, -1, 1, 0, 0},      {1, 131, 8, 2, 24, 20, 1, 0, 1},
    {5, 40, 3, 1, 40, -1, 0, 2, 0},    {21, 21, 4, 1, 8, 6, 1, 0, 0},
    {30, 70, 3, 3, 24, 11, 0, 0, 1},   {67, 67, 1, 1, 16, 30, 1, 2, 1},
    {33, 130, 4, 2, 64, 129, 1, 0, 0},
};

static problem problem_of(const shape *n, fdma_dtype dtype) {
    problem x = {.batch = 1,
                 .q_len = n->q_len,
                 .kv_len = n->kv_len,
                 .q_heads = n->q_heads,
                 .kv_heads = n->kv_heads,
                 .head_dim = n->head_dim,
                 .window = n->window,
                 .scope = n->causal ? FDMA_SCOPE_CAUSAL : FDMA_SCOPE_GLOBAL,
                 .causal = n->causal,
                 .softcap = n->softcap,
                 .dtype = dtype};
    problem_fill(&x, 71);
    if (n->padded) {
        x.key_valid = new_tensor(FDMA_UINT8, 1, n->kv_len, -1, -1);
        memset(x.key_valid.data, 1, (size_t)n->kv_len);
        ((uint8_t *)x.key_valid.data)[0] = ((uint8_t *)x.key_valid.data)[n->kv_len - 2] = 0;
    }
    problem_select(&x);
    return x;
}

typedef void (*call_with)(const problem *x, const char *kernel, int fill, fdma_tensor *outputs);

enum { output_limit = 6 };

static void *filled(size_t size, int fill) {
    void *const data = malloc(size > 0 ? size : 1);
    if (data == NULL) {
        printf("out of memory\n");
        exit(1);
    }
    if (fill != as_it_is) {
        memset(data, fill, size);
    }
    return data;
}

static fdma_tensor filled_like(fdma_tensor like, int fill) {
    like.data = filled(bytes_of(like), fill);
    return like;
}

/* The results of every fill are those of the first. */
static void check_fills(call_with call, const problem *x, const char *kernel) {
    fdma_tensor first[output_limit] = {{0}};
    for (int f = 0; f < TEST_COUNT(fills); f++) {
        fdma_tensor outputs[output_limit] = {{0}};
        call(x, kernel, fills[f], outputs);
        for (int i = 0; i < output_limit && outputs[i].rank > 0; i++) {
            if (f == 0) {
                first[i] = copy_tensor(outputs[i]);
            }
            CHECK_BYTES(outputs[i].data, first[i].data, bytes_of(first[i]));
            free(outputs[i].data);
        }
    }
    CHECK(first[0].rank > 0);
}

static void check_shapes_with(call_with call, const char *operation) {
    const kernel_list kernels = kernels_of(operation);
    for (int kernel = 0; kernel < kernels.count; kernel++) {
        for (int type = 0; type < problem_dtype_count; type++) {
            for (int s = 0; s < TEST_COUNT(shapes); s++) {
                test_context("%s %s %s, shape %d", kernels.name[kernel], operation,
                             dtype_name(problem_dtypes[type]), s);
                const problem x = problem_of(&shapes[s], problem_dtypes[type]);
                check_fills(call, &x, kernels.name[kernel]);
                test_free_all();
            }
        }
    }
}

static void call_forward(const problem *x, const char *kernel, int fill, fdma_tensor *outputs) {
    fdma_forward_args args = problem_args(x, kernel);
    args.out = outputs[0] = filled_like(args.out, fill);
    args.lse = outputs[1] = filled_like(args.lse, fill);
    CHECK_OK(fdma_forward_workspace(&args, &args.exec.workspace_size));
    args.exec.workspace = filled(args.exec.workspace_size, fill);
    CHECK_OK(fdma_forward(&args));
    free(args.exec.workspace);
}

static void call_score(const problem *x, const char *kernel, int fill, fdma_tensor *outputs) {
    uint64_t state = 73;
    fdma_score_args args = {
        .size = sizeof args,
        .v = x->v,
        .dt_proj = new_tensor(x->dtype, x->kv_heads, x->kv_heads * x->head_dim, -1, -1),
        .a = new_tensor(FDMA_FLOAT32, x->kv_heads, -1, -1, -1),
        .key_valid = x->key_valid,
        .exec = {.kernel = kernel, .threads = 1},
    };
    fill_random(args.dt_proj, &state, 1);
    fill_random(args.a, &state, 1);
    args.score = outputs[0] = filled_like(x->score, fill);
    args.bias = outputs[1] = filled_like(x->score, fill);
    CHECK_OK(fdma_score_workspace(&args, &args.exec.workspace_size));
    args.exec.workspace = filled(args.exec.workspace_size, fill);
    CHECK_OK(fdma_score(&args));
    free(args.exec.workspace);
}

/* With slots, and without. */
static void call_select(const problem *x, const char *kernel, int fill, fdma_tensor *outputs) {
    for (int slotted = 0; slotted < 2; slotted++) {
        fdma_tensor like = x->score;
        like.dtype = FDMA_INT32;
        fdma_selection selection = {.size = sizeof selection, .expiry = filled_like(like, fill)};
        *outputs++ = selection.expiry;
        if (slotted) {
            selection.slot = *outputs++ = filled_like(like, fill);
        }
        fdma_select_args args = {.size = sizeof args,
                                 .score = x->score,
                                 .key_valid = x->key_valid,
                                 .selection = &selection,
                                 .window = x->window < 0 ? x->kv_len : x->window,
                                 .scope = x->scope,
                                 .exec = {.kernel = kernel, .threads = 1}};
        CHECK_OK(fdma_select_workspace(&args, &args.exec.workspace_size));
        args.exec.workspace = filled(args.exec.workspace_size, fill);
        CHECK_OK(fdma_select(&args));
        free(args.exec.workspace);
    }
}

/* What lies beyond a list is not written: it is made equal here. */
static void call_lists(const problem *x, const char *kernel, int fill, fdma_tensor *outputs) {
    enum { tile_len = 8 };
    fdma_selection selection = x->selection;
    if (x->window < 0) { /* dense: one that keeps nothing */
        selection = (fdma_selection){.size = sizeof selection,
                                     .expiry = new_tensor(FDMA_INT32, 1, x->kv_heads, 0, -1),
                                     .slot = new_tensor(FDMA_INT32, 1, x->kv_heads, 0, -1),
                                     .window = 1,
                                     .scope = FDMA_SCOPE_GLOBAL};
    }
    const int64_t tiles = (x->q_len + tile_len - 1) / tile_len, width = selection.kv_len;
    fdma_lists_args args = {.size = sizeof args,
                            .selection = &selection,
                            .list = new_output(FDMA_INT32, 1, x->kv_heads, tiles, width),
                            .count = new_output(FDMA_INT32, 1, x->kv_heads, tiles, 2),
                            .q_len = x->q_len,
                            .tile_len = tile_len,
                            .causal = x->causal,
                            .exec = {.kernel = kernel, .threads = 1}};
    args.list = outputs[0] = filled_like(args.list, fill);
    args.count = outputs[1] = filled_like(args.count, fill);
    CHECK_OK(fdma_lists_workspace(&args, &args.exec.workspace_size));
    args.exec.workspace = filled(args.exec.workspace_size, fill);
    CHECK_OK(fdma_lists(&args));
    free(args.exec.workspace);
    const int32_t *const count = args.count.data;
    for (int64_t n = 0; n < x->kv_heads * tiles; n++) {
        for (int64_t at = count[2 * n + 1]; at < width; at++) {
            ((int32_t *)args.list.data)[n * width + at] = -1;
        }
    }
}

static void score_forgets(void) { check_shapes_with(call_score, "score"); }
static void select_forgets(void) { check_shapes_with(call_select, "select"); }
static void lists_forgets(void) { check_shapes_with(call_lists, "lists"); }
static void forward_forgets(void) { check_shapes_with(call_forward, "forward"); }

static const test_entry tests[] = {
    TEST(score_forgets),
    TEST(select_forgets),
    TEST(lists_forgets),
    TEST(forward_forgets),
};

int main(void) { return test_run(tests, TEST_COUNT(tests)); }
