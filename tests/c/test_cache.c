/* test_cache.c - decoding with a cache equals one call on the whole sequence. Streams of different
 * ages get tokens one by one, in groups, or as drafts that are only partly committed. Their out and
 * lse equal the results of one call on all their tokens, and the cache holds the keys that its
 * selection keeps. */
#include "cached_stream.h"

static void streams_are_the_whole(const char *kernel, fdma_dtype dtype) {
    for (int c = 0; c < TEST_COUNT(cases); c++) {
        uint64_t state = (uint64_t)c + 20;
        whole_call x = new_whole(&cases[c], dtype);
        int32_t seen[streams] = {0};
        test_context("case %d, %s, %s", c, kernel, dtype_name(dtype));
        const fdma_cache cache = new_cache(&cases[c], dtype);
        if (!is_taken(&x, &cache, kernel)) {
            test_free_all();
            continue;
        }
        attend_whole(&x, kernel);
        decode_streams(&x, &cache, seen, &state, kernel);
        test_free_all();
    }
}

static void streams_by_every_kernel(void) { for_each_kernel("decode", streams_are_the_whole); }

/* ---- caches ---- */

static void caches_have_the_size_of_their_rows(void) {
    fdma_cache cache = {.sequences = 1, .kv_heads = 8, .head_dim = 128, .window = 2048};
    size_t bytes = 0;
    cache.dtype = FDMA_BFLOAT16;
    CHECK_OK(fdma_cache_bytes(&cache, &bytes));
    const size_t keys = 2 * 2048 * 8 * 128 * 2, numbers = 3 * 2048 * 8 * 4;
    CHECK(bytes >= keys + numbers && bytes < keys + numbers + 1024);
    cache.recent = 2048;
    CHECK_OK(fdma_cache_bytes(&cache, &bytes));
    CHECK(bytes >= 2 * (keys + numbers));
}

static void check_cache_refused(fdma_cache cache, fdma_status status, const char *words) {
    size_t bytes = 77;
    CHECK_INT(fdma_cache_bytes(&cache, &bytes), status);
    CHECK_WORD(fdma_last_error(), words);
    CHECK_INT(fdma_cache_init(&cache, &bytes), status);
    CHECK_INT(bytes, 77);
}

static void wrong_caches_are_refused(void) {
    const fdma_cache right = {
        .sequences = 2, .kv_heads = 2, .head_dim = 16, .window = 4, .dtype = FDMA_FLOAT32};
    fdma_cache wrong = right;
    wrong.sequences = 0;
    check_cache_refused(wrong, FDMA_INVALID_ARGUMENT, "sequences is 0");
    wrong = right, wrong.kv_heads = -1;
    check_cache_refused(wrong, FDMA_INVALID_ARGUMENT, "kv_heads is -1");
    wrong = right, wrong.head_dim = 12;
    check_cache_refused(wrong, FDMA_UNSUPPORTED, "head_dim is 12");
    wrong = right, wrong.window = 0;
    check_cache_refused(wrong, FDMA_INVALID_ARGUMENT, "window is 0");
    wrong = right, wrong.recent = -1;
    check_cache_refused(wrong, FDMA_INVALID_ARGUMENT, "recent is -1");
    wrong = right, wrong.sinks = 5;
    check_cache_refused(wrong, FDMA_INVALID_ARGUMENT, "sinks is 5, want 0 to its window, 4");
    wrong = right, wrong.dtype = FDMA_INT32;
    check_cache_refused(wrong, FDMA_UNSUPPORTED, "dtype is int32");
    wrong = right, wrong.device = -1;
    check_cache_refused(wrong, FDMA_INVALID_ARGUMENT, "cache: its device is -1");
    wrong = right, wrong.sequences = INT32_MAX, wrong.window = INT32_MAX / 2;
    check_cache_refused(wrong, FDMA_INVALID_ARGUMENT, "fits in memory");
    wrong = right;
    CHECK_INT(fdma_cache_init(&wrong, NULL), FDMA_INVALID_ARGUMENT);
    CHECK_WORD(fdma_last_error(), "memory: is NULL");
}

