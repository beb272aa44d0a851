/* fdma_prefill(): a call as parts, and the steps of a part, which other operations run. */
#pragma once

#include "core/steps.h"

/* Some requests that follow each other, with `len` tokens each; or a piece of one request. Decode
 * runs parts with few tokens of each request. Others have one request: select, forward and
 * cache_store run them. */
typedef struct prefill_part {
    int64_t request, count;  /* the first request, and their number */
    int64_t first, end, len; /* tokens of all of them, and of each */
    int64_t sequence;        /* of the cache, of the first request */
    bool is_new;             /* longer ones: the sequence is empty */
} prefill_part;

/* Takes the tensors between the steps from the workspace, and leaves the rest of it to each. */
void fdma_begin_prefill(call_steps *steps);

/* Makes the step that computes the scores; none if they are given. */
fdma_status fdma_split_scores(call_steps *steps);

/* Computes the bias of given scores in memory of the host. */
void fdma_fill_prompt_bias(const fdma_problem *whole);

/* Makes the part behind `part` of it, which begins as {0}. False if there is none. */
bool fdma_next_part(const fdma_problem *whole, prefill_part *part);

/* Makes number n of the parts whose workspaces serve all starts. False if there is none. */
bool fdma_largest_part(const fdma_problem *whole, int n, prefill_part *part);

/* Makes the steps of a part. */
fdma_status fdma_split_part(const prefill_part *part, call_steps *steps);

/* Hides carried keys whose pages are missing from forward, which is the step behind select. */
void fdma_hide_missing_pages(const call_steps *steps);
