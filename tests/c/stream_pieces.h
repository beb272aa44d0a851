/* stream_pieces.h - scores of a stream, and its selection in pieces; for test_streams.c and
 * test_stream_tables.c. */
#pragma once

#include "backend.h"
#include "problem.h"

typedef struct stream_case {
    int64_t batch, kv_heads, kv_len, window, recent, sinks;
    int levels; /* number of distinct scores: few of them make ties */
    int padded;
} stream_case;

static const stream_case stream_cases[] = {
    {1, 1, 40, 1, 0, 0, 3, 0},  {2, 3, 97, 7, 0, 0, 1000, 0},        {1, 2, 200, 16, 5, 2, 5, 1},
    {2, 1, 150, 2, 1, 1, 2, 1}, {1, 3, 301, 33, 0, 9, 40, 1},        {2, 2, 60, 64, 8, 0, 9, 0},
    {1, 1, 90, 3, 40, 3, 4, 1}, {1, 2, 700, 100, 28, 4, 1000000, 0}, {1, 2, 129, 5, 0, 5, 1, 0},
};

static float score_at(uint64_t *state, int levels) {
    const int64_t level = random_below(state, levels + 1);
    return level == levels && levels > 8 ? NAN : (float)level - 2;
}

static problem stream_problem(const stream_case *test, uint64_t seed) {
    uint64_t state = seed;
    problem x = {.batch = test->batch,
                 .kv_heads = test->kv_heads,
                 .kv_len = test->kv_len,
                 .window = test->window,
                 .recent = test->recent,
                 .sinks = test->sinks};
    x.score = new_tensor(FDMA_FLOAT32, x.batch, x.kv_heads, x.kv_len, -1);
    for (int64_t n = 0; n < count_of(x.score); n++)
        ((float *)x.score.data)[n] = score_at(&state, test->levels);
    if (test->padded) {
        x.key_valid = new_tensor(FDMA_UINT8, x.batch, x.kv_len, -1, -1);
        for (int64_t n = 0; n < count_of(x.key_valid); n++)
            ((uint8_t *)x.key_valid.data)[n] = random_below(&state, 4) > 0;
    }
    return x;
}

static fdma_selection new_selection(const problem *x, int64_t kv_len) {
    return (fdma_selection){
        .size = sizeof(fdma_selection),
        .expiry = new_output(FDMA_INT32, x->batch, x->kv_heads, kv_len, -1),
        .slot = new_output(FDMA_INT32, x->batch, x->kv_heads, kv_len, -1),
    };
}

static fdma_table new_table(const problem *x) {
    const int64_t rows = x->window + x->recent;
    return (fdma_table){
        .score = new_output(FDMA_FLOAT32, x->batch, x->kv_heads, rows, -1),
        .position = new_output(FDMA_INT32, x->batch, x->kv_heads, rows, -1),
        .seen = new_output(FDMA_INT32, x->batch, -1, -1, -1),
    };
}

/* Keys `first` to `end` - 1 of a contiguous tensor with the keys along `axis`. */
static fdma_tensor keys_of(fdma_tensor tensor, int axis, int64_t first, int64_t end) {
    if (tensor.rank > 0) {
        const size_t before = (size_t)(first * tensor.stride[axis]);
        tensor.data = (char *)tensor.data + before * dtype_size(tensor.dtype);
        tensor.shape[axis] = end - first;
    }
    return tensor;
}

static fdma_select_args select_args(const problem *x, const char *kernel) {
    return (fdma_select_args){.size = sizeof(fdma_select_args),
                              .score = x->score,
                              .key_valid = x->key_valid,
                              .window = x->window,
                              .recent = x->recent,
                              .sinks = x->sinks,
                              .exec = {.kernel = kernel, .threads = 2}};
}

static fdma_selection select_whole(const problem *x) {
    fdma_selection whole = new_selection(x, x->kv_len);
    fdma_select_args args = select_args(x, "reference");
    args.selection = &whole;
    CHECK_OK(run_select(&args));
    return whole;
}

static int32_t int_at(fdma_tensor tensor, int64_t b, int64_t g, int64_t j) {
    const int64_t at = b * tensor.stride[0] + g * tensor.stride[1] + j;
    return ((const int32_t *)tensor.data)[at];
}

static float float_at(fdma_tensor tensor, int64_t b, int64_t g, int64_t j) {
    const int64_t at = b * tensor.stride[0] + g * tensor.stride[1] + j;
    return ((const float *)tensor.data)[at];
}

/* A piece of a stream: the call selects the keys from `first` on with the table `in`. */
typedef struct piece {
    int64_t first, end, rows; /* rows: rows of `in`, 0 for the first piece */
    fdma_table in, out;
    fdma_selection selection;
} piece;

/* The index, in the call, of a position of the stream. */
static int64_t index_of(const piece *one, int64_t position) {
    return position < one->end ? one->rows + position - one->first
                               : one->rows + one->end - one->first;
}
