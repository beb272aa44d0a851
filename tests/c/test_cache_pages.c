/* test_cache_pages.c - a cache with pages gives the bits of one without. Streams are decoded,
 * stored, copied and dropped in pages of any length and order, with just enough pages for the rows
 * that are filled. Pages of no sequence are neither read nor written; missing pages hide their keys
 * and lose new ones; wrong shapes are refused. */
#include "paged_cache.h"

/* ---- calls on both ---- */

/* The kernel of cache_copy and cache_store that belongs to a decode kernel. */
static const char *cache_kernel(const char *kernel) {
    return kernel != NULL && is_device_kernel(kernel) ? "cuda/sm80" : kernel;
}

/* Replaces some page numbers of a sequence by numbers of no page. */
static void lose_pages(const paged_cache *paged, int64_t s, uint64_t *state) {
    const int32_t nowhere[] = {INT32_MIN, -1, (int32_t)paged->pages, INT32_MAX};
    for (int64_t column = 0; column < paged->columns; column++)
        if (random_below(state, 2) == 0)
            *entry_of(paged, s, column) = nowhere[random_below(state, TEST_COUNT(nowhere))];
}

/* All entries of both calls have the same bits, except for sequence `except`. */
static void check_same_steps(const step *found, const step *want, int64_t except) {
    const fdma_tensor found_of[] = {found->out, found->lse}, want_of[] = {want->out, want->lse};
    for (int64_t n = 0; n < 2 * want->batch; n++) {
        const fdma_tensor one = found_of[n % 2], other = want_of[n % 2];
        const size_t bytes = (size_t)one.stride[0] * dtype_size(one.dtype);
        if (want->index[n / 2] < 0 || want->index[n / 2] != except)
            CHECK_BYTES(address(one, n / 2, 0, 0), address(other, n / 2, 0, 0), bytes);
    }
}

/* Some pages of sequence `broken` are missing; -1: none are. */
static void decode_both(const whole_call *x, const fdma_cache *plain, const paged_cache *paged,
                        int64_t broken, uint64_t *state, const char *kernel) {
    int32_t from[streams];
    step s = {0};
    for (int64_t stream = 0; stream < streams; stream++)
        from[stream] = (int32_t)random_below(state, len_of_stream(x, stream) - most_tokens);
    plan_step(x, from, state, &s); // any tokens will do
    step other = s;
    other.out = new_output(x->dtype, s.batch, s.q_len, q_heads, x->test->head_dim);
    other.lse = new_output(FDMA_FLOAT32, s.batch, q_heads, s.q_len, -1);
    for (int64_t b = 0; b < s.batch; b++)
        if (s.index[b] >= 0)
            give_pages(paged, s.index[b], seen_of(plain, s.index[b]) + s.commit[b]);
    if (broken >= 0)
        lose_pages(paged, broken, state);
    run_step(x, plain, &s, kernel);
    run_step(x, &paged->cache, &other, kernel);
    check_same_steps(&other, &s, broken);
}

static void copy_sequences(const fdma_cache *cache, const int32_t *from, const int32_t *to,
                           int64_t count, const char *kernel) {
    fdma_cache_copy_args args = {.size = sizeof args,
                                 .cache = *cache,
                                 .from = new_list(from, count),
                                 .to = new_list(to, count),
                                 .exec = {.kernel = cache_kernel(kernel), .threads = 2}};
    CHECK_OK(run_cache_copy(&args));
}

static void copy_both(const fdma_cache *plain, const paged_cache *paged, uint64_t *state,
                      const char *kernel) {
    int32_t from[sequences] = {0}, to[sequences];
    const int64_t count = random_below(state, sequences + 1);
    shuffle(to, sequences, state);
    for (int64_t n = 0; n < count; n++) {
        from[n] = (int32_t)random_below(state, sequences + 1) - 1;
        const int32_t after = from[n] < 0 ? 0 : seen_of(plain, from[n]);
        const int32_t before = seen_of(plain, to[n]);
        give_pages(paged, to[n], after > before ? after : before); // others may read `to`
    }
    copy_sequences(plain, from, to, count, kernel);
    copy_sequences(&paged->cache, from, to, count, kernel);
    for (int64_t n = 0; n < count; n++)
        give_pages(paged, to[n], seen_of(plain, to[n]));
}

