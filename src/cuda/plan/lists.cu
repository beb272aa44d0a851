/* The lists and records that forward kernels walk (device/plan.cuh), from a selection.
 *
 * Slots make a list a scatter: at a tile's first position every slot below their number holds one
 * live key. Each key writes itself into the lists of every `stretch`-th tile that it lives through;
 * a block then rolls such a list forward through the tiles in between, one change per position, in
 * shared memory. Source: docs/algorithm.md, slots. */
#include "cuda/device/ptx.cuh"
#include "cuda/device/softmax.cuh"
#include "cuda/plan/plan.cuh"

static constexpr int record_threads = 256;
static constexpr int roll_threads = 256;
static constexpr int least_stretch = 4; // scattering costs more than rolling
static constexpr int most_stretch = 16;
static constexpr int wanted_blocks = 264;    // two for each multiprocessor of a large device
static constexpr int most_table = 48 * 1024; // slots whose table fits shared memory

/* The selection, and how it is cut for scattering. */
struct list_source {
    const int32_t *expiry, *slot; // NULL: dense
    const uint8_t *key_valid;     // NULL: all
    const float *bias;            // NULL: none
    int64_t expiry_batch, expiry_head, slot_batch, slot_head, valid_batch, bias_batch, bias_head;
    int32_t slots;   // that a selection may use
    int32_t stretch; // lists from one scattered list to the next
    bool is_global;
};

/* The part of a source that belongs to one (b, g). */
struct head_source {
    const int32_t *expiry, *slot;
    const uint8_t *key_valid;
    const float *bias;
};

__device__ static head_source source_of(const forward_plan &plan, const list_source &source,
                                        int head) {
    const int64_t b = head / plan.kv_heads, g = head % plan.kv_heads;
    head_source of = {};
    if (source.expiry != NULL)
        of.expiry = source.expiry + b * source.expiry_batch + g * source.expiry_head;
    if (source.slot != NULL)
        of.slot = source.slot + b * source.slot_batch + g * source.slot_head;
    if (source.key_valid != NULL)
        of.key_valid = source.key_valid + b * source.valid_batch;
    if (source.bias != NULL)
        of.bias = source.bias + b * source.bias_batch + g * source.bias_head;
    return of;
}

__device__ static bool is_valid(const head_source &source, int32_t j) {
    return source.key_valid == NULL || source.key_valid[j] != 0;
}

/* The first position of list t; of causal plans. */
__device__ static int32_t first_position(const forward_plan &plan, int32_t t) {
    return t * list_queries + plan.kv_len - plan.q_len;
}

/* The expiry by which rows compare: never kept is INT32_MIN. */
__device__ static int32_t record_expiry(const forward_plan &plan, const head_source &source,
                                        int32_t j) {
    const int32_t expiry = source.expiry == NULL ? plan.kv_len : source.expiry[j];
    const bool kept = plan.causal ? expiry > j : expiry == plan.kv_len;
    if (!kept || !is_valid(source, j))
        return INT32_MIN;
    return expiry == plan.kv_len ? INT32_MAX : expiry;
}

/* Writes key j into every scattered list at whose first position it lives; a global selection has
 * one list. */
__device__ static void scatter_key(const forward_plan &plan, const list_source &source,
                                   const head_source &of, int32_t *list, int32_t j) {
    const int32_t slot = of.slot[j], expiry = of.expiry[j];
    if ((uint32_t)slot >= (uint32_t)source.slots)
        return;
    if (source.is_global) {
        if (expiry == plan.kv_len)
            list[slot] = is_valid(of, j) ? j : ~j;
        return;
    }
    const int32_t step = list_queries * source.stretch, origin = plan.kv_len - plan.q_len;
    const int32_t first = j <= origin ? 0 : (j - origin + step - 1) / step;
    for (int32_t n = first; n * source.stretch < plan.lists; n++) {
        if (origin + (int64_t)n * step >= expiry)
            break;
        list[n * source.stretch * plan.list_tile + slot] = j;
    }
}

