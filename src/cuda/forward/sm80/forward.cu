/* Forward for one head_dim (FDMA_HEAD_DIM) and those below it, on any device of compute capability
 * 8.0 and later: FlashAttention's tiling by mma.sync, over the keys of a list. A block of threads
 * takes a tile of rows: (query, head of the group) pairs of a kv head.
 *
 * On the way: fdma_cuda_build_lists() -> attend_tile(), or decode.cuh for few queries.
 * Source: arXiv:2205.14135; arXiv:2307.08691. */
#include "cuda/decode/decode.cuh"

template <typename type> struct tile_config {
    using element = type;
    static constexpr int head_dim = FDMA_HEAD_DIM;
    static constexpr int warps = 4;
    static constexpr int row_tiles = head_dim <= 128 ? 2 : 1; // what the registers hold
    static constexpr int keys = 64;                           // of a block
    static constexpr int blocks = head_dim <= 64 ? 3 : 2;     // of a multiprocessor
    static constexpr int threads = warps * warp_lanes;
    static constexpr int rows = warps * row_tiles * mma_rows;
};

template <typename config> struct tile_memory {
    using element = typename config::element;
    alignas(128) element q[config::rows * config::head_dim]; // in the end out
    alignas(128) element k[config::keys * config::head_dim];
    alignas(128) element v[config::keys * config::head_dim];
    key_facts<config::keys> facts[2];         // of this block and the next
    alignas(16) int32_t key[3][config::keys]; // entries: of this block and the next two
    int32_t position[config::rows];
    tile_work work;
};

template <typename config>
__device__ static inline void list_block(tile_memory<config> &shared, int32_t n, int32_t entry) {
    const uint32_t column = opaque(threadIdx.x);
    if (column < config::keys)
        shared.key[n % 3][column] = entry;
}

/* Starts copying k and facts of block n, which is listed. */
template <typename config>
__device__ static inline void load_keys(tile_memory<config> &shared, int32_t n) {
    const int32_t *const keys = shared.key[n % 3];
    load_block<config>((char *)shared.k, keys, shared.work.k, shared.work.walk.kv_len);
    const uint32_t column = opaque(threadIdx.x);
    if (column < config::keys)
        fetch_fact(shared.facts[n % 2], column, shared.work.walk, keys[column]);
    cp_async_commit_group();
}

template <typename config>
__device__ static inline void load_values(tile_memory<config> &shared, int32_t n) {
    load_block<config>((char *)shared.v, shared.key[n % 3], shared.work.v, shared.work.walk.kv_len);
    cp_async_commit_group();
}

/* A warp's rows over all blocks: the values of a block arrive beside its first product, the keys of
 * the next one beside its softmax and second product. */
template <typename config>
__device__ static inline void attend_blocks(tile_memory<config> &shared, warp_rows<config> &rows,
                                            bool causal) {
    constexpr int head_dim = config::head_dim, warp_size = config::row_tiles * mma_rows;
    const key_walk &walk = shared.work.walk;
    const int warp = threadIdx.x / warp_lanes;
    const auto q_at = down_first<head_dim>(shared.q + warp * warp_size * head_dim);
    const auto k_at = right_first<head_dim>(shared.k);
    const auto v_at = down_first<head_dim>(shared.v);
    for (int32_t n = 0; n * config::keys < walk.entries; n++) {
        const key_facts<config::keys> &facts = shared.facts[n % 2];
        float s[config::row_tiles][config::keys / 8][4];
        cp_async_wait_group<0>();
        __syncthreads(); // k is there, the last block's v is read
        load_values(shared, n);
        const int32_t upcoming = own_entry<config>(walk, n + 2);
        multiply_keys<config>(s, q_at.afresh(), k_at);
        cp_async_wait_group<0>();
        __syncthreads(); // v is there, k is read
        list_block(shared, n + 2, upcoming);
        if ((n + 1) * config::keys < walk.entries)
            load_keys(shared, n + 1);
        find_logits<config>(s, facts.bias, shared.work.form);
        const int32_t *const position =
            shared.position + opaque(threadIdx.x) / warp_lanes * warp_size;
        cut_logits<config>(s, facts.expiry, shared.key[n % 3], position, causal);
        weigh(s, rows);
        add_values<config>(rows.out, s, v_at);
    }
}

