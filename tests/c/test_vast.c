/* test_vast.c - sizes without bounds: axes that may have any length where another has none, windows
 * beyond every key. */
#include "fixture.h"

static const int64_t vast = INT64_C(1) << 40;

enum { length = 3, head_dim = 8 };

/* A tensor without elements, which nobody looks at. */
static fdma_tensor empty(int64_t n0, int64_t n1, int64_t n2) {
    const int64_t shape[4] = {n0, n1, n2, head_dim};
    return fdma_dense_tensor(NULL, FDMA_FLOAT32, 4, shape);
}

static fdma_tensor empty_lse(int64_t batch, int64_t heads, int64_t q_len) {
    const int64_t shape[3] = {batch, heads, q_len};
    return fdma_dense_tensor(NULL, FDMA_FLOAT32, 3, shape);
}

/* Ones, which a gradient of nothing overwrites. */
static fdma_tensor ones(int64_t n0, int64_t n1, int64_t n2, int64_t n3) {
    const fdma_tensor tensor = new_tensor(FDMA_FLOAT32, n0, n1, n2, n3);
    for (int64_t i = 0; i < count_of(tensor); i++)
        ((float *)tensor.data)[i] = 1;
    return tensor;
}

static void check_zeros(fdma_tensor tensor) {
    for (int64_t i = 0; i < count_of(tensor); i++)
        CHECK(((const float *)tensor.data)[i] == 0);
}

static void check_no_queries(const char *kernel) {
    const fdma_tensor q = empty(1, 0, vast), k = new_tensor(FDMA_FLOAT32, 1, length, 1, head_dim);
    fdma_backward_args args = {
        .size = sizeof args,
        .dout = q,
        .out = q,
        .lse = empty_lse(1, vast, 0),
        .q = q,
        .k = k,
        .v = k,
        .dq = q,
        .dk = ones(1, length, 1, head_dim),
        .dv = ones(1, length, 1, head_dim),
        .dbias = ones(1, 1, length, -1),
        .exec = {.kernel = kernel},
    };
    CHECK_OK(run_backward(&args));
    check_zeros(args.dk);
    check_zeros(args.dv);
    check_zeros(args.dbias);
}

static void check_no_keys(const char *kernel) {
    fdma_score_backward_args args = {
        .size = sizeof args,
        .dbias = empty_lse(vast, 1, 0),
        .v = empty(vast, 0, 1),
        .dt_proj = new_tensor(FDMA_FLOAT32, 1, head_dim, -1, -1),
        .a = new_tensor(FDMA_FLOAT32, 1, -1, -1, -1),
        .dv = empty(vast, 0, 1),
        .ddt_proj = ones(1, head_dim, -1, -1),
        .da = ones(1, -1, -1, -1),
        .exec = {.kernel = kernel},
    };
    CHECK_OK(run_score_backward(&args));
    check_zeros(args.ddt_proj);
    check_zeros(args.da);
}

static void check_no_heads(const char *kernel) {
    const fdma_tensor out = empty(vast, 1, 0), lse = empty_lse(vast, 0, 1);
    fdma_merge_args args = {
        .size = sizeof args,
        .out_a = out,
        .lse_a = lse,
        .out_b = out,
        .lse_b = lse,
        .out = out,
        .lse = lse,
        .exec = {.kernel = kernel},
    };
    CHECK_OK(run_merge(&args));
}

static void check_no_gradient_heads(const char *kernel) {
    const fdma_tensor out = empty(vast, 1, 0), lse = empty_lse(vast, 0, 1);
    fdma_merge_backward_args args = {
        .size = sizeof args,
        .dout = out,
        .out_a = out,
        .lse_a = lse,
        .out_b = out,
        .lse_b = lse,
        .dout_a = out,
        .dlse_a = lse,
        .dout_b = out,
        .dlse_b = lse,
        .exec = {.kernel = kernel},
    };
    CHECK_OK(run_merge_backward(&args));
}

