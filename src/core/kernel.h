/* Kernels as table entries, the choice among them, and the arena that workspace is taken from. */
#pragma once

#include "core/problem.h"

/* One kernel of one operation. `run` may trust the problem and the size of its workspace. */
typedef struct fdma_kernel {
    const char *name; /* a path: backend, point of the build matrix, variant */
    fdma_operation operation;
    const char *(*missing)(void); /* NULL, or what this machine lacks: "avx2" */
    /* NULL if it takes the problem; otherwise the text that completes "<kernel> does not support",
     * such as "float64 tensors; cast them to float32" */
    const char *(*refuses)(const fdma_problem *problem);
    size_t (*workspace)(const fdma_problem *problem);
    fdma_status (*run)(const fdma_problem *problem);
    bool on_device;    /* its tensors are on exec.device, not on the CPU */
    bool one_sequence; /* it knows no `starts`: core/packed.h cuts packed problems for it */
} fdma_kernel;

/* The kernels of one point of the build matrix, fastest first. */
typedef struct kernel_table {
    const fdma_kernel *kernels;
    int32_t count;
} kernel_table;

/* A backend is a list of tables, the fastest point first, that ends with NULL; a list of backends
 * ends with NULL too. */
typedef const kernel_table *const *kernel_backend;

/* Of the kernels that exec.kernel selects, chooses the first, in the order of the backends, that
 * runs on this machine and takes this problem. */
fdma_status fdma_choose_kernel(const kernel_backend *backends, const fdma_problem *problem,
                               const fdma_kernel **kernel);

/* Kernel `index` of all backends in their order; NULL past the end. */
const fdma_kernel *fdma_kernel_at(const kernel_backend *backends, int32_t index);

/* Hands out pieces of the caller's workspace. With base NULL it only adds up their sizes. */
typedef struct fdma_arena {
    uint8_t *base;
    size_t used;
} fdma_arena;

enum { arena_alignment = 64 }; /* bytes: a cache line, and the widest vector */

fdma_arena fdma_arena_of(const fdma_problem *problem);
void *fdma_arena_take(fdma_arena *arena, size_t bytes);
size_t fdma_arena_size(const fdma_arena *arena); /* bytes that the caller must provide */

/* Leaves in `exec` the workspace that the arena has not used. */
void fdma_set_aside(fdma_exec *exec, const fdma_arena *arena);
