/* Selection in one launch, a cluster of blocks per segment, on compute capability 9.0 and later.
 * sm80/select.cu takes the segments that are too long for a cluster. select.cuh names the steps.
 *
 * A block owns as many ranks as positions, and each of its warps a partition of either. Data of
 * another block is written into that block's shared memory. The selection is exact, and its time
 * hardly depends on the order of the scores. */
#include "cuda/select/rules.cuh"
#include "cuda/select/sm90/kept.cuh"
#include "cuda/select/sm90/sort.cuh"

/* ---- kept keys, by position and by rank ---- */

template <class config>
__device__ static uint32_t count_lower_flags(select_memory<config> &shared, uint32_t flags) {
    uint32_t total;
    return sum_lower_warps<warps>(shared.scratch, __reduce_add_sync(all_lanes, __popc(flags)),
                                  &total);
}

/* Sends to every block the number of kept keys that this block of positions has in each block of
 * ranks. */
template <class config>
__device__ static void broadcast_kept(select_memory<config> &shared, const cluster_work &work,
                                      uint32_t kept) {
    static_assert(config::items < 16, "counts of a thread have four bits");
    uint64_t counts = 0;
#pragma unroll
    for (int r = 0; r < config::items; r++)
        counts += (uint64_t)(kept >> r & 1)
                  << 4 * (shared.allowance[own_index<config>(work, r)].x / config::keys);
#pragma unroll
    for (uint32_t n = 0; n < config::most_blocks / 2; n++, counts >>= 8) {
        const uint32_t pair = (uint32_t)(counts & 15) | (uint32_t)(counts >> 4 & 15) << 16;
        const uint32_t sum = __reduce_add_sync(all_lanes, pair);
        if (work.lane == n && sum > 0)
            atomicAdd(&shared.own_kept[n], sum);
    }
    __syncthreads();
    const uint32_t to = threadIdx.x / (config::most_blocks / 2),
                   of = threadIdx.x % (config::most_blocks / 2);
    if (to < work.blocks)
        store_at(to, &shared.kept_by_block[work.block][of], shared.own_kept[of]);
}

/* Sums kept_by_block over the blocks of lower positions, of lower ranks, and all blocks. By one
 * warp. */
template <class config>
__device__ static void sum_kept(select_memory<config> &shared, const cluster_work &work) {
    uint32_t before = 0, below = 0, total = 0;
    for (uint32_t n = work.lane; n < work.blocks * config::most_blocks; n += warp_lanes) {
        const uint32_t by_position = n / config::most_blocks, by_rank = n % config::most_blocks;
        const uint32_t pair = shared.kept_by_block[by_position][by_rank / 2];
        const uint32_t count = by_rank % 2 != 0 ? pair >> 16 : pair & 0xffff;
        before += by_position < work.block ? count : 0;
        below += by_rank < work.block ? count : 0;
        total += count;
    }
    shared.kept_before = __reduce_add_sync(all_lanes, before);
    shared.kept_below = __reduce_add_sync(all_lanes, below);
    shared.kept_total = __reduce_add_sync(all_lanes, total);
}

/* The output of a block, in the registers of its threads. Nothing is written to global memory
 * before the last cluster barrier, which would wait for the writes. */
template <class config> struct select_result {
    uint32_t kept;                // bit r: key r by position is ever kept
    uint32_t next;                // kept_index of the first kept key of this warp, by position
    uint32_t slot[config::items]; // by kept_index
};

__device__ static void write_first_index(const cluster_work &work, const select_call &call,
                                         uint32_t j, uint32_t kept_index) {
    if (call.first_index == NULL || j >= call.kv_len || (uint32_t)call.ranges[j].x != j)
        return;
    segment_of(call, blockIdx.x / work.blocks).first_index[j] = kept_index;
}

/* The number of kept keys of its own packed sequence before the key at position j. */
__device__ static uint32_t index_in_sequence(const cluster_work &work, const select_call &call,
                                             uint32_t j, uint32_t kept_index) {
    const select_segment segment = segment_of(call, blockIdx.x / work.blocks);
    return kept_index - segment.first_index[call.ranges[j].x];
}

/* Calls decide_by_count. Sends kept_index to each kept key's rank, and its position to its
 * kept_index. */
