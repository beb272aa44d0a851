/* test_cache.c - decoding with a cache is the whole sequence: streams of different ages, whose
 * tokens come one by one, in groups, or as drafts of which only some are committed, get the out and
 * the lse of one call on all of their tokens, and the cache holds the keys that its selection
 * keeps. */
#include "backend.h"
#include "errors.h"
#include "gradient.h"

enum { streams = 3, sequences = 5, kv_heads = 2, q_heads = 6, most_tokens = 5 };

typedef struct cache_case {
    int64_t window, recent, sinks, head_dim;
    int64_t len; /* of the longest stream */
    fdma_bias_form bias_form;
    double softcap;
    int levels; /* distinct scores; 0: computed from v */
} cache_case;

static const cache_case cases[] = {
    {1, 0, 0, 8, 30, FDMA_BIAS_EXP, 0, 3},       {7, 0, 0, 64, 60, FDMA_BIAS_LINEAR, 0, 5},
    {16, 4, 3, 128, 90, FDMA_BIAS_EXP, 0, 0},    {12, 1, 0, 40, 70, FDMA_BIAS_NONE, 2, 4},
    {33, 9, 2, 32, 150, FDMA_BIAS_LINEAR, 0, 0}, {4, 20, 4, 24, 80, FDMA_BIAS_EXP, 1.5, 2},
    {3, 0, 3, 16, 50, FDMA_BIAS_LINEAR, 0, 6},   {100, 28, 0, 64, 60, FDMA_BIAS_EXP, 0, 0},
};

/* The streams as sequences of a batch, all of the longest length, and one call on them. */
typedef struct whole_call {
    const cache_case *test;
    fdma_dtype dtype;
    fdma_tensor q, k, v, dt_proj, a, dt_bias, score, bias, out, lse;
    fdma_selection selection;
} whole_call;

static whole_call new_whole(const cache_case *test, fdma_dtype dtype) {
    const int64_t len = test->len, dim = test->head_dim;
    uint64_t state = (uint64_t)len;
    whole_call x = {.test = test, .dtype = dtype};
    x.q = new_tensor(dtype, streams, len, q_heads, dim);
    x.k = new_tensor(dtype, streams, len, kv_heads, dim);
    x.v = new_tensor(dtype, streams, len, kv_heads, dim);
    x.dt_proj = new_tensor(dtype, kv_heads, kv_heads * dim, -1, -1);
    x.a = new_tensor(FDMA_FLOAT32, kv_heads, -1, -1, -1);
    x.dt_bias = new_tensor(dtype, kv_heads, -1, -1, -1);
    fdma_tensor *const random[] = {&x.q, &x.k, &x.v, &x.dt_proj, &x.a, &x.dt_bias};
    for (int n = 0; n < TEST_COUNT(random); n++)
        fill_random(*random[n], &state, 1);
    x.score = new_output(FDMA_FLOAT32, streams, kv_heads, len, -1);
    if (test->bias_form != FDMA_BIAS_NONE)
        x.bias = new_output(FDMA_FLOAT32, streams, kv_heads, len, -1);
    x.out = new_output(dtype, streams, len, q_heads, dim);
    x.lse = new_output(FDMA_FLOAT32, streams, q_heads, len, -1);
    x.selection.size = sizeof x.selection;
    x.selection.expiry = new_output(FDMA_INT32, streams, kv_heads, len, -1);
    x.selection.slot = new_output(FDMA_INT32, streams, kv_heads, len, -1);
    return x;
}

static void make_scores(whole_call *x, const char *kernel) {
    if (kernel != NULL && is_device_kernel(kernel))
        kernel = "cuda/sm80"; // the score's, whatever decodes
    fdma_score_args args = {.size = sizeof args,
                            .v = x->v,
                            .dt_proj = x->dt_proj,
                            .a = x->a,
                            .dt_bias = x->dt_bias,
                            .score = x->score,
                            .exec = {.kernel = kernel}};
    uint64_t state = 3;
    CHECK_OK(run_score(&args));
    for (int64_t n = 0; n < count_of(x->score) && x->test->levels > 0; n++)
        ((float *)x->score.data)[n] = (float)random_below(&state, x->test->levels);
    for (int64_t n = 0; n < count_of(x->bias); n++) {
        const float score = ((const float *)x->score.data)[n];
        ((float *)x->bias.data)[n] = x->test->bias_form == FDMA_BIAS_EXP ? expf(score) : score;
    }
}