/* Out of registers, by way of the warp's rows of q, to rows of whole chunks. */
template <typename config>
__device__ static inline void write_out(tile_memory<config> &shared, const warp_rows<config> &rows,
                                        const forward_plan &plan) {
    using type = element_type<typename config::element>;
    using layout = row_layout<config::head_dim>;
    const row_place &place = shared.work.place;
    const int warp_row = (int)threadIdx.x / warp_lanes * config::row_tiles * mma_rows;
    const int32_t first = place.first + warp_row, lane = threadIdx.x % warp_lanes;
    char *const stage = (char *)(shared.q + warp_row * config::head_dim);
#pragma unroll
    for (int s = 0; s < warp_rows<config>::slots; s++) {
        const float sum = quad_sum(rows.sum[s]), factor = sum == 0 ? 0 : 1 / sum;
        const int32_t row = first + lane / 4 * warp_rows<config>::slots + s;
        if (plan.lse != nullptr && lane % 4 == 0 && row < place.total)
            plan.lse[lse_offset(plan, place, row)] = lse_of(rows.max[s], sum);
#pragma unroll
        for (int d = 0; d < config::head_dim / 8; d++) {
            const float *const out = &rows.out[s / 2][d][s % 2 * 2];
            // by choice: out may be NaN where no key is kept
            const uint32_t both = sum == 0 ? 0 : type::pack(out[0] * factor, out[1] * factor);
            *(uint32_t *)(stage + layout::offset(s * 8 + lane / 4, d) + lane % 4 * 4) = both;
        }
    }
    __syncwarp();
#pragma unroll 1
    for (int r = lane / layout::copiers; r < config::row_tiles * mma_rows;
         r += warp_lanes / layout::copiers) {
        const int32_t row = first + row_order<config>(r);
        if (row < place.total)
            store_row<config::head_dim>(
                (char *)plan.out.data + 2 * row_offset(plan.out, plan, place, row), stage, r,
                plan.head_dim / chunk_channels, shared.work.k.aligned);
    }
}

/* Tiles of a kv head stand together, so that they find its keys in L2; the last ones, which see the
 * most keys, come first. */
template <typename config>
__global__ void __launch_bounds__(config::threads, config::blocks)
    attend_tile(const __grid_constant__ forward_plan plan, const int32_t tiles,
                const bool aligned) {
    extern __shared__ __align__(128) char bytes[];
    tile_memory<config> &shared = *(tile_memory<config> *)bytes;
    const int32_t tile = tiles - 1 - (int32_t)(blockIdx.x % tiles);
    const row_place place = place_of(plan, (int32_t)(blockIdx.x / tiles), tile * config::rows);
    warp_rows<config> rows;
    if (threadIdx.x == 0)
        shared.work = start_work(plan, place, config::rows, aligned);
    list_positions<config::rows>(shared.position, plan, place);
    load_queries<config, config::warps, config::threads>((char *)shared.q, plan.q, plan, place,
                                                         aligned);
    __syncthreads();
    list_block(shared, 0, own_entry<config>(shared.work.walk, 0));
    list_block(shared, 1, own_entry<config>(shared.work.walk, 1));
    __syncthreads();
    load_keys(shared, 0);
    start_rows(rows);
    attend_blocks(shared, rows, plan.causal);
    cp_async_wait_group<0>(); // where no key is listed, q may still be under way
    __syncthreads();
    write_out(shared, rows, plan);
}

static int32_t tiles_of(int32_t rows, int32_t tile) { return (rows + tile - 1) / tile; }

