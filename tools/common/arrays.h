/* Contiguous arrays that the tool owns, and conversions between floating types. */
#ifndef FDMA_TOOLS_COMMON_ARRAYS_H
#define FDMA_TOOLS_COMMON_ARRAYS_H

#include "fdma.h"

/*! dtype_name() - "f32", "f16", "bf16", "f64"; "?" for the others. */
const char *dtype_name(fdma_dtype dtype);
size_t dtype_bytes(fdma_dtype dtype);
int64_t element_count(const fdma_tensor *tensor);

/*! allocate() - `bytes` bytes, aligned to 64, all zero; exits with EXIT_FAILED where there are none
 *  left. Free with free(). */
void *allocate(size_t bytes);

/*! allocate_array() - a contiguous tensor in memory of its own. Free `data` with free(). */
fdma_tensor allocate_array(fdma_dtype dtype, int32_t rank, const int64_t *shape);

/*! convert_array() - a contiguous copy in another floating type, rounded to nearest, ties to even.
 *  `source` is contiguous and aligned to its element. */
fdma_tensor convert_array(const fdma_tensor *source, fdma_dtype dtype);

/*! load_element(), store_element() - element `index` of an array of floating `dtype`. */
double load_element(const void *data, fdma_dtype dtype, int64_t index);
void store_element(void *data, fdma_dtype dtype, int64_t index, double value);

#endif /* FDMA_TOOLS_COMMON_ARRAYS_H */
