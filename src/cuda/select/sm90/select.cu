/* Selection in one launch, a cluster of blocks for each segment, on compute capability 9.0 and
 * later. Longer segments than a cluster holds are sm80/select.cu's.
 *
 * A block owns as many places as positions, a warp of it a chunk of either; what belongs to another
 * block is written into its shared memory.
 *
 *     sort_keys        radix sort, four passes: {order, position} by place
 *     find_borders     for each chunk of positions, the place of the worst key kept before it
 *     judge_places     between which borders is a key? Mostly that settles whether it is kept, else
 *                      how many keys of its chunk may outrank it
 *     judge_positions  counts those
 *     number_kept      the kept keys by position, and where they stand by place
 *     match_kept       the i-th worst expires at the window + i-th by position
 *     follow_slots     slots are handed down: first inside a block, then from block to block
 *
 * Exact, and hardly dependent on the order in which scores come. */
#include "cuda/select/sm90/kept.cuh"
#include "cuda/select/sm90/sort.cuh"

/* ---- kept keys, numbered by position and by place ---- */

/* How many flags of keys are set in the block before this warp's. */
template <class config>
__device__ static uint32_t count_lower_flags(select_memory<config> &shared, uint32_t flags) {
    uint32_t total;
    return sum_lower_warps<warps>(shared.scratch, __reduce_add_sync(all_lanes, __popc(flags)),
                                  &total);
}

/* How many flags are set before that of key r, if `number` counts those before the warp's r-th. */
__device__ static uint32_t number_flag(uint32_t flags, int r, uint32_t *number) {
    const uint32_t set = __ballot_sync(all_lanes, flags >> r & 1), before = *number;
    *number += __popc(set);
    return before + __popc(set & lanemask_lt());
}

/* Tells every block how many keys of each block by place this block by position keeps. */
template <class config>
__device__ static void share_kept(select_memory<config> &shared, const cluster_place &at,
                                  uint32_t kept) {
    static_assert(config::items < 16, "counts of a thread have four bits");
    uint64_t counts = 0;
#pragma unroll
    for (int r = 0; r < config::items; r++)
        counts += (uint64_t)(kept >> r & 1)
                  << 4 * (shared.verdict[own_index<config>(at, r)].x / config::keys);
#pragma unroll
    for (uint32_t n = 0; n < config::most_blocks / 2; n++, counts >>= 8) {
        const uint32_t pair = (uint32_t)(counts & 15) | (uint32_t)(counts >> 4 & 15) << 16;
        const uint32_t sum = __reduce_add_sync(all_lanes, pair);
        if (at.lane == n && sum > 0)
            atomicAdd(&shared.kept_here[n], sum);
    }
    __syncthreads();
    const uint32_t to = threadIdx.x / (config::most_blocks / 2),
                   of = threadIdx.x % (config::most_blocks / 2);
    if (to < at.blocks)
        store_at(to, &shared.kept_at[at.rank][of], shared.kept_here[of]);
}

/* By one warp: what is kept at the positions and at the places of earlier blocks, and in all. */
template <class config>
__device__ static void sum_kept(select_memory<config> &shared, const cluster_place &at) {
    uint32_t before = 0, lower = 0, all = 0;
    for (uint32_t n = at.lane; n < at.blocks * config::most_blocks; n += warp_lanes) {
        const uint32_t by_position = n / config::most_blocks, by_place = n % config::most_blocks;
        const uint32_t pair = shared.kept_at[by_position][by_place / 2];
        const uint32_t count = by_place % 2 ? pair >> 16 : pair & 0xffff;
        before += by_position < at.rank ? count : 0;
        lower += by_place < at.rank ? count : 0;
        all += count;
    }
    shared.kept_before = __reduce_add_sync(all_lanes, before);
    shared.lower_kept = __reduce_add_sync(all_lanes, lower);
    shared.kept_all = __reduce_add_sync(all_lanes, all);
}

/* What a block has to write, in the registers of its threads: nothing is written to global memory
 * before the last barrier, which would wait for it. */
template <class config> struct select_result {
    uint32_t kept;                // bit r: key r by position is ever kept
    uint32_t number;              // by position: how many kept keys are before this warp's
    uint32_t slot[config::items]; // by kept number
};

