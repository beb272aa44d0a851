/* Lists the keys that attn_mask and the other rules let some query of a query block keep, and marks
 * for each query of the block which listed keys it keeps. There are two kernels:
 *
 *   find_queries()     reads the mask once, and writes for each key a bit for each query, and a bit
 *                      that is set if any query keeps the key
 *   list_kept_keys()   lists the keys that some query keeps, and turns their bits, in place, into
 *                      bits of the queries, or moves them to the entries of the list */
#include "cuda/device/ptx.cuh"
#include "cuda/plan/host.cuh"

static constexpr int mask_warps = list_queries / 32; // each reads the rows of 32 queries
static constexpr int mask_threads = mask_warps * 32;
static constexpr int own_keys = 16; // of a lane, one byte of the mask each
static constexpr int block_keys = 32 * own_keys;
static constexpr int queries_together = 8; // queries whose entries are in flight together
static constexpr int list_threads = 1024;

/* How find_queries() reads neighbouring entries of a row of the mask. */
enum mask_reading {
    by_vectors, // 16 as one vector, or 16 numbers as two
    by_words,   // four as one word, where rows do not begin at multiples of 16 bytes
    by_entries, // one by one, where they are not neighbours, and numbers also there
};

/* The work of a thread block: list t of a set. */
struct kept_work {
    int32_t b, g, t; // the first sequence and kv head of the set
    int32_t keys;    // some query of the list may keep keys 0 to keys - 1
    int64_t list;    // its index among all lists
};

/* List t of the set that the y and z dimensions of the grid select. A set past the last one has no
 * keys. */
__device__ static kept_work work_of(const forward_plan &plan, int32_t t) {
    const int64_t set = head_of_block();
    const int32_t b = (int32_t)(set / plan.kept.heads), g = (int32_t)(set % plan.kept.heads);
    if (b >= plan.kept.batches)
        return {};
    const int32_t last = query_position(plan, b, min((t + 1) * list_queries, plan.q_len) - 1);
    const int32_t keys = key_count(plan, b);
    return {b, g, t, plan.causal ? max(min(keys, last + 1), 0) : keys,
            kept_list(plan.kept, b, g, t)};
}

struct mask_entries {
    uint32_t word[own_keys / 4];
};

__device__ static mask_entries load_one_by_one(const forward_plan &plan, int64_t row, int32_t j) {
    mask_entries entries = {};
#pragma unroll 1 // few registers: this replaces one load
    for (int n = 0; n < own_keys && j + n < plan.kv_len; n++) {
        const bool is_set = is_unmasked(plan.mask, row + (j + n) * plan.mask.key);
        const uint32_t entry = (uint32_t)is_set << n % 4 * 8;
#pragma unroll
        for (int w = 0; w < own_keys / 4; w++)
            entries.word[w] |= n / 4 == w ? entry : 0;
    }
    return entries;
}

/* Sets the highest bit of each half that is a number above 0, and clears the other bits.
 * infinities: infinity_of() in both halves. No sum carries into the other half. */
__device__ static uint32_t halves_above_zero(uint32_t pair, uint32_t infinities) {
    const uint32_t low = 0x7fff7fff, size = pair & low;
    return (size + low) & ~(size + (low - infinities)) & ~pair & ~low;
}

/* Four entries from as many numbers. */
__device__ static uint32_t entries_of_numbers(uint32_t first, uint32_t second,
                                              uint32_t infinities) {
    return prmt(halves_above_zero(first, infinities), halves_above_zero(second, infinities),
                0x7531);
}

