/* test_cache_state.c - sequences saved as bytes: they go on in another cache as they would have in
 * their own, and bytes that are not what was saved are refused and change nothing. */
#include "paged_cache.h"

typedef struct saved_state {
    unsigned char *data;
    size_t bytes;
} saved_state;

static saved_state save(const fdma_cache *cache, int64_t sequence) {
    saved_state state = {NULL, 0};
    CHECK_OK(fdma_cache_state_bytes(cache, sequence, &state.bytes));
    state.data = test_alloc_guarded(state.bytes);
    CHECK_OK(fdma_cache_save(cache, sequence, state.data, state.bytes));
    return state;
}

static fdma_cache cache_of(const stream_case *test, fdma_dtype dtype, int64_t count) {
    fdma_cache cache = new_cache(test, dtype);
    size_t bytes = 0;
    cache.sequences = count;
    CHECK_OK(fdma_cache_bytes(&cache, &bytes));
    void *const memory = test_alloc_guarded(bytes);
    memset(memory, 0xff, bytes); // NaN in every dtype
    CHECK_OK(fdma_cache_init(&cache, memory));
    return cache;
}

/* The two sequences have the same state. */
static void check_same_state(const fdma_cache *a, int64_t s, const fdma_cache *b, int64_t t) {
    const saved_state first = save(a, s), second = save(b, t);
    if (CHECK_INT(first.bytes, second.bytes))
        CHECK_BYTES(first.data, second.data, first.bytes);
}

/* One stream is saved after some tokens and goes on in its own cache and in two others: one with
 * one sequence, one with pages. */
static void move_stream(const stream_case *test, fdma_dtype dtype, int32_t first) {
    static const int32_t third[] = {2}, only[] = {0};
    uint64_t random = 5;
    whole_call x = new_whole(test, dtype);
    attend_whole(&x, NULL);
    const fdma_cache cache = new_cache(test, dtype), alone = cache_of(test, dtype, 1);
    const paged_cache paged = new_paged(test, dtype, 4, &random);
    for (int32_t seen = 0; seen < first; seen++)
        decode_token(&x, &cache, seen, third, 1, NULL);
    const saved_state state = save(&cache, 2);
    give_pages(&paged, 2, test->len);
    CHECK_OK(fdma_cache_restore(&alone, 0, state.data, state.bytes));
    CHECK_OK(fdma_cache_restore(&paged.cache, 2, state.data, state.bytes));
    check_same_sequence(&cache, &paged, 2);
    check_same_state(&cache, 2, &alone, 0);
    check_same_state(&cache, 2, &paged.cache, 2);
    for (int32_t seen = first; seen < test->len; seen++) {
        decode_token(&x, &cache, seen, third, 1, NULL);
        decode_token(&x, &alone, seen, only, 1, NULL);
        decode_token(&x, &paged.cache, seen, third, 1, NULL);
    }
    check_same_state(&cache, 2, &alone, 0);
    check_same_state(&cache, 2, &paged.cache, 2);
    check_poison(&paged);
}

static void streams_go_on_elsewhere(void) {
    for (int c = 0; c < TEST_COUNT(cases) * test_dtype_count; c++) {
        const stream_case *const test = &cases[c / test_dtype_count];
        const fdma_dtype dtype = test_dtypes[c % test_dtype_count];
        if (dtype == FDMA_FLOAT64)
            continue; // the reference's alone
        test_context("case %d, %s", c / test_dtype_count, dtype_name(dtype));
        move_stream(test, dtype, c % 2 == 0 ? (int32_t)test->len / 2 : 2);
        test_free_all();
    }
}

/* ---- what the bytes replace ---- */

/* A cache whose sequences have each had some tokens of the stream. */
static fdma_cache decoded_cache(const stream_case *test, int32_t tokens) {
    static const int32_t all[] = {0, 1, 2, 3, 4};
    whole_call x = new_whole(test, FDMA_FLOAT32);
    const fdma_cache cache = new_cache(test, FDMA_FLOAT32);
    attend_whole(&x, NULL);
    for (int32_t seen = 0; seen < tokens; seen++)
        for (int s = 0; s < sequences; s++)
            decode_token(&x, &cache, seen, &all[s], 1, NULL);
    return cache;
}

