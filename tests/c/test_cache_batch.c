/* test_cache_batch.c - a stream has the same bits in a batch of any size. Every stream of a large
 * batch, whose heads do not fit a device at once, gets the out and the lse of a call on it alone;
 * so does a cache that lies in pages. The workspace of a call also serves streams with fewer
 * tokens. */
#include "backend.h"
#include "gradient.h"

enum { kv_heads = 2, q_heads = 10, head_dim = 64 };

static fdma_cache new_cache(int64_t sequences, int64_t window, int64_t filled, fdma_dtype dtype,
                            uint64_t *state) {
    fdma_cache cache = {.sequences = sequences,
                        .kv_heads = kv_heads,
                        .head_dim = head_dim,
                        .window = window,
                        .dtype = dtype};
    size_t bytes = 0;
    CHECK_OK(fdma_cache_bytes(&cache, &bytes));
    CHECK_OK(fdma_cache_init(&cache, test_alloc(bytes)));
    fdma_tensor *const random[] = {&cache.k, &cache.v, &cache.bias, &cache.table.score};
    for (int n = 0; n < TEST_COUNT(random); n++) {
        fdma_tensor flat = fdma_tensor_1d(random[n]->data, random[n]->dtype, count_of(*random[n]));
        fill_random(flat, state, 1);
    }
    for (int64_t n = 0; n < count_of(cache.table.position); n++)
        ((int32_t *)cache.table.position.data)[n] =
            n % window < filled ? (int32_t)(n % window) : -1;
    for (int64_t n = 0; n < sequences; n++)
        ((int32_t *)cache.table.seen.data)[n] = (int32_t)filled;
    return cache;
}

typedef struct batch_call {
    fdma_tensor index, q, k, v, score, commit, out, lse;
} batch_call;

static int invariant; /* batch_invariant of the calls */

static fdma_decode_args args_of(const fdma_cache *cache, const batch_call *x, const char *kernel) {
    return (fdma_decode_args){.size = sizeof(fdma_decode_args),
                              .cache = *cache,
                              .index = x->index,
                              .q = x->q,
                              .k = x->k,
                              .v = x->v,
                              .score = x->score,
                              .commit = x->commit,
                              .out = x->out,
                              .lse = x->lse,
                              .batch_invariant = invariant,
                              .exec = {.kernel = kernel}};
}

/* No token is committed, so the cache does not change. */
static batch_call new_call(int64_t batch, int64_t tokens, fdma_dtype dtype, uint64_t *state) {
    batch_call x = {
        .index = new_tensor(FDMA_INT32, batch, -1, -1, -1),
        .q = new_tensor(dtype, batch, tokens, q_heads, head_dim),
        .k = new_tensor(dtype, batch, tokens, kv_heads, head_dim),
        .v = new_tensor(dtype, batch, tokens, kv_heads, head_dim),
        .score = new_tensor(FDMA_FLOAT32, batch, kv_heads, tokens, -1),
        .commit = new_tensor(FDMA_INT32, batch, -1, -1, -1),
        .out = new_output(dtype, batch, tokens, q_heads, head_dim),
        .lse = new_output(FDMA_FLOAT32, batch, q_heads, tokens, -1),
    };
    fdma_tensor *const random[] = {&x.q, &x.k, &x.v, &x.score};
    for (int n = 0; n < TEST_COUNT(random); n++)
        fill_random(*random[n], state, 1);
    for (int64_t b = 0; b < batch; b++) {
        ((int32_t *)x.index.data)[b] = (int32_t)(batch - 1 - b);
        ((int32_t *)x.commit.data)[b] = 0;
    }
    return x;
}

static void check_alone(const fdma_cache *cache, const batch_call *all, int64_t b,
                        const char *kernel) {
    const int64_t tokens = all->q.shape[1];
    batch_call one = {positions_of(all->index, 0, b, b + 1),
                      positions_of(all->q, 0, b, b + 1),
                      positions_of(all->k, 0, b, b + 1),
                      positions_of(all->v, 0, b, b + 1),
                      positions_of(all->score, 0, b, b + 1),
                      positions_of(all->commit, 0, b, b + 1),
                      new_output(all->q.dtype, 1, tokens, q_heads, head_dim),
                      new_output(FDMA_FLOAT32, 1, q_heads, tokens, -1)};
    one.index.stride[0] = one.commit.stride[0] = 1;
    fdma_decode_args args = args_of(cache, &one, kernel);
    CHECK_OK(run_decode(&args));
    CHECK_BYTES(one.out.data, positions_of(all->out, 0, b, b + 1).data, bytes_of(one.out));
    CHECK_BYTES(one.lse.data, positions_of(all->lse, 0, b, b + 1).data, bytes_of(one.lse));
}

