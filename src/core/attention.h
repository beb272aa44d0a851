/* fdma_attention() as its three steps. */
#ifndef FDMA_CORE_ATTENTION_H
#define FDMA_CORE_ATTENTION_H

#include "core/problem.h"

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

/* What no step sees by itself: outputs of one that share elements with tensors of another. */
fdma_status fdma_check_attention_overlaps(const fdma_attention_args *args,
                                          const attention_steps *steps);

#endif
