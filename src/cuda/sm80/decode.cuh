/* Forward for few queries: the keys of a (b, g) are split over blocks of threads, and a block's over
 * its warps, each of which takes every few keys for 16 rows. The work is reading, so every warp has
 * keys of its own under way. What the splits find is merged in their order.
 *
 * On the way: fdma_cuda_build_lists() -> attend_split() -> merge_splits(). */
#ifndef FDMA_CUDA_SM80_DECODE_CUH
#define FDMA_CUDA_SM80_DECODE_CUH

#include "cuda/sm80/walk.cuh"

enum {
    few_queries = 16,  // up to so many are split
    most_splits = 256, // of a (b, g)
    least_keys = 256,  // of a split
    merge_threads = 256,
};

/* What splits leave for merging: of each row of a (b, g) and split, out and sum against a maximum.
 * They depend on kv_len (or what a list holds) alone. */
struct split_plan {
    int32_t count; // 0: not split
    int32_t keys;  // of a split
    float *out;    // [batch * kv_heads][q_len * group][count][head_dim]
    float2 *stats; // [batch * kv_heads][q_len * group][count]: maximum, sum
};

static split_plan plan_splits(const forward_plan *plan, fdma_arena *arena) {
    split_plan splits = {};
    if (plan->q_len > few_queries)
        return splits;
    const int64_t rows = (int64_t)plan->batch * plan->q_heads * plan->q_len;
    const int64_t keys = plan->list_tile > 0   ? plan->list_tile
                         : plan->list_head > 0 ? plan->list_head
                                               : plan->kv_len;
    const int64_t wanted = (keys + most_splits - 1) / most_splits;
    splits.keys = (int32_t)((wanted + least_keys - 1) / least_keys * least_keys);
    splits.keys = splits.keys > 0 ? splits.keys : least_keys;
    splits.count = (int32_t)((keys + splits.keys - 1) / splits.keys);
    splits.count = splits.count > 0 ? splits.count : 1;
    const size_t parts = (size_t)(rows * splits.count);
    splits.out = (float *)fdma_arena_take(arena, parts * plan->head_dim * sizeof(float));
    splits.stats = (float2 *)fdma_arena_take(arena, parts * sizeof(float2));
    return splits;
}

template <typename type> struct few_config {
    using element = type;
    static constexpr int head_dim = FDMA_HEAD_DIM;
    static constexpr int warps = head_dim <= 128 ? 4 : 2; // what 99 KB of shared memory hold
    static constexpr int row_tiles = 1;
    static constexpr int keys = 16;  // of a warp at a time
    static constexpr int stages = 2; // of which one is read, the others are under way
    static constexpr int blocks = 3; // of a multiprocessor
    static constexpr int threads = warps * warp_lanes;
};

template <typename config> struct few_stage {
    using element = typename config::element;
    alignas(128) element k[config::keys * config::head_dim];
    alignas(128) element v[config::keys * config::head_dim];
    key_facts<config::keys> facts;
    alignas(16) int32_t key[config::keys];
};

template <typename config> struct few_memory {
    alignas(128) typename config::element q[mma_rows * config::head_dim];
    union {
        few_stage<config> stage[config::warps][config::stages];
        float out[config::warps][mma_rows][config::head_dim]; // in the end
    };
    float max[config::warps][mma_rows], sum[config::warps][mma_rows];
    int32_t position[mma_rows];
    tile_work work;
};

/* Starts copying a warp's next keys; lane n has the nth entry. */
template <typename config>
__device__ static inline void load_few(few_stage<config> &stage, const tile_work &work,
                                       int32_t entry) {
    constexpr int copiers = row_layout<config::head_dim>::copiers;
    const int lane = threadIdx.x % warp_lanes;
#pragma unroll
    for (int n = 0; n < config::keys; n += warp_lanes / copiers) {
        const int row = n + lane / copiers;
        const int32_t key = __shfl_sync(~0u, entry, row);
        const bool there = is_key(key, work.walk.kv_len);
        const char *const k = row_at(work.k, there ? key : 0);
        const char *const v = row_at(work.v, there ? key : 0);
        if (work.k.aligned) {
            copy_row<config::head_dim>((char *)stage.k, row, k, work.k.chunks, there);
            copy_row<config::head_dim>((char *)stage.v, row, v, work.v.chunks, there);
        } else {
            copy_row_slowly<config::head_dim>((char *)stage.k, row, k, work.k.chunks, there);
            copy_row_slowly<config::head_dim>((char *)stage.v, row, v, work.v.chunks, there);
        }
    }
    if (lane < config::keys) {
        stage.key[lane] = entry;
        fetch_fact(stage.facts, lane, work.walk, entry);
    }
    cp_async_commit_group();
}

