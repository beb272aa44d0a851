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

/* Adds a step with all options of `whole`, and with its tensors that `operation` has. */
fdma_status fdma_add_step(call_steps *steps, const fdma_problem *whole, fdma_operation operation);

/* One float per new key and kv head, float64 in float64 calls, otherwise float32. None for carried
 * keys. */
fdma_tensor fdma_take_key_floats(fdma_arena *arena, const fdma_problem *whole);

/* One int32 per key, carried keys included. */
fdma_tensor fdma_take_key_ints(fdma_arena *arena, const fdma_problem *whole);

/* Tells the steps which kernel of select was chosen, because forward reads what that kernel
 * writes. */
void fdma_link_select(const fdma_kernel *select, call_steps *steps);
