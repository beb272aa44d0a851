/* The cases of `fdma check`: the lines of tests/cases.def and what they imply. */
#pragma once

#include "check/tensor.h"

#include <stdbool.h>

typedef enum check_mask {
    MASK_FULL,   /* every query sees every valid key */
    MASK_CAUSAL, /* causal masking, causal scope */
    MASK_GLOBAL, /* causal masking, global scope */
} check_mask;

typedef enum check_scores {
    SCORES_IID,
    SCORES_TIED,
    SCORES_RISING,
    SCORES_FALLING,
    SCORES_CLIMB,
    SCORES_DIVE,
    SCORES_SAW,
    SCORES_STEPS,
    SCORES_CROWN,
    SCORES_SPECIAL,
} check_scores;

typedef enum check_padding {
    PADDING_NONE,
    PADDING_LEFT,
    PADDING_RIGHT,
    PADDING_HOLES,
    PADDING_ALL, /* sequence 0 has no valid key */
} check_padding;

typedef struct check_case {
    const char *name;
    int64_t batch, q_len, kv_len, q_heads, kv_heads, head_dim;
    int64_t window; /* -1: dense */
    check_mask mask;
    fdma_bias_form bias_form;
    double softcap;
    check_scores scores;
    check_layout layout;
    check_padding padding;
    int64_t recent, sinks;
    int64_t sequences; /* packed; -1: none are */
} check_case;

int check_case_count(void);
const check_case *check_case_at(int index);

bool check_is_selected(const check_case *test);
bool check_is_causal(const check_case *test);
fdma_scope check_scope(const check_case *test);
bool check_is_packed(const check_case *test);

/*! check_has_dt_bias() - half of the cases have one, found by their seed. */
bool check_has_dt_bias(const check_case *test);

/*! check_has_sink_logit() - a third of the cases have sink logits, found by their seed. */
bool check_has_sink_logit(const check_case *test);

/*! check_dropout() - of a fifth of the cases, found by their seed; of the others 0. */
double check_dropout(const check_case *test);

/*! check_gap() - of a third of the cases in causal scope, found by their seed; of the others 0. */
double check_gap(const check_case *test);

/*! check_has_rng_state() - half of the cases have dropout's seed and offset in memory. */
bool check_has_rng_state(const check_case *test);

/*! check_page_len() - rows of a page of the case's caches, found by its seed; 0: no pages. */
int64_t check_page_len(const check_case *test);

/*! check_start() - where packed sequence n starts; n = sequences: where the last one ends. */
int64_t check_start(const check_case *test, int64_t n);

bool check_key_is_valid(const check_case *test, int64_t b, int64_t j);

/*! check_seed() - a seed for the random numbers of the case, made from its name. */
uint64_t check_seed(const check_case *test);
