/* The number type of the reference: double, or float in "reference/float32". The float kernels are
 * the plain evaluation, whose error sets the tolerance of all other kernels. They compute as a
 * framework does that has one kernel for each tensor operation. Products are summed in float32, and
 * every intermediate tensor (logits, probabilities, their gradients) is rounded to the dtype of the
 * call. */
#pragma once

#include "core/element.h"
#include "core/kernel.h"

#include <string.h>
#include <tgmath.h> // exp() and its like, for either type

#ifdef FDMA_REFERENCE_FLOAT32
#define REFERENCE_NAME "reference/float32"
typedef float real;
#else
#define REFERENCE_NAME "reference"
typedef double real;
#endif

static const real infinity = (real)INFINITY;

static inline real load(const fdma_tensor *tensor, int64_t offset) {
    return (real)fdma_load(tensor, offset);
}

static inline void store(const fdma_tensor *tensor, int64_t offset, real value) {
    fdma_store(tensor, offset, (double)value);
}

/* An element of an intermediate tensor of that dtype. */
static inline real rounded(fdma_dtype dtype, real value) {
#ifdef FDMA_REFERENCE_FLOAT32
    if (dtype == FDMA_FLOAT16 || dtype == FDMA_BFLOAT16) {
        uint16_t bits;
        const fdma_tensor element = {.data = &bits, .dtype = dtype};
        store(&element, 0, value);
        return load(&element, 0);
    }
#endif
    (void)dtype;
    return value;
}

static inline real softplus(real x) { return (x > 0 ? x : 0) + log1p(exp(-fabs(x))); }

/* Elements that are used many times are converted once. */
static inline void load_row(real *row, const fdma_tensor *tensor, int64_t offset, int64_t count) {
    for (int64_t d = 0; d < count; d++)
        row[d] = load(tensor, offset + d);
}

static inline real dot(const real *x, const real *y, int64_t count) {
    real sum = 0;
    for (int64_t d = 0; d < count; d++)
        sum += x[d] * y[d];
    return sum;
}

static inline void put(const fdma_tensor *tensor, int64_t at, real value, bool add) {
    store(tensor, at, add ? load(tensor, at) + value : value);
}

static inline real *take_reals(fdma_arena *arena, int64_t count) {
    return fdma_arena_take(arena, (size_t)count * sizeof(real));
}
