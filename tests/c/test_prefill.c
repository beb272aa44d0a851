/* test_prefill.c - requests of any lengths that enter a cache in one call: out and lse equal the
 * results of one call on each whole stream and of decode token by token, and the cache has the bits
 * that decode token by token gives. With and without pages, with requests that are skipped or have
 * no tokens; wrong lists are refused, and every workspace suffices for all lists. */
#include "paged_cache.h"

enum { requests = streams + 1, most_padding = 3 };

static const stream_case prompts[] = {
    {7, 0, 0, 64, 300, FDMA_BIAS_LINEAR, 0, 5}, {16, 4, 3, 128, 210, FDMA_BIAS_EXP, 0, 0},
    {40, 1, 0, 40, 330, FDMA_BIAS_NONE, 2, 4},  {33, 9, 2, 32, 420, FDMA_BIAS_LINEAR, 0, 0},
    {4, 20, 4, 24, 240, FDMA_BIAS_EXP, 1.5, 2}, {100, 29, 0, 64, 360, FDMA_BIAS_NONE, 0, 0},
    {290, 0, 1, 16, 280, FDMA_BIAS_EXP, 0, 0},
};

/* One call. Request n has the next tokens of stream[n]; -1: tokens of no stream, which are skipped.
 * After the last request there is padding. */
typedef struct packed_step {
    int32_t starts[requests + 1], index[requests];
    int64_t stream[requests], len;
    fdma_tensor q, k, v, score, out, lse;
} packed_step;

static int64_t len_of_request(int64_t left, uint64_t *state) {
    static const int64_t lens[] = {0, 1, 1, 2, 8, 9, 17, 64, 65, 66, 130, 1000};
    const int64_t len = lens[random_below(state, TEST_COUNT(lens))];
    return len < left ? len : left;
}

/* The streams in any order, and between them perhaps tokens that are skipped. */
static void plan_requests(const whole_call *x, const int32_t *seen, uint64_t *state,
                          packed_step *s) {
    int32_t order[requests];
    shuffle(order, requests, state);
    for (int n = 0; n < requests; n++) {
        const int64_t stream = order[n] < streams ? order[n] : -1;
        const int64_t left = stream < 0 ? 70 : len_of_stream(x, stream) - seen[stream];
        s->stream[n] = stream;
        s->index[n] = stream < 0 ? -1 : (int32_t)(4 - stream);
        s->starts[n + 1] = s->starts[n] + (int32_t)len_of_request(left, state);
    }
    s->len = s->starts[requests] + random_below(state, most_padding + 1);
}

static void make_requests(const whole_call *x, const int32_t *seen, packed_step *s) {
    const int64_t dim = x->test->head_dim;
    s->q = new_tensor(x->dtype, 1, s->len, q_heads, dim);
    s->k = new_tensor(x->dtype, 1, s->len, kv_heads, dim);
    s->v = new_tensor(x->dtype, 1, s->len, kv_heads, dim);
    s->score = new_tensor(FDMA_FLOAT32, 1, kv_heads, s->len, -1);
    s->out = new_output(x->dtype, 1, s->len, q_heads, dim);
    s->lse = new_output(FDMA_FLOAT32, 1, q_heads, s->len, -1);
    for (int n = 0; n < requests; n++)
        for (int64_t m = s->starts[n]; m < s->starts[n + 1] && s->stream[n] >= 0; m++) {
            const int64_t stream = s->stream[n], p = seen[stream] + m - s->starts[n];
            copy_token(s->q, 0, m, x->q, stream, p);
            copy_token(s->k, 0, m, x->k, stream, p);
            copy_token(s->v, 0, m, x->v, stream, p);
            copy_token(s->score, 0, m, x->score, stream, p);
        }
}

/* A tensor without the axis of the batch. */
static fdma_tensor packed(fdma_tensor tensor) {
    return fdma_dense_tensor(tensor.data, tensor.dtype, tensor.rank - 1, tensor.shape + 1);
}