static const struct {
    int64_t batch, tokens, window, filled, page_len;
} shapes[] = {
    {300, 1, 70, 70, 16}, {150, 9, 130, 40, 4}, {40, 64, 33, 33, 1}, {3, 2, 4100, 4100, 32}};

static void streams_are_the_same_in_any_batch(const char *kernel, fdma_dtype dtype) {
    for (int n = 0; n < TEST_COUNT(shapes); n++) {
        const bool on_device = is_device_kernel(kernel);
        const int64_t batch = on_device ? shapes[n].batch : 3;
        if (!on_device && shapes[n].window > 1000)
            continue; // its size matters to a device alone
        uint64_t state = (uint64_t)n + 5;
        const fdma_cache cache =
            new_cache(batch, shapes[n].window, shapes[n].filled, dtype, &state);
        batch_call all = new_call(batch, shapes[n].tokens, dtype, &state);
        fdma_decode_args args = args_of(&cache, &all, kernel);
        test_context("shape %d, %s, %s", n, kernel, dtype_name(dtype));
        if (call_takes(operation_decode, &args)) {
            CHECK_OK(run_decode(&args));
            for (int64_t b = 0; b < batch; b += 1 + batch / 8)
                check_alone(&cache, &all, b, kernel);
        }
        test_free_all();
    }
}

/* Without the name of a kernel, as each is for batches of some sizes. */
static void batch_invariance_needs_no_kernel(void) {
    invariant = 1;
    streams_are_the_same_in_any_batch(test_backend.run != NULL ? "cuda" : "cpu", backend_dtype());
    invariant = 0;
}

/* ---- pages ---- */

/* Address of a row of k or v in a cache with pages, by its page table. */
static char *row_in_pages(const fdma_cache *cache, fdma_tensor pool, int64_t s, int64_t row,
                          int64_t g) {
    const fdma_tensor *const table = &cache->page_table;
    const int64_t len = pool.shape[1];
    const int32_t page = ((const int32_t *)table->data)[s * table->stride[0] + row / len];
    return address(pool, page, row % len, g);
}

/* A copy of a cache in pages. The last page has the first rows. */
static fdma_cache copy_in_pages(const fdma_cache *cache, int64_t page_len) {
    const int64_t columns = (cache->window + page_len - 1) / page_len;
    const int64_t pages = cache->sequences * columns;
    const size_t bytes = (size_t)head_dim * dtype_size(cache->dtype);
    fdma_cache copy = *cache;
    copy.k = new_tensor(cache->dtype, pages, page_len, kv_heads, head_dim);
    copy.v = new_tensor(cache->dtype, pages, page_len, kv_heads, head_dim);
    copy.bias = copy_tensor(cache->bias);
    copy.table = (fdma_table){.score = copy_tensor(cache->table.score),
                              .position = copy_tensor(cache->table.position),
                              .seen = copy_tensor(cache->table.seen)};
    copy.page_table = new_tensor(FDMA_INT32, cache->sequences, columns, -1, -1);
    for (int64_t n = 0; n < pages; n++)
        ((int32_t *)copy.page_table.data)[n] = (int32_t)(pages - 1 - n);
    for (int64_t n = 0; n < cache->sequences * cache->window * kv_heads; n++) {
        const int64_t g = n % kv_heads, row = n / kv_heads % cache->window;
        const int64_t s = n / kv_heads / cache->window;
        memcpy(row_in_pages(&copy, copy.k, s, row, g), address(cache->k, s, row, g), bytes);
        memcpy(row_in_pages(&copy, copy.v, s, row, g), address(cache->v, s, row, g), bytes);
    }
    return copy;
}

static void check_same_cache(const fdma_cache *paged, const fdma_cache *plain) {
    const size_t bytes = (size_t)head_dim * dtype_size(plain->dtype);
    CHECK(same_tensor(paged->bias, plain->bias));
    CHECK(same_tensor(paged->table.score, plain->table.score));
    CHECK(same_tensor(paged->table.position, plain->table.position));
    CHECK(same_tensor(paged->table.seen, plain->table.seen));
    for (int64_t n = 0; n < plain->sequences * plain->window * kv_heads; n++) {
        const int64_t g = n % kv_heads, row = n / kv_heads % plain->window;
        const int64_t s = n / kv_heads / plain->window;
        CHECK_BYTES(row_in_pages(paged, paged->k, s, row, g), address(plain->k, s, row, g), bytes);
        CHECK_BYTES(row_in_pages(paged, paged->v, s, row, g), address(plain->v, s, row, g), bytes);
    }
}