static void attend_whole(whole_call *x, const char *kernel) {
    // The scores must have the same bits in both; `kernel` may attend in other dtypes only.
    make_scores(x, kernel);
    fdma_select_args select = {.size = sizeof select,
                               .score = x->score,
                               .selection = &x->selection,
                               .window = x->test->window,
                               .recent = x->test->recent,
                               .sinks = x->test->sinks,
                               .exec = {.kernel = "reference"}};
    CHECK_OK(run_select(&select));
    fdma_forward_args forward = {.size = sizeof forward,
                                 .q = x->q,
                                 .k = x->k,
                                 .v = x->v,
                                 .bias = x->bias,
                                 .out = x->out,
                                 .lse = x->lse,
                                 .selection = &x->selection,
                                 .softcap = x->test->softcap,
                                 .causal = 1};
    CHECK_OK(run_forward(&forward));
}

/* A cache full of NaN, in which every sequence is empty. */
static fdma_cache new_cache(const cache_case *test, fdma_dtype dtype) {
    fdma_cache cache = {.sequences = sequences,
                        .kv_heads = kv_heads,
                        .head_dim = test->head_dim,
                        .window = test->window,
                        .recent = test->recent,
                        .sinks = test->sinks,
                        .dtype = dtype};
    size_t bytes = 0;
    CHECK_OK(fdma_cache_bytes(&cache, &bytes));
    void *const memory = test_alloc_guarded(bytes);
    memset(memory, 0xff, bytes); // NaN in every dtype
    CHECK_OK(fdma_cache_init(&cache, memory));
    return cache;
}

/* ---- steps ---- */

/* The streams of a call, in the order of `index`, with the tokens that follow their committed
 * ones. */
typedef struct step {
    int64_t batch, new_len, q_len;
    int32_t stream[streams], index[streams], tokens[streams], commit[streams];
    fdma_tensor q, k, v, score, out, lse;
} step;

/* Copies token `from` of a stream to token `to` of entry b, by axis 1; of scores by axis 2. */
static void copy_token(fdma_tensor to, int64_t b, int64_t to_token, fdma_tensor all, int64_t stream,
                       int64_t from_token) {
    const size_t size = dtype_size(to.dtype);
    const size_t row = (size_t)(to.rank == 4 ? to.stride[1] : 1);
    for (int64_t g = 0; g < (to.rank == 4 ? 1 : to.shape[1]); g++) {
        const int64_t t = b * to.stride[0] +
                          (to.rank == 4 ? to_token * to.stride[1] : g * to.stride[1] + to_token);
        const int64_t f = stream * all.stride[0] + (to.rank == 4 ? from_token * all.stride[1]
                                                                 : g * all.stride[1] + from_token);
        memcpy((char *)to.data + (size_t)t * size, (const char *)all.data + (size_t)f * size,
               row * size);
    }
}

