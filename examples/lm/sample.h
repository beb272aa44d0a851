/* Choosing the next byte from its logits. */
#pragma once

#include <stdint.h>

typedef struct sampling {
    double temperature; /* logits are divided by it; 0: always the byte of the highest logit */
    double top_p;       /* the likeliest bytes whose probabilities reach this sum; 1: all */
    double min_p;    /* bytes whose probability is at least this fraction of the largest; 0: all */
    uint64_t random; /* state of the random numbers, initially a seed; it changes with each */
} sampling;

/*! choose_byte() - from logits [256]. Of equal logits the lower byte comes first. */
uint8_t choose_byte(const float *logits, sampling *how);
