/* Packed sequences, for kernels that do not take `starts`: each sequence is run as a problem of its
 * own. Kernels that take them, and problems that are not packed, are run as they are. */
#pragma once

#include "core/kernel.h"

/* The bytes of workspace that a kernel needs for a problem, packed or not. With check_shapes
 * `starts` is not read, and the bytes are enough for any sequences. */
size_t fdma_kernel_workspace(const fdma_kernel *kernel, const fdma_problem *problem,
                             check_depth depth);

/* Whether a kernel checks the selections of all sequences (only_checks) before it runs on one. */
bool fdma_looks_first(const fdma_kernel *kernel, const fdma_problem *problem);

/* A problem that is then cut into several, which are run one after the other. Each of them adds its
 * rows to dsink_logit, which is cleared here unless the call itself adds to it. */
fdma_problem fdma_prepare_cuts(const fdma_problem *problem, bool only_checks);

/* Whether a problem that was cut out of another has rows or keys. */
bool fdma_cut_has_work(fdma_problem cut);

/* Runs a kernel on a problem, packed or not. Backward looks at the selections of all sequences
 * before it writes the gradients of one. */
fdma_status fdma_run_kernel(const fdma_kernel *kernel, const fdma_problem *problem);