static fdma_prefill_args args_of(const whole_call *x, const fdma_cache *cache, packed_step *s,
                                 const char *kernel) {
    fdma_prefill_args args = {.size = sizeof args,
                              .cache = *cache,
                              .q = packed(s->q),
                              .k = packed(s->k),
                              .v = packed(s->v),
                              .out = packed(s->out),
                              .lse = packed(s->lse),
                              .starts = s->starts,
                              .index = s->index,
                              .requests = requests,
                              .softcap = x->test->softcap,
                              .bias_form = x->test->bias_form,
                              .exec = {.kernel = kernel, .threads = 2}};
    if (x->test->levels > 0)
        args.score = packed(s->score);
    else
        args.dt_proj = x->dt_proj, args.a = x->a, args.dt_bias = x->dt_bias;
    return args;
}

static void count_requests(const packed_step *s, int32_t *seen) {
    for (int n = 0; n < requests; n++)
        if (s->stream[n] >= 0)
            seen[s->stream[n]] += s->starts[n + 1] - s->starts[n];
}

static bool is_done(const whole_call *x, const int32_t *seen) {
    bool done = true;
    for (int stream = 0; stream < streams; stream++)
        done &= seen[stream] == len_of_stream(x, stream);
    return done;
}

/* ---- against one call on each stream ---- */

/* Row m of a call equals row p of a stream; stream -1: it was not written. */
static void check_row(const whole_call *x, const packed_step *s, int64_t m, int64_t stream,
                      int64_t p) {
    const double tolerance = x->dtype == FDMA_FLOAT32 ? 2e-5 : 4 * step_of(x->dtype);
    for (int64_t h = 0; h < q_heads; h++) {
        const char *const lse = address(s->lse, 0, h, m), *const out = address(s->out, 0, m, h);
        for (size_t byte = 0; byte < 4 && stream < 0; byte++)
            CHECK_INT((unsigned char)lse[byte], test_guard_byte);
        for (size_t byte = 0; byte < 2 && stream < 0; byte++)
            CHECK_INT((unsigned char)out[byte], test_guard_byte);
        if (stream < 0)
            continue;
        const float want = *(const float *)(const void *)address(x->lse, stream, h, p);
        CHECK_NEAR(*(const float *)(const void *)lse, want, 2e-5 * (1 + fabsf(want)));
        for (int64_t d = 0; d < x->test->head_dim; d++)
            CHECK_NEAR(load_double(out, x->dtype, d),
                       load_double(address(x->out, stream, p, h), x->dtype, d), tolerance);
    }
}

static void check_requests(const whole_call *x, const int32_t *seen, const packed_step *s) {
    for (int n = 0; n < requests; n++)
        for (int64_t m = s->starts[n]; m < s->starts[n + 1]; m++)
            check_row(x, s, m, s->stream[n],
                      s->stream[n] < 0 ? 0 : seen[s->stream[n]] + m - s->starts[n]);
    for (int64_t m = s->starts[requests]; m < s->len; m++)
        check_row(x, s, m, -1, 0);
}

/* Each kept key is in its row with its bits. */
static void check_keys(const whole_call *x, const fdma_cache *cache) {
    const size_t bytes = (size_t)x->test->head_dim * dtype_size(x->dtype);
    for (int64_t n = 0; n < streams * kv_heads * rows_of(cache); n++) {
        const int64_t row = n / kv_heads / streams, stream = n / kv_heads % streams;
        const int64_t g = n % kv_heads, s = 4 - stream;
        const int32_t p = int_at(cache->table.position, s, g, row);
        if (p < 0)
            continue;
        CHECK_BYTES(address(cache->k, s, row, g), address(x->k, stream, p, g), bytes);
        CHECK_BYTES(address(cache->v, s, row, g), address(x->v, stream, p, g), bytes);
        CHECK_BYTES(address(cache->table.score, s, g, row), address(x->score, stream, g, p), 4);
    }
}