/* Stores a prompt, or a further piece of one, in a sequence of both caches. */
static void store_both(const whole_call *x, const fdma_cache *plain, const paged_cache *paged,
                       uint64_t *state, const char *kernel) {
    int32_t s = (int32_t)random_below(state, sequences);
    const bool goes_on = random_below(state, 2) == 0;
    const int64_t new_len = random_below(state, x->test->len + 1);
    const int64_t kv_len = new_len + (goes_on ? rows_of(plain) : 0);
    fdma_selection selection = {.size = sizeof selection,
                                .expiry = new_output(FDMA_INT32, 1, kv_heads, kv_len, -1),
                                .slot = new_output(FDMA_INT32, 1, kv_heads, kv_len, -1)};
    const fdma_tensor score = positions_of(positions_of(x->score, 0, 1, 2), 2, 0, new_len);
    fdma_select_args select = {.size = sizeof select,
                               .score = score,
                               .selection = &selection,
                               .window = x->test->window,
                               .recent = x->test->recent,
                               .sinks = x->test->sinks};
    if (goes_on)
        select.table_in = (fdma_table){.score = positions_of(plain->table.score, 0, s, s + 1),
                                       .position = positions_of(plain->table.position, 0, s, s + 1),
                                       .seen = positions_of(plain->table.seen, 0, s, s + 1)};
    CHECK_OK(run_select(&select));
    fdma_cache_store_args args = {.size = sizeof args,
                                  .cache = *plain,
                                  .index = fdma_tensor_1d(&s, FDMA_INT32, 1),
                                  .k = positions_of(positions_of(x->k, 0, 1, 2), 1, 0, new_len),
                                  .v = positions_of(positions_of(x->v, 0, 1, 2), 1, 0, new_len),
                                  .score = score,
                                  .selection = &selection,
                                  .bias_form = x->test->bias_form,
                                  .exec = {.kernel = cache_kernel(kernel), .threads = 2}};
    give_pages(paged, s, new_len + (goes_on ? seen_of(plain, s) : 0));
    CHECK_OK(run_cache_store(&args));
    args.cache = paged->cache;
    CHECK_OK(run_cache_store(&args));
}

static void drop_both(const fdma_cache *plain, const paged_cache *paged, uint64_t *state) {
    const int64_t s = random_below(state, sequences);
    CHECK_OK(fdma_cache_drop(plain, s));
    CHECK_OK(fdma_cache_drop(&paged->cache, s));
    give_pages(paged, s, 0);
}

static void pages_are_as_none(const stream_case *test, int64_t page_len, const char *kernel,
                              fdma_dtype dtype) {
    uint64_t state = (uint64_t)(test->len + page_len);
    whole_call x = new_whole(test, dtype);
    const fdma_cache plain = new_cache(test, dtype);
    const paged_cache paged = new_paged(test, dtype, page_len, &state);
    make_scores(&x, kernel);
    const int calls = !is_taken(&x, &paged.cache, kernel) ? 0 : is_device_kernel(kernel) ? 16 : 40;
    for (int n = 0; n < calls; n++) {
        const int64_t kind = random_below(&state, 12);
        if (kind < 8)
            decode_both(&x, &plain, &paged, -1, &state, kernel);
        else if (kind < 10)
            copy_both(&plain, &paged, &state, kernel);
        else if (kind < 11)
            store_both(&x, &plain, &paged, &state, kernel);
        else
            drop_both(&plain, &paged, &state);
        for (int64_t s = 0; s < sequences; s++)
            check_same_sequence(&plain, &paged, s);
    }
    check_poison(&paged);
    test_free_all();
}

static void pages_by_every_kernel(const char *kernel, fdma_dtype dtype) {
    static const int64_t lengths[] = {1, 16, 2, 64, 8, 256};
    for (int n = 0; n < TEST_COUNT(lengths) * TEST_COUNT(cases); n++) {
        const int c = n / TEST_COUNT(lengths), length = n % TEST_COUNT(lengths);
        if (is_device_kernel(kernel) && length / 2 != c % 3)
            continue; // where calls are slow, two lengths of each case
        test_context("case %d, pages of %d, %s, %s", c, (int)lengths[length], kernel,
                     dtype_name(dtype));
        pages_are_as_none(&cases[c], lengths[length], kernel, dtype);
    }
}

