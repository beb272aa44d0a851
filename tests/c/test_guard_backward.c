/* test_guard_backward.c - every row of gradients and of merging touches its tensors and its
 * workspace, and no byte outside; inputs are not written; where they lie in their pages does not
 * show. See test_guard.c. */
#define _GNU_SOURCE /* mmap */

#include "gradient.h"

#include "fence.h"

typedef struct shape {
    int64_t q_len, kv_len, group, kv_heads, head_dim;
    int64_t window; /* -1: dense */
    int causal;
} shape;

static const shape shapes[] = {
    {1, 130, 1, 2, 64, -1, 1},   {1, 300, 4, 2, 128, 40, 1},   {5, 5, 1, 2, 8, 3, 1},
    {5, 121, 3, 2, 24, -1, 0},   {5, 250, 4, 2, 40, 30, 0},    {65, 65, 1, 2, 64, -1, 1},
    {65, 90, 3, 1, 128, 20, 1},  {65, 40, 4, 1, 40, -1, 1},    {65, 33, 3, 1, 256, 12, 0},
    {200, 200, 1, 1, 64, 33, 1}, {130, 203, 4, 1, 24, 130, 1},
};

static problem problem_of(int s, fdma_dtype dtype) {
    const shape *const n = &shapes[s];
    problem x = {.batch = 1,
                 .q_len = n->q_len,
                 .kv_len = n->kv_len,
                 .q_heads = n->group * n->kv_heads,
                 .kv_heads = n->kv_heads,
                 .head_dim = n->head_dim,
                 .window = n->window,
                 .scope = n->causal ? FDMA_SCOPE_CAUSAL : FDMA_SCOPE_GLOBAL,
                 .causal = n->causal,
                 .dtype = dtype};
    problem_fill(&x, 17);
    if (s % 2) { /* the last key among those that are not valid */
        x.key_valid = new_tensor(FDMA_UINT8, 1, n->kv_len, -1, -1);
        for (int64_t j = 0; j + 1 < n->kv_len; j++) {
            ((uint8_t *)x.key_valid.data)[j] = j % 5 != 2;
        }
    }
    problem_select(&x);
    return x;
}

static void fence_inputs(fdma_tensor *const inputs[], int count, fence_place place) {
    for (int i = 0; i < count; i++) {
        *inputs[i] = fence_input(*inputs[i], place);
    }
}

static void fence_outputs(fdma_tensor *const outputs[], int count, fence_place place) {
    for (int i = 0; i < count; i++) {
        *outputs[i] = fence_output(*outputs[i], place);
    }
}

/* ---- backward ---- */

static void check_backward(const gradient_problem *p, const char *kernel) {
    const gradients want = gradient_run(p, kernel, 1);
    for (int place = 0; place < fence_places; place++) {
        fdma_selection selection = p->x.selection;
        fdma_backward_args args = gradient_args(p, kernel);
        fdma_tensor *const inputs[] = {
            &args.dout, &args.dlse, &args.out,       &args.lse,         &args.q,         &args.k,
            &args.v,    &args.bias, &args.key_valid, &selection.expiry, &selection.slot,
        };
        fdma_tensor *const outputs[] = {&args.dq, &args.dk, &args.dv, &args.dbias};
        size_t bytes = 0;
        fence_inputs(inputs, TEST_COUNT(inputs), (fence_place)place);
        fence_outputs(outputs, TEST_COUNT(outputs), (fence_place)place);
        args.selection = args.selection != NULL ? &selection : NULL;
        args.exec.threads = 1 + place;
        CHECK_OK(fdma_backward_workspace(&args, &bytes));
        fence_workspace(&args.exec, bytes, (fence_place)place);
        CHECK_OK(fdma_backward(&args));
        check_same_gradients(gradient_outputs(&args), want);
        fence_free_all();
    }
}