/* Entries j to j + 15 of the row that begins at offset `from`. Entries past the end are 0. */
template <mask_reading reading, typename element>
__device__ static mask_entries load_entries(const forward_plan &plan, int64_t from, int32_t j) {
    const element *const row = (const element *)plan.mask.data + from;
    if (reading == by_vectors && j + own_keys <= plan.kv_len) {
        const uint4 four = *(const uint4 *)(row + j);
        if (sizeof(element) == sizeof(uint8_t))
            return {four.x, four.y, four.z, four.w};
        const uint4 next = ((const uint4 *)(row + j))[1];
        const uint32_t infinities = infinity_of(plan.mask) * 0x10001;
        return {entries_of_numbers(four.x, four.y, infinities),
                entries_of_numbers(four.z, four.w, infinities),
                entries_of_numbers(next.x, next.y, infinities),
                entries_of_numbers(next.z, next.w, infinities)};
    }
    // five aligned words contain any 16 bytes
    if (reading == by_words && j + own_keys + 4 <= plan.kv_len) {
        const uint32_t *const words = (const uint32_t *)((uintptr_t)(row + j) & ~(uintptr_t)3);
        const int shift = (int)((uintptr_t)(row + j) % 4 * 8);
        mask_entries entries;
#pragma unroll
        for (int n = 0; n < own_keys / 4; n++)
            entries.word[n] = (uint32_t)(((uint64_t)words[n + 1] << 32 | words[n]) >> shift);
        return entries;
    }
    return load_one_by_one(plan, from, j);
}

/* Sets the top bit of each byte that is not 0. */
__device__ static uint32_t nonzero_bytes(uint32_t word) {
    const uint32_t low = 0x7f7f7f7f;
    return (((word & low) + low) | word) & ~low;
}

/* Reads the rows of 32 queries, from query i on, at keys j to j + 15. Bit r of words[n] is set if
 * query i + r keeps key j + n. The bits of queries past the last one are undefined. */
template <mask_reading reading, typename element>
__device__ static void read_mask(const forward_plan &plan, int64_t rows, int32_t i, int32_t j,
                                 uint32_t (&words)[own_keys]) {
#pragma unroll
    for (int n = 0; n < own_keys; n++)
        words[n] = 0;
#pragma unroll 1
    for (int from = 0; from < 32; from += queries_together) {
        mask_entries entries[queries_together];
        uint32_t bits[own_keys / 4] = {}; // a byte for each key
#pragma unroll
        for (int r = 0; r < queries_together; r++) {
            const int64_t row = min(i + from + r, plan.q_len - 1);
            entries[r] = load_entries<reading, element>(plan, rows + row * plan.mask.query, j);
        }
#pragma unroll
        for (int r = 0; r < queries_together; r++)
#pragma unroll
            for (int n = 0; n < own_keys / 4; n++)
                bits[n] = bits[n] >> 1 | nonzero_bytes(entries[r].word[n]);
#pragma unroll
        for (int n = 0; n < own_keys; n++)
            words[n] |= (bits[n / 4] >> n % 4 * 8 & 0xff) << from;
    }
}

/* The queries of the list that may keep key j by all rules but the mask. */
__device__ static uint4 allowed_queries(const forward_plan &plan, const kept_work &work,
                                        int32_t j) {
    if (j >= work.keys)
        return make_uint4(0, 0, 0, 0);
    const int64_t head = (int64_t)work.b * plan.kv_heads + work.g;
    const int64_t position = query_position(plan, work.b, work.t * list_queries);
    const int64_t expiry =
        plan.records == NULL ? INT32_MAX : plan.records[head * plan.kv_len + j].expiry;
    const int64_t from = plan.by_position ? first_position(plan, j) : INT32_MIN;
    const int64_t queries = plan.q_len - work.t * list_queries;
    const int32_t end =
        (int32_t)max(min(expiry - position, min(queries, (int64_t)list_queries)), (int64_t)0);
    const int32_t begin = (int32_t)min(max(from - position, (int64_t)0), (int64_t)list_queries);
    uint32_t words[list_queries / 32];
#pragma unroll
    for (int w = 0; w < list_queries / 32; w++)
        words[w] =
            low_bits((uint32_t)max(end - 32 * w, 0)) & ~low_bits((uint32_t)max(begin - 32 * w, 0));
    return make_uint4(words[0], words[1], words[2], words[3]);
}

