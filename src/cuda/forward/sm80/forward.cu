/* Forward for head_dim up to FDMA_HEAD_DIM, on any device from compute capability 8.0:
 * FlashAttention's tiling with mma.sync, over the keys of a tile list. A thread block takes one
 * tile of rows of a kv head (mma/attention.cuh) and visits its list one key block at a time.
 *
 * Source: arXiv:2205.14135; arXiv:2307.08691. */
#include <type_traits>

#include "cuda/mma/attention.cuh"
#include "cuda/plan/host.cuh"

/* pairs: with attn_mask or attn_bias; drops: with dropout. Both take registers. */
template <typename type, bool pairs, bool drops_> struct tile_config {
    using element = type;
    static constexpr bool has_pairs = pairs;
    static constexpr bool drops = drops_;
    static constexpr int head_dim = FDMA_HEAD_DIM;
    static constexpr int warps = 4;
    // of a warp: as many as fit in registers
    static constexpr int row_tiles = head_dim <= 128 && !has_pairs ? 2 : 1;
    static constexpr int keys = (has_pairs || drops) && head_dim > 192 ? 32 : 64; // of a key block
    // on a multiprocessor
    static constexpr int blocks = head_dim <= 64 && !drops && !has_pairs ? 3 : 2;
    static constexpr int threads = warps * warp_lanes;
    static constexpr int rows = warps * row_tiles * mma_rows;
};

struct no_pairs {};

template <typename config> struct tile_memory {
    using element = typename config::element;
    alignas(128) element q[config::rows * config::head_dim]; // in the epilogue: out
    alignas(128) element k[config::keys * config::head_dim];
    alignas(128) element v[config::keys * config::head_dim];
    key_records<config::keys> records[2];     // of this key block and the next
    alignas(16) int32_t key[3][config::keys]; // list entries: of this key block and the next two
    int32_t position[config::rows];
    typename codes_of<config, config::drops>::type codes; // of dropout
    std::conditional_t<config::has_pairs, pair_rows<config::rows>, no_pairs> pairs;
    tile_inputs inputs;
};

/* Starts copying k and the records of key block n, whose entries are in shared memory. */
template <typename config>
__device__ static void load_keys(tile_memory<config> &shared, const forward_plan &plan, int32_t n) {
    const int32_t *const keys = shared.key[n % 3];
    copy_block<config>((char *)shared.k, keys, shared.inputs.k, shared.inputs.keys.kv_len);
    copy_records(shared.records[n % 2], shared.inputs.keys, keys);
    if constexpr (config::drops)
        write_key_codes(shared.codes, plan, shared.inputs.range, keys, n);
    cp_async_commit_group();
}

template <typename config>
__device__ static void load_values(tile_memory<config> &shared, int32_t n) {
    copy_block<config>((char *)shared.v, shared.key[n % 3], shared.inputs.v,
                       shared.inputs.keys.kv_len);
    cp_async_commit_group();
}

/* A warp's rows and all key blocks. The values of a block arrive during its first product, the keys
 * of the next block during this one's softmax and second product. */
template <typename config>
__device__ static void attend_blocks(tile_memory<config> &shared, row_state<config> &state,
                                     const forward_plan &plan) {
    constexpr int head_dim = config::head_dim, warp_size = config::row_tiles * mma_rows;
    const tile_list &keys = shared.inputs.keys;
    const int warp = threadIdx.x / warp_lanes;
    const auto q_at = down_first<head_dim>(shared.q + warp * warp_size * head_dim);
    const auto k_at = right_first<head_dim>(shared.k);
    const auto v_at = down_first<head_dim>(shared.v);
    for (int32_t n = 0; n * config::keys < keys.entries; n++) {
        const key_records<config::keys> &records = shared.records[n % 2];
        float s[config::row_tiles][config::keys / 8][4];
        cp_async_wait_group<0>();
        __syncthreads(); // k has arrived, and every warp has read the previous block's v
        load_values(shared, n);
        const int32_t upcoming = own_entry<config>(keys, n + 2);
        mma_abt<config>(s, q_at.unhoisted(), k_at); // S = Q K^T
        cp_async_wait_group<0>();
        __syncthreads(); // v has arrived, and every warp has read k
        store_entry(shared.key, n + 2, upcoming);
        if ((n + 1) * config::keys < keys.entries)
            load_keys(shared, plan, n + 1);
        find_logits<config>(s, records.bias, shared.inputs.logits);
        const int32_t first_row = opaque(threadIdx.x) / warp_lanes * warp_size;
        if constexpr (config::has_pairs)
            add_pairs<config>(s, plan, keys, shared.pairs, shared.position, first_row, records,
                              shared.key[n % 3], n);
        else
            mask_logits<config>(s, records.expiry,
                                first_positions(records, shared.key[n % 3], keys),
                                shared.position + first_row, plan.by_position);
        weigh(s, state); // P = exp2(S - row_max)
        if constexpr (config::drops)
            drop_elements(s, shared.codes, shared.position, first_row, n, plan.dropout.threshold,
                          1);
        mma_ab<config>(state.out, s, v_at); // O += P V
    }
}

/* The epilogue. Rows go from registers to the warp's rows of q in shared memory, and from there to
 * out one vector at a time. */