static void plan_step(const whole_call *x, const int32_t *seen, uint64_t *state, step *s) {
    const int64_t dim = x->test->head_dim;
    s->batch = 1 + random_below(state, streams);
    s->new_len = 1 + random_below(state, most_tokens);
    s->q_len = 1 + random_below(state, s->new_len);
    const int32_t first = (int32_t)random_below(state, streams);
    for (int64_t b = 0; b < s->batch; b++) {
        const int32_t stream = (first + (int32_t)b) % streams;
        const int64_t left = x->test->len / (stream + 1) - seen[stream];
        const int64_t most = left < s->new_len ? left : s->new_len;
        s->stream[b] = stream;
        s->index[b] = random_below(state, 9) > 0 ? 4 - stream : -1;
        s->tokens[b] = (int32_t)(random_below(state, 2) ? most : random_below(state, most + 1));
        s->commit[b] = (int32_t)random_below(state, s->tokens[b] + 1);
    }
    s->q = new_tensor(x->dtype, s->batch, s->q_len, q_heads, dim);
    s->k = new_tensor(x->dtype, s->batch, s->new_len, kv_heads, dim);
    s->v = new_tensor(x->dtype, s->batch, s->new_len, kv_heads, dim);
    s->score = new_tensor(FDMA_FLOAT32, s->batch, kv_heads, s->new_len, -1);
    s->out = new_output(x->dtype, s->batch, s->q_len, q_heads, dim);
    s->lse = new_output(FDMA_FLOAT32, s->batch, q_heads, s->q_len, -1);
    for (int64_t n = 0; n < s->batch * s->new_len; n++) {
        const int64_t b = n / s->new_len, m = n % s->new_len, i = m - (s->new_len - s->q_len);
        const int64_t p = seen[s->stream[b]] + m;
        if (m >= s->tokens[b])
            continue;
        copy_token(s->k, b, m, x->k, s->stream[b], p);
        copy_token(s->v, b, m, x->v, s->stream[b], p);
        copy_token(s->score, b, m, x->score, s->stream[b], p);
        if (i >= 0)
            copy_token(s->q, b, i, x->q, s->stream[b], p);
    }
}

static fdma_decode_args step_args(const whole_call *x, const fdma_cache *cache, step *s,
                                  const char *kernel) {
    fdma_decode_args args = {.size = sizeof args,
                             .cache = *cache,
                             .index = fdma_tensor_1d(s->index, FDMA_INT32, s->batch),
                             .q = s->q,
                             .k = s->k,
                             .v = s->v,
                             .n_tokens = fdma_tensor_1d(s->tokens, FDMA_INT32, s->batch),
                             .commit = fdma_tensor_1d(s->commit, FDMA_INT32, s->batch),
                             .out = s->out,
                             .lse = s->lse,
                             .softcap = x->test->softcap,
                             .bias_form = x->test->bias_form,
                             .exec = {.kernel = kernel, .threads = 2}};
    if (x->test->levels > 0)
        args.score = s->score;
    else
        args.dt_proj = x->dt_proj, args.a = x->a, args.dt_bias = x->dt_bias;
    return args;
}

static void run_step(const whole_call *x, const fdma_cache *cache, step *s, const char *kernel) {
    fdma_decode_args args = step_args(x, cache, s, kernel);
    CHECK_OK(run_decode(&args));
}

/* Row i of an entry is that of its token in the whole call; beside no token it is empty. */
static void check_step(const whole_call *x, const int32_t *seen, const step *s) {
    const int64_t dim = x->test->head_dim;
    const double tolerance = x->dtype == FDMA_FLOAT32 ? 2e-5 : 4 * step_of(x->dtype);
    for (int64_t n = 0; n < s->batch * s->q_len * q_heads; n++) {
        const int64_t b = n / q_heads / s->q_len, i = n / q_heads % s->q_len, h = n % q_heads;
        const int64_t m = i + s->new_len - s->q_len, p = seen[s->stream[b]] + m;
        const bool empty = s->index[b] < 0 || m >= s->tokens[b];
        const float lse = ((const float *)s->lse.data)[(b * q_heads + h) * s->q_len + i];
        const int64_t row = (s->stream[b] * q_heads + h) * x->test->len + p;
        if (empty)
            CHECK(lse == -INFINITY);
        else
            CHECK_NEAR(lse, ((const float *)x->lse.data)[row], 2e-5 * (1 + fabsf(lse)));
        for (int64_t d = 0; d < dim; d++) {
            const int64_t at = ((b * s->q_len + i) * q_heads + h) * dim + d;
            const int64_t from = ((s->stream[b] * x->test->len + p) * q_heads + h) * dim + d;
            const double want = empty ? 0 : load_double(x->out.data, x->dtype, from);
            CHECK_NEAR(load_double(s->out.data, x->dtype, at), want, tolerance);
        }
    }
}

