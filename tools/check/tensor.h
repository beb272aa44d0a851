/* Zeroed tensors of any dtype and layout, allocated from an arena that check_free_all() empties.
 * Elements are addressed by their flat index, last axis fastest, whatever the strides are. */
#pragma once

#include "fdma.h"

/* Memory layouts of [batch, len, heads, head_dim] tensors that models use. */
typedef enum check_layout {
    LAYOUT_PLAIN, /* contiguous */
    LAYOUT_SWAP,  /* stored as [batch, heads, len, head_dim] */
    LAYOUT_PACK,  /* the heads lie among those of other tensors */
} check_layout;

/*! check_alloc() - zeroed memory from the arena; exits with EXIT_FAILED when there is none left. */
void *check_alloc(int64_t count, size_t size);
void check_free_all(void);

fdma_tensor check_tensor(fdma_dtype dtype, int32_t rank, const int64_t *shape);
fdma_tensor check_layout_tensor(fdma_dtype dtype, check_layout layout, const int64_t *shape);

void check_store(fdma_tensor tensor, int64_t index, double value);
void check_store_all(fdma_tensor tensor, const double *values);
void check_fill(fdma_tensor tensor, double value);
void check_fill_normal(fdma_tensor tensor, uint64_t *random, double deviation);

/*! check_tensor_like() - a contiguous tensor of the same dtype and shape; absent if that is. */
fdma_tensor check_tensor_like(fdma_tensor tensor);

/*! check_widen() - the elements as a contiguous array of doubles. */
double *check_widen(fdma_tensor tensor);

/*! check_wide_tensor() - the same as a float64 tensor; an absent tensor stays absent. */
fdma_tensor check_wide_tensor(fdma_tensor tensor);
