/* Sequences of which only the first kv_used keys exist, for kernels that do not take `kv_used`. */
#pragma once

#include "core/kernel.h"

/* The bytes of workspace that a kernel needs for a problem with `kv_used`. With check_shapes
 * `kv_used` is not read, and the bytes are enough for any numbers. */
size_t fdma_used_workspace(const fdma_kernel *kernel, const fdma_problem *problem,
                           check_depth depth);

/* Runs a kernel on a problem with `kv_used`. */
fdma_status fdma_run_used(const fdma_kernel *kernel, const fdma_problem *problem);