/* The words of a block of keys, four per key. Padding avoids bank conflicts between lanes, which
 * have 16 keys each. */
struct block_words {
    static constexpr int own_words = own_keys * mask_warps, stride = own_words + 4;
    alignas(16) uint32_t word[32 * stride];

    __device__ uint32_t *of_key(int key) {
        return &word[key / own_keys * stride + key % own_keys * mask_warps];
    }
};

/* The bits of key or entry n of a list; see kept_lists. */
__device__ static uint4 *bits_at(const kept_lists &kept, int64_t list, int m, int32_t n) {
    const int64_t block = list * (kept.size / list_queries) + n / list_queries;
    return kept.bits + (block * kept.mask_heads + m) * list_queries + n % list_queries;
}

/* Finds the queries that keep each key of a block, by the mask of every head. */
template <mask_reading reading, typename element>
static __global__ void __launch_bounds__(mask_threads, 4)
    find_queries(const __grid_constant__ forward_plan plan, const int32_t blocks) {
    __shared__ block_words block;
    const kept_work work = work_of(plan, (int32_t)blockIdx.x / blocks);
    const int32_t first = (int32_t)blockIdx.x % blocks * block_keys;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int32_t i = work.t * list_queries + warp * 32, j = first + lane * own_keys;
    bool listed[block_keys / mask_threads] = {};
    if (first >= work.keys)
        return;
    for (int m = 0; m < plan.kept.mask_heads; m++) {
        const int32_t h = work.g * plan.group + m * (plan.group / plan.kept.mask_heads);
        const int64_t rows = plan.mask.offset(work.b, h, 0, 0);
        uint32_t words[own_keys];
        read_mask<reading, element>(plan, rows, i, j, words);
#pragma unroll
        for (int n = 0; n < own_keys; n++)
            block.of_key(lane * own_keys + n)[warp] = words[n];
        __syncthreads();
#pragma unroll
        for (int x = 0; x < block_keys / mask_threads; x++) {
            const int key = x * mask_threads + threadIdx.x;
            const uint4 allowed = allowed_queries(plan, work, first + key);
            uint4 bits = *(const uint4 *)block.of_key(key);
            bits = make_uint4(bits.x & allowed.x, bits.y & allowed.y, bits.z & allowed.z,
                              bits.w & allowed.w);
            listed[x] |= (bits.x | bits.y | bits.z | bits.w) != 0;
            if (first + key < plan.kept.size)
                *bits_at(plan.kept, work.list, m, first + key) = bits;
        }
        __syncthreads();
    }
#pragma unroll
    for (int x = 0; x < block_keys / mask_threads; x++) {
        const uint32_t lanes = __ballot_sync(~0u, listed[x]);
        const int32_t word = (first + x * mask_threads) / 32 + warp;
        if (lane == 0 && word < plan.kept.size / 32)
            plan.kept.listed[work.list * (plan.kept.size / 32) + word] = lanes;
    }
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
    for (int n = 0; n < list_threads / 32; n++) {
        before += n < warp ? warp_sums[n] : 0;
        *total += warp_sums[n];
    }
    __syncthreads();
    return before;
}

/* Writes the list and returns its number of entries. Each thread reads the bits of 32 keys at a
 * time. */
__device__ static int32_t write_list(const forward_plan &plan, const kept_work &work,
                                     int32_t *warp_sums) {
    const uint32_t *const listed = plan.kept.listed + work.list * (plan.kept.size / 32);
    int32_t *const list = plan.kept.list + work.list * plan.kept.size;
    int32_t entries = 0;
    for (int64_t from = 0; from < work.keys; from += 32 * list_threads) {
        const int64_t first = from + 32 * threadIdx.x;
        uint32_t lanes = first < work.keys ? listed[first / 32] : 0;
        int32_t found;
        int32_t n = entries + sum_before(__popc(lanes), warp_sums, &found);
        for (; lanes != 0; lanes &= lanes - 1)
            list[n++] = (int32_t)first + __ffs((int)lanes) - 1;
        entries += found;
    }
    return entries;
}

