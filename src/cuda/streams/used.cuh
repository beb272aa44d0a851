/* Scores, selections and gradients of scores where only the first kv_used keys of each sequence
 * exist, by kernels that know padding alone. Kernels of lists, forward and backward read kv_used
 * themselves. */
#pragma once

#include "cuda/device/host.cuh"
#include "cuda/device/used.cuh"

/* Whether a kernel gets the keys that do not exist as padding. */
bool fdma_cuda_pads_unused(const fdma_problem *problem);

/* The bytes of workspace that such a call needs. */
size_t fdma_cuda_padded_workspace(const fdma_kernel *kernel, const fdma_problem *problem);

fdma_status fdma_cuda_run_padded(const fdma_kernel *kernel, const fdma_problem *problem);
