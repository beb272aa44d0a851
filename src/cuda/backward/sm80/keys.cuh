/* The pass that makes dk, dv and dbias: a block's rows are keys, whose k and v stay in shared
 * memory and whose sums stay in registers; queries stream past. Where a slot's key changes, its
 * sums are written and the next key's begin. */
#ifndef FDMA_CUDA_BACKWARD_SM80_KEYS_CUH
#define FDMA_CUDA_BACKWARD_SM80_KEYS_CUH

#include "cuda/backward/sm80/walk.cuh"

template <typename config> struct key_memory {
    using element = typename config::element;
    alignas(128) element k[config::rows * config::head_dim];
    alignas(128) element v[config::rows * config::head_dim];
    alignas(128) element q[2][config::keys * config::head_dim];
    alignas(128) element dout[2][config::keys * config::head_dim];
    alignas(16) float lse[2][config::keys], delta[2][config::keys];
    int32_t key[2][config::rows]; // of this epoch and, at its end, the next
    int32_t expiry[config::rows];
    float bias[config::rows];
    query_step step[2]; // in each buffer
    key_work work;
};

/* Sums of a warp's keys; of a lane rows lane / 4 and lane / 4 + 8. */
template <typename config> struct key_sums {
    float dk[1][config::share_columns][4], dv[1][config::share_columns][4];
    float dbias[2]; // of this lane's columns
};

/* What weighing needs of a lane's two rows. */
struct key_rows {
    float bias[2];
    int32_t key[2], expiry[2];
};

/* Starts copying k and v of the rows whose key is another one than before. */
template <typename config>
__device__ static inline void load_rows(key_memory<config> &shared, const backward_plan &plan,
                                        const int32_t *before, const int32_t *keys) {
    using layout = row_layout<config::head_dim>;
    const key_work &work = shared.work;
    const int32_t kv_len = plan.forward.kv_len;
    const uint32_t thread = opaque(threadIdx.x);
#pragma unroll 1
    for (int n = thread / layout::copiers; n < config::rows;
         n += config::threads / layout::copiers) {
        if (before != nullptr && before[n] == keys[n])
            continue;
        const bool there = is_key(keys[n], kv_len);
        const char *const k = row_at(work.k, there ? keys[n] : 0);
        const char *const v = row_at(work.v, there ? keys[n] : 0);
        if (work.k.aligned) {
            copy_row<config::head_dim>((char *)shared.k, n, k, work.k.chunks, there);
            copy_row<config::head_dim>((char *)shared.v, n, v, work.v.chunks, there);
        } else {
            copy_row_slowly<config::head_dim>((char *)shared.k, n, k, work.k.chunks, there);
            copy_row_slowly<config::head_dim>((char *)shared.v, n, v, work.v.chunks, there);
        }
    }
    cp_async_commit_group();
    const int32_t n = thread;
    if (n >= config::rows)
        return;
    key_record record = {INT32_MAX, 0};
    const bool there = is_key(keys[n], kv_len);
    if (there && plan.forward.records != nullptr)
        record = plan.forward.records[work.head * kv_len + keys[n]];
    shared.expiry[n] = record.expiry;
    shared.bias[n] = there ? record.bias : -INFINITY; // sums of no key are not used
}

