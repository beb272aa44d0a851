/* What stands between a call on a device and its kernel: keys that do not exist become padding
 * (used.cuh), and carried keys of a selection become the front of a sequence (tables.cuh), for
 * kernels that know neither. Kernels of forward and backward know both. */
extern "C" {
#include "core/streams.h"
#include "cuda/cuda.h"
}
#include "cuda/streams/tables.cuh"
#include "cuda/streams/used.cuh"

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