/* ---- shared pages ---- */

static void decode_tokens(const whole_call *x, const fdma_cache *cache, int32_t sequence,
                          int32_t first, int32_t end, const char *kernel) {
    for (int32_t seen = first; seen < end; seen++)
        decode_token(x, cache, seen, &sequence, 1, kernel);
}

/* Two continuations of a prefix use its full pages together, and each has a copy of the last
 * one. */
static void prefixes_are_shared(void) {
    enum { page_len = 4, prefix = 11, end = 20, full = prefix / page_len };
    static const int32_t from[] = {1}, to[] = {3};
    const kernel_list kernels = kernels_of("cache_copy");
    const stream_case *const test = &cases[2]; // 20 rows
    for (int n = 0; n < kernels.count; n++) {
        uint64_t state = 6;
        whole_call x = new_whole(test, backend_dtype());
        attend_whole(&x, kernels.name[n]);
        const paged_cache paged = new_paged(test, backend_dtype(), page_len, &state);
        give_pages(&paged, 1, end);
        give_pages(&paged, 3, end);
        for (int64_t column = 0; column < full; column++)
            *entry_of(&paged, 3, column) = *entry_of(&paged, 1, column);
        test_context("%s", kernels.name[n]);
        decode_tokens(&x, &paged.cache, 1, 0, prefix, kernels.name[n]);
        const fdma_tensor before = copy_tensor(paged.cache.k);
        copy_sequences(&paged.cache, from, to, 1, kernels.name[n]);
        decode_tokens(&x, &paged.cache, 3, prefix, end, kernels.name[n]);
        decode_tokens(&x, &paged.cache, 1, prefix, end, kernels.name[n]);
        for (int64_t column = 0; column < full; column++) {
            const int64_t page = *entry_of(&paged, 1, column);
            CHECK_BYTES(address(paged.cache.k, page, 0, 0), address(before, page, 0, 0),
                        (size_t)before.stride[0] * dtype_size(before.dtype));
            CHECK(holds_poison(paged.cache.k, paged.number[3 * paged.columns + column], 0));
        }
        test_free_all();
    }
}

/* ---- missing pages ---- */

/* The other sequences of a call get the bits that they get without pages. */
static void missing_pages_are_the_sequences_own(const char *kernel, fdma_dtype dtype) {
    enum { broken = 3 };
    for (int c = 1; c < TEST_COUNT(cases); c++) {
        uint64_t state = (uint64_t)c + 40;
        whole_call x = new_whole(&cases[c], dtype);
        const fdma_cache plain = new_cache(&cases[c], dtype);
        const paged_cache paged = new_paged(&cases[c], dtype, INT64_C(1) << c % 5, &state);
        test_context("case %d, %s, %s", c, kernel, dtype_name(dtype));
        make_scores(&x, kernel);
        for (int n = 0; n < 12 && is_taken(&x, &paged.cache, kernel); n++) {
            decode_both(&x, &plain, &paged, broken, &state, kernel);
            for (int64_t s = 0; s < sequences; s++)
                if (s != broken)
                    check_same_sequence(&plain, &paged, s);
            CHECK_INT(seen_of(&paged.cache, broken), seen_of(&plain, broken));
        }
        check_poison(&paged);
        test_free_all();
    }
}

/* Stores the first `tokens` tokens of stream 0 in sequence 2 of both caches. */
static void fill_both(const whole_call *x, const fdma_cache *plain, const paged_cache *paged,
                      int32_t tokens) {
    give_pages(paged, 2, tokens);
    decode_tokens(x, plain, 2, 0, tokens, NULL);
    decode_tokens(x, &paged->cache, 2, 0, tokens, NULL);
}

static step next_token(const whole_call *x, int32_t seen) {
    const int32_t passed[streams] = {seen};
    step s = {.batch = 1, .new_len = 1, .q_len = 1};
    s.index[0] = 2;
    s.tokens[0] = s.commit[0] = 1;
    make_step(x, passed, &s);
    return s;
}

/* A key whose page is missing has no weight, as with a bias of -inf. A token that evicts such a key
 * is lost. The selection equals the one with all pages. */
