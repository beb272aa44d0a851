/* Contiguous arrays that the tool owns, and single elements of any dtype. */
#pragma once

#include "fdma.h"

/*! dtype_name() - "f32", "f16", "bf16", "f64", "i32" or "u8". */
const char *dtype_name(fdma_dtype dtype);
size_t dtype_bytes(fdma_dtype dtype);

/*! element_count() - 0 for an absent tensor. */
int64_t element_count(const fdma_tensor *tensor);

/*! allocate() - zeroed memory, aligned to 64 bytes; exits with EXIT_FAILED if there is not enough.
 *  Free with free(). */
void *allocate(size_t bytes);

/*! allocate_array() - a contiguous tensor in memory of its own. Free `data` with free(). */
fdma_tensor allocate_array(fdma_dtype dtype, int32_t rank, const int64_t *shape);

/*! convert_array() - a copy in another floating dtype, rounded to nearest, ties to even. `source`
 *  is contiguous, and aligned to its elements. */
fdma_tensor convert_array(const fdma_tensor *source, fdma_dtype dtype);

/*! swap_axes() - a contiguous copy of a contiguous array of rank 4 whose axes 1 and 2 are
 *  exchanged. */
fdma_tensor swap_axes(const fdma_tensor *source);

/*! axis_slice() - a view of `length` positions along an axis; the tensor itself if it is absent. */
fdma_tensor axis_slice(fdma_tensor tensor, int axis, int64_t first, int64_t length);

/*! count_nans() - of a contiguous array in a floating dtype. */
int64_t count_nans(const fdma_tensor *tensor);

/*! load_element(), store_element() - element `index` of an array; floating dtypes are rounded to
 *  nearest, ties to even. Integers are loaded only. */
double load_element(const void *data, fdma_dtype dtype, int64_t index);
void store_element(void *data, fdma_dtype dtype, int64_t index, double value);

/*! rounding_step() - the distance between neighbours of that magnitude in a floating dtype. */
double rounding_step(fdma_dtype dtype, double magnitude);
