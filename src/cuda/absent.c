/* Stands in for the CUDA backend in a library that is built without it: no kernels, no devices. */
#include "cuda/cuda.h"

#include "core/adapter.h"
#include "core/error.h"

static const kernel_table *const tables[] = {NULL};
static const kernel_adapter *const adapters[] = {NULL};
const kernel_backend fdma_cuda_backend = {.tables = tables, .adapters = adapters};

int32_t fdma_cuda_count(void) { return 0; }

fdma_status fdma_describe_cuda(int32_t device, fdma_device_info *info) {
    (void)info;
    return fdma_fail(FDMA_UNSUPPORTED, "device: is %s, but this library is built without CUDA",
                     fdma_device_text(device).text);
}

fdma_status fdma_check_cuda(const fdma_problem *problem, check_depth depth) {
    (void)depth;
    return fdma_fail(FDMA_UNSUPPORTED, "exec.device: is %s, but this library is built without CUDA",
                     fdma_device_text(problem->exec.device).text);
}

size_t fdma_cuda_mask_lists_size(const fdma_problem *problem) {
    (void)problem;
    return 0;
}

fdma_status fdma_cuda_check_mask_lists(const fdma_problem *problem) {
    return fdma_check_cuda(problem, check_all);
}

fdma_status fdma_cuda_list_requests(const fdma_problem *whole) {
    return fdma_check_cuda(whole, check_all);
}

fdma_status fdma_cuda_fill_prompt_bias(const fdma_problem *whole) {
    return fdma_check_cuda(whole, check_all);
}

fdma_status fdma_fill_cuda(int32_t device, void *data, int byte, size_t bytes) {
    (void)data;
    (void)byte;
    (void)bytes;
    return fdma_fail(FDMA_UNSUPPORTED,
                     "cache: its device is %s, but this library is built without CUDA",
                     fdma_device_text(device).text);
}

fdma_status fdma_enter_cuda(const fdma_exec *exec, int *before) {
    (void)before;
    return fdma_fail(FDMA_UNSUPPORTED, "exec.device: is %s, but this library is built without CUDA",
                     fdma_device_text(exec->device).text);
}

void fdma_leave_cuda(const fdma_exec *exec, int before) {
    (void)exec;
    (void)before;
}
