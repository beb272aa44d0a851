/* A call of `fdma check` where it runs: copies of its tensors on the device where that is one, and
 * its workspace. */
#ifndef FDMA_TOOLS_CHECK_CALL_H
#define FDMA_TOOLS_CHECK_CALL_H

#include "check/check.h"

enum { call_tensor_limit = 16 };

typedef struct call_tensors {
    int32_t device;
    fdma_tensor tensor[call_tensor_limit];
    void *workspace;
    int count;
} call_tensors;

/* Where a kernel's calls run: the reference is of the CPU, whatever the problem's device. */
int32_t call_device(const check_problem *problem, const char *kernel);

/* The tensor as the call gets it: itself on the CPU, else a copy. */
fdma_tensor call_place(call_tensors *call, fdma_tensor host);

/* The problem's selection, placed. */
fdma_selection call_selection(call_tensors *call, const check_problem *problem);

void call_workspace(call_tensors *call, fdma_exec *exec, size_t bytes);

/* Frees what the call had on the device. */
void call_leave(const call_tensors *call);

#endif /* FDMA_TOOLS_CHECK_CALL_H */