static void missing_pages_hide_their_keys(void) {
    enum { page_len = 2, missing = 3, tokens = 40 };
    static const int32_t nowhere[] = {-1, INT32_MIN, INT32_MAX, 0};
    const fdma_dtype dtype = backend_dtype();
    const double tolerance = dtype == FDMA_FLOAT32 ? 2e-5 : 4 * step_of(dtype);
    const kernel_list kernels = kernels_for("decode", dtype);
    for (int n = 0; n < kernels.count * TEST_COUNT(nowhere); n++) {
        const char *const kernel = kernels.name[n / TEST_COUNT(nowhere)];
        uint64_t state = 9;
        whole_call x = new_whole(&cases[4], dtype); // 42 rows
        attend_whole(&x, NULL);
        const fdma_cache plain = new_cache(&cases[4], dtype);
        const paged_cache paged = new_paged(&cases[4], dtype, page_len, &state);
        const int32_t number = nowhere[n % TEST_COUNT(nowhere)];
        test_context("%s, page %d", kernel, number);
        if (!is_taken(&x, &paged.cache, kernel)) {
            test_free_all();
            continue;
        }
        fill_both(&x, &plain, &paged, tokens);
        give_pages(&paged, 2, 42);
        *entry_of(&paged, 2, missing) = number == 0 ? (int32_t)paged.pages : number;
        for (int64_t g = 0; g < kv_heads; g++)
            for (int64_t row = page_len * missing; row < page_len * (missing + 1); row++)
                *((float *)plain.bias.data + (2 * kv_heads + g) * 42 + row) = -INFINITY;
        for (int32_t seen = tokens; seen < 42; seen++) { // no key is evicted yet
            step want = next_token(&x, seen), found = next_token(&x, seen);
            run_step(&x, &plain, &want, NULL);
            run_step(&x, &paged.cache, &found, kernel);
            for (int64_t i = 0; i < count_of(want.out); i++)
                CHECK_NEAR(load_double(found.out.data, dtype, i),
                           load_double(want.out.data, dtype, i), tolerance);
            for (int64_t h = 0; h < q_heads; h++)
                CHECK_NEAR(((float *)found.lse.data)[h], ((float *)want.lse.data)[h], 1e-4);
        }
        step all = next_token(&x, 42);
        for (int64_t g = 0; g < kv_heads; g++) // the worst key is in the missing page
            *((float *)paged.cache.table.score.data + (2 * kv_heads + g) * 42 + 7) = -99;
        run_step(&x, &paged.cache, &all, kernel);
        for (int64_t g = 0; g < kv_heads; g++)
            CHECK_INT(int_at(paged.cache.table.position, 2, g, 7), -1);
        CHECK_INT(seen_of(&paged.cache, 2), 43);
        check_poison(&paged);
        test_free_all();
    }
}

/* A sink whose page is missing is lost. Then the first keys that remain are the sinks, and a
 * competing token evicts none of them. */
static void lost_sinks_have_successors(void) {
    enum { calls = 3, tokens = 4 };
    static const struct {
        stream_case rules;
        int32_t positions[calls][4];
    } lost[] = {
        {{4, 0, 1, 64, 12, FDMA_BIAS_LINEAR, 0, 1}, {{-1, 1, 2, 3}, {-1, 1, 5, 6}, {-1, 1, 9, 10}}},
        {{4, 0, 2, 64, 12, FDMA_BIAS_LINEAR, 0, 1}, {{-1, 1, 2, 3}, {-1, 1, 2, 7}, {-1, 1, 2, 11}}},
        {{2, 2, 1, 64, 12, FDMA_BIAS_LINEAR, 0, 1}, {{-1, 1, 2, 3}, {-1, 1, 5, 6}, {-1, 1, 9, 10}}},
    };
    const kernel_list kernels = kernels_for("decode", backend_dtype());
    for (int c = 0; c < TEST_COUNT(lost) * kernels.count; c++) {
        const char *const kernel = kernels.name[c / TEST_COUNT(lost)];
        const int rule = c % TEST_COUNT(lost);
        uint64_t state = 2;
        const whole_call x = new_whole(&lost[rule].rules, backend_dtype());
        const paged_cache paged = new_paged(&lost[rule].rules, backend_dtype(), 1, &state);
        if (!is_taken(&x, &paged.cache, kernel))
            continue;
        for (int64_t n = 0; n < count_of(x.score); n++)
            ((float *)x.score.data)[n] = (float)(n % lost[rule].rules.len); // rise
        give_pages(&paged, 2, tokens);
        *entry_of(&paged, 2, 0) = -1;
        for (int n = 0; n < calls; n++) {
            test_context("%s, rules %d, call %d", kernel, rule, n);
            const int32_t passed[streams] = {tokens * n};
            step next = {.batch = 1, .new_len = tokens, .q_len = 1, .index = {2}};
            next.tokens[0] = next.commit[0] = tokens;
            make_step(&x, passed, &next);
            run_step(&x, &paged.cache, &next, kernel);
            for (int64_t row = 0; row < kv_heads * 4; row++)
                CHECK_INT(int_at(paged.cache.table.position, 2, row / 4, row % 4),
                          lost[rule].positions[n][row % 4]);
        }
        test_free_all();
    }
}

