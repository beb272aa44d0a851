#pragma once

#include "core/tensor.h"

typedef struct named_tensor {
    const char *name;
    const fdma_tensor *tensor;
    bool output;
} named_tensor;

/* Checks that no output shares an element with another tensor, and that no tensor overlaps the
 * workspace. */
fdma_status fdma_check_overlaps(const named_tensor *tensors, size_t count, const fdma_exec *exec);
