/* See check_call.h. */
#include "check/call.h"

#include "commands.h"
#include "common/device.h"

#include <stdio.h>
#include <stdlib.h>

int32_t call_device(const check_problem *problem, const char *kernel) {
    return runs_on(kernel, 0) ? 0 : problem->device;
}

fdma_tensor call_place(call_tensors *call, fdma_tensor host) {
    if (call->count == call_tensor_limit) {
        fprintf(stderr, "fdma check: a call has more than %d tensors\n", call_tensor_limit);
        exit(EXIT_FAILED);
    }
    const fdma_tensor placed = device_copy_of(call->device, &host);
    call->tensor[call->count++] = placed;
    return placed;
}

fdma_selection call_selection(call_tensors *call, const check_problem *problem) {
    fdma_selection selection = problem->selection;
    selection.expiry = call_place(call, problem->selection.expiry);
    selection.slot = call_place(call, problem->selection.slot);
    return selection;
}

void call_workspace(call_tensors *call, fdma_exec *exec, size_t bytes) {
    call->workspace = call->device ? device_allocate(call->device, bytes) : NULL;
    exec->workspace = call->device ? call->workspace : check_alloc(1, bytes);
    exec->workspace_size = bytes;
}

void call_leave(const call_tensors *call) {
    for (int i = 0; i < call->count; i++) {
        device_release(call->device, &call->tensor[i]);
    }
    if (call->workspace != NULL) {
        device_free(call->device, call->workspace);
    }
}