/* The first of the two launches for few queries. */
template <typename few>
static fdma_status attend_splits(const fdma_problem *problem, const forward_plan &plan,
                                 const split_plan &splits, bool aligned) {
    const int32_t tiles = tiles_of(plan.q_len * plan.group, few::rows);
    const int32_t blocks = plan.batch * plan.kv_heads * splits.count * tiles;
    return launch("forward", attend_split<few>,
                  {dim3(blocks), dim3(few::threads), sizeof(few_memory<few>)}, problem, plan,
                  splits, tiles, aligned);
}

/* Forward, over lists that are there. */
template <typename element>
static fdma_status attend(const fdma_problem *problem, const forward_plan &plan,
                          const split_plan &splits) {
    using config = tile_config<element>;
    using one_tile = few_config<element, 1>;
    using more_tiles = few_config<element, few_row_tiles>;
    static_assert(sizeof(tile_memory<config>) <= least_shared_bytes, "a tile fits everywhere");
    static_assert(sizeof(few_memory<more_tiles>) <= least_shared_bytes, "a split fits everywhere");
    const bool aligned =
        is_aligned(plan.q) && is_aligned(plan.k) && is_aligned(plan.v) && is_aligned(plan.out);
    const int32_t rows = plan.q_len * plan.group, heads = plan.batch * plan.kv_heads;
    if (splits.count == 0) {
        const int32_t tiles = tiles_of(rows, config::rows);
        return launch("forward", attend_tile<config>,
                      {dim3(heads * tiles), dim3(config::threads), sizeof(tile_memory<config>)},
                      problem, plan, tiles, aligned);
    }
    if (rows <= one_tile::rows)
        FDMA_TRY(attend_splits<one_tile>(problem, plan, splits, aligned));
    else
        FDMA_TRY(attend_splits<more_tiles>(problem, plan, splits, aligned));
    launch_shape merge = {dim3(heads * rows), dim3(merge_threads)};
    merge.after_dependency = true;
    return launch("forward", merge_splits<one_tile>, merge, problem, plan, splits);
}

static const char *refuses(const fdma_problem *problem) {
    const char *const reason = fdma_cuda_refuses_plan(problem);
    if (reason != NULL)
        return reason;
    const int64_t rows = problem->q_len * problem->group;
    const int64_t blocks =
        (rows / mma_rows + 1) * (problem->q_len <= few_queries ? most_splits : 1);
    if (rows > INT32_MAX / 2 || problem->batch * problem->kv_heads > INT32_MAX / blocks)
        return "more than 2^31 tiles of queries";
    if (problem->head_dim > FDMA_HEAD_DIM)
        return "a larger head_dim than its own";
    return fdma_refuses_before_sm80(problem);
}

/* What a call works from, all of it in the workspace. */
struct forward_task {
    forward_plan plan;
    split_plan splits;
};

static forward_task lay_out(const fdma_problem *problem, fdma_arena *arena) {
    forward_task task;
    task.plan = fdma_cuda_plan_forward(problem, arena);
    task.splits = plan_splits(&task.plan, arena);
    return task;
}

static size_t workspace(const fdma_problem *problem) {
    fdma_arena arena = {};
    lay_out(problem, &arena);
    return fdma_arena_size(&arena);
}

static fdma_status run(const fdma_problem *problem) {
    fdma_arena arena = fdma_arena_of(problem);
    const forward_task task = lay_out(problem, &arena);
    FDMA_TRY(fdma_cuda_build_lists(problem, &task.plan));
    if (problem->dtype == FDMA_FLOAT16)
        return attend<__half>(problem, task.plan, task.splits);
    return attend<__nv_bfloat16>(problem, task.plan, task.splits);
}

/* cuda/sm80/d128, fdma_cuda_sm80_d128 */
#define TEXT(x) #x
#define NAME(head_dim) "cuda/sm80/d" TEXT(head_dim)
#define JOIN(x, y) x##y
#define TABLE(head_dim) JOIN(fdma_cuda_sm80_d, head_dim)

static const fdma_kernel rows[] = {
    {NAME(FDMA_HEAD_DIM), operation_forward, fdma_missing_sm80, refuses, workspace, run, true}};

extern "C" const kernel_table TABLE(FDMA_HEAD_DIM) = {rows, sizeof rows / sizeof rows[0]};
