/* Select with a table (fdma.h, "Streams") on a device, by kernels that know no tables. */
#pragma once

#include "cuda/device/host.cuh"

size_t fdma_cuda_workspace_with_tables(const fdma_kernel *kernel, const fdma_problem *problem);
fdma_status fdma_cuda_run_with_tables(const fdma_kernel *kernel, const fdma_problem *problem);