/* Starts copying a step's rows of q, dout, lse and delta; zeros past the end. */
template <typename config>
__device__ static inline void load_step(key_memory<config> &shared, const backward_plan &plan,
                                        const query_step &step, int buffer) {
    using layout = row_layout<config::head_dim>;
    const key_work &work = shared.work;
    const forward_plan &forward = plan.forward;
    const uint32_t thread = opaque(threadIdx.x);
#pragma unroll 1
    for (int n = thread / layout::copiers; n < config::keys;
         n += config::threads / layout::copiers) {
        const bool there = step.query + n < forward.q_len;
        const int32_t i = there ? step.query + n : 0;
        const char *const q = row_at(work.q, i) + 2 * step.h * forward.q.head;
        const char *const dout = row_at(work.dout, i) + 2 * step.h * plan.dout.head;
        char *const to_q = (char *)shared.q[buffer], *const to_dout = (char *)shared.dout[buffer];
        if (work.q.aligned) {
            copy_row<config::head_dim>(to_q, n, q, work.q.chunks, there);
            copy_row<config::head_dim>(to_dout, n, dout, work.q.chunks, there);
        } else {
            copy_row_slowly<config::head_dim>(to_q, n, q, work.q.chunks, there);
            copy_row_slowly<config::head_dim>(to_dout, n, dout, work.q.chunks, there);
        }
    }
    const int n = thread;
    if (n < config::keys) {
        const int64_t head = (int64_t)work.b * forward.q_heads + work.g * forward.group + step.h;
        const int64_t row = head * plan.rows + step.query + n;
        cp_async_4(shared_address(&shared.lse[buffer][n]), &plan.row_lse[row]);
        cp_async_4(shared_address(&shared.delta[buffer][n]), &plan.row_delta[row]);
    }
    cp_async_commit_group();
}

/* Empty rows have no gradient, whatever q and dout hold there: 0 * NaN is NaN. */
template <typename config>
__device__ static inline void clear_empty(key_memory<config> &shared, int buffer) {
    constexpr int row_words = config::head_dim / 2;
    const float *const lse = shared.lse[buffer];
    bool some = false;
#pragma unroll
    for (int from = 0; from < config::keys; from += warp_lanes)
        some |= lse[from + threadIdx.x % warp_lanes % config::keys] == INFINITY;
    if (!__any_sync(~0u, some)) // all warps see the same
        return;
    for (int n = threadIdx.x; n < config::keys * row_words; n += config::threads)
        if (lse[n / row_words] == INFINITY) {
            ((uint32_t *)shared.q[buffer])[n] = 0;
            ((uint32_t *)shared.dout[buffer])[n] = 0;
        }
    __syncthreads();
}

template <typename config>
__device__ static inline key_rows find_rows(const key_memory<config> &shared, int turn) {
    const int warp = threadIdx.x / warp_lanes % config::row_warps;
    key_rows rows;
#pragma unroll
    for (int s = 0; s < 2; s++) {
        const int n = warp * mma_rows + opaque(threadIdx.x) % warp_lanes / 4 + s * 8;
        rows.bias[s] = shared.bias[n];
        rows.key[s] = shared.key[turn][n];
        rows.expiry[s] = shared.expiry[n];
    }
    return rows;
}

/* What a column brings: its query's lse and delta. */
struct column_facts {
    float2 lse, delta;
};

template <typename config>
__device__ static inline column_facts facts_of(const key_memory<config> &shared, int buffer,
                                               int n) {
    const int pair = n * 4 + threadIdx.x % 4;
    return {((const float2 *)shared.lse[buffer])[pair],
            ((const float2 *)shared.delta[buffer])[pair]};
}

/* A logit becomes its weight, dp the logit's gradient. */
__device__ static inline void weigh(float &s, float &dp, const column_facts &facts, int x) {
    s = ex2_approx(s - (x % 2 == 0 ? facts.lse.x : facts.lse.y));
    dp = s * (dp - (x % 2 == 0 ? facts.delta.x : facts.delta.y));
}

__device__ static inline bool is_kept(const key_rows &rows, int slot, int32_t position,
                                      bool causal) {
    return position < rows.expiry[slot] && (!causal || rows.key[slot] <= position);
}

/* No weight and no gradient where a query does not keep the key; not by logits of -inf: a query of
 * NaN would still reach it. position: of column 0. */
template <typename config>
__device__ static inline void cut_weights(float (&s)[1][config::keys / 8][4],
                                          float (&dp)[1][config::keys / 8][4], const key_rows &rows,
                                          int32_t position, bool causal) {
    const int32_t last = position + config::keys - 1, lane = threadIdx.x % warp_lanes;
    const bool cut = rows.expiry[0] <= last || rows.expiry[1] <= last ||
                     (causal && (rows.key[0] > position || rows.key[1] > position));
    if (!__any_sync(~0u, cut))
        return;
#pragma unroll
    for (int n = 0; n < config::keys / 8; n++)
#pragma unroll
        for (int x = 0; x < 4; x++) {
            const int32_t p = position + n * 8 + lane % 4 * 2 + x % 2;
            const bool kept = is_kept(rows, x / 2, p, causal);
            s[0][n][x] = kept ? s[0][n][x] : 0;
            dp[0][n][x] = kept ? dp[0][n][x] : 0;
        }
}