/* A thread a key: its record, its entry or entries. */
__global__ void __launch_bounds__(record_threads)
    write_records(const forward_plan plan, const list_source source) {
    const int64_t head = head_of_block();
    const int64_t j = (int64_t)blockIdx.x * record_threads + threadIdx.x;
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (j >= plan.kv_len || head >= plan.batch * plan.kv_heads)
        return;
    const head_source of = source_of(plan, source, head);
    const int32_t expiry = record_expiry(plan, of, (int32_t)j);
    const float bias = of.bias == NULL ? 0 : of.bias[j] * log2_e;
    plan.records[(int64_t)head * plan.kv_len + j] = {expiry, bias};
    if (plan.list == NULL)
        return;
    int32_t *const list = plan.list + head * plan.list_head;
    if (plan.count == NULL)
        list[j] = expiry == INT32_MIN ? ~(int32_t)j : (int32_t)j;
    else
        scatter_key(plan, source, of, list, (int32_t)j);
}

/* Entries of a global selection's list below or at `position`: absent ones keep their place. */
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

/* Global selections: a block counts the kept keys of one (b, g), then the part that each tile
 * sees. */
__global__ void __launch_bounds__(roll_threads)
    count_global(const forward_plan plan, const list_source source) {
    const int head = blockIdx.x;
    const head_source of = source_of(plan, source, head);
    const int32_t *const list = plan.list + head * plan.list_head;
    __shared__ int32_t kept;
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (threadIdx.x == 0)
        kept = 0;
    __syncthreads();
    int32_t most = 0; // slots of kept keys are 0, 1, 2, ...
    for (int32_t j = threadIdx.x; j < plan.kv_len; j += roll_threads)
        if (of.expiry[j] == plan.kv_len && (uint32_t)of.slot[j] < (uint32_t)source.slots)
            most = max(most, of.slot[j] + 1);
    atomicMax(&kept, most);
    __syncthreads();
    for (int32_t t = threadIdx.x; t < plan.lists; t += roll_threads) {
        const int64_t first = plan.causal ? first_position(plan, t) : INT32_MAX;
        plan.count[(int64_t)head * plan.lists + t] = make_int2(
            count_up_to(list, kept, first), count_up_to(list, kept, first + list_queries - 1));
    }
}

/* A stretch of lists of one (b, g), as a block rolls through it. What it needs of the selection is
 * read at its beginning. */
struct roll_state {
    int32_t *table; // [slots]: the key that lives there; 16-byte aligned
    int32_t live;   // slots in use
    // of each warp; of this list and the next
    int32_t arrivals[2][roll_threads / 32];
    // the slot of each key after the first position; negative: it stays out
    int32_t entering[most_stretch * list_queries];
};

/* Takes over a scattered list; whatever no key of this selection wrote there is left out. */
__device__ static void load_table(const forward_plan &plan, const list_source &source,
                                  const head_source &of, const int32_t *list, int32_t position,
                                  roll_state *state) {
    int32_t live = 0;
    for (int32_t s = threadIdx.x; s < source.slots; s += roll_threads) {
        const int32_t j = list[s];
        const bool lives =
            is_key(j, plan.kv_len) && j <= position && of.slot[j] == s && of.expiry[j] > position;
        state->table[s] = lives ? j : -1;
        live = lives ? s + 1 : live;
    }
    live = __reduce_max_sync(~0u, live);
    if (threadIdx.x % 32 == 0)
        atomicMax(&state->live, live);
}

__device__ static void load_entering(const forward_plan &plan, const list_source &source,
                                     const head_source &of, int32_t position, int32_t lists,
                                     roll_state *state) {
    for (int32_t n = threadIdx.x; n < lists * list_queries; n += roll_threads) {
        const int32_t j = position + 1 + n;
        const bool enters = j < plan.kv_len && of.expiry[j] > j;
        const int32_t slot = enters ? of.slot[j] : -1;
        state->entering[n] = slot < source.slots ? slot : -1;
    }
}

/* Copies the table out; absent keys as ~j. */
__device__ static void write_live(const head_source &of, int32_t *list, const roll_state *state) {
    const int32_t whole = of.key_valid == NULL ? state->live / 4 * 4 : 0;
    for (int32_t s = threadIdx.x * 4; s < whole; s += roll_threads * 4)
        *(int4 *)&list[s] = *(const int4 *)&state->table[s];
    for (int32_t s = whole + threadIdx.x; s < state->live; s += roll_threads) {
        const int32_t j = state->table[s];
        list[s] = j >= 0 && !is_valid(of, j) ? ~j : j;
    }
}

/* Appends, ascending, the keys that arrive after list t's first position; they are fewer than the
 * block's threads, and `entering` begins with them. */