static int32_t int_at(fdma_tensor tensor, int64_t b, int64_t g, int64_t j) {
    return ((const int32_t *)tensor.data)[b * tensor.stride[0] + g * tensor.stride[1] + j];
}

/* The rows of a sequence hold the keys that are kept after `seen` tokens, each in its slot. */
static void check_cache(const whole_call *x, const fdma_cache *cache, const int32_t *seen) {
    const int64_t rows = x->test->window + x->test->recent;
    for (int64_t n = 0; n < streams * kv_heads; n++) {
        const int64_t stream = n / kv_heads, g = n % kv_heads, sequence = 4 - stream;
        int64_t kept = 0, filled = 0;
        CHECK_INT(((const int32_t *)cache->table.seen.data)[sequence], seen[stream]);
        for (int64_t p = 0; p < seen[stream]; p++) {
            if (int_at(x->selection.expiry, stream, g, p) < seen[stream])
                continue;
            const int32_t row = int_at(x->selection.slot, stream, g, p);
            CHECK_INT(int_at(cache->table.position, sequence, g, row), p);
            kept++;
        }
        for (int64_t row = 0; row < rows; row++)
            filled += int_at(cache->table.position, sequence, g, row) >= 0;
        CHECK_INT(filled, kept);
    }
}

static bool is_taken(const whole_call *x, const fdma_cache *cache, const char *kernel) {
    const int32_t none[streams] = {0};
    uint64_t state = 1;
    step s = {0};
    plan_step(x, none, &state, &s);
    fdma_decode_args args = step_args(x, cache, &s, kernel);
    return call_takes(operation_decode, &args);
}

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
        for (int n = 0; n < 4 * cases[c].len && seen[0] < cases[c].len; n++) {
            step s = {0};
            plan_step(&x, seen, &state, &s);
            run_step(&x, &cache, &s, kernel);
            check_step(&x, seen, &s);
            for (int64_t b = 0; b < s.batch; b++)
                seen[s.stream[b]] += s.index[b] >= 0 ? s.commit[b] : 0;
            check_cache(&x, &cache, seen);
        }
        CHECK(seen[0] > 2 * cases[c].len / 3);
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

/* A dropped sequence begins again; the others are as they were. */
static void sequences_are_dropped(void) {
    const cache_case *const test = &cases[1];
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
    check_drop_refused(wrong, "cache.table.position: rank is 0, want 3");
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
    const cache_case *const test = &cases[1];
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
    check_decode_refused(&args, "dt_proj: rank is 0, want 2, or else a score");
    args = right, args.cache.window = 8;
    check_decode_refused(&args, "cache.k: axis 1 has 7 elements, want window + recent, 8");
    args = right, args.cache.kv_heads = 4;
    check_decode_refused(&args, "cache: its kv_heads is 4, want 2");
    args = right, args.cache.head_dim = 32;
    check_decode_refused(&args, "cache: its head_dim is 32, want 64");
    args = right, args.cache.dtype = FDMA_BFLOAT16;
    check_decode_refused(&args, "cache: its dtype is bfloat16, want that of q, float32");
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
    CHECK_OK(run_decode(&args)); // one index twice: wrong keys, but no overflow
    CHECK_INT(((int32_t *)args.cache.table.seen.data)[2], INT32_MAX);
}

/* Whatever the tensors of a cache hold, nothing outside is touched. */
static void corrupt_caches_do_no_harm(void) {
    static const int32_t strange[] = {INT32_MIN, -1, 0, 3, 3, 40, INT32_MAX};
    const fdma_dtype dtype = test_dtypes[first_dtype()];
    const kernel_list kernels = kernels_for("decode", dtype);
    for (int c = 0; c < 30 * kernels.count; c++) {
        const char *const kernel = kernels.name[c / 30];
        uint64_t state = (uint64_t)c + 1;
        const cache_case *const test = &cases[c % TEST_COUNT(cases)];
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
