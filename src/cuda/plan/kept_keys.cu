/* Lists of the keys that attn_mask and the other rules let some query of a query block keep, and
 * for each listed key which of the queries keep it. A thread block makes one list. It looks at four
 * times as many keys at a time as it has threads: each thread reads four neighbouring entries of
 * the mask for one query after the other. */
#include "cuda/device/ptx.cuh"
#include "cuda/plan/plan.cuh"

static constexpr int kept_threads = 256;
static constexpr int kept_warps = kept_threads / 32;
static constexpr int own_keys = 4; // of a thread
static constexpr int query_words = list_queries / 32;

/* What a thread block works on: list t of a set. */
struct kept_work {
    int32_t b, g, t; // the first sequence and kv head of the set
    int32_t keys;    // that exist
    int64_t list;    // among all
    bool by_words;   // four entries of the mask can be read as one word
};

/* The queries of the block that keep a key, a bit for each. */
struct query_bits {
    uint32_t word[query_words];
};

/* The bits of the queries at whose position the other rules let a key be kept. */
__device__ static query_bits allowed_queries(const forward_plan &plan, const kept_work &work,
                                             int32_t j) {
    const int64_t head = (int64_t)work.b * plan.kv_heads + work.g;
    const int32_t position = query_position(plan, work.b, work.t * list_queries);
    const int64_t expiry =
        plan.records == NULL ? INT32_MAX : plan.records[head * plan.kv_len + j].expiry;
    const int64_t from = plan.by_position ? first_position(plan, j) : INT32_MIN;
    const int64_t queries = plan.q_len - work.t * list_queries;
    query_bits bits;
#pragma unroll
    for (int w = 0; w < query_words; w++) {
        const int64_t first = position + 32 * w; // of the word
        const uint32_t end =
            (uint32_t)min(max(min(expiry - position, queries) - 32 * w, (int64_t)0), (int64_t)32);
        bits.word[w] =
            low_bits(end) & ~low_bits((uint32_t)min(max(from - first, (int64_t)0), (int64_t)32));
    }
    return bits;
}

/* Four neighbouring entries of the mask, a byte each. Those past the end count as 0. */
__device__ static uint32_t load_entries(const forward_plan &plan, const kept_work &work,
                                        const uint8_t *row, int32_t j) {
    if (work.by_words && j + own_keys <= plan.kv_len)
        return *(const uint32_t *)(row + j);
    uint32_t entries = 0;
    for (int n = 0; n < own_keys && j + n < plan.kv_len; n++)
        entries |= (uint32_t)(row[(j + n) * plan.mask.key] != 0) << 8 * n;
    return entries;
}

/* The queries that keep keys j to j + 3, by the mask of query head h alone. */
__device__ static void read_mask(const forward_plan &plan, const kept_work &work, int32_t h,
                                 int32_t j, query_bits (&bits)[own_keys]) {
    const int32_t first = work.t * list_queries;
    const uint8_t *const rows =
        (const uint8_t *)plan.mask.data + plan.mask.offset(work.b, h, first, 0);
#pragma unroll
    for (int w = 0; w < query_words; w++) {
        uint32_t words[own_keys] = {};
        const int32_t queries = min(plan.q_len - first - 32 * w, 32);
#pragma unroll 8
        for (int i = 0; i < queries; i++) {
            const uint32_t entries =
                load_entries(plan, work, rows + (32 * w + i) * plan.mask.query, j);
#pragma unroll
            for (int n = 0; n < own_keys; n++)
                words[n] |= (uint32_t)((entries >> 8 * n & 0xff) != 0) << i;
        }
#pragma unroll
        for (int n = 0; n < own_keys; n++)
            bits[n].word[w] = words[n];
    }
}

/* The queries that keep keys j to j + 3, by the mask of head m of the kv head's and all rules. */
__device__ static void find_queries(const forward_plan &plan, const kept_work &work, int m,
                                    int32_t j, query_bits (&bits)[own_keys]) {
    const int32_t h = work.g * plan.group + m * (plan.group / plan.kept.mask_heads);
    read_mask(plan, work, h, j, bits);
#pragma unroll
    for (int n = 0; n < own_keys; n++) {
        const query_bits allowed =
            j + n < work.keys ? allowed_queries(plan, work, j + n) : query_bits{};
#pragma unroll
        for (int w = 0; w < query_words; w++)
            bits[n].word[w] &= allowed.word[w];
    }
}

