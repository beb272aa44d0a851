/* Builds the lists and records of a plan (plan/plan.cuh) from a selection, on any device from
 * compute capability 8.0.
 *
 * Each slot in use has one live key at any position. So a thread block keeps a table of live keys
 * by slot. It fills the table for the first position of its first list, from the expiries of all
 * keys of the packed sequence up to there, and rolls it through the lists that follow: at each
 * position at most one key enters, in a free slot or in the slot of the key that it evicts.
 *
 * A selection may use more slots than it says (window + recent). The host cannot check this, so the
 * rows that would lose a key become NaN: a key whose slot is outside the table gets a bias of NaN.
 * It is in every list in which it is live, and may stay in later lists until its sequence ends. The
 * table has one more entry for such keys, the misfits.
 *
 * Source: docs/algorithm.md, slots. */
#include "cuda/device/grid.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/softmax.cuh"
#include "cuda/plan/host.cuh"
#include "cuda/plan/selection.cuh"

static constexpr int roll_threads = 256, roll_warps = roll_threads / 32;
static constexpr int load_batch = 16; // keys whose loads a thread has in flight together
static constexpr int64_t most_rolled_queries = 16384; // queries whose lists a thread block makes

static constexpr int change_rounds = most_block_queries / roll_threads; // see find_changes()

struct roll_memory {
    int32_t *table;                            // [slots + 1]: live keys, or -1; aligned to 16 bytes
    int32_t live;                              // one more than the last entry in use
    key_changes changes[most_block_queries];   // of the list that is being written
    int32_t evicted_entry[most_block_queries]; // entries of the keys that it begins with
    int32_t evicted_key[most_block_queries];
    key_changes warp_changes[change_rounds * roll_warps]; // by round, then by warp
    // the entry of each key that arrives in the query blocks of the thread block; negative: not
    // kept
    int32_t *arriving;
};

static_assert(sizeof(roll_memory) <= 16 * 1024, "static shared memory; see launch()");

/* Entries of a table in shared memory: one for each slot and one for misfits, in vectors of 4. */
static inline __host__ __device__ int64_t table_entries(const selection_view &selection) {
    return round_up((int64_t)selection.slots + 1, 4);
}

/* A mark in the entry of a key that arrival n of a query block evicts, until the table is rolled. A
 * claim is less than every key and every mark of an absent key. */
__device__ static int32_t claim_of(int32_t n) { return INT32_MIN + n; }

__device__ static bool is_claim(int32_t entry) { return entry < claim_of(most_block_queries); }

/* The expiry of key j; INT32_MIN from key `end` on. */
__device__ static int32_t expiry_before(const head_selection &of, uint32_t j, uint32_t end) {
    return j < end ? of.expiry[j] : INT32_MIN;
}

/* Enters the keys that are live at a position into the table. It reads the expiries of all keys
 * from the beginning of the packed sequence to there. If two keys have the same entry, the later
 * one takes it. */
__device__ static void fill_table(const forward_plan &plan, const selection_view &selection,
                                  const head_selection &of, int32_t position, roll_memory *shared) {
    const uint32_t end = (uint32_t)max(min(position + 1, of.kv_len), 0), step = roll_threads;
    const bool is_packed = plan.sequences.ranges != NULL && end > 0;
    const uint32_t first = is_packed ? (uint32_t)plan.sequences.ranges[end - 1].x : 0;
    int32_t next[load_batch], live = 0;
#pragma unroll
    for (int i = 0; i < load_batch; i++)
        next[i] = expiry_before(of, first + i * step + threadIdx.x, end);
    for (uint32_t base = first; base < end; base += load_batch * step) {
        int32_t entry[load_batch];
#pragma unroll
        for (int i = 0; i < load_batch; i++) {
            const uint32_t j = base + i * step + threadIdx.x;
            entry[i] = next[i] > position ? table_entry(selection, of, (int32_t)j) : -1;
            next[i] = expiry_before(of, j + load_batch * step, end);
        }
#pragma unroll
        for (int i = 0; i < load_batch; i++) {
            if (entry[i] >= 0)
                atomicMax(&shared->table[entry[i]], (int32_t)(base + i * step + threadIdx.x));
            live = max(live, entry[i] + 1);
        }
    }
    live = __reduce_max_sync(~0u, live);
    if (threadIdx.x % 32 == 0)
        atomicMax(&shared->live, live);
}

