/* scores.h - scores of every kind for the tests of selection, and padding. */
#pragma once

#include "calls.h"

typedef enum score_kind {
    kind_iid,
    kind_few_values,
    kind_equal,
    kind_rising,
    kind_falling,
    kind_rising_steps,
    kind_falling_steps,
    kind_sawtooth,
    kind_long_sawtooth,
    kind_nan,
    kind_some_nan,
    kind_low,
    kind_infinite,
    kind_zeros,
    kind_subnormal, /* kernels neither flush these nor rank them as zero */
    kind_any_bits,  /* any bits, such as quiet and signalling NaN */
    kind_count,
} score_kind;

static const char *const kind_names[kind_count] = {
    "iid",           "few values", "equal",         "rising",  "falling",  "rising steps",
    "falling steps", "sawtooth",   "long sawtooth", "all NaN", "some NaN", "all -inf",
    "infinite",      "zeros",      "subnormal",     "any bits"};

static inline float score_of(score_kind kind, int64_t j, uint64_t *state) {
    static const float ends[] = {INFINITY, -INFINITY, NAN, -NAN, 3e38F, -3e38F, 0};
    const uint32_t sign = (uint32_t)random_below(state, 2) << 31;
    switch (kind) {
    case kind_few_values:
        return (float)random_below(state, 3);
    case kind_equal:
        return 1;
    case kind_rising:
        return (float)j;
    case kind_falling:
        return (float)-j;
    case kind_rising_steps:
        return (float)(j / 5);
    case kind_falling_steps:
        return -(float)(j / 5);
    case kind_sawtooth:
        return (float)(j % 7);
    case kind_long_sawtooth:
        return (float)(j % 1021);
    case kind_nan:
        return sign ? NAN : -NAN;
    case kind_some_nan:
        return random_below(state, 3) ? random_float(state) : NAN;
    case kind_low:
        return -INFINITY;
    case kind_infinite:
        return ends[random_below(state, TEST_COUNT(ends))];
    case kind_zeros:
        return bits_to_float(sign);
    case kind_subnormal:
        return bits_to_float(sign | (uint32_t)random_below(state, 6));
    case kind_any_bits:
        return bits_to_float((uint32_t)(random_bits(state) >> 32));
    default:
        return random_float(state);
    }
}

/* Scores [batch, kv_heads, kv_len], each row contiguous. */
static inline void fill_kind(fdma_tensor score, score_kind kind, uint64_t *state) {
    for (int64_t row = 0; row < score.shape[0] * score.shape[1]; row++)
        for (int64_t j = 0; j < score.shape[2]; j++)
            ((float *)score.data)[row * score.stride[1] + j] = score_of(kind, j, state);
}

/* Changes to another kind after about every `length` keys. */
static inline void fill_kinds(fdma_tensor score, int64_t length, uint64_t *state) {
    score_kind kind = kind_iid;
    for (int64_t row = 0; row < score.shape[0] * score.shape[1]; row++) {
        for (int64_t j = 0; j < score.shape[2]; j++) {
            if (random_below(state, length) == 0)
                kind = (score_kind)random_below(state, kind_count);
            ((float *)score.data)[row * score.stride[1] + j] = score_of(kind, j, state);
        }
    }
}

/* Padding at the left or none, and padding at random positions, from none to nearly all. */
static inline fdma_tensor new_padding(int64_t batch, int64_t kv_len, uint64_t *state) {
    const fdma_tensor valid = new_tensor(FDMA_UINT8, batch, kv_len, -1, -1);
    for (int64_t b = 0; b < batch; b++) {
        const int64_t left = random_below(state, 2) * random_below(state, kv_len + 1);
        const int64_t kept = 1 + random_below(state, 8);
        for (int64_t j = 0; j < kv_len; j++) {
            const bool is_valid = j >= left && random_below(state, 8) < kept;
            ((uint8_t *)valid.data)[b * kv_len + j] = (uint8_t)(is_valid ? 1 + j % 255 : 0);
        }
    }
    return valid;
}
