/* cases.h - tests/cases.def as problems: each case's shape, options, order of scores and padding,
 * with random tensors. `fdma check` tests the steep orders and the special values; here they are
 * random. */
#pragma once

#include "problem.h"

enum { MASK_FULL, MASK_CAUSAL, MASK_GLOBAL };

typedef enum score_order {
    SCORES_IID,
    SCORES_TIED,   /* a sliding window */
    SCORES_RISING, /* a sliding window, too */
    SCORES_FALLING,
    SCORES_SAW,
    SCORES_STEPS,
    SCORES_CROWN,
    SCORES_CLIMB = SCORES_IID,
    SCORES_DIVE = SCORES_IID,
    SCORES_SPECIAL = SCORES_IID,
} score_order;

typedef enum case_padding {
    PADDING_NONE,
    PADDING_LEFT,
    PADDING_RIGHT,
    PADDING_HOLES,
    PADDING_ALL,
} case_padding;

typedef struct shape_case {
    const char *name;
    problem sizes; /* no tensors yet */
    fdma_bias_form bias_form;
    score_order scores;
    case_padding padding;
} shape_case;

#define SHAPE_RULES(case_name, n_batch, n_q, n_kv, n_q_heads, n_kv_heads, n_dim, n_window, mask,   \
                    form, cap, order, layout, pad, n_recent, n_sinks)                              \
    {.name = case_name,                                                                            \
     .sizes = {.batch = n_batch,                                                                   \
               .q_len = n_q,                                                                       \
               .kv_len = n_kv,                                                                     \
               .q_heads = n_q_heads,                                                               \
               .kv_heads = n_kv_heads,                                                             \
               .head_dim = n_dim,                                                                  \
               .window = n_window,                                                                 \
               .recent = n_recent,                                                                 \
               .sinks = n_sinks,                                                                   \
               .scope = MASK_##mask == MASK_CAUSAL ? FDMA_SCOPE_CAUSAL : FDMA_SCOPE_GLOBAL,        \
               .causal = MASK_##mask != MASK_FULL,                                                 \
               .softcap = cap},                                                                    \
     .bias_form = FDMA_BIAS_##form,                                                                \
     .scores = SCORES_##order,                                                                     \
     .padding = PADDING_##pad}

#define SHAPE(...) SHAPE_RULES(__VA_ARGS__, 0, 0)

static const shape_case cases[] = {
#define CASE_PACKED(...) /* test_sequences.c has cases of its own */
#define CASE_PAIRS(...)  /* test_masks.c has cases of its own */
#define CASE_RULES(...) SHAPE_RULES(__VA_ARGS__),
#define CASE(...) SHAPE(__VA_ARGS__),
#include "../cases.def"
#undef CASE
#undef CASE_RULES
#undef CASE_PACKED
#undef CASE_PAIRS
};

static inline float case_score(score_order order, int64_t j, float random) {
    switch (order) {
    case SCORES_TIED:
        return 0.5F;
    case SCORES_RISING:
        return (float)j / 64;
    case SCORES_FALLING:
        return -(float)j / 64;
    case SCORES_SAW: // keys arrive and leave within a few positions
        return (float)(j * 5 % 7) / 4;
    case SCORES_STEPS:
        return floorf(2 * random) / 2;
    case SCORES_CROWN:
        return j == 0 ? 3 : (float)(j % 2);
    default:
        return random;
    }
}

/* As in `fdma check`. In cases without padding every eleventh key is invalid if `seed` is even, and
 * none if it is odd. */
static inline int case_key_is_valid(const shape_case *n, uint64_t seed, int64_t b, int64_t j) {
    const int64_t kv_len = n->sizes.kv_len, padded = kv_len * (b + 1) / (n->sizes.batch + 2);
    switch (n->padding) {
    case PADDING_LEFT:
        return j >= padded;
    case PADDING_RIGHT:
        return j < kv_len - padded;
    case PADDING_HOLES:
        return (j * 7 + b) % 5 > 1;
    case PADDING_ALL:
        return b > 0 && j >= padded;
    default:
        return seed % 2 || (b * kv_len + j) % 11 != 3;
    }
}

/* The bias is the score for every bias form. */
static inline problem shape_problem(const shape_case *n, uint64_t seed, fdma_dtype dtype) {
    problem x = n->sizes;
    x.dtype = dtype;
    problem_fill(&x, seed);
    x.key_valid = new_tensor(FDMA_UINT8, x.batch, x.kv_len, -1, -1);
    float *const score = x.score.data, *const bias = x.bias.data;
    for (int64_t i = 0; i < count_of(x.score); i++)
        bias[i] = score[i] = case_score(n->scores, i % x.kv_len, score[i]);
    for (int64_t i = 0; i < count_of(x.key_valid); i++) {
        ((uint8_t *)x.key_valid.data)[i] =
            (uint8_t)case_key_is_valid(n, seed, i / x.kv_len, i % x.kv_len);
    }
    problem_select(&x);
    return x;
}

static inline problem case_problem(int index, fdma_dtype dtype) {
    return shape_problem(&cases[index], (uint64_t)index + 100, dtype);
}

static inline int find_case(const char *name) {
    for (int index = 0; index < TEST_COUNT(cases); index++)
        if (strcmp(cases[index].name, name) == 0)
            return index;
    printf("tests/cases.def has no case %s\n", name);
    exit(1);
}

/* ---- cases with keys that no query keeps ---- */

static const char *const unread_cases[] = {
    "later/steps", "long/rising",    "head-dim/8",      "global/causal",  "global/full",
    "row/group-8", "row/left",       "row/window-1",    "window/1",       "padding/holes",
    "row/holes",   "dense/pad-left", "dense/pad-holes", "global/padding", "row/long",
};

static inline problem unread_problem(const char *name, fdma_dtype dtype) {
    return case_problem(find_case(name), dtype);
}

/* Reads eight bytes of out at a time, because the fill pattern of outputs is a valid 16-bit
 * number. */
static inline void check_written(fdma_tensor tensor) {
    const unsigned char *data = tensor.data;
    const size_t size = tensor.rank == 4 ? 8 : sizeof(float);
    unsigned char unwritten[8];
    memset(unwritten, test_guard_byte, sizeof unwritten);
    for (size_t at = 0; at < bytes_of(tensor); at += size)
        if (!CHECK(memcmp(data + at, unwritten, size) != 0))
            return;
}
