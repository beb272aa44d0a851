/* Tensors as arguments: what a well-formed one is, and whether two of them share elements. */
#ifndef FDMA_CORE_TENSOR_H
#define FDMA_CORE_TENSOR_H

#include "fdma.h"

#include <stdbool.h>

enum { max_rank = 4 };

/* Sets of dtypes, as bits. */
enum {
    takes_float32 = 1 << FDMA_FLOAT32,
    takes_float16 = 1 << FDMA_FLOAT16,
    takes_bfloat16 = 1 << FDMA_BFLOAT16,
    takes_float64 = 1 << FDMA_FLOAT64,
    takes_int32 = 1 << FDMA_INT32,
    takes_uint8 = 1 << FDMA_UINT8,
    takes_floats = takes_float32 | takes_float16 | takes_bfloat16 | takes_float64,
    takes_wide_floats = takes_float32 | takes_float64,
};

/* What an operation wants of one of its tensors. */
typedef struct tensor_rule {
    const char *name;
    const fdma_tensor *tensor;
    unsigned dtypes;
    int32_t rank;
    int64_t shape[max_rank];
    bool optional;
    bool output;
} tensor_rule;

size_t fdma_dtype_size(fdma_dtype dtype);
const char *fdma_dtype_name(fdma_dtype dtype);

static inline bool is_present(const fdma_tensor *tensor) { return tensor->rank != 0; }

/* Rank, dtype and sizes alone: enough for its shape to be read. */
fdma_status fdma_check_form(const char *name, const fdma_tensor *tensor, int32_t rank,
                            unsigned dtypes);

/* Everything about each tensor by itself; `data_needed` is false in workspace queries. */
fdma_status fdma_check_tensors(const tensor_rule *rules, size_t count, bool data_needed);

/* No output shares an element with another tensor. */
fdma_status fdma_check_overlaps(const tensor_rule *rules, size_t count);

#endif
