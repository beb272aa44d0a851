/* test_cuda_backward.c - gradients for windows with which backward on 9.0 takes query blocks of
 * 256 and of 512 queries, so that keys arrive and leave in different tiles of queries; for head_dim
 * 64, with steps of 128 queries; for many query heads on one kv head; and for many kv heads, whose
 * gradients are equal from run to run. Deterministic gradients
 * of random calls on 9.0, where thread blocks add to dq in turns, are right and equal in two runs,
 * and there is no deadlock. */
#include "device.h"
#include "gradient_properties.h"

enum { first_seed = 17 };

/* HOLES and LEFT: some arriving keys are absent. "later": there are more keys than queries. */
static const shape_case long_cases[] = {
    SHAPE("256", 1, 1200, 1200, 14, 7, 72, 1024, CAUSAL, LINEAR, 0, IID, PLAIN, HOLES),
    SHAPE("256/later", 1, 1180, 1250, 7, 7, 80, 1030, CAUSAL, LINEAR, 0, RISING, PACK, NONE),
    SHAPE("512/later", 1, 2060, 2110, 8, 8, 72, 2048, CAUSAL, LINEAR, 0, SAW, SWAP, LEFT),
};

static void gradients_are_right(const char *kernel, fdma_dtype dtype) {
    for (int s = 0; s < TEST_COUNT(long_cases); s += test_step(3)) {
        if (dtype != FDMA_BFLOAT16 || strstr(kernel, "sm90") == NULL)
            continue;
        const problem x = shape_problem(&long_cases[s], first_seed, dtype);
        gradient_problem p = gradient_of(&x, 1);
        p.deterministic = s % 2;
        test_context("%s, %s", kernel, long_cases[s].name);
        if (gradient_is_taken(&p, kernel))
            check_right(&p, kernel);
    }
}

/* With 300 and 440 queries the last step ends in its first half; with 225 and 335, in the second.
 * "rising": keys leave in the order of their slots, all keys of a warp in the same half of a step.
 * Several slot blocks add to dq. With softcap a step has 64 queries, and a thread block keeps slots
 * for several query blocks. */
static const shape_case step_cases[] = {
    SHAPE("rising", 2, 300, 335, 4, 2, 64, 200, CAUSAL, LINEAR, 0, RISING, PACK, NONE),
    SHAPE_RULES("recent", 1, 440, 440, 6, 2, 48, 150, CAUSAL, EXP, 0, SAW, SWAP, LEFT, 140, 3),
    SHAPE("dense", 1, 335, 370, 4, 1, 64, -1, CAUSAL, LINEAR, 0, IID, PLAIN, HOLES),
    SHAPE("full", 1, 225, 300, 4, 2, 64, -1, FULL, EXP, 0, IID, SWAP, NONE),
    SHAPE("softcap", 1, 520, 520, 4, 2, 64, 200, CAUSAL, LINEAR, 5, IID, PLAIN, NONE),
};

static void long_steps_are_right(const char *kernel, fdma_dtype dtype) {
    for (int n = 0; n < 2 * TEST_COUNT(step_cases); n++) {
        const shape_case *const of = &step_cases[n / 2];
        if (dtype == FDMA_FLOAT32 || strstr(kernel, "sm90/d64") == NULL ||
            is_left_out(n, (int)dtype))
            continue;
        problem x = shape_problem(of, first_seed, dtype);
        x.dropout = n % 2 ? 0.3 : 0;
        gradient_problem p = gradient_of(&x, 1);
        test_context("%s, %s%s", kernel, of->name, n % 2 ? ", dropout" : "");
        CHECK(gradient_is_taken(&p, kernel));
        check_right(&p, kernel);
        p.deterministic = 1;
        check_right(&p, kernel);
        check_repeats(&p, kernel);
        test_free_all();
    }
}

/* Positions are cut into four partitions, or into two if the kv head has fewer query heads. */
static const shape_case group_case =
    SHAPE_RULES("8 heads on 1", 1, 400, 440, 8, 1, 48, 80, CAUSAL, EXP, 0, SAW, SWAP, LEFT, 46, 3);

