/* fdma_lists() on any device from compute capability 8.0. Every key writes itself, at its slot,
 * into the lists at whose first position it is live. Then a thread block for each list removes the
 * entries that the selection does not confirm, and appends the keys that arrive later. A list that
 * would lose a key, because the selection has more slots than it says, gets counts of -1. Such a
 * key cannot be in the list, so it writes itself into the list's count.
 *
 * Source: docs/algorithm.md, slots. */
#include "core/integers.h"
#include "cuda/device/host.cuh"
#include "cuda/device/view.cuh"

static constexpr int scatter_threads = 256;
static constexpr int finish_threads = 128;

struct list_params {
    number_view<const int32_t> expiry, slot;
    number_view<int32_t> list, count; // of tile 0
    const int32_t *kv_used;           // [batch]; see count_used(); NULL: all keys exist
    int64_t list_tile, count_tile;    // distance between two tiles
    int64_t kv_len, q_len, tile_len, tiles, kv_heads, heads;
    int64_t slots; // slots that the selection says it uses
    bool causal, is_global;
    bool has_gap; // slots may be empty
};

struct head_lists {
    const int32_t *expiry, *slot;
    int32_t *list, *count;
    int64_t kv_len; // keys that exist
};

/* The positions of a tile's first and last query. If not causal, both are the position of the last
 * key. */
struct tile_positions {
    int64_t first, last;
};

__device__ static head_lists lists_of(const list_params &params, int64_t head) {
    // of 32 bits: see refuses()
    const int32_t heads = (int32_t)params.kv_heads, b = (int32_t)head / heads,
                  g = (int32_t)head % heads;
    return {params.expiry.at(b, g), params.slot.at(b, g), params.list.at(b, g),
            params.count.at(b, g), count_used(params.kv_used, b, (int32_t)params.kv_len)};
}

__device__ static tile_positions positions_of(const list_params &params, const head_lists &of,
                                              int64_t tile) {
    if (!params.causal)
        return {of.kv_len - 1, of.kv_len - 1};
    const int64_t query = tile * params.tile_len;
    const int64_t count = min(params.tile_len, params.q_len - query);
    const int64_t first = query + of.kv_len - params.q_len;
    return {first, first + count - 1};
}

/* True if key j belongs to the entries of a list that are in the order of slots. In a global
 * selection slots ascend with j, so arriving keys are among them; but not in packed sequences,
 * where slots start at 0 in each. */
__device__ static bool is_in_slot_order(const list_params &params, const head_lists &of,
                                        tile_positions at, int64_t j) {
    const int64_t expiry = of.expiry[j];
    if (params.is_global)
        return expiry == of.kv_len && j <= at.last;
    return j <= at.first && at.first < expiry;
}

__device__ static bool has_slot(const list_params &params, const head_lists &of, int64_t j) {
    return of.slot[j] >= 0 && of.slot[j] < params.slots;
}

/* The number of slots that may be in use at a tile's positions: at most the number of keys up to
 * there. */
__device__ static int64_t most_slots(const list_params &params, tile_positions at) {
    const int64_t keys = (params.is_global ? at.last : at.first) + 1;
    return max((int64_t)0, min(params.slots, keys));
}

static __global__ void __launch_bounds__(scatter_threads) scatter_keys(const list_params params) {
    const int64_t head = head_of_block();
    const int64_t j = (int64_t)blockIdx.x * scatter_threads + threadIdx.x;
    if (j >= params.kv_len || head >= params.heads)
        return;
    const head_lists of = lists_of(params, head);
    if (j >= of.kv_len)
        return;
    const int64_t slot = of.slot[j];
    const int64_t origin = of.kv_len - params.q_len;
    const int64_t reach = j - origin - (params.is_global ? params.tile_len - 1 : 0);
    int64_t tile = !params.causal || reach <= 0 ? 0 : divide_up(reach, params.tile_len);
    for (; tile < params.tiles; tile++) {
        const tile_positions at = positions_of(params, of, tile);
        if (!params.is_global && at.first >= of.expiry[j])
            break;
        if (!has_slot(params, of, j) && is_in_slot_order(params, of, at, j))
            of.count[tile * params.count_tile] = (int32_t)j;
        if (slot >= 0 && slot < most_slots(params, at) && is_in_slot_order(params, of, at, j))
            of.list[tile * params.list_tile + slot] = (int32_t)j;
    }
}

/* The number of threads of the block whose `mine` is true; `before`: those before this thread. */
__device__ static int add_up(bool mine, int *before) {
    __shared__ int of_warp[finish_threads / 32];
    const unsigned mask = __ballot_sync(~0u, mine);
    const int warp = threadIdx.x / 32;
    int all = 0;
    __syncthreads(); // every thread has read the counts of the previous call
    if (threadIdx.x % 32 == 0)
        of_warp[warp] = __popc(mask);
    __syncthreads();
    *before = __popc(mask & ((1u << threadIdx.x % 32) - 1));
    for (int w = 0; w < finish_threads / 32; w++) {
        *before += w < warp ? of_warp[w] : 0;
        all += of_warp[w];
    }
    return all;
}

