/* Builds the lists and records of a plan (plan/plan.cuh) from a selection, on any device from
 * compute capability 8.0.
 *
 * Slots let keys be scattered into a list without conflicts, since every slot in use has one live
 * key at any position. Only lists 0, block_lists, 2 * block_lists, ... are scattered: each key
 * writes itself into those of them at whose first position it is live. A thread block then starts
 * from one of them and rolls it through the lists before the next: at each position at most one key
 * enters, in a free slot or in that of the key that it evicts.
 *
 * Source: docs/algorithm.md, slots. */
#include "cuda/device/ptx.cuh"
#include "cuda/device/softmax.cuh"
#include "cuda/plan/plan.cuh"

static constexpr int record_threads = 256;
static constexpr int roll_threads = 256;
static constexpr int compact_threads = 1024;
static constexpr int64_t least_block_lists = 4; // because scattering costs more than rolling
static constexpr int64_t most_block_lists = 16;
static constexpr int wanted_blocks = 264; // two on each multiprocessor of a large device

/* The selection, and how many lists a thread block builds. */
struct selection_view {
    number_view<const int32_t> expiry, slot; // absent: dense
    number_view<const float> bias;
    const uint8_t *key_valid; // NULL: all
    int64_t valid_batch;
    int32_t slots;       // that the selection may use
    int32_t block_lists; // lists of a thread block, the first of which is scattered
    bool is_global;
};

/* The selection of one (b, g). */
struct head_selection {
    const int32_t *expiry, *slot;
    const uint8_t *key_valid;
    const float *bias;
};

__device__ static head_selection selection_of(const forward_plan &plan,
                                              const selection_view &selection, int head) {
    const int64_t b = head / plan.kv_heads, g = head % plan.kv_heads;
    head_selection of = {};
    if (selection.expiry.data != NULL)
        of.expiry = selection.expiry.at(b, g);
    if (selection.slot.data != NULL)
        of.slot = selection.slot.at(b, g);
    if (selection.key_valid != NULL)
        of.key_valid = selection.key_valid + b * selection.valid_batch;
    if (selection.bias.data != NULL)
        of.bias = selection.bias.at(b, g);
    return of;
}

__device__ static bool is_valid(const head_selection &selection, int32_t j) {
    return selection.key_valid == NULL || selection.key_valid[j] != 0;
}

/* The first position of list t, in a causal plan. */
__device__ static int32_t list_position(const forward_plan &plan, int32_t t) {
    return query_position(plan, t * list_queries);
}

/* The end of key j's sequence. */
__device__ static int32_t sequence_end(const forward_plan &plan, int32_t j) {
    return plan.sequences.ranges == NULL ? plan.kv_len : plan.sequences.ranges[j].y;
}

/* The expiry of a key's record: INT32_MIN if it is never kept, INT32_MAX if it outlives all
 * queries. */
__device__ static int32_t record_expiry(const forward_plan &plan, const head_selection &selection,
                                        int32_t j) {
    const int32_t end = sequence_end(plan, j);
    const int32_t given = selection.expiry == NULL ? end : selection.expiry[j];
    const int32_t expiry = plan.sequences.ranges == NULL ? given : min(given, end);
    const bool kept = expiry > j && (plan.causal || expiry == end);
    if (!kept || !is_valid(selection, j))
        return INT32_MIN;
    return expiry == plan.kv_len ? INT32_MAX : expiry;
}

/* Writes key j into every scattered list at whose first position it is live. A global selection has
 * one list. */
__device__ static void scatter_key(const forward_plan &plan, const selection_view &selection,
                                   const head_selection &of, int32_t *list, int32_t j) {
    const int32_t slot = of.slot[j], expiry = of.expiry[j];
    if ((uint32_t)slot >= (uint32_t)selection.slots)
        return;
    if (selection.is_global) {
        if (expiry == plan.kv_len)
            list[slot] = is_valid(of, j) ? j : ~j;
        return;
    }
    const int32_t step = list_queries * selection.block_lists, origin = plan.kv_len - plan.q_len;
    const int32_t first = j <= origin ? 0 : (j - origin + step - 1) / step;
    for (int32_t n = first; n * selection.block_lists < plan.lists; n++) {
        if (origin + (int64_t)n * step >= expiry)
            break;
        list[n * selection.block_lists * plan.list_tile + slot] = j;
    }
}

