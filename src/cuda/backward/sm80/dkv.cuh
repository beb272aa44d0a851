/* The passes that make dk, dv and dbias. The rows of a thread block are keys: k and v stay in
 * shared memory and their sums in registers, while steps of queries are streamed past them. When a
 * slot changes its key, the sums of the old key are written and new sums begin. */
#pragma once

#include "cuda/backward/sm80/weights.cuh"

/* Sums of a warp's keys. A lane has rows lane / 4 and lane / 4 + 8. */
template <typename config> struct key_sums {
    float dk[1][config::warp_columns][4], dv[1][config::warp_columns][4];
    float dbias[2]; // of this lane's columns
};

/* Starts copying k and v of the rows whose key has changed, and loads their records. */
template <typename config>
__device__ static void load_rows(key_memory<config> &shared, const backward_plan &plan,
                                 const int32_t *before, const int32_t *keys) {
    using layout = row_layout<config::head_dim>;
    const key_inputs &inputs = shared.inputs;
    const int32_t kv_len = plan.forward.kv_len;
    const uint32_t thread = opaque(threadIdx.x);
#pragma unroll 1
    for (int n = thread / layout::copiers; n < config::rows;
         n += config::threads / layout::copiers) {
        if (before != NULL && before[n] == keys[n])
            continue;
        const bool there = is_key(keys[n], kv_len);
        const char *const k = row_of_key(inputs.k, there ? keys[n] : 0);
        const char *const v = row_of_key(inputs.v, there ? keys[n] : 0);
        if (inputs.k.aligned) {
            copy_row<config::head_dim>((char *)shared.k, n, k, inputs.k.vecs, there, true);
            copy_row<config::head_dim>((char *)shared.v, n, v, inputs.v.vecs, there, true);
        } else {
            copy_row_unaligned<config::head_dim>((char *)shared.k, n, k, inputs.k.vecs, there);
            copy_row_unaligned<config::head_dim>((char *)shared.v, n, v, inputs.v.vecs, there);
        }
    }
    cp_async_commit_group();
    const int32_t n = thread;
    if (n >= config::rows)
        return;
    key_record record = {INT32_MAX, 0};
    const bool there = is_key(keys[n], kv_len);
    if (there && plan.forward.records != NULL)
        record = plan.forward.records[inputs.head * kv_len + keys[n]];
    shared.expiry[n] = record.expiry;
    if (inputs.by_position)
        shared.from[n] = there ? first_position(plan.forward, keys[n]) : 0;
    shared.bias[n] = there ? record.bias : -INFINITY; // sums of a row without a key are not used
    if constexpr (config::drops)
        shared.codes.key[n] = key_code_of(plan.forward, inputs.b, inputs.g, keys[n]);
}

/* Starts copying the rows of q, dout, lse and delta of a step; q and dout are zero past the end. */
template <typename config>
__device__ static void load_step(key_memory<config> &shared, const backward_plan &plan,
                                 const query_step &step, int stage) {
    using layout = row_layout<config::head_dim>;
    const key_inputs &inputs = shared.inputs;
    const forward_plan &forward = plan.forward;
    const uint32_t thread = opaque(threadIdx.x);
#pragma unroll 1
    for (int n = thread / layout::copiers; n < config::keys;
         n += config::threads / layout::copiers) {
        const bool there = step.query + n < forward.q_len;
        const int32_t i = there ? step.query + n : 0;
        const char *const q = row_at(inputs.q, i) + 2 * step.h * forward.q.head;
        const char *const dout = row_at(inputs.dout, i) + 2 * step.h * plan.dout.head;
        char *const to_q = (char *)shared.q[stage], *const to_dout = (char *)shared.dout[stage];
        if (inputs.q.aligned) {
            copy_row<config::head_dim>(to_q, n, q, inputs.q.vecs, there, true);
            copy_row<config::head_dim>(to_dout, n, dout, inputs.q.vecs, there, true);
        } else {
            copy_row_unaligned<config::head_dim>(to_q, n, q, inputs.q.vecs, there);
            copy_row_unaligned<config::head_dim>(to_dout, n, dout, inputs.q.vecs, there);
        }
    }
    const int n = thread;
    if (n < config::keys) {
        const int64_t head =
            (int64_t)inputs.b * forward.q_heads + inputs.g * forward.group + step.h;
        const int64_t row = head * plan.rows + step.query + n;
        cp_async_4(shared_address(&shared.lse[stage][n]), &plan.row_lse[row]);
        cp_async_4(shared_address(&shared.delta[stage][n]), &plan.row_delta[row]);
        if constexpr (config::drops)
            shared.codes.query[stage][n] =
                row_code_of(forward, inputs.b, inputs.g * forward.group + step.h,
                            inputs.origin + step.query + n);
    }
    cp_async_commit_group();
}

/* Clears q and dout of empty rows. These have no gradient, but their contents may not be finite,
 * and 0 * NaN is NaN. */
