/* Select with a table: the keys of a call compete with the keys in the table. */
#pragma once

#include "core/problem.h"

/* True if the call reads or writes a table. */
static inline bool has_table(const fdma_problem *problem) {
    return is_present(&problem->table_in.score) || is_present(&problem->table_out.score);
}
