/* test_cuda_query_blocks.c - gradients for windows with which backward on 9.0 takes query blocks of
 * 256 and of 512 queries, so that keys arrive and leave in different tiles of queries; for head_dim
 * 64, with steps of 128 queries; and for many query heads on one kv head. */
#include "device.h"
#include "gradient_properties.h"

enum { first_seed = 17 };

/* HOLES and LEFT: some arriving keys are absent. "later": there are more keys than queries. */
static const shape_case long_cases[] = {
    SHAPE("256", 1, 1200, 1200, 14, 7, 72, 1024, CAUSAL, LINEAR, 0, IID, PLAIN, HOLES),
    SHAPE("256/later", 1, 1180, 1250, 7, 7, 80, 1030, CAUSAL, LINEAR, 0, RISING, PACK, NONE),
    SHAPE("512/later", 1, 2060, 2110, 8, 8, 72, 2048, CAUSAL, LINEAR, 0, SAW, SWAP, LEFT),
};

static void check_long(const char *kernel, fdma_dtype dtype) {
    for (int s = 0; s < TEST_COUNT(long_cases); s++) {
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

static void gradients_are_right(void) { for_each_kernel("backward", check_long); }

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

static void check_steps(const char *kernel, fdma_dtype dtype) {
    for (int n = 0; n < 2 * TEST_COUNT(step_cases); n++) {
        const shape_case *const of = &step_cases[n / 2];
        if (dtype == FDMA_FLOAT32 || strstr(kernel, "sm90/d64") == NULL ||
            is_left_out(n, (int)dtype))
            continue;
        problem x = shape_problem(of, first_seed, dtype);
        if (n % 2 && x.softcap != 0) /* sm90 does not take both together */
            continue;
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

static void long_steps_are_right(void) { for_each_kernel("backward", check_steps); }

/* Positions are cut into four partitions, or into two if the kv head has fewer query heads. */
static const shape_case group_case =
    SHAPE_RULES("8 heads on 1", 1, 400, 440, 8, 1, 48, 80, CAUSAL, EXP, 0, SAW, SWAP, LEFT, 46, 3);

static void check_groups(const char *kernel, fdma_dtype dtype) {
    const problem x = shape_problem(&group_case, first_seed, dtype);
    gradient_problem p = gradient_of(&x, 1);
    test_context("%s, %s", kernel, group_case.name);
    if (gradient_is_taken(&p, kernel))
        check_right(&p, kernel);
}

static void large_groups_are_right(void) { for_each_kernel("backward", check_groups); }

static const test_entry tests[] = {
    TEST(gradients_are_right),
    TEST(long_steps_are_right),
    TEST(large_groups_are_right),
};

int main(void) { return device_test_run(tests, TEST_COUNT(tests)); }
