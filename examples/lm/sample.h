/* Choosing the next byte from its logits. */
#pragma once

#include <stdint.h>

enum { LOOP = 24, LOOP_WITHIN = 400 }; /* bytes */

typedef struct sampling {
    double temperature; /* logits are divided by it; 0: always the byte of the highest logit */
    double top_p;       /* the likeliest bytes whose probabilities reach this sum; 1: all */
    double min_p;    /* bytes whose probability is at least this fraction of the largest; 0: all */
    uint64_t random; /* state of the random numbers, initially a seed; it changes with each */
    uint8_t written[LOOP_WITHIN]; /* the newest bytes that were chosen */
    int count;                    /* their number */
} sampling;

/*! choose_byte() - from logits [256]. Of equal logits the lower byte comes first.
 *  With a temperature above 0 a text does not go round in circles: if the last LOOP bytes occur
 *  before in the last LOOP_WITHIN, the byte that followed them there is not chosen. */
uint8_t choose_byte(const float *logits, sampling *how);
