/* test_cache_store.c - prompts stored in a cache are decoded like the whole sequence: one prompt
 * for each entry of a batch, packed prompts, and prompts in pieces; with padding, over earlier
 * contents of the sequence, and with any number of threads. Wrong arguments are refused, and wrong
 * selections do no harm. */
#include "cached_stream.h"

/* ---- prefill ---- */

static const int32_t own_sequence[streams] = {4, 3, 2}; // as in the steps of decode

static fdma_select_args stream_select_args(const stream_case *test, fdma_tensor score,
                                           fdma_selection *selection) {
    return (fdma_select_args){.size = sizeof(fdma_select_args),
                              .score = score,
                              .selection = selection,
                              .window = test->window,
                              .recent = test->recent,
                              .sinks = test->sinks,
                              .exec = {.kernel = "reference"}};
}

static fdma_cache_store_args store_args(const whole_call *x, const fdma_cache *cache,
                                        const fdma_selection *selection, const char *kernel) {
    return (fdma_cache_store_args){.size = sizeof(fdma_cache_store_args),
                                   .cache = *cache,
                                   .selection = selection,
                                   .bias_form = x->test->bias_form,
                                   .exec = {.kernel = kernel, .threads = 2}};
}

/* The first `len` tokens of every stream, as entries of a batch. */
static fdma_cache_store_args select_batch(const whole_call *x, const fdma_cache *cache, int64_t len,
                                          fdma_selection *selection, const char *kernel) {
    const fdma_tensor score = positions_of(x->score, 2, 0, len);
    *selection = new_selection(streams, kv_heads, len);
    fdma_select_args select = stream_select_args(x->test, score, selection);
    if (x->key_valid.rank > 0)
        select.key_valid = positions_of(x->key_valid, 1, 0, len);
    CHECK_OK(run_select(&select));
    fdma_cache_store_args store = store_args(x, cache, selection, kernel);
    store.index = new_list(own_sequence, streams);
    store.k = positions_of(x->k, 1, 0, len);
    store.v = positions_of(x->v, 1, 0, len);
    store.score = score;
    return store;
}

static void store_batch(const whole_call *x, const fdma_cache *cache, int32_t *seen,
                        uint64_t *state, const char *kernel) {
    const int64_t len = random_below(state, len_of_stream(x, streams - 1) + 1);
    fdma_selection selection;
    fdma_cache_store_args store = select_batch(x, cache, len, &selection, kernel);
    CHECK_OK(run_cache_store(&store));
    for (int stream = 0; stream < streams; stream++)
        seen[stream] = (int32_t)len;
}

/* Packs prompts of different lengths. Three more positions belong to none. */
static void store_packed(const whole_call *x, const fdma_cache *cache, int32_t *seen,
                         uint64_t *state, const char *kernel) {
    int32_t starts[streams + 1] = {0};
    for (int stream = 0; stream < streams; stream++) {
        seen[stream] = (int32_t)random_below(state, len_of_stream(x, stream) + 1);
        starts[stream + 1] = starts[stream] + seen[stream];
    }
    const int64_t len = starts[streams] + 3, dim = x->test->head_dim;
    const fdma_tensor score = new_tensor(FDMA_FLOAT32, 1, kv_heads, len, -1);
    fdma_selection selection = new_selection(1, kv_heads, len);
    fdma_cache_store_args store = store_args(x, cache, &selection, kernel);
    store.k = new_tensor(x->dtype, 1, len, kv_heads, dim);
    store.v = new_tensor(x->dtype, 1, len, kv_heads, dim);
    store.score = score;
    store.starts = new_list(starts, streams + 1);
    store.index = new_list(own_sequence, streams);
    for (int64_t n = 0; n < streams * len; n++) {
        const int64_t stream = n / len, token = n % len;
        if (token >= seen[stream])
            continue;
        copy_token(store.k, 0, starts[stream] + token, x->k, stream, token);
        copy_token(store.v, 0, starts[stream] + token, x->v, stream, token);
        copy_token(store.score, 0, starts[stream] + token, x->score, stream, token);
    }
    fdma_select_args select = stream_select_args(x->test, score, &selection);
    select.starts = store.starts;
    CHECK_OK(run_select(&select));
    CHECK_OK(run_cache_store(&store));
}

static fdma_tensor only(fdma_tensor tensor, int64_t n) {
    return tensor.rank > 0 ? positions_of(tensor, 0, n, n + 1) : tensor;
}