/* A short sequence is short, and empties what was there; the other sequences stay. */
static void a_state_replaces_a_sequence(void) {
    const fdma_cache full = decoded_cache(&cases[2], 40), little = decoded_cache(&cases[2], 3);
    const fdma_cache empty = new_cache(&cases[2], FDMA_FLOAT32);
    const saved_state before = save(&full, 1), three = save(&little, 0), none = save(&empty, 4);
    CHECK(none.bytes < three.bytes && three.bytes < before.bytes);
    CHECK_OK(fdma_cache_restore(&full, 3, three.data, three.bytes));
    check_same_state(&full, 3, &little, 0);
    CHECK_OK(fdma_cache_restore(&full, 3, none.data, none.bytes));
    check_same_state(&full, 3, &empty, 0);
    check_same_state(&full, 1, &full, 2);
    CHECK_OK(fdma_cache_restore(&full, 3, before.data, before.bytes));
    check_same_state(&full, 3, &full, 1);
    test_free_all();
}

/* ---- bad arguments ---- */

static void check_refused(fdma_status status, fdma_status want, const char *words) {
    CHECK_INT(status, want);
    CHECK_WORD(fdma_last_error(), words);
}

static void wrong_arguments_are_refused(void) {
    const fdma_cache cache = decoded_cache(&cases[1], 20);
    const saved_state state = save(&cache, 0);
    fdma_cache on_device = cache, without_keys = cache;
    size_t bytes = 0;
    on_device.device = FDMA_CUDA(0);
    without_keys.k = (fdma_tensor){0};
    check_refused(fdma_cache_state_bytes(&cache, 5, &bytes), FDMA_INVALID_ARGUMENT,
                  "sequence: is 5, want 0 to 4");
    check_refused(fdma_cache_state_bytes(&cache, -1, &bytes), FDMA_INVALID_ARGUMENT,
                  "sequence: is -1");
    check_refused(fdma_cache_state_bytes(&cache, 0, NULL), FDMA_INVALID_ARGUMENT, "bytes: is NULL");
    check_refused(fdma_cache_state_bytes(NULL, 0, &bytes), FDMA_INVALID_ARGUMENT, "cache: is NULL");
    check_refused(fdma_cache_save(&on_device, 0, state.data, state.bytes), FDMA_UNSUPPORTED,
                  "cache: its device is FDMA_CUDA(0)");
    check_refused(fdma_cache_save(&without_keys, 0, state.data, state.bytes), FDMA_INVALID_ARGUMENT,
                  "cache.k");
    check_refused(fdma_cache_save(&cache, 0, state.data, state.bytes - 1), FDMA_INVALID_ARGUMENT,
                  "bytes: is");
    check_refused(fdma_cache_save(&cache, 0, NULL, state.bytes), FDMA_INVALID_ARGUMENT,
                  "state: is NULL");
    check_refused(fdma_cache_restore(&cache, 0, NULL, state.bytes), FDMA_INVALID_ARGUMENT,
                  "state: is NULL");
    *(int32_t *)address(cache.table.position, 0, 1, 2) = 20;
    check_refused(fdma_cache_save(&cache, 0, state.data, state.bytes), FDMA_INVALID_ARGUMENT,
                  "cache.table.position: row 2 of kv head 1 has position 20, want -1 to 19");
    ((int32_t *)cache.table.seen.data)[0] = -3;
    check_refused(fdma_cache_save(&cache, 0, state.data, state.bytes), FDMA_INVALID_ARGUMENT,
                  "cache.table.seen: element 0 is -3");
    test_free_all();
}

static void missing_pages_are_refused(void) {
    uint64_t random = 5;
    const fdma_cache cache = decoded_cache(&cases[1], 20);
    const saved_state state = save(&cache, 0);
    const paged_cache paged = new_paged(&cases[1], FDMA_FLOAT32, 4, &random);
    give_pages(&paged, 1, 4);
    check_refused(fdma_cache_restore(&paged.cache, 1, state.data, state.bytes),
                  FDMA_INVALID_ARGUMENT, "the page of row 4 of sequence 1 is missing");
    CHECK_INT(seen_of(&paged.cache, 1), 0);
    give_pages(&paged, 1, 20);
    CHECK_OK(fdma_cache_restore(&paged.cache, 1, state.data, state.bytes));
    give_pages(&paged, 1, 4);
    check_refused(fdma_cache_save(&paged.cache, 1, state.data, state.bytes), FDMA_INVALID_ARGUMENT,
                  "the page of row 4 of sequence 1 is missing");
    test_free_all();
}