/* A copy lacks the rows whose page is missing in either sequence. A sequence copied to itself keeps
 * its positions. */
static void rows_without_pages_are_not_copied(void) {
    static const int32_t from[] = {2, 2, 2}, to[] = {0, 1, 2};
    const kernel_list kernels = kernels_of("cache_copy");
    for (int n = 0; n < kernels.count; n++) {
        uint64_t state = 3;
        whole_call x = new_whole(&cases[4], backend_dtype());
        attend_whole(&x, NULL);
        const fdma_cache plain = new_cache(&cases[4], backend_dtype());
        const paged_cache paged = new_paged(&cases[4], backend_dtype(), 16, &state);
        test_context("%s", kernels.name[n]);
        fill_both(&x, &plain, &paged, 42);
        give_pages(&paged, 0, 42);
        give_pages(&paged, 1, 42);
        *entry_of(&paged, 2, 0) = *entry_of(&paged, 1, 1) = (int32_t)paged.pages;
        copy_sequences(&paged.cache, from, to, 3, kernels.name[n]);
        for (int64_t at = 0; at < 3 * kv_heads * 42; at++) {
            const int64_t s = at / 42 / kv_heads, g = at / 42 % kv_heads, row = at % 42;
            const bool lost = (s < 2 && row < 16) || (s == 1 && row < 32);
            CHECK_INT(int_at(paged.cache.table.position, s, g, row),
                      lost ? -1 : int_at(plain.table.position, 2, g, row));
        }
        CHECK_BYTES(address(paged.cache.k, *entry_of(&paged, 0, 1), 3, 1),
                    address(plain.k, 2, 19, 1), 32 * dtype_size(plain.dtype));
        CHECK(holds_poison(paged.cache.k, *entry_of(&paged, 0, 0), 3));
        test_free_all();
    }
}

/* With any contents of a page table, a call writes nothing outside of the pools. */
static void corrupt_page_tables_do_no_harm(void) {
    static const int32_t from[] = {4, 3, -1}, to[] = {0, 1, 2};
    const fdma_dtype dtype = FDMA_BFLOAT16;
    const kernel_list kernels = kernels_for("decode", dtype);
    const int repeats = test_repeats(test_backend.run != NULL ? 8 : 40);
    for (int c = 0; c < repeats * kernels.count; c++) {
        const char *const kernel = kernels.name[c / repeats];
        const stream_case *const test = &cases[c % TEST_COUNT(cases)];
        uint64_t state = (uint64_t)c + 5;
        whole_call x = new_whole(test, dtype);
        const fdma_cache plain = new_cache(test, dtype);
        const paged_cache paged =
            new_paged(test, dtype, INT64_C(1) << random_below(&state, 5), &state);
        const int32_t strange[] = {
            INT32_MIN, -1, 0, 1, (int32_t)paged.pages - 1, (int32_t)paged.pages, INT32_MAX};
        test_context("case %d, %s", c, kernel);
        make_scores(&x, NULL);
        for (int64_t n = 0; n < paged.pages; n++)
            paged.number[n] = strange[random_below(&state, TEST_COUNT(strange))];
        for (int n = 0; n < 12 && is_taken(&x, &paged.cache, kernel); n++) {
            step s = {0};
            const int32_t none[streams] = {0};
            plan_step(&x, none, &state, &s);
            for (int64_t sequence = 0; sequence < sequences; sequence++)
                give_pages(&paged, sequence, rows_of(&plain));
            run_step(&x, &paged.cache, &s, kernel);
            copy_sequences(&paged.cache, from, to, 3, kernel);
            store_both(&x, &plain, &paged, &state, kernel);
        }
        test_free_all();
    }
}