/* Tokens `first` to `end` - 1 of a stream, in a tensor with the tokens along `axis`. */
static fdma_tensor piece_of(fdma_tensor tensor, int axis, int64_t stream, int64_t first,
                            int64_t end) {
    return tensor.rank > 0 ? positions_of(only(tensor, stream), axis, first, end) : tensor;
}

static void check_piece(const whole_call *x, int64_t stream, int64_t first, fdma_tensor out) {
    const int64_t row = q_heads * x->test->head_dim, from = (stream * x->test->len + first) * row;
    const double tolerance = x->dtype == FDMA_FLOAT32 ? 2e-5 : 4 * step_of(x->dtype);
    for (int64_t n = 0; n < count_of(out); n++)
        CHECK_NEAR(load_double(out.data, x->dtype, n), load_double(x->out.data, x->dtype, from + n),
                   tolerance);
}

/* Stores one piece of a prompt, with the rows of the cache as carried keys. */
static void store_piece(const whole_call *x, const fdma_cache *cache, int64_t stream, int64_t first,
                        int64_t end, const char *kernel) {
    const int64_t rows = x->test->window + x->test->recent, s = own_sequence[stream];
    fdma_selection selection = new_selection(1, kv_heads, rows + end - first);
    fdma_select_args select =
        stream_select_args(x->test, piece_of(x->score, 2, stream, first, end), &selection);
    select.key_valid = piece_of(x->key_valid, 1, stream, first, end);
    select.table_in = (fdma_table){.score = only(cache->table.score, s),
                                   .position = only(cache->table.position, s),
                                   .seen = only(cache->table.seen, s)};
    CHECK_OK(run_select(&select));
    fdma_forward_args forward = {
        .size = sizeof forward,
        .q = piece_of(x->q, 1, stream, first, end),
        .k = piece_of(x->k, 1, stream, first, end),
        .v = piece_of(x->v, 1, stream, first, end),
        .bias = piece_of(x->bias, 2, stream, first, end),
        .k_carried = only(cache->k, s),
        .v_carried = only(cache->v, s),
        .out = new_output(x->dtype, 1, end - first, q_heads, x->test->head_dim),
        .selection = &selection,
        .softcap = x->test->softcap,
        .causal = 1};
    if (x->bias.rank > 0)
        forward.bias_carried = only(cache->bias, s);
    CHECK_OK(run_forward(&forward));
    check_piece(x, stream, first, forward.out);
    fdma_cache_store_args store = store_args(x, cache, &selection, kernel);
    store.index = new_list(&own_sequence[stream], 1);
    store.k = forward.k;
    store.v = forward.v;
    store.score = select.score;
    CHECK_OK(run_cache_store(&store));
}

static void store_pieces(const whole_call *x, const fdma_cache *cache, int32_t *seen,
                         uint64_t *state, const char *kernel) {
    for (int stream = 0; stream < streams; stream++) {
        const int64_t len = len_of_stream(x, stream) * 2 / 3;
        seen[stream] = 0;
        while (seen[stream] < len) {
            const int64_t left = len - seen[stream], first = seen[stream];
            const int64_t some = 1 + random_below(state, 20);
            seen[stream] += (int32_t)(some < left ? some : left);
            store_piece(x, cache, stream, first, seen[stream], kernel);
        }
    }
}

/* ---- contents of the cache ---- */

static float float_at(fdma_tensor tensor, int64_t b, int64_t g, int64_t j) {
    return *(const float *)(const void *)address(tensor, b, g, j);
}

/* Each kept key is in its row unchanged, with its score and its bias; empty rows are marked
 * empty. */
static void check_rows(const whole_call *x, const fdma_cache *cache, const int32_t *seen) {
    const size_t row_bytes = (size_t)x->test->head_dim * dtype_size(x->dtype);
    check_cache(x, cache, seen);
    for (int64_t n = 0; n < streams * kv_heads * (x->test->window + x->test->recent); n++) {
        const int64_t row = n / kv_heads / streams, stream = n / kv_heads % streams;
        const int64_t g = n % kv_heads, s = own_sequence[stream];
        const int32_t p = int_at(cache->table.position, s, g, row);
        if (p < 0) {
            CHECK_INT(p, -1);
            CHECK(float_at(cache->table.score, s, g, row) == -INFINITY);
            continue;
        }
        CHECK_BYTES(address(cache->k, s, row, g), address(x->k, stream, p, g), row_bytes);
        CHECK_BYTES(address(cache->v, s, row, g), address(x->v, stream, p, g), row_bytes);
        CHECK(float_at(cache->table.score, s, g, row) == float_at(x->score, stream, g, p));
        if (x->bias.rank > 0) {
            const float bias = float_at(x->bias, stream, g, p);
            CHECK_NEAR(float_at(cache->bias, s, g, row), bias, 1e-6 * fabsf(bias));
        }
    }
}