static void prefill_streams(const whole_call *x, const fdma_cache *cache, uint64_t *state,
                            const char *kernel) {
    int32_t seen[streams] = {0};
    while (!is_done(x, seen)) {
        packed_step s = {0};
        plan_requests(x, seen, state, &s);
        make_requests(x, seen, &s);
        fdma_prefill_args args = args_of(x, cache, &s, kernel);
        CHECK_OK(run_prefill(&args));
        check_requests(x, seen, &s);
        count_requests(&s, seen);
        check_cache(x, cache, seen);
        check_keys(x, cache);
    }
}

static void prompts_by_kernel(const char *kernel, fdma_dtype dtype) {
    for (int c = 0; c < TEST_COUNT(prompts); c++) {
        uint64_t state = (uint64_t)c + 40;
        whole_call x = new_whole(&prompts[c], dtype);
        test_context("case %d, %s, %s", c, kernel, dtype_name(dtype));
        attend_whole(&x, kernel);
        const fdma_cache cache = new_cache(&prompts[c], dtype);
        prefill_streams(&x, &cache, &state, kernel);
        test_free_all();
    }
}

/* "cuda" alone: the fastest kernels of the device. */
static void prompts_by_every_kernel(const char *kernel, fdma_dtype dtype) {
    if (is_device_kernel(kernel))
        prompts_by_kernel("cuda", dtype);
    if (is_device_kernel(kernel) || operation_takes("decode", kernel, dtype))
        prompts_by_kernel(kernel, dtype);
}

/* ---- against decode ---- */

static void check_same_keys(const fdma_cache *cache, const fdma_cache *want, const whole_call *x) {
    const size_t bytes = (size_t)want->head_dim * dtype_size(want->dtype);
    CHECK(same_tensor(cache->table.seen, want->table.seen));
    CHECK(same_tensor(cache->table.position, want->table.position));
    for (int64_t n = 0; n < sequences * kv_heads * rows_of(want); n++) {
        const int64_t g = n % kv_heads, row = n / kv_heads % rows_of(want);
        const int64_t s = n / kv_heads / rows_of(want);
        if (int_at(want->table.position, s, g, row) < 0)
            continue;
        CHECK_BYTES(address(cache->k, s, row, g), address(want->k, s, row, g), bytes);
        CHECK_BYTES(address(cache->v, s, row, g), address(want->v, s, row, g), bytes);
        CHECK_BYTES(address(cache->table.score, s, g, row), address(want->table.score, s, g, row),
                    4);
        if (x->test->bias_form != FDMA_BIAS_NONE)
            CHECK_BYTES(address(cache->bias, s, g, row), address(want->bias, s, g, row), 4);
    }
}

/* Decodes the tokens of a call one by one into another cache, and compares out and lse. */
static void decode_requests(const whole_call *x, const fdma_cache *cache, const packed_step *s,
                            fdma_tensor sink_logit, const char *kernel) {
    const double tolerance = x->dtype == FDMA_FLOAT32 ? 2e-5 : 4 * step_of(x->dtype);
    const fdma_tensor out = new_output(x->dtype, 1, 1, q_heads, x->test->head_dim);
    const fdma_tensor lse = new_output(FDMA_FLOAT32, 1, q_heads, 1, -1);
    for (int n = 0; n < requests; n++)
        for (int64_t m = s->starts[n]; m < s->starts[n + 1] && s->index[n] >= 0; m++) {
            fdma_decode_args args = {.size = sizeof args,
                                     .cache = *cache,
                                     .index = fdma_tensor_1d((void *)&s->index[n], FDMA_INT32, 1),
                                     .q = positions_of(s->q, 1, m, m + 1),
                                     .k = positions_of(s->k, 1, m, m + 1),
                                     .v = positions_of(s->v, 1, m, m + 1),
                                     .out = out,
                                     .lse = lse,
                                     .sink_logit = sink_logit,
                                     .softcap = x->test->softcap,
                                     .bias_form = x->test->bias_form,
                                     .exec = {.kernel = kernel}};
            if (x->test->levels > 0)
                args.score = positions_of(s->score, 2, m, m + 1);
            else
                args.dt_proj = x->dt_proj, args.a = x->a, args.dt_bias = x->dt_bias;
            CHECK_OK(run_decode(&args));
            for (int64_t h = 0; h < q_heads; h++)
                for (int64_t d = 0; d < x->test->head_dim; d++)
                    CHECK_NEAR(load_double(address(s->out, 0, m, h), x->dtype, d),
                               load_double(address(out, 0, 0, h), x->dtype, d), tolerance);
            for (int64_t h = 0; h < q_heads; h++) {
                const float want = ((const float *)lse.data)[h];
                CHECK_NEAR(*(const float *)(const void *)address(s->lse, 0, h, m), want,
                           2e-5 * (1 + fabsf(want)));
            }
        }
}

