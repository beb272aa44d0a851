/* The pass that makes dq: a tile of rows, (query, head of the group) pairs of a kv head, walks the
 * keys of its list as forward does. Its sums have the order of the list: bit-equal from run to run,
 * and no buffer in between. */
#ifndef FDMA_CUDA_BACKWARD_SM80_QUERIES_CUH
#define FDMA_CUDA_BACKWARD_SM80_QUERIES_CUH

#include "cuda/backward/sm80/tile.cuh"

template <typename config> struct query_memory {
    using element = typename config::element;
    alignas(128) element q[config::rows * config::head_dim];
    alignas(128) element dout[config::rows * config::head_dim];
    alignas(128) element k[2][config::keys * config::head_dim];
    alignas(128) element v[2][config::keys * config::head_dim];
    key_facts<config::keys> facts[2];
    alignas(16) int32_t key[3][config::keys]; // entries: of this block and the next two
    int32_t position[config::rows];
    tile_work work;
};

/* Of a lane's two rows; slot s is row lane / 4 * 2 + s of the warp's. */
struct row_facts {
    float lse[2], delta[2];
};

template <typename config>
__device__ static inline row_facts find_facts(const backward_plan &plan, const row_place &place) {
    const int lane = threadIdx.x % warp_lanes, warp = threadIdx.x / warp_lanes;
    row_facts facts;
#pragma unroll
    for (int s = 0; s < 2; s++) {
        const int32_t row = place.first + warp * mma_rows + lane / 4 * 2 + s;
        const int32_t i = row / plan.forward.group, of_group = row % plan.forward.group;
        const int64_t h =
            (int64_t)place.b * plan.forward.q_heads + place.g * plan.forward.group + of_group;
        const bool there = row < place.total;
        facts.lse[s] = there ? plan.row_lse[h * plan.rows + i] : INFINITY;
        facts.delta[s] = there ? plan.row_delta[h * plan.rows + i] : 0;
    }
    return facts;
}

/* Starts copying block n, which is listed, into its buffers. */
template <typename config>
__device__ static inline void load_keys(query_memory<config> &shared, int32_t n) {
    const int32_t *const keys = shared.key[n % 3];
    const tile_work &work = shared.work;
    load_block<config>((char *)shared.k[n % 2], keys, work.k, work.walk.kv_len);
    load_block<config>((char *)shared.v[n % 2], keys, work.v, work.walk.kv_len);
    const uint32_t column = opaque(threadIdx.x);
    if (column < config::keys)
        fetch_fact(shared.facts[n % 2], column, work.walk, keys[column]);
    cp_async_commit_group();
}

/* dp - delta, times the slope of softcap; s becomes what softcap makes of it, without its scale. */
template <typename config>
__device__ static inline void find_slopes(float (&s)[1][config::keys / 8][4],
                                          float (&dp)[1][config::keys / 8][4],
                                          const row_facts &facts, float share) {
#pragma unroll
    for (int n = 0; n < config::keys / 8; n++)
#pragma unroll
        for (int x = 0; x < 4; x++)
            dp[0][n][x] -= facts.delta[x / 2];
    if (share == 0)
        return;
#pragma unroll
    for (int n = 0; n < config::keys / 8; n++)
#pragma unroll
        for (int x = 0; x < 4; x++) {
            const float t = tanh_of(s[0][n][x] * share);
            s[0][n][x] = t;
            dp[0][n][x] *= 1 - t * t;
        }
}

/* dp becomes the gradient of <q, k> times scale. */
template <typename config>
__device__ static inline void
find_gradients(query_memory<config> &shared, int32_t n, float (&s)[1][config::keys / 8][4],
               float (&dp)[1][config::keys / 8][4], const row_facts &facts, bool causal) {
    const key_facts<config::keys> &keys = shared.facts[n % 2];
    const int32_t *const position = shared.position + opaque(threadIdx.x) / warp_lanes * mma_rows;
    find_slopes<config>(s, dp, facts, shared.work.form.share);
    find_logits<config>(s, keys.bias, {0, shared.work.form.scale});
    cut_logits<config>(s, keys.expiry, shared.key[n % 3], position, causal);
#pragma unroll
    for (int c = 0; c < config::keys / 8; c++)
#pragma unroll
        for (int x = 0; x < 4; x++)
            dp[0][c][x] *= ex2_approx(s[0][c][x] - facts.lse[x / 2]);
}

