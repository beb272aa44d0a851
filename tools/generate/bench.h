/* The time of a token beside the time of a plain read of its weights. */
#pragma once

#include "generate/run.h"

typedef struct bench_result {
    double token_ms, read_ms; /* medians */
} bench_result;

/*! bench_tokens() - runs more tokens and reads the weights, in turn, on the same threads. */
bench_result bench_tokens(run_state *state);
