/* test_cuda_lists.c - the lists that forward works from on a CUDA device: a tile visits every key
 * that one of its queries keeps, and no key that was evicted before its first query. */
#include "cases.h"
#include "device.h"
#include "scores.h"

static const char *const kernels[] = {"cuda/sm90/d64", "cuda/sm80/d64", "cuda/sm80/decode/d64"};
enum { tile_rows = 128, random_cases = 80, many_cases = 24, long_cases = 8 };

/* ---- random selections ---- */

/* Sequences of any length; some positions may belong to none. */
static fdma_tensor new_starts(int64_t kv_len, uint64_t *state) {
    const int64_t count = 1 + random_below(state, 12);
    const fdma_tensor tensor = new_tensor(FDMA_INT32, count + 1, -1, -1, -1);
    int32_t *const starts = tensor.data;
    starts[0] = 0;
    for (int64_t n = 1; n <= count; n++) {
        const int64_t next = starts[n - 1] + random_below(state, 2 * kv_len / count + 2);
        starts[n] = (int32_t)(next < kv_len ? next : kv_len);
    }
    return tensor;
}

/* Windows of a few keys, of about a query block, and larger ones. */
static problem random_heads(uint64_t *state, fdma_dtype dtype, int64_t kv_heads) {
    static const int64_t groups[] = {1, 3, 4, 5, 8}, windows[] = {1, 2, 3, 37, 64, 127, 128, 200};
    const int64_t group = groups[random_below(state, TEST_COUNT(groups))];
    const int64_t kv_len = 130 + random_below(state, 500);
    const bool is_packed = random_below(state, 4) == 0, is_whole = random_below(state, 2) == 0;
    problem x = {.batch = 1, .kv_len = kv_len, .kv_heads = kv_heads, .head_dim = 16};
    x.q_heads = group * kv_heads;
    x.q_len = is_packed || is_whole ? kv_len : 1 + random_below(state, kv_len);
    if (!is_packed && random_below(state, 8) == 0)
        x.q_len = 1 + random_below(state, 16);
    x.window = windows[random_below(state, TEST_COUNT(windows))];
    x.recent = random_below(state, 2) * random_below(state, 150);
    x.sinks = random_below(state, 3) == 0 ? random_below(state, x.window + 1) : 0;
    x.gap = random_below(state, 3) == 0 ? 0.25 * (double)(1 + random_below(state, 12)) : 0;
    x.scope = FDMA_SCOPE_CAUSAL;
    x.causal = 1;
    x.dtype = dtype;
    problem_fill(&x, *state);
    fill_kinds(x.score, 1 + random_below(state, 200), state);
    if (is_packed) {
        x.starts = new_starts(kv_len, state);
    } else if (random_below(state, 4) == 0) {
        x.kv_used = new_tensor(FDMA_INT32, 1, -1, -1, -1);
        *(int32_t *)x.kv_used.data = (int32_t)random_below(state, kv_len + 1);
    }
    if (random_below(state, 3) == 0)
        x.key_valid = new_padding(1, kv_len, state);
    problem_select(&x);
    return x;
}

static problem random_problem(uint64_t *state, fdma_dtype dtype) {
    return random_heads(state, dtype, 1);
}

/* Has so many lists that a thread block makes several. */
static problem many_problem(uint64_t *state, fdma_dtype dtype) {
    enum { many_heads = 17 };
    return random_heads(state, dtype, many_heads);
}

/* With these windows more than 128 queries share a list. Scores are of every kind; where they rise,
 * every key arrives and evicts another one. */
static problem long_problem(uint64_t *state, fdma_dtype dtype) {
    static const int64_t windows[] = {512, 600, 1024, 2048, 2100};
    problem x = {.batch = 1, .q_heads = 2, .kv_heads = 1, .head_dim = 16};
    x.kv_len = 4097 + random_below(state, 600);
    x.q_len = 1 + random_below(state, 1200);
    x.window = windows[random_below(state, TEST_COUNT(windows))];
    x.scope = FDMA_SCOPE_CAUSAL;
    x.causal = 1;
    x.dtype = dtype;
    problem_fill(&x, *state);
    fill_kinds(x.score, 1 + random_below(state, 2000), state);
    if (random_below(state, 3) == 0)
        x.key_valid = new_padding(1, x.kv_len, state);
    problem_select(&x);
    return x;
}

