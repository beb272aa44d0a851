/* Sequences in which only the first kv_used keys exist. kv_used is device memory that the host does
 * not read, so it may hold any number: its numbers are clamped wherever they are read. */
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

/* The number of keys of sequence b that exist. kv_used: [batch], the caller's; NULL: all exist. */
__device__ static int32_t count_used(const int32_t *kv_used, int64_t b, int32_t kv_len) {
    return kv_used == NULL ? kv_len : min(max(kv_used[b], 0), kv_len);
}