/* s becomes weights, dp the gradients of logits. */
template <typename config>
__device__ static inline void weigh_step(const key_memory<config> &shared, int buffer,
                                         const key_rows &rows, int32_t position,
                                         float (&s)[1][config::keys / 8][4],
                                         float (&dp)[1][config::keys / 8][4], float (&part)[2]) {
    const float scale = shared.work.form.scale;
#pragma unroll
    for (int n = 0; n < config::keys / 8; n++) {
        const column_facts facts = facts_of(shared, buffer, n);
#pragma unroll
        for (int x = 0; x < 4; x++) {
            s[0][n][x] = fmaf(s[0][n][x], scale, rows.bias[x / 2]);
            weigh(s[0][n][x], dp[0][n][x], facts, x);
        }
    }
    cut_weights<config>(s, dp, rows, position, shared.work.causal);
#pragma unroll
    for (int n = 0; n < config::keys / 8; n++)
#pragma unroll
        for (int x = 0; x < 4; x++)
            part[x / 2] += dp[0][n][x];
}

/* The same with softcap, element by element, so that no second copy of the products is kept; dp
 * becomes the gradient of what softcap is of. */
template <typename config>
__device__ static inline void weigh_capped(const key_memory<config> &shared, int buffer,
                                           const key_rows &rows, int32_t position,
                                           float (&s)[1][config::keys / 8][4],
                                           float (&dp)[1][config::keys / 8][4], float (&part)[2]) {
    const logit_form form = shared.work.form;
    const bool causal = shared.work.causal;
#pragma unroll
    for (int n = 0; n < config::keys / 8; n++) {
        const column_facts facts = facts_of(shared, buffer, n);
#pragma unroll
        for (int x = 0; x < 4; x++) {
            const float t = tanh_of(s[0][n][x] * form.share);
            const int32_t p = position + n * 8 + threadIdx.x % 4 * 2 + x % 2;
            const bool kept = is_kept(rows, x / 2, p, causal);
            s[0][n][x] = fmaf(t, form.scale, rows.bias[x / 2]);
            weigh(s[0][n][x], dp[0][n][x], facts, x);
            part[x / 2] += kept ? dp[0][n][x] : 0;
            s[0][n][x] = kept ? s[0][n][x] : 0;
            dp[0][n][x] = kept ? dp[0][n][x] * (1 - t * t) : 0;
        }
    }
}

/* Products become weights, and gradients of <q, k> times scale. */
template <typename config>
__device__ static inline void find_weights(const key_memory<config> &shared, int buffer,
                                           const key_rows &rows, int32_t position,
                                           float (&s)[1][config::keys / 8][4],
                                           float (&dp)[1][config::keys / 8][4], float (&dbias)[2]) {
    float part[2] = {}; // errors grow with the number of steps, not of queries
    if (shared.work.form.share == 0)
        weigh_step(shared, buffer, rows, position, s, dp, part);
    else
        weigh_capped(shared, buffer, rows, position, s, dp, part);
    dbias[0] += part[0];
    dbias[1] += part[1];
}

/* One step against the rows of this epoch. */
template <typename config>
__device__ static inline void add_step(key_memory<config> &shared, const backward_plan &plan,
                                       key_sums<config> &sums, int buffer, int turn) {
    constexpr int head_dim = config::head_dim;
    const int warp = opaque(threadIdx.x) / warp_lanes;
    const int first = warp % config::row_warps * mma_rows * head_dim;
    const int share = warp / config::row_warps;
    float s[1][config::keys / 8][4], dp[1][config::keys / 8][4];
    multiply_keys<config>(s, down_first<head_dim>(shared.k + first).afresh(),
                          right_first<head_dim>(shared.q[buffer]).afresh());
    multiply_keys<config>(dp, down_first<head_dim>(shared.v + first).afresh(),
                          right_first<head_dim>(shared.dout[buffer]).afresh());
    const int32_t position = shared.step[buffer].query + plan.forward.kv_len - plan.forward.q_len;
    find_weights(shared, buffer, find_rows(shared, turn), position, s, dp, sums.dbias);
    add_values<config>(sums.dv, s, down_first<head_dim>(shared.dout[buffer], share * 2).afresh());
    add_values<config>(sums.dk, dp, down_first<head_dim>(shared.q[buffer], share * 2).afresh());
}