/* A kept key's number goes to its place, its position to its number. */
template <class config>
__device__ static void number_kept(select_memory<config> &shared, const cluster_place &at,
                                   select_result<config> &result) {
#pragma unroll
    for (int r = 0; r < config::items; r++)
        shared.number[own_index<config>(at, r)] = never_kept;
    result.kept = judge_positions(shared, at);
    result.number = count_lower_flags(shared, result.kept);
    share_kept(shared, at, result.kept);
    sync_cluster();
    if (at.warp == 0)
        sum_kept(shared, at);
    __syncthreads();
    uint32_t number = result.number += shared.kept_before;
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const uint32_t mine = number_flag(result.kept, r, &number);
        if (!(result.kept >> r & 1))
            continue;
        const uint32_t index = own_index<config>(at, r), place = shared.verdict[index].x;
        store_at(place / config::keys, &shared.number[place % config::keys], mine);
        store_at(mine / config::keys, &shared.kept[mine % config::keys],
                 at.rank * config::keys + index);
    }
}

/* By place: the i-th worst kept key is evicted by the kept key window + i, which is told whose slot
 * it takes. Numbers become expiries. */
template <class config>
__device__ static void match_kept(select_memory<config> &shared, const cluster_place &at,
                                  const select_call &call) {
    uint32_t kept = 0;
#pragma unroll
    for (int r = 0; r < config::items; r++)
        kept |= (uint32_t)(shared.number[own_index<config>(at, r)] != never_kept) << r;
    uint32_t number = shared.lower_kept + count_lower_flags(shared, kept);
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        uint32_t *const own = &shared.number[own_index<config>(at, r)];
        const uint32_t evictor = number_flag(kept, r, &number) + call.window;
        const bool keeps = kept >> r & 1, evicted = keeps && evictor < shared.kept_all;
        const uint32_t rank = evictor / config::keys, index = evictor % config::keys;
        if (evicted)
            store_at(rank, &shared.parent[index], *own);
        if (keeps)
            *own = evicted ? load_at(rank, &shared.kept[index]) : call.kv_len;
    }
}

/* ---- slots ---- */

/* Of each kept key of this block, the first here that has the same slot: its own parent is in an
 * earlier block, or it is the slot's first: its parent is the slot. */
template <class config>
__device__ static void find_heads(select_memory<config> &shared, const cluster_place &at,
                                  uint32_t window, uint32_t (&head)[config::items]) {
    const uint32_t first = at.rank * config::keys;
    bool changed = true;
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const uint32_t index = own_index<config>(at, r), number = first + index;
        if (number < window || number >= shared.kept_all)
            shared.parent[index] = number;
        const uint32_t parent = shared.parent[index];
        head[r] = parent >= first && number >= window ? parent - first : index;
        shared.head[index] = head[r];
    }
    while (__syncthreads_or(changed)) {
        changed = false;
#pragma unroll
        for (int r = 0; r < config::items; r++) {
            const uint32_t next = shared.head[head[r]];
            changed |= next != head[r];
            head[r] = next;
        }
        __syncthreads();
#pragma unroll
        for (int r = 0; r < config::items; r++)
            shared.head[own_index<config>(at, r)] = head[r];
    }
}

/* Heads go from head to head up to the slot. What they read may be on its way there already: an
 * earlier one of the same slot all the same, and a shorter way. */
template <class config>
__device__ static void follow_slots(select_memory<config> &shared, const cluster_place &at,
                                    uint32_t window, select_result<config> &result) {
    uint32_t head[config::items];
    find_heads(shared, at, window, head);
    sync_cluster();
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const uint32_t index = own_index<config>(at, r);
        if (head[r] != index || at.rank * config::keys + index >= shared.kept_all)
            continue;
        uint32_t slot = shared.parent[index];
        while (slot >= window) {
            const uint32_t rank = slot / config::keys;
            const uint32_t first = load_at(rank, &shared.head[slot % config::keys]);
            slot = load_at(rank, &shared.parent[first]);
            *(volatile uint32_t *)&shared.parent[index] = slot;
        }
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < config::items; r++)
        result.slot[r] = shared.parent[head[r]];
}

/* ---- results ---- */

template <class config>
__device__ static void write_global(const cluster_place &at, const select_segment &segment,
                                    const select_call &call, const select_result<config> &result) {
    uint32_t number = result.number;
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const uint32_t mine = number_flag(result.kept, r, &number);
        const uint32_t j = at.rank * config::keys + own_index<config>(at, r);
        const bool keeps = result.kept >> r & 1;
        if (j >= call.kv_len)
            continue;
        segment.expiry[j] = (int32_t)(keeps ? call.kv_len : j);
        if (segment.slot)
            segment.slot[j] = keeps ? (int32_t)mine : -1;
    }
}

