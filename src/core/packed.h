/* Problems that adapters cut into several, which are run one after the other. */
#pragma once

#include "core/problem.h"

/* Prepares a problem for cutting. Every cut adds its rows to dsink_logit and its pairs to
 * dattn_bias. Clears both first, dsink_logit only if the call does not add to it. */
fdma_problem fdma_prepare_cuts(const fdma_problem *problem);