static void for_each_kernel(const char *operation, void (*holds)(const char *kernel)) {
    const kernel_list kernels = kernels_of(operation);
    for (int kernel = 0; kernel < kernels.count; kernel++) {
        test_context("%s", kernels.name[kernel]);
        holds(kernels.name[kernel]);
        test_free_all();
    }
}

/* A loop over 2^40 heads or sequences of nothing would not end. */
static void nothing_takes_no_time(void) {
    for_each_kernel("backward", check_no_queries);
    for_each_kernel("score_backward", check_no_keys);
    for_each_kernel("merge", check_no_heads);
    for_each_kernel("merge_backward", check_no_gradient_heads);
}

static size_t bytes_with_window(const char *kernel, int64_t window) {
    enum { q_len = 700, kv_len = 1000 };
    const int64_t q_shape[4] = {1, q_len, 4, 64}, k_shape[4] = {1, kv_len, 2, 64};
    const int64_t lse_shape[3] = {1, 4, q_len}, key_shape[3] = {1, 2, kv_len};
    const fdma_tensor q = fdma_dense_tensor(NULL, FDMA_FLOAT32, 4, q_shape);
    const fdma_tensor k = fdma_dense_tensor(NULL, FDMA_FLOAT32, 4, k_shape);
    const fdma_selection selection = {
        .size = sizeof selection,
        .expiry = fdma_dense_tensor(NULL, FDMA_INT32, 3, key_shape),
        .slot = fdma_dense_tensor(NULL, FDMA_INT32, 3, key_shape),
        .window = window,
        .kv_len = kv_len,
        .scope = FDMA_SCOPE_CAUSAL,
    };
    const fdma_backward_args args = {
        .size = sizeof args,
        .dout = q,
        .out = q,
        .lse = fdma_dense_tensor(NULL, FDMA_FLOAT32, 3, lse_shape),
        .q = q,
        .k = k,
        .v = k,
        .dq = q,
        .dk = k,
        .dv = k,
        .selection = &selection,
        .causal = 1,
        .exec = {.kernel = kernel, .threads = 1},
    };
    size_t bytes = 0;
    CHECK_OK(fdma_backward_workspace(&args, &bytes));
    return bytes;
}

static void check_windows(const char *kernel) {
    static const int64_t windows[] = {1001, INT32_MAX, INT64_C(1) << 62, INT64_MAX - 1, INT64_MAX};
    const size_t all = bytes_with_window(kernel, 1000);
    for (int n = 0; n < TEST_COUNT(windows); n++)
        CHECK(bytes_with_window(kernel, windows[n]) == all);
}

static void windows_beyond_every_key_are_one(void) { for_each_kernel("backward", check_windows); }

/* Elements that no memory holds, although their bytes can be counted; nothing is allocated. */
static void more_than_memory_is_refused(void) {
    fdma_forward_args args = {.size = sizeof args};
    for (int64_t batch = INT64_C(1) << 30; batch <= INT64_C(1) << 40; batch <<= 10) {
        const int64_t rows[4] = {batch, 1 << 12, 1, head_dim}, keys[4] = {batch, 1, 1, head_dim};
        size_t bytes;
        args.q = args.out = fdma_dense_tensor(NULL, FDMA_FLOAT32, 4, rows);
        args.k = args.v = fdma_dense_tensor(NULL, FDMA_FLOAT32, 4, keys);
        const fdma_status status = fdma_forward_workspace(&args, &bytes);
        CHECK_INT(status, batch == INT64_C(1) << 30 ? FDMA_OK : FDMA_INVALID_ARGUMENT);
    }
    CHECK_WORD(fdma_last_error(), "q");
}

static const test_entry tests[] = {
    TEST(more_than_memory_is_refused),
    TEST(nothing_takes_no_time),
    TEST(windows_beyond_every_key_are_one),
};

int main(void) { return test_run(tests, TEST_COUNT(tests)); }
