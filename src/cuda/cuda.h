/* The CUDA backend: its rows, its devices, and the way into them. */
#ifndef FDMA_CUDA_CUDA_H
#define FDMA_CUDA_CUDA_H

#include "core/plan.h"

extern const kernel_table *const fdma_cuda_tables[];

/* CUDA devices; 0 also where there is no driver. */
int32_t fdma_cuda_count(void);

/* Of exec.device `device`, which is at least 1. */
fdma_status fdma_describe_cuda(int32_t device, fdma_device_info *info);

/* That exec.device is there and, in a call, that its tensors and workspace are not elsewhere. */
fdma_status fdma_check_cuda(const fdma_problem *problem, check_depth depth);

/* Runs a row of this backend with the problem's device current, and the caller's again after. */
fdma_status fdma_run_cuda(const fdma_kernel *row, const fdma_problem *problem);

#endif
