/* test_order.c - compares the order of keys on a device (cuda/device/order.cuh) with the CPU's
 * order (cpu/common/order.h). */
#include "cpu/common/order.h"
#include "cuda/device/order.cuh"
#include "test.h"

enum { position_bits = 28, random_scores = 200 };

/* Bits of scores whose order is a special case, and of their neighbours. */
static const uint32_t special[] = {
    0x00000000, 0x80000000, /* both zeros */
    0x00000001, 0x80000001, /* the least subnormal numbers */
    0x007fffff, 0x807fffff, /* the greatest */
    0x00800000, 0x80800000, /* the least normal numbers */
    0x3f800000, 0xbf800000, /* 1 and -1 */
    0x3f800001, 0xbf800001, /* and their neighbours */
    0x7f7fffff, 0xff7fffff, /* the greatest finite numbers */
    0x7f800000, 0xff800000, /* inf */
    0x7f800001, 0xff800001, /* NaN, with the least and the greatest payload */
    0x7fffffff, 0xffffffff,
};

enum { specials = sizeof special / sizeof special[0], all_scores = specials + random_scores };

static uint32_t score_bits(int n, uint64_t *state) {
    if (n < specials)
        return special[n];
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 32);
}

static void fill_scores(uint32_t (*bits)[all_scores]) {
    uint64_t state = 1;
    for (int n = 0; n < all_scores; n++)
        (*bits)[n] = score_bits(n, &state);
}

static float score_of_bits(uint32_t bits) {
    float score;
    memcpy(&score, &bits, sizeof score);
    return score;
}

static int32_t signed_order(uint32_t bits) {
    return signed_order_of_score_bits((int32_t)bits, isnan(score_of_bits(bits)));
}

static int sign_of(int64_t a, int64_t b) { return (a > b) - (a < b); }

static int unsigned_sign_of(uint64_t a, uint64_t b) { return (a > b) - (a < b); }

static void scores_are_in_the_order_of_the_cpu(void) {
    uint32_t bits[all_scores];
    fill_scores(&bits);
    for (int a = 0; a < all_scores; a++)
        for (int b = 0; b < all_scores; b++) {
            const int want =
                sign_of(score_order(score_of_bits(bits[a])), score_order(score_of_bits(bits[b])));
            test_context("scores %08x and %08x", bits[a], bits[b]);
            CHECK_INT(unsigned_sign_of(order_of_score_bits(bits[a]), order_of_score_bits(bits[b])),
                      want);
            CHECK_INT(sign_of(signed_order(bits[a]), signed_order(bits[b])), want);
        }
}

static void check_keys(uint32_t a, int32_t i, uint32_t b, int32_t j) {
    const int want = sign_of(key_order(score_of_bits(a), i), key_order(score_of_bits(b), j));
    const uint32_t orders[] = {order_of_score_bits(a), order_of_score_bits(b)};
    test_context("scores %08x at %d and %08x at %d", a, i, b, j);
    CHECK_INT(unsigned_sign_of(ranked_key_of(orders[0], (uint32_t)i, position_bits),
                               ranked_key_of(orders[1], (uint32_t)j, position_bits)),
              want);
    CHECK_INT(
        sign_of(signed_ranked_key_of(signed_order(a), i), signed_ranked_key_of(signed_order(b), j)),
        want);
}

/* Compares each score with itself, where the positions decide, and with the next one. */
static void keys_are_in_the_order_of_the_cpu(void) {
    const int32_t positions[] = {0, 1, (1 << position_bits) - 1};
    uint32_t scores[all_scores];
    fill_scores(&scores);
    for (int a = 0; a < all_scores; a++)
        for (int i = 0; i < 3; i++)
            for (int j = 0; j < 3; j++) {
                check_keys(scores[a], positions[i], scores[a], positions[j]);
                check_keys(scores[a], positions[i], scores[(a + 1) % all_scores], positions[j]);
            }
}

static void sinks_outrank_all_scores_and_all_outrank_none(void) {
    const uint32_t last = (1u << position_bits) - 1;
    uint32_t bits[all_scores];
    fill_scores(&bits);
    for (int n = 0; n < all_scores; n++) {
        const uint32_t order = order_of_score_bits(bits[n]);
        test_context("score %08x", bits[n]);
        CHECK(order_none < order && order < order_sink);
        CHECK(ranked_key_of(order, last, position_bits) <
              ranked_key_of(order_sink, 0, position_bits));
        CHECK(signed_order_none < signed_order(bits[n]));
        CHECK(key_order(score_of_bits(bits[n]), INT32_MAX) < sink_order(0));
    }
}

/* Both zeros have the bits of +0. NaN, like the absence of a key, has the bits of -inf. */
static void orders_have_the_bits_of_their_scores(void) {
    uint32_t bits[all_scores];
    fill_scores(&bits);
    for (int n = 0; n < all_scores; n++) {
        const float score = score_of_bits(bits[n]);
        const uint32_t want = isnan(score) ? 0xff800000 : score == 0 ? 0 : bits[n];
        test_context("score %08x", bits[n]);
        CHECK_INT(score_bits_of_order(order_of_score_bits(bits[n])), want);
    }
    CHECK_INT(score_bits_of_order(order_none), 0xff800000);
    CHECK_INT(score_bits_of_order(order_nan), 0xff800000);
}

static const test_entry tests[] = {
    TEST(scores_are_in_the_order_of_the_cpu),
    TEST(keys_are_in_the_order_of_the_cpu),
    TEST(sinks_outrank_all_scores_and_all_outrank_none),
    TEST(orders_have_the_bits_of_their_scores),
};

int main(void) { return test_run(tests, TEST_COUNT(tests)); }
