#pragma once

#include "core/problem.h"

/* Copies a caller's struct, which begins with its size and has at least `first_size` bytes. Fields
 * that the caller's version lacks become 0; fields that this library does not know must be 0. */
fdma_status fdma_copy_struct(const char *name, const void *caller, size_t first_size, void *known,
                             size_t known_size);

/* Makes a problem of `args`, the operation's public argument struct. The first mistake is reported,
 * and nothing is written to the caller's memory. */
fdma_status fdma_check_call(fdma_operation operation, const void *args, check_depth depth,
                            fdma_problem *problem);

const char *fdma_operation_name(fdma_operation operation);