static void backward_stays_inside(void) {
    for (int type = 0; type < problem_dtype_count; type++) {
        const kernel_list kernels = kernels_for("backward", problem_dtypes[type]);
        for (int s = 0; s < TEST_COUNT(shapes); s++) {
            const problem x = problem_of(s, problem_dtypes[type]);
            const gradient_problem p = gradient_of(&x, s % 3);
            for (int kernel = 0; kernel < kernels.count; kernel++) {
                test_context("%s %s, shape %d", kernels.name[kernel],
                             dtype_name(problem_dtypes[type]), s);
                check_backward(&p, kernels.name[kernel]);
            }
            test_free_all();
        }
    }
}

/* ---- score_backward ---- */

static fdma_score_backward_args new_score(int s, fdma_dtype dtype, const char *kernel) {
    const shape *const n = &shapes[s];
    const int64_t heads = n->kv_heads, width = heads * n->head_dim;
    uint64_t state = 3;
    fdma_score_backward_args args = {
        .size = sizeof args,
        .dbias = new_tensor(FDMA_FLOAT32, 2, heads, n->kv_len, -1),
        .v = new_tensor(dtype, 2, n->kv_len, heads, n->head_dim),
        .dt_proj = new_tensor(dtype, heads, width, -1, -1),
        .a = new_tensor(s % 2 ? dtype : FDMA_FLOAT32, heads, -1, -1, -1),
        .dv = new_tensor(dtype, 2, n->kv_len, heads, n->head_dim),
        .ddt_proj = new_tensor(dtype, heads, width, -1, -1),
        .da = new_tensor(s % 2 ? dtype : FDMA_FLOAT32, heads, -1, -1, -1),
        .bias_form = s % 3 ? FDMA_BIAS_EXP : FDMA_BIAS_LINEAR,
        .exec = {.kernel = kernel, .threads = 1},
    };
    fill_random(args.dbias, &state, 1);
    fill_random(args.v, &state, 1);
    fill_random(args.dt_proj, &state, 0.2F);
    fill_random(args.a, &state, 1);
    return args;
}

static void check_score(int s, fdma_dtype dtype, const char *kernel) {
    fdma_score_backward_args plain = new_score(s, dtype, kernel);
    CHECK_OK(run_score_backward(&plain));
    for (int place = 0; place < fence_places; place++) {
        fdma_score_backward_args args = new_score(s, dtype, kernel);
        fdma_tensor *const inputs[] = {&args.dbias, &args.v, &args.dt_proj, &args.a};
        fdma_tensor *const outputs[] = {&args.dv, &args.ddt_proj, &args.da};
        size_t bytes = 0;
        fence_inputs(inputs, TEST_COUNT(inputs), (fence_place)place);
        fence_outputs(outputs, TEST_COUNT(outputs), (fence_place)place);
        args.exec.threads = 1 + place;
        CHECK_OK(fdma_score_backward_workspace(&args, &bytes));
        fence_workspace(&args.exec, bytes, (fence_place)place);
        CHECK_OK(fdma_score_backward(&args));
        CHECK(same_tensor(args.dv, plain.dv) && same_tensor(args.ddt_proj, plain.ddt_proj));
        CHECK(same_tensor(args.da, plain.da));
        fence_free_all();
    }
}

static void score_backward_stays_inside(void) {
    const kernel_list kernels = kernels_of("score_backward");
    for (int i = 0; i < kernels.count * problem_dtype_count * TEST_COUNT(shapes); i++) {
        const int s = i % TEST_COUNT(shapes);
        const fdma_dtype dtype = problem_dtypes[i / TEST_COUNT(shapes) % problem_dtype_count];
        const char *kernel = kernels.name[i / TEST_COUNT(shapes) / problem_dtype_count];
        test_context("%s %s, shape %d", kernel, dtype_name(dtype), s);
        check_score(s, dtype, kernel);
        test_free_all();
    }
}

/* ---- merge, merge_backward ---- */