__device__ static bool is_any(const query_bits &bits) {
    uint32_t any = 0;
#pragma unroll
    for (int w = 0; w < query_words; w++)
        any |= bits.word[w];
    return any != 0;
}

/* The sum of `count` over the threads before this one; *total: over all threads. */
__device__ static int32_t sum_before(int32_t count, int32_t *warp_sums, int32_t *total) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int32_t sum = count;
    for (int step = 1; step < 32; step *= 2) {
        const int32_t other = __shfl_up_sync(~0u, sum, step);
        sum += lane >= step ? other : 0;
    }
    if (lane == 31)
        warp_sums[warp] = sum;
    __syncthreads();
    int32_t before = sum - count;
    *total = 0;
    for (int n = 0; n < kept_warps; n++) {
        before += n < warp ? warp_sums[n] : 0;
        *total += warp_sums[n];
    }
    __syncthreads();
    return before;
}

/* Lists those of keys j to j + 3 that some query keeps, from entry n on. `bits` are those of the
 * mask's only head, or are found again for each of several. */
__device__ static void write_entries(const forward_plan &plan, const kept_work &work, int32_t j,
                                     int64_t n, uint32_t listed, query_bits (&bits)[own_keys]) {
    const int32_t heads = plan.kept.mask_heads;
    for (int m = 0; m < heads && listed != 0; m++) {
        if (heads > 1)
            find_queries(plan, work, m, j, bits);
        int64_t to = n;
#pragma unroll
        for (int k = 0; k < own_keys; k++) {
            if ((listed >> k & 1) == 0)
                continue;
            const uint32_t *const word = bits[k].word;
            plan.kept.list[to] = j + k;
            plan.kept.queries[to * heads + m] = make_uint4(word[0], word[1], word[2], word[3]);
            to++;
        }
    }
}

static __global__ void __launch_bounds__(kept_threads, 2)
    list_kept_keys(const __grid_constant__ forward_plan plan, const bool by_words) {
    __shared__ int32_t warp_sums[kept_warps];
    const int64_t set = head_of_block();
    const int32_t b = (int32_t)(set / plan.kept.heads), g = (int32_t)(set % plan.kept.heads);
    if (b >= plan.kept.batches)
        return;
    const int32_t t = (int32_t)blockIdx.x;
    const kept_work work = {b, g, t, key_count(plan, b), kept_list(plan.kept, b, g, t), by_words};
    int64_t end = work.list * plan.kept.size;
    for (int64_t from = 0; from < work.keys; from += kept_threads * own_keys) {
        const int32_t j = (int32_t)min(from + threadIdx.x * own_keys, (int64_t)work.keys);
        query_bits bits[own_keys] = {};
        uint32_t listed = 0;
        for (int m = 0; m < plan.kept.mask_heads && j < work.keys; m++) {
            find_queries(plan, work, m, j, bits);
#pragma unroll
            for (int n = 0; n < own_keys; n++)
                listed |= (uint32_t)is_any(bits[n]) << n;
        }
        int32_t found;
        const int32_t before = sum_before(__popc(listed), warp_sums, &found);
        write_entries(plan, work, j, end + before, listed, bits);
        end += found;
    }
    if (threadIdx.x == 0)
        plan.kept.count[work.list] = (int32_t)(end - work.list * plan.kept.size);
}

fdma_status fdma_cuda_list_kept_keys(const fdma_problem *problem, const forward_plan *plan) {
    const pair_view &mask = plan->mask;
    const int64_t sets = (int64_t)plan->kept.batches * plan->kept.heads;
    const bool by_words = mask.key == 1 && (uintptr_t)mask.data % 4 == 0 &&
                          (mask.batch | mask.head | mask.query) % 4 == 0;
    if (plan->kept.lists == 0 || sets == 0)
        return FDMA_OK;
    return launch("forward", list_kept_keys, {grid_of(plan->kept.lists, sets), dim3(kept_threads)},
                  problem, *plan, by_words);
}