static void pages_given_twice_are_refused(void) {
    static const char words[] = "want a page for each";
    uint64_t random = 5;
    const fdma_cache cache = decoded_cache(&cases[1], 20);
    const saved_state state = save(&cache, 0);
    const paged_cache paged = new_paged(&cases[1], FDMA_FLOAT32, 2, &random);
    give_pages(&paged, 1, 20);
    CHECK_OK(fdma_cache_restore(&paged.cache, 1, state.data, state.bytes));
    *entry_of(&paged, 1, 2) = *entry_of(&paged, 1, 0);
    const saved_state copy = save(&cache, 1);
    check_refused(fdma_cache_save(&paged.cache, 1, state.data, state.bytes), FDMA_INVALID_ARGUMENT,
                  words);
    check_refused(fdma_cache_restore(&paged.cache, 1, copy.data, copy.bytes), FDMA_INVALID_ARGUMENT,
                  "cache.page_table: rows 0 and 4 of sequence 1 have one page");
    *entry_of(&paged, 1, 0) = *entry_of(&paged, 1, 2) = -1;
    check_refused(fdma_cache_restore(&paged.cache, 1, copy.data, copy.bytes), FDMA_INVALID_ARGUMENT,
                  "the page of row 0 of sequence 1 is missing");
    test_free_all();
}

/* A pool of more pages than one pass of the check looks at, 32,768. */
static void pages_of_a_large_pool(void) {
    static const stream_case test = {7, 0, 0, 8, 30, FDMA_BIAS_EXP, 0, 0};
    uint64_t random = 5;
    const fdma_cache cache = decoded_cache(&test, 20);
    const saved_state state = save(&cache, 0);
    paged_cache paged = new_paged(&test, FDMA_FLOAT32, 1, &random);
    paged.pages = 3 * 32768;
    paged.cache.k = new_pool(&paged, false);
    paged.cache.v = new_pool(&paged, false);
    for (int32_t row = 0; row < 7; row++)
        *entry_of(&paged, 1, row) = 65537 - 32768 * (row % 3) + row / 3;
    CHECK_OK(fdma_cache_restore(&paged.cache, 1, state.data, state.bytes));
    check_same_state(&cache, 0, &paged.cache, 1);
    for (int32_t row = 1; row < 7; row++) {
        const int32_t own = *entry_of(&paged, 1, row);
        char words[64];
        snprintf(words, sizeof words, "rows %d and %d of sequence 1 have one page", row - 1, row);
        *entry_of(&paged, 1, row) = *entry_of(&paged, 1, row - 1);
        check_refused(fdma_cache_save(&paged.cache, 1, state.data, state.bytes),
                      FDMA_INVALID_ARGUMENT, words);
        *entry_of(&paged, 1, row) = own;
    }
    test_free_all();
}

static void sequences_may_share_pages(void) {
    uint64_t random = 5;
    const fdma_cache cache = decoded_cache(&cases[1], 20);
    const saved_state state = save(&cache, 0);
    const paged_cache paged = new_paged(&cases[1], FDMA_FLOAT32, 2, &random);
    for (int64_t s = 1; s < 3; s++) {
        for (int64_t column = 0; column < paged.columns; column++)
            *entry_of(&paged, s, column) = paged.number[column];
        CHECK_OK(fdma_cache_restore(&paged.cache, s, state.data, state.bytes));
    }
    check_same_state(&paged.cache, 1, &paged.cache, 2);
    test_free_all();
}

/* A state that lies in one of the cache's tensors. */
static void states_within_the_cache_are_refused(void) {
    uint64_t random = 5;
    const fdma_cache cache = decoded_cache(&cases[2], 20);
    const paged_cache paged = new_paged(&cases[2], FDMA_FLOAT32, 4, &random);
    const saved_state state = save(&cache, 0);
    void *const last = address(cache.v, 4, rows_of(&cache) - 1, kv_heads - 1);
    const struct {
        void *at;
        const char *words;
    } places[] = {
        {cache.k.data, "cache.k: shares elements with state"},
        {last, "cache.v: shares elements with state"},
        {cache.bias.data, "cache.bias: shares elements with state"},
        {cache.table.position.data, "cache.table.position: shares elements with state"},
        {(unsigned char *)cache.table.seen.data - state.bytes + 1, "shares elements with state"},
    };
    for (int n = 0; n < TEST_COUNT(places); n++) {
        check_refused(fdma_cache_save(&cache, 0, places[n].at, state.bytes), FDMA_INVALID_ARGUMENT,
                      places[n].words);
        check_same_state(&cache, 0, &cache, 1);
    }
    give_pages(&paged, 1, 20);
    check_refused(fdma_cache_save(&paged.cache, 0, paged.cache.page_table.data, state.bytes),
                  FDMA_INVALID_ARGUMENT, "cache.page_table: shares elements with state");
    memcpy(cache.k.data, state.data, state.bytes);
    check_refused(fdma_cache_restore(&cache, 4, cache.k.data, state.bytes), FDMA_INVALID_ARGUMENT,
                  "cache.k: shares elements with state");
    test_free_all();
}