static void prompts_are_as_decoded(fdma_dtype dtype, const char *kernel) {
    for (int c = 0; c < TEST_COUNT(prompts); c++) {
        uint64_t state = (uint64_t)c + 70;
        int32_t seen[streams] = {0};
        whole_call x = new_whole(&prompts[c], dtype);
        const fdma_tensor sinks = new_tensor(FDMA_FLOAT32, q_heads, -1, -1, -1);
        test_context("case %d, %s", c, dtype_name(dtype));
        fill_random(sinks, &state, 1);
        make_scores(&x, kernel);
        const fdma_cache cache = new_cache(&prompts[c], dtype);
        const fdma_cache decoded = new_cache(&prompts[c], dtype);
        while (!is_done(&x, seen)) {
            packed_step s = {0};
            plan_requests(&x, seen, &state, &s);
            make_requests(&x, seen, &s);
            fdma_prefill_args args = args_of(&x, &cache, &s, kernel);
            args.sink_logit = sinks;
            CHECK_OK(run_prefill(&args));
            decode_requests(&x, &decoded, &s, sinks, kernel);
            check_same_keys(&cache, &decoded, &x);
            count_requests(&s, seen);
        }
        test_free_all();
    }
}

static void caches_are_as_decoded(void) {
    for (int type = first_dtype(); type < test_dtype_count; type++)
        prompts_are_as_decoded(test_dtypes[type], test_backend.run != NULL ? "cuda" : NULL);
}

/* ---- pages ---- */

/* Some pages of sequence `broken` are missing in both; -1: none are. */
static void prefill_both(const whole_call *x, const fdma_cache *plain, const paged_cache *paged,
                         int32_t *seen, uint64_t *state, const char *kernel) {
    packed_step s = {0};
    plan_requests(x, seen, state, &s);
    make_requests(x, seen, &s);
    packed_step other = s;
    other.out = new_output(x->dtype, 1, s.len, q_heads, x->test->head_dim);
    other.lse = new_output(FDMA_FLOAT32, 1, q_heads, s.len, -1);
    for (int n = 0; n < requests; n++)
        if (s.index[n] >= 0)
            give_pages(paged, s.index[n],
                       seen_of(plain, s.index[n]) + s.starts[n + 1] - s.starts[n]);
    fdma_prefill_args args = args_of(x, plain, &s, kernel);
    fdma_prefill_args in_pages = args_of(x, &paged->cache, &other, kernel);
    CHECK_OK(run_prefill(&args));
    CHECK_OK(run_prefill(&in_pages));
    if (kernel == NULL) { // a device has another way
        CHECK(same_tensor(other.out, s.out));
        CHECK(same_tensor(other.lse, s.lse));
    }
    check_requests(x, seen, &other);
    count_requests(&s, seen);
}

static void pages_are_as_none(fdma_dtype dtype, const char *kernel) {
    for (int c = 0; c < 2 * TEST_COUNT(prompts); c++) {
        uint64_t state = (uint64_t)c + 9;
        int32_t seen[streams] = {0};
        const stream_case *const test = &prompts[c / 2];
        whole_call x = new_whole(test, dtype);
        test_context("case %d in pages, %s", c, dtype_name(dtype));
        attend_whole(&x, kernel);
        const fdma_cache plain = new_cache(test, dtype);
        const paged_cache paged = new_paged(test, dtype, c % 2 == 0 ? 4 : 32, &state);
        while (!is_done(&x, seen)) {
            prefill_both(&x, &plain, &paged, seen, &state, kernel);
            for (int64_t s = 0; s < sequences; s++)
                check_same_sequence(&plain, &paged, s);
        }
        check_poison(&paged);
        test_free_all();
    }
}

