/* The kernels of decode. A thread block of the first one takes one split of the keys, and its warps
 * take key blocks of 16 keys in turn. The kernel is bound by memory reads, so every warp has a
 * pipeline of its own. */
#pragma once

#include <type_traits>

#include "cuda/decode/cache.cuh"
#include "cuda/mma/attention.cuh"

static constexpr int64_t most_queries = 16;                              // of a decode call
static constexpr int64_t least_keys = 256;                               // of a split
static constexpr int64_t usual_splits = FDMA_HEAD_DIM <= 128 ? 128 : 64; // measured on an H200
static constexpr int64_t usual_keys = 131072 / usual_splits; // of a split of a longer sequence
static constexpr int64_t most_splits = 512; // enough for one kv head to fill a device

/* Splits depend only on kv_len, or on the size of a list. out and sum of a partial result are
 * relative to its row_max. */
struct split_plan {
    int32_t count; // 1 in decode.cu: the split itself writes out and lse, and no merge follows
    int32_t keys;  // of a split
    float *out;    // [batch * kv_heads][q_len * group][count][head_dim]
    float2 *stats; // [batch * kv_heads][q_len * group][count]: row_max, row_sum
};

template <typename type, int tiles, bool paged = false, bool pairs = false> struct decode_config {
    using element = type;
    static constexpr bool has_pairs = pairs; // attn_mask or attn_bias
    static constexpr int head_dim = FDMA_HEAD_DIM;
    static constexpr bool in_pages = paged;               // the rows of a cache are in pages
    static constexpr int warps = head_dim <= 128 ? 4 : 2; // as many as fit in 99 KB of shared
                                                          // memory
    static constexpr int row_tiles = tiles;
    static constexpr int rows = row_tiles * mma_rows;
    static constexpr int keys = 16;                       // of a warp's key block
    static constexpr int blocks = row_tiles == 1 ? 3 : 2; // on a multiprocessor
    static constexpr int threads = warps * warp_lanes;
};

template <typename config> struct decode_stage {
    using element = typename config::element;
    alignas(128) element k[config::keys * config::head_dim];
    alignas(128) element v[config::keys * config::head_dim];
    key_records<config::keys> records;
    alignas(16) int32_t key[config::keys];
};

/* The location of a split's rows if they are in pages: inputs.k and inputs.v point to page 0. Keys
 * that are not in pages have the indices {0, key}. */
struct split_pages {
    page_view view;           // number NULL: the keys of this split are not in pages
    int32_t sequence;         // of the cache; then 0
    int64_t k_bytes, v_bytes; // distance between pages
};

/* attn_mask and attn_bias, and the offsets of a tile's rows in them, in elements. */
template <int rows> struct tile_pairs {
    pair_view mask, bias;
    int64_t mask_row[rows], bias_row[rows];
    int32_t rows_there; // of the tile; the others are past the end
};

struct no_pairs {};

template <typename config> struct decode_memory {
    alignas(128) typename config::element q[config::rows * config::head_dim];
    union {
        decode_stage<config> stages[config::warps][2];
        float out[config::warps][config::rows][config::head_dim]; // in the epilogue
    };
    float max[config::warps][config::rows], sum[config::warps][config::rows];
    int32_t position[config::rows];
    tile_inputs inputs;
    split_pages pages; // of a config in_pages
    std::conditional_t<config::has_pairs, tile_pairs<config::rows>, no_pairs> pairs;
};

/* A lane's key of its warp's key block: a list entry and, with pages, the indices of its row. */
struct lane_key {
    int32_t entry;
    row_indices at;
};

/* Finds a lane's key. A row of a missing page counts as no key. */
template <typename config>
__device__ static lane_key find_key(const decode_memory<config> &shared, int32_t entry) {
    if (!config::in_pages || !is_key(entry, shared.inputs.keys.kv_len))
        return {entry, no_row_indices()};
    const row_indices at = indices_of(shared.pages.view, shared.pages.sequence, entry);
    return {at.first >= 0 ? entry : -1, at};
}