/* Adds row slot s of sums times scale to what is at `to`: a gradient that no other block changes
 * meanwhile, or a carry, to which two may add at once, in either order: both begin at 0. */
template <typename config, bool carried>
__device__ static inline void add_sums(void *to, bool aligned, int32_t head_dim,
                                       const float (&sums)[1][config::share_columns][4], int s,
                                       int share, float scale) {
    using element = typename config::element;
    const int first = channel_of<config::shares>(0, share);
#pragma unroll
    for (int d = 0; d < config::share_columns; d++) {
        const int beyond = tile_channel<config::shares>(d);
        const float x = sums[0][d][s * 2] * scale, y = sums[0][d][s * 2 + 1] * scale;
        if (first + beyond >= head_dim)
            continue;
        if (carried) {
            atomicAdd((float *)to + first + beyond, x);
            atomicAdd((float *)to + first + beyond + 1, y);
        } else {
            put_pair<element>({(element *)to + first, aligned, true}, beyond, x, y);
        }
    }
}

/* Writes and clears the sums of rows whose key is another one now. */
template <typename config>
__device__ static inline void finish_rows(const key_memory<config> &shared,
                                          const backward_plan &plan, key_sums<config> &sums,
                                          const int32_t *keys, const int32_t *next, bool aligned) {
    using element = typename config::element;
    const key_work &work = shared.work;
    const uint32_t thread = opaque(threadIdx.x);
    const int warp = thread / warp_lanes % config::row_warps;
    const int share = thread / warp_lanes / config::row_warps;
    const bool is_first = share == 0 && thread % 4 == 0; // of a row's lanes
    const int32_t dim = plan.forward.head_dim;
    const float scale = plan.forward.scale;
#pragma unroll
    for (int s = 0; s < 2; s++) {
        const int n = warp * mma_rows + thread % warp_lanes / 4 + s * 8;
        const int32_t key = keys[n], slot = work.first_slot + n;
        const float dbias = quad_sum(sums.dbias[s]);
        const bool other = next[n] != key, there = other && is_key(key, plan.forward.kv_len);
        const int32_t border =
            there && work.changes ? border_of(plan, work.head, work.part, slot, key) : 0;
        if (border > 0) {
            const int64_t row = carry_row(plan, work.head, border, slot);
            add_sums<config, true>(plan.carry.dk + row * dim, true, dim, sums.dk, s, share, scale);
            add_sums<config, true>(plan.carry.dv + row * dim, true, dim, sums.dv, s, share, 1);
            if (is_first)
                atomicAdd(plan.carry.dbias + row, dbias);
        } else if (there) {
            element *const dk = row_at<element>(plan.dk, work, key);
            add_sums<config, false>(dk, aligned, dim, sums.dk, s, share, scale);
            element *const dv = row_at<element>(plan.dv, work, key);
            add_sums<config, false>(dv, aligned, dim, sums.dv, s, share, 1);
            if (is_first && plan.dbias != nullptr)
                plan.dbias[work.b * plan.dbias_batch + work.g * plan.dbias_head + key] += dbias;
        }
#pragma unroll
        for (int d = 0; d < config::share_columns; d++)
#pragma unroll
            for (int x = s * 2; x < s * 2 + 2; x++) {
                sums.dk[0][d][x] = other ? 0 : sums.dk[0][d][x];
                sums.dv[0][d][x] = other ? 0 : sums.dv[0][d][x];
            }
        sums.dbias[s] = other ? 0 : sums.dbias[s];
    }
}

/* At an epoch's end: rows whose slot has another key in the next one change to it. `upcoming`: of
 * row threadIdx.x; past the last epoch none. Returns whether key[turn] is the other half now. */