static void check_random(int count, problem (*make)(uint64_t *state, fdma_dtype dtype)) {
    uint64_t state = 31;
    int taken = 0;
    const int repeats = test_repeats(count);
    for (int i = 0; i < repeats && test_state.failures < test_reports; i++) {
        const problem x = make(&state, test_dtypes[1 + i % 2]);
        const attended want = problem_attend(&x, "reference", 1);
        for (int kernel = 0; kernel < TEST_COUNT(kernels); kernel++) {
            test_context("%s, case %d: %d heads, q_len %d, kv_len %d, window %d, recent %d, gap %g"
                         "%s%s%s",
                         kernels[kernel], i, (int)x.q_heads, (int)x.q_len, (int)x.kv_len,
                         (int)x.window, (int)x.recent, x.gap, x.starts.rank > 0 ? ", packed" : "",
                         x.kv_used.rank > 0 ? ", kv_used" : "",
                         x.key_valid.rank > 0 ? ", padding" : "");
            if (!problem_is_taken(&x, kernels[kernel]))
                continue;
            check_close_results(&x, problem_attend(&x, kernels[kernel], 1), want);
            taken++;
        }
        test_free_all();
    }
    CHECK(taken >= repeats);
}

static void random_selections_are_attended_to(void) {
    check_random(random_cases, random_problem);
    check_random(many_cases, many_problem);
    check_random(long_cases, long_problem);
}

/* ---- evicted keys ---- */

/* True if key j is live at the first position of a query's query block, but not at the first
 * position of its tile. If a query has rows in two tiles, the first one counts. */
static bool is_evicted_early(const problem *x, int64_t j, int64_t i) {
    const bool is_long = x->kv_len > 4096, is_longest = is_long && x->window >= 2048;
    const int64_t query_block = is_longest ? 512 : is_long ? 256 : 128;
    const int64_t group = x->q_heads / x->kv_heads, origin = x->kv_len - x->q_len;
    const int64_t row = i * group / tile_rows * tile_rows, block = i / query_block * query_block;
    const int32_t expiry = ((const int32_t *)x->selection.expiry.data)[j];
    return j <= block + origin && block + origin < expiry && expiry <= row / group + origin;
}

/* A NaN in v of an expired key reaches the rows of all tiles that visit it, as 0 * NaN, unless the
 * kernel looks at every key's expiry before it reads v. Returns the number of rows that it must not
 * reach. */
static int64_t check_evicted(const problem *x, int64_t j, const char *kernel) {
    const size_t row_bytes = (size_t)(x->q_heads * x->head_dim) * dtype_size(x->dtype);
    const attended want = problem_attend(x, kernel, 1);
    problem spoiled = *x;
    int64_t rows = 0;
    spoiled.v = copy_tensor(x->v);
    spoil_key(spoiled.v, 0, j, 0, NAN);
    const attended found = problem_attend(&spoiled, kernel, 1);
    for (int64_t i = 0; i < x->q_len; i++) {
        if (!is_evicted_early(x, j, i))
            continue;
        CHECK_BYTES((const char *)found.out.data + (size_t)i * row_bytes,
                    (const char *)want.out.data + (size_t)i * row_bytes, row_bytes);
        rows++;
    }
    return rows;
}

/* Keys are evicted in the order of their arrival, or in any order. */
static const shape_case evicted_cases[] = {
    SHAPE("rising", 1, 400, 400, 4, 1, 16, 64, CAUSAL, LINEAR, 0, RISING, PLAIN, NONE),
    SHAPE("iid", 1, 300, 390, 8, 1, 16, 20, CAUSAL, LINEAR, 0, IID, PLAIN, NONE),
    SHAPE("steps", 1, 310, 350, 3, 1, 16, 150, CAUSAL, LINEAR, 0, STEPS, PLAIN, NONE),
    SHAPE("256", 1, 600, 4100, 4, 1, 16, 512, CAUSAL, LINEAR, 0, RISING, PLAIN, NONE),
    SHAPE("512", 1, 700, 4100, 3, 1, 16, 2048, CAUSAL, LINEAR, 0, RISING, PLAIN, NONE),
    SHAPE_RULES("recent", 1, 400, 400, 4, 1, 16, 30, CAUSAL, LINEAR, 0, IID, PLAIN, NONE, 130, 4),
};

static void evicted_keys_are_not_visited(void) {
    uint64_t state = 3;
    for (int n = 0; n < TEST_COUNT(evicted_cases); n++) {
        problem x = shape_problem(&evicted_cases[n], 7, FDMA_BFLOAT16);
        int64_t rows = 0;
        x.key_valid = (fdma_tensor){0};
        for (int kernel = 0; kernel < TEST_COUNT(kernels); kernel++) {
            if (!problem_is_taken(&x, kernels[kernel]))
                continue;
            const int64_t step = (x.kv_len > 4096 ? 149 : 41) * test_step(2);
            for (int64_t j = random_below(&state, 20); j < x.kv_len; j += step) {
                test_context("%s, %s, key %d", kernels[kernel], evicted_cases[n].name, (int)j);
                rows += check_evicted(&x, j, kernels[kernel]);
            }
        }
        CHECK(rows > 0);
        test_free_all();
    }
}

static const test_entry tests[] = {
    TEST(random_selections_are_attended_to),
    TEST(evicted_keys_are_not_visited),
};

int main(void) { return device_test_run(tests, TEST_COUNT(tests)); }