template <class config>
__device__ static void index_kept(select_memory<config> &shared, const cluster_work &work,
                                  const select_call &call, select_result<config> &result) {
#pragma unroll
    for (int r = 0; r < config::items; r++)
        shared.kept_index[own_index<config>(work, r)] = never_kept;
    result.kept = decide_by_count(shared, work);
    result.next = count_lower_flags(shared, result.kept);
    broadcast_kept(shared, work, result.kept);
    sync_blocks(work);
    if (work.warp == 0)
        sum_kept(shared, work);
    __syncthreads();
    uint32_t next = result.next += shared.kept_before;
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const bool keeps = (result.kept >> r & 1) != 0;
        const uint32_t kept_index = number_flag(keeps, &next);
        if constexpr (config::packed)
            write_first_index(work, call, work.block * config::keys + own_index<config>(work, r),
                              kept_index);
        if (!keeps)
            continue;
        const uint32_t index = own_index<config>(work, r), rank = shared.allowance[index].x;
        store_at(rank / config::keys, &shared.kept_index[rank % config::keys], kept_index);
        store_at(kept_index / config::keys, &shared.kept_position[kept_index % config::keys],
                 work.block * config::keys + index);
    }
}

/* By rank: the i-th worst kept key is evicted by the key of kept_index window + i. That key takes
 * over its slot, so the evicted key becomes its parent. The expiry replaces kept_index. */
template <class config>
__device__ static void match_evictions(select_memory<config> &shared, const cluster_work &work,
                                       const select_call &call) {
    uint32_t kept = 0;
#pragma unroll
    for (int r = 0; r < config::items; r++)
        kept |= (uint32_t)(shared.kept_index[own_index<config>(work, r)] != never_kept) << r;
    uint32_t next = shared.kept_below + count_lower_flags(shared, kept);
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        uint32_t *const own = &shared.kept_index[own_index<config>(work, r)];
        const bool keeps = (kept >> r & 1) != 0;
        const uint32_t evictor = number_flag(keeps, &next) + call.window;
        const bool evicted = keeps && evictor < shared.kept_total;
        const uint32_t block = evictor / config::keys, index = evictor % config::keys;
        if (evicted)
            store_at(block, &shared.parent[index], *own);
        uint32_t end = call.kv_len;
        if (config::packed && keeps)
            end = (uint32_t)call.ranges[shared.position[own_index<config>(work, r)]].y;
        if (keeps)
            *own = evicted ? min(load_at(block, &shared.kept_position[index]), end) : end;
    }
}

/* ---- slots ---- */

/* root: the first kept key of this block with the same slot. Its parent is in an earlier block or,
 * if it is the first key of its slot, is the slot itself. */
template <class config>
__device__ static void find_roots(select_memory<config> &shared, const cluster_work &work,
                                  const select_call &call, uint32_t (&root)[config::items]) {
    const uint32_t first = work.block * config::keys;
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const uint32_t index = own_index<config>(work, r), kept_index = first + index;
        const bool is_there = kept_index < shared.kept_total;
        uint32_t number = kept_index; // in its sequence
        if (config::packed && is_there)
            number = index_in_sequence(work, call, shared.kept_position[index], kept_index);
        const bool is_first = !is_there || number < call.window;
        if (is_first)
            shared.parent[index] = number | is_slot;
        const uint32_t parent = shared.parent[index];
        root[r] = parent >= first && !is_first ? parent - first : index;
        shared.root[index] = root[r];
    }
    jump_to_roots(shared.root, root, own_index<config>(work, 0), warp_lanes);
}

/* Each root follows the roots before it to its slot. Another thread may already have moved a parent
 * that it reads: then the parent is an earlier key of the same slot, or the slot, and the path is
 * shorter. */
template <class config>
__device__ static void follow_roots(select_memory<config> &shared, const cluster_work &work,
                                    const uint32_t (&root)[config::items],
                                    select_result<config> &result) {
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const uint32_t index = own_index<config>(work, r);
        if (root[r] != index || work.block * config::keys + index >= shared.kept_total)
            continue;
        uint32_t slot = shared.parent[index];
        while ((slot & is_slot) == 0) {
            const uint32_t block = slot / config::keys;
            const uint32_t first = load_at(block, &shared.root[slot % config::keys]);
            slot = load_at(block, &shared.parent[first]);
            *(volatile uint32_t *)&shared.parent[index] = slot;
        }
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < config::items; r++)
        result.slot[r] = shared.parent[root[r]] & ~is_slot;
}

/* ---- results ---- */

template <class config>
__device__ static void write_global(const cluster_work &work, const select_segment &segment,
                                    const select_call &call, const select_result<config> &result) {
    uint32_t next = result.next;
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const bool keeps = (result.kept >> r & 1) != 0;
        const uint32_t kept_index = number_flag(keeps, &next);
        const uint32_t j = work.block * config::keys + own_index<config>(work, r);
        uint32_t end = call.kv_len, slot = kept_index;
        if (config::packed && keeps) {
            end = (uint32_t)call.ranges[j].y;
            slot = segment.slot == NULL ? 0 : index_in_sequence(work, call, j, kept_index);
        }
        if (j < call.kv_len)
            write_key(segment, j, keeps ? end : j, keeps ? (int32_t)slot : -1);
    }
}

/* Writes the keys that are never kept by position, the expiries of the others by rank, and their
 * slots by kept_index. */