template <typename config>
__device__ static inline bool change_keys(key_memory<config> &shared, const backward_plan &plan,
                                          key_sums<config> &sums, int turn, int32_t upcoming,
                                          bool aligned) {
    const uint32_t n = opaque(threadIdx.x);
    bool other = false;
    if (n < config::rows) {
        shared.key[turn ^ 1][n] = upcoming;
        other = upcoming != shared.key[turn][n];
    }
    if (!__syncthreads_or(other))
        return false;
    finish_rows(shared, plan, sums, shared.key[turn], shared.key[turn ^ 1], aligned);
    load_rows(shared, plan, shared.key[turn], shared.key[turn ^ 1]);
    return true; // the next step waits for them
}

/* The key of row threadIdx.x in an epoch. */
template <typename config>
__device__ static inline int32_t own_key(const key_memory<config> &shared,
                                         const backward_plan &plan, int32_t epoch) {
    const uint32_t n = opaque(threadIdx.x);
    return n < config::rows && epoch < shared.work.end ? row_key(plan, shared.work, epoch, n) : -1;
}

/* Where the block stands is kept in shared memory: registers are for sums. */
template <typename config>
__device__ static inline query_step next_step(const key_memory<config> &shared,
                                              const backward_plan &plan, int buffer) {
    return step_after(shared.step[buffer], config::keys, plan.forward.group, plan.forward.q_len);
}

/* The other buffer's step: starts copying it, if there is one. */
template <typename config>
__device__ static inline void load_next(key_memory<config> &shared, const backward_plan &plan,
                                        int buffer) {
    const query_step next = next_step(shared, plan, buffer);
    if (threadIdx.x == 0)
        shared.step[buffer ^ 1] = next;
    if (next.epoch < shared.work.end)
        load_step(shared, plan, next, buffer ^ 1);
}

template <typename config>
__device__ static inline void sum_steps(key_memory<config> &shared, const backward_plan &plan,
                                        key_sums<config> &sums, bool aligned) {
    const int32_t end = shared.work.end;
    int32_t epoch = shared.step[0].epoch, upcoming = own_key(shared, plan, epoch + 1);
    int buffer = 0, turn = 0;
    load_step(shared, plan, shared.step[0], buffer);
    while (epoch < end) {
        cp_async_wait_group<0>();
        __syncthreads(); // this step is there, the one before it is read
        load_next(shared, plan, buffer);
        clear_empty(shared, buffer);
        add_step(shared, plan, sums, buffer, turn);
        const int32_t next = next_step(shared, plan, buffer).epoch;
        if (next > epoch) {
            if (shared.work.changes || next == end)
                turn ^= change_keys(shared, plan, sums, turn, upcoming, aligned);
            upcoming = own_key(shared, plan, next + 1);
        }
        epoch = next;
        buffer ^= 1;
    }
}

template <typename config>
__global__ void __launch_bounds__(config::threads, config::blocks)
    sum_keys(const __grid_constant__ backward_plan plan, const key_pass pass, const bool aligned) {
    extern __shared__ __align__(128) char bytes[];
    key_memory<config> &shared = *(key_memory<config> *)bytes;
    const int64_t head = head_of_block();
    if (head >= (int64_t)plan.forward.batch * plan.forward.kv_heads)
        return;
    if (threadIdx.x == 0) {
        shared.work = start_work(plan, pass, head, blockIdx.x, config::rows, aligned);
        shared.step[0] = start_steps(shared.work, config::keys);
    }
    __syncthreads();
    if (shared.work.epoch >= shared.work.end)
        return;
    const int32_t key = own_key(shared, plan, shared.work.epoch);
    if (threadIdx.x < config::rows)
        shared.key[0][threadIdx.x] = key;
    __syncthreads();
    key_sums<config> sums;
    clear_sums(sums.dk);
    clear_sums(sums.dv);
    sums.dbias[0] = sums.dbias[1] = 0;
    load_rows(shared, plan, nullptr, shared.key[0]);
    sum_steps(shared, plan, sums, aligned);
}

#endif
