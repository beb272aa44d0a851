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
#include "cuda/device/ptx.cuh"
#include "cuda/device/softmax.cuh"
#include "cuda/plan/host.cuh"
#include "cuda/plan/roll.cuh"

static constexpr int record_threads = 256;
static constexpr int count_threads = 256;
static constexpr int compact_threads = 1024;
static constexpr int64_t multiprocessor_blocks = 2; // of roll_lists, if there are enough lists

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

/* Writes a key of a global selection to its entry of the list, as ~j if it is absent. */
__device__ static void list_global_key(const selection_view &selection, const head_selection &of,
                                       int32_t *list, int32_t j) {
    const int32_t entry = table_entry(selection, of, j);
    if (entry < selection.slots)
        list[entry] = is_valid(of, j) ? j : ~j;
}

/* Each thread writes the record of one key. If all query blocks share a list, it also writes the
 * key's entry there. Otherwise roll_lists, launched just before, makes the lists while this kernel
 * writes records, and one block waits for it at its end, so a kernel that waits for this one has
 * both. roll_lists has waited for the selection before it let this kernel start. */
static __global__ void __launch_bounds__(record_threads)
    write_records(const forward_plan plan, const selection_view selection) {
    const int64_t head = head_of_block();
    const int64_t j = (int64_t)blockIdx.x * record_threads + threadIdx.x;
    if (plan.list_tile == 0)
        griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (j >= plan.kv_len || head >= plan.batch * plan.kv_heads)
        return;
    const head_selection of = selection_of(plan, selection, head);
    const bool exists = j < of.kv_len;
    const int32_t expiry = record_expiry(plan, of, (int32_t)j);
    const float bias = exists ? record_bias(plan, of, (int32_t)j) : 0;
    // the first position at which a query may keep the key
    const int64_t first = max(j, (int64_t)list_position(plan, of, 0));
    const bool fits = !selection.checks_slots || !exists || of.expiry[j] <= first ||
                      table_entry(selection, of, (int32_t)j) < selection.slots;
    plan.records[(int64_t)head * plan.kv_len + j] =
        fits ? key_record{expiry, bias} : misfit_record(plan, of, (int32_t)j);
    if (plan.list_tile > 0 && blockIdx.x + blockIdx.y + blockIdx.z == 0)
        griddepcontrol_wait();
    if (plan.list == NULL || plan.list_tile > 0 || plan.entries_before != NULL)
        return;
    int32_t *const list = plan.list + head * plan.list_head;
    if (plan.count == NULL)
        list[j] = expiry == INT32_MIN ? ~(int32_t)j : (int32_t)j;
    else if (exists && of.expiry[j] == of.kv_len)
        list_global_key(selection, of, list, (int32_t)j);
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

/* For a global selection of packed sequences, where slots start at 0 in each, a thread block lists
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
    // in backward also with slot_per_key, where there are no lists
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
    if (plan->list_tile > 0)
        FDMA_TRY(launch("forward", roll_lists,
                        {grid_of(divide_up(plan->lists, selection.block_lists), heads),
                         dim3(roll_threads), roll_bytes(*plan, selection), start_early},
                        problem, *plan, selection));
    FDMA_TRY(launch("forward", write_records,
                    {grid_of(divide_up(problem->kv_len, record_threads), heads),
                     dim3(record_threads), 0, start_early},
                    problem, *plan, selection));
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
