/* Tokens through a model whose keys are in caches of constant size. */
#pragma once

#include "fdma.h"
#include "generate/model.h"

enum { PIECE = 256 }; /* tokens of a prompt that pass together */

typedef struct run_state {
    const model *of;
    crew *threads;
    int thread_count;
    fdma_parallel parallel; /* the same threads, for the library's calls */
    float *x, *normed, *change, *q, *k, *v, *attended, *gate, *up; /* [PIECE, ...] */
    float *rotary, *logits; /* [PIECE, head_dim], [vocab_size] */
    double *inverse;        /* [head_dim / 2]: radians for each position */
    fdma_cache *cache;      /* [layers] */
    void **cache_memory;    /* [layers] */
    size_t cache_bytes;     /* of all layers */
    int64_t seen, longest;  /* tokens in the caches; the longest text that angles were made for */
    void *workspace;
    size_t workspace_size;
} run_state;

/*! new_state() - empty caches, and buffers. `threads` is how many there are at most.
 *  Exits with EXIT_USAGE if the model has sizes that the library does not support. */
run_state new_state(const model *of, int threads);
void free_state(run_state *state);

/*! run_tokens() - the next `len` tokens of the text enter the caches; logits [vocab_size] are those
 *  of the token that follows. Any number of tokens: they pass in pieces. */
void run_tokens(run_state *state, const int32_t *tokens, int64_t len);