template <typename config>
__device__ static void write_out(tile_memory<config> &shared, const row_state<config> &state,
                                 const forward_plan &plan) {
    using type = element_type<typename config::element>;
    using layout = row_layout<config::head_dim>;
    const row_range &range = shared.inputs.range;
    const int warp_row = (int)threadIdx.x / warp_lanes * config::row_tiles * mma_rows;
    const int32_t first = range.first + warp_row, lane = threadIdx.x % warp_lanes;
    char *const staged = (char *)(shared.q + warp_row * config::head_dim);
#pragma unroll
    for (int r = 0; r < row_state<config>::rows; r++) {
        const int32_t row = first + lane / 4 * row_state<config>::rows + r;
        row_result result =
            result_of(state.row_max[r], quad_sum(state.row_sum[r]), sink_of_row(plan, range, row));
        if constexpr (config::drops)
            result.scale *= plan.dropout_scale;
        if (plan.lse.data != NULL && lane % 4 == 0 && row < range.total)
            *lse_at(plan, range, row) = result.lse;
#pragma unroll
        for (int d = 0; d < config::head_dim / 8; d++) {
            const float *const out = &state.out[r / 2][d][r % 2 * 2];
            // not out * 0: out may be NaN if no key is kept
            const uint32_t pair =
                result.scale == 0 ? 0 : type::pack(out[0] * result.scale, out[1] * result.scale);
            *(uint32_t *)(staged + layout::offset(r * 8 + lane / 4, d) + lane % 4 * 4) = pair;
        }
    }
    __syncwarp();
#pragma unroll 1
    for (int r = lane / layout::copiers; r < config::row_tiles * mma_rows;
         r += warp_lanes / layout::copiers) {
        const int32_t row = first + row_order<config>(r);
        if (row < range.total)
            store_row<config::head_dim>(
                (char *)plan.out.data + 2 * row_offset(plan.out, plan, range, row), staged, r,
                plan.head_dim / vec_channels, shared.inputs.k.aligned);
    }
}

/* One tile. The tiles of a kv head are neighbours, so that they find its keys in the L2 cache. The
 * last ones, which see the most keys, come first. */
template <typename config>
static __global__ void __launch_bounds__(config::threads, config::blocks)
    attend_tile(const __grid_constant__ forward_plan plan, const int32_t tiles,
                const bool aligned) {
    extern __shared__ __align__(128) char bytes[];
    tile_memory<config> &shared = *(tile_memory<config> *)bytes;
    const int32_t tile = tiles - 1 - (int32_t)(blockIdx.x % tiles);
    const row_range range = row_range_of(plan, (int32_t)(blockIdx.x / tiles), tile * config::rows);
    row_state<config> state;
    if (threadIdx.x == 0)
        shared.inputs = tile_inputs_of(plan, range, config::rows, aligned);
    write_positions<config::rows>(shared.position, plan, range, key_count(plan, range.b));
    if constexpr (config::drops)
        write_row_codes(shared.codes, plan, range, key_count(plan, range.b));
    load_queries<config, config::warps, config::threads>((char *)shared.q, plan.q, plan, range,
                                                         aligned);
    __syncthreads();
    if constexpr (config::has_pairs)
        write_pair_rows(shared.pairs, plan, range, shared.inputs.keys);
    for (int32_t n = 0; n < 2; n++)
        store_entry(shared.key, n, own_entry<config>(shared.inputs.keys, n));
    __syncthreads();
    load_keys(shared, plan, 0);
    clear_rows(state);
    attend_blocks(shared, state, plan);
    cp_async_wait_group<0>(); // if the list is empty, copies of q may still be in flight
    __syncthreads();
    write_out(shared, state, plan);
}

template <typename config>
static fdma_status attend(const fdma_problem *problem, const forward_plan &plan) {
    static_assert(sizeof(tile_memory<config>) <= least_shared_bytes, "a tile fits everywhere");
    const int32_t tiles = (int32_t)divide_up(plan.q_len * plan.group, config::rows);
    const int32_t heads = plan.batch * plan.kv_heads;
    return launch("forward", attend_tile<config>,
                  {dim3(heads * tiles), dim3(config::threads), sizeof(tile_memory<config>)},
                  problem, plan, tiles, is_aligned(plan));
}

template <typename element>
static fdma_status attend_elements(const fdma_problem *problem, const forward_plan &plan) {
    const bool drops = problem->dropout.threshold != 0;
    if (plan.mask.data != NULL || plan.pair_bias.data != NULL)
        return drops ? attend<tile_config<element, true, true>>(problem, plan)
                     : attend<tile_config<element, true, false>>(problem, plan);
    return drops ? attend<tile_config<element, false, true>>(problem, plan)
                 : attend<tile_config<element, false, false>>(problem, plan);
}

static const char *refuses(const fdma_problem *problem) {
    const char *const reason = fdma_cuda_refuses_plan(problem, FDMA_HEAD_DIM);
    return reason != NULL ? reason : fdma_refuses_before_sm80(problem);
}

static fdma_status run(const fdma_problem *problem) {
    fdma_arena arena = fdma_arena_of(problem);
    const forward_plan plan = fdma_cuda_plan_forward(problem, &arena);
    FDMA_TRY(fdma_cuda_build_lists(problem, &plan));
    if (problem->only_mask_lists)
        return FDMA_OK;
    return problem->dtype == FDMA_FLOAT16 ? attend_elements<float16>(problem, plan)
                                          : attend_elements<__nv_bfloat16>(problem, plan);
}

FDMA_CUDA_TABLE(FDMA_POINT_TABLE(fdma_cuda_sm80_d, FDMA_HEAD_DIM),
                {FDMA_POINT_NAME("cuda/sm80/d", FDMA_HEAD_DIM), operation_forward,
                 fdma_missing_sm80, refuses, workspace_of<fdma_cuda_plan_forward>, run, true, 0});