/* Loads the entries of the keys that arrive after `position`, which may be negative, inside the
 * query blocks of this thread block's `lists` lists. */
__device__ static void load_arriving(const forward_plan &plan, const selection_view &selection,
                                     const head_selection &of, int32_t position, int32_t lists,
                                     roll_memory *shared) {
    for (int32_t n = threadIdx.x; n < lists * plan.block_queries; n += roll_threads) {
        const int32_t j = position + 1 + n;
        const bool arrives = is_key(j, of.kv_len) && of.expiry[j] > j;
        shared->arriving[n] = arrives ? table_entry(selection, of, j) : -1;
    }
}

/* Finds the changes inside a list's query block. Arrival n is the key at `position` + 1 + n; in
 * each round a thread takes one of them. The first arrival that takes an entry evicts the key that
 * is live there at the list's first position, and its claim then stands in the table. The expiry of
 * the evicted key is not read: it is the position of that arrival, or an earlier one where a packed
 * sequence has ended. Evicted keys are looked for only if the list begins with them. Misfits are
 * never evicted, because they stand for other keys. */
__device__ static void find_changes(const forward_plan &plan, const head_selection &of,
                                    int32_t slots, int32_t position, const int32_t *arriving,
                                    bool evicted_first, roll_memory *shared) {
    const uint32_t warp = threadIdx.x / 32, before = (1u << threadIdx.x % 32) - 1;
    const int32_t last = plan.block_queries - 1;
    int32_t entry[change_rounds], key[change_rounds];
    uint32_t evicting[change_rounds], arrivals[change_rounds];
#pragma unroll
    for (int r = 0; r < change_rounds; r++) {
        const int32_t n = r * roll_threads + threadIdx.x;
        entry[r] = n < last ? arriving[n] : -1;
        const bool takes = evicted_first && (uint32_t)entry[r] < (uint32_t)slots;
        key[r] = takes ? shared->table[entry[r]] : -1;
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < change_rounds; r++)
        if (key[r] >= 0)
            atomicMin(&shared->table[entry[r]], claim_of(r * roll_threads + threadIdx.x));
    __syncthreads();
#pragma unroll
    for (int r = 0; r < change_rounds; r++) {
        const int32_t n = r * roll_threads + threadIdx.x;
        const bool evicts = key[r] >= 0 && shared->table[entry[r]] == claim_of(n);
        evicting[r] = __ballot_sync(~0u, evicts);
        arrivals[r] = __ballot_sync(~0u, entry[r] >= 0 && is_valid(of, position + 1 + n));
        if (threadIdx.x % 32 == 0)
            shared->warp_changes[r * roll_warps + warp] = {(uint16_t)__popc(evicting[r]),
                                                           (uint16_t)__popc(arrivals[r])};
    }
    __syncthreads();
    int32_t evicted = 0, arrived = 0; // in earlier rounds
#pragma unroll
    for (int r = 0; r < change_rounds; r++) {
        const int32_t n = r * roll_threads + threadIdx.x;
        int32_t rank = evicted + __popc(evicting[r] & before);
        int32_t order = arrived + __popc(arrivals[r] & before);
#pragma unroll
        for (uint32_t w = 0; w < roll_warps; w++) {
            const key_changes of_warp = shared->warp_changes[r * roll_warps + w];
            rank += w < warp ? of_warp.evicted : 0;
            order += w < warp ? of_warp.arrived : 0;
            evicted += of_warp.evicted;
            arrived += of_warp.arrived;
        }
        shared->changes[n] = {(uint16_t)rank, (uint16_t)order};
        if ((evicting[r] >> threadIdx.x % 32 & 1) != 0) {
            shared->evicted_entry[rank] = entry[r];
            shared->evicted_key[rank] = key[r];
        }
    }
}

__device__ static void write_key(const head_selection &of, int32_t j, int32_t *to) {
    *to = j >= 0 && !is_valid(of, j) ? ~j : j;
}

