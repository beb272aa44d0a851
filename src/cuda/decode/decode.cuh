/* Forward for few queries: the keys of a (b, g) are split over blocks of threads, and a block's
 * over its warps, which take turns. The work is reading, so every warp has keys of its own under
 * way. What the splits find is merged in their order.
 *
 * On the way: fdma_cuda_build_lists() -> attend_split() -> merge_splits(). */
#ifndef FDMA_CUDA_DECODE_DECODE_CUH
#define FDMA_CUDA_DECODE_DECODE_CUH

#include "cuda/forward/sm80/walk.cuh"

static constexpr int64_t few_queries = 16;                               // up to so many are split
static constexpr int64_t least_keys = 256;                               // of a split
static constexpr int64_t usual_splits = FDMA_HEAD_DIM <= 128 ? 128 : 64; // measured on H200
static constexpr int64_t usual_keys = 131072 / usual_splits; // of a split of a longer sequence
static constexpr int64_t most_splits = 512; // so that one kv head alone fills a device
static constexpr int merge_threads = 256;

/* What splits leave for merging: of each row of a (b, g) and split, out and sum against a maximum.
 * They depend on kv_len (or what a list holds) alone. */
struct split_plan {
    int32_t count; // 0: not split
    int32_t keys;  // of a split
    float *out;    // [batch * kv_heads][q_len * group][count][head_dim]
    float2 *stats; // [batch * kv_heads][q_len * group][count]: maximum, sum
};

static int64_t divide_up(int64_t x, int64_t y) { return (x + y - 1) / y; }

static split_plan plan_splits(const forward_plan *plan, fdma_arena *arena) {
    split_plan splits = {};
    if (plan->q_len > few_queries)
        return splits;
    const int64_t keys = plan->list_tile > 0   ? plan->list_tile
                         : plan->list_head > 0 ? plan->list_head
                                               : plan->kv_len;
    int64_t wanted = divide_up(keys, usual_splits);
    wanted = wanted < usual_keys ? wanted : usual_keys;
    wanted = wanted > divide_up(keys, most_splits) ? wanted : divide_up(keys, most_splits);
    wanted = wanted > least_keys ? wanted : least_keys;
    splits.keys = (int32_t)(divide_up(wanted, 64) * 64); // whole turns of all warps
    splits.count = keys > 0 ? (int32_t)divide_up(keys, splits.keys) : 1;
    const size_t parts = (size_t)plan->batch * plan->q_heads * plan->q_len * splits.count;
    splits.out = (float *)fdma_arena_take(arena, parts * plan->head_dim * sizeof(float));
    splits.stats = (float2 *)fdma_arena_take(arena, parts * sizeof(float2));
    return splits;
}

/* Row tiles of a block where one is not enough: what the registers hold. */
static constexpr int few_row_tiles = FDMA_HEAD_DIM <= 128 ? 2 : 1;

template <typename type, int tiles> struct few_config {
    using element = type;
    static constexpr int head_dim = FDMA_HEAD_DIM;
    static constexpr int warps = head_dim <= 128 ? 4 : 2; // what 99 KB of shared memory hold
    static constexpr int row_tiles = tiles;
    static constexpr int rows = row_tiles * mma_rows;
    static constexpr int keys = 16;                       // of a warp at a time
    static constexpr int blocks = row_tiles == 1 ? 3 : 2; // of a multiprocessor
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
    alignas(128) typename config::element q[config::rows * config::head_dim];
    union {
        few_stage<config> stage[config::warps][2];
        float out[config::warps][config::rows][config::head_dim]; // in the end
    };
    float max[config::warps][config::rows], sum[config::warps][config::rows];
    int32_t position[config::rows];
    tile_work work;
};