template <typename config>
__device__ static void clear_empty(key_memory<config> &shared, int stage) {
    constexpr int row_words = config::head_dim / 2;
    const float *const lse = shared.lse[stage];
    bool some = false;
#pragma unroll
    for (int from = 0; from < config::keys; from += warp_lanes)
        some |= lse[from + threadIdx.x % warp_lanes % config::keys] == INFINITY;
    if (!__any_sync(~0u, some)) // the same in every warp
        return;
    for (int n = threadIdx.x; n < config::keys * row_words; n += config::threads)
        if (lse[n / row_words] == INFINITY) {
            ((uint32_t *)shared.q[stage])[n] = 0;
            ((uint32_t *)shared.dout[stage])[n] = 0;
        }
    __syncthreads();
}
/* One step for the rows' keys in this query block, which are key_memory::key[current]. */
template <typename config>
__device__ static void add_step(key_memory<config> &shared, const backward_plan &plan,
                                key_sums<config> &sums, int current, int stage) {
    constexpr int head_dim = config::head_dim;
    const int warp = opaque(threadIdx.x) / warp_lanes;
    const int first = warp % config::row_warps * mma_rows * head_dim;
    const int column_warp = warp / config::row_warps;
    float s[1][config::keys / 8][4], dp[1][config::keys / 8][4];
    mma_abt<config>(s, down_first<head_dim>(shared.k + first).unhoisted(),
                    right_first<head_dim>(shared.q[stage]).unhoisted());
    mma_abt<config>(dp, down_first<head_dim>(shared.v + first).unhoisted(),
                    right_first<head_dim>(shared.dout[stage]).unhoisted());
    const int32_t position = shared.inputs.origin + shared.step[stage].query;
    uint32_t dropped = 0;
    if constexpr (config::drops) {
        dropped = find_dropped(shared, stage, position, plan.forward.dropout.threshold);
        drop_elements<config>(dp, dropped, plan.forward.dropout_scale);
    }
    find_weights(shared, plan.forward, shared.key[current], stage, load_key_rows(shared), position,
                 s, dp, sums.dbias);
    if constexpr (config::drops)
        drop_elements<config>(s, dropped, 1); // dv is multiplied by dropout_scale at the end
    mma_ab<config>(sums.dv, s,
                   down_first<head_dim>(shared.dout[stage], column_warp * 2).unhoisted());
    mma_ab<config>(sums.dk, dp, down_first<head_dim>(shared.q[stage], column_warp * 2).unhoisted());
}

/* Adds row s of the sums, times scale, to `to`: a gradient, which no other thread block changes
 * meanwhile, or a boundary sum, to which two blocks may add at once. */
template <typename config, bool to_boundary>
__device__ static void add_sums(void *to, bool aligned, int32_t head_dim,
                                const float (&sums)[1][config::warp_columns][4], int s,
                                int column_warp, float scale) {
    using element = typename config::element;
    const int first = channel_of<config::column_warps>(0, column_warp);
#pragma unroll
    for (int d = 0; d < config::warp_columns; d++) {
        const int beyond = tile_channel<config::column_warps>(d);
        const float x = sums[0][d][s * 2] * scale, y = sums[0][d][s * 2 + 1] * scale;
        if (first + beyond >= head_dim)
            continue;
        if (to_boundary) {
            atomicAdd((float *)to + first + beyond, x);
            atomicAdd((float *)to + first + beyond + 1, y);
        } else {
            put_pair<element>({(element *)to + first, aligned, true}, beyond, x, y);
        }
    }
}

/* Writes and clears the sums of the rows whose key changes. */
template <typename config>
__device__ static void write_rows(const key_memory<config> &shared, const backward_plan &plan,
                                  key_sums<config> &sums, const int32_t *keys, const int32_t *next,
                                  bool aligned) {
    using element = typename config::element;
    const key_inputs &inputs = shared.inputs;
    const uint32_t thread = opaque(threadIdx.x);
    const int warp = thread / warp_lanes % config::row_warps;
    const int column_warp = thread / warp_lanes / config::row_warps;
    const bool is_first = column_warp == 0 && thread % 4 == 0; // of the lanes of a row
    const int32_t dim = plan.forward.head_dim;
    const float scale = plan.forward.scale, dv_scale = plan.forward.dropout_scale;
#pragma unroll
    for (int s = 0; s < 2; s++) {
        const int n = warp * mma_rows + thread % warp_lanes / 4 + s * 8;
        const int32_t key = keys[n], slot = inputs.first_slot + n;
        const float dbias = quad_sum(sums.dbias[s]);
        const bool other = next[n] != key, there = other && is_key(key, plan.forward.kv_len);
        const int32_t boundary = there && inputs.changes_keys
                                     ? boundary_of(plan, inputs.head, inputs.partition, slot, key)
                                     : 0;
        if (boundary > 0) {
            const int64_t row = boundary_row(plan, inputs.head, boundary, slot);
            add_sums<config, true>(plan.boundary.dk + row * dim, true, dim, sums.dk, s, column_warp,
                                   scale);
            add_sums<config, true>(plan.boundary.dv + row * dim, true, dim, sums.dv, s, column_warp,
                                   config::drops ? dv_scale : 1);
            if (is_first)
                atomicAdd(plan.boundary.dbias + row, dbias);
        } else if (there) {
            element *const dk = dk_of_key<element>(plan, inputs.b, inputs.g, key);
            add_sums<config, false>(dk, aligned, dim, sums.dk, s, column_warp, scale);
            element *const dv = dv_of_key<element>(plan, inputs.b, inputs.g, key);
            add_sums<config, false>(dv, aligned, dim, sums.dv, s, column_warp,
                                    config::drops ? dv_scale : 1);
            if (is_first && plan.dbias.data != NULL)
                *dbias_of_key(plan, inputs.b, inputs.g, key) += dbias;
        }
#pragma unroll
        for (int d = 0; d < config::warp_columns; d++)
#pragma unroll
            for (int x = s * 2; x < s * 2 + 2; x++) {
                sums.dk[0][d][x] = other ? 0 : sums.dk[0][d][x];
                sums.dv[0][d][x] = other ? 0 : sums.dv[0][d][x];
            }
        sums.dbias[s] = other ? 0 : sums.dbias[s];
    }
}