/* Writes the key of a table entry to a list, unless it is evicted inside the list's query block.
 * The first `evicted` entries of the list belong to the evicted keys. A key whose slot is among
 * them takes the entry that the evicted key of this position has left. If that entry is among the
 * first ones too, the search continues from there. */
__device__ static void write_entry(const head_selection &of, int32_t entry, int32_t evicted,
                                   int32_t *list, const roll_memory *shared) {
    const int32_t j = shared->table[entry];
    if (is_claim(j))
        return;
    while (entry < evicted)
        entry = shared->evicted_entry[entry];
    write_key(of, j, &list[entry]);
}

/* Copies four table entries to a list, except the entries of evicted keys. */
__device__ static void copy_entries(int4 four, int32_t *list) {
    const int32_t keys[4] = {four.x, four.y, four.z, four.w};
    if (!is_claim(min(min(four.x, four.y), min(four.z, four.w)))) {
        *(int4 *)list = four;
        return;
    }
#pragma unroll
    for (int n = 0; n < 4; n++)
        if (!is_claim(keys[n]))
            list[n] = keys[n];
}

/* Writes the live keys to a list, absent ones as ~j: first the keys that are evicted inside its
 * query block, in order, then the others, mostly in the entry of their slot. A misfit takes the
 * entry of the last slot, because backward kernels expect at most `slots` entries. Returns the
 * number of entries. */
__device__ static int32_t write_live(const head_selection &of, int32_t slots, int32_t block_queries,
                                     int32_t *list, const roll_memory *shared) {
    const bool has_misfit = shared->live > slots;
    const int32_t own = has_misfit ? slots - 1 : shared->live;
    const int32_t evicted = shared->changes[block_queries - 1].evicted;
    const int32_t moved = min((evicted + 3) / 4 * 4, own);
    const int32_t whole = of.key_valid == NULL ? max(own / 4 * 4, moved) : moved;
    for (int32_t n = threadIdx.x; n < evicted; n += roll_threads)
        write_key(of, shared->evicted_key[n], &list[n]);
    for (int32_t s = threadIdx.x; s < moved; s += roll_threads)
        write_entry(of, s, evicted, list, shared);
    for (int32_t s = moved + threadIdx.x * 4; s < whole; s += roll_threads * 4)
        copy_entries(*(const int4 *)&shared->table[s], &list[s]);
    for (int32_t s = whole + threadIdx.x; s < own; s += roll_threads)
        write_entry(of, s, evicted, list, shared);
    if (has_misfit && threadIdx.x == 0)
        list[own] = shared->table[slots];
    return has_misfit ? slots : own;
}

/* Appends the keys that arrive after the first position of list t, ascending, after its `live`
 * entries, and writes its counts and changes. */
__device__ static void write_arrivals(const forward_plan &plan, int64_t head, int32_t t,
                                      int32_t position, int32_t live, int32_t *list,
                                      const roll_memory *shared) {
    const int64_t row = head * plan.lists + t;
    const int32_t last = plan.block_queries - 1;
    for (int32_t n = threadIdx.x; n <= last; n += roll_threads) {
        const key_changes own = shared->changes[n];
        if (plan.changes != NULL)
            plan.changes[row * plan.block_queries + n] = own;
        // in bounds for any selection: at most `slots` keys are live, and no more keys arrive than
        // there are positions after the first one
        if (n < last && shared->changes[n + 1].arrived > own.arrived)
            list[live + own.arrived] = position + 1 + n;
        if (n == last)
            plan.count[row] = make_int2(live, live + own.arrived);
    }
}

/* Moves the table to the next list's first position: the keys that arrive up to it take their
 * entries. If two keys take the same entry, the later one has it. */
__device__ static void roll_table(int32_t block_queries, int32_t position, const int32_t *arriving,
                                  roll_memory *shared) {
    for (int32_t n = threadIdx.x; n < block_queries; n += roll_threads) {
        if (arriving[n] < 0)
            continue;
        atomicMax(&shared->table[arriving[n]], position + 1 + n);
        atomicMax(&shared->live, arriving[n] + 1);
    }
}

/* Removes keys that are no longer live at a position, because their sequence has ended. The next
 * sequence may use fewer slots. A misfit stays until its sequence ends, because it stands for
 * others. */