/* Turns the bits of listed keys into bits of queries. Four warps take 128 entries, 32 queries each.
 * It works in place, because the entry of a key never comes after the key. An empty list has bits
 * for 128 entries too: kernels read the bits of at least one key block. */
__device__ static void write_bits(const forward_plan &plan, const kept_work &work, int m,
                                  int32_t entries) {
    const int32_t *const list = plan.kept.list + work.list * plan.kept.size;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int32_t end = max(entries, 1);
    for (int32_t from = 0; from < end; from += list_threads) {
        const int32_t first = from + warp / mask_warps * list_queries;
        uint32_t words[list_queries / 32];
#pragma unroll
        for (int x = 0; x < list_queries / 32; x++) {
            const int32_t n = first + x * 32 + lane;
            words[x] = n < entries ? ((const uint32_t *)bits_at(plan.kept, work.list, m,
                                                                list[n]))[warp % mask_warps]
                                   : 0;
        }
        __syncthreads();
#pragma unroll
        for (int x = 0; x < list_queries / 32; x++)
            words[x] = transpose_bits(words[x]);
        if (first < end)
            *bits_at(plan.kept, work.list, m, first + warp % mask_warps * 32 + lane) =
                make_uint4(words[0], words[1], words[2], words[3]);
    }
}

static __global__ void __launch_bounds__(list_threads, 1)
    list_kept_keys(const __grid_constant__ forward_plan plan) {
    __shared__ int32_t warp_sums[list_threads / 32];
    if (head_of_block() >= (int64_t)plan.kept.batches * plan.kept.heads)
        return;
    const kept_work work = work_of(plan, (int32_t)blockIdx.x);
    const int32_t entries = write_list(plan, work, warp_sums);
    if (threadIdx.x == 0)
        plan.kept.count[work.list] = entries;
    __syncthreads();
    for (int m = 0; m < plan.kept.mask_heads; m++)
        write_bits(plan, work, m, entries);
}

template <mask_reading reading, typename element = uint8_t>
static fdma_status find_queries_by(const fdma_problem *problem, const forward_plan *plan,
                                   int64_t sets) {
    const int64_t blocks = divide_up(plan->kv_len, (int64_t)block_keys);
    return launch("forward", find_queries<reading, element>,
                  {grid_of(plan->kept.lists * blocks, sets), dim3(mask_threads)}, problem, *plan,
                  (int32_t)blocks);
}

fdma_status fdma_cuda_list_kept_keys(const fdma_problem *problem, const forward_plan *plan) {
    const pair_view &mask = plan->mask;
    const int64_t sets = (int64_t)plan->kept.batches * plan->kept.heads;
    if (plan->kept.lists == 0 || sets == 0)
        return FDMA_OK;
    if (plan->kv_len > 0) {
        const bool has_numbers = problem->attn_mask.dtype != FDMA_UINT8;
        const int64_t of_vector = has_numbers ? vec_bytes / 2 : vec_bytes;
        const bool is_aligned_to_vectors = (uintptr_t)mask.data % vec_bytes == 0 &&
                                           (mask.batch | mask.head | mask.query) % of_vector == 0;
        const bool is_read_by_vectors = mask.key == 1 && is_aligned_to_vectors;
        if (has_numbers)
            FDMA_TRY(is_read_by_vectors
                         ? (find_queries_by<by_vectors, uint16_t>(problem, plan, sets))
                         : (find_queries_by<by_entries, uint16_t>(problem, plan, sets)));
        else
            FDMA_TRY(is_read_by_vectors ? find_queries_by<by_vectors>(problem, plan, sets)
                     : mask.key == 1    ? find_queries_by<by_words>(problem, plan, sets)
                                        : find_queries_by<by_entries>(problem, plan, sets));
    }
    return launch("forward", list_kept_keys, {grid_of(plan->kept.lists, sets), dim3(list_threads)},
                  problem, *plan);
}