template <class config>
__device__ static void write_causal(const select_memory<config> &shared, const cluster_work &work,
                                    const select_segment &segment, const select_call &call,
                                    const select_result<config> &result) {
#pragma unroll 1 // more would not fit in registers
    for (int r = 0; r < config::items; r++) {
        const uint32_t j = work.block * config::keys + own_index<config>(work, r);
        if (j < call.kv_len && (result.kept >> r & 1) == 0)
            write_key(segment, j, j, -1);
    }
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const uint32_t index = own_index<config>(work, r), n = work.block * config::keys + index;
        if (shared.kept_index[index] != never_kept)
            segment.expiry[shared.position[index]] = (int32_t)shared.kept_index[index];
        if (segment.slot != NULL && n < shared.kept_total)
            segment.slot[shared.kept_position[index]] = (int32_t)result.slot[r];
    }
}

/* ---- the kernel ---- */

template <class config>
__device__ static void select_causal(select_memory<config> &shared, const cluster_work &work,
                                     const select_call &call,
                                     const uint32_t (&position)[config::items]) {
    select_result<config> result;
    count_earlier(shared, work, position);
    find_thresholds(shared, work, call.window);
    decide_by_threshold(shared, work, position, call.window);
    sync_blocks(work);
#pragma unroll
    for (int r = 0; r < config::items; r++) // in the memory of earlier_count, to free registers
        shared.position[own_index<config>(work, r)] = position[r];
    index_kept(shared, work, call, result);
    sync_blocks(work);
    match_evictions(shared, work, call);
    sync_blocks(work);
    if (call.slot.data != NULL) {
        uint32_t root[config::items];
        find_roots(shared, work, call, root);
        sync_blocks(work);
        follow_roots(shared, work, root, result);
    }
    arrive_blocks(work);
    write_causal(shared, work, segment_of(call, opaque(blockIdx.x) / work.blocks), call, result);
    wait_blocks(work); // until then other blocks may read this block's shared memory
}

template <class config>
__device__ static void select_global(select_memory<config> &shared, const cluster_work &work,
                                     const select_call &call,
                                     const uint32_t (&position)[config::items]) {
    select_result<config> result;
    sync_blocks(work); // allowances overwrite keys
    keep_best(shared, work, position, call);
    sync_blocks(work);
    index_kept(shared, work, call, result);
    if (config::packed)
        sync_blocks(work); // every block has written first_index
    arrive_blocks(work);
    write_global(work, segment_of(call, opaque(blockIdx.x) / work.blocks), call, result);
    wait_blocks(work);
}

template <class config>
static __global__ void __launch_bounds__(threads, 1)
    select_segments(const select_call call, uint32_t blocks) {
    select_memory<config> &shared = shared_memory<select_memory<config>>();
    cluster_work work;
    work.block = cluster_ctarank();
    work.blocks = blocks;
    work.partitions = work.blocks * warps;
    work.warp = threadIdx.x / warp_lanes;
    work.lane = threadIdx.x % warp_lanes;
    uint32_t position[config::items];
    arrive_blocks(work);
    if (threadIdx.x < config::most_blocks / 2)
        shared.own_kept[threadIdx.x] = 0;
    griddepcontrol_wait(); // for the scores and the sinks
    griddepcontrol_launch_dependents();
    const select_segment segment = segment_of(call, blockIdx.x / blocks);
    sort_keys(shared, work, segment, call, position);
    if (call.causal)
        select_causal(shared, work, call, position);
    else
        select_global(shared, work, call, position);
}

/* ---- the kernel of the table ---- */

enum { most_items = 11 };
enum { most_packed_items = 4 }; // with packed sequences more do not fit in registers

/* The most blocks of a cluster. With more keys per thread, fewer registers and less memory are left
 * for the counts of other blocks. */
static constexpr int most_blocks_of(int items) {
    return items <= 8 ? most_blocks : items <= 10 ? 8 : 4;
}

template <int items, bool packed = false>
using config_of = segment_config<items, most_blocks_of(items), packed>;
template <int items> static constexpr size_t memory_of = sizeof(select_memory<config_of<items>>);
static_assert(memory_of<8> < memory_of<most_items> && memory_of<10> < memory_of<most_items>,
              "refuses() asks for the memory of most_items");

template <class config>
static fdma_status run_config(const fdma_problem *problem, const select_call &call,
                              uint32_t blocks) {
    const auto kernel = select_segments<config>;
    const uint32_t segments = (uint32_t)(problem->batch * problem->kv_heads);
    const launch_shape shape = {dim3(segments * blocks), dim3(threads),
                                sizeof(select_memory<config>), start_early, blocks};
    if (blocks > portable_blocks)
        FDMA_TRY(fdma_permit_large_clusters("select", (const void *)kernel, problem->exec.device));
    return launch("select", kernel, shape, problem, call, blocks);
}