__device__ static void drop_expired(const forward_plan &plan, const head_selection &of,
                                    int32_t slots, int32_t position, roll_memory *shared) {
    const int32_t used = shared->live;
    int32_t live = 0;
    __syncthreads();
    if (threadIdx.x == 0)
        shared->live = 0;
    __syncthreads();
    for (int32_t s = threadIdx.x; s < used; s += roll_threads) {
        const int32_t j = shared->table[s];
        const bool lives =
            j >= 0 && (s < slots ? of.expiry[j] : sequence_end(plan, of, j)) > position;
        shared->table[s] = lives ? j : -1;
        live = lives ? s + 1 : live;
    }
    live = __reduce_max_sync(~0u, live);
    if (threadIdx.x % 32 == 0)
        atomicMax(&shared->live, live);
}

__device__ static void advance_table(const forward_plan &plan, const head_selection &of,
                                     int32_t slots, int32_t t, const int32_t *arriving,
                                     roll_memory *shared) {
    const int32_t position = list_position(plan, of, t), next = list_position(plan, of, t + 1);
    roll_table(plan.block_queries, position, arriving, shared);
    if (plan.sequences.ranges == NULL || plan.sequences.ranges[next].x <= position)
        return;
    __syncthreads();
    drop_expired(plan, of, slots, next, shared);
}

/* Makes the lists of one (b, g) from `first` on, one after the other. */
__device__ static void roll_lists(const forward_plan &plan, const selection_view &selection,
                                  int64_t head, int32_t first) {
    extern __shared__ __align__(16) uint8_t bytes[];
    __shared__ roll_memory shared;
    const int32_t end = min(first + selection.block_lists, plan.lists);
    const head_selection of = selection_of(plan, selection, head);
    const bool evicted_first = plan.changes != NULL && selection.table_fits;
    int32_t *const lists = plan.list + head * plan.list_head;
    int32_t *const words = (int32_t *)bytes;
    // if the table does not fit in shared memory, it is the only list of the block
    int32_t *const table = selection.table_fits ? words : lists + first * plan.list_tile;
    if (threadIdx.x == 0) {
        shared.table = table;
        shared.arriving = words + (selection.table_fits ? table_entries(selection) : 0);
        shared.live = 0;
    }
    for (int32_t s = threadIdx.x; s <= selection.slots; s += roll_threads)
        table[s] = -1;
    __syncthreads();
    const int32_t position = list_position(plan, of, first);
    load_arriving(plan, selection, of, position, end - first, &shared);
    fill_table(plan, selection, of, position, &shared);
    for (int32_t t = first; t < end; t++) {
        const int32_t *const arriving = shared.arriving + (t - first) * plan.block_queries;
        __syncthreads();
        find_changes(plan, of, selection.slots, list_position(plan, of, t), arriving,
                     evicted_first && shared.live <= selection.slots, &shared);
        __syncthreads();
        int32_t *const list = lists + t * plan.list_tile;
        const int32_t live = write_live(of, selection.slots, plan.block_queries, list, &shared);
        write_arrivals(plan, head, t, list_position(plan, of, t), live, list, &shared);
        __syncthreads();
        if (t + 1 < end)
            advance_table(plan, of, selection.slots, t, arriving, &shared);
    }
}

static constexpr int count_threads = 256;
static constexpr int compact_threads = 1024;
static constexpr int64_t multiprocessor_blocks = 2; // of roll_lists(), if there are enough lists

__device__ static float record_bias(const forward_plan &plan, const head_selection &of, int32_t j) {
    if (of.bias == NULL)
        return 0;
    return log2_e * (j < plan.carried_len ? of.bias_carried[j] : of.bias[j - plan.carried_len]);
}

/* The record of a misfit. It makes every row that could keep the misfit NaN. */
__device__ static key_record misfit_record(const forward_plan &plan, const head_selection &of,
                                           int32_t j) {
    const int32_t end = sequence_end(plan, of, j);
    return {end == of.kv_len ? INT32_MAX : end, NAN};
}