/* ---- bad arguments ---- */

static void check_pages_refused(const fdma_cache *cache, fdma_status status, const char *words) {
    static const int32_t list[] = {0};
    fdma_cache_copy_args args = {.size = sizeof args,
                                 .cache = *cache,
                                 .from = new_list(list, 1),
                                 .to = new_list(list, 1),
                                 .exec = {.device = cache->device}};
    size_t bytes = 0;
    CHECK_INT(fdma_cache_copy_workspace(&args, &bytes), status);
    CHECK_WORD(fdma_last_error(), words);
}

static void wrong_pages_are_refused(void) {
    uint64_t state = 1;
    const paged_cache paged = new_paged(&cases[2], FDMA_FLOAT32, 8, &state); // 20 rows
    fdma_cache right = paged.cache, wrong;
    right.page_table.shape[1] = 3;
    wrong = right, wrong.page_table.shape[1] = 2;
    check_pages_refused(&wrong, FDMA_INVALID_ARGUMENT,
                        "cache.page_table: axis 1 has 2 elements, want 3 or more pages of 8 rows");
    wrong = right, wrong.page_table.shape[0] = 4;
    check_pages_refused(&wrong, FDMA_INVALID_ARGUMENT,
                        "cache.page_table: axis 0 has 4 elements, want 5");
    wrong = right, wrong.k.shape[1] = wrong.v.shape[1] = 6;
    check_pages_refused(&wrong, FDMA_INVALID_ARGUMENT,
                        "cache.k: axis 1 has 6 elements, want a power of 2 with page_table");
    wrong.k.shape[1] = wrong.v.shape[1] = 0;
    check_pages_refused(&wrong, FDMA_INVALID_ARGUMENT, "cache.k: axis 1 has 0 elements");
    wrong = right, wrong.v.shape[1] = 4;
    check_pages_refused(&wrong, FDMA_INVALID_ARGUMENT, "cache.v: axis 1 has 4 elements, want 8");
    wrong = right, wrong.v.shape[0]--;
    check_pages_refused(&wrong, FDMA_INVALID_ARGUMENT, "cache.v: axis 0 has");
    wrong = right, wrong.window++;
    check_pages_refused(&wrong, FDMA_INVALID_ARGUMENT,
                        "cache.bias: axis 2 has 20 elements, want window + recent, 21");
    wrong = right, wrong.page_table.dtype = FDMA_FLOAT32;
    check_pages_refused(&wrong, FDMA_UNSUPPORTED,
                        "cache.page_table: dtype is float32, supported: int32");
    wrong = right, wrong.page_table.stride[1] = 2;
    check_pages_refused(&wrong, FDMA_INVALID_ARGUMENT, "cache.page_table: the last stride is 2");
    check_pages_refused(&right, FDMA_OK, "");
}

/* With pages, the memory of a cache counts only its numbers, not the pools. */
static void pools_are_not_counted(void) {
    fdma_cache cache = {.sequences = 4, .kv_heads = 8, .head_dim = 128, .window = 2048};
    size_t bytes = 0;
    cache.dtype = FDMA_BFLOAT16;
    cache.page_table = fdma_tensor_2d(NULL, FDMA_INT32, 4, 32);
    CHECK_OK(fdma_cache_bytes(&cache, &bytes));
    const size_t numbers = 4 * 3 * 2048 * 8 * 4;
    CHECK(bytes >= numbers && bytes < numbers + 1024);
}

static const test_entry tests[] = {
    EACH_KERNEL("decode", pages_by_every_kernel),
    TEST(prefixes_are_shared),
    TEST(missing_pages_hide_their_keys),
    TEST(lost_sinks_have_successors),
    TEST(rows_without_pages_are_not_copied),
    EACH_KERNEL("decode", missing_pages_are_the_sequences_own),
    TEST(corrupt_page_tables_do_no_harm),
    TEST(wrong_pages_are_refused),
    TEST(pools_are_not_counted),
};

int main(int argc, char **argv) { return test_run_backend(argc, argv, tests, TEST_COUNT(tests)); }
