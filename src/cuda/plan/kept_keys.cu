/* Lists of the keys that attn_mask and the other rules let some query of a query block keep. A thread
 * block makes one list: it looks at as many keys at a time as it has threads, each of which reads its
 * key's entries of the mask until one lets a query keep the key. */
#include "cuda/device/ptx.cuh"
#include "cuda/plan/plan.cuh"

static constexpr int kept_threads = 256;
static constexpr int kept_warps = kept_threads / 32;

/* Whether some query of block t, of any query head of kv head g, keeps key j. */
__device__ static bool is_kept_by_some(const forward_plan &plan, int32_t b, int32_t g, int32_t t,
                                       int32_t j) {
    const int64_t head = (int64_t)b * plan.kv_heads + g;
    const key_record record =
        plan.records == NULL ? key_record{INT32_MAX, 0} : plan.records[head * plan.kv_len + j];
    const int32_t first = t * list_queries, end = min(first + list_queries, plan.q_len);
    const int32_t first_head = g * plan.group, end_head = first_head + plan.group;
    for (int32_t h = first_head; h < end_head; h += min(plan.mask.sharing, plan.group))
        for (int32_t i = first; i < end; i++)
            if (keeps(plan, record, j, query_position(plan, b, i)) &&
                is_unmasked(plan.mask, b, h, i, j))
                return true;
    return false;
}

/* How many threads of the block before this one have the flag; *total: how many have it at all. */
__device__ static int32_t rank_in_block(bool flag, int32_t *warp_counts, int32_t *total) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t flags = __ballot_sync(~0u, flag);
    if (lane == 0)
        warp_counts[warp] = __popc(flags);
    __syncthreads();
    int32_t rank = __popc(flags & ((1u << lane) - 1));
    *total = 0;
    for (int n = 0; n < kept_warps; n++) {
        rank += n < warp ? warp_counts[n] : 0;
        *total += warp_counts[n];
    }
    __syncthreads();
    return rank;
}

static __global__ void __launch_bounds__(kept_threads) list_kept_keys(const forward_plan plan) {
    __shared__ int32_t warp_counts[kept_warps];
    const int64_t head = head_of_block();
    if (head >= (int64_t)plan.batch * plan.kv_heads)
        return;
    const int32_t b = (int32_t)(head / plan.kv_heads), g = (int32_t)(head % plan.kv_heads);
    const int32_t t = (int32_t)blockIdx.x, keys = key_count(plan, b);
    const int64_t n = head * plan.kept.lists + t;
    int32_t *const list = plan.kept.list + n * plan.kept.size;
    int32_t count = 0;
    for (int32_t from = 0; from < keys; from += kept_threads) {
        const int32_t j = from + (int32_t)threadIdx.x;
        const bool kept = j < keys && is_kept_by_some(plan, b, g, t, j);
        int32_t found;
        const int32_t rank = rank_in_block(kept, warp_counts, &found);
        if (kept)
            list[count + rank] = j;
        count += found;
    }
    if (threadIdx.x == 0)
        plan.kept.count[n] = count;
}

fdma_status fdma_cuda_list_kept_keys(const fdma_problem *problem, const forward_plan *plan) {
    const int64_t heads = problem->batch * problem->kv_heads;
    if (plan->kept.lists == 0 || heads == 0)
        return FDMA_OK;
    return launch("forward", list_kept_keys, {grid_of(plan->kept.lists, heads), dim3(kept_threads)},
                  problem, *plan);
}
