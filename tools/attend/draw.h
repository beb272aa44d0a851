/* A picture of a selection, made of characters. */
#pragma once

#include "fdma.h"

#include <stdbool.h>
#include <stdio.h>

/*! draw_selection() - draws which keys (columns) each query (lines) of batch 0 and kv head 0 keeps,
 *  within 80 columns and 24 lines with the legend. */
void draw_selection(FILE *stream, const fdma_selection *selection, int64_t q_len, bool causal);

/*! live_queries() - how many of the queries from `first` to first + count - 1 keep key `j`, whose
 *  expiry is given. */
int64_t live_queries(const fdma_selection *selection, int64_t j, int32_t expiry, int64_t q_len,
                     bool causal, int64_t first, int64_t count);