__device__ static void write_arrivals(const forward_plan &plan, const head_source &of, int32_t t,
                                      const int32_t *entering, int32_t *list, int2 *count,
                                      roll_state *state) {
    const int32_t n = threadIdx.x, warp = n / 32, j = first_position(plan, t) + 1 + n;
    const bool arrives = n < list_queries - 1 && entering[n] >= 0 && is_valid(of, j);
    const unsigned mask = __ballot_sync(~0u, arrives);
    int32_t *const arrivals = state->arrivals[t % 2];
    if (n % 32 == 0)
        arrivals[warp] = __popc(mask);
    __syncthreads();
    int32_t before = 0, all = 0;
    for (int32_t w = 0; w < list_queries / 32; w++) {
        before += w < warp ? arrivals[w] : 0;
        all += arrivals[w];
    }
    // whatever a selection says: at most its slots live, and fewer than list_queries keys arrive
    if (arrives)
        list[state->live + before + __popc(mask & ((1u << n % 32) - 1))] = j;
    if (n == 0)
        *count = make_int2(state->live, state->live + all);
}

/* Lets the keys that enter up to the next list's first position take over their slots; of two that
 * held one slot the later one holds it now. */
__device__ static void roll_table(int32_t position, const int32_t *entering, roll_state *state) {
    const int32_t n = threadIdx.x;
    if (n >= list_queries || entering[n] < 0)
        return;
    atomicMax(&state->table[entering[n]], position + 1 + n);
    atomicMax(&state->live, entering[n] + 1);
}

__global__ void __launch_bounds__(roll_threads)
    roll_lists(const forward_plan plan, const list_source source) {
    extern __shared__ int4 table[];
    __shared__ roll_state state;
    const int64_t head = head_of_block();
    const int32_t first = blockIdx.x * source.stretch;
    const int32_t end = min(first + source.stretch, plan.lists);
    if (head >= plan.batch * plan.kv_heads)
        return;
    const head_source of = source_of(plan, source, head);
    int32_t *const lists = plan.list + head * plan.list_head;
    if (threadIdx.x == 0) {
        state.table = source.stretch > 1 ? (int32_t *)table : lists + first * plan.list_tile;
        state.live = 0;
    }
    __syncthreads();
    const int32_t position = first_position(plan, first);
    load_entering(plan, source, of, position, end - first, &state);
    griddepcontrol_wait(); // for the scattered lists
    griddepcontrol_launch_dependents();
    load_table(plan, source, of, lists + first * plan.list_tile, position, &state);
    for (int32_t t = first; t < end; t++) {
        const int32_t *const entering = state.entering + (t - first) * list_queries;
        int32_t *const list = lists + t * plan.list_tile;
        __syncthreads();
        write_live(of, list, &state);
        write_arrivals(plan, of, t, entering, list, &plan.count[(int64_t)head * plan.lists + t],
                       &state);
        __syncthreads();
        if (t + 1 < end)
            roll_table(first_position(plan, t), entering, &state);
    }
}

/* Whether lists leave keys out: otherwise entry j is key j, or absent. */
static bool is_listed(const fdma_problem *problem) {
    return problem->selected && problem->window < problem->kv_len;
}

static bool is_global(const fdma_problem *problem) { return problem->scope == FDMA_SCOPE_GLOBAL; }

static void describe_problem(const fdma_problem *problem, forward_plan *plan) {
    plan->q = view_of(&problem->q);
    plan->k = view_of(&problem->k);
    plan->v = view_of(&problem->v);
    plan->out = view_of(&problem->out);
    plan->lse = (float *)problem->lse.data;
    plan->lse_batch = problem->lse.stride[0];
    plan->lse_head = problem->lse.stride[1];
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
}

static int64_t round_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

/* Entries of the longest list. */
static int64_t list_size(const fdma_problem *problem) {
    if (!is_listed(problem))
        return problem->kv_len;
    if (is_global(problem))
        return problem->window;
    const int64_t inside = problem->q_len < list_queries ? problem->q_len : (int64_t)list_queries;
    return problem->window + inside - 1;
}

/* Lists have a window's keys for every epoch of queries: no check of one tensor bounds that. */
static bool has_vast_lists(const fdma_problem *problem) {
    const double most_entries = (double)(INT64_C(1) << 46);
    const double lists =
        (double)(problem->batch * problem->kv_heads) * (double)(problem->q_len / list_queries + 1);
    return is_listed(problem) && lists * (double)list_size(problem) > most_entries;
}

