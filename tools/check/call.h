/* One call of `fdma check`, on the device of its kernel: tensors are copied there and outputs back.
 * On the CPU the tensors are used in place. */
#ifndef FDMA_TOOLS_CHECK_CALL_H
#define FDMA_TOOLS_CHECK_CALL_H

#include "check/problem.h"

enum { call_tensor_limit = 16 };

typedef struct check_call {
    const check_problem *problem;
    fdma_exec exec;
    int count;
    fdma_tensor copies[call_tensor_limit];  /* what the call is given */
    fdma_tensor outputs[call_tensor_limit]; /* where its outputs are wanted; rank 0 for inputs */
} check_call;

/*! call_begin() - a call of that kernel. The reference runs on the CPU, whatever the problem's
 *  device is. */
check_call call_begin(const check_problem *problem, const char *kernel);

/*! call_input(), call_output() - the tensor that the call is to be given for this host tensor. An
 *  output is copied there too, because a call may leave elements alone. */
fdma_tensor call_input(check_call *call, fdma_tensor host);
fdma_tensor call_output(check_call *call, fdma_tensor host);

/*! call_selection() - the problem's selection, for the call. */
fdma_selection call_selection(check_call *call);

/*! call_give_workspace() - sets the workspace of `exec`, the one in the call's argument struct.
 *  `status` is that of the query for its size; returns whether the call can be made. */
bool call_give_workspace(check_call *call, fdma_exec *exec, fdma_status status, size_t bytes);

/*! call_end() - waits, brings the outputs back and frees what the call had on a device. Returns
 *  `status`. */
fdma_status call_end(check_call *call, fdma_status status);

#endif /* FDMA_TOOLS_CHECK_CALL_H */
