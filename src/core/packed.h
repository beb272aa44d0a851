/* Packed sequences, for kernels that know no `starts`: each sequence is a problem of its own. */
#pragma once

#include "core/kernel.h"

/* The bytes of workspace that a kernel needs for a problem, packed or not. check_shapes: whatever
 * `starts` holds. */
size_t fdma_kernel_workspace(const fdma_kernel *kernel, const fdma_problem *problem,
                             check_depth depth);

/* Runs a kernel on a problem, packed or not. */
fdma_status fdma_run_kernel(const fdma_kernel *kernel, const fdma_problem *problem);
