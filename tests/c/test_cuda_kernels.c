/* test_cuda_kernels.c - tests of CUDA kernels that need no device. First, the workspace that a
 * backward or score_backward kernel asks for must not depend on the tensors' addresses, because a
 * caller may ask before it has allocated them. Second, which kernels take few queries. Third, when
 * backward has a slot for every key, and how much workspace it then asks for. */
#include "calls.h"

#include "core/kernel.h"
#include "core/operations.h"
#include "cuda/cuda.h"

typedef struct shape {
    call_sizes sizes;
    int64_t window; /* -1: dense */
} shape;

static const shape shapes[] = {
    {{1, 150, 150, 4, 2, 64, 0, 0, 0, false}, 40},
    {{1, 4096, 4096, 32, 8, 128, 0, 0, 0, false}, 1024},
    {{2, 60, 300, 4, 2, 128, 0, 0, 0, false}, 50},
    {{1, 1, 200, 8, 2, 128, 0, 0, 0, false}, 50},
    {{1, 97, 41, 2, 1, 64, 0, 0, 0, false}, -1},
    {{2, 70, 90, 4, 2, 96, 0, 0, 0, false}, -1},
    {{1, 500, 900, 2, 1, 192, 0, 0, 0, false}, 331},
    {{1, 500, 900, 16, 1, 256, 0, 0, 0, false}, 31},
    {{1, 60, 90, 2, 1, 8, 0, 0, 0, false}, 31},
};

/* A checked backward or score_backward call. All its tensors lie at `data`; in tensors of rank 4,
 * `gap` unused elements follow each row. */
static fdma_problem problem_at(fdma_operation operation, const shape *n, void *data, int64_t gap,
                               int deterministic) {
    const tensor_table table = fdma_tensors[operation];
    call x = {.operation = operation};
    fdma_problem checked;
    call_make(&x, &n->sizes, FDMA_BFLOAT16, true);
    call_describe_selection(&x, n->window, FDMA_SCOPE_CAUSAL);
    for (const tensor_entry *entry = table.entries; entry < table.entries + table.count; entry++) {
        fdma_tensor *const tensor = call_tensor(&x, entry);
        tensor->data = data;
        if (tensor->rank == 4) {
            tensor->stride[2] = tensor->shape[3] + gap;
            tensor->stride[1] = tensor->shape[2] * tensor->stride[2];
            tensor->stride[0] = tensor->shape[1] * tensor->stride[1];
        }
    }
    call_exec(&x)->device = 1;
    if (operation == operation_backward) {
        x.args.backward.causal = 1;
        x.args.backward.deterministic = deterministic;
        if (n->window < 0)
            call_drop_selection(&x);
    }
    CHECK_OK(fdma_check_call(operation, &x.args, check_shapes, &checked));
    return checked;
}

static void check_kernel(const fdma_kernel *kernel, const shape *n, int deterministic) {
    static _Alignas(256) char line[512];
    static const int64_t gaps[] = {0, 8, 3};
    static const int64_t offsets[] = {2, 16, 128}; /* bytes */
    for (int g = 0; g < TEST_COUNT(gaps); g++) {
        const fdma_problem nowhere = problem_at(kernel->operation, n, NULL, gaps[g], deterministic);
        const size_t want = kernel->workspace(&nowhere);
        for (int s = 0; s < TEST_COUNT(offsets); s++) {
            const fdma_problem there =
                problem_at(kernel->operation, n, line + offsets[s], gaps[g], deterministic);
            CHECK(kernel->workspace(&there) == want);
        }
    }
}

static void workspaces_do_not_depend_on_addresses(void) {
    int backward = 0, score = 0;
    for (const kernel_table *const *table = fdma_cuda_backend.tables; *table != NULL; table++) {
        for (int32_t i = 0; i < (*table)->count; i++) {
            const fdma_kernel *kernel = &(*table)->kernels[i];
            if (kernel->operation != operation_backward &&
                kernel->operation != operation_score_backward)
                continue;
            for (int s = 0; s < 2 * TEST_COUNT(shapes); s++) {
                test_context("%s, shape %d", kernel->name, s / 2);
                check_kernel(kernel, &shapes[s / 2], s % 2);
            }
            backward += kernel->operation == operation_backward;
            score += kernel->operation == operation_score_backward;
        }
    }
    CHECK(backward > 0);
    CHECK(score > 0);
}

static fdma_problem forward_problem(int64_t q_len) {
    const call_sizes n = {
        .batch = 1, .q_len = q_len, .kv_len = 4096, .q_heads = 8, .kv_heads = 2, .head_dim = 64};
    call x = {.operation = operation_forward, .args.forward = {.causal = 1, .exec = {.device = 1}}};
    fdma_problem checked;
    call_make(&x, &n, FDMA_BFLOAT16, false);
    call_drop_selection(&x);
    CHECK_OK(fdma_check_call(x.operation, &x.args, check_shapes, &checked));
    return checked;
}

/* True if a kernel refuses a problem for any reason except a missing device. */
static bool refuses(const fdma_kernel *kernel, const fdma_problem *problem) {
    const char *const reason = kernel->refuses(problem);
    return reason != NULL && strstr(reason, "compute capability") == NULL;
}

static bool refuses_shape(const fdma_kernel *kernel, int64_t q_len) {
    const fdma_problem problem = forward_problem(q_len);
    return refuses(kernel, &problem);
}

