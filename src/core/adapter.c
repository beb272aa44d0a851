/* Runs a problem through its adapters, and lists the adapters of the CPU. */
#include "core/adapter.h"

#include "core/error.h"

/* Returns the first adapter that applies, or NULL. `inner` becomes the chain behind it. */
static const kernel_adapter *find_adapter(const adapted_kernel *adapted,
                                          const fdma_problem *problem, adapted_kernel *inner) {
    *inner = *adapted;
    while (*inner->adapters != NULL) {
        const kernel_adapter *const adapter = *inner->adapters++;
        if (adapter->applies(adapted->kernel, problem))
            return adapter;
    }
    return NULL;
}

size_t fdma_adapted_workspace(const adapted_kernel *adapted, const fdma_problem *problem,
                              check_depth depth) {
    adapted_kernel inner;
    const kernel_adapter *const adapter = find_adapter(adapted, problem, &inner);
    return adapter != NULL ? adapter->workspace(&inner, problem, depth)
                           : adapted->kernel->workspace(problem);
}

fdma_status fdma_run_adapted(const adapted_kernel *adapted, const fdma_problem *problem) {
    adapted_kernel inner;
    const kernel_adapter *const adapter = find_adapter(adapted, problem, &inner);
    return adapter != NULL ? adapter->run(&inner, problem) : adapted->kernel->run(problem);
}

/* ---- a check before the run ---- */

static bool is_checked_first(const fdma_kernel *kernel, const fdma_problem *problem) {
    return has_trait(kernel, trait_checks_selection) && problem->selected && !problem->only_checks;
}

/* All sequences are checked before the gradients of one are written. */
static fdma_status check_and_run(const adapted_kernel *inner, const fdma_problem *problem) {
    fdma_problem look = *problem;
    look.only_checks = true;
    FDMA_TRY(fdma_run_adapted(inner, &look));
    return fdma_run_adapted(inner, problem);
}

static const kernel_adapter check_adapter = {is_checked_first, fdma_adapted_workspace,
                                             check_and_run};

/* A table of carried keys excludes the others, and kv_used excludes starts. */
const kernel_adapter *const fdma_host_adapters[] = {
    &fdma_stream_adapter, &fdma_pair_sums_adapter, &check_adapter,
    &fdma_used_adapter,   &fdma_packed_adapter,    NULL,
};