const char *fdma_cuda_refuses_plan(const fdma_problem *problem) {
    enum { most_rows = INT32_MAX - 1024 }; // so that a tile past the end has positions
    if (problem->dtype == FDMA_FLOAT32)
        return "float32 tensors: cast q, k and v to bfloat16 or float16";
    if (problem->dtype != FDMA_FLOAT16 && problem->dtype != FDMA_BFLOAT16)
        return "float64 tensors, supported: float16, bfloat16";
    if (problem->bias.dtype == FDMA_FLOAT64 || problem->lse.dtype == FDMA_FLOAT64)
        return "float64 bias or lse, supported: float32";
    if (problem->q_len > most_rows || problem->kv_len > most_rows ||
        problem->batch * problem->q_heads > most_rows)
        return "more than 2^31 queries, keys or heads";
    if (is_listed(problem) && !is_present(&problem->slot))
        return "a selection without slots";
    if (has_vast_lists(problem))
        return "more than 2^46 keys in lists";
    return NULL;
}

forward_plan fdma_cuda_plan_forward(const fdma_problem *problem, fdma_arena *arena) {
    const int64_t heads = problem->batch * problem->kv_heads;
    const bool plain = !problem->selected && !is_present(&problem->key_valid);
    forward_plan plan = {};
    describe_problem(problem, &plan);
    plan.lists =
        problem->causal ? (int32_t)(round_up(problem->q_len, list_queries) / list_queries) : 1;
    if (!plain || is_present(&problem->bias))
        plan.records = (key_record *)fdma_arena_take(arena, (size_t)(heads * problem->kv_len) *
                                                                sizeof *plan.records);
    if (plain)
        return plan;
    const bool is_own = is_listed(problem) && !is_global(problem);
    const int64_t size = round_up(list_size(problem), 4);
    plan.list_tile = is_own ? size : 0;
    plan.list_head = is_own ? size * plan.lists : size;
    plan.list =
        (int32_t *)fdma_arena_take(arena, (size_t)(heads * plan.list_head) * sizeof *plan.list);
    if (is_listed(problem))
        plan.count = (int2 *)fdma_arena_take(arena, (size_t)(heads * plan.lists) * sizeof(int2));
    return plan;
}

static list_source describe_source(const fdma_problem *problem, const forward_plan *plan) {
    list_source source = {};
    const int64_t heads = problem->batch * problem->kv_heads;
    const int64_t stretch = heads * plan->lists / wanted_blocks;
    source.expiry = (const int32_t *)problem->expiry.data;
    source.slot = (const int32_t *)problem->slot.data;
    source.key_valid = (const uint8_t *)problem->key_valid.data;
    source.bias = (const float *)problem->bias.data;
    source.expiry_batch = problem->expiry.stride[0];
    source.expiry_head = problem->expiry.stride[1];
    source.slot_batch = problem->slot.stride[0];
    source.slot_head = problem->slot.stride[1];
    source.valid_batch = problem->key_valid.stride[0];
    source.bias_batch = problem->bias.stride[0];
    source.bias_head = problem->bias.stride[1];
    source.slots = (int32_t)problem->window;
    source.stretch = (int32_t)(stretch < least_stretch  ? least_stretch
                               : stretch > most_stretch ? most_stretch
                                                        : stretch);
    if (problem->window > most_table)
        source.stretch = 1;
    source.is_global = is_global(problem);
    return source;
}

fdma_status fdma_cuda_build_lists(const fdma_problem *problem, const forward_plan *plan) {
    const int64_t heads = problem->batch * problem->kv_heads;
    const list_source source = describe_source(problem, plan);
    launch_shape records, lists;
    if (plan->records == NULL || problem->kv_len == 0)
        return FDMA_OK;
    records.grid = grid_of((problem->kv_len + record_threads - 1) / record_threads, heads);
    records.block = dim3(record_threads);
    records.after_dependency = true;
    lists.after_dependency = true;
    FDMA_TRY(launch("forward", write_records, records, problem, *plan, source));
    if (plan->count == NULL)
        return FDMA_OK;
    lists.block = dim3(roll_threads);
    if (source.is_global) {
        lists.grid = dim3((unsigned)heads);
        return launch("forward", count_global, lists, problem, *plan, source);
    }
    lists.grid = grid_of((plan->lists + source.stretch - 1) / source.stretch, heads);
    lists.shared_bytes = source.stretch > 1 ? (size_t)source.slots * sizeof(int32_t) : 0;
    return launch("forward", roll_lists, lists, problem, *plan, source);
}