/* Each thread writes the record of one key, and its entries in the scattered lists. */
static __global__ void __launch_bounds__(record_threads)
    write_records(const forward_plan plan, const selection_view selection) {
    const int64_t head = head_of_block();
    const int64_t j = (int64_t)blockIdx.x * record_threads + threadIdx.x;
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (j >= plan.kv_len || head >= plan.batch * plan.kv_heads)
        return;
    const head_selection of = selection_of(plan, selection, head);
    const int32_t expiry = record_expiry(plan, of, (int32_t)j);
    const float bias = of.bias == NULL ? 0 : of.bias[j] * log2_e;
    plan.records[(int64_t)head * plan.kv_len + j] = {expiry, bias};
    if (plan.list == NULL || plan.entries_before != NULL)
        return;
    int32_t *const list = plan.list + head * plan.list_head;
    if (plan.count == NULL)
        list[j] = expiry == INT32_MIN ? ~(int32_t)j : (int32_t)j;
    else
        scatter_key(plan, selection, of, list, (int32_t)j);
}

/* How many of the first `count` entries of a global selection's list are keys up to `position`,
 * absent ones included. Entries ascend by key. */
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

/* For a global selection, a thread block counts the kept keys of one (b, g), and then how many of
 * them each query block sees. */
static __global__ void __launch_bounds__(roll_threads)
    count_global(const forward_plan plan, const selection_view selection) {
    const int head = blockIdx.x;
    const head_selection of = selection_of(plan, selection, head);
    const int32_t *const list = plan.list + head * plan.list_head;
    __shared__ int32_t kept;
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (threadIdx.x == 0)
        kept = 0;
    __syncthreads();
    int32_t most = 0; // the slots of kept keys are 0, 1, 2, ...
    for (int32_t j = threadIdx.x; j < plan.kv_len; j += roll_threads)
        if (of.expiry[j] == plan.kv_len && (uint32_t)of.slot[j] < (uint32_t)selection.slots)
            most = max(most, of.slot[j] + 1);
    atomicMax(&kept, most);
    __syncthreads();
    for (int32_t t = threadIdx.x; t < plan.lists; t += roll_threads) {
        const int64_t first = plan.causal ? list_position(plan, t) : INT32_MAX;
        plan.count[(int64_t)head * plan.lists + t] = make_int2(
            count_up_to(list, kept, first), count_up_to(list, kept, first + list_queries - 1));
    }
}

/* For a global selection of packed sequences, whose slots begin anew in each, a thread block lists
 * the kept keys of one (b, g) in ascending order, and counts them up to each position. */
static __global__ void __launch_bounds__(compact_threads) compact_kept(const forward_plan plan) {
    __shared__ int32_t counts[compact_threads / 32];
    const int64_t head = blockIdx.x, positions = (int64_t)plan.kv_len + 1;
    const int warp = threadIdx.x / 32;
    int32_t *const list = plan.list + head * plan.list_head;
    int32_t *const entries_before = plan.entries_before + head * positions;
    int32_t listed = 0;
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    for (int64_t from = 0; from < positions; from += compact_threads) {
        const int64_t j = from + threadIdx.x;
        const bool kept =
            j < plan.kv_len && plan.records[head * plan.kv_len + j].expiry != INT32_MIN;
        const unsigned mask = __ballot_sync(~0u, kept);
        if (threadIdx.x % 32 == 0)
            counts[warp] = __popc(mask);
        __syncthreads();
        int32_t n = listed + __popc(mask & ((1u << threadIdx.x % 32) - 1));
        for (int w = 0; w < compact_threads / 32; w++) {
            n += w < warp ? counts[w] : 0;
            listed += counts[w];
        }
        if (j < positions)
            entries_before[j] = n;
        if (kept)
            list[n] = (int32_t)j;
        __syncthreads(); // every thread has read the counts
    }
}

/* The state of a thread block that rolls through its lists. */
struct roll_memory {
    int32_t *table;                         // [slots]: the live key, or -1; aligned to 16 bytes
    int32_t live;                           // one more than the last slot in use
    int32_t arrivals[2][roll_threads / 32]; // counted by each warp; even and odd lists
    // the slot of each key after the first list's first position; negative: it is not kept
    int32_t arriving[most_block_lists * list_queries];
};

static_assert(sizeof(roll_memory) <= 16 * 1024, "static shared memory; see launch()");

/* Loads a scattered list. Entries that the selection does not confirm are left out, because they
 * may never have been written. */
__device__ static void load_table(const forward_plan &plan, const selection_view &selection,
                                  const head_selection &of, const int32_t *list, int32_t position,
                                  roll_memory *shared) {
    int32_t live = 0;
    for (int32_t s = threadIdx.x; s < selection.slots; s += roll_threads) {
        const int32_t j = list[s];
        const bool lives =
            is_key(j, plan.kv_len) && j <= position && of.slot[j] == s && of.expiry[j] > position;
        shared->table[s] = lives ? j : -1;
        live = lives ? s + 1 : live;
    }
    live = __reduce_max_sync(~0u, live);
    if (threadIdx.x % 32 == 0)
        atomicMax(&shared->live, live);
}

