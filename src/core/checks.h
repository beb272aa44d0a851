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

/* Replaces FDMA_SCOPE_DEFAULT by causal scope if `causal`, else by global scope. */
fdma_status fdma_settle_scope(fdma_scope given, bool causal, fdma_scope *scope);

/* Copies the tensors of the problem's operation from its argument struct. */
void fdma_take_tensors(fdma_problem *problem, const void *args);

/* Checks every tensor of a problem whose sizes are known, then overlaps. */
fdma_status fdma_check_tensors(fdma_problem *problem, check_depth depth);

/* Checks overlaps between all tensors of a fused call, whose steps have been checked one by one.
 * `unread` lists the names of inputs that this call ignores, and ends with NULL. */
fdma_status fdma_check_fused(fdma_operation operation, const void *args,
                             const fdma_selection *selection, const fdma_exec *exec,
                             const char *const *unread);

/* Checks that the selection was made for these keys and this scope. */
fdma_status fdma_check_selection(const fdma_selection *selection, const fdma_problem *problem);

/* Takes the sizes and the dtype of a problem without q from its v, and checks them. */
fdma_status fdma_settle_values(fdma_problem *problem);

/* The options that forward and backward have in common. */
typedef struct attention_options {
    const fdma_selection *selection;
    double scale, softcap;
    int32_t reserved;
} attention_options;

/* Checks q, k and the options of a problem that has its tensors and `causal`, and adds the sizes,
 * the options and the selection. */
fdma_status fdma_settle_attention(const attention_options *options, fdma_problem *problem);

#endif