static void pages_change_nothing(void) {
    for (int type = first_dtype(); type < test_dtype_count; type++)
        pages_are_as_none(test_dtypes[type], test_backend.run != NULL ? "cuda" : NULL);
}

/* 12 tokens have filled 8 rows in pages of 2. Then the second page is missing: no query attends to
 * its keys, and keys that would enter it are lost. */
static void keys_of_missing_pages_are_hidden(void) {
    enum { before = 12, len = 70, rows = 8 };
    static const stream_case test = {rows, 0, 0, 16, before + len, FDMA_BIAS_NONE, 0, 9};
    static const int32_t first[] = {0, before}, second[] = {0, len}, sequence = 4;
    uint64_t state = 6;
    whole_call x = new_whole(&test, FDMA_FLOAT32);
    const paged_cache paged = new_paged(&test, FDMA_FLOAT32, 2, &state);
    make_scores(&x, NULL);
    give_pages(&paged, sequence, before);
    packed_step s = {.q = positions_of(positions_of(x.q, 0, 0, 1), 1, 0, before)};
    s.k = positions_of(positions_of(x.k, 0, 0, 1), 1, 0, before);
    s.v = positions_of(positions_of(x.v, 0, 0, 1), 1, 0, before);
    s.score = new_tensor(FDMA_FLOAT32, 1, kv_heads, before, -1);
    s.out = new_output(FDMA_FLOAT32, 1, before, q_heads, 16);
    s.lse = new_output(FDMA_FLOAT32, 1, q_heads, before, -1);
    for (int64_t m = 0; m < before; m++)
        copy_token(s.score, 0, m, x.score, 0, m);
    fdma_prefill_args args = args_of(&x, &paged.cache, &s, NULL);
    args.starts = first, args.index = &sequence, args.requests = 1;
    CHECK_OK(run_prefill(&args));
    *entry_of(&paged, sequence, 1) = -1;
    s.q = positions_of(positions_of(x.q, 0, 0, 1), 1, before, before + len);
    s.k = positions_of(positions_of(x.k, 0, 0, 1), 1, before, before + len);
    s.v = positions_of(positions_of(x.v, 0, 0, 1), 1, before, before + len);
    s.score = new_tensor(FDMA_FLOAT32, 1, kv_heads, len, -1);
    s.out = new_output(FDMA_FLOAT32, 1, len, q_heads, 16);
    s.lse = new_output(FDMA_FLOAT32, 1, q_heads, len, -1);
    for (int64_t m = 0; m < len; m++)
        copy_token(s.score, 0, m, x.score, 0, before + m);
    args = args_of(&x, &paged.cache, &s, NULL);
    args.starts = second, args.index = &sequence, args.requests = 1;
    CHECK_OK(run_prefill(&args));
    for (int64_t n = 0; n < q_heads * len; n++) // the pool's other rows are NaN
        CHECK(isfinite(((const float *)s.lse.data)[n]));
    for (int64_t n = 0; n < kv_heads * 2; n++)
        CHECK(int_at(paged.cache.table.position, sequence, n / 2, 2 + n % 2) < before);
    check_poison(&paged);
    test_free_all();
}

/* ---- lists, workspaces and threads ---- */

static void check_refused(const fdma_prefill_args *given, fdma_status status, const char *words) {
    fdma_prefill_args args = *given;
    const fdma_cache *const cache = &args.cache;
    const fdma_tensor written[] = {args.out,           args.lse,          cache->bias,
                                   cache->table.score, cache->table.seen, cache->table.position};
    fdma_tensor before[TEST_COUNT(written)];
    for (int n = 0; n < TEST_COUNT(written); n++)
        before[n] = copy_tensor(written[n]);
    CHECK_INT(fdma_prefill(&args), status);
    CHECK_WORD(fdma_last_error(), words);
    for (int n = 0; n < TEST_COUNT(written); n++)
        CHECK(same_tensor(written[n], before[n]));
}

