/* See check/case.h. */
#include "check/case.h"

static const check_case cases[] = {
#define SHAPE(name, batch, q_len, kv_len, q_heads, kv_heads, head_dim, window, mask, bias_form,    \
              softcap, scores, layout, padding, recent, sinks, sequences)                          \
    {name,                                                                                         \
     batch,                                                                                        \
     q_len,                                                                                        \
     kv_len,                                                                                       \
     q_heads,                                                                                      \
     kv_heads,                                                                                     \
     head_dim,                                                                                     \
     window,                                                                                       \
     MASK_##mask,                                                                                  \
     FDMA_BIAS_##bias_form,                                                                        \
     softcap,                                                                                      \
     SCORES_##scores,                                                                              \
     LAYOUT_##layout,                                                                              \
     PADDING_##padding,                                                                            \
     recent,                                                                                       \
     sinks,                                                                                        \
     sequences},
#define CASE_PAIRS(...) SHAPE(__VA_ARGS__)
#define CASE_PACKED(...) SHAPE(__VA_ARGS__)
#define CASE_RULES(...) SHAPE(__VA_ARGS__, -1)
#define CASE(...) SHAPE(__VA_ARGS__, 0, 0, -1)
#include "cases.def"
#undef CASE
#undef CASE_RULES
#undef CASE_PACKED
#undef CASE_PAIRS
};

int check_case_count(void) { return sizeof cases / sizeof cases[0]; }

const check_case *check_case_at(int index) { return &cases[index]; }

bool check_is_selected(const check_case *test) { return test->window >= 0; }

bool check_is_causal(const check_case *test) { return test->mask != MASK_FULL; }

fdma_scope check_scope(const check_case *test) {
    return test->mask == MASK_CAUSAL ? FDMA_SCOPE_CAUSAL : FDMA_SCOPE_GLOBAL;
}

bool check_is_packed(const check_case *test) { return test->sequences >= 0; }

bool check_has_dt_bias(const check_case *test) { return check_seed(test) % 2 != 0; }

bool check_has_sink_logit(const check_case *test) { return check_seed(test) % 3 == 0; }

double check_dropout(const check_case *test) {
    static const double probabilities[] = {0.1, 0.5, 0.9, 0.2};
    const uint64_t seed = check_seed(test) >> 8;
    // with one key alone, gradients of logits are nothing but rounding errors
    return test->kv_len > 1 && seed % 5 == 0 ? probabilities[seed / 5 % 4] : 0;
}

double check_gap(const check_case *test) {
    static const double gaps[] = {1, 2, 4, 0.4};
    const uint64_t seed = check_seed(test) >> 16;
    const bool has_gap = check_is_selected(test) && test->mask == MASK_CAUSAL && seed % 3 == 0;
    return has_gap ? gaps[seed / 3 % 4] : 0;
}

bool check_has_rng_state(const check_case *test) { return check_seed(test) >> 40 & 1; }

int64_t check_page_len(const check_case *test) {
    const uint64_t seed = check_seed(test) / 2;
    return seed % 2 != 0 ? INT64_C(1) << seed / 2 % 6 : 0;
}

int64_t check_start(const check_case *test, int64_t n) {
    const int64_t count = test->sequences, end = test->kv_len - (count % 2 != 0 ? 3 : 0);
    return count > 0 ? end * n * n / (count * count) : 0;
}

bool check_key_is_valid(const check_case *test, int64_t b, int64_t j) {
    const int64_t padding = test->kv_len * (b + 1) / (test->batch + 2);
    switch (test->padding) {
    case PADDING_LEFT:
        return j >= padding;
    case PADDING_RIGHT:
        return j < test->kv_len - padding;
    case PADDING_HOLES:
        return (j * 7 + b) % 5 > 1;
    case PADDING_ALL:
        return b > 0 && j >= padding;
    default:
        return true;
    }
}

uint64_t check_seed(const check_case *test) {
    uint64_t seed = 0xcbf29ce484222325U; // FNV-1a
    for (const char *c = test->name; *c != '\0'; c++)
        seed = (seed ^ (unsigned char)*c) * 0x100000001b3U;
    return seed;
}
