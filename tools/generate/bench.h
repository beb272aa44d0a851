/* The times of a token and of a piece of a prompt, each beside what bounds it. */
#pragma once

#include "generate/run.h"

typedef struct bench_result {              /* medians */
    double token_ms, read_ms;              /* of a token, and of a plain read of its weights */
    double piece_ms, products_ms, blas_ms; /* of PIECE tokens of a prompt; of their products alone;
                                              and by OpenBLAS, NaN where it is not found */
    const char *blas_core; /* for which CPUs OpenBLAS's kernels are; NULL where it is not found */
} bench_result;

/*! bench_tokens() - runs more tokens, and what they are compared with, in turn, on as many threads.
 *  OpenBLAS is libopenblas.so.0, which is loaded at run time. */
bench_result bench_tokens(run_state *state);