/* A dropped sequence begins again; the others do not change. */
static void sequences_are_dropped(void) {
    const stream_case *const test = &cases[1];
    uint64_t state = 2;
    whole_call x = new_whole(test, FDMA_FLOAT32);
    const int32_t none[streams] = {0};
    attend_whole(&x, NULL);
    const fdma_cache cache = new_cache(test, FDMA_FLOAT32);
    for (int pass = 0; pass < 2; pass++) {
        step s = {0};
        plan_step(&x, none, &state, &s);
        s.tokens[0] = s.commit[0] = 1;
        run_step(&x, &cache, &s, NULL);
        check_step(&x, none, &s);
        for (int64_t sequence = 0; sequence < sequences; sequence++)
            CHECK_OK(fdma_cache_drop(&cache, sequence));
        check_cache(&x, &cache, none);
    }
    CHECK_INT(fdma_cache_drop(&cache, sequences), FDMA_INVALID_ARGUMENT);
    CHECK_WORD(fdma_last_error(), "sequence: is 5, want 0 to 4");
}

static void check_drop_refused(fdma_cache cache, const char *words) {
    CHECK_INT(fdma_cache_drop(&cache, 0), FDMA_INVALID_ARGUMENT);
    CHECK_WORD(fdma_last_error(), words);
}

static void caches_without_their_tensors_are_not_dropped(void) {
    const fdma_cache right = new_cache(&cases[1], FDMA_FLOAT32);
    fdma_cache wrong = right;
    wrong.table = (fdma_table){0};
    check_drop_refused(wrong, "cache.table.position: is absent, want a tensor of rank 3");
    wrong = right, wrong.sequences = 9;
    check_drop_refused(wrong, "cache.table.position: axis 0 has 5 elements, want 9");
    wrong = right, wrong.window++;
    check_drop_refused(wrong, "cache.table.position: axis 2 has 7 elements, want 8");
    wrong = right, wrong.table.seen.shape[0] = 4;
    check_drop_refused(wrong, "cache.table.seen: axis 0 has 4 elements, want 5");
    wrong = right, wrong.table.position.data = NULL;
    check_drop_refused(wrong, "cache.table.position: data is NULL");
}

/* ---- bad arguments ---- */

static void check_decode_refused(const fdma_decode_args *given, const char *words) {
    fdma_decode_args args = *given;
    CHECK_INT(run_decode(&args), FDMA_INVALID_ARGUMENT);
    CHECK_WORD(fdma_last_error(), words);
}

