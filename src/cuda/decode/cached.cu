/* fdma_decode() for head_dim up to FDMA_HEAD_DIM, on any device from compute capability 8.0. Splits
 * depend only on the rows of the cache, and so do the bits of a result.
 *
 * Source: docs/algorithm.md, streams; arXiv:2307.08691. */
#include "cuda/decode/cache.cuh"
#include "cuda/decode/split.cuh"

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

/* Row tiles of a thread block if one is not enough: as many as fit in registers. */
static constexpr int most_row_tiles = FDMA_HEAD_DIM <= 128 ? 2 : 1;

struct cached_task : decode_task {
    split_plan splits;
};

static split_plan plan_splits(const fdma_problem *problem, fdma_arena *arena) {
    const int64_t least_keys = 128; // of a split, measured on an H200
    const int64_t rows = problem->carried_len;
    split_plan splits = {};
    splits.keys = (int32_t)round_up(max(divide_up(rows, most_splits - 1), least_keys), 64);
    splits.count = (int32_t)divide_up(rows, splits.keys) + 1;
    const int64_t results = problem->batch * problem->q_heads * problem->q_len * splits.count;
    splits.out = take<float>(arena, results * problem->head_dim);
    splits.stats = take<float2>(arena, results);
    return splits;
}

static cached_task lay_out(const fdma_problem *problem, fdma_arena *arena) {
    return {fdma_cuda_plan_decode(problem, arena, marks_keys), plan_splits(problem, arena)};
}

template <typename config>
static fdma_status attend_splits(const fdma_problem *problem, const cached_task &task) {
    static_assert(sizeof(decode_memory<config>) <= least_shared_bytes, "a split fits everywhere");
    const forward_plan &plan = task.plan;
    const int32_t tiles = (int32_t)divide_up(plan.q_len * plan.group, config::rows);
    const int32_t blocks = plan.batch * plan.kv_heads * task.splits.count * tiles;
    return launch("decode", attend_cache<config>,
                  {dim3(blocks), dim3(config::threads), sizeof(decode_memory<config>), start_early},
                  problem, plan, task.cached, task.splits, tiles, is_aligned(task));
}

template <typename element, int row_tiles>
static fdma_status attend_tiles(const fdma_problem *problem, const cached_task &task) {
    return has_pages(&problem->cache)
               ? attend_splits<decode_config<element, row_tiles, true>>(problem, task)
               : attend_splits<decode_config<element, row_tiles, false>>(problem, task);
}

template <typename element>
static fdma_status attend_rows(const fdma_problem *problem, const cached_task &task) {
    return task.plan.q_len * task.plan.group <= mma_rows
               ? attend_tiles<element, 1>(problem, task)
               : attend_tiles<element, most_row_tiles>(problem, task);
}

template <typename element>
static fdma_status attend(const fdma_problem *problem, const cached_task &task) {
    const forward_plan &plan = task.plan;
    const int32_t rows = plan.q_len * plan.group, blocks = max(rows, 1);
    if (rows > 0)
        FDMA_TRY(attend_rows<element>(problem, task));
    const launch_shape finish = {dim3(plan.batch * plan.kv_heads * blocks), dim3(merge_threads), 0,
                                 start_early};
    return launch("decode", finish_decode<decode_config<element, 1>>, finish, problem, plan,
                  task.cached, task.splits, blocks);
}

static const char *refuses(const fdma_problem *problem) {
    const char *const reason = fdma_cuda_refuses_decode(problem, FDMA_HEAD_DIM);
    if (reason != NULL)
        return reason;
    const int64_t tiles = problem->q_len * problem->group / mma_rows + 1;
    if (problem->batch * problem->kv_heads > INT32_MAX / (tiles * most_splits))
        return "more than 2^31 splits of tiles of queries";
    return fdma_refuses_before_sm80(problem);
}

static fdma_status run(const fdma_problem *problem) {
    fdma_arena arena = fdma_arena_of(problem);
    const cached_task task = lay_out(problem, &arena);
    if (problem->batch == 0 || problem->new_len == 0)
        return FDMA_OK;
    if (!is_present(&problem->score))
        FDMA_TRY(fdma_cuda_score_tokens(problem, task));
    FDMA_TRY(fdma_cuda_evict(problem, task.cached));
    return problem->dtype == FDMA_FLOAT16 ? attend<float16>(problem, task)
                                          : attend<__nv_bfloat16>(problem, task);
}

FDMA_CUDA_TABLE(FDMA_POINT_TABLE(fdma_cuda_sm80_cached_d, FDMA_HEAD_DIM),
                {FDMA_POINT_NAME("cuda/sm80/decode/d", FDMA_HEAD_DIM), operation_decode,
                 fdma_missing_sm80, refuses, workspace_of<lay_out>, run, true, 0});
