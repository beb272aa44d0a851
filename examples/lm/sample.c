/* See sample.h. */
#include "sample.h"

#include "model.h"

#include <math.h>
#include <string.h>

static void forbid_loops(const byte_sampling *how, float *logits) {
    const uint8_t *const last = how->written + how->count - LOOP;
    for (const uint8_t *at = how->written; at < last; at++)
        if (memcmp(at, last, LOOP) == 0)
            logits[at[LOOP]] = -INFINITY;
}

static void append(byte_sampling *how, uint8_t byte) {
    if (how->count == LOOP_WITHIN)
        memmove(how->written, how->written + 1, (size_t)--how->count);
    how->written[how->count++] = byte;
}

uint8_t choose_byte(const float *logits, byte_sampling *how) {
    float allowed[BYTE_VALUES];
    memcpy(allowed, logits, sizeof allowed);
    if (how->by.temperature > 0 && how->count > LOOP)
        forbid_loops(how, allowed);
    const uint8_t byte = (uint8_t)choose_token(allowed, BYTE_VALUES, &how->by);
    append(how, byte);
    return byte;
}