/* Moves to the keys of the next query block at the end of one. `upcoming` is the next key of row
 * threadIdx.x, or no key after the last query block. Returns true if `current` must change. */
template <typename config>
__device__ static bool change_keys(key_memory<config> &shared, const backward_plan &plan,
                                   key_sums<config> &sums, int current, int32_t upcoming,
                                   bool aligned) {
    const uint32_t n = opaque(threadIdx.x);
    bool other = false;
    if (n < config::rows) {
        shared.key[current ^ 1][n] = upcoming;
        other = upcoming != shared.key[current][n];
    }
    if (!__syncthreads_or(other))
        return false;
    write_rows(shared, plan, sums, shared.key[current], shared.key[current ^ 1], aligned);
    load_rows(shared, plan, shared.key[current], shared.key[current ^ 1]);
    return true; // the next step waits for these copies
}

template <typename config>
__device__ static int32_t own_key(const key_memory<config> &shared, const backward_plan &plan,
                                  int32_t query_block) {
    const uint32_t n = opaque(threadIdx.x);
    return n < config::rows && query_block < shared.inputs.end_block
               ? key_of_row(plan, shared.inputs, query_block, n)
               : -1;
}

/* The step after the one in a stage. Shared memory holds steps to save registers. */
template <typename config>
__device__ static query_step next_step(const key_memory<config> &shared, const backward_plan &plan,
                                       int stage) {
    return step_after(shared.step[stage], config::keys, plan.forward.group, plan.forward.q_len);
}

/* Starts loading the next step, if there is one, into the other stage. */
template <typename config>
__device__ static void load_next(key_memory<config> &shared, const backward_plan &plan, int stage) {
    const query_step next = next_step(shared, plan, stage);
    if (threadIdx.x == 0)
        shared.step[stage ^ 1] = next;
    if (next.query_block < shared.inputs.end_block)
        load_step(shared, plan, next, stage ^ 1);
}

template <typename config>
__device__ static void sum_steps(key_memory<config> &shared, const backward_plan &plan,
                                 key_sums<config> &sums, bool aligned) {
    const int32_t end = shared.inputs.end_block;
    int32_t query_block = shared.step[0].query_block,
            upcoming = own_key(shared, plan, query_block + 1);
    int stage = 0, current = 0;
    load_step(shared, plan, shared.step[0], stage);
    while (query_block < end) {
        cp_async_wait_group<0>();
        __syncthreads(); // this step has arrived, and every warp has read the previous one
        load_next(shared, plan, stage);
        clear_empty(shared, stage);
        add_step(shared, plan, sums, current, stage);
        const int32_t next = next_step(shared, plan, stage).query_block;
        if (next > query_block) {
            if (shared.inputs.changes_keys || next == end)
                current ^= change_keys(shared, plan, sums, current, upcoming, aligned);
            upcoming = own_key(shared, plan, next + 1);
        }
        query_block = next;
        stage ^= 1;
    }
}

template <typename config>
static __global__ void __launch_bounds__(config::threads, config::blocks)
    sum_keys(const __grid_constant__ backward_plan plan, const key_pass pass, const bool aligned) {
    extern __shared__ __align__(128) char bytes[];
    key_memory<config> &shared = *(key_memory<config> *)bytes;
    const int64_t head = head_of_block();
    if (head >= (int64_t)plan.forward.batch * plan.forward.kv_heads)
        return;
    if (threadIdx.x == 0) {
        shared.inputs = key_inputs_of(plan, pass, head, blockIdx.x, config::rows, aligned);
        shared.step[0] = first_step(shared.inputs, config::keys);
    }
    __syncthreads();
    if (shared.inputs.query_block >= shared.inputs.end_block)
        return;
    const int32_t key = own_key(shared, plan, shared.inputs.query_block);
    if (threadIdx.x < config::rows)
        shared.key[0][threadIdx.x] = key;
    __syncthreads();
    key_sums<config> sums;
    clear_sums(sums.dk);
    clear_sums(sums.dv);
    sums.dbias[0] = sums.dbias[1] = 0;
    load_rows(shared, plan, NULL, shared.key[0]);
    sum_steps(shared, plan, sums, aligned);
}