static void wrong_lists_are_refused(void) {
    static const int32_t right_index[] = {4, 0, 2, 3}, twice[] = {4, -1, 2, 4};
    static const int32_t beyond[] = {4, 0, 5, 3}, below[] = {4, -2, 2, 3};
    static const struct {
        int32_t starts[requests + 1];
        const int32_t *index;
        const char *words;
    } wrong[] = {
        {{1, 70, 75, 80, 90}, right_index, "starts: element 0 is 1, want 0 to 0"},
        {{0, 70, 69, 80, 90}, right_index, "starts: element 2 is 69, want 70 to 90"},
        {{0, 70, 75, 80, 91}, right_index, "starts: element 4 is 91, want 80 to 90"},
        {{0, -1, 75, 80, 90}, right_index, "starts: element 1 is -1, want 0 to 90"},
        {{0, 70, 75, 80, 90}, beyond, "index: element 2 is 5, want -1 to 4"},
        {{0, 70, 75, 80, 90}, below, "index: element 1 is -2, want -1 to 4"},
        {{0, 70, 75, 80, 90}, twice, "index: element 3 is 4, want a number that it has only once"},
    };
    whole_call x = new_whole(&prompts[0], FDMA_FLOAT32);
    const fdma_cache cache = new_cache(&prompts[0], FDMA_FLOAT32);
    int32_t *const seen = cache.table.seen.data;
    packed_step s = {.starts = {0, 70, 75, 80, 90}, .len = 90};
    static const int32_t none[streams] = {0};
    for (int n = 0; n < requests; n++)
        s.stream[n] = -1;
    make_requests(&x, none, &s);
    fdma_prefill_args args = args_of(&x, &cache, &s, NULL);
    args.index = right_index;
    size_t bytes = 0;
    CHECK_OK(fdma_prefill_workspace(&args, &bytes));
    exec_alloc(&args.exec, bytes);
    for (int n = 0; n < TEST_COUNT(wrong); n++) {
        fdma_prefill_args other = args;
        other.starts = wrong[n].starts, other.index = wrong[n].index;
        check_refused(&other, FDMA_INVALID_ARGUMENT, wrong[n].words);
    }
    seen[4] = INT32_MAX - 69;
    check_refused(&args, FDMA_INVALID_ARGUMENT,
                  "cache.table.seen: element 4 is 2147483578, want 0 to 2147483577");
    seen[4] = 0;
    fdma_prefill_args other = args;
    other.starts = NULL;
    check_refused(&other, FDMA_INVALID_ARGUMENT, "starts: is NULL, want 5 numbers");
    other = args;
    other.q = fdma_tensor_3d(args.q.data, FDMA_FLOAT32, 89, q_heads, x.test->head_dim);
    other.out = fdma_tensor_3d(args.out.data, FDMA_FLOAT32, 89, q_heads, x.test->head_dim);
    other.lse = (fdma_tensor){0};
    check_refused(&other, FDMA_INVALID_ARGUMENT, "q_len: is 89, want the tokens of k, 90");
    other = args;
    other.exec.workspace_size = 700;
    check_refused(&other, FDMA_WORKSPACE_TOO_SMALL, "exec.workspace_size: is 700 bytes, want");
    CHECK_OK(fdma_prefill(&args));
    test_free_all();
}

/* A workspace by a query without data and lists. */
static void lend_for_any_lists(fdma_prefill_args *args) {
    fdma_prefill_args query = *args;
    size_t bytes = 0;
    query.starts = query.index = NULL;
    query.q.data = query.k.data = query.v.data = query.out.data = query.lse.data = NULL;
    CHECK_OK(fdma_prefill_workspace(&query, &bytes));
    exec_alloc(&args->exec, bytes);
}

