/* Choosing the next byte from its logits. */
#pragma once

#include "common/sample.h"

enum { LOOP = 24, LOOP_WITHIN = 400 }; /* bytes */

typedef struct byte_sampling {
    sampling by;
    uint8_t written[LOOP_WITHIN]; /* the newest bytes that were chosen */
    int count;                    /* their number */
} byte_sampling;

/*! choose_byte() - from logits [256]. Of equal logits the lower byte comes first.
 *  With a temperature above 0 a text does not go round in circles: if the last LOOP bytes occur
 *  before in the last LOOP_WITHIN, the byte that followed them there is not chosen. */
uint8_t choose_byte(const float *logits, byte_sampling *how);
