/* test_cuda_rows.c - what can be said of CUDA kernels without a device: the workspace that the
 * kernels of gradients ask for does not depend on where data lies, since a caller asks before there
 * is any; and which kernels take few queries. */
#include "fixture.h"

#include "core/kernel.h"
#include "cuda/cuda.h"

typedef struct sizes {
    int64_t batch, q_len, kv_len, q_heads, kv_heads, head_dim, window; /* window -1: dense */
} sizes;

static const sizes shapes[] = {
    {1, 150, 150, 4, 2, 64, 40},   {1, 4096, 4096, 32, 8, 128, 1024}, {2, 60, 300, 4, 2, 128, 50},
    {1, 1, 200, 8, 2, 128, 50},    {1, 97, 41, 2, 1, 64, -1},         {2, 70, 90, 4, 2, 96, -1},
    {1, 500, 900, 2, 1, 192, 331}, {1, 500, 900, 16, 1, 256, 31},     {1, 60, 90, 2, 1, 8, 31},
};

/* Where every tensor's data is, and how its rows lie. */
typedef struct place {
    void *data;
    int64_t gap; /* elements between the rows of rank 4 tensors */
} place;

static fdma_tensor place_tensor(place at, fdma_dtype dtype, int64_t n0, int64_t n1, int64_t n2,
                                int64_t n3) {
    const int64_t shape[4] = {n0, n1, n2, n3};
    fdma_tensor tensor = fdma_dense_tensor(at.data, dtype, n3 < 0 ? 3 : 4, shape);
    if (n3 >= 0) {
        tensor.stride[2] = n3 + at.gap;
        tensor.stride[1] = n2 * tensor.stride[2];
        tensor.stride[0] = n1 * tensor.stride[1];
    }
    return tensor;
}

static fdma_problem backward_problem(const sizes *n, place at, int deterministic) {
    const fdma_dtype dtype = FDMA_BFLOAT16;
    const fdma_tensor rows = place_tensor(at, dtype, n->batch, n->q_len, n->q_heads, n->head_dim);
    const fdma_tensor keys = place_tensor(at, dtype, n->batch, n->kv_len, n->kv_heads, n->head_dim);
    const fdma_tensor lse = place_tensor(at, FDMA_FLOAT32, n->batch, n->q_heads, n->q_len, -1);
    const fdma_tensor bias = place_tensor(at, FDMA_FLOAT32, n->batch, n->kv_heads, n->kv_len, -1);
    const fdma_selection selection = {
        .size = sizeof selection,
        .expiry = place_tensor(at, FDMA_INT32, n->batch, n->kv_heads, n->kv_len, -1),
        .slot = place_tensor(at, FDMA_INT32, n->batch, n->kv_heads, n->kv_len, -1),
        .window = n->window,
        .kv_len = n->kv_len,
        .scope = FDMA_SCOPE_CAUSAL,
    };
    const fdma_backward_args args = {
        .size = sizeof args,
        .dout = rows,
        .out = rows,
        .lse = lse,
        .q = rows,
        .k = keys,
        .v = keys,
        .bias = bias,
        .dq = rows,
        .dk = keys,
        .dv = keys,
        .dbias = bias,
        .selection = n->window >= 0 ? &selection : NULL,
        .causal = 1,
        .deterministic = deterministic,
        .exec = {.device = 1},
    };
    fdma_problem checked;
    CHECK_OK(fdma_check_call(operation_backward, &args, check_shapes, &checked));
    return checked;
}

static fdma_problem score_problem(const sizes *n, place at) {
    const int64_t heads = n->kv_heads, width = heads * n->head_dim;
    const fdma_tensor v = place_tensor(at, FDMA_FLOAT16, n->batch, n->kv_len, heads, n->head_dim);
    const fdma_tensor proj = fdma_dense_tensor(at.data, FDMA_FLOAT16, 2, (int64_t[]){heads, width});
    const fdma_tensor a = fdma_dense_tensor(at.data, FDMA_FLOAT32, 1, &heads);
    const fdma_score_backward_args args = {
        .size = sizeof args,
        .dbias = place_tensor(at, FDMA_FLOAT32, n->batch, heads, n->kv_len, -1),
        .v = v,
        .dt_proj = proj,
        .a = a,
        .dv = v,
        .ddt_proj = proj,
        .da = a,
        .exec = {.device = 1},
    };
    fdma_problem checked;
    CHECK_OK(fdma_check_call(operation_score_backward, &args, check_shapes, &checked));
    return checked;
}