template <typename config>
__device__ static inline void sum_blocks(query_memory<config> &shared, const row_facts &facts,
                                         float (&dq)[1][config::head_dim / 8][4], bool causal) {
    constexpr int head_dim = config::head_dim;
    const key_walk &walk = shared.work.walk;
    const int first = threadIdx.x / warp_lanes * mma_rows * head_dim;
    const auto q_at = down_first<head_dim>(shared.q + first);
    const auto dout_at = down_first<head_dim>(shared.dout + first);
    for (int32_t n = 0; n * config::keys < walk.entries; n++) {
        float s[1][config::keys / 8][4], dp[1][config::keys / 8][4];
        cp_async_wait_group<0>();
        __syncthreads(); // block n is there, the one before it is read
        const int32_t upcoming = own_entry<config>(walk, n + 2);
        if ((n + 1) * config::keys < walk.entries)
            load_keys(shared, n + 1);
        multiply_keys<config>(s, q_at.afresh(), right_first<head_dim>(shared.k[n % 2]));
        multiply_keys<config>(dp, dout_at.afresh(), right_first<head_dim>(shared.v[n % 2]));
        const uint32_t column = opaque(threadIdx.x);
        if (column < config::keys)
            shared.key[(n + 2) % 3][column] = upcoming;
        find_gradients(shared, n, s, dp, facts, causal);
        add_values<config>(dq, dp, down_first<head_dim>(shared.k[n % 2]));
    }
}

template <typename config>
__device__ static inline void write_queries(const float (&dq)[1][config::head_dim / 8][4],
                                            const backward_plan &plan, const row_place &place,
                                            const row_facts &facts, bool aligned) {
    using element = typename config::element;
    const int lane = threadIdx.x % warp_lanes, warp = threadIdx.x / warp_lanes;
    const float scale = plan.forward.scale;
#pragma unroll
    for (int s = 0; s < 2; s++) {
        const int32_t row = place.first + warp * mma_rows + lane / 4 * 2 + s;
        if (row >= place.total)
            continue;
        const bool empty = facts.lse[s] == INFINITY;
        const gradient_row<element> to = {(element *)plan.dq.data +
                                              row_offset(plan.dq, plan.forward, place, row),
                                          aligned, plan.accumulate};
#pragma unroll
        for (int d = 0; d < config::head_dim / 8; d++) {
            const int channel = channel_of<1>(d, 0);
            // by choice: the sums of an empty row may be NaN
            if (channel < plan.forward.head_dim)
                put_pair(to, channel, empty ? 0 : dq[0][d][s * 2] * scale,
                         empty ? 0 : dq[0][d][s * 2 + 1] * scale);
        }
    }
}

/* Starts copying q and dout. */
template <typename config>
__device__ static inline void load_rows(query_memory<config> &shared, const backward_plan &plan,
                                        const row_place &place, bool aligned) {
    const forward_plan &forward = plan.forward;
    load_queries<config, config::row_warps, config::threads>((char *)shared.q, forward.q, forward,
                                                             place, aligned);
    load_queries<config, config::row_warps, config::threads>((char *)shared.dout, plan.dout,
                                                             forward, place, aligned);
}

/* Tiles of a kv head stand together, the last ones first, as in forward. */
template <typename config>
__global__ void __launch_bounds__(config::threads, config::blocks)
    sum_queries(const __grid_constant__ backward_plan plan, const int32_t tiles,
                const bool aligned) {
    extern __shared__ __align__(128) char bytes[];
    query_memory<config> &shared = *(query_memory<config> *)bytes;
    const forward_plan &forward = plan.forward;
    const int32_t tile = tiles - 1 - (int32_t)(blockIdx.x % tiles);
    const row_place place = place_of(forward, (int32_t)(blockIdx.x / tiles), tile * config::rows);
    float dq[1][config::head_dim / 8][4];
    if (threadIdx.x == 0)
        shared.work = start_work(forward, place, config::rows, aligned);
    list_positions<config::rows>(shared.position, forward, place);
    load_rows(shared, plan, place, aligned);
    __syncthreads();
    const uint32_t column = threadIdx.x;
    for (int32_t n = 0; n < 2; n++) {
        const int32_t entry = own_entry<config>(shared.work.walk, n);
        if (column < config::keys)
            shared.key[n][column] = entry;
    }
    const row_facts facts = find_facts<config>(plan, place);
    clear_sums(dq);
    __syncthreads();
    load_keys(shared, 0);
    sum_blocks(shared, facts, dq, forward.causal);
    cp_async_wait_group<0>(); // where no key is listed, rows may still be under way
    write_queries<config>(dq, plan, place, facts, aligned);
}

#endif
