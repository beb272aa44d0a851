/* A call as its steps: those of a fused call, or the one of any other. */
#pragma once

#include "core/kernel.h"

enum { most_steps = 3 };

typedef struct call_steps {
    fdma_problem problems[most_steps]; /* in the order in which they run */
    int count;
    size_t lent;    /* bytes of workspace that the caller lends */
    size_t scratch; /* of these, what passes between the steps */
} call_steps;

/* Replaces problems[0], if it is a fused call, by its steps. Tensors that the caller did not ask
 * for are taken from the workspace, and each step may use the rest of it. */
fdma_status fdma_split_call(call_steps *steps);

/* Has a selection be in expiry and slot, where its kernel does not write last_keys. */
void fdma_drop_last_keys(call_steps *steps);