template <int items>
static fdma_status run_with(const fdma_problem *problem, const select_call &call, uint32_t blocks) {
    if constexpr (items <= most_packed_items)
        if (call.ranges != NULL)
            return run_config<config_of<items, true>>(problem, call, blocks);
    return run_config<config_of<items>>(problem, call, blocks);
}

typedef struct segment_plan {
    fdma_status (*run)(const fdma_problem *problem, const select_call &call,
                       uint32_t blocks); // NULL: no cluster suffices
    uint32_t blocks;
    int64_t time; // us, on an H200
} segment_plan;

/* Fewer keys per thread are faster, as long as all clusters run at once. */
static segment_plan plan_segments(const fdma_problem *problem) {
    static const struct {
        int items;
        fdma_status (*run)(const fdma_problem *problem, const select_call &call, uint32_t blocks);
    } choices[] = {{1, run_with<1>}, {2, run_with<2>},   {3, run_with<3>},
                   {4, run_with<4>}, {6, run_with<6>},   {8, run_with<8>},
                   {9, run_with<9>}, {10, run_with<10>}, {most_items, run_with<most_items>}};
    const cuda_device *const device = fdma_cuda_device(problem->exec.device);
    const int64_t most = most_cluster_blocks(device);
    segment_plan best = {NULL, 0, INT64_MAX};
    for (const auto &choice : choices) {
        const int64_t wanted = divide_up(problem->kv_len, (int64_t)threads * choice.items);
        const int64_t blocks = max(wanted, (int64_t)1); // also without keys
        if (blocks > min(most, (int64_t)most_blocks_of(choice.items)))
            continue;
        if (is_present(&problem->starts) && choice.items > most_packed_items)
            continue;
        const int64_t waves =
            divide_up(problem->batch * problem->kv_heads, clusters_at_once(device, blocks));
        const int64_t time = waves * (14 + 7 * choice.items + blocks / 2);
        if (time < best.time)
            best = {choice.run, (uint32_t)blocks, time};
    }
    return best;
}

/* The time of sm80/select.cu, in us, on an H200. */
static int64_t sm80_time(const fdma_problem *problem) {
    enum { launches = 75, keys_per_us = 16384 };
    return launches + problem->batch * problem->kv_heads * problem->kv_len / keys_per_us;
}

static const char *refuses(const fdma_problem *problem) {
    const char *const refused = refuses_scores(problem, fdma_refuses_before_sm90(problem));
    if (refused != NULL)
        return refused;
    const cuda_device *const device = fdma_cuda_device(problem->exec.device);
    if (memory_of<most_items> > (size_t)device->shared_bytes)
        return "a device with less shared memory per block than this kernel needs";
    const segment_plan plan = plan_segments(problem);
    if (plan.run == NULL)
        return "more keys than a cluster of blocks holds";
    if (problem->exec.kernel == NULL && plan.time > sm80_time(problem))
        return "so many (batch, kv head) pairs that cuda/sm80 is faster";
    return NULL;
}

/* The workspace of the rules and packed sequences; a selection by score alone needs none. */
struct select_space {
    packed_sequences sequences;
    uint32_t *first_index; // see select_call
    rules_space rules;
    chain_space chains;
};

static select_space lay_out(const fdma_problem *problem, fdma_arena *arena) {
    const int64_t keys = problem->batch * problem->kv_heads * problem->kv_len;
    select_space space = {};
    space.sequences = fdma_cuda_lay_out_sequences(problem, arena, true);
    space.first_index = take_first_index(problem, arena);
    space.rules = fdma_cuda_lay_out_rules(problem, arena);
    if (keeps_recent(problem) && is_present(&problem->slot)) {
        space.chains.parent = take<uint32_t>(arena, keys);
        space.chains.root = take<uint32_t>(arena, keys);
    }
    return space;
}

static fdma_status run(const fdma_problem *problem) {
    const segment_plan plan = plan_segments(problem);
    fdma_arena arena = fdma_arena_of(problem);
    const select_space space = lay_out(problem, &arena);
    select_call call = describe_select(problem, space.sequences, space.first_index);
    if (problem->batch == 0 || problem->kv_len == 0)
        return FDMA_OK;
    FDMA_TRY(fdma_cuda_find_sequences("select", problem, space.sequences));
    FDMA_TRY(fdma_cuda_find_sinks(problem, space.rules, &call));
    FDMA_TRY(plan.run(problem, call, plan.blocks));
    FDMA_TRY(fdma_cuda_keep_recent(problem, space.rules, space.chains, call));
    return fdma_cuda_keep_near_best(problem, space.rules, call);
}

FDMA_CUDA_TABLE(fdma_cuda_sm90_select, {"cuda/sm90", operation_select, fdma_missing_sm90, refuses,
                                        workspace_of<lay_out>, run, true, 0});