/* What is never kept, by position; expiries of the others by place, their slots by number. */
template <class config>
__device__ static void write_causal(const select_memory<config> &shared, const cluster_place &at,
                                    const select_segment &segment, const select_call &call,
                                    const select_result<config> &result) {
#pragma unroll 1 // registers do not suffice for more
    for (int r = 0; r < config::items; r++) {
        const uint32_t index = own_index<config>(at, r), j = at.rank * config::keys + index;
        if (j < call.kv_len && !(result.kept >> r & 1)) {
            segment.expiry[j] = (int32_t)j;
            if (segment.slot)
                segment.slot[j] = -1;
        }
    }
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const uint32_t index = own_index<config>(at, r), j = at.rank * config::keys + index;
        if (shared.number[index] != never_kept)
            segment.expiry[shared.position[index]] = (int32_t)shared.number[index];
        if (segment.slot && j < shared.kept_all)
            segment.slot[shared.kept[index]] = (int32_t)result.slot[r];
    }
}

/* ---- the kernel ---- */

template <class config>
__device__ static void select_causal(select_memory<config> &shared, const cluster_place &at,
                                     const select_segment &segment, const select_call &call,
                                     const uint32_t (&position)[config::items]) {
    select_result<config> result;
    find_borders(shared, at, position, call.window);
    judge_places(shared, at, position, call.window);
    sync_cluster();
#pragma unroll
    for (int r = 0; r < config::items; r++) // out of registers, now that borders are done with
        shared.position[own_index<config>(at, r)] = position[r];
    number_kept(shared, at, result);
    sync_cluster();
    match_kept(shared, at, call);
    sync_cluster();
    if (call.first.slot)
        follow_slots(shared, at, call.window, result);
    barrier_cluster_arrive();
    write_causal(shared, at, segment_of(call, opaque(blockIdx.x) / at.blocks), call, result);
    barrier_cluster_wait(); // the others may still read what is here
}

template <class config>
__device__ static void select_global(select_memory<config> &shared, const cluster_place &at,
                                     const select_segment &segment, const select_call &call,
                                     const uint32_t (&position)[config::items]) {
    select_result<config> result;
    sync_cluster(); // verdicts take the place of keys
    judge_global(shared, at, position, call.window);
    sync_cluster();
    number_kept(shared, at, result);
    barrier_cluster_arrive();
    write_global(at, segment_of(call, opaque(blockIdx.x) / at.blocks), call, result);
    barrier_cluster_wait();
}

template <class config>
__global__ void __launch_bounds__(threads, 1)
    select_segments(const select_call call, uint32_t blocks) {
    select_memory<config> &shared = shared_memory<select_memory<config>>();
    cluster_place at;
    at.rank = cluster_ctarank();
    at.blocks = blocks;
    at.borders = at.blocks * warps;
    at.warp = threadIdx.x / warp_lanes;
    at.lane = threadIdx.x % warp_lanes;
    const select_segment segment = segment_of(call, blockIdx.x / blocks);
    uint32_t position[config::items];
    barrier_cluster_arrive();
    if (threadIdx.x < config::most_blocks / 2)
        shared.kept_here[threadIdx.x] = 0;
    griddepcontrol_wait(); // for the scores
    griddepcontrol_launch_dependents();
    sort_keys(shared, at, segment, call.kv_len, position);
    if (call.causal)
        select_causal(shared, at, segment, call, position);
    else
        select_global(shared, at, segment, call, position);
}

/* ---- the row ---- */

enum { most_items = 11, most_blocks = 16, portable_blocks = 8, cluster_group = 16 };

/* Of a cluster: a block of most keys has no room for the counts of more. */
static constexpr int blocks_beside(int items) { return items < most_items ? most_blocks : 4; }

template <int items> using config_of = segment_config<items, blocks_beside(items)>;

static int64_t divide_up(int64_t n, int64_t by) { return (n + by - 1) / by; }

/* Clusters of so many blocks that run at once, a block having a multiprocessor to itself. Groups of
 * 16 multiprocessors can form a cluster; one group or so has fewer. */
