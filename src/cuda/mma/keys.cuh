/* The keys that a tile of query rows visits: its range of a tile list, and loading a key block into
 * shared memory. */
#pragma once

#include "cuda/mma/queries.cuh"
#include "cuda/mma/softmax.cuh"

/* The inputs of a tile. Shared memory holds them to save registers. */
struct tile_inputs {
    row_range range;
    tile_list keys;
    row_source k, v;
    logit_params logits;
};

/* The rows of k or v of a (b, g), with its carried rows. */
__device__ static row_source key_source_of(const forward_plan &plan, const head_view &own,
                                           const head_view &carried, int32_t b, int32_t g,
                                           bool aligned) {
    row_source source = source_of(own, b, g, plan.head_dim, aligned);
    if (plan.carried_len > 0) {
        source.carried_len = plan.carried_len;
        source.carried = rows_of(carried, b, g);
        source.carried_stride = 2 * carried.row;
    }
    return source;
}

/* The inputs of a tile with the first `rows` rows of a range. */
__device__ static tile_inputs tile_inputs_of(const forward_plan &plan, const row_range &range,
                                             int32_t rows, bool aligned) {
    const int32_t kv_len = key_count(plan, range.b);
    const int32_t last = row_position(plan, range, kv_len, range.first + rows - 1);
    return {range, tile_list_of(plan, range.b, range.g, range.first / plan.group, last),
            key_source_of(plan, plan.k, plan.k_carried, range.b, range.g, aligned),
            key_source_of(plan, plan.v, plan.v_carried, range.b, range.g, aligned),
            logit_params_of(plan)};
}

/* This thread's entry of key block n. */
template <typename config> __device__ static int32_t own_entry(const tile_list &keys, int32_t n) {
    const int32_t column = threadIdx.x;
    return column < config::keys ? entry_at(keys, n * config::keys + column) : -1;
}

/* Writes the entry to shared memory, which has the entries of three key blocks. */
template <int keys>
__device__ static void store_entry(int32_t (&key)[3][keys], int32_t n, int32_t entry) {
    const uint32_t column = opaque(threadIdx.x);
    if (column < keys)
        key[n % 3][column] = entry;
}

/* Starts copying the record of an entry. Without records every row keeps a key; no row keeps an
 * entry that is no key. `from` is only set if not causal, in packed sequences: the first position
 * of the key's sequence. */
template <int keys>
__device__ static void copy_record(key_records<keys> &records, int column, const tile_list &from,
                                   int32_t entry) {
    const bool there = is_key(entry, from.kv_len);
    if (there && from.records != NULL) {
        cp_async_4(shared_address(&records.bias[column]), &from.records[entry].bias);
        cp_async_4(shared_address(&records.expiry[column]), &from.records[entry].expiry);
    } else {
        records.bias[column] = 0;
        records.expiry[column] = there ? INT32_MAX : INT32_MIN;
    }
    if (there && from.ranges != NULL)
        cp_async_4(shared_address(&records.from[column]), &from.ranges[entry].x);
}

/* The first positions at which the keys of a block may be kept, if by_position: if causal, the keys
 * themselves. */
template <int keys>
__device__ static const int32_t *first_positions(const key_records<keys> &records,
                                                 const int32_t *entries, const tile_list &list) {
    return list.ranges == NULL ? entries : records.from;
}

template <int keys>
__device__ static void copy_records(key_records<keys> &records, const tile_list &from,
                                    const int32_t *entries) {
    const uint32_t column = opaque(threadIdx.x);
    if (column < keys)
        copy_record(records, column, from, entries[column]);
}

/* copy_block() if some keys are carried, or rows are not aligned. It needs few registers, because
 * it processes one row after the other. */
template <typename config>
__device__ static void copy_rows_one_by_one(char *to, const int32_t *keys, const row_source &source,
                                            int32_t kv_len) {
    constexpr int copiers = row_layout<config::head_dim>::copiers;
#pragma unroll 1
    for (int n = opaque(threadIdx.x) / copiers; n < config::keys; n += config::threads / copiers) {
        const bool there = is_key(keys[n], kv_len);
        copy_row<config::head_dim>(to, n, row_of_key(source, there ? keys[n] : 0), source.vecs,
                                   there, source.aligned);
    }
}

/* Starts copying the rows of k or v of a key block. An entry that is no key becomes zeros, because
 * its weight is 0, but 0 times the memory's contents may be NaN. */
template <typename config>
__device__ static void copy_block(char *to, const int32_t *keys, const row_source &source,
                                  int32_t kv_len) {
    using layout = row_layout<config::head_dim>;
    constexpr int copiers = layout::copiers, step = config::threads / copiers;
    static_assert(step % 8 == 0, "all rows of a lane are swizzled alike");
    const uint32_t thread = opaque(threadIdx.x);
    const int first = thread / copiers, lane = thread % copiers;
    if (!source.aligned || source.carried_len > 0) {
        copy_rows_one_by_one<config>(to, keys, source, kv_len);
        return;
    }
    const row_source from = source; // a copy in registers, otherwise each cp.async would read it
                                    // again
    const uint32_t at = shared_address(to) + layout::offset(first, lane);
    int32_t key[config::keys / step];
#pragma unroll
    for (int n = 0; n < config::keys / step; n++)
        key[n] = keys[first + n * step];
#pragma unroll
    for (int n = 0; n < config::keys / step; n++) {
        const bool there = is_key(key[n], kv_len);
        const char *const row = row_at(from, there ? key[n] : 0) + lane * vec_bytes;
#pragma unroll
        for (int x = 0; x < layout::vecs; x += copiers)
            cp_async_16(at + n * step * layout::row_bytes + x * vec_bytes, row + x * vec_bytes,
                        there && x + lane < from.vecs ? vec_bytes : 0);
    }
}
