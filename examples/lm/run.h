/* Bytes through a model: a whole text, or the next bytes of one whose keys are in caches. */
#pragma once

#include "fdma.h"
#include "model.h"

#include <stddef.h>
#include <stdint.h>

/* The angles by which the first `dim` channels of a head are rotated, at each of some positions. */
typedef struct rotation {
    int64_t dim;
    float *cosines, *sines; /* [capacity, dim / 2] */
} rotation;

/* Buffers that positions pass through, and the caches. */
typedef struct run_state {
    const model *of;
    int64_t capacity; /* positions that fit */
    float *x, *normed, *change, *q, *k, *v, *attended, *inner;
    rotation rotary, nope; /* angles of most heads, and of NoPE heads */
    float *logits;         /* [positions that logits are computed for, BYTE_VALUES] */
    fdma_cache *cache;     /* [layers], of one sequence; NULL: for whole texts only */
    void **cache_memory;   /* [layers] */
    size_t cache_bytes;    /* bytes of all layers */
    int64_t seen;          /* bytes that have entered the caches */
    int threads;           /* for several positions */
    int byte_threads;      /* for one */
    void *workspace;
    size_t workspace_size;
} run_state;

/*! new_state() - room for texts of `capacity` bytes.
 *  With `context` above 0 it has empty caches, which hold window + recent keys of a kv head, with
 *  the window of the layer; of a model that attends to all keys, the newest `context` keys.
 *  `threads` is how many threads there are at most; 0 is for OMP_NUM_THREADS or one per core, but
 *  for 1 with single bytes: their products are so small that on a machine in use threads would
 *  mostly wait for each other. */
run_state new_state(const model *of, int64_t capacity, int64_t context, int threads);
void free_state(run_state *state);

/*! empty_caches() - a new sequence can begin. */
void empty_caches(run_state *state);

/*! run_text() - logits [len, 256] of the byte that follows each position of a text that begins
 *  here. len is at most the capacity. */
void run_text(run_state *state, const uint8_t *text, int64_t len);

/*! run_next() - the next `len` bytes of the sequence enter the caches; logits [1, 256] belong to
 *  the byte that follows them. Any number of bytes: they pass in pieces of the capacity. */
void run_next(run_state *state, const uint8_t *text, int64_t len);