/* copy_keys() if some keys are carried. */
template <typename config>
__device__ static void copy_carried_keys(char *to, const row_source &source, const lane_key &own,
                                         int32_t kv_len) {
    constexpr int copiers = row_layout<config::head_dim>::copiers;
#pragma unroll 1
    for (int n = 0; n < config::keys; n += warp_lanes / copiers) {
        const int row = n + threadIdx.x % warp_lanes / copiers;
        const int32_t key = __shfl_sync(~0u, own.entry, row);
        const bool there = is_key(key, kv_len);
        copy_row<config::head_dim>(to, row, row_of_key(source, there ? key : 0), source.vecs, there,
                                   source.aligned);
    }
}

/* Starts copying rows of k or v of a warp's key block. Lane n has key n. */
template <typename config>
__device__ static void copy_keys(char *to, const row_source &source, int64_t page_bytes,
                                 const lane_key &own, int32_t kv_len) {
    constexpr int copiers = row_layout<config::head_dim>::copiers;
    if (config::in_pages) {
        copy_rows_of_pages<config>(to, source, page_bytes, own.at);
        return;
    }
    if (source.carried_len > 0) {
        copy_carried_keys<config>(to, source, own, kv_len);
        return;
    }
    const row_source from = source; // a copy in registers, otherwise each cp.async would read it
                                    // again
#pragma unroll
    for (int n = 0; n < config::keys; n += warp_lanes / copiers) {
        const int row = n + threadIdx.x % warp_lanes / copiers;
        const int32_t key = __shfl_sync(~0u, own.entry, row);
        const bool there = is_key(key, kv_len);
        const char *const at = row_at(from, there ? key : 0);
        copy_row<config::head_dim>(to, row, at, from.vecs, there, from.aligned);
    }
}

template <typename config>
__device__ static void load_keys(decode_stage<config> &stage, const decode_memory<config> &shared,
                                 const lane_key &own) {
    const int lane = threadIdx.x % warp_lanes;
    const tile_inputs &inputs = shared.inputs;
    copy_keys<config>((char *)stage.k, inputs.k, shared.pages.k_bytes, own, inputs.keys.kv_len);
    if (lane < config::keys) {
        stage.key[lane] = own.entry;
        copy_record(stage.records, lane, inputs.keys, own.entry);
    }
    cp_async_commit_group();
}

template <typename config>
__device__ static void load_values(decode_stage<config> &stage, const decode_memory<config> &shared,
                                   const lane_key &own) {
    const tile_inputs &inputs = shared.inputs;
    copy_keys<config>((char *)stage.v, inputs.v, shared.pages.v_bytes, own, inputs.keys.kv_len);
    cp_async_commit_group();
}

/* ---- attn_mask and attn_bias, which are read for each pair ---- */

template <int rows>
__device__ static void write_tile_pairs(tile_pairs<rows> &to, const forward_plan &plan,
                                        const row_range &range) {
    for (int r = threadIdx.x; r < rows; r += blockDim.x) {
        const pair_row row = pair_row_of(plan, range, range.first + r);
        to.mask_row[r] = plan.mask.offset(row.b, row.h, row.i, 0);
        to.bias_row[r] = plan.pair_bias.offset(row.b, row.h, row.i, 0);
    }
    if (threadIdx.x == 0) {
        to.mask = plan.mask;
        to.bias = plan.pair_bias;
        to.rows_there = min(rows, range.total - range.first);
    }
}

/* True if attn_mask lets some row of the tile keep a key. Rows that share an entry of the mask are
 * neighbours. */
template <int rows>
__device__ static bool some_row_keeps(const tile_pairs<rows> &pairs, int32_t key) {
    bool some = false;
    for (int r = 0; r < pairs.rows_there && !some; r++)
        if (r == 0 || pairs.mask_row[r] != pairs.mask_row[r - 1])
            some = is_unmasked(pairs.mask, pairs.mask_row[r] + key * pairs.mask.key);
    return some;
}

