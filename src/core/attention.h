/* fdma_attention() and fdma_attention_backward() as their steps. */
#ifndef FDMA_CORE_ATTENTION_H
#define FDMA_CORE_ATTENTION_H

#include "core/kernel.h"

typedef struct attention_steps {
    fdma_score_args score;
    fdma_select_args select;
    fdma_forward_args forward;
    fdma_selection selection;
    fdma_selection *given; /* the caller's, or NULL */
    size_t scratch;        /* bytes of workspace that hold what passes between the steps */
} attention_steps;

/* Fills in the arguments of the steps. Outputs that the caller did not ask for are taken from the
 * workspace, and each step may use the rest of it. `steps` must not be moved afterwards: the steps
 * point to its selection. */
fdma_status fdma_split_attention(const fdma_attention_args *args, attention_steps *steps);

/* A [batch, kv_heads, kv_len] tensor in the workspace: float32, or float64 if v is. */
fdma_tensor fdma_take_key_floats(fdma_arena *arena, const fdma_tensor *v);

/* Leaves in `exec` the workspace that the arena has not used. Returns the bytes that the arena adds
 * to what the caller is asked for. */
size_t fdma_set_aside(fdma_exec *exec, const fdma_arena *arena);

/* Checks what no step sees by itself: outputs of one step that share elements with tensors of
 * another, and the workspace that passes between them. */
fdma_status fdma_check_attention_overlaps(const fdma_attention_args *args);

typedef struct backward_steps {
    fdma_score_args score; /* computes the bias again if `needs_score` */
    fdma_backward_args backward;
    fdma_score_backward_args score_backward; /* if `learns` */
    fdma_tensor bias, dbias;
    bool needs_score, learns;
    size_t scratch; /* bytes of workspace that hold what passes between the steps */
} backward_steps;

fdma_status fdma_split_attention_backward(const fdma_attention_backward_args *args,
                                          backward_steps *steps);

/* As fdma_check_attention_overlaps(). */
fdma_status fdma_check_attention_backward_overlaps(const fdma_attention_backward_args *args);

#endif
