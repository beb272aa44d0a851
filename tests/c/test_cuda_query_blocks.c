/* test_cuda_query_blocks.c - gradients for windows with which backward on 9.0 takes query blocks of
 * 256 and of 512 queries, whose keys arrive and leave in different tiles of queries. */
#include "device.h"
#include "gradient_properties.h"

enum { first_seed = 17 };

/* HOLES and LEFT: some keys that arrive are absent. "later": there are more keys than queries. */
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

static const test_entry tests[] = {
    TEST(gradients_are_right),
};

int main(void) { return device_test_run(tests, TEST_COUNT(tests)); }