/* Adds attn_bias to the logits of a warp's key block, and sets them to -inf where attn_mask or the
 * list leaves out the key. */
template <typename config>
__device__ static void add_pairs(float (&s)[config::row_tiles][config::keys / 8][4],
                                 const tile_pairs<config::rows> &pairs, const int32_t *entries) {
    constexpr int rows = 2 * config::row_tiles;
    const pair_view &mask = pairs.mask, &bias = pairs.bias;
    const int lane = threadIdx.x % warp_lanes;
#pragma unroll
    for (int r = 0; r < rows; r++) {
        const int row = lane / 4 * rows + r;
        if (row >= pairs.rows_there)
            continue;
#pragma unroll
        for (int x = 0; x < config::keys / 4; x++) {
            const int32_t key = entries[x / 2 * 8 + lane % 4 * 2 + x % 2];
            float &logit = s[r / 2][x / 2][r % 2 * 2 + x % 2];
            if (key < 0 || !is_unmasked(mask, pairs.mask_row[row] + key * mask.key))
                logit = -INFINITY;
            else if (bias.data != NULL)
                logit += log2_e * bias_at<typename config::element>(bias, pairs.bias_row[row] +
                                                                              key * bias.key);
        }
    }
}

/* A lane's entry of a warp's key block; -1: none, or none that a row keeps by attn_mask. */
template <typename config>
__device__ static int32_t lane_entry(const decode_memory<config> &shared, int32_t from) {
    const int lane = threadIdx.x % warp_lanes;
    const tile_list &keys = shared.inputs.keys;
    const int32_t entry = lane < config::keys ? entry_at(keys, from + lane) : -1;
    if constexpr (config::has_pairs)
        if (!is_key(entry, keys.kv_len) || !some_row_keeps(shared.pairs, entry))
            return -1;
    return entry;
}

/* One key block of a warp. As soon as k or v of the stage has been read, it is loaded again for the
 * block two steps later, which `entry` belongs to. So three of four copies are in flight. */
template <typename config>
__device__ static void attend_block(decode_memory<config> &shared, decode_stage<config> &stage,
                                    row_state<config> &state, int32_t entry, bool by_position) {
    const lane_key later = find_key(shared, entry);
    float s[config::row_tiles][config::keys / 8][4];
    cp_async_wait_group<3>();
    __syncwarp(); // k has arrived
    mma_abt<config>(s, down_first<config::head_dim>(shared.q),
                    right_first<config::head_dim>(stage.k)); // S = Q K^T
    find_logits<config>(s, stage.records.bias, shared.inputs.logits);
    if constexpr (config::has_pairs)
        add_pairs<config>(s, shared.pairs, stage.key);
    mask_logits<config>(s, stage.records.expiry,
                        first_positions(stage.records, stage.key, shared.inputs.keys),
                        shared.position, by_position);
    __syncwarp(); // every lane has read k
    load_keys(stage, shared, later);
    weigh(s, state); // P = exp2(S - row_max)
    cp_async_wait_group<3>();
    __syncwarp();                                                        // v has arrived
    mma_ab<config>(state.out, s, down_first<config::head_dim>(stage.v)); // O += P V
    __syncwarp();                                                        // every lane has read v
    load_values(stage, shared, later);
}

/* All key blocks of a warp: the first is at `from`, the others follow at equal distances. */
template <typename config>
__device__ static void attend_blocks(decode_memory<config> &shared, row_state<config> &state,
                                     int32_t from, bool by_position) {
    constexpr int step = config::warps * config::keys;
    decode_stage<config> *const stages = shared.stages[threadIdx.x / warp_lanes];
    for (int n = 0; n < 2; n++) {
        const lane_key own = find_key(shared, lane_entry(shared, from + n * step));
        load_keys(stages[n], shared, own);
        load_values(stages[n], shared, own);
    }
    int32_t later = lane_entry(shared, from + 2 * step);
    cp_async_wait_group<4>();
    __syncthreads(); // all of q has arrived
    for (int stage = 0; from < shared.inputs.keys.entries; stage ^= 1, from += step) {
        const int32_t entry = later;
        later = lane_entry(shared, from + 3 * step);
        attend_block(shared, stages[stage], state, entry, by_position);
    }
    cp_async_wait_group<0>();
}

