/* fdma_attention() and fdma_attention_backward() as their steps. */
#ifndef FDMA_CORE_ATTENTION_H
#define FDMA_CORE_ATTENTION_H

#include "core/kernel.h"

typedef struct attention_steps {
    fdma_score_args score;
    fdma_select_args select;
    fdma_forward_args forward;
    fdma_selection selection;
    fdma_selection *wanted; /* the caller's, or NULL */
    size_t scratch;         /* bytes of workspace that hold what passes between the steps */
} attention_steps;

/* The steps, with what the caller did not ask for placed in the workspace, and the rest of that
 * handed to each of them. `steps` must stay where it is: the steps point to its selection. */
fdma_status fdma_split_attention(const fdma_attention_args *args, attention_steps *steps);

/* A [batch, kv_heads, kv_len] array in the workspace: float32, or float64 as `v`. */
fdma_tensor fdma_take_key_floats(fdma_arena *arena, const fdma_tensor *v);

/* Takes off `exec`'s workspace what the arena has used; returns the bytes to ask for it. */
size_t fdma_share_workspace(fdma_exec *exec, const fdma_arena *arena);

/* What no step sees by itself: outputs of one that share elements with tensors of another. */
fdma_status fdma_check_attention_overlaps(const fdma_attention_args *args);

typedef struct backward_steps {
    fdma_score_args score; /* the bias again, where `needs_score` */
    fdma_backward_args backward;
    fdma_score_backward_args score_backward; /* where `learns` */
    fdma_tensor bias, dbias;
    bool needs_score, learns;
    size_t scratch; /* bytes of workspace that hold what passes between the steps */
} backward_steps;

fdma_status fdma_split_attention_backward(const fdma_attention_backward_args *args,
                                          backward_steps *steps);

/* As fdma_check_attention_overlaps(). */
fdma_status fdma_check_attention_backward_overlaps(const fdma_attention_backward_args *args);

#endif