/* Loads the slots of the keys that arrive after `position`, within the query blocks of the `lists`
 * lists that this thread block builds. */
__device__ static void load_arriving(const forward_plan &plan, const selection_view &selection,
                                     const head_selection &of, int32_t position, int32_t lists,
                                     roll_memory *shared) {
    for (int32_t n = threadIdx.x; n < lists * list_queries; n += roll_threads) {
        const int32_t j = position + 1 + n;
        const bool arrives = j < plan.kv_len && of.expiry[j] > j;
        const int32_t slot = arrives ? of.slot[j] : -1;
        shared->arriving[n] = slot < selection.slots ? slot : -1;
    }
}

/* Writes the live keys to a list, absent ones as ~j. */
__device__ static void write_live(const head_selection &of, int32_t *list,
                                  const roll_memory *shared) {
    const int32_t whole = of.key_valid == NULL ? shared->live / 4 * 4 : 0;
    for (int32_t s = threadIdx.x * 4; s < whole; s += roll_threads * 4)
        *(int4 *)&list[s] = *(const int4 *)&shared->table[s];
    for (int32_t s = whole + threadIdx.x; s < shared->live; s += roll_threads) {
        const int32_t j = shared->table[s];
        list[s] = j >= 0 && !is_valid(of, j) ? ~j : j;
    }
}

/* Appends the keys that arrive after the first position of list t, ascending, and writes its
 * counts. `arriving` points to the slot of the first of them. They are fewer than the threads. */
__device__ static void write_arrivals(const forward_plan &plan, const head_selection &of, int32_t t,
                                      const int32_t *arriving, int32_t *list, int2 *count,
                                      roll_memory *shared) {
    const int32_t n = threadIdx.x, warp = n / 32, j = list_position(plan, t) + 1 + n;
    const bool arrives = n < list_queries - 1 && arriving[n] >= 0 && is_valid(of, j);
    const unsigned mask = __ballot_sync(~0u, arrives);
    int32_t *const arrivals = shared->arrivals[t % 2];
    if (n % 32 == 0)
        arrivals[warp] = __popc(mask);
    __syncthreads();
    int32_t before = 0, all = 0;
    for (int32_t w = 0; w < list_queries / 32; w++) {
        before += w < warp ? arrivals[w] : 0;
        all += arrivals[w];
    }
    // in bounds for any selection: at most `slots` are live, and fewer than list_queries arrive
    if (arrives)
        list[shared->live + before + __popc(mask & ((1u << n % 32) - 1))] = j;
    if (n == 0)
        *count = make_int2(shared->live, shared->live + all);
}

/* Moves the table on to the next list's first position: the keys that arrive up to it take over
 * their slots. If two of them take the same slot, the later one has it. */
__device__ static void roll_table(int32_t position, const int32_t *arriving, roll_memory *shared) {
    const int32_t n = threadIdx.x;
    if (n >= list_queries || arriving[n] < 0)
        return;
    atomicMax(&shared->table[arriving[n]], position + 1 + n);
    atomicMax(&shared->live, arriving[n] + 1);
}

/* Removes the keys from the table that are no longer live at a position, those of sequences that
 * have ended: the next sequence may use fewer slots. */
__device__ static void drop_expired(const head_selection &of, int32_t position,
                                    roll_memory *shared) {
    const int32_t slots = shared->live;
    int32_t live = 0;
    __syncthreads();
    if (threadIdx.x == 0)
        shared->live = 0;
    __syncthreads();
    for (int32_t s = threadIdx.x; s < slots; s += roll_threads) {
        const int32_t j = shared->table[s];
        const bool lives = j >= 0 && of.expiry[j] > position;
        shared->table[s] = lives ? j : -1;
        live = lives ? s + 1 : live;
    }
    live = __reduce_max_sync(~0u, live);
    if (threadIdx.x % 32 == 0)
        atomicMax(&shared->live, live);
}

/* Moves the table on from list t to the next one. */
__device__ static void advance_table(const forward_plan &plan, const head_selection &of, int32_t t,
                                     const int32_t *arriving, roll_memory *shared) {
    const int32_t position = list_position(plan, t), next = list_position(plan, t + 1);
    roll_table(position, arriving, shared);
    if (plan.sequences.ranges == NULL || plan.sequences.ranges[next].x <= position)
        return;
    __syncthreads();
    drop_expired(of, next, shared);
}

