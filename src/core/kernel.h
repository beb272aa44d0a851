/* Kernels as table entries, the choice among them, and the arena that workspace is taken from. */
#pragma once

#include "core/problem.h"

/* Properties of kernels, as bits. */
typedef enum kernel_trait {
    trait_one_sequence = 1, /* it knows no `starts`: core/adapter.c cuts packed problems for it */
    trait_writes_last_keys = 2, /* select: it writes last_keys in place of expiry and slot */
    trait_writes_plan = 4,      /* select: it also makes the plan of forward */
    trait_checks_selection = 8, /* backward: it checks the selection only with only_checks */
} kernel_trait;

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
    bool on_device;  /* its tensors are on exec.device, not on the CPU */
    unsigned traits; /* a set of kernel_trait */
} fdma_kernel;

static inline bool has_trait(const fdma_kernel *kernel, kernel_trait trait) {
    return (kernel->traits & trait) != 0;
}

/* The kernels of one point of the build matrix, fastest first. */
typedef struct kernel_table {
    const fdma_kernel *kernels;
    int32_t count;
} kernel_table;

/* The kernels of one part of the library, and the properties by which a call is split into steps. A
 * list of backends ends with NULL. */
typedef struct kernel_backend {
    const kernel_table *const *tables;            /* the fastest point first; ends with NULL */
    const struct kernel_adapter *const *adapters; /* adapters of its kernels; see core/adapter.h */
    bool scores_tokens;    /* kernels of decode compute the scores of their tokens */
    bool writes_last_keys; /* a kernel of select has trait_writes_last_keys */
} kernel_backend;

/* Chooses the first kernel, in the order of the backends, that matches exec.kernel, runs on this
 * machine and takes this problem. */
fdma_status fdma_choose_kernel(const kernel_backend *const *backends, const fdma_problem *problem,
                               const fdma_kernel **kernel);

/* Kernel `index` of all backends in their order; NULL past the end. */
const fdma_kernel *fdma_kernel_at(const kernel_backend *const *backends, int32_t index);

/* Hands out pieces of the caller's workspace. With base NULL it only adds up their sizes. */
typedef struct fdma_arena {
    uint8_t *base;
    size_t used;
} fdma_arena;

enum { arena_alignment = 64 }; /* bytes: a cache line, and the widest vector */

fdma_arena fdma_arena_at(const void *memory);
fdma_arena fdma_arena_of(const fdma_problem *problem); /* at its workspace */
void *fdma_arena_take(fdma_arena *arena, size_t bytes);
size_t fdma_arena_size(const fdma_arena *arena); /* bytes that the caller must provide */

/* Moves the workspace of `exec` past the bytes that the arena has used. */
void fdma_set_aside(fdma_exec *exec, const fdma_arena *arena);
