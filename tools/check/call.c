/* See check/call.h. */
#include "check/call.h"

#include "commands.h"
#include "common/device.h"
#include "common/text.h"

#include <stdlib.h>

check_call call_begin(const check_problem *problem, const char *kernel) {
    const int32_t device = runs_on(kernel, 0) ? 0 : problem->device;
    return (check_call){.problem = problem, .exec = {.kernel = kernel, .device = device}};
}

static fdma_tensor add_tensor(check_call *call, fdma_tensor host, fdma_tensor output) {
    if (call->count == call_tensor_limit) {
        print_error("fdma check: a call has more than %d tensors", call_tensor_limit);
        exit(EXIT_FAILED);
    }
    const fdma_tensor copy = device_copy_of(call->exec.device, &host);
    call->outputs[call->count] = output;
    call->copies[call->count++] = copy;
    return copy;
}

fdma_tensor call_input(check_call *call, fdma_tensor host) {
    return add_tensor(call, host, (fdma_tensor){0});
}

fdma_tensor call_output(check_call *call, fdma_tensor host) { return add_tensor(call, host, host); }

fdma_selection call_selection(check_call *call) {
    fdma_selection selection = call->problem->selection;
    selection.expiry = call_input(call, selection.expiry);
    selection.slot = call_input(call, selection.slot);
    return selection;
}

bool call_give_workspace(check_call *call, fdma_exec *exec, fdma_status status, size_t bytes) {
    const int32_t device = call->exec.device;
    if (status != FDMA_OK)
        return false;
    exec->workspace = device > 0 ? device_allocate(device, bytes) : check_alloc(1, bytes);
    exec->workspace_size = bytes;
    call->exec.workspace = exec->workspace;
    return true;
}

fdma_status call_end(check_call *call, fdma_status status) {
    const int32_t device = call->exec.device;
    device_wait(device);
    for (int i = 0; i < call->count; i++) {
        device_fetch(device, &call->outputs[i], &call->copies[i]);
        device_release(device, &call->copies[i]);
    }
    if (device > 0 && call->exec.workspace != NULL)
        device_free(device, call->exec.workspace);
    return status;
}