/* The lists of one thread block. */
static __global__ void __launch_bounds__(roll_threads)
    roll_lists(const forward_plan plan, const selection_view selection) {
    extern __shared__ int4 table[];
    __shared__ roll_memory shared;
    const int64_t head = head_of_block();
    const int32_t first = blockIdx.x * selection.block_lists;
    const int32_t end = min(first + selection.block_lists, plan.lists);
    if (head >= plan.batch * plan.kv_heads)
        return;
    const head_selection of = selection_of(plan, selection, head);
    int32_t *const lists = plan.list + head * plan.list_head;
    if (threadIdx.x == 0) {
        // a list that is not rolled any further is its own table
        shared.table =
            selection.block_lists > 1 ? (int32_t *)table : lists + first * plan.list_tile;
        shared.live = 0;
    }
    __syncthreads();
    const int32_t position = list_position(plan, first);
    load_arriving(plan, selection, of, position, end - first, &shared);
    griddepcontrol_wait(); // for the scattered lists
    griddepcontrol_launch_dependents();
    load_table(plan, selection, of, lists + first * plan.list_tile, position, &shared);
    for (int32_t t = first; t < end; t++) {
        const int32_t *const arriving = shared.arriving + (t - first) * list_queries;
        int32_t *const list = lists + t * plan.list_tile;
        __syncthreads();
        write_live(of, list, &shared);
        write_arrivals(plan, of, t, arriving, list, &plan.count[(int64_t)head * plan.lists + t],
                       &shared);
        __syncthreads();
        if (t + 1 < end)
            advance_table(plan, of, t, arriving, &shared);
    }
}

/* Whether lists leave out keys that are not kept. If not, entry j is key j, or absent. */
static bool is_listed(const fdma_problem *problem) {
    return problem->selected && problem->slots < problem->kv_len;
}

static bool is_global(const fdma_problem *problem) { return problem->scope == FDMA_SCOPE_GLOBAL; }

void fdma_cuda_describe_problem(const fdma_problem *problem, forward_plan *plan) {
    plan->q = view_of(&problem->q);
    plan->k = view_of(&problem->k);
    plan->v = view_of(&problem->v);
    plan->out = view_of(&problem->out);
    plan->lse = numbers_of<float>(&problem->lse);
    plan->batch = (int32_t)problem->batch;
    plan->q_len = (int32_t)problem->q_len;
    plan->kv_len = (int32_t)problem->kv_len;
    plan->q_heads = (int32_t)problem->q_heads;
    plan->kv_heads = (int32_t)problem->kv_heads;
    plan->group = (int32_t)problem->group;
    plan->head_dim = (int32_t)problem->head_dim;
    plan->scale = (float)problem->scale;
    plan->softcap = (float)problem->softcap;
    plan->causal = problem->causal;
    plan->by_position = problem->causal || is_present(&problem->starts);
}

/* Entries of the longest list. */
static int64_t list_size(const fdma_problem *problem) {
    if (!is_listed(problem))
        return problem->kv_len;
    if (is_global(problem))
        return is_present(&problem->starts) ? problem->kv_len : problem->slots;
    const int64_t queries = problem->q_len < list_queries ? problem->q_len : (int64_t)list_queries;
    return problem->slots + queries - 1;
}

/* Each query block has a list with an entry for every slot. No check of one tensor bounds that. */
static bool has_vast_lists(const fdma_problem *problem) {
    const double most_entries = (double)(INT64_C(1) << 46);
    const double lists =
        (double)(problem->batch * problem->kv_heads) * (double)(problem->q_len / list_queries + 1);
    return is_listed(problem) && lists * (double)list_size(problem) > most_entries;
}

