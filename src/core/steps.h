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
 * for are taken from the workspace, and each step may use the rest of it. `backend`: of exec.device. */
fdma_status fdma_split_call(const kernel_backend *backend, call_steps *steps);

/* Tells the steps of a call which kernel of select has been chosen: forward works from what that
 * kernel writes. */
void fdma_link_select(const fdma_kernel *select, call_steps *steps);
