/* A call as its steps: those of a fused call, or the one of any other. */
#pragma once

#include "core/kernel.h"

enum { most_steps = 3 };

typedef struct call_steps {
    fdma_problem whole;             /* the call */
    fdma_problem split[most_steps]; /* the steps that it is split into, if it is */
    fdma_problem *problems;         /* of the steps, in the order in which they run */
    int count;
    size_t lent;    /* bytes of workspace that the caller lends */
    size_t scratch; /* of these, what passes between the steps */
} call_steps;

/* Makes the steps of the call. Tensors that the caller did not ask for are taken from the
 * workspace, and each step may use the rest of it. `backend` serves exec.device. */
fdma_status fdma_split_call(const kernel_backend *backend, call_steps *steps);

/* Tells the steps of a call which kernel of select has been chosen: forward works from what that
 * kernel writes. */
void fdma_link_select(const fdma_kernel *select, call_steps *steps);