/* A cache that differs in one field refuses the state in words, and keeps its own sequence. */
static void other_caches_refuse_a_state(void) {
    static const stream_case taken = {7, 2, 1, 16, 30, FDMA_BIAS_EXP, 0, 0};
    static const struct {
        stream_case test;
        fdma_dtype dtype;
        const char *words;
    } others[] = {
        {{8, 2, 1, 16, 30, FDMA_BIAS_EXP, 0, 0}, FDMA_FLOAT32, "its window is 7, want"},
        {{7, 1, 1, 16, 30, FDMA_BIAS_EXP, 0, 0}, FDMA_FLOAT32, "its recent is 2, want"},
        {{7, 2, 0, 16, 30, FDMA_BIAS_EXP, 0, 0}, FDMA_FLOAT32, "its sinks is 1, want"},
        {{7, 2, 1, 24, 30, FDMA_BIAS_EXP, 0, 0}, FDMA_FLOAT32, "its head_dim is 16, want"},
        {{7, 2, 1, 16, 30, FDMA_BIAS_EXP, 0, 0}, FDMA_BFLOAT16, "its dtype is float32, want"},
    };
    const fdma_cache cache = decoded_cache(&taken, 20);
    const saved_state state = save(&cache, 0);
    for (int n = 0; n < TEST_COUNT(others); n++) {
        const fdma_cache other = new_cache(&others[n].test, others[n].dtype);
        check_refused(fdma_cache_restore(&other, 0, state.data, state.bytes), FDMA_INVALID_ARGUMENT,
                      others[n].words);
        CHECK_INT(seen_of(&other, 0), 0);
    }
    fdma_cache heads = cache_of(&taken, FDMA_FLOAT32, 1);
    size_t bytes = 0;
    heads.kv_heads = kv_heads + 1;
    CHECK_OK(fdma_cache_bytes(&heads, &bytes));
    CHECK_OK(fdma_cache_init(&heads, test_alloc(bytes)));
    check_refused(fdma_cache_restore(&heads, 0, state.data, state.bytes), FDMA_INVALID_ARGUMENT,
                  "its kv_heads is");
    test_free_all();
}

/* Any changed byte and any shorter state is refused; so are bytes of chance, also ones that begin
 * with a right header. The sequence stays as it was. */
static void damaged_states_are_refused(void) {
    const fdma_cache cache = decoded_cache(&cases[0], 12), target = decoded_cache(&cases[0], 5);
    const saved_state state = save(&cache, 0), before = save(&target, 0);
    unsigned char *const bytes = test_alloc(state.bytes);
    uint64_t random = 77;
    for (size_t at = 0; at < state.bytes; at++) {
        memcpy(bytes, state.data, state.bytes);
        bytes[at] ^= (unsigned char)(1 + random_below(&random, 255));
        CHECK(fdma_cache_restore(&target, 0, bytes, state.bytes) != FDMA_OK);
    }
    for (size_t size = 0; size < state.bytes; size++) {
        unsigned char *const shorter = malloc(size > 0 ? size : 1); // for address sanitizers
        memcpy(shorter, state.data, size);
        check_refused(fdma_cache_restore(&target, 0, shorter, size), FDMA_INVALID_ARGUMENT,
                      "state");
        free(shorter);
    }
    for (int round = 0; round < 2000; round++) {
        const size_t kept = (size_t)random_below(&random, (int64_t)state.bytes);
        memcpy(bytes, state.data, kept);
        for (size_t at = kept; at < state.bytes; at++)
            bytes[at] = (unsigned char)random_below(&random, 256);
        CHECK(fdma_cache_restore(&target, 0, bytes, state.bytes) != FDMA_OK);
    }
    const saved_state after = save(&target, 0);
    CHECK_BYTES(after.data, before.data, before.bytes);
    memcpy(bytes, state.data, state.bytes);
    bytes[state.bytes - 1] ^= 1;
    check_refused(fdma_cache_restore(&target, 0, bytes, state.bytes), FDMA_INVALID_ARGUMENT,
                  "state: is damaged: its checksum is");
    bytes[8] = 2;
    check_refused(fdma_cache_restore(&target, 0, bytes, state.bytes), FDMA_UNSUPPORTED,
                  "state: its version is 2, supported: 1");
    bytes[0] = 'f';
    check_refused(fdma_cache_restore(&target, 0, bytes, state.bytes), FDMA_INVALID_ARGUMENT,
                  "state: does not begin as a saved sequence");
    check_refused(fdma_cache_restore(&target, 0, state.data, state.bytes - 8),
                  FDMA_INVALID_ARGUMENT, "state: is truncated");
    CHECK_OK(fdma_cache_restore(&target, 0, state.data, state.bytes));
    check_same_state(&target, 0, &cache, 0);
    test_free_all();
}

