/* The second and the third kernel of fdma_decode(). The keys of a (b, g) are split as in split.cuh:
 * into splits of the cache's rows, and one more of the new tokens. */
#pragma once

#include "cuda/decode/merge.cuh"
#include "cuda/decode/streams.cuh"

/* The inputs of a split. A key's expiry counts tokens, and so do positions: every row comes before
 * them. */
__device__ static tile_inputs cached_inputs_of(const forward_plan &plan, const decode_plan &cached,
                                               const split_plan &splits, const row_range &range,
                                               int32_t split, bool aligned) {
    const decode_stream stream = cached.streams[range.b * plan.kv_heads + range.g];
    const int64_t first = ((int64_t)range.b * plan.kv_heads + range.g) * cached.keys;
    const bool is_new = split == splits.count - 1;
    const head_view &k = is_new ? plan.k : cached.k, &v = is_new ? plan.v : cached.v;
    const int32_t b = is_new ? range.b : stream.sequence;
    tile_inputs inputs = {};
    inputs.range = range;
    inputs.keys.list = cached.list + first + (is_new ? cached.rows : 0);
    inputs.keys.records = cached.records + first + (is_new ? cached.rows : 0);
    inputs.keys.kv_len = is_new ? cached.new_len : cached.rows;
    inputs.keys.entries = is_new ? stream.tokens : min(cached.rows, (split + 1) * splits.keys);
    inputs.k = source_of(k, b, range.g, plan.head_dim, aligned);
    inputs.v = source_of(v, b, range.g, plan.head_dim, aligned);
    inputs.logits = logit_params_of(plan);
    if (stream.tokens == 0)
        inputs.keys.entries = 0;
    return inputs;
}

/* One split of the keys against one tile of rows. */
template <typename config>
static __global__ void __launch_bounds__(config::threads, config::blocks)
    attend_cache(const __grid_constant__ forward_plan plan,
                 const __grid_constant__ decode_plan cached,
                 const __grid_constant__ split_plan splits, const int32_t tiles,
                 const bool aligned) {
    extern __shared__ __align__(128) char bytes[];
    decode_memory<config> &shared = *(decode_memory<config> *)bytes;
    const int32_t index = blockIdx.x / tiles, split = index % splits.count;
    const int32_t head = index / splits.count;
    const row_range range = row_range_of(plan, head, (int32_t)(blockIdx.x % tiles) * config::rows);
    const bool is_new = split == splits.count - 1;
    write_positions<config::rows>(shared.position, plan, range);
    load_queries<config, 1, config::threads>((char *)shared.q, plan.q, plan, range, aligned);
    griddepcontrol_wait(); // for evict_keys()
    if (threadIdx.x == 0)
        shared.inputs = cached_inputs_of(plan, cached, splits, range, split, aligned);
    attend_keys(shared, splits, range, head, split, is_new ? 0 : split * splits.keys, plan.head_dim,
                is_new);
}

/* Copies a row of 16-bit elements. */
__device__ static void copy_row_to_cache(const head_view &to, const head_view &from, int32_t b,
                                         int32_t token, int32_t sequence, int32_t row, int32_t g,
                                         int32_t head_dim) {
    const uint16_t *const source = (const uint16_t *)rows_of(from, b, g) + token * from.row;
    uint16_t *const target = (uint16_t *)rows_of(to, sequence, g) + row * to.row;
    for (int d = threadIdx.x; d < head_dim; d += blockDim.x)
        target[d] = source[d];
}

/* Puts a token into its row of the cache, unless it is not committed, has no row, or a committed
 * one evicts it. */
__device__ static void commit_token(const forward_plan &plan, const decode_plan &cached,
                                    const decode_stream &stream, const row_range &range,
                                    int32_t token) {
    const int64_t head = (int64_t)range.b * plan.kv_heads + range.g;
    const key_record record = cached.records[head * cached.keys + cached.rows + token];
    const int32_t row = cached.slot[head * cached.new_len + token];
    if (record.expiry < stream.committed || row < 0)
        return;
    const int32_t sequence = stream.sequence, g = range.g;
    copy_row_to_cache(cached.k, plan.k, range.b, token, sequence, row, g, plan.head_dim);
    copy_row_to_cache(cached.v, plan.v, range.b, token, sequence, row, g, plan.head_dim);
    if (threadIdx.x > 0)
        return;
    write_numbers(cached, range.b, g, token, sequence, row, token_position(stream, token));
}

/* out and lse of one row. The blocks of a (b, g) take turns at its tokens. */
template <typename config>
static __global__ void __launch_bounds__(merge_threads, 1)
    finish_decode(const __grid_constant__ forward_plan plan,
                  const __grid_constant__ decode_plan cached,
                  const __grid_constant__ split_plan splits, const int32_t blocks) {
    __shared__ merge_memory<config> shared;
    const int32_t total = plan.q_len * plan.group, block = blockIdx.x % blocks;
    const row_range range = row_range_of(plan, blockIdx.x / blocks, 0);
    griddepcontrol_wait(); // for attend_cache()
    const decode_stream stream = cached.streams[range.b * plan.kv_heads + range.g];
    for (int32_t token = block; token < stream.committed; token += blocks)
        commit_token(plan, cached, stream, range, token);
    if (range.g == 0 && block == 0 && threadIdx.x == 0 && stream.tokens > 0)
        cached.seen[stream.sequence] = token_position(stream, stream.committed);
    if (block >= total)
        return;
    const int64_t first = ((int64_t)blockIdx.x / blocks * total + block) * splits.count;
    if (row_position(plan, range, block) < stream.tokens) {
        merge_row(shared, plan, splits, range, block, first);
        return;
    }
    // the query is beside no token
    typename config::element *const to =
        (typename config::element *)plan.out.data + row_offset(plan.out, plan, range, block);
    for (int d = threadIdx.x; d < plan.head_dim; d += merge_threads)
        to[d] = (typename config::element)0.0f;
    if (threadIdx.x == 0 && plan.lse.data != NULL)
        *lse_at(plan, range, block) = -INFINITY;
}