/* ---- stored prompts go on as whole sequences ---- */

typedef void prefill(const whole_call *x, const fdma_cache *cache, int32_t *seen, uint64_t *state,
                     const char *kernel);

static prefill *const prefills[] = {store_batch, store_packed, store_pieces};

static void prompts_by_every_kernel(const char *kernel, fdma_dtype dtype) {
    for (int c = 0; c < TEST_COUNT(prefills) * TEST_COUNT(cases); c++) {
        const int n = c / TEST_COUNT(prefills);
        uint64_t state = (uint64_t)c + 3;
        whole_call x = new_whole(&cases[n], dtype);
        int32_t seen[streams] = {0};
        test_context("case %d, way %d, %s, %s", n, c % TEST_COUNT(prefills), kernel,
                     dtype_name(dtype));
        attend_whole(&x, kernel);
        const fdma_cache cache = new_cache(&cases[n], dtype);
        prefills[c % TEST_COUNT(prefills)](&x, &cache, seen, &state, kernel);
        check_rows(&x, &cache, seen);
        decode_streams(&x, &cache, seen, &state, kernel);
        test_free_all();
    }
}

/* The first tokens of each stream are padding. Their positions count, but no row has them. */
static void padding_is_not_stored(void) {
    static prefill *const ways[] = {store_batch, store_pieces};
    const kernel_list kernels = kernels_of("cache_store");
    for (int c = 0; c < kernels.count * 2 * TEST_COUNT(cases); c++) {
        const int n = c / 2 % TEST_COUNT(cases);
        const char *const kernel = kernels.name[c / 2 / TEST_COUNT(cases)];
        uint64_t state = (uint64_t)c + 90;
        whole_call x = new_whole(&cases[n], backend_dtype());
        int32_t seen[streams] = {0};
        test_context("case %d, way %d, %s", n, c % 2, kernel);
        x.key_valid = new_tensor(FDMA_UINT8, streams, cases[n].len, -1, -1);
        for (int64_t at = 0; at < count_of(x.key_valid); at++)
            ((uint8_t *)x.key_valid.data)[at] = at % cases[n].len > at / cases[n].len;
        attend_whole(&x, kernel);
        const fdma_cache cache = new_cache(&cases[n], backend_dtype());
        do {
            ways[c % 2](&x, &cache, seen, &state, kernel);
        } while (seen[streams - 1] < streams); // until all padding has passed
        check_rows(&x, &cache, seen);
        decode_streams(&x, &cache, seen, &state, kernel);
        test_free_all();
    }
}

static void prompts_replace_what_was_there(void) {
    const kernel_list kernels = kernels_of("cache_store");
    for (int kernel = 0; kernel < kernels.count; kernel++) {
        whole_call x = new_whole(&cases[4], FDMA_FLOAT32);
        fdma_selection selection;
        test_context("%s", kernels.name[kernel]);
        attend_whole(&x, NULL);
        const fdma_cache cache = new_cache(&cases[4], FDMA_FLOAT32);
        static const int32_t lens[] = {50, 7, 30, 0, 1};
        for (int n = 0; n < TEST_COUNT(lens); n++) {
            const int32_t seen[streams] = {lens[n], lens[n], lens[n]};
            fdma_cache_store_args store =
                select_batch(&x, &cache, lens[n], &selection, kernels.name[kernel]);
            CHECK_OK(run_cache_store(&store));
            check_rows(&x, &cache, seen);
        }
        test_free_all();
    }
}

static size_t memory_of(const fdma_cache *cache) {
    return (size_t)((char *)cache->table.seen.data - (char *)cache->k.data) +
           bytes_of(cache->table.seen);
}

