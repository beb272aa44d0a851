/* test_cache.c - decoding with a cache equals one call on the whole sequence. Streams of different
 * ages get tokens one by one, in groups, or as drafts that are only partly committed. Their out and
 * lse equal the results of one call on all their tokens, and the cache holds the keys that its
 * selection keeps. Copies of sequences hold the contents of their sources before the call, in any
 * order and with repetitions, and are decoded like their sources. */
#include "cached_stream.h"

static void streams_by_every_kernel(const char *kernel, fdma_dtype dtype) {
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

/* ---- scores ---- */

enum { score_heads = 3, score_dim = 72 }; /* not a multiple of the channels of a product */

/* Some weights are 0 or far larger than others, and a value is inf. */
static void make_odd(fdma_tensor v, fdma_tensor dt_proj) {
    store_float(v.data, v.dtype, 2 * score_dim + 7, INFINITY);
    for (int64_t n = 0; n < count_of(dt_proj); n++) {
        const double weight = load_double(dt_proj.data, dt_proj.dtype, n);
        if (n % 11 < 2)
            store_float(dt_proj.data, dt_proj.dtype, n, n % 11 == 0 ? 0 : (float)weight * 3000);
    }
}

/* Decoding without given scores puts into the cache what fdma_score() computes. */
static void check_scores(const char *kernel, fdma_dtype dtype, fdma_dtype weights, int64_t tokens) {
    uint64_t state = (uint64_t)tokens;
    fdma_cache cache = {.sequences = 1,
                        .kv_heads = score_heads,
                        .head_dim = score_dim,
                        .window = 64,
                        .dtype = dtype};
    size_t bytes = 0;
    CHECK_OK(fdma_cache_bytes(&cache, &bytes));
    CHECK_OK(fdma_cache_init(&cache, test_alloc(bytes)));
    fdma_decode_args args = {.size = sizeof args,
                             .cache = cache,
                             .q = new_tensor(dtype, 1, 1, score_heads, score_dim),
                             .k = new_tensor(dtype, 1, tokens, score_heads, score_dim),
                             .v = new_tensor(dtype, 1, tokens, score_heads, score_dim),
                             .dt_proj =
                                 new_tensor(weights, score_heads, score_heads * score_dim, -1, -1),
                             .a = new_tensor(weights, score_heads, -1, -1, -1),
                             .dt_bias = new_tensor(weights, score_heads, -1, -1, -1),
                             .out = new_output(dtype, 1, 1, score_heads, score_dim),
                             .exec = {.kernel = kernel}};
    fdma_tensor *const random[] = {&args.q,       &args.k, &args.v,
                                   &args.dt_proj, &args.a, &args.dt_bias};
    for (int n = 0; n < TEST_COUNT(random); n++)
        fill_random(*random[n], &state, 1);
    if (tokens > 2)
        make_odd(args.v, args.dt_proj);
    if (!call_takes(operation_decode, &args))
        return;
    fdma_score_args score = {.size = sizeof score,
                             .v = args.v,
                             .dt_proj = args.dt_proj,
                             .a = args.a,
                             .dt_bias = args.dt_bias,
                             .score = new_output(FDMA_FLOAT32, 1, score_heads, tokens, -1),
                             .exec = {.kernel = is_device_kernel(kernel) ? "cuda/sm80" : kernel}};
    CHECK_OK(run_score(&score));
    CHECK_OK(run_decode(&args));
    for (int64_t n = 0; n < score_heads * cache.window; n++) {
        const int32_t position = ((const int32_t *)cache.table.position.data)[n];
        if (position >= 0)
            CHECK_BYTES((const float *)cache.table.score.data + n,
                        (const float *)score.score.data + n / cache.window * tokens + position,
                        sizeof(float));
    }
    CHECK_INT(((const int32_t *)cache.table.seen.data)[0], tokens);
}

static void scores_have_the_bits_of_score(const char *kernel, fdma_dtype dtype) {
    static const int64_t tokens[] = {1, 3, 17};
    for (int n = 0; n < 2 * TEST_COUNT(tokens); n++) {
        const fdma_dtype weights = n % 2 == 0 ? dtype : FDMA_FLOAT32;
        test_context("%lld tokens, weights in %s, %s, %s", (long long)tokens[n / 2],
                     dtype_name(weights), kernel, dtype_name(dtype));
        check_scores(kernel, dtype, weights, tokens[n / 2]);
        test_free_all();
    }
}

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

/* ---- copies ---- */

static fdma_cache_copy_args copy_args(const fdma_cache *cache, const int32_t *from,
                                      const int32_t *to, int64_t count, const char *kernel) {
    return (fdma_cache_copy_args){.size = sizeof(fdma_cache_copy_args),
                                  .cache = *cache,
                                  .from = new_list(from, count),
                                  .to = new_list(to, count),
                                  .exec = {.kernel = kernel, .threads = 3}};
}

/* The tensors of a cache. The first axis of each is the sequence. */
enum { cache_tensors = 6 };

static fdma_tensor *tensor_of(fdma_cache *cache, int n) {
    fdma_tensor *const all[cache_tensors] = {
        &cache->k,         &cache->v, &cache->bias, &cache->table.score, &cache->table.position,
        &cache->table.seen};
    return all[n];
}

static fdma_cache copy_of(const fdma_cache *cache) {
    fdma_cache copy = *cache;
    for (int n = 0; n < cache_tensors; n++)
        *tensor_of(&copy, n) = copy_tensor(*tensor_of(&copy, n));
    return copy;
}

/* A cache of random numbers, in which sequence s has a key in s quarters of its rows. */
static fdma_cache filled_cache(const stream_case *test, fdma_dtype dtype) {
    fdma_cache cache = new_cache(test, dtype);
    const int64_t rows = test->window + test->recent;
    uint64_t state = 8;
    for (int n = 0; n < 4; n++)
        fill_random(*tensor_of(&cache, n), &state, 1);
    for (int64_t n = 0; n < sequences * kv_heads * rows; n++) {
        const int64_t s = n / rows / kv_heads, row = n % rows;
        ((int32_t *)cache.table.position.data)[n] =
            4 * row < rows * s ? (int32_t)random_below(&state, 1000) : -1;
    }
    for (int32_t s = 0; s < sequences; s++)
        ((int32_t *)cache.table.seen.data)[s] = 1000 + s;
    return cache;
}

/* Each row has the key of the source. If the source row is empty, only the position says so. */
static void check_sequence(const fdma_cache *now, int64_t s, const fdma_cache *before,
                           int64_t source) {
    const size_t bytes = (size_t)now->head_dim * dtype_size(now->dtype);
    const int32_t *const seen = now->table.seen.data, *const had = before->table.seen.data;
    CHECK_INT(seen[s], source < 0 ? 0 : had[source]);
    for (int64_t n = 0; n < kv_heads * (now->window + now->recent); n++) {
        const int64_t g = n % kv_heads, row = n / kv_heads;
        const int32_t want = source < 0 ? -1 : int_at(before->table.position, source, g, row);
        CHECK_INT(int_at(now->table.position, s, g, row), want);
        if (want < 0)
            continue;
        CHECK_BYTES(address(now->k, s, row, g), address(before->k, source, row, g), bytes);
        CHECK_BYTES(address(now->v, s, row, g), address(before->v, source, row, g), bytes);
        CHECK_BYTES(address(now->bias, s, g, row), address(before->bias, source, g, row), 4);
        CHECK_BYTES(address(now->table.score, s, g, row),
                    address(before->table.score, source, g, row), 4);
    }
}

static void check_untouched(fdma_cache now, fdma_cache before, int64_t s) {
    for (int n = 0; n < cache_tensors; n++) {
        const fdma_tensor tensor = *tensor_of(&now, n), was = *tensor_of(&before, n);
        const size_t bytes = bytes_of(tensor) / sequences;
        CHECK_BYTES((char *)tensor.data + (size_t)s * bytes, (char *)was.data + (size_t)s * bytes,
                    bytes);
    }
}

/* Random lists: `to` has some sequences in any order; `from` has any sequences, or -1. */
static int64_t draw_lists(uint64_t *state, int32_t *from, int32_t *to) {
    const int64_t count = random_below(state, sequences + 1);
    for (int32_t s = 0; s < sequences; s++)
        to[s] = s;
    for (int64_t n = sequences - 1; n > 0; n--) {
        const int64_t other = random_below(state, n + 1);
        const int32_t swapped = to[n];
        to[n] = to[other];
        to[other] = swapped;
    }
    for (int64_t n = 0; n < count; n++)
        from[n] = (int32_t)random_below(state, sequences + 1) - 1;
    return count;
}

static void copies_by_every_kernel(const char *kernel, fdma_dtype dtype) {
    for (int c = 0; c < 10 * TEST_COUNT(cases); c++) {
        int32_t from[sequences], to[sequences];
        uint64_t state = (uint64_t)c + 11;
        const fdma_cache cache = filled_cache(&cases[c % TEST_COUNT(cases)], dtype);
        const fdma_cache before = copy_of(&cache);
        const int64_t count = draw_lists(&state, from, to);
        test_context("case %d, %s, %s", c, kernel, dtype_name(dtype));
        fdma_cache_copy_args args = copy_args(&cache, from, to, count, kernel);
        CHECK_OK(run_cache_copy(&args));
        for (int64_t n = 0; n < count; n++)
            check_sequence(&cache, to[n], &before, from[n]);
        for (int64_t n = count; n < sequences; n++)
            check_untouched(cache, before, to[n]);
        test_free_all();
    }
}

/* One sequence becomes three, and is then emptied; the three go on like the original. */
static void copies_are_decoded_as_their_source(void) {
    static const int32_t from[] = {4, 4, -1, 4}, to[] = {0, 1, 4, 3}, beams[] = {0, 1, 3};
    const kernel_list kernels = kernels_of("cache_copy");
    for (int c = 0; c < kernels.count * TEST_COUNT(cases); c++) {
        const stream_case *const test = &cases[c % TEST_COUNT(cases)];
        const char *const kernel = kernels.name[c / TEST_COUNT(cases)];
        const int32_t len = (int32_t)test->len, first = c % 2 == 0 ? len / 2 : 2;
        whole_call x = new_whole(test, backend_dtype());
        test_context("case %d, %s", c, kernel);
        attend_whole(&x, kernel);
        const fdma_cache cache = new_cache(test, backend_dtype());
        for (int32_t seen = 0; seen < first; seen++)
            decode_token(&x, &cache, seen, &to[2], 1, kernel);
        fdma_cache_copy_args args = copy_args(&cache, from, to, 4, kernel);
        CHECK_OK(run_cache_copy(&args));
        for (int32_t seen = first; seen < len; seen++)
            decode_token(&x, &cache, seen, beams, 3, kernel);
        for (int32_t seen = 0; seen < 3; seen++)
            decode_token(&x, &cache, seen, &to[2], 1, kernel); // from the beginning again
        test_free_all();
    }
}

static void workspace_does_not_grow_with_the_cache(void) {
    static const int32_t from[] = {1, 2, 3, 4}, to[] = {0, 1, 2, 3};
    const kernel_list kernels = kernels_of("cache_copy");
    for (int kernel = 0; kernel < kernels.count; kernel++) {
        size_t least = 0;
        for (int c = 0; c < TEST_COUNT(cases); c++) {
            const fdma_cache cache = new_cache(&cases[c], backend_dtype());
            fdma_cache_copy_args args = copy_args(&cache, from, to, 4, kernels.name[kernel]);
            size_t bytes = 0;
            args.exec.threads = 1;
            set_call_device(operation_cache_copy, &args, is_device_kernel(kernels.name[kernel]));
            CHECK_OK(fdma_cache_copy_workspace(&args, &bytes));
            least = c == 0 ? bytes : least;
            CHECK_INT(bytes, least);
        }
        test_free_all();
    }
}

/* ---- bad arguments ---- */

static void check_copy_refused(const fdma_cache *cache, const int32_t *from, const int32_t *to,
                               int64_t count, const char *words) {
    const fdma_cache before = copy_of(cache);
    fdma_cache_copy_args args = copy_args(cache, from, to, count, NULL);
    CHECK_INT(run_cache_copy(&args), FDMA_INVALID_ARGUMENT);
    CHECK_WORD(fdma_last_error(), words);
    for (int64_t s = 0; s < sequences; s++)
        check_untouched(*cache, before, s);
}

static void wrong_lists_are_refused(void) {
    static const int32_t from[] = {0, 1, -1, 3, 4, 2}, to[] = {4, 3, 2, 1, 0, 0};
    static const int32_t beyond[] = {0, 5}, below[] = {0, -2}, none[] = {1, -1},
                         twice[] = {3, 1, 3};
    const fdma_cache cache = filled_cache(&cases[1], FDMA_FLOAT32);
    check_copy_refused(&cache, beyond, to, 2, "from: element 1 is 5, want -1 to 4");
    check_copy_refused(&cache, below, to, 2, "from: element 1 is -2, want -1 to 4");
    check_copy_refused(&cache, from, beyond, 2, "to: element 1 is 5, want 0 to 4");
    check_copy_refused(&cache, from, none, 2, "to: element 1 is -1, want 0 to 4");
    check_copy_refused(&cache, from, twice, 3, "to: element 2 is 3, want a number");
    check_copy_refused(&cache, from, to, 6,
                       "to: axis 0 has 6 elements, want at most the sequences of the cache, 5");
    fdma_cache_copy_args args = copy_args(&cache, from, to, 5, NULL);
    CHECK_OK(run_cache_copy(&args));
    args.to.shape[0] = 4;
    CHECK_INT(run_cache_copy(&args), FDMA_INVALID_ARGUMENT);
    CHECK_WORD(fdma_last_error(), "to: axis 0 has 4 elements, want 5");
}

static void copies_in_wrong_caches_are_refused(void) {
    static const int32_t list[] = {0};
    const fdma_cache right = filled_cache(&cases[1], FDMA_FLOAT32);
    static const struct {
        const char *words;
        int64_t kv_heads, head_dim, rows;
        fdma_dtype dtype;
    } wrong[] = {
        {"cache: its kv_heads is 4, want 2", 4, 64, 7, FDMA_FLOAT32},
        {"cache: its head_dim is 72, want 64", 2, 72, 7, FDMA_FLOAT32},
        {"cache.k: axis 1 has 7 elements, want window + recent, 9", 2, 64, 9, FDMA_FLOAT32},
        {"cache: its dtype is bfloat16, want that of cache.k, float32", 2, 64, 7, FDMA_BFLOAT16},
        {"cache: its window is 0", 2, 64, 0, FDMA_FLOAT32},
    };
    for (int n = 0; n < TEST_COUNT(wrong); n++) {
        fdma_cache cache = right;
        cache.kv_heads = wrong[n].kv_heads;
        cache.head_dim = wrong[n].head_dim;
        cache.window = wrong[n].rows;
        cache.dtype = wrong[n].dtype;
        check_copy_refused(&cache, list, list, 1, wrong[n].words);
    }
}

/* More sequences than the check for repetitions has bits. */
static void large_caches_are_checked(void) {
    enum { many = 70000 };
    fdma_cache cache = {
        .sequences = many, .kv_heads = 1, .head_dim = 8, .window = 1, .dtype = FDMA_FLOAT16};
    size_t bytes = 0;
    int32_t *const from = test_alloc(many * sizeof *from), *const to =
                                                               test_alloc(many * sizeof *to);
    CHECK_OK(fdma_cache_bytes(&cache, &bytes));
    CHECK_OK(fdma_cache_init(&cache, test_alloc(bytes)));
    for (int32_t s = 0; s < many; s++) {
        from[s] = (s + 1) % many;
        to[s] = s;
        ((int32_t *)cache.table.position.data)[s] = s;
    }
    fdma_cache_copy_args args = copy_args(&cache, from, to, many, NULL);
    CHECK_OK(run_cache_copy(&args));
    for (int32_t s = 0; s < many; s++)
        CHECK_INT(((const int32_t *)cache.table.position.data)[s], from[s]);
    ((int32_t *)args.to.data)[123] = 65536;
    CHECK_INT(run_cache_copy(&args), FDMA_INVALID_ARGUMENT);
    CHECK_WORD(fdma_last_error(), "to: element 65536 is 65536, want a number");
}

static const test_entry tests[] = {
    EACH_KERNEL("decode", streams_by_every_kernel),
    EACH_KERNEL("decode", scores_have_the_bits_of_score),
    TEST(caches_have_the_size_of_their_rows),
    TEST(wrong_caches_are_refused),
    TEST(sequences_are_dropped),
    TEST(contradictions_are_refused),
    TEST(corrupt_caches_do_no_harm),
    TEST(caches_without_their_tensors_are_not_dropped),
    EACH_KERNEL("cache_copy", copies_by_every_kernel),
    TEST(copies_are_decoded_as_their_source),
    TEST(workspace_does_not_grow_with_the_cache),
    TEST(wrong_lists_are_refused),
    TEST(copies_in_wrong_caches_are_refused),
    TEST(large_caches_are_checked),
};

int main(int argc, char **argv) { return test_run_backend(argc, argv, tests, TEST_COUNT(tests)); }
