/* The kernels "reference": docs/algorithm.md in plain loops and double precision. Every other
 * kernel is checked against them. They alone support float64. */
#include "reference/kernels.h"

static const fdma_kernel kernels[] = {
    REAL_KERNELS,
    KERNEL(select, fdma_reference_select_workspace, fdma_reference_select),
    KERNEL(cache_store, no_workspace, fdma_reference_cache_store),
    KERNEL(cache_copy, fdma_reference_cache_copy_workspace, fdma_reference_cache_copy),
};

static const kernel_table table = {kernels, sizeof kernels / sizeof kernels[0]};
static const kernel_table *const tables[] = {&table, &fdma_reference_float32, NULL};
const kernel_backend fdma_reference_backend = {.tables = tables, .adapters = fdma_host_adapters};