/* Entries of index -1 change nothing; threads change no bit. */
static void threads_and_skipped_entries(void) {
    static const int32_t index[streams] = {1, -1, 3};
    const kernel_list kernels = kernels_of("cache_store");
    for (int kernel = 0; kernel < kernels.count; kernel++) {
        whole_call x = new_whole(&cases[7], FDMA_FLOAT32);
        fdma_selection selection;
        fdma_cache caches[2];
        make_scores(&x, NULL);
        test_context("%s", kernels.name[kernel]);
        for (int n = 0; n < 2; n++) {
            caches[n] = new_cache(&cases[7], FDMA_FLOAT32);
            fdma_cache_store_args store =
                select_batch(&x, &caches[n], 40, &selection, kernels.name[kernel]);
            store.index = new_list(index, streams);
            store.exec.threads = 1 + 2 * n;
            CHECK_OK(run_cache_store(&store));
        }
        CHECK_BYTES(caches[0].k.data, caches[1].k.data, memory_of(&caches[0]));
        for (int64_t s = 0; s < sequences; s++) {
            const bool stored = s == 1 || s == 3;
            CHECK_INT(((const int32_t *)caches[0].table.seen.data)[s], stored ? 40 : 0);
            CHECK_INT(int_at(caches[0].table.position, s, 1, 0), stored ? 0 : -1);
            CHECK(isnan(*(const float *)address(caches[0].v, s, 0, 1)) == !stored);
        }
        test_free_all();
    }
}

/* ---- bad arguments ---- */

static void check_store_refused(const fdma_cache_store_args *given, fdma_status status,
                                const char *words) {
    fdma_cache_store_args args = *given;
    const size_t bytes = memory_of(&args.cache);
    void *const before = test_alloc(bytes);
    memcpy(before, args.cache.k.data, bytes);
    CHECK_INT(run_cache_store(&args), status);
    CHECK_WORD(fdma_last_error(), words);
    CHECK_BYTES(args.cache.k.data, before, bytes);
}

static void check_selection_refused(const fdma_cache_store_args *given, fdma_selection wrong,
                                    const char *words) {
    fdma_cache_store_args args = *given;
    args.selection = &wrong;
    check_store_refused(&args, FDMA_INVALID_ARGUMENT, words);
}

static void wrong_selections_are_refused(void) {
    whole_call x = new_whole(&cases[2], FDMA_FLOAT32);
    const fdma_cache cache = new_cache(&cases[2], FDMA_FLOAT32);
    fdma_selection right, wrong;
    make_scores(&x, NULL);
    fdma_cache_store_args store = select_batch(&x, &cache, 20, &right, NULL);
    wrong = right, wrong.window = 15;
    check_selection_refused(&store, wrong,
                            "selection: its window is 15, want that of the cache, 16");
    wrong = right, wrong.recent = 5;
    check_selection_refused(&store, wrong, "selection: its recent is 5, want that of the cache, 4");
    wrong = right, wrong.sinks = 0;
    check_selection_refused(&store, wrong, "selection: its sinks is 0, want that of the cache, 3");
    wrong = right, wrong.scope = FDMA_SCOPE_GLOBAL;
    check_selection_refused(&store, wrong, "selection: its scope is global, want causal");
    wrong = right, wrong.slot = (fdma_tensor){0};
    check_selection_refused(&store, wrong, "slot: is absent, want a tensor of rank 3");
    wrong = right, wrong.kv_len = 40;
    check_selection_refused(&store, wrong, "selection: was made for kv_len 40, want 20");
    wrong = right, wrong.expiry.shape[2] = wrong.slot.shape[2] = wrong.kv_len = 19;
    check_selection_refused(&store, wrong, "expiry: axis 2 has 19 elements, want 20");
    wrong = right, wrong.expiry.shape[2] = wrong.slot.shape[2] = wrong.kv_len = 21;
    check_selection_refused(&store, wrong, "expiry: axis 2 has 21 elements, want 40");
    wrong = right, wrong.slot = copy_tensor(right.slot);
    ((int32_t *)wrong.slot.data)[count_of(wrong.slot) - 1] = 20;
    check_selection_refused(&store, wrong,
                            "selection: has slot 20, want slots below window + recent, 20, as it");
    store.selection = NULL;
    check_store_refused(&store, FDMA_INVALID_ARGUMENT, "selection: is NULL");
    wrong = right, store.selection = &wrong;
    CHECK_OK(run_cache_store(&store));
}

