/* Choosing the next token from its logits. */
#pragma once

#include <stdint.h>

typedef struct sampling {
    double temperature; /* logits are divided by it; 0: always the token of the highest logit */
    int64_t top_k;      /* the likeliest so many tokens; 0: all */
    double top_p;       /* the likeliest of these whose probabilities reach this sum; 1: all */
    double min_p;    /* tokens whose probability is at least this fraction of the largest; 0: all */
    uint64_t random; /* state of the random numbers, initially a seed; it changes with each */
} sampling;

/*! choose_token() - from logits [count]. Of equal logits the lower token comes first. */
int32_t choose_token(const float *logits, int64_t count, sampling *how);
