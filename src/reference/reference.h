/* The reference backend: docs/algorithm.md in plain loops. The operations that compute with real
 * numbers are compiled in two precisions; selection and caches have no arithmetic. */
#pragma once

#include "core/element.h"
#include "core/kernel.h"

extern const kernel_table fdma_reference_float32;
extern const kernel_backend fdma_reference_backend;

size_t fdma_reference_select_workspace(const fdma_problem *problem);
fdma_status fdma_reference_select(const fdma_problem *problem);
fdma_status fdma_reference_cache_store(const fdma_problem *problem);
size_t fdma_reference_cache_copy_workspace(const fdma_problem *problem);
fdma_status fdma_reference_cache_copy(const fdma_problem *problem);
