/* One call of an operation with the problem's tensors, by the kernel of that name, on its device:
 * tensors are copied there and outputs back. On the CPU they are used in place. */
#pragma once

#include "check/problem.h"

/*! check_takes() - whether a kernel takes the call. Copies nothing to the device. */
bool check_takes(const check_problem *problem, check_operation_id id, const char *kernel,
                 const fdma_tensor *outputs);

/*! check_run() - `outputs` are the caller's, in host memory, in the order of core/signatures.c. If
 *  the status is not FDMA_OK, fdma_last_error() says why. The reference runs on the CPU, for every
 *  device of the problem. */
fdma_status check_run(const check_problem *problem, check_operation_id id, const char *kernel,
                      const fdma_tensor *outputs);
