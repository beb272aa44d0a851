/* Problems that adapters cut into several, which are run one after the other. */
#pragma once

#include "core/problem.h"

/* The problem that is cut. Each of its cuts adds its rows to dsink_logit and its pairs to
 * dattn_bias, which are cleared here unless the call itself adds to them. */
fdma_problem fdma_prepare_cuts(const fdma_problem *problem);