static int64_t clusters_at_once(const cuda_device *facts, int64_t blocks) {
    const int64_t groups = facts->multiprocessors / cluster_group;
    const int64_t clusters = groups * (cluster_group / blocks) - (blocks > 1);
    return clusters > 1 ? clusters : 1;
}

typedef struct segment_plan {
    int items; // 0: there is no such cluster
    uint32_t blocks;
    int64_t time; // us, on an H200
} segment_plan;

/* Fewer keys a thread are faster, as long as all clusters run at once. */
static segment_plan plan_segments(const fdma_problem *problem) {
    static const int choices[] = {1, 2, 3, 4, 6, 8, most_items};
    const cuda_device *const facts = fdma_cuda_device(problem->exec.device);
    const int64_t most = facts->capability < 110 ? (int64_t)most_blocks : (int64_t)portable_blocks;
    segment_plan best = {};
    best.time = INT64_MAX;
    for (size_t i = 0; i < sizeof choices / sizeof choices[0]; i++) {
        const int64_t wanted = divide_up(problem->kv_len, (int64_t)threads * choices[i]);
        const int64_t blocks = wanted > 1 ? wanted : 1; // also where there are no keys
        if (blocks > most || blocks > blocks_beside(choices[i]))
            continue;
        const int64_t waves =
            divide_up(problem->batch * problem->kv_heads, clusters_at_once(facts, blocks));
        const int64_t time = waves * (14 + 7 * choices[i] + blocks / 2);
        if (time >= best.time)
            continue;
        best.items = choices[i];
        best.blocks = (uint32_t)blocks;
        best.time = time;
    }
    return best;
}

/* What sm80/select.cu takes, in us, on an H200. */
static int64_t passes_time(const fdma_problem *problem) {
    enum { launches = 75, keys_per_us = 16384 };
    return launches + problem->batch * problem->kv_heads * problem->kv_len / keys_per_us;
}

static const char *refuses(const fdma_problem *problem) {
    const char *const refused = fdma_refuses_before_sm90(problem);
    if (refused)
        return refused;
    if (problem->dtype != FDMA_FLOAT32)
        return "float64 scores, supported: float32";
    const cuda_device *const facts = fdma_cuda_device(problem->exec.device);
    if (sizeof(select_memory<config_of<most_items>>) > (size_t)facts->shared_bytes)
        return "a device of less shared memory than its tables take";
    const segment_plan plan = plan_segments(problem);
    if (plan.items == 0)
        return "more keys than a cluster of blocks holds";
    if (problem->exec.kernel == NULL && plan.time > passes_time(problem))
        return "more clusters than run at once";
    return NULL;
}

static size_t workspace(const fdma_problem *problem) {
    (void)problem;
    return 0;
}

template <int items>
static fdma_status run_with(const fdma_problem *problem, const segment_plan &plan) {
    typedef config_of<items> config;
    const auto kernel = select_segments<config>;
    const uint32_t segments = (uint32_t)(problem->batch * problem->kv_heads);
    launch_shape shape = {dim3(segments * plan.blocks), dim3(threads)};
    shape.shared_bytes = sizeof(select_memory<config>);
    shape.cluster = plan.blocks;
    shape.after_dependency = true;
    if (plan.blocks > portable_blocks)
        FDMA_TRY(check_cuda(
            "select",
            cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1)));
    return launch("select", kernel, shape, problem, describe_select(problem), plan.blocks);
}

static fdma_status run_plan(const fdma_problem *problem, const segment_plan &plan) {
    switch (plan.items) {
    case 1:
        return run_with<1>(problem, plan);
    case 2:
        return run_with<2>(problem, plan);
    case 3:
        return run_with<3>(problem, plan);
    case 4:
        return run_with<4>(problem, plan);
    case 6:
        return run_with<6>(problem, plan);
    case 8:
        return run_with<8>(problem, plan);
    default:
        return run_with<most_items>(problem, plan);
    }
}

static fdma_status run(const fdma_problem *problem) {
    if (problem->batch == 0 || problem->kv_heads == 0 || problem->kv_len == 0)
        return FDMA_OK;
    return run_plan(problem, plan_segments(problem));
}

static const fdma_kernel rows[] = {
    {"cuda/sm90", operation_select, fdma_missing_sm90, refuses, workspace, run, true}};

extern "C" const kernel_table fdma_cuda_sm90_select = {rows, sizeof rows / sizeof rows[0]};
