/* test_vocabulary_rows.c - the words for whole rows and for masks: pairs of channels are loaded,
 * the lanes of several vectors added up, bytes become bits, and bits choose lanes. */
#include "vocabulary/each.h"

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

/* The sum of each row is in its own lane, and near the sum in double precision. */
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

static void check_bits(const vocabulary *x) {
    uint64_t state = 19;
    float from[lanes], to[lanes];
    fill_any(from, &state);
    for (int n = 0; n < 100; n++) {
        const uint32_t bits = n < 2 ? -(uint32_t)n : (uint32_t)random_bits(&state);
        x->keep_bits(to, from, bits);
        for (int i = 0; i < x->width; i++)
            check_lane("vf_keep_bits", i, to[i], bits >> i & 1 ? from[i] : -INFINITY);
    }
}

static void keep_bits_keeps_lanes(void) { on_each(check_bits); }

/* One nonzero byte, random bytes, and an address of any alignment. */
static void check_bytes(const vocabulary *x) {
    uint64_t state = 21;
    uint8_t bytes[80] = {0};
    for (int n = 0; n < 64; n++) {
        bytes[3 + n] = (uint8_t)(1 << n % 8);
        CHECK(x->nonzero_bytes(bytes + 3) == UINT64_C(1) << n);
        bytes[3 + n] = 0;
    }
    for (int round = 0; round < 100; round++) {
        uint64_t want = 0;
        for (int n = 0; n < 64; n++) {
            bytes[round % 16 + n] = random_bits(&state) % 3 == 0 ? (uint8_t)random_bits(&state) : 0;
            want |= (uint64_t)(bytes[round % 16 + n] != 0) << n;
        }
        CHECK(x->nonzero_bytes(bytes + round % 16) == want);
    }
}

static void bytes_become_bits(void) { on_each(check_bytes); }

static const test_entry tests[] = {
    TEST(even_and_odd_channels_are_told_apart),
    TEST(rows_are_summed),
    TEST(keep_bits_keeps_lanes),
    TEST(bytes_become_bits),
};

int main(void) { return test_run(tests, TEST_COUNT(tests)); }
