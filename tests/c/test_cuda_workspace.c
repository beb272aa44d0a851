/* test_cuda_workspace.c - workspace on a CUDA device that was asked for before there was data is
 * enough wherever the data then lies: rows that want 16 bytes' alignment leave the call to others,
 * or copy. And how much of it gradients want. */
#include "device.h"

/* A copy on the device that begins `elements` into its memory. */
static fdma_tensor shifted(fdma_tensor host, int elements) {
    const size_t offset = (size_t)elements * dtype_size(host.dtype);
    fdma_tensor copy = host;
    copy.data = (char *)device_alloc(device_extent(host) + offset) + offset;
    device_write(copy, host);
    return copy;
}

/* ---- score ---- */

enum { shift_v = 1, shift_dt_proj = 2, shift_all = 3 };

static fdma_score_args score_of(const problem *x) {
    uint64_t state = 3;
    fdma_score_args args = {
        .size = sizeof args,
        .v = x->v,
        .dt_proj = new_tensor(x->dtype, x->kv_heads, x->kv_heads * x->head_dim, -1, -1),
        .a = new_tensor(FDMA_FLOAT32, x->kv_heads, -1, -1, -1),
        .score = x->score,
        .bias_form = FDMA_BIAS_NONE,
        .exec = {.device = device_number},
    };
    fill_random(args.dt_proj, &state, 0.2F);
    fill_random(args.a, &state, 1);
    return args;
}

static size_t score_bytes_without_data(fdma_score_args args) {
    size_t bytes = 0;
    args.v.data = args.dt_proj.data = args.a.data = args.score.data = NULL;
    CHECK_OK(fdma_score_workspace(&args, &bytes));
    return bytes;
}

static fdma_tensor score_shifted(const fdma_score_args *host, int shift) {
    fdma_score_args args = *host;
    args.v = shifted(host->v, (shift & shift_v) != 0);
    args.dt_proj = shifted(host->dt_proj, (shift & shift_dt_proj) != 0);
    args.a = device_tensor(host->a);
    args.score = device_output(host->score);
    device_exec(&args.exec, score_bytes_without_data(*host));
    CHECK_OK(fdma_score(&args));
    return device_read(args.score);
}

/* The same sums in the same order, whatever the way to them. */
static void scores_of_shifted_data(void) {
    for (int type = 0; type < device_dtype_count; type++) {
        problem x = {.batch = 2, .kv_len = 300, .kv_heads = 3, .head_dim = 64};
        x.q_len = x.q_heads = x.kv_heads;
        x.dtype = device_dtypes[type];
        problem_fill(&x, 21);
        const fdma_score_args args = score_of(&x);
        fdma_score_args on_cpu = args;
        on_cpu.exec.device = 0;
        CHECK_OK(run_score(&on_cpu));
        const fdma_tensor want = copy_tensor(on_cpu.score), aligned = score_shifted(&args, 0);
        const double sums = (double)(x.kv_heads * x.head_dim) * (double)FLT_EPSILON;
        for (int64_t i = 0; i < count_of(want); i++) {
            const double score = (double)((const float *)want.data)[i];
            CHECK_NEAR((double)((const float *)aligned.data)[i], score, (1 + fabs(score)) * sums);
        }
        for (int shift = 1; shift <= shift_all; shift++) {
            test_context("%s, shift %d", dtype_name(x.dtype), shift);
            CHECK_BYTES(score_shifted(&args, shift).data, aligned.data, bytes_of(aligned));
        }
        device_free_both();
    }
}

/* ---- forward ---- */

static size_t forward_bytes_without_data(const problem *x) {
    problem bare = *x;
    bare.selection.expiry.data = bare.selection.slot.data = NULL;
    fdma_forward_args args = problem_args(&bare, NULL);
    size_t bytes = 0;
    args.q.data = args.k.data = args.v.data = args.bias.data = NULL;
    args.out.data = args.lse.data = NULL;
    args.exec.device = device_number;
    CHECK_OK(fdma_forward_workspace(&args, &bytes));
    return bytes;
}

static attended attend_shifted(const problem *x, int shift) {
    problem on_device = *x;
    on_device.q = shifted(x->q, shift & 1);
    on_device.k = shifted(x->k, shift >> 1 & 1);
    on_device.v = shifted(x->v, shift >> 2 & 1);
    on_device.bias = device_tensor(x->bias);
    on_device.selection.expiry = device_tensor(x->selection.expiry);
    on_device.selection.slot = device_tensor(x->selection.slot);
    fdma_forward_args args = device_args(&on_device, NULL);
    args.out = shifted(problem_args(x, NULL).out, shift >> 3 & 1);
    device_exec(&args.exec, forward_bytes_without_data(x));
    CHECK_OK(fdma_forward(&args));
    return device_read_results(&args);
}