static void contradictions_are_refused(void) {
    static const int32_t wrong_index[streams] = {0, 5, 1}, starts[] = {0, 5, 20};
    whole_call x = new_whole(&cases[2], FDMA_FLOAT32);
    const fdma_cache cache = new_cache(&cases[2], FDMA_FLOAT32);
    fdma_selection selection;
    make_scores(&x, NULL);
    const fdma_cache_store_args right = select_batch(&x, &cache, 20, &selection, NULL);
    fdma_cache_store_args args = right;
    args.index = new_list(wrong_index, streams);
    check_store_refused(&args, FDMA_INVALID_ARGUMENT, "index: element 1 is 5, want -1 to 4");
    args = right, args.index = new_list(wrong_index, 2);
    check_store_refused(&args, FDMA_INVALID_ARGUMENT, "index: axis 0 has 2 elements, want 3");
    args = right, args.cache.dtype = FDMA_FLOAT16;
    check_store_refused(&args, FDMA_INVALID_ARGUMENT, "cache: its dtype is float16");
    args = right, args.cache.kv_heads = 4;
    check_store_refused(&args, FDMA_INVALID_ARGUMENT, "cache: its kv_heads is 4, want 2");
    args = right, args.cache.head_dim = 64;
    check_store_refused(&args, FDMA_INVALID_ARGUMENT, "cache: its head_dim is 64, want 128");
    args = right, args.cache.sequences = 4;
    check_store_refused(&args, FDMA_INVALID_ARGUMENT, "cache.k: axis 0 has 5 elements, want 4");
    args = right, args.cache.k.shape[1] = 19;
    check_store_refused(&args, FDMA_INVALID_ARGUMENT, "cache.k: axis 1 has 19 elements, want 20");
    args = right, args.cache.table.score.dtype = FDMA_FLOAT64;
    check_store_refused(&args, FDMA_INVALID_ARGUMENT, "cache.bias: dtype is float32");
    args = right, args.index = (fdma_tensor){0}, args.starts = new_list(starts, 3);
    check_store_refused(&args, FDMA_INVALID_ARGUMENT, "batch: is 3, want 1 with starts");
    args = right, args.exec.device = FDMA_CUDA(0);
    check_store_refused(&args, FDMA_INVALID_ARGUMENT, "cache: its device is the CPU");
}

/* The cache has two sequences, and its prompts have no index. */
static void too_many_prompts_are_refused(void) {
    static const int32_t starts[] = {0, 5, 8, 20}, few[] = {0, 5, 20}, wrong[] = {0, 9, 8};
    const stream_case *const test = &cases[2];
    whole_call x = new_whole(test, FDMA_FLOAT32);
    fdma_cache cache = {.sequences = 2,
                        .kv_heads = kv_heads,
                        .head_dim = test->head_dim,
                        .window = test->window,
                        .recent = test->recent,
                        .sinks = test->sinks,
                        .dtype = FDMA_FLOAT32};
    size_t bytes;
    CHECK_OK(fdma_cache_bytes(&cache, &bytes));
    CHECK_OK(fdma_cache_init(&cache, test_alloc(bytes)));
    fdma_selection selection, one;
    make_scores(&x, NULL);
    fdma_cache_store_args args = select_batch(&x, &cache, 20, &selection, NULL);
    args.index = (fdma_tensor){0};
    check_store_refused(&args, FDMA_INVALID_ARGUMENT,
                        "batch: is 3, want at most the sequences of the cache, 2, without index");
    one = selection;
    one.expiry = only(one.expiry, 0), one.slot = only(one.slot, 0);
    args.selection = &one, args.k = only(args.k, 0), args.v = only(args.v, 0);
    args.score = only(args.score, 0), args.starts = new_list(starts, 4);
    check_store_refused(&args, FDMA_INVALID_ARGUMENT,
                        "starts: axis 0 has 4 elements, want at most 3 without index");
    args.starts = new_list(wrong, 3);
    check_store_refused(&args, FDMA_INVALID_ARGUMENT, "starts: element 2 is 8, want 9 to 20");
    args.starts = new_list(starts, 4), args.starts.shape[0] = 0;
    check_store_refused(&args, FDMA_INVALID_ARGUMENT, "starts: axis 0 has 0 elements");
    args.starts = new_list(few, 3);
    CHECK_OK(run_cache_store(&args));
    one = new_selection(1, kv_heads, 40); // counts the rows of the cache
    one.window = test->window, one.recent = test->recent, one.sinks = test->sinks;
    one.scope = FDMA_SCOPE_CAUSAL, one.kv_len = 40;
    check_store_refused(&args, FDMA_INVALID_ARGUMENT,
                        "starts: is given, want none with carried keys in the selection");
}