__device__ static key_record record_of(const forward_plan &plan, const selection_view &selection,
                                       const head_selection &of, int32_t j) {
    const bool exists = j < of.kv_len;
    const float bias = exists ? record_bias(plan, of, j) : 0;
    // the first position at which a query may keep the key
    const int32_t first = max(j, list_position(plan, of, 0));
    const bool fits = !selection.checks_slots || !exists || of.expiry[j] <= first ||
                      table_entry(selection, of, j) < selection.slots;
    return fits ? key_record{record_expiry(plan, of, j), bias} : misfit_record(plan, of, j);
}

/* Writes a key of a global selection to its entry of the list, as ~j if it is absent. */
__device__ static void list_global_key(const selection_view &selection, const head_selection &of,
                                       int32_t *list, int32_t j) {
    const int32_t entry = table_entry(selection, of, j);
    if (entry < selection.slots)
        list[entry] = is_valid(of, j) ? j : ~j;
}

/* Writes the record of a key and, if all query blocks share a list, its entry there. */
__device__ static void write_record(const forward_plan &plan, const selection_view &selection,
                                    int64_t head, int64_t j) {
    const head_selection of = selection_of(plan, selection, head);
    const bool exists = j < of.kv_len;
    const int32_t expiry = record_expiry(plan, of, (int32_t)j);
    plan.records[(int64_t)head * plan.kv_len + j] = record_of(plan, selection, of, (int32_t)j);
    if (plan.list == NULL || plan.list_tile > 0 || plan.entries_before != NULL)
        return;
    int32_t *const list = plan.list + head * plan.list_head;
    if (plan.count == NULL)
        list[j] = expiry == INT32_MIN ? ~(int32_t)j : (int32_t)j;
    else if (exists && of.expiry[j] == of.kv_len)
        list_global_key(selection, of, list, (int32_t)j);
}

/* First come roll_blocks thread blocks for each (b, g), which make lists and take longest, then
 * record_blocks for each, in which a thread writes the record of a key. */
static __global__ void __launch_bounds__(roll_threads, 2)
    write_lists(const forward_plan plan, const selection_view selection, uint32_t roll_blocks,
                uint32_t record_blocks) {
    const int64_t heads = (int64_t)plan.batch * plan.kv_heads, rolling = heads * roll_blocks;
    griddepcontrol_wait(); // for the selection
    griddepcontrol_launch_dependents();
    if (blockIdx.x < rolling) {
        const uint32_t first = blockIdx.x % roll_blocks * selection.block_lists;
        roll_lists(plan, selection, blockIdx.x / roll_blocks, (int32_t)first);
        return;
    }
    const uint32_t block = blockIdx.x - (uint32_t)rolling;
    const int64_t j = (int64_t)(block % record_blocks) * roll_threads + threadIdx.x;
    if (j < plan.kv_len)
        write_record(plan, selection, block / record_blocks, j);
}

/* The number of keys up to `position`, absent ones included, among the first `count` entries of a
 * global selection's list, which ascend by key. */