/* The entry that a lane brings to a warp's keys from `from` on. */
template <typename config>
__device__ static inline int32_t few_entry(const key_walk &walk, int32_t from) {
    const int lane = threadIdx.x % warp_lanes;
    return lane < config::keys ? entry_at(walk, from + lane) : -1;
}

template <typename config>
__device__ static inline void attend_few(const few_stage<config> &stage, warp_rows<config> &rows,
                                         const lane_address<config::head_dim> &q_at,
                                         const int32_t *position, const logit_form &form,
                                         bool causal) {
    float s[1][config::keys / 8][4];
    multiply_keys<config>(s, q_at, right_first<config::head_dim>(stage.k));
    settle_logits<config>(s, rows, stage.facts, stage.key, position, form, causal);
    weigh(s, rows);
    add_values<config>(rows.out, s, down_first<config::head_dim>(stage.v));
}

/* The warps of a block take turns: this one's keys are those from `from` on, each `step` later. */
template <typename config>
__device__ static inline void walk_few(few_memory<config> &shared, warp_rows<config> &rows,
                                       int32_t from, bool causal) {
    constexpr int step = config::warps * config::keys, stages = config::stages;
    few_stage<config> *const stage = shared.stage[threadIdx.x / warp_lanes];
    const key_walk &walk = shared.work.walk;
    const auto q_at = down_first<config::head_dim>(shared.q);
    int32_t next = from, entry = few_entry<config>(walk, next);
    for (int n = 0; n < stages - 1; n++, next += step) {
        load_few(stage[n], shared.work, entry);
        entry = few_entry<config>(walk, next + step);
    }
    for (int turn = 0; from < walk.entries; turn++, from += step, next += step) {
        cp_async_wait_group<stages - 2>();
        __syncwarp(); // this turn's keys are there, those of the last are read
        load_few(stage[(turn + stages - 1) % stages], shared.work, entry);
        entry = few_entry<config>(walk, next + step);
        attend_few(stage[turn % stages], rows, q_at, shared.position, shared.work.form, causal);
    }
    cp_async_wait_group<0>();
}

/* A warp's rows to shared memory, in the order of the place. */
template <typename config>
__device__ static inline void leave_rows(few_memory<config> &shared,
                                         const warp_rows<config> &rows) {
    const int warp = threadIdx.x / warp_lanes, lane = threadIdx.x % warp_lanes;
#pragma unroll
    for (int s = 0; s < 2; s++) {
        const int row = lane / 4 * 2 + s;
        const float sum = quad_sum(rows.sum[s]);
        if (lane % 4 == 0) {
            shared.max[warp][row] = rows.max[s];
            shared.sum[warp][row] = sum;
        }
#pragma unroll
        for (int d = 0; d < config::head_dim / 8; d++)
            *(float2 *)&shared.out[warp][row][d * 8 + lane % 4 * 2] =
                make_float2(rows.out[0][d][s * 2], rows.out[0][d][s * 2 + 1]);
    }
}

/* The warps' rows, merged, to the split's place in the workspace. */
template <typename config>
__device__ static inline void leave_split(const few_memory<config> &shared,
                                          const split_plan &splits, const row_place &place,
                                          int64_t head, int32_t split, int32_t head_dim) {
    const int warp = threadIdx.x / warp_lanes, lane = threadIdx.x % warp_lanes;
    for (int r = warp; r < min(mma_rows, place.total - place.first); r += config::warps) {
        const int64_t part = (head * place.total + place.first + r) * splits.count + split;
        float max = -INFINITY, sum = 0, factor[config::warps];
        for (int w = 0; w < config::warps; w++)
            max = fmaxf(max, shared.max[w][r]);
        for (int w = 0; w < config::warps; w++) {
            factor[w] = ex2_approx(shared.max[w][r] - base_of(max));
            sum += factor[w] * shared.sum[w][r];
        }
        for (int d = lane; d < head_dim; d += warp_lanes) {
            float out = 0;
            for (int w = 0; w < config::warps; w++)
                out += factor[w] * shared.out[w][r][d];
            splits.out[part * head_dim + d] = out;
        }
        if (lane == 0)
            splits.stats[part] = make_float2(max, sum);
    }
}