/* The tokens of a stream are counted in an int32, even if two entries have one index. */
static void long_streams_are_refused(void) {
    static const int32_t twice[streams] = {3, 3, -1};
    const stream_case *const test = &cases[2];
    whole_call x = new_whole(test, FDMA_FLOAT32);
    const fdma_cache cache = new_cache(test, FDMA_FLOAT32);
    fdma_selection fresh;
    make_scores(&x, NULL);
    fdma_cache_store_args args = select_batch(&x, &cache, 20, &fresh, NULL);
    fdma_selection carried = new_selection(streams, kv_heads, 40);
    carried.window = test->window, carried.recent = test->recent, carried.sinks = test->sinks;
    carried.scope = FDMA_SCOPE_CAUSAL, carried.kv_len = 40;
    args.selection = &carried, args.index = new_list(twice, streams);
    int32_t *const seen = cache.table.seen.data;
    seen[3] = INT32_MAX - 19;
    check_store_refused(&args, FDMA_INVALID_ARGUMENT,
                        "cache.table.seen: element 3 is 2147483628, want 0 to 2147483627");
    seen[3] = INT32_MAX - 20;
    CHECK_OK(run_cache_store(&args));
    CHECK_INT(seen[3], INT32_MAX);
    args.selection = &fresh, seen[3] = INT32_MAX; // a new prompt does not continue from there
    CHECK_OK(run_cache_store(&args));
    CHECK_INT(seen[3], 20);
}

/* With any contents of the selection and the table, a call writes nothing outside of the named
 * sequences: the cache lies between guard bytes, and the other sequences do not change. */
static void corrupt_selections_do_no_harm(void) {
    static const int32_t strange[] = {INT32_MIN, -1, 0, 3, 3, 20, 40, 41, INT32_MAX};
    static const int32_t index[streams] = {4, -1, 0};
    const kernel_list kernels = kernels_of("cache_store");
    for (int c = 0; c < 40 * kernels.count; c++) {
        uint64_t state = (uint64_t)c + 1;
        whole_call x = new_whole(&cases[2], FDMA_FLOAT32);
        fdma_selection selection;
        test_context("case %d, %s", c, kernels.name[c / 40]);
        make_scores(&x, NULL);
        const fdma_cache cache = new_cache(&cases[2], FDMA_FLOAT32);
        fdma_cache_store_args args = select_batch(&x, &cache, 20, &selection, kernels.name[c / 40]);
        args.index = new_list(index, streams);
        if (c % 2 == 0) {
            const fdma_selection fresh = selection;
            selection = new_selection(streams, kv_heads, 40);
            selection.window = fresh.window, selection.recent = fresh.recent;
            selection.sinks = fresh.sinks, selection.scope = fresh.scope, selection.kv_len = 40;
        }
        for (int64_t n = 0; n < count_of(selection.slot); n++) {
            const int32_t slot = strange[random_below(&state, 9)];
            const int32_t rows = (int32_t)(selection.window + selection.recent);
            const bool is_refused = test_backend.run == NULL && slot >= rows;
            ((int32_t *)selection.slot.data)[n] = is_refused ? rows - 1 : slot;
            ((int32_t *)selection.expiry.data)[n] = strange[random_below(&state, 9)];
        }
        for (int64_t n = 0; n < count_of(cache.table.position); n++)
            ((int32_t *)cache.table.position.data)[n] = strange[random_below(&state, 9)];
        const fdma_tensor k = copy_tensor(positions_of(cache.k, 0, 1, 4));
        CHECK_OK(run_cache_store(&args));
        CHECK(same_tensor(positions_of(cache.k, 0, 1, 4), k));
        test_free_all();
    }
}

static const test_entry tests[] = {
    EACH_KERNEL("cache_store", prompts_by_every_kernel),
    TEST(padding_is_not_stored),
    TEST(prompts_replace_what_was_there),
    TEST(threads_and_skipped_entries),
    TEST(wrong_selections_are_refused),
    TEST(contradictions_are_refused),
    TEST(too_many_prompts_are_refused),
    TEST(long_streams_are_refused),
    TEST(corrupt_selections_do_no_harm),
};

int main(int argc, char **argv) { return test_run_backend(argc, argv, tests, TEST_COUNT(tests)); }
