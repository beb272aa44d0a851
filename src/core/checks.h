#pragma once

#include "core/problem.h"
#include "core/tensor.h"

/* Checks the tensors of a problem whose options are set. Fills in dtype, sizes and the fields that
 * follow from them. */
fdma_status fdma_settle_problem(fdma_problem *problem, check_depth depth);

/* Checks the slots of a selection in the host's memory, for the operation that relies on them:
 * fdma_cache_store(). */
fdma_status fdma_check_slots(const fdma_problem *problem);

/* True if an output has elements; otherwise there is nothing to run. */
bool fdma_has_work(const fdma_problem *problem);

/* fdma_has_work() for a cut of another problem: dsink_logit and dattn_bias, to which all cuts add,
 * do not count. */
bool fdma_cut_has_work(const fdma_problem *cut);

typedef struct named_tensor {
    const char *name;
    const fdma_tensor *tensor;
    bool output;
} named_tensor;

/* Checks that no output shares an element with another tensor, and that no tensor overlaps the
 * workspace. */
fdma_status fdma_check_overlaps(const named_tensor *tensors, size_t count, const fdma_exec *exec);
