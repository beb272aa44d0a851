/* The number of threads that pay off for moving rows of a cache. */
#pragma once

#include "cpu/common/memory.h"
#include "cpu/parallel.h"

/* Approximate work of one thread in a microsecond: positions or expiries that are read, and bytes
 * of k and v that are moved. */
enum { seen_keys = 1000, moved_bytes = 5000 };

static inline int32_t threads_to_move(const fdma_problem *problem, int64_t tasks, int64_t keys,
                                      int64_t rows) {
    const int64_t row_bytes = 2 * problem->head_dim * (int64_t)fdma_dtype_size(problem->dtype);
    return fdma_worthwhile_threads(problem->exec.threads, tasks,
                                   keys / seen_keys + rows * row_bytes / moved_bytes);
}