template <typename config>
__device__ static void write_split(const decode_memory<config> &shared, const split_plan &splits,
                                   const row_range &range, int64_t head, int32_t split,
                                   int32_t head_dim) {
    const int warp = threadIdx.x / warp_lanes, lane = threadIdx.x % warp_lanes;
    for (int r = warp; r < min(config::rows, range.total - range.first); r += config::warps) {
        const int64_t at = (head * range.total + range.first + r) * splits.count + split;
        const merged_warps<config> merged(shared, r);
        for (int d = lane; d < head_dim; d += warp_lanes)
            splits.out[at * head_dim + d] = merged.out(shared, r, d);
        if (lane == 0)
            splits.stats[at] = make_float2(merged.row_max, merged.row_sum);
    }
}

/* Writes out and lse of the rows if there is one split, as merge_splits() does. */
template <typename config>
__device__ static void write_rows(const decode_memory<config> &shared, const forward_plan &plan,
                                  const row_range &range) {
    using element = typename config::element;
    const int warp = threadIdx.x / warp_lanes, lane = threadIdx.x % warp_lanes;
    for (int r = warp; r < min(config::rows, range.total - range.first); r += config::warps) {
        const int32_t row = range.first + r;
        const merged_warps<config> merged(shared, r);
        const row_result result =
            result_of(merged.row_max, merged.row_sum, sink_of_row(plan, range, row));
        element *const to = (element *)plan.out.data + row_offset(plan.out, plan, range, row);
        for (int d = lane; d < plan.head_dim; d += warp_lanes) {
            const float out = merged.row_sum == 0 ? 0 : merged.out(shared, r, d); // it may be NaN
            to[d] = (element)(result.scale == 0 ? 0 : out * result.scale);
        }
        if (lane == 0 && plan.lse.data != NULL)
            *lse_at(plan, range, row) = result.lse;
    }
}

/* Attends the split of shared.inputs.keys, from entry `from` on, for the tile of rows whose q is
 * being loaded. Leaves the partial results of its warps in shared memory. */
template <typename config>
__device__ static void attend_keys(decode_memory<config> &shared, int32_t from, bool causal) {
    row_state<config> state;
    cp_async_commit_group();
    __syncthreads();
    clear_rows(state);
    attend_blocks(shared, state, from + (int)threadIdx.x / warp_lanes * config::keys, causal);
    griddepcontrol_launch_dependents();
    __syncthreads();
    stage_rows(shared, state, config::rows);
    __syncthreads();
}

/* One split of the keys for one tile of rows. The tiles of a split are neighbours, so that they
 * find its keys in the L2 cache; so are the kv heads, whose rows share pages of memory. */
template <typename config>
static __global__ void __launch_bounds__(config::threads, config::blocks)
    attend_split(const __grid_constant__ forward_plan plan,
                 const __grid_constant__ split_plan splits, const int32_t tiles,
                 const bool aligned) {
    extern __shared__ __align__(128) char bytes[];
    decode_memory<config> &shared = *(decode_memory<config> *)bytes;
    const int32_t index = blockIdx.x / tiles, g = index % plan.kv_heads;
    const int32_t split = index / plan.kv_heads % splits.count;
    const int32_t head = index / plan.kv_heads / splits.count * plan.kv_heads + g;
    const row_range range = row_range_of(plan, head, (int32_t)(blockIdx.x % tiles) * config::rows);
    const int32_t from = split * splits.keys;
    griddepcontrol_wait(); // for the list and the records
    if (threadIdx.x == 0) {
        shared.inputs = tile_inputs_of(plan, range, config::rows, aligned);
        shared.inputs.keys.entries = min(shared.inputs.keys.entries, from + splits.keys);
    }
    write_positions<config::rows>(shared.position, plan, range, key_count(plan, range.b));
    if constexpr (config::has_pairs)
        write_tile_pairs(shared.pairs, plan, range);
    load_queries<config, 1, config::threads>((char *)shared.q, plan.q, plan, range, aligned);
    attend_keys(shared, from, plan.by_position);
    if (splits.count == 1)
        write_rows(shared, plan, range);
    else
        write_split(shared, splits, range, head, split, plan.head_dim);
}

