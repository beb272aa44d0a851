/* A call as a list of steps. Most calls have one step. */
#pragma once

#include "core/kernel.h"

enum { most_steps = 3 };

typedef struct call_steps {
    fdma_problem whole;             /* the call */
    fdma_problem split[most_steps]; /* its steps, if it is split */
    fdma_problem *problems;         /* the steps, in the order of their runs */
    int count;
    size_t lent;    /* bytes of workspace that the caller lends */
    size_t scratch; /* bytes of it for tensors between the steps */
} call_steps;

/* Makes the steps of the call. Tensors that the caller did not ask for are taken from the
 * workspace, and each step may use the rest of it. `backend` serves exec.device. */
fdma_status fdma_split_call(const kernel_backend *backend, call_steps *steps);

/* Tells the steps which kernel of select was chosen, because forward reads what that kernel
 * writes. */
void fdma_link_select(const fdma_kernel *select, call_steps *steps);
