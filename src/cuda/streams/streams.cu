/* What stands between a call on a device and its kernel: keys that do not exist become padding
 * (used.cuh), and carried keys of a selection become the front of a sequence (tables.cuh), for
 * kernels that know neither. Kernels of forward and backward know both, and take mask_lists. */
extern "C" {
#include "core/streams.h"
#include "cuda/cuda.h"
}
#include "cuda/plan/host.cuh"
#include "cuda/streams/tables.cuh"
#include "cuda/streams/used.cuh"

size_t fdma_cuda_mask_lists_size(const fdma_problem *problem) {
    return fdma_cuda_kept_size(problem);
}

fdma_status fdma_cuda_check_mask_lists(const fdma_problem *problem) {
    const fdma_tensor *const lists = &problem->mask_lists;
    const size_t given = is_present(lists) ? (size_t)lists->shape[0] : 0;
    const size_t wanted = fdma_cuda_kept_size(problem);
    FDMA_REQUIRE(given >= wanted, FDMA_INVALID_ARGUMENT,
                 "mask_lists: axis 0 has %zu elements, want %zu or more", given, wanted);
    FDMA_REQUIRE((uintptr_t)lists->data % alignof(uint4) == 0, FDMA_INVALID_ARGUMENT,
                 "mask_lists: is at address %p, want a multiple of %zu", lists->data,
                 alignof(uint4));
    return FDMA_OK;
}

size_t fdma_cuda_workspace(const fdma_kernel *kernel, const fdma_problem *problem) {
    if (fdma_cuda_pads_unused(problem))
        return fdma_cuda_padded_workspace(kernel, problem);
    if (has_table(problem))
        return fdma_cuda_workspace_with_tables(kernel, problem);
    return kernel->workspace(problem);
}

fdma_status fdma_cuda_run_kernel(const fdma_kernel *kernel, const fdma_problem *problem) {
    if (fdma_cuda_pads_unused(problem))
        return fdma_cuda_run_padded(kernel, problem);
    if (has_table(problem))
        return fdma_cuda_run_with_tables(kernel, problem);
    return kernel->run(problem);
}