/* ---- the second kernel: a thread block merges the splits of one row, in order ---- */

static constexpr int merge_threads = 256;

template <typename config> struct merge_memory {
    static constexpr int warps = merge_threads / warp_lanes;
    float weight[most_splits], sum[most_splits];
    float out[warps][config::head_dim];
};

/* Turns the row_max of each split into the weight of the split. Returns row_max and row_sum of the
 * whole row. Every warp sums the same numbers in the same order. */
template <typename config>
__device__ static float2 weigh_splits(merge_memory<config> &shared, const float2 *stats,
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

/* Each warp adds up the weighted out of every eighth split, in shared memory. */
template <typename config>
__device__ static void sum_splits(merge_memory<config> &shared, const float *out, int32_t count,
                                  int32_t head_dim) {
    constexpr int warps = merge_memory<config>::warps;
    const int warp = threadIdx.x / warp_lanes, lane = threadIdx.x % warp_lanes;
    for (int d = lane * 4; d < head_dim; d += warp_lanes * 4) {
        float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 8
        for (int n = warp; n < count; n += warps) {
            const float weight = shared.weight[n];
            const float4 x = *(const float4 *)(out + n * head_dim + d);
            // not 0 * x: out of an empty split may be NaN
            sum.x += weight == 0 ? 0 : weight * x.x;
            sum.y += weight == 0 ? 0 : weight * x.y;
            sum.z += weight == 0 ? 0 : weight * x.z;
            sum.w += weight == 0 ? 0 : weight * x.w;
        }
        *(float4 *)&shared.out[warp][d] = sum;
    }
}

/* Writes out and lse of row `row` of a range. Its partial results begin at `first`. */
template <typename config>
__device__ static void merge_row(merge_memory<config> &shared, const forward_plan &plan,
                                 const split_plan &splits, const row_range &range, int32_t row,
                                 int64_t first) {
    const float2 all = weigh_splits(shared, splits.stats + first, splits.count);
    sum_splits(shared, splits.out + first * plan.head_dim, splits.count, plan.head_dim);
    __syncthreads();
    const row_result result = result_of(all.x, all.y, sink_of_row(plan, range, row));
    typename config::element *const to =
        (typename config::element *)plan.out.data + row_offset(plan.out, plan, range, row);
    for (int d = threadIdx.x; d < plan.head_dim; d += merge_threads) {
        float out = 0;
        for (int w = 0; w < merge_memory<config>::warps; w++)
            out += shared.out[w][d];
        to[d] = (typename config::element)(result.scale == 0 ? 0 : out * result.scale);
    }
    if (threadIdx.x == 0 && plan.lse.data != NULL)
        *lse_at(plan, range, row) = result.lse;
}

template <typename config>
static __global__ void __launch_bounds__(merge_threads, 1)
    merge_splits(const __grid_constant__ forward_plan plan,
                 const __grid_constant__ split_plan splits) {
    __shared__ merge_memory<config> shared;
    const int32_t total = plan.q_len * plan.group, row = blockIdx.x % total;
    const row_range range = row_range_of(plan, blockIdx.x / total, 0);
    griddepcontrol_wait(); // for attend_split()
    merge_row(shared, plan, splits, range, row, (int64_t)blockIdx.x * splits.count);
}