/* The entries commit different numbers of tokens. */
static void pages_change_no_bit(const char *kernel, fdma_dtype dtype) {
    for (int n = 0; n < TEST_COUNT(shapes); n++) {
        const bool on_device = is_device_kernel(kernel);
        const int64_t batch = on_device ? shapes[n].batch : 3, tokens = shapes[n].tokens;
        if (!on_device && shapes[n].window > 1000)
            continue; // its size matters to a device alone
        uint64_t state = (uint64_t)n + 7;
        const fdma_cache plain =
            new_cache(batch, shapes[n].window, shapes[n].filled, dtype, &state);
        const fdma_cache paged = copy_in_pages(&plain, shapes[n].page_len);
        batch_call want = new_call(batch, tokens, dtype, &state), found = want;
        for (int64_t b = 0; b < batch; b++)
            ((int32_t *)want.commit.data)[b] = (int32_t)(b % (tokens + 1));
        found.out = new_output(dtype, batch, tokens, q_heads, head_dim);
        found.lse = new_output(FDMA_FLOAT32, batch, q_heads, tokens, -1);
        fdma_decode_args args = args_of(&plain, &want, kernel);
        fdma_decode_args in_pages = args_of(&paged, &found, kernel);
        test_context("shape %d in pages, %s, %s", n, kernel, dtype_name(dtype));
        if (call_takes(operation_decode, &in_pages)) {
            CHECK_OK(run_decode(&args));
            CHECK_OK(run_decode(&in_pages));
            CHECK(same_tensor(found.out, want.out));
            CHECK(same_tensor(found.lse, want.lse));
            check_same_cache(&paged, &plain);
        }
        test_free_all();
    }
}

static void streams_are_the_same_in_pages(void) { // test_cache_pages has the other dtypes
    const kernel_list kernels = kernels_for("decode", backend_dtype());
    for (int n = 0; n < kernels.count; n++)
        pages_change_no_bit(kernels.name[n], backend_dtype());
}

/* ---- workspace ---- */

/* With these rows, three new tokens make more splits of the keys on the CPU than four. */
static void workspaces_serve_fewer_tokens(const char *kernel, fdma_dtype dtype) {
    enum { tokens = 4, used = 3, rows = 9213 };
    uint64_t state = 3;
    int32_t count = used;
    const fdma_cache cache = new_cache(1, rows, rows, dtype, &state);
    batch_call all = new_call(1, tokens, dtype, &state);
    all.q = new_tensor(dtype, 1, tokens, kv_heads, head_dim);
    fill_random(all.q, &state, 1);
    all.out = new_output(dtype, 1, tokens, kv_heads, head_dim);
    all.lse = new_output(FDMA_FLOAT32, 1, kv_heads, tokens, -1);
    batch_call three = all;
    three.q = positions_of(all.q, 1, 0, used), three.k = positions_of(all.k, 1, 0, used);
    three.v = positions_of(all.v, 1, 0, used), three.score = positions_of(all.score, 2, 0, used);
    three.out = new_output(dtype, 1, used, kv_heads, head_dim);
    three.lse = new_output(FDMA_FLOAT32, 1, kv_heads, used, -1);
    test_context("%s, %s", kernel, dtype_name(dtype));
    fdma_decode_args args = args_of(&cache, &all, kernel), fewer = args_of(&cache, &three, kernel);
    args.n_tokens = fdma_tensor_1d(&count, FDMA_INT32, 1);
    if (call_takes(operation_decode, &args)) {
        CHECK_OK(run_decode(&args));
        CHECK_OK(run_decode(&fewer));
        check_near(positions_of(all.out, 1, 0, used), three.out, 0x1p-7);
    }
    test_free_all();
}

static const test_entry tests[] = {EACH_KERNEL("decode", streams_are_the_same_in_any_batch),
                                   TEST(batch_invariance_needs_no_kernel),
                                   TEST(streams_are_the_same_in_pages),
                                   EACH_KERNEL("decode", workspaces_serve_fewer_tokens)};

int main(int argc, char **argv) { return test_run_backend(argc, argv, tests, TEST_COUNT(tests)); }