/* Starts copying rows of k or v of a warp's next keys; lane n has the nth entry. */
template <typename config>
__device__ static inline void load_few(char *to, const row_source &source, int32_t entry,
                                       int32_t kv_len) {
    constexpr int copiers = row_layout<config::head_dim>::copiers;
    const row_source from = source; // whose fields are not read again after each copy
#pragma unroll
    for (int n = 0; n < config::keys; n += warp_lanes / copiers) {
        const int row = n + threadIdx.x % warp_lanes / copiers;
        const int32_t key = __shfl_sync(~0u, entry, row);
        const bool there = is_key(key, kv_len);
        const char *const at = row_at(from, there ? key : 0);
        if (from.aligned)
            copy_row<config::head_dim>(to, row, at, from.chunks, there);
        else
            copy_row_slowly<config::head_dim>(to, row, at, from.chunks, there);
    }
}

template <typename config>
__device__ static inline void load_few_keys(few_stage<config> &stage, const tile_work &work,
                                            int32_t entry) {
    const int lane = threadIdx.x % warp_lanes;
    load_few<config>((char *)stage.k, work.k, entry, work.walk.kv_len);
    if (lane < config::keys) {
        stage.key[lane] = entry;
        fetch_fact(stage.facts, lane, work.walk, entry);
    }
    cp_async_commit_group();
}

template <typename config>
__device__ static inline void load_few_values(few_stage<config> &stage, const tile_work &work,
                                              int32_t entry) {
    load_few<config>((char *)stage.v, work.v, entry, work.walk.kv_len);
    cp_async_commit_group();
}

/* The entry that a lane brings to a warp's keys from `from` on. */
template <typename config>
__device__ static inline int32_t few_entry(const key_walk &walk, int32_t from) {
    const int lane = threadIdx.x % warp_lanes;
    return lane < config::keys ? entry_at(walk, from + lane) : -1;
}

/* One turn of a warp. As soon as k and v of a stage are read, those of two turns later are asked
 * for, so that of four copies three are under way. */
template <typename config>
__device__ static inline void attend_few(few_memory<config> &shared, few_stage<config> &stage,
                                         warp_rows<config> &rows, int32_t later, bool causal) {
    float s[config::row_tiles][config::keys / 8][4];
    cp_async_wait_group<3>();
    __syncwarp(); // k is there
    multiply_keys<config>(s, down_first<config::head_dim>(shared.q),
                          right_first<config::head_dim>(stage.k));
    find_logits<config>(s, stage.facts.bias, shared.work.form);
    cut_logits<config>(s, stage.facts.expiry, stage.key, shared.position, causal);
    __syncwarp(); // k is read
    load_few_keys(stage, shared.work, later);
    weigh(s, rows);
    cp_async_wait_group<3>();
    __syncwarp(); // v is there
    add_values<config>(rows.out, s, down_first<config::head_dim>(stage.v));
    __syncwarp(); // v is read
    load_few_values(stage, shared.work, later);
}

/* The warps of a block take turns: this one's keys are those from `from` on, each `step` later. */
template <typename config>
__device__ static inline void walk_few(few_memory<config> &shared, warp_rows<config> &rows,
                                       int32_t from, bool causal) {
    constexpr int step = config::warps * config::keys;
    few_stage<config> *const stage = shared.stage[threadIdx.x / warp_lanes];
    const key_walk &walk = shared.work.walk;
    for (int n = 0; n < 2; n++) {
        const int32_t entry = few_entry<config>(walk, from + n * step);
        load_few_keys(stage[n], shared.work, entry);
        load_few_values(stage[n], shared.work, entry);
    }
    int32_t later = few_entry<config>(walk, from + 2 * step);
    cp_async_wait_group<4>();
    __syncthreads(); // all of q is there
    for (int turn = 0; from < walk.entries; turn ^= 1, from += step) {
        const int32_t entry = later;
        later = few_entry<config>(walk, from + 3 * step);
        attend_few(shared, stage[turn], rows, entry, causal);
    }
    cp_async_wait_group<0>();
}

/* A warp's rows to shared memory, in the order of the place. */
template <typename config>
__device__ static inline void leave_rows(few_memory<config> &shared,
                                         const warp_rows<config> &rows) {
    const int warp = threadIdx.x / warp_lanes, lane = threadIdx.x % warp_lanes;
#pragma unroll
    for (int s = 0; s < warp_rows<config>::slots; s++) {
        const int row = lane / 4 * warp_rows<config>::slots + s;
        const float sum = quad_sum(rows.sum[s]);
        if (lane % 4 == 0) {
            shared.max[warp][row] = rows.max[s];
            shared.sum[warp][row] = sum;
        }
#pragma unroll
        for (int d = 0; d < config::head_dim / 8; d++)
            *(float2 *)&shared.out[warp][row][d * 8 + lane % 4 * 2] =
                make_float2(rows.out[s / 2][d][s % 2 * 2], rows.out[s / 2][d][s % 2 * 2 + 1]);
    }
}

