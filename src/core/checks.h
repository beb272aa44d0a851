/* The checks of a problem's tensors and sizes. */
#pragma once

#include "core/problem.h"

/* Checks the tensors of a problem that has its options, and adds the dtype, the sizes and what
 * follows from them. */
fdma_status fdma_settle_problem(fdma_problem *problem, check_depth depth);

/* Checks the slots of a selection in the host's memory, for the operations that rely on them:
 * fdma_lists() and fdma_cache_store(). */
fdma_status fdma_check_slots(const fdma_problem *problem);

/* Whether any output has elements: if not, there is nothing to run. */
bool fdma_has_work(const fdma_problem *problem);

/* The same of a problem that is cut out of another: dsink_logit and dattn_bias, to which all cuts
 * add, do not count. */
bool fdma_cut_has_work(const fdma_problem *cut);
