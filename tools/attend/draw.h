/* A selection as a picture of characters. */
#ifndef FDMA_TOOLS_ATTEND_DRAW_H
#define FDMA_TOOLS_ATTEND_DRAW_H

#include "fdma.h"

#include <stdio.h>

/*! draw_selection() - which keys (across) each query (down) keeps, batch 0 and kv head 0, within 80
 *  columns and 24 lines, legend included. */
void draw_selection(FILE *stream, const fdma_selection *selection, int64_t q_len, int causal);

/*! live_queries() - how many of the queries first to first + count - 1 keep key `j`.
 *  `expiry` is the key's; with causal a query sees only the keys up to its position. */
int64_t live_queries(const fdma_selection *selection, int64_t j, int32_t expiry, int64_t q_len,
                     int causal, int64_t first, int64_t count);

#endif /* FDMA_TOOLS_ATTEND_DRAW_H */
