/* test_cache_long.c - a step of every decode kernel over long caches, and over caches of many kv
 * heads, leaves the cache that the reference leaves, and gives its out and lse. */
#include "backend.h"
#include "gradient.h"

enum { batch = 3, group = 2, head_dim = 64 };

static const struct {
    int64_t kv_heads, window, recent, sinks, tokens;
} shapes[] = {{9, 61, 9, 0, 1}, {3, 190, 10, 4, 3}, {1, 5000, 4213, 0, 2}, {1, 16000, 700, 3, 2}};

/* A full sequence, one with an empty row, and an empty one. The newest keys have the first rows
 * after the sinks. */
static fdma_cache new_cache(int n, fdma_dtype dtype) {
    fdma_cache cache = {.sequences = batch,
                        .kv_heads = shapes[n].kv_heads,
                        .head_dim = head_dim,
                        .window = shapes[n].window,
                        .recent = shapes[n].recent,
                        .sinks = shapes[n].sinks,
                        .dtype = dtype};
    const int64_t rows = cache.window + cache.recent, filled[batch] = {rows, rows - 1, 0};
    uint64_t state = (uint64_t)n + 1;
    size_t bytes = 0;
    CHECK_OK(fdma_cache_bytes(&cache, &bytes));
    CHECK_OK(fdma_cache_init(&cache, test_alloc(bytes)));
    fdma_tensor *const random[] = {&cache.k, &cache.v, &cache.bias, &cache.table.score};
    for (int i = 0; i < TEST_COUNT(random); i++)
        fill_random(fdma_tensor_1d(random[i]->data, random[i]->dtype, count_of(*random[i])), &state,
                    1);
    for (int64_t i = 0; i < count_of(cache.table.position); i++) {
        const int64_t row = i % rows, end = filled[i / rows / cache.kv_heads];
        const int64_t position = row < cache.sinks ? row : end - 1 - (row - cache.sinks);
        ((int32_t *)cache.table.position.data)[i] = row < end ? (int32_t)position : -1;
    }
    for (int64_t b = 0; b < batch; b++)
        ((int32_t *)cache.table.seen.data)[b] = (int32_t)filled[b];
    return cache;
}

typedef struct step {
    fdma_cache cache;
    fdma_tensor q, k, v, score, commit, out, lse;
} step;

static step run_step(int n, const char *kernel, fdma_dtype dtype, bool *is_taken) {
    const int64_t kv_heads = shapes[n].kv_heads, tokens = shapes[n].tokens;
    uint64_t state = 9;
    step x = {.cache = new_cache(n, dtype),
              .q = new_tensor(dtype, batch, tokens, kv_heads * group, head_dim),
              .k = new_tensor(dtype, batch, tokens, kv_heads, head_dim),
              .v = new_tensor(dtype, batch, tokens, kv_heads, head_dim),
              .score = new_tensor(FDMA_FLOAT32, batch, kv_heads, tokens, -1),
              .commit = new_tensor(FDMA_INT32, batch, -1, -1, -1),
              .out = new_output(dtype, batch, tokens, kv_heads * group, head_dim),
              .lse = new_output(FDMA_FLOAT32, batch, kv_heads * group, tokens, -1)};
    fdma_tensor *const random[] = {&x.q, &x.k, &x.v, &x.score};
    for (int i = 0; i < TEST_COUNT(random); i++)
        fill_random(*random[i], &state, 1);
    for (int64_t b = 0; b < batch; b++)
        ((int32_t *)x.commit.data)[b] = (int32_t)(tokens - b % 2);
    fdma_decode_args args = {.size = sizeof args,
                             .cache = x.cache,
                             .q = x.q,
                             .k = x.k,
                             .v = x.v,
                             .score = x.score,
                             .commit = x.commit,
                             .out = x.out,
                             .lse = x.lse,
                             .exec = {.kernel = kernel}};
    *is_taken = call_takes(operation_decode, &args);
    if (*is_taken)
        CHECK_OK(run_decode(&args));
    return x;
}

/* Returns false if the kernel refuses the step. */
static bool check_step(int n, const char *kernel, fdma_dtype dtype) {
    bool is_taken, is_reference_taken;
    test_context("shape %d, %s, %s", n, kernel, dtype_name(dtype));
    const step found = run_step(n, kernel, dtype, &is_taken);
    const step want = run_step(n, "reference", dtype, &is_reference_taken);
    CHECK(is_reference_taken);
    if (is_taken) {
        CHECK(same_tensor(found.cache.table.position, want.cache.table.position));
        CHECK(same_tensor(found.cache.table.score, want.cache.table.score));
        CHECK(same_tensor(found.cache.table.seen, want.cache.table.seen));
        CHECK(same_tensor(found.cache.k, want.cache.k));
        CHECK(same_tensor(found.cache.v, want.cache.v));
        check_near(found.out, want.out, 0x1p-7);
        check_near(found.lse, want.lse, 0x1p-9);
    }
    test_free_all();
    return is_taken;
}

static void steps_are_the_reference_s(const char *kernel, fdma_dtype dtype) {
    for (int n = 0; n < TEST_COUNT(shapes); n++)
        check_step(n, kernel, dtype);
}

/* On a device of compute capability 9.0 one of its own kernels is the fastest for each shape. */
static void own_kernels_take_every_shape(void) {
    const kernel_list kernels = kernels_of("decode");
    bool has_own = false;
    for (int i = 0; i < kernels.count; i++)
        has_own |= strncmp(kernels.name[i], "cuda/sm90/decode", 16) == 0;
    CHECK(kernels.count > 0);
    for (int n = 0; n < TEST_COUNT(shapes) && has_own; n++)
        CHECK(check_step(n, "cuda/sm90/decode", FDMA_BFLOAT16));
}

static const test_entry tests[] = {EACH_KERNEL("decode", steps_are_the_reference_s),
                                   TEST(own_kernels_take_every_shape)};

int main(int argc, char **argv) { return test_run_backend(argc, argv, tests, TEST_COUNT(tests)); }