/* Writes the checksum that the message of a refusal has found. It follows magic, version, dtype and
 * size. */
static void forge_checksum(const fdma_cache *cache, const saved_state *state) {
    unsigned long long sum = 0;
    uint64_t word;
    CHECK_INT(fdma_cache_restore(cache, 0, state->data, state->bytes), FDMA_INVALID_ARGUMENT);
    const char *const told = strstr(fdma_last_error(), "its checksum is ");
    if (CHECK(told != NULL && sscanf(told, "its checksum is %llx", &sum) == 1)) {
        word = sum;
        memcpy(state->data + 24, &word, sizeof word);
    }
}

/* States with a right checksum, whose contents no cache can have. */
static void forged_states_are_refused(void) {
    enum { header = 96, kv_heads_at = 32, seen_at = 72, rows_at = 80, score_dtype_at = 88 };
    static const struct {
        size_t at;
        int64_t value; /* of 8 bytes */
        const char *words;
    } forgeries[] = {
        {kv_heads_at, INT64_MAX, "its kv_heads is 9223372036854775807, want"},
        {seen_at, -1, "its seen is -1, want 0 to 2147483647"},
        {seen_at, INT64_C(1) << 31, "its seen is 2147483648"},
        {seen_at, 3, "row 3 of kv head 0 has position 3, want -1 to 2"},
        {rows_at, 6, "has 6 rows, want 0 to window + recent, 4"},
        {rows_at, -1, "has -1 rows"},
        {rows_at, 3, "want 576 for 3 rows"},
        {score_dtype_at, 4, "its score's dtype is float64, want"},
        {header, -2, "row 0 of kv head 0 has position -2, want -1 to 3"},
    };
    static const stream_case taken = {4, 0, 0, 8, 30, FDMA_BIAS_EXP, 0, 0};
    const fdma_cache cache = decoded_cache(&taken, 4), target = decoded_cache(&taken, 2);
    const saved_state state = save(&cache, 0), before = save(&target, 0);
    saved_state forged = {test_alloc(state.bytes), state.bytes};
    for (int n = 0; n < TEST_COUNT(forgeries); n++) {
        test_context("forgery %d", n);
        memcpy(forged.data, state.data, state.bytes);
        memcpy(forged.data + forgeries[n].at, &forgeries[n].value, sizeof forgeries[n].value);
        forge_checksum(&target, &forged);
        check_refused(fdma_cache_restore(&target, 0, forged.data, forged.bytes),
                      FDMA_INVALID_ARGUMENT, forgeries[n].words);
    }
    const saved_state after = save(&target, 0);
    CHECK_BYTES(after.data, before.data, before.bytes);
    test_free_all();
}

static const test_entry tests[] = {
    TEST(forged_states_are_refused),
    TEST(streams_go_on_elsewhere),
    TEST(a_state_replaces_a_sequence),
    TEST(wrong_arguments_are_refused),
    TEST(missing_pages_are_refused),
    TEST(pages_given_twice_are_refused),
    TEST(pages_of_a_large_pool),
    TEST(sequences_may_share_pages),
    TEST(states_within_the_cache_are_refused),
    TEST(other_caches_refuse_a_state),
    TEST(damaged_states_are_refused),
};

int main(void) { return test_run(tests, TEST_COUNT(tests)); }
