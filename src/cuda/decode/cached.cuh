/* The second and the third kernel of fdma_decode(). The keys of a (b, g) are split as in split.cuh:
 * into splits of the cache's rows, and one more split of the new tokens. */
#pragma once

#include "cuda/decode/merge.cuh"
#include "cuda/decode/streams.cuh"

/* The inputs of a split. A key's expiry counts tokens, and so do positions: every row comes before
 * all tokens. */
template <typename config>
__device__ static tile_inputs cached_inputs_of(const forward_plan &plan, const decode_plan &cached,
                                               const split_plan &splits, const row_range &range,
                                               int32_t split, bool aligned) {
    const decode_stream stream = cached.streams[range.b * plan.kv_heads + range.g];
    const int64_t first = ((int64_t)range.b * plan.kv_heads + range.g) * cached.keys;
    const bool is_new = split == splits.count - 1;
    const head_view &k = is_new ? plan.k : cached.k, &v = is_new ? plan.v : cached.v;
    const int32_t b = is_new ? range.b : config::in_pages ? 0 : stream.sequence;
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

__device__ static split_pages split_pages_of(const decode_plan &cached, const row_range &range,
                                             bool is_new) {
    if (is_new)
        return {};
    const decode_stream stream = cached.streams[range.b * cached.kv_heads + range.g];
    return {cached.pages, stream.sequence, 2 * cached.k.batch, 2 * cached.v.batch};
}

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
    write_positions<config::rows>(shared.position, plan, range, plan.kv_len);
    load_queries<config, 1, config::threads>((char *)shared.q, plan.q, plan, range, aligned);
    griddepcontrol_wait(); // for evict_keys()
    if (threadIdx.x == 0) {
        shared.inputs = cached_inputs_of<config>(plan, cached, splits, range, split, aligned);
        if (config::in_pages)
            shared.pages = split_pages_of(cached, range, is_new);
    }
    attend_keys(shared, is_new ? 0 : split * splits.keys, is_new);
    write_split(shared, splits, range, head, split, plan.head_dim);
}

/* Writes a token to its row of the cache, unless it is not committed, has no row, or a committed
 * token evicts it. */
__device__ static void commit_token(const forward_plan &plan, const decode_plan &cached,
                                    const decode_stream &stream, const row_range &range,
                                    int32_t token, thread_group threads) {
    const int64_t head = (int64_t)range.b * plan.kv_heads + range.g;
    const key_record record = cached.records[head * cached.keys + cached.rows + token];
    const int32_t row = cached.slot[head * cached.new_len + token];
    if (record.expiry >= stream.committed && row >= 0)
        store_token(plan, cached, stream, range.b, range.g, token, row, threads);
}

/* Writes out and lse of one row. The blocks of a (b, g) also divide the tokens to commit. */
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
    const thread_group threads = {(int)threadIdx.x, merge_threads};
    for (int32_t token = block; token < stream.committed; token += blocks)
        commit_token(plan, cached, stream, range, token, threads);
    if (range.g == 0 && block == 0 && threadIdx.x == 0 && stream.tokens > 0)
        cached.seen[stream.sequence] = token_position(stream, stream.committed);
    if (block >= total)
        return;
    const int64_t first = ((int64_t)blockIdx.x / blocks * total + block) * splits.count;
    if (row_position(plan, range, plan.kv_len, block) < stream.tokens)
        merge_row(shared, plan, splits, range, block, first);
    else // the query has no token
        write_empty_row<typename config::element>(plan, range, block, threads);
}
