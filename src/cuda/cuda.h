/* The CUDA backend for the library's entry points: its kernels and its devices. */
#pragma once

#include "core/kernel.h"

extern const kernel_backend fdma_cuda_backend;

/* The number of CUDA devices; 0 also if there is no driver. */
int32_t fdma_cuda_count(void);

fdma_status fdma_describe_cuda(int32_t device, fdma_device_info *info);

/* Checks that exec.device exists and, in a call, that the tensors and the workspace are in its
 * memory, unless the caller vouches for that. */
fdma_status fdma_check_cuda(const fdma_problem *problem, check_depth depth);

/* The bytes of mask_lists for a problem with attn_mask, and the check that a call has as many. */
size_t fdma_cuda_mask_lists_size(const fdma_problem *problem);
fdma_status fdma_cuda_check_mask_lists(const fdma_problem *problem);

/* Writes the index of fdma_prefill() to memory of the device. */
fdma_status fdma_cuda_list_requests(const fdma_problem *whole);

/* Computes the bias of the given scores of fdma_prefill(), with FDMA_BIAS_EXP. */
fdma_status fdma_cuda_fill_prompt_bias(const fdma_problem *whole);

/* Makes exec.device the current device, unless the caller vouches that it is. `before`: the device
 * that fdma_leave_cuda() restores. */
fdma_status fdma_enter_cuda(const fdma_exec *exec, int *before);
void fdma_leave_cuda(const fdma_exec *exec, int before);

/* Fills memory of a device with a byte, after all work of its default stream, and waits for it. */
fdma_status fdma_fill_cuda(int32_t device, void *data, int byte, size_t bytes);