const char *fdma_cuda_refuses_plan(const fdma_problem *problem, int64_t most_head_dim) {
    const int64_t most_rows = INT32_MAX - 1024; // positions of rows past the end do not overflow
    if (problem->dtype == FDMA_FLOAT32)
        return "float32 tensors: cast q, k and v to bfloat16 or float16";
    if (problem->dtype != FDMA_FLOAT16 && problem->dtype != FDMA_BFLOAT16)
        return "float64 tensors: cast q, k and v to bfloat16 or float16";
    if (problem->bias.dtype == FDMA_FLOAT64 || problem->lse.dtype == FDMA_FLOAT64)
        return "float64 bias or lse; supported: float32";
    if (problem->q_len > most_rows || problem->kv_len > most_rows ||
        problem->batch * problem->q_heads > most_rows)
        return "more than 2^31 - 1025 queries, keys or heads";
    const int64_t tile_rows = 16;                         // of the smallest tile
    const int64_t rows = problem->q_len * problem->group; // of a kv head
    if (rows > INT32_MAX / 2 ||
        problem->batch * problem->kv_heads > INT32_MAX / (rows / tile_rows + 1))
        return "2^30 or more rows of a kv head, or 2^31 or more tiles of 16 rows";
    if (is_present(&problem->starts) && problem->starts.shape[0] > INT32_MAX)
        return "2^31 or more packed sequences";
    if (is_listed(problem) && !is_present(&problem->slot))
        return "a selection without slots";
    if (has_vast_lists(problem))
        return "more than 2^46 keys in lists";
    return problem->head_dim > most_head_dim ? "a larger head_dim than its own" : NULL;
}

forward_plan fdma_cuda_plan_forward(const fdma_problem *problem, fdma_arena *arena) {
    const int64_t heads = problem->batch * problem->kv_heads;
    const bool plain = !problem->selected && !is_present(&problem->key_valid);
    forward_plan plan = {};
    fdma_cuda_describe_problem(problem, &plan);
    plan.lists = problem->causal ? (int32_t)divide_up(problem->q_len, list_queries) : 1;
    plan.sequences = fdma_cuda_lay_out_sequences(problem, arena, false);
    if (!plain || is_present(&problem->bias) || is_present(&problem->starts))
        plan.records = take<key_record>(arena, heads * problem->kv_len);
    if (plain)
        return plan;
    const bool is_rolling = is_listed(problem) && !is_global(problem);
    const int64_t size = round_up(list_size(problem), 4);
    plan.list_tile = is_rolling ? size : 0;
    plan.list_head = is_rolling ? size * plan.lists : size;
    plan.list = take<int32_t>(arena, heads * plan.list_head);
    if (is_listed(problem) && !is_rolling && is_present(&problem->starts))
        plan.entries_before = take<int32_t>(arena, heads * (problem->kv_len + 1));
    else if (is_listed(problem))
        plan.count = take<int2>(arena, heads * plan.lists);
    return plan;
}

static selection_view describe_selection(const fdma_problem *problem, const forward_plan *plan) {
    selection_view selection = {};
    const int64_t heads = problem->batch * problem->kv_heads;
    const int64_t block_lists = heads * plan->lists / wanted_blocks;
    selection.expiry = numbers_of<const int32_t>(&problem->expiry);
    selection.slot = numbers_of<const int32_t>(&problem->slot);
    selection.bias = numbers_of<const float>(&problem->bias);
    selection.key_valid = (const uint8_t *)problem->key_valid.data;
    selection.valid_batch = problem->key_valid.stride[0];
    selection.slots = (int32_t)problem->slots;
    selection.block_lists = (int32_t)min(max(block_lists, least_block_lists), most_block_lists);
    const int64_t room = fdma_cuda_device(problem->exec.device)->shared_bytes;
    const int64_t table = problem->slots * (int64_t)sizeof(int32_t);
    if (table + (int64_t)sizeof(roll_memory) > room)
        selection.block_lists = 1; // the table does not fit in shared memory
    selection.is_global = is_global(problem);
    return selection;
}

fdma_status fdma_cuda_build_lists(const fdma_problem *problem, const forward_plan *plan) {
    const int64_t heads = problem->batch * problem->kv_heads;
    const selection_view selection = describe_selection(problem, plan);
    const size_t table = selection.block_lists > 1 ? selection.slots * sizeof(int32_t) : 0;
    if (plan->records == NULL || problem->kv_len == 0)
        return FDMA_OK;
    FDMA_TRY(fdma_cuda_find_sequences("forward", problem, plan->sequences));
    FDMA_TRY(launch("forward", write_records,
                    {grid_of(divide_up(problem->kv_len, record_threads), heads),
                     dim3(record_threads), 0, start_early},
                    problem, *plan, selection));
    if (plan->entries_before != NULL)
        return launch("forward", compact_kept,
                      {dim3((unsigned)heads), dim3(compact_threads), 0, start_early}, problem,
                      *plan);
    if (plan->count == NULL)
        return FDMA_OK;
    if (selection.is_global)
        return launch("forward", count_global,
                      {dim3((unsigned)heads), dim3(roll_threads), 0, start_early}, problem, *plan,
                      selection);
    return launch("forward", roll_lists,
                  {grid_of(divide_up(plan->lists, selection.block_lists), heads),
                   dim3(roll_threads), table, start_early},
                  problem, *plan, selection);
}