static fdma_problem problem_of(fdma_operation operation, const sizes *n, place at,
                               int deterministic) {
    return operation == operation_backward ? backward_problem(n, at, deterministic)
                                           : score_problem(n, at);
}

static void check_row(const fdma_kernel *row, const sizes *n, int deterministic) {
    static _Alignas(256) char line[512];
    static const int64_t gaps[] = {0, 8, 3};
    static const int64_t shifts[] = {2, 16, 128};
    for (int g = 0; g < TEST_COUNT(gaps); g++) {
        const fdma_problem nowhere =
            problem_of(row->operation, n, (place){NULL, gaps[g]}, deterministic);
        const size_t want = row->workspace(&nowhere);
        for (int s = 0; s < TEST_COUNT(shifts); s++) {
            const place at = {line + shifts[s], gaps[g]};
            const fdma_problem there = problem_of(row->operation, n, at, deterministic);
            CHECK(row->workspace(&there) == want);
        }
    }
}

static void workspaces_do_not_depend_on_addresses(void) {
    int backward = 0, score = 0;
    for (const kernel_table *const *table = fdma_cuda_tables; *table != NULL; table++) {
        for (int32_t i = 0; i < (*table)->count; i++) {
            const fdma_kernel *row = &(*table)->kernels[i];
            if (row->operation != operation_backward && row->operation != operation_score_backward)
                continue;
            for (int s = 0; s < 2 * TEST_COUNT(shapes); s++) {
                test_context("%s, shape %d", row->name, s / 2);
                check_row(row, &shapes[s / 2], s % 2);
            }
            backward += row->operation == operation_backward;
            score += row->operation == operation_score_backward;
        }
    }
    CHECK(backward > 0);
    CHECK(score > 0);
}

static fdma_problem forward_problem(int64_t q_len) {
    const place at = {NULL, 0};
    const fdma_tensor rows = place_tensor(at, FDMA_BFLOAT16, 1, q_len, 8, 64);
    const fdma_tensor keys = place_tensor(at, FDMA_BFLOAT16, 1, 4096, 2, 64);
    const fdma_forward_args args = {.size = sizeof args,
                                    .q = rows,
                                    .k = keys,
                                    .v = keys,
                                    .out = rows,
                                    .causal = 1,
                                    .exec = {.device = 1}};
    fdma_problem checked;
    CHECK_OK(fdma_check_call(operation_forward, &args, check_shapes, &checked));
    return checked;
}

/* Whether a kernel refuses a problem for any reason but the device, which need not be there. */
static bool refuses_shape(const fdma_kernel *row, int64_t q_len) {
    const fdma_problem problem = forward_problem(q_len);
    const char *const reason = row->refuses(&problem);
    return reason != NULL && strstr(reason, "compute capability") == NULL;
}

/* Decode kernels come first and take up to 16 queries; sm80's tile kernels, forced by name, take
 * any number. */
static void decode_takes_few_queries(void) {
    int decode = 0, tile = 0;
    for (const kernel_table *const *table = fdma_cuda_tables; *table != NULL; table++) {
        for (int32_t i = 0; i < (*table)->count; i++) {
            const fdma_kernel *row = &(*table)->kernels[i];
            const bool is_decode = strncmp(row->name, "cuda/sm80/decode/", 17) == 0;
            test_context("%s", row->name);
            if (row->operation != operation_forward) {
                CHECK(!is_decode);
            } else if (is_decode) {
                CHECK(!refuses_shape(row, 1));
                CHECK(!refuses_shape(row, 16));
                CHECK(refuses_shape(row, 17));
                CHECK(tile == 0);
                decode++;
            } else {
                const bool is_sm80 = strncmp(row->name, "cuda/sm80/", 10) == 0;
                CHECK(refuses_shape(row, 1) == !is_sm80);
                tile++;
            }
        }
    }
    CHECK(decode > 0);
    CHECK(tile > 0);
}

static const test_entry tests[] = {TEST(workspaces_do_not_depend_on_addresses),
                                   TEST(decode_takes_few_queries)};

int main(void) { return test_run(tests, TEST_COUNT(tests)); }