/* Few queries and many, few keys and many: each is another kernel's where the data is aligned. */
static void forward_of_shifted_data(void) {
    static const int64_t lengths[][2] = {{1, 1000}, {16, 1024}, {16, 40}, {7, 3000}, {200, 300}};
    enum { tensors = 4 };
    for (int i = 0; i < TEST_COUNT(lengths) * device_dtype_count * 2; i++) {
        const int length = i / 2 / device_dtype_count;
        problem x = {.batch = 2,
                     .q_len = lengths[length][0],
                     .kv_len = lengths[length][1],
                     .q_heads = 4,
                     .kv_heads = 2,
                     .head_dim = 64,
                     .window = i % 2 ? 33 : -1,
                     .scope = FDMA_SCOPE_CAUSAL,
                     .causal = 1,
                     .dtype = device_dtypes[i / 2 % device_dtype_count]};
        problem_fill(&x, (uint64_t)i);
        problem_select(&x);
        const attended want = problem_attend(&x, "reference", 1);
        for (int shift = 0; shift < 1 << tensors; shift++) {
            test_context("lengths %d, window %d, %s, shift %d", length, (int)x.window,
                         dtype_name(x.dtype), shift);
            check_close_results(&x, attend_shifted(&x, shift), want);
            device_free_all();
        }
        device_free_both();
    }
}

/* ---- gradients ---- */

static fdma_tensor bare_tensor(fdma_dtype dtype, int64_t heads) {
    const int64_t shape[] = {1, 131072, heads, 128};
    return fdma_dense_tensor(NULL, dtype, 4, shape);
}

static fdma_tensor bare_numbers(fdma_dtype dtype, int64_t heads) {
    const int64_t shape[] = {1, heads, 131072};
    return fdma_dense_tensor(NULL, dtype, 3, shape);
}

/* Beside inputs, outputs and gradients: four bytes for an element of dq, and 30 % of k and v. */
static void gradients_want_little_memory(void) {
    enum { q_heads = 32, kv_heads = 8 };
    const int64_t weights[] = {kv_heads, kv_heads * 128};
    for (int type = 0; type < device_dtype_count; type++) {
        const fdma_dtype dtype = device_dtypes[type];
        const fdma_tensor q = bare_tensor(dtype, q_heads), k = bare_tensor(dtype, kv_heads);
        const fdma_tensor dt_proj = fdma_dense_tensor(NULL, dtype, 2, weights);
        const fdma_tensor a = fdma_dense_tensor(NULL, dtype, 1, weights);
        const fdma_selection selection = {
            .size = sizeof selection,
            .expiry = bare_numbers(FDMA_INT32, kv_heads),
            .slot = bare_numbers(FDMA_INT32, kv_heads),
            .window = 2048,
            .kv_len = 131072,
            .scope = FDMA_SCOPE_CAUSAL,
        };
        const fdma_attention_backward_args args = {
            .size = sizeof args,
            .dout = q,
            .out = q,
            .lse = bare_numbers(FDMA_FLOAT32, q_heads),
            .q = q,
            .k = k,
            .v = k,
            .dt_proj = dt_proj,
            .a = a,
            .bias = bare_numbers(FDMA_FLOAT32, kv_heads),
            .dq = q,
            .dk = k,
            .dv = k,
            .ddt_proj = dt_proj,
            .da = a,
            .selection = &selection,
            .bias_form = FDMA_BIAS_LINEAR,
            .causal = 1,
            .exec = {.device = device_number},
        };
        size_t bytes = 0;
        test_context("%s", dtype_name(dtype));
        CHECK_OK(fdma_attention_backward_workspace(&args, &bytes));
        const double sums = 4 * (double)count_of(q), keys = 2 * (double)bytes_of(k);
        CHECK((double)bytes > sums);
        CHECK((double)bytes <= sums + 0.3 * keys);
    }
}

static const test_entry tests[] = {
    TEST(scores_of_shifted_data),
    TEST(forward_of_shifted_data),
    TEST(gradients_want_little_memory),
};

int main(void) { return device_test_run(tests, TEST_COUNT(tests)); }
