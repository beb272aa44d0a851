/* The checks that operations share, in the order: struct, sizes, options, tensors, overlaps. */
#ifndef FDMA_CORE_CHECKS_H
#define FDMA_CORE_CHECKS_H

#include "core/problem.h"

#define COUNT(array) (sizeof(array) / sizeof(array)[0])
/* Bytes of the first version of an argument struct. */
#define FIRST_SIZE(type) (offsetof(type, exec) + sizeof(fdma_exec))

fdma_status fdma_check_exec(const fdma_exec *exec, check_depth depth);
fdma_status fdma_check_sizes(const fdma_problem *problem);
fdma_status fdma_check_head_dim(int64_t head_dim);
fdma_status fdma_check_reserved(const char *name, int32_t reserved);

/* FDMA_SCOPE_DEFAULT stands for causal scope where `causal`, else for global scope. */
fdma_status fdma_settle_scope(fdma_scope given, bool causal, fdma_scope *scope);

/* Each tensor by its rule, then overlaps. */
fdma_status fdma_check_rules(fdma_problem *problem, const tensor_rule *rules, size_t count,
                             check_depth depth);

/* A selection is only good for the keys and the scope it was made for. */
fdma_status fdma_check_selection(const fdma_selection *selection, const fdma_problem *problem);

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
