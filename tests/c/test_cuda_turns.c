/* test_cuda_turns.c - deterministic gradients of random calls on 9.0, where thread blocks add to dq
 * in turns. They are right, equal in two runs, and there is no deadlock. */
#include "device.h"
#include "gradient_properties.h"

enum { calls = 24, first_seed = 4100 };

static int64_t choose(uint64_t *state, const int64_t *from, int64_t count) {
    return from[random_below(state, count)];
}

static shape_case random_shape(uint64_t *state) {
    static const int64_t dims[] = {40, 64, 72, 128, 192, 256};
    static const int64_t groups[] = {1, 1, 2, 4, 7};
    const int64_t kv_heads = 1 + random_below(state, 2), q_len = 1 + random_below(state, 320);
    shape_case of = {
        .sizes = {.batch = 1 + random_below(state, 2),
                  .q_len = q_len,
                  .kv_len = q_len + random_below(state, 3) * random_below(state, 70),
                  .q_heads = kv_heads * choose(state, groups, TEST_COUNT(groups)),
                  .kv_heads = kv_heads,
                  .head_dim = choose(state, dims, TEST_COUNT(dims)),
                  .window = 1 + random_below(state, 400),
                  .scope = FDMA_SCOPE_CAUSAL,
                  .causal = 1,
                  .softcap = random_below(state, 4) == 0 ? 5 : 0},
        .bias_form = (fdma_bias_form)random_below(state, 3),
        .scores = (score_order)random_below(state, SCORES_CROWN + 1),
        .padding = (case_padding)random_below(state, PADDING_HOLES + 1),
    };
    if (random_below(state, 3) == 0)
        of.sizes.recent = 1 + random_below(state, 150);
    if (random_below(state, 5) == 0)
        of.sizes.window = -1; /* dense */
    of.name = of.sizes.window < 0 ? "dense" : "selected";
    if (of.sizes.window < 0)
        of.sizes.recent = 0;
    return of;
}

static void check_calls(const char *kernel, fdma_dtype dtype) {
    uint64_t state = first_seed + (uint64_t)dtype;
    int taken = 0;
    for (int n = 0; n < calls; n++) {
        const shape_case of = random_shape(&state);
        if (dtype == FDMA_FLOAT32 || strstr(kernel, "cuda/sm90") == NULL)
            return;
        problem x = shape_problem(&of, (uint64_t)(first_seed + n), dtype);
        x.dropout = x.softcap == 0 && n % 3 == 0 ? 0.25 : 0;
        gradient_problem p = gradient_of(&x, 1);
        p.deterministic = 1;
        test_context("%s, call %d, %s: q_len %lld, kv_len %lld, window %lld, head_dim %lld", kernel,
                     n, of.name, (long long)x.q_len, (long long)x.kv_len, (long long)x.window,
                     (long long)x.head_dim);
        if (gradient_is_taken(&p, kernel)) {
            check_right(&p, kernel);
            check_repeats(&p, kernel);
            taken++;
        }
        test_free_all();
    }
    CHECK(taken > 0);
}

static void random_calls_are_right(void) { for_each_kernel("backward", check_calls); }

static const test_entry tests[] = {TEST(random_calls_are_right)};

int main(void) { return device_test_run(tests, TEST_COUNT(tests)); }