static void large_groups_are_right(const char *kernel, fdma_dtype dtype) {
    const problem x = shape_problem(&group_case, first_seed, dtype);
    gradient_problem p = gradient_of(&x, 1);
    test_context("%s, %s", kernel, group_case.name);
    if (gradient_is_taken(&p, kernel))
        check_right(&p, kernel);
}

/* With so many kv heads a thread block takes all slot blocks of one, and writes dq. The second and
 * third case have queries that see no key: those before all keys, and those with absent keys alone.
 * Only the emulated device has so few multiprocessors that the heads of the groups are enough;
 * there a tile has up to three slot blocks. */
static const shape_case head_cases[] = {
    SHAPE("selected", 16, 33, 150, 16, 16, 64, 140, CAUSAL, LINEAR, 0, IID, PLAIN, NONE),
    SHAPE("more queries", 16, 150, 140, 16, 16, 72, -1, CAUSAL, EXP, 0, IID, SWAP, NONE),
    SHAPE("dense", 16, 70, 140, 16, 16, 64, -1, CAUSAL, LINEAR, 0, IID, PACK, LEFT),
    SHAPE("full", 16, 40, 140, 16, 16, 48, -1, FULL, NONE, 0, IID, PLAIN, HOLES),
    SHAPE("softcap", 16, 30, 140, 16, 16, 64, 130, CAUSAL, LINEAR, 5, IID, PLAIN, NONE),
    SHAPE("groups", 4, 300, 335, 8, 4, 64, 290, CAUSAL, LINEAR, 0, IID, PLAIN, LEFT),
    SHAPE("groups/128", 4, 260, 300, 8, 4, 128, 290, CAUSAL, LINEAR, 0, SAW, PACK, NONE),
};
enum { sure_cases = 5 }; /* the first ones */

static void many_heads_are_right(const char *kernel, fdma_dtype dtype) {
    for (int n = 0; n < TEST_COUNT(head_cases); n++) {
        if (dtype == FDMA_FLOAT32 || strstr(kernel, "cuda/sm90") == NULL ||
            is_left_out(n, (int)dtype))
            continue;
        shape_case of = head_cases[n];
        if (test_divisor() > 8 && n < sure_cases)
            of.sizes.batch = 1; /* enough for the emulated device */
        const problem x = shape_problem(&of, first_seed, dtype);
        const gradient_problem p = gradient_of(&x, 1);
        test_context("%s, %s", kernel, of.name);
        if (!gradient_is_taken(&p, kernel))
            continue;
        check_right(&p, kernel);
        if (n < sure_cases && (x.window < 0 || strstr(kernel, "by_key") != NULL))
            check_repeats(&p, kernel);
        test_free_all();
    }
}

/* ---- thread blocks that add to dq in turns ---- */

enum { random_calls = 24, random_seed = 4100 };

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

static void random_calls_are_right(const char *kernel, fdma_dtype dtype) {
    uint64_t state = random_seed + (uint64_t)dtype;
    const int most = test_divisor() > 8 ? 2 : random_calls;
    int taken = 0;
    for (int n = 0; n < random_calls && taken < most; n++) {
        const shape_case of = random_shape(&state);
        if (dtype == FDMA_FLOAT32 || strstr(kernel, "cuda/sm90") == NULL)
            return;
        problem x = shape_problem(&of, (uint64_t)(random_seed + n), dtype);
        x.dropout = n % 3 == 0 ? 0.25 : 0;
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

static const test_entry tests[] = {
    EACH_KERNEL("backward", gradients_are_right),    EACH_KERNEL("backward", long_steps_are_right),
    EACH_KERNEL("backward", large_groups_are_right), EACH_KERNEL("backward", many_heads_are_right),
    EACH_KERNEL("backward", random_calls_are_right),
};

int main(void) { return device_test_run(tests, TEST_COUNT(tests)); }