/* Requests without a sequence, such as an engine's padding, do not count. */
static void skipped_requests_may_outnumber_sequences(void) {
    static const int32_t index[] = {-1, 3, -1, -1, -1, 0, -1},
                         starts[] = {0, 1, 71, 71, 72, 72, 73, 90};
    static const int32_t none[streams] = {0};
    whole_call x = new_whole(&prompts[0], FDMA_FLOAT32);
    const fdma_cache cache = new_cache(&prompts[0], FDMA_FLOAT32);
    const int32_t *const seen = cache.table.seen.data;
    packed_step s = {.len = 90};
    for (int n = 0; n < requests; n++)
        s.stream[n] = -1;
    make_requests(&x, none, &s);
    fdma_prefill_args args = args_of(&x, &cache, &s, NULL);
    args.requests = TEST_COUNT(index);
    lend_for_any_lists(&args);
    args.starts = starts, args.index = index;
    CHECK_OK(fdma_prefill(&args));
    CHECK_INT(seen[3], 70);
    CHECK_INT(seen[0], 1);
    args.index = NULL;
    check_refused(&args, FDMA_INVALID_ARGUMENT,
                  "requests: is 7, want at most the sequences of the cache, 5, without index");
    test_free_all();
}

/* The workspace of a query serves all lists, and the number of threads changes no bit. The second
 * call goes on where the first one has ended. */
static void lists_need_no_other_workspace(void) {
    whole_call x = new_whole(&prompts[3], FDMA_FLOAT32);
    for (int n = 0; n < 60; n++) {
        uint64_t state = (uint64_t)n + 500;
        int32_t seen[streams] = {0};
        const fdma_cache cache = new_cache(&prompts[3], FDMA_FLOAT32);
        const fdma_cache other = new_cache(&prompts[3], FDMA_FLOAT32);
        for (int round = 0; round < 2; round++) {
            packed_step s = {0};
            test_context("lists %d, call %d", n, round);
            plan_requests(&x, seen, &state, &s);
            make_requests(&x, seen, &s);
            fdma_prefill_args args = args_of(&x, &cache, &s, NULL);
            args.exec.threads = 1 + n % 4;
            lend_for_any_lists(&args);
            CHECK_OK(fdma_prefill(&args));
            const fdma_tensor out = copy_tensor(args.out);
            args.cache = other;
            args.exec.threads = 0;
            lend_for_any_lists(&args);
            CHECK_OK(fdma_prefill(&args));
            CHECK(same_tensor(args.out, out));
            check_same_keys(&cache, &other, &x);
            count_requests(&s, seen);
        }
    }
    test_free_all();
}

/* The kernels of all steps, and none where there is nothing to do. */
static void kernels_are_named(void) {
    whole_call x = new_whole(&prompts[1], FDMA_FLOAT32);
    const fdma_cache cache = new_cache(&prompts[1], FDMA_FLOAT32);
    for (int n = 0; n < 3; n++) {
        static const int64_t lens[] = {0, 8, 9};
        packed_step s = {.len = lens[n]};
        static const int32_t none[streams] = {0};
        fdma_prefill_kernels names = {.size = sizeof names};
        make_requests(&x, none, &s);
        fdma_prefill_args args = args_of(&x, &cache, &s, NULL);
        CHECK_OK(fdma_prefill_kernel(&args, &names));
        CHECK(names.score != NULL);
        CHECK((names.decode != NULL) == (n > 0));
        CHECK((names.select != NULL) == (n > 1) && (names.forward != NULL) == (n > 1) &&
              (names.cache_store != NULL) == (n > 1));
    }
    test_free_all();
}

static const test_entry device_tests[] = {
    EACH_KERNEL("cache_store", prompts_by_every_kernel),
    TEST(caches_are_as_decoded),
    TEST(pages_change_nothing),
};

static const test_entry tests[] = {
    EACH_KERNEL("cache_store", prompts_by_every_kernel),
    TEST(caches_are_as_decoded),
    TEST(pages_change_nothing),
    TEST(keys_of_missing_pages_are_hidden),
    TEST(wrong_lists_are_refused),
    TEST(skipped_requests_may_outnumber_sequences),
    TEST(lists_need_no_other_workspace),
    TEST(kernels_are_named),
};

int main(int argc, char **argv) {
    return argc > 1 ? test_run_backend(argc, argv, device_tests, TEST_COUNT(device_tests))
                    : test_run(tests, TEST_COUNT(tests));
}