/* Tiles of rows of one split stand together, so that they find its keys in L2. */
template <typename config>
__global__ void __launch_bounds__(config::threads, config::blocks)
    attend_split(const __grid_constant__ forward_plan plan,
                 const __grid_constant__ split_plan splits, const int32_t tiles,
                 const bool aligned) {
    extern __shared__ __align__(128) char bytes[];
    few_memory<config> &shared = *(few_memory<config> *)bytes;
    const int32_t split = blockIdx.x / tiles % splits.count;
    const int32_t head = blockIdx.x / tiles / splits.count;
    const int warp = threadIdx.x / warp_lanes;
    const row_place place = place_of(plan, head, (int32_t)(blockIdx.x % tiles) * mma_rows);
    const int32_t from = split * splits.keys;
    warp_rows<config> rows;
    if (threadIdx.x == 0) {
        shared.work = start_work(plan, place, mma_rows, aligned);
        shared.work.walk.entries = min(shared.work.walk.entries, from + splits.keys);
    }
    list_positions<mma_rows>(shared.position, plan, place);
    load_queries<config, 1, config::threads>((char *)shared.q, plan, place, aligned);
    cp_async_commit_group();
    cp_async_wait_group<0>();
    __syncthreads();
    start_rows(rows);
    walk_few(shared, rows, from + warp * config::keys, plan.causal);
    __syncthreads();
    leave_rows(shared, rows);
    __syncthreads();
    leave_split(shared, splits, place, head, split, plan.head_dim);
}

template <typename config> struct merge_memory {
    static constexpr int warps = merge_threads / warp_lanes;
    float weight[most_splits], sum[most_splits];
    float out[warps][config::head_dim];
};

/* A row's splits: each one's weight, and the sum of all. Every thread does the same sums in the same
 * order, from shared memory. */
template <typename config>
__device__ static inline float2 weigh_splits(merge_memory<config> &shared, const float2 *stats,
                                             int32_t count) {
    float max = -INFINITY, sum = 0;
    for (int n = threadIdx.x; n < count; n += merge_threads) {
        shared.weight[n] = stats[n].x;
        shared.sum[n] = stats[n].y;
    }
    __syncthreads();
    const int lane = threadIdx.x % warp_lanes;
    for (int n = lane; n < count; n += warp_lanes)
        max = fmaxf(max, shared.weight[n]);
    for (int other = 1; other < warp_lanes; other *= 2)
        max = fmaxf(max, __shfl_xor_sync(~0u, max, other));
    const float base = base_of(max);
    for (int n = lane; n < count; n += warp_lanes)
        sum += shared.sum[n] == 0 ? 0 : ex2_approx(shared.weight[n] - base) * shared.sum[n];
    for (int other = 1; other < warp_lanes; other *= 2)
        sum += __shfl_xor_sync(~0u, sum, other);
    __syncthreads();
    for (int n = threadIdx.x; n < count; n += merge_threads)
        shared.weight[n] = shared.sum[n] == 0 ? 0 : ex2_approx(shared.weight[n] - base);
    __syncthreads();
    return make_float2(max, sum);
}

/* out of all splits, a warp every few of them, to shared memory. */
template <typename config>
__device__ static inline void sum_splits(merge_memory<config> &shared, const float *out,
                                         int32_t count, int32_t head_dim) {
    constexpr int warps = merge_memory<config>::warps;
    const int warp = threadIdx.x / warp_lanes, lane = threadIdx.x % warp_lanes;
    for (int d = lane * 4; d < head_dim; d += warp_lanes * 4) {
        float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 8
        for (int n = warp; n < count; n += warps) {
            const float weight = shared.weight[n];
            const float4 part = *(const float4 *)(out + n * head_dim + d);
            // by choice: an empty split's out may be NaN
            sum.x += weight == 0 ? 0 : weight * part.x;
            sum.y += weight == 0 ? 0 : weight * part.y;
            sum.z += weight == 0 ? 0 : weight * part.z;
            sum.w += weight == 0 ? 0 : weight * part.w;
        }
        *(float4 *)&shared.out[warp][d] = sum;
    }
}

/* One row: out and lse from its splits. */
template <typename config>
__global__ void __launch_bounds__(merge_threads)
    merge_splits(const __grid_constant__ forward_plan plan,
                 const __grid_constant__ split_plan splits) {
    __shared__ merge_memory<config> shared;
    const int32_t total = plan.q_len * plan.group, row = blockIdx.x % total;
    const row_place place = place_of(plan, blockIdx.x / total, 0);
    const int64_t part = (int64_t)blockIdx.x * splits.count;
    const float2 all = weigh_splits(shared, splits.stats + part, splits.count);
    sum_splits(shared, splits.out + part * plan.head_dim, splits.count, plan.head_dim);
    __syncthreads();
    typename config::element *const to =
        (typename config::element *)plan.out.data + row_offset(plan.out, plan, place, row);
    for (int d = threadIdx.x; d < plan.head_dim; d += merge_threads) {
        float out = 0;
        for (int w = 0; w < merge_memory<config>::warps; w++)
            out += shared.out[w][d];
        to[d] = (typename config::element)(all.y == 0 ? 0 : out / all.y);
    }
    if (threadIdx.x == 0 && plan.lse != nullptr)
        plan.lse[lse_offset(plan, place, row)] = lse_of(all.x, all.y);
}

#endif
