/* The checks that operations share, in the order: struct, sizes, options, tensors, overlaps. */
#ifndef FDMA_CORE_CHECKS_H
#define FDMA_CORE_CHECKS_H

#include "core/problem.h"

/* Copies a caller's struct into `args`, a struct of `type` as this library knows it: fields that
 * the caller's version lacks become zero, fields that this library does not know must be zero. */
#define FDMA_COPY_ARGS(type, caller, args)                                                         \
    fdma_copy_args(#type, caller, offsetof(type, exec) + sizeof(fdma_exec), args, sizeof(type))

fdma_status fdma_copy_args(const char *name, const void *args, size_t first_size, void *known,
                           size_t known_size);
fdma_status fdma_copy_selection(const fdma_selection *caller, fdma_selection *selection);

fdma_status fdma_check_exec(const fdma_exec *exec, check_depth depth);
fdma_status fdma_check_sizes(const fdma_problem *problem);
fdma_status fdma_check_head_dim(int64_t head_dim);
fdma_status fdma_check_reserved(const char *name, int32_t reserved);

/* FDMA_SCOPE_DEFAULT stands for causal scope where `causal`, else for global scope. */
fdma_status fdma_settle_scope(fdma_scope given, bool causal, fdma_scope *scope);

/* Copies the tensors of the problem's operation from its argument struct. */
void fdma_take_tensors(fdma_problem *problem, const void *args);

/* Checks every tensor of a problem whose sizes are settled, then overlaps. */
fdma_status fdma_check_tensors(fdma_problem *problem, check_depth depth);

/* Of a fused call, whose steps have been checked: overlaps between tensors of different steps.
 * `unread`: names of inputs that this call does not look at, NULL at the end. */
fdma_status fdma_check_fused(fdma_operation operation, const void *args,
                             const fdma_selection *selection, const fdma_exec *exec,
                             const char *const *unread);

/* A selection is only good for the keys and the scope that it was made for. */
fdma_status fdma_check_selection(const fdma_selection *selection, const fdma_problem *problem);

/* Sizes and dtype of a problem that has v but no q. */
fdma_status fdma_settle_values(fdma_problem *problem);

/* What forward and backward are given alike. */
typedef struct attention_options {
    const fdma_selection *selection;
    double scale, softcap;
    int32_t reserved;
} attention_options;

/* Of a problem with its tensors and `causal`: checks q, k and the options, and puts the sizes, the
 * options and the selection into it. */
fdma_status fdma_settle_attention(const attention_options *options, fdma_problem *problem);

#endif
