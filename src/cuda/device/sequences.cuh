/* Packed sequences on a device: where the sequence of each position begins and ends.
 *
 * `starts` is device memory, which the host does not read, so it may hold anything. It is first
 * clamped: element 0 counts as 0, and each other one as the largest up to it, within 0 to kv_len.
 * What follows from the clamped starts ascends with the position and stays within kv_len, and
 * kernels rely on that. */
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

/* All of it lies in the workspace. */
struct packed_sequences {
    int32_t *starts; // [count + 1], clamped; NULL: the problem is not packed
    // [kv_len]: the first position and the end of the sequence of each position; past the last
    // sequence, twice the end of that
    int2 *ranges;
    uint32_t *index; // [kv_len]: number of the sequence; past the last one, count. May be NULL
    int32_t count;
};