__device__ static int32_t count_up_to(const int32_t *list, int32_t count, int64_t position) {
    int32_t low = 0, high = count;
    while (low < high) {
        const int32_t middle = low + (high - low) / 2;
        const int32_t j = list[middle] < 0 ? ~list[middle] : list[middle];
        if (j <= position)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Makes the rows that keep a misfit of a global selection NaN. Its slots ascend, so these are the
 * rows that keep the key of the last slot. If there is no such key, the misfit takes its entry. */
__device__ static void list_misfit(const forward_plan &plan, int head, int32_t misfit,
                                   int32_t *last, bool is_listed) {
    if (is_listed && is_key(*last, plan.kv_len))
        plan.records[(int64_t)head * plan.kv_len + *last].bias = NAN;
    else
        *last = misfit;
}

/* For a global selection a thread block counts the kept keys of one (b, g), and those that each
 * query block sees. */
static __global__ void __launch_bounds__(count_threads)
    count_global(const forward_plan plan, const selection_view selection) {
    const int head = blockIdx.x;
    const head_selection of = selection_of(plan, selection, head);
    int32_t *const list = plan.list + head * plan.list_head;
    __shared__ int32_t kept, misfit;
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (threadIdx.x == 0)
        kept = 0, misfit = INT32_MAX;
    __syncthreads();
    int32_t most = 0; // the slots of kept keys are 0, 1, 2, ...
    for (int32_t j = threadIdx.x; j < of.kv_len; j += count_threads) {
        if (of.expiry[j] != of.kv_len)
            continue;
        const int32_t entry = table_entry(selection, of, j);
        if (entry < selection.slots)
            most = max(most, entry + 1);
        else
            atomicMin(&misfit, j);
    }
    atomicMax(&kept, most);
    __syncthreads();
    if (threadIdx.x == 0 && misfit != INT32_MAX) {
        list_misfit(plan, head, misfit, &list[selection.slots - 1], kept == selection.slots);
        kept = selection.slots;
    }
    __syncthreads();
    for (int32_t t = threadIdx.x; t < plan.lists; t += count_threads) {
        const int64_t first = plan.causal ? list_position(plan, of, t) : INT32_MAX;
        plan.count[(int64_t)head * plan.lists + t] =
            make_int2(count_up_to(list, kept, first),
                      count_up_to(list, kept, first + plan.block_queries - 1));
    }
}

/* The number of keys before a thread's own of those that the threads of a block keep, after
 * `before`; `before` becomes their number. */
__device__ static int32_t count_before(bool kept, int32_t *before) {
    __shared__ int32_t counts[compact_threads / 32];
    const int warp = threadIdx.x / 32;
    const unsigned mask = __ballot_sync(~0u, kept);
    __syncthreads(); // every thread has read the counts of the round before
    if (threadIdx.x % 32 == 0)
        counts[warp] = __popc(mask);
    __syncthreads();
    int32_t n = *before + __popc(mask & ((1u << threadIdx.x % 32) - 1));
    for (int w = 0; w < compact_threads / 32; w++) {
        n += w < warp ? counts[w] : 0;
        *before += counts[w];
    }
    return n;
}

/* For a global selection of packed sequences, where slots start at 0 in each, a thread block lists
 * the kept keys of one (b, g) in ascending order, and counts them up to each position. */
static __global__ void __launch_bounds__(compact_threads) compact_kept(const forward_plan plan) {
    const int64_t head = blockIdx.x, positions = (int64_t)plan.kv_len + 1;
    int32_t *const list = plan.list + head * plan.list_head;
    int32_t *const entries_before = plan.entries_before + head * positions;
    int32_t listed = 0;
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    for (int64_t from = 0; from < positions; from += compact_threads) {
        const int64_t j = from + threadIdx.x;
        const bool kept =
            j < plan.kv_len && plan.records[head * plan.kv_len + j].expiry != INT32_MIN;
        const int32_t n = count_before(kept, &listed);
        if (j < positions)
            entries_before[j] = n;
        if (kept)
            list[n] = (int32_t)j;
    }
}

/* For one list of all keys that some query keeps, ascending, a thread block writes the list of one
 * (b, g), the records of its keys, and the counts of each query block. */
static __global__ void __launch_bounds__(compact_threads)
    list_kept(const forward_plan plan, const selection_view selection) {
    const int64_t head = blockIdx.x;
    const head_selection of = selection_of(plan, selection, (int)head);
    const int32_t first = list_position(plan, of, 0);
    int32_t *const list = plan.list + head * plan.list_head;
    int2 *const count = plan.count + head * plan.lists;
    int32_t listed = 0;
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    for (int32_t t = threadIdx.x; list_position(plan, of, t + 1) <= 0 && t < plan.lists;
         t += compact_threads)
        count[t] = make_int2(0, 0); // its queries stand before all keys
    for (int64_t from = 0; from <= plan.kv_len; from += compact_threads) {
        const int32_t j = (int32_t)from + threadIdx.x;
        key_record record = {INT32_MIN, 0};
        if (j < plan.kv_len) {
            record = record_of(plan, selection, of, j);
            plan.records[head * plan.kv_len + j] = record;
        }
        const bool kept = record.expiry > first;
        const int32_t n = count_before(kept, &listed);
        if (kept)
            list[n] = j;
        if (j > of.kv_len || j <= max(first, 0))
            continue;
        // key j is the first that the queries before it do not see
        if ((j - first) % plan.block_queries == 0 || j == of.kv_len)
            count[(j - first - 1) / plan.block_queries] = make_int2(0, n);
    }
}

static size_t roll_bytes(const forward_plan &plan, const selection_view &selection) {
    const int64_t table = selection.table_fits ? table_entries(selection) : 0;
    const int64_t arriving = (int64_t)selection.block_lists * plan.block_queries;
    return (size_t)(table + arriving) * sizeof(int32_t);
}

selection_view fdma_cuda_describe_selection(const fdma_problem *problem, const forward_plan *plan) {
    selection_view selection = {};
    const int64_t heads = problem->batch * problem->kv_heads;
    selection.expiry = numbers_of<const int32_t>(&problem->expiry);
    selection.slot = numbers_of<const int32_t>(&problem->slot);
    selection.bias = numbers_of<const float>(&problem->bias);
    selection.bias_carried = numbers_of<const float>(&problem->bias_carried);
    selection.key_valid = (const uint8_t *)problem->key_valid.data;
    selection.valid_batch = problem->key_valid.stride[0];
    selection.slots = (int32_t)problem->slots;
    const cuda_device *const device = fdma_cuda_device(problem->exec.device);
    const int64_t wanted =
        divide_up(heads * plan->lists, multiprocessor_blocks * device->multiprocessors);
    const int64_t table = table_entries(selection) * (int64_t)sizeof(int32_t);
    const int64_t room = device->shared_bytes - (int64_t)sizeof(roll_memory) - table;
    const int64_t list_bytes = plan->block_queries * (int64_t)sizeof(int32_t); // of its arrivals
    const int64_t most = min(room / list_bytes, most_rolled_queries / plan->block_queries);
    selection.table_fits = room >= list_bytes;
    selection.block_lists = (int32_t)max(min(wanted, most), (int64_t)1);
    selection.is_global = problem->scope == FDMA_SCOPE_GLOBAL;
    // in backward also for the list of a plan with slot_per_key
    const bool is_backward = problem->operation == operation_backward;
    selection.checks_slots = plan->count != NULL || (is_backward && rolls_lists(problem));
    return selection;
}

static fdma_status build_selection_lists(const fdma_problem *problem, const forward_plan *plan) {
    const int64_t heads = problem->batch * problem->kv_heads;
    const selection_view selection = fdma_cuda_describe_selection(problem, plan);
    if (problem->fused.plan_is_made || plan->records == NULL || problem->kv_len == 0)
        return FDMA_OK;
    FDMA_TRY(fdma_cuda_find_sequences("forward", problem, plan->sequences));
    if (plan->list_tile == 0 && plan->count != NULL && !selection.is_global)
        return launch("forward", list_kept,
                      {dim3((unsigned)heads), dim3(compact_threads), 0, start_early}, problem,
                      *plan, selection);
    const bool rolls = plan->list_tile > 0;
    const int64_t roll_blocks = rolls ? divide_up(plan->lists, selection.block_lists) : 0;
    const int64_t record_blocks = divide_up(problem->kv_len, (int64_t)roll_threads);
    FDMA_TRY(launch("forward", write_lists,
                    {dim3((unsigned)(heads * (roll_blocks + record_blocks))), dim3(roll_threads),
                     rolls ? roll_bytes(*plan, selection) : 0, start_early},
                    problem, *plan, selection, (uint32_t)roll_blocks, (uint32_t)record_blocks));
    if (plan->entries_before != NULL)
        return launch("forward", compact_kept,
                      {dim3((unsigned)heads), dim3(compact_threads), 0, start_early}, problem,
                      *plan);
    if (plan->count == NULL || !selection.is_global)
        return FDMA_OK;
    return launch("forward", count_global,
                  {dim3((unsigned)heads), dim3(count_threads), 0, start_early}, problem, *plan,
                  selection);
}

fdma_status fdma_cuda_build_lists(const fdma_problem *problem, const forward_plan *plan) {
    const bool are_given = is_present(&problem->mask_lists) && !problem->only_mask_lists;
    if (is_present(&problem->fused.last_keys.list)) // the selection has written them
        return FDMA_OK;
    FDMA_TRY(build_selection_lists(problem, plan));
    if (plan->kept.list == NULL || are_given)
        return FDMA_OK;
    return fdma_cuda_list_kept_keys(problem, plan);
}