static fdma_merge_backward_args new_parts(int s, fdma_dtype dtype, const char *kernel) {
    const shape *const n = &shapes[s];
    const int64_t heads = n->kv_heads * n->group;
    uint64_t state = 4;
    fdma_tensor rows[5], lses[5];
    for (int i = 0; i < 5; i++) {
        rows[i] = new_tensor(dtype, 2, n->q_len, heads, n->head_dim);
        lses[i] = new_tensor(FDMA_FLOAT32, 2, heads, n->q_len, -1);
        fill_random(rows[i], &state, 1);
        fill_random(lses[i], &state, 1);
    }
    return (fdma_merge_backward_args){
        .size = sizeof(fdma_merge_backward_args),
        .dout = rows[0],
        .dlse = lses[0],
        .out_a = rows[1],
        .lse_a = lses[1],
        .out_b = rows[2],
        .lse_b = lses[2],
        .dout_a = rows[3],
        .dlse_a = lses[3],
        .dout_b = rows[4],
        .dlse_b = lses[4],
        .exec = {.kernel = kernel, .threads = 1},
    };
}

static void check_parts(int s, fdma_dtype dtype, const char *kernel) {
    fdma_merge_backward_args plain = new_parts(s, dtype, kernel);
    CHECK_OK(run_merge_backward(&plain));
    for (int place = 0; place < fence_places; place++) {
        fdma_merge_backward_args args = new_parts(s, dtype, kernel);
        fdma_tensor *const inputs[] = {&args.dout,  &args.dlse,  &args.out_a,
                                       &args.lse_a, &args.out_b, &args.lse_b};
        fdma_tensor *const outputs[] = {&args.dout_a, &args.dlse_a, &args.dout_b, &args.dlse_b};
        fence_inputs(inputs, TEST_COUNT(inputs), (fence_place)place);
        fence_outputs(outputs, TEST_COUNT(outputs), (fence_place)place);
        args.exec.threads = 1 + place;
        CHECK_OK(run_merge_backward(&args));
        CHECK(same_tensor(args.dout_a, plain.dout_a) && same_tensor(args.dlse_a, plain.dlse_a));
        CHECK(same_tensor(args.dout_b, plain.dout_b) && same_tensor(args.dlse_b, plain.dlse_b));
        fence_free_all();
    }
}

static fdma_merge_args new_merge(const fdma_merge_backward_args *parts) {
    return (fdma_merge_args){
        .size = sizeof(fdma_merge_args),
        .out_a = parts->out_a,
        .lse_a = parts->lse_a,
        .out_b = parts->out_b,
        .lse_b = parts->lse_b,
        .out = parts->dout_a,
        .lse = parts->dlse_a,
        .exec = parts->exec,
    };
}

static void check_merge(int s, fdma_dtype dtype, const char *kernel) {
    const fdma_merge_backward_args parts = new_parts(s, dtype, kernel);
    fdma_merge_args plain = new_merge(&parts);
    CHECK_OK(run_merge(&plain));
    for (int place = 0; place < fence_places; place++) {
        const fdma_merge_backward_args again = new_parts(s, dtype, kernel);
        fdma_merge_args args = new_merge(&again);
        fdma_tensor *const inputs[] = {&args.out_a, &args.lse_a, &args.out_b, &args.lse_b};
        fdma_tensor *const outputs[] = {&args.out, &args.lse};
        fence_inputs(inputs, TEST_COUNT(inputs), (fence_place)place);
        fence_outputs(outputs, TEST_COUNT(outputs), (fence_place)place);
        args.exec.threads = 1 + place;
        CHECK_OK(run_merge(&args));
        CHECK(same_tensor(args.out, plain.out) && same_tensor(args.lse, plain.lse));
        fence_free_all();
    }
}

static void merging_stays_inside(void) {
    const kernel_list kernels = kernels_of("merge");
    for (int i = 0; i < kernels.count * problem_dtype_count * TEST_COUNT(shapes); i++) {
        const int s = i % TEST_COUNT(shapes);
        const fdma_dtype dtype = problem_dtypes[i / TEST_COUNT(shapes) % problem_dtype_count];
        const char *kernel = kernels.name[i / TEST_COUNT(shapes) / problem_dtype_count];
        test_context("%s %s, shape %d", kernel, dtype_name(dtype), s);
        check_merge(s, dtype, kernel);
        check_parts(s, dtype, kernel);
        test_free_all();
    }
}

static const test_entry tests[] = {
    TEST(backward_stays_inside),
    TEST(score_backward_stays_inside),
    TEST(merging_stays_inside),
};

int main(void) {
    fence_watch();
    return test_run(tests, TEST_COUNT(tests));
}