/* True if entry s of a list is the key that the selection has in that slot. */
__device__ static bool is_confirmed(const list_params &params, const head_lists &of,
                                    tile_positions at, int64_t j, int64_t s) {
    return j >= 0 && j < of.kv_len && of.slot[j] == s && is_in_slot_order(params, of, at, j);
}

/* Counts the slots in use at the first position and, in a global selection, at the last. Then
 * writes -1 to the slots between them that no key has, or key 0 if there is no gap, as in a corrupt
 * selection. */
__device__ static void confirm_slots(const list_params &params, const head_lists &of,
                                     tile_positions at, int32_t *list, int32_t (&in_use)[2]) {
    const int64_t slots = most_slots(params, at);
    for (int64_t s = threadIdx.x; s < slots; s += finish_threads)
        if (is_confirmed(params, of, at, list[s], s)) {
            if (list[s] <= at.first)
                atomicMax(&in_use[0], (int32_t)s + 1);
            atomicMax(&in_use[1], (int32_t)s + 1);
        }
    __syncthreads();
    for (int64_t s = threadIdx.x; s < in_use[1]; s += finish_threads)
        if (!is_confirmed(params, of, at, list[s], s))
            list[s] = params.has_gap ? -1 : 0;
}

/* True if a number, which may be arbitrary, is a key that belongs to a list but has none of its
 * slots. */
__device__ static bool names_lost_key(const list_params &params, const head_lists &of,
                                      tile_positions at, int64_t j) {
    return j >= 0 && j < of.kv_len && !has_slot(params, of, j) &&
           is_in_slot_order(params, of, at, j);
}

static __global__ void __launch_bounds__(finish_threads) finish_lists(const list_params params) {
    __shared__ int32_t in_use[2];
    const int64_t head = head_of_block(), tile = blockIdx.x;
    if (head >= params.heads)
        return;
    const head_lists of = lists_of(params, head);
    const tile_positions at = positions_of(params, of, tile);
    int32_t *const list = of.list + tile * params.list_tile;
    int32_t *const count = of.count + tile * params.count_tile;
    bool is_complete = !names_lost_key(params, of, at, count[0]);
    if (threadIdx.x < 2)
        in_use[threadIdx.x] = 0;
    __syncthreads();
    confirm_slots(params, of, at, list, in_use);
    __syncthreads();
    int64_t total = in_use[1];
    const int64_t first = max(at.first + 1, (int64_t)0);
    for (int64_t next = first; !params.is_global && next <= at.last; next += finish_threads) {
        const int64_t j = next + threadIdx.x;
        const bool is_kept = j <= at.last && of.expiry[j] > j;
        const bool arrives = is_kept && of.slot[j] >= 0;
        is_complete &= !is_kept || has_slot(params, of, j);
        int before;
        const int all = add_up(arrives, &before);
        if (arrives)
            list[total + before] = (int32_t)j;
        total += all;
    }
    is_complete = __syncthreads_and(is_complete);
    if (threadIdx.x == 0) {
        count[0] = is_complete ? in_use[0] : -1;
        count[1] = is_complete ? (int32_t)total : -1;
    }
}

static list_params describe_lists(const fdma_problem *problem) {
    list_params params;
    params.expiry = numbers_of<const int32_t>(&problem->expiry);
    params.slot = numbers_of<const int32_t>(&problem->slot);
    params.list = numbers_of<int32_t>(&problem->list);
    params.count = numbers_of<int32_t>(&problem->count);
    params.list_tile = problem->list.stride[2];
    params.count_tile = problem->count.stride[2];
    params.kv_used = (const int32_t *)problem->kv_used.data;
    params.kv_len = problem->kv_len;
    params.q_len = problem->q_len;
    params.tile_len = problem->tile_len;
    params.tiles = count_tiles(problem);
    params.kv_heads = problem->kv_heads;
    params.heads = problem->batch * problem->kv_heads;
    params.slots = min(problem->slots, problem->kv_len);
    params.causal = problem->causal;
    params.has_gap = problem->gap > 0;
    params.is_global = problem->scope == FDMA_SCOPE_GLOBAL && !is_present(&problem->starts);
    return params;
}

static fdma_status run(const fdma_problem *problem) {
    const list_params params = describe_lists(problem);
    if (params.tiles == 0 || params.heads == 0)
        return FDMA_OK;
    if (params.kv_len > 0)
        FDMA_TRY(launch("lists", scatter_keys,
                        {grid_of(divide_up(params.kv_len, scatter_threads), params.heads),
                         dim3(scatter_threads)},
                        problem, params));
    return launch("lists", finish_lists,
                  {grid_of(params.tiles, params.heads), dim3(finish_threads)}, problem, params);
}

static const char *refuses(const fdma_problem *problem) {
    enum { most_blocks = INT32_MAX }; // of a grid
    if (problem->batch * problem->kv_heads > most_blocks || count_tiles(problem) > most_blocks)
        return "more than 2^31 lists";
    return fdma_refuses_before_sm80(problem);
}

FDMA_CUDA_TABLE(fdma_cuda_sm80_lists, {"cuda/sm80", operation_lists, fdma_missing_sm80, refuses,
                                       no_workspace, run, true, 0});
