/* test_vocabulary_rows.c - the words that work on whole rows: pairs of channels are loaded, and the
 * lanes of several vectors added up. */
#include "vocabulary/each.h"

/* Every number of bfloat16, at even and at odd indices. */
static void check_even_odd(const vocabulary *x) {
    for (uint32_t first = 0; first < 0x10000; first += (uint32_t)x->width) {
        uint16_t from[2 * lanes];
        float even[lanes], odd[lanes];
        for (int i = 0; i < x->width; i++) {
            from[2 * i] = (uint16_t)(first + (uint32_t)i);
            from[2 * i + 1] = (uint16_t)~from[2 * i];
        }
        x->load_even_odd_bf16(even, odd, from);
        for (int i = 0; i < x->width; i++) {
            check_lane("even", i, even[i], (float)load_double(from, FDMA_BFLOAT16, 2 * i));
            check_lane("odd", i, odd[i], (float)load_double(from, FDMA_BFLOAT16, 2 * i + 1));
        }
    }
}

static void even_and_odd_channels_are_told_apart(void) { on_each(check_even_odd); }

/* Each row's sum is in the lane of its own, and near that of double precision. */
static void check_each_sum(const vocabulary *x) {
    static float rows[lanes * lanes];
    uint64_t state = 12;
    for (int round = 0; round < 100; round++) {
        float to[lanes];
        for (int i = 0; i < x->width * x->width; i++)
            rows[i] = random_float(&state);
        x->sum_each(to, rows);
        for (int i = 0; i < x->width; i++) {
            double sum = 0, size = 0;
            for (int n = 0; n < x->width; n++) {
                sum += (double)rows[i * x->width + n];
                size += fabs((double)rows[i * x->width + n]);
            }
            CHECK_NEAR((double)to[i], sum, (x->width - 1) * size * (double)FLT_EPSILON / 2);
        }
    }
}

static void rows_are_summed(void) { on_each(check_each_sum); }

static const test_entry tests[] = {
    TEST(even_and_odd_channels_are_told_apart),
    TEST(rows_are_summed),
};

int main(void) { return test_run(tests, TEST_COUNT(tests)); }
