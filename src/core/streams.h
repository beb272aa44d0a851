/* Select with a table: the keys of a call compete with those that the table holds. */
#pragma once

#include "core/kernel.h"

/* Whether the call reads or writes a table. */
static inline bool has_table(const fdma_problem *problem) {
    return is_present(&problem->table_in.score) || is_present(&problem->table_out.score);
}

/* The bytes of workspace that a select kernel needs for a problem with a table. */
size_t fdma_select_stream_workspace(const fdma_kernel *kernel, const fdma_problem *problem);

/* Runs a select kernel on a problem with a table. */
fdma_status fdma_select_stream(const fdma_kernel *kernel, const fdma_problem *problem);
