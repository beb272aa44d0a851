/* Packed sequences on a device: the beginning and the end of the sequence of each position.
 *
 * `starts` is device memory that the host does not read, so it may hold any number. It is clamped
 * first: element 0 counts as 0, and each other one as the largest up to it, within 0 to kv_len. The
 * ranges from the clamped starts ascend with the position and stay within kv_len, and kernels rely
 * on that. */
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

/* All arrays are in the workspace. */
struct packed_sequences {
    int32_t *starts; // [count + 1], clamped; NULL: the problem is not packed
    // [kv_len]: the first position and the end of the sequence of each position; past the last
    // sequence, its end twice
    int2 *ranges;
    uint32_t *index; // [kv_len]: index of the sequence; past the last one, count. May be NULL
    int32_t count;
};