/* Decode kernels are listed before tile kernels and take up to 16 queries. The tile kernels of sm80
 * take any number, for callers that choose them by name; sm90 kernels refuse few queries. */
static void decode_takes_few_queries(void) {
    int decode = 0, tile = 0;
    for (const kernel_table *const *table = fdma_cuda_backend.tables; *table != NULL; table++) {
        for (int32_t i = 0; i < (*table)->count; i++) {
            const fdma_kernel *kernel = &(*table)->kernels[i];
            const bool is_decode = strncmp(kernel->name, "cuda/sm80/decode/", 17) == 0;
            test_context("%s", kernel->name);
            if (kernel->operation != operation_forward) {
                CHECK(!is_decode || kernel->operation == operation_decode);
            } else if (is_decode) {
                CHECK(!refuses_shape(kernel, 1));
                CHECK(!refuses_shape(kernel, 16));
                CHECK(refuses_shape(kernel, 17));
                CHECK(tile == 0);
                decode++;
            } else {
                const bool is_sm80 = strncmp(kernel->name, "cuda/sm80/", 10) == 0;
                CHECK(refuses_shape(kernel, 1) == !is_sm80);
                tile++;
            }
        }
    }
    CHECK(decode > 0);
    CHECK(tile > 0);
}

static bool is_by_key(const fdma_kernel *kernel) {
    return strncmp(kernel->name, "cuda/sm90/by_key/", 17) == 0;
}

/* True if cuda/sm90/by_key refuses a causal call of 8192 keys. name: exec.kernel, or NULL. */
static bool by_key_refuses(const fdma_kernel *kernel, int64_t batch, int64_t window,
                           const char *name) {
    static _Alignas(256) char line[512];
    const shape n = {{.batch = batch,
                      .q_len = 8192,
                      .kv_len = 8192,
                      .q_heads = 8,
                      .kv_heads = 2,
                      .head_dim = strstr(kernel->name, "d256") != NULL   ? 256
                                  : strstr(kernel->name, "d128") != NULL ? 128
                                                                         : 64},
                     window};
    fdma_problem problem = problem_at(operation_backward, &n, line, 0, 0);
    problem.exec.kernel = name;
    return refuses(kernel, &problem);
}

/* by_key visits all visible pairs of kept keys, which is faster where most are kept. The choice
 * must not depend on the batch, because the kernels differ by rounding. A caller may choose it by
 * name. */
static void by_key_takes_calls_that_keep_most_pairs(void) {
    int found = 0;
    for (const kernel_table *const *table = fdma_cuda_backend.tables; *table != NULL; table++)
        for (int32_t i = 0; i < (*table)->count; i++) {
            const fdma_kernel *kernel = &(*table)->kernels[i];
            if (!is_by_key(kernel))
                continue;
            test_context("%s", kernel->name);
            for (int64_t batch = 1; batch <= 64; batch *= 64) {
                CHECK(!by_key_refuses(kernel, batch, 7680, NULL));
                CHECK(by_key_refuses(kernel, batch, 512, NULL));
                CHECK(!by_key_refuses(kernel, batch, 512, "cuda/sm90/by_key"));
                CHECK(by_key_refuses(kernel, batch, 512, "cuda/sm90"));
                CHECK(by_key_refuses(kernel, batch, -1, NULL));
                CHECK(by_key_refuses(kernel, batch, -1, "cuda/sm90/by_key"));
            }
            found++;
        }
    CHECK(found > 0);
}

/* Other kernels take the calls of by_key if the data is not aligned, or q is shorter. */
static void by_key_asks_for_what_the_others_need(void) {
    static const shape kept[] = {
        {{1, 1024, 1024, 8, 8, 128, 0, 0, 0, false}, 512},
        {{1, 512, 1024, 8, 8, 128, 0, 0, 0, false}, 512},
        {{1, 4096, 4096, 4, 4, 128, 0, 0, 0, false}, 2048},
        {{1, 16384, 16384, 4, 4, 64, 0, 0, 0, false}, 12288},
    };
    for (int s = 0; s < TEST_COUNT(kept); s++) {
        const fdma_problem problem = problem_at(operation_backward, &kept[s], NULL, 0, 0);
        const char *const end = problem.head_dim == 64 ? "/d64" : "/d128";
        size_t asked = 0, most = 0;
        for (const kernel_table *const *table = fdma_cuda_backend.tables; *table != NULL; table++)
            for (int32_t i = 0; i < (*table)->count; i++) {
                const fdma_kernel *kernel = &(*table)->kernels[i];
                if (kernel->operation != operation_backward || strstr(kernel->name, end) == NULL)
                    continue;
                const size_t needed = kernel->workspace(&problem);
                most = needed > most ? needed : most;
                if (is_by_key(kernel))
                    asked = needed;
            }
        test_context("shape %d", s);
        CHECK(asked > 0);
        CHECK(asked >= most);
    }
}

static const test_entry tests[] = {
    TEST(workspaces_do_not_depend_on_addresses), TEST(decode_takes_few_queries),
    TEST(by_key_takes_calls_that_keep_most_pairs), TEST(by_key_asks_for_what_the_others_need)};

int main(void) { return test_run(tests, TEST_COUNT(tests)); }
