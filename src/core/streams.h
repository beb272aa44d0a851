/* Select with a table: the keys of a call compete with those that the table holds. */
#pragma once

#include "core/problem.h"

/* Whether the call reads or writes a table. */
static inline bool has_table(const fdma_problem *problem) {
    return is_present(&problem->table_in.score) || is_present(&problem->table_out.score);
}