/* The warps' rows, merged, to the split's place in the workspace. */
template <typename config>
__device__ static inline void leave_split(const few_memory<config> &shared,
                                          const split_plan &splits, const row_place &place,
                                          int64_t head, int32_t split, int32_t head_dim) {
    const int warp = threadIdx.x / warp_lanes, lane = threadIdx.x % warp_lanes;
    for (int r = warp; r < min(config::rows, place.total - place.first); r += config::warps) {
        const int64_t part = (head * place.total + place.first + r) * splits.count + split;
        float max = least_max, sum = 0, factor[config::warps];
        for (int w = 0; w < config::warps; w++)
            max = fmaxf(max, shared.max[w][r]);
        for (int w = 0; w < config::warps; w++) {
            factor[w] = ex2_approx(shared.max[w][r] - max);
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

/* Tiles of rows of one split stand together, so that they find its keys in L2, and so do the kv
 * heads, whose rows share pages of memory. */
template <typename config>
__global__ void __launch_bounds__(config::threads, config::blocks)
    attend_split(const __grid_constant__ forward_plan plan,
                 const __grid_constant__ split_plan splits, const int32_t tiles,
                 const bool aligned) {
    extern __shared__ __align__(128) char bytes[];
    few_memory<config> &shared = *(few_memory<config> *)bytes;
    const int32_t part = blockIdx.x / tiles, g = part % plan.kv_heads;
    const int32_t split = part / plan.kv_heads % splits.count;
    const int32_t head = part / plan.kv_heads / splits.count * plan.kv_heads + g;
    const int warp = threadIdx.x / warp_lanes;
    const row_place place = place_of(plan, head, (int32_t)(blockIdx.x % tiles) * config::rows);
    const int32_t from = split * splits.keys;
    warp_rows<config> rows;
    if (threadIdx.x == 0) {
        shared.work = start_work(plan, place, config::rows, aligned);
        shared.work.walk.entries = min(shared.work.walk.entries, from + splits.keys);
    }
    list_positions<config::rows>(shared.position, plan, place);
    load_queries<config, 1, config::threads>((char *)shared.q, plan.q, plan, place, aligned);
    cp_async_commit_group();
    __syncthreads();
    start_rows(rows);
    walk_few(shared, rows, from + warp * config::keys, plan.causal);
    griddepcontrol_launch_dependents();
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

/* A row's splits: each one's weight, and the sum of all. Every warp does the same sums in the same
 * order, from shared memory. */
template <typename config>
__device__ static inline float2 weigh_splits(merge_memory<config> &shared, const float2 *stats,
                                             int32_t count) {
    float max = least_max, sum = 0;
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
    for (int n = lane; n < count; n += warp_lanes)
        sum += shared.sum[n] == 0 ? 0 : ex2_approx(shared.weight[n] - max) * shared.sum[n];
    for (int other = 1; other < warp_lanes; other *= 2)
        sum += __shfl_xor_sync(~0u, sum, other);
    __syncthreads();
    for (int n = threadIdx.x; n < count; n += merge_threads)
        shared.weight[n] = shared.sum[n] == 0 ? 0 : ex2_approx(shared.weight[n] - max);
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
__global__ void __launch_bounds__(merge_threads, 1)
    merge_splits(const __grid_constant__ forward_plan plan,
                 const __grid_constant__ split_plan splits) {
    __shared__ merge_memory<config> shared;
    const int32_t total = plan.q_len * plan.group, row = blockIdx.x % total;
    const row_place place = place_of(plan, blockIdx.x / total, 0);
    const int64_t part = (int64_t)blockIdx.x * splits.count;
    griddepcontrol_wait();
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
