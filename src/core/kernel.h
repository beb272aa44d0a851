/* Kernels as table rows, the choice among them, and the carving of workspace. */
#ifndef FDMA_CORE_KERNEL_H
#define FDMA_CORE_KERNEL_H

#include "core/problem.h"

/* One kernel of one operation. `run` may trust the problem and its workspace. */
typedef struct fdma_kernel {
    const char *name; /* a path: backend, point of the build matrix, variant */
    fdma_operation operation;
    const char *(*missing)(void); /* NULL, or the machine feature that is not there */
    const char *(*refuses)(const fdma_problem *problem); /* NULL, or what it does not take */
    size_t (*workspace)(const fdma_problem *problem);
    fdma_status (*run)(const fdma_problem *problem);
    bool on_device; /* its tensors are on exec.device, not the CPU */
} fdma_kernel;

/* Rows of one point of the build matrix, fastest first. */
typedef struct kernel_table {
    const fdma_kernel *rows;
    int32_t count;
} kernel_table;

const char *fdma_operation_name(fdma_operation operation);

/* A backend is its tables, the fastest point first, with NULL at the end; so is a list of
 * backends. */
typedef const kernel_table *const *kernel_backend;

/* The first row, in the backends' order, that does this problem on this machine under the name that
 * the caller forced, if any. */
fdma_status fdma_choose_kernel(const kernel_backend *backends, const fdma_problem *problem,
                               const fdma_kernel **row);

/* Row `index` of all backends in their order; NULL past the end. */
const fdma_kernel *fdma_kernel_at(const kernel_backend *backends, int32_t index);

/* Takes pieces off the caller's workspace; with base NULL it only counts. */
typedef struct fdma_arena {
    uint8_t *base;
    size_t used;
} fdma_arena;

enum { arena_alignment = 64 }; /* bytes: a cache line, and the widest vector */

fdma_arena fdma_arena_of(const fdma_problem *problem);
void *fdma_arena_take(fdma_arena *arena, size_t bytes);
size_t fdma_arena_size(const fdma_arena *arena); /* bytes to ask of the caller */

#endif