static void contradictions_are_refused(void) {
    int32_t index[] = {0, 5}, tokens[] = {2, 3}, commit[] = {2, 1};
    const stream_case *const test = &cases[1];
    const fdma_decode_args right = {
        .size = sizeof right,
        .cache = new_cache(test, FDMA_FLOAT32),
        .q = new_tensor(FDMA_FLOAT32, 2, 2, q_heads, 64),
        .k = new_tensor(FDMA_FLOAT32, 2, 2, kv_heads, 64),
        .v = new_tensor(FDMA_FLOAT32, 2, 2, kv_heads, 64),
        .score = new_tensor(FDMA_FLOAT32, 2, kv_heads, 2, -1),
        .out = new_output(FDMA_FLOAT32, 2, 2, q_heads, 64),
    };
    fdma_decode_args args = right;
    CHECK_OK(run_decode(&args));
    args.index = fdma_tensor_1d(index, FDMA_INT32, 2);
    check_decode_refused(&args, "index: element 1 is 5, want -1 to 4");
    args = right, args.n_tokens = fdma_tensor_1d(tokens, FDMA_INT32, 2);
    check_decode_refused(&args, "n_tokens: element 1 is 3, want 0 to 2");
    tokens[0] = tokens[1] = 1;
    args.commit = fdma_tensor_1d(commit, FDMA_INT32, 2);
    check_decode_refused(&args, "commit: element 0 is 2, want 0 to 1");
    args = right, args.cache.sequences = 7;
    check_decode_refused(&args, "cache.k: axis 0 has 5 elements, want 7");
    args = right, args.score = (fdma_tensor){0};
    check_decode_refused(&args, "dt_proj: is absent, want a tensor of rank 2, or else a score");
    args = right, args.cache.window = 8;
    check_decode_refused(&args, "cache.k: axis 1 has 7 elements, want window + recent, 8");
    args = right, args.cache.kv_heads = 4;
    check_decode_refused(&args, "cache: its kv_heads is 4, want 2");
    args = right, args.cache.head_dim = 32;
    check_decode_refused(&args, "cache: its head_dim is 32, want 64");
    args = right, args.cache.dtype = FDMA_BFLOAT16;
    check_decode_refused(&args, "cache: its dtype is bfloat16, want that of cache.k, float32");
    args = right, args.q = new_tensor(FDMA_FLOAT32, 2, 3, q_heads, 64);
    args.out = new_output(FDMA_FLOAT32, 2, 3, q_heads, 64);
    check_decode_refused(&args, "q_len: is 3, want at most the new tokens, 2");
    args = right;
    args.k = new_tensor(FDMA_FLOAT32, 2, 65, kv_heads, 64);
    args.v = new_tensor(FDMA_FLOAT32, 2, 65, kv_heads, 64);
    args.score = new_tensor(FDMA_FLOAT32, 2, kv_heads, 65, -1);
    check_decode_refused(&args, "k: axis 1 has 65 elements, want at most 64 tokens");
    args = right, ((int32_t *)args.cache.table.seen.data)[1] = INT32_MAX - 1;
    check_decode_refused(&args, "cache.table.seen: element 1 is 2147483646, want 0 to 2147483645");
    ((int32_t *)args.cache.table.seen.data)[1] = INT32_MAX - 2;
    CHECK_OK(run_decode(&args));
    CHECK_INT(((int32_t *)args.cache.table.seen.data)[1], INT32_MAX);
    index[0] = index[1] = 2;
    args = right, args.index = fdma_tensor_1d(index, FDMA_INT32, 2);
    ((int32_t *)args.cache.table.seen.data)[2] = INT32_MAX - 2;
    CHECK_OK(run_decode(&args)); // an index twice: wrong keys, but no overflow
    CHECK_INT(((int32_t *)args.cache.table.seen.data)[2], INT32_MAX);
}

/* With any contents of a cache, a call writes nothing outside its tensors. */
static void corrupt_caches_do_no_harm(void) {
    static const int32_t strange[] = {INT32_MIN, -1, 0, 3, 3, 40, INT32_MAX};
    const fdma_dtype dtype = backend_dtype();
    const kernel_list kernels = kernels_for("decode", dtype);
    for (int c = 0; c < 30 * kernels.count; c++) {
        const char *const kernel = kernels.name[c / 30];
        uint64_t state = (uint64_t)c + 1;
        const stream_case *const test = &cases[c % TEST_COUNT(cases)];
        whole_call x = new_whole(test, dtype);
        const int32_t none[streams] = {0};
        test_context("case %d, %s", c, kernel);
        make_scores(&x, NULL);
        const fdma_cache cache = new_cache(test, dtype);
        for (int64_t n = 0; n < count_of(cache.table.position); n++)
            ((int32_t *)cache.table.position.data)[n] = strange[random_below(&state, 7)];
        step s = {0};
        plan_step(&x, none, &state, &s);
        for (int64_t b = 0; b < s.batch && is_device_kernel(kernel); b++) {
            // the CPU checks these, a device cannot
            s.index[b] = strange[random_below(&state, 7)];
            s.tokens[b] = strange[random_below(&state, 7)];
            s.commit[b] = strange[random_below(&state, 7)];
            ((int32_t *)cache.table.seen.data)[b] = strange[random_below(&state, 7)];
        }
        if (is_taken(&x, &cache, kernel))
            run_step(&x, &cache, &s, kernel);
        test_free_all();
    }
}

static const test_entry tests[] = {
    TEST(streams_by_every_kernel),
    TEST(caches_have_the_size_of_their_rows),
    TEST(wrong_caches_are_refused),
    TEST(sequences_are_dropped),
    TEST(contradictions_are_refused),
    TEST(corrupt_caches_do_no_harm),
    TEST(caches_without_their_tensors_are_not_dropped),
};

int main(int argc, char **argv) { return test_run_backend(argc, argv, tests, TEST_COUNT(tests)); }
