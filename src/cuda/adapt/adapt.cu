/* Select with a table (fdma.h, "Streams"), by kernels that do not support tables. Each (b, g)
 * becomes a sequence of its own: first its carried keys, sorted by position, with empty rows at
 * the front as keys that are not valid, and then the keys of the call. core/adapter.c gives the
 * reason. */
extern "C" {
#include "core/adapter.h"
#include "core/operations.h"
}

#include "core/integers.h"
#include "cuda/device/host.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/view.cuh"

static constexpr int stream_threads = 256;
static constexpr int order_warps = stream_threads / 32;
static constexpr int lane_rows = 2;                    // rows whose rank a lane finds
static constexpr int ordered_rows = 32 * lane_rows;    // of a thread block
static constexpr int counted_rows = 2048;              // rows of a summary
static constexpr int copied_keys = 4 * stream_threads; // of a thread block
static_assert(counted_rows % ordered_rows == 0, "a thread block orders rows of one summary");
static_assert(counted_rows % stream_threads == 0, "all threads summarize equally many rows");

/* Summary of counted_rows successive rows of a head, fewer at its end. */
struct alignas(16) row_summary {
    int32_t lowest, highest; // of the positions; INT32_MAX and -1 if all rows are empty
    int32_t empty;           // empty rows
    int32_t is_ordered;      // 1: positions strictly ascend, and all empty rows come last;
                             // otherwise 0
};

/* The plan of the kernels of a select. A head is a (b, g). */
struct stream_plan {
    number_view<float> score, in_score, out_score;
    number_view<int32_t> in_position, out_position, expiry, slot;
    const int32_t *in_seen; // NULL: there is no table_in
    int32_t *out_seen;
    const uint8_t *key_valid; // NULL: all keys of the call are valid
    int64_t valid_batch;
    int32_t kv_heads, rows, new_len, kv_len;
    int32_t summaries; // of a head
    int64_t slots;     // also the rows of table_out
    // in the workspace, for each head in the order of rows
    row_summary *summary; // [heads][summaries]
    // in the workspace, for each head in the order of positions
    float *sequence_score;    // [heads][kv_len]
    uint8_t *sequence_valid;  // [heads][kv_len]
    int32_t *sequence_expiry; // [heads][kv_len]
    int32_t *sequence_slot;   // [heads][kv_len]
    int32_t *row;             // [heads][rows]: the row of each carried key
    int32_t *empty;           // [heads]: empty rows, which come first
};

struct stream_element {
    int64_t head;
    int32_t b, g, n;
};

/* The element of this thread; its n may be past the end. */
__device__ static stream_element element_of(const stream_plan &plan) {
    const int64_t head = head_of_block();
    return {head, (int32_t)(head / plan.kv_heads), (int32_t)(head % plan.kv_heads),
            (int32_t)(blockIdx.x * stream_threads + threadIdx.x)};
}

__device__ static void summarize_rows(const stream_plan &plan, const stream_element &at,
                                      int32_t first, row_summary *summary) {
    __shared__ row_summary shared;
    const int32_t *const position = plan.in_position.at(at.b, at.g);
    row_summary own = {INT32_MAX, -1, 0, 1};
#pragma unroll
    for (int i = 0; i < counted_rows / stream_threads; i++) {
        const int32_t row = first + i * stream_threads + (int32_t)threadIdx.x;
        const bool is_row = row < plan.rows;
        const int32_t p = is_row ? max(position[row], -1) : -1;
        const int32_t before = is_row && row > first ? position[row - 1] : 0;
        own.lowest = p >= 0 ? min(own.lowest, p) : own.lowest;
        own.highest = max(own.highest, p);
        own.empty += is_row && p < 0;
        own.is_ordered &= p < 0 || row == first || (before >= 0 && before < p);
    }
    if (threadIdx.x == 0)
        shared = {INT32_MAX, -1, 0, 1};
    own.lowest = __reduce_min_sync(~0u, own.lowest);
    own.highest = __reduce_max_sync(~0u, own.highest);
    own.empty = __reduce_add_sync(~0u, own.empty);
    own.is_ordered = __reduce_min_sync(~0u, own.is_ordered);
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        atomicMin(&shared.lowest, own.lowest);
        atomicMax(&shared.highest, own.highest);
        atomicAdd(&shared.empty, own.empty);
        atomicMin(&shared.is_ordered, own.is_ordered);
    }
    __syncthreads();
    if (threadIdx.x == 0)
        *summary = shared;
}

/* Copies some keys of the call to the positions after the carried ones. */
__device__ static void copy_keys(const stream_plan &plan, const stream_element &at, int32_t first) {
    const int32_t end = min(plan.new_len, first + copied_keys);
    const float *const score = plan.score.at(at.b, at.g);
    const int64_t to = at.head * plan.kv_len + plan.rows;
#pragma unroll 4
    for (int32_t n = first + (int32_t)threadIdx.x; n < end; n += stream_threads) {
        plan.sequence_score[to + n] = score[n];
        plan.sequence_valid[to + n] =
            plan.key_valid == NULL || plan.key_valid[at.b * plan.valid_batch + n] != 0;
    }
}

/* The first `summaries` thread blocks of a head summarize its rows, the others copy its keys of the
 * call. */
static __global__ void __launch_bounds__(stream_threads)
    begin_sequences(const __grid_constant__ stream_plan plan, const int64_t heads) {
    const stream_element at = element_of(plan);
    const int32_t block = blockIdx.x;
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (at.head >= heads)
        return;
    if (block < plan.summaries)
        summarize_rows(plan, at, block * counted_rows,
                       &plan.summary[at.head * plan.summaries + block]);
    else
        copy_keys(plan, at, (block - plan.summaries) * copied_keys);
}

/* The shared memory of a thread block that orders rows: some of the positions, and the counts of
 * each warp. */
struct order_memory {
    alignas(16) int32_t positions[counted_rows];
    int32_t before[order_warps][ordered_rows];
};

/* Loads the positions of rows `first` to `first + count` - 1, with -1 for empty ones, and after
 * them up to three that precede no row. */
__device__ static void load_positions(order_memory *shared, const int32_t *position, int32_t first,
                                      int32_t count) {
    __syncthreads(); // all warps have read the positions loaded before
#pragma unroll 8
    for (int32_t n = threadIdx.x; n < (count + 3) / 4 * 4; n += stream_threads)
        shared->positions[n] = n < count ? max(position[first + n], -1) : INT32_MAX;
    __syncthreads();
}

/* Counts how many of the positions `from` to `end` - 1 precede each of this lane's rows. Both are
 * multiples of 4. is_earlier: the positions belong to lower rows, which decides ties. */
template <bool is_earlier>
__device__ static void count_positions(const order_memory *shared, int32_t from, int32_t end,
                                       const int32_t (&own)[lane_rows],
                                       int32_t (&before)[lane_rows]) {
#pragma unroll 4
    for (int32_t n = from + (int32_t)threadIdx.x / 32 * 4; n < end; n += order_warps * 4) {
        const int4 four = *(const int4 *)&shared->positions[n];
        const int32_t positions[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int i = 0; i < lane_rows * 4; i++)
            before[i / 4] +=
                is_earlier ? positions[i % 4] <= own[i / 4] : positions[i % 4] < own[i / 4];
    }
}

/* count_positions() for the positions of the thread block's own rows. The first is at `from`. */
__device__ static void count_neighbours(const order_memory *shared, int32_t from, int32_t end,
                                        const int32_t (&own)[lane_rows],
                                        int32_t (&before)[lane_rows]) {
    const int32_t lane = threadIdx.x % 32;
    for (int32_t n = from + (int32_t)threadIdx.x / 32; n < end; n += order_warps)
#pragma unroll
        for (int i = 0; i < lane_rows; i++) {
            const int32_t other = shared->positions[n];
            before[i] += other < own[i] || (other == own[i] && n - from < lane + 32 * i);
        }
}

/* The lowest and the highest position of a thread block's own rows that are not empty. */
struct position_range {
    int32_t lowest, highest;
};

__device__ static position_range range_of(const int32_t (&own)[lane_rows]) {
    position_range range = {INT32_MAX, -1};
#pragma unroll
    for (int i = 0; i < lane_rows; i++) {
        range.lowest = own[i] >= 0 ? min(range.lowest, own[i]) : range.lowest;
        range.highest = max(range.highest, own[i]);
    }
    return {__reduce_min_sync(~0u, range.lowest), __reduce_max_sync(~0u, range.highest)};
}

/* Adds the rows of another summary that precede each of this lane's rows. There are `count`, and
 * their positions are all below those of the thread block's own rows (are_below), or all above.
 * is_earlier: their numbers are lower, which decides the order of empty rows. */
__device__ static void count_all(const row_summary &summary, int32_t count, bool are_below,
                                 bool is_earlier, const int32_t (&own)[lane_rows],
                                 int32_t (&before)[lane_rows]) {
#pragma unroll
    for (int i = 0; i < lane_rows; i++)
        before[i] +=
            own[i] >= 0 ? (are_below ? count : summary.empty) : (is_earlier ? summary.empty : 0);
}

/* Adds the rows of the own summary that precede each of this lane's rows. There are `count` in
 * order, and row `from` of them is the thread block's first one. */
__device__ static void count_in_order(const row_summary &summary, int32_t count, int32_t from,
                                      const int32_t (&own)[lane_rows],
                                      int32_t (&before)[lane_rows]) {
    const int32_t filled = count - summary.empty;
#pragma unroll
    for (int i = 0; i < lane_rows; i++) {
        const int32_t n = from + 32 * i + (int32_t)threadIdx.x % 32;
        before[i] += own[i] >= 0 ? summary.empty + n : n - filled;
    }
}

/* Counts how many of this warp's share of the rows precede each of this lane's rows. Returns the
 * number of empty rows of the head. The rows of a summary are not compared one by one if their
 * positions are all below or all above those of the thread block's own rows, nor are the rows of
 * the own summary if they are in order. Tables that follow one another in the order of positions,
 * and that are each in this order, need no comparison at all. */
__device__ static int32_t count_before(order_memory *shared, const row_summary *summaries,
                                       const int32_t *position, int32_t rows, int32_t first_row,
                                       const int32_t (&own)[lane_rows],
                                       int32_t (&before)[lane_rows]) {
    const position_range range = range_of(own);
    const bool is_first_warp = threadIdx.x / 32 == 0;
    int32_t empty = 0;
    for (int32_t first = 0; first < rows; first += counted_rows) {
        const row_summary summary = *summaries++;
        const int32_t count = min(counted_rows, rows - first), end = (count + 3) / 4 * 4;
        const int32_t from = min(max(first_row - first, 0), end);
        const int32_t behind = min(max(first_row + ordered_rows - first, 0), end);
        const bool are_below = summary.highest < range.lowest, is_own = from < behind;
        empty += summary.empty;
        if (!is_own && (are_below || summary.lowest > range.highest)) {
            if (is_first_warp)
                count_all(summary, count, are_below, behind == end, own, before);
        } else if (is_own && summary.is_ordered) {
            if (is_first_warp)
                count_in_order(summary, count, from, own, before);
        } else {
            load_positions(shared, position, first, count);
            count_positions<true>(shared, 0, from, own, before);
            count_neighbours(shared, from, behind, own, before);
            count_positions<false>(shared, behind, end, own, before);
        }
    }
    return empty;
}

/* Copies the carried keys in order of position: the number of rows that precede a key is its new
 * index. Each warp compares some of the rows with all rows of the thread block. */
static __global__ void __launch_bounds__(stream_threads)
    order_rows(const __grid_constant__ stream_plan plan, const int64_t heads) {
    __shared__ order_memory shared;
    const stream_element at = element_of(plan);
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (at.head >= heads)
        return;
    const int32_t first_row = blockIdx.x * ordered_rows, warp = threadIdx.x / 32;
    const int32_t *const position = plan.in_position.at(at.b, at.g);
    int32_t own[lane_rows], before[lane_rows] = {};
#pragma unroll
    for (int i = 0; i < lane_rows; i++) {
        const int32_t row = first_row + 32 * i + threadIdx.x % 32;
        own[i] = row < plan.rows ? max(position[row], -1) : -1;
    }
    const row_summary *const summaries = plan.summary + at.head * plan.summaries;
    const int32_t empty =
        count_before(&shared, summaries, position, plan.rows, first_row, own, before);
#pragma unroll
    for (int i = 0; i < lane_rows; i++)
        shared.before[warp][32 * i + threadIdx.x % 32] = before[i];
    __syncthreads();
    if (first_row == 0 && threadIdx.x == 0)
        plan.empty[at.head] = empty;
    const int32_t row = first_row + (int32_t)threadIdx.x;
    if (threadIdx.x >= ordered_rows || row >= plan.rows)
        return;
    int32_t to = 0;
    for (int w = 0; w < order_warps; w++)
        to += shared.before[w][threadIdx.x];
    plan.row[at.head * plan.rows + to] = row;
    plan.sequence_score[at.head * plan.kv_len + to] = plan.in_score.at(at.b, at.g)[row];
    plan.sequence_valid[at.head * plan.kv_len + to] = position[row] >= 0;
}

/* Writes the selection from the selections of the sequences. Slots of a sequence count its valid
 * keys. With n carried keys, slot s < n is the row of carried key s, and slot n + e is empty row e.
 * If slots are not rows they stay, and some of the carried keys may have been evicted by others. */
static __global__ void __launch_bounds__(stream_threads)
    write_selection(const __grid_constant__ stream_plan plan, const int64_t heads) {
    const stream_element at = element_of(plan);
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (at.head >= heads || at.n >= plan.kv_len)
        return;
    const int64_t first = at.head * plan.kv_len;
    const int32_t empty = plan.empty[at.head];
    const int32_t *const row = plan.row + at.head * plan.rows;
    const int32_t ends = plan.sequence_expiry[first + at.n];
    int32_t *const expiry = plan.expiry.at(at.b, at.g), *const slot = plan.slot.at(at.b, at.g);
    const int32_t s = plan.sequence_slot[first + at.n], filled = plan.rows - empty;
    const bool slots_are_rows = plan.rows == plan.slots;
    if (at.n < plan.rows) {
        const int32_t own = row[at.n];
        const bool is_kept = at.n >= empty && ends >= plan.rows;
        expiry[own] = is_kept ? ends : own;
        slot[own] = !is_kept ? -1 : slots_are_rows ? own : s;
        return;
    }
    expiry[at.n] = ends;
    if (!slots_are_rows)
        slot[at.n] = s;
    else
        slot[at.n] = s < 0 || s >= plan.rows ? -1 : s < filled ? row[empty + s] : row[s - filled];
}

/* Writes the rows of table_out that no key of the call takes: carried keys that are kept to the
 * end, and empty rows. */
static __global__ void __launch_bounds__(stream_threads)
    write_carried_rows(const __grid_constant__ stream_plan plan, const int64_t heads) {
    const stream_element at = element_of(plan);
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (at.head >= heads || at.n >= plan.slots)
        return;
    const bool is_kept = at.n < plan.rows && plan.expiry.at(at.b, at.g)[at.n] >= plan.kv_len;
    plan.out_score.at(at.b, at.g)[at.n] = is_kept ? plan.in_score.at(at.b, at.g)[at.n] : -INFINITY;
    plan.out_position.at(at.b, at.g)[at.n] = is_kept ? plan.in_position.at(at.b, at.g)[at.n] : -1;
}

/* Writes the keys of the call that are kept to the end, and the count of tokens seen. */
static __global__ void __launch_bounds__(stream_threads)
    write_new_rows(const __grid_constant__ stream_plan plan, const int64_t heads) {
    const stream_element at = element_of(plan);
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (at.head >= heads || at.n >= max(plan.new_len, 1))
        return;
    const int32_t most = INT32_MAX - plan.new_len;
    const int32_t seen = plan.in_seen != NULL ? min(max(plan.in_seen[at.b], 0), most) : 0;
    if (at.g == 0 && at.n == 0)
        plan.out_seen[at.b] = seen + plan.new_len;
    if (at.n >= plan.new_len || plan.expiry.at(at.b, at.g)[plan.rows + at.n] < plan.kv_len)
        return;
    const int32_t row = plan.slot.at(at.b, at.g)[plan.rows + at.n];
    if (row < 0 || row >= plan.slots)
        return;
    plan.out_score.at(at.b, at.g)[row] = plan.score.at(at.b, at.g)[at.n];
    plan.out_position.at(at.b, at.g)[row] = seen + at.n;
}

static stream_plan plan_select(const fdma_problem *problem, fdma_arena *arena) {
    const int64_t keys = problem->batch * problem->kv_heads * problem->kv_len;
    stream_plan plan = {};
    plan.score = numbers_of<float>(&problem->score);
    plan.in_score = numbers_of<float>(&problem->table_in.score);
    plan.in_position = numbers_of<int32_t>(&problem->table_in.position);
    plan.in_seen = (const int32_t *)problem->table_in.seen.data;
    plan.out_score = numbers_of<float>(&problem->table_out.score);
    plan.out_position = numbers_of<int32_t>(&problem->table_out.position);
    plan.out_seen = (int32_t *)problem->table_out.seen.data;
    plan.expiry = numbers_of<int32_t>(&problem->expiry);
    plan.slot = numbers_of<int32_t>(&problem->slot);
    plan.key_valid = (const uint8_t *)problem->key_valid.data;
    plan.valid_batch = problem->key_valid.stride[0];
    plan.kv_heads = (int32_t)problem->kv_heads;
    plan.rows = (int32_t)problem->carried_len;
    plan.new_len = (int32_t)problem->new_len;
    plan.kv_len = (int32_t)problem->kv_len;
    plan.slots = problem->slots;
    if (!is_present(&problem->table_in.score))
        return plan;
    plan.sequence_score = take<float>(arena, keys);
    plan.sequence_valid = take<uint8_t>(arena, keys);
    plan.sequence_expiry = take<int32_t>(arena, keys);
    plan.sequence_slot = take<int32_t>(arena, keys);
    plan.summaries = (int32_t)divide_up(plan.rows, counted_rows);
    plan.summary = take<row_summary>(arena, problem->batch * problem->kv_heads * plan.summaries);
    plan.row = take<int32_t>(arena, problem->batch * problem->kv_heads * problem->carried_len);
    plan.empty = take<int32_t>(arena, problem->batch * problem->kv_heads);
    return plan;
}

static fdma_problem sequences_of(const fdma_problem *problem, const stream_plan &plan) {
    const stream_tensors tensors = {plan.sequence_score, plan.sequence_valid, plan.sequence_expiry,
                                    plan.sequence_slot};
    return fdma_stream_sequences(problem, &tensors);
}

static bool table_applies(const fdma_kernel *, const fdma_problem *problem) {
    return has_table(problem);
}

static size_t table_workspace(const adapted_kernel *inner, const fdma_problem *problem,
                              check_depth depth) {
    fdma_arena arena = {};
    const stream_plan plan = plan_select(problem, &arena);
    const bool is_carried = is_present(&problem->table_in.score);
    const fdma_problem one = is_carried ? sequences_of(problem, plan) : *problem;
    return fdma_arena_size(&arena) + fdma_adapted_workspace(inner, &one, depth);
}

static fdma_status table_run(const adapted_kernel *inner, const fdma_problem *problem) {
    fdma_arena arena = fdma_arena_of(problem);
    const stream_plan plan = plan_select(problem, &arena);
    const int64_t heads = problem->batch * problem->kv_heads;
    const auto blocks = [&](int64_t of_head) {
        return launch_shape{grid_of(of_head, heads), dim3(stream_threads), 0, start_early};
    };
    const auto over = [&](int64_t elements) { return blocks(divide_up(elements, stream_threads)); };
    if (plan.sequence_score == NULL) {
        FDMA_TRY(fdma_run_adapted(inner, problem));
    } else {
        fdma_problem one = sequences_of(problem, plan);
        fdma_set_aside(&one.exec, &arena);
        const int64_t copy_blocks = divide_up(plan.new_len, copied_keys);
        FDMA_TRY(launch("select", begin_sequences, blocks(plan.summaries + copy_blocks), problem,
                        plan, heads));
        if (plan.rows > 0)
            FDMA_TRY(launch("select", order_rows, blocks(divide_up(plan.rows, ordered_rows)),
                            problem, plan, heads));
        FDMA_TRY(fdma_run_adapted(inner, &one));
        FDMA_TRY(launch("select", write_selection, over(plan.kv_len), problem, plan, heads));
    }
    if (!is_present(&problem->table_out.score))
        return FDMA_OK;
    FDMA_TRY(launch("select", write_carried_rows, over(plan.slots), problem, plan, heads));
    return launch("select", write_new_rows, over(max(plan.new_len, 1)), problem, plan, heads);
}

const kernel_adapter fdma_cuda_stream_adapter = {table_applies, table_workspace, table_run};

/* Scores, selections and gradients of scores if only the first kv_used keys of each sequence exist,
 * by kernels that support only padding: keys that do not exist become padding. On any device from
 * compute capability 8.0. Scores have no positions, so padding is enough. A selection of kv_used
 * keys followed by padding is the selection of the keys that exist, except for the expiry of keys
 * that are kept to the end. */

static constexpr int used_threads = 256;

/* The plan of the kernels. valid: in the workspace, [batch][kv_len]. */
struct used_plan {
    const int32_t *kv_used;
    const uint8_t *key_valid; // NULL: all keys that exist are valid
    int64_t valid_batch;
    uint8_t *valid;
    number_view<int32_t> expiry; // data NULL: no selection
    int32_t kv_heads, kv_len;
};

/* Each thread writes 1 if a key exists and is valid, otherwise 0. */
static __global__ void __launch_bounds__(used_threads)
    find_valid(const used_plan plan, const int64_t batch) {
    const int64_t b = head_of_block();
    const int64_t j = (int64_t)blockIdx.x * used_threads + threadIdx.x;
    if (b >= batch || j >= plan.kv_len)
        return;
    const bool exists = j < count_used(plan.kv_used, b, plan.kv_len);
    plan.valid[b * plan.kv_len + j] =
        exists && (plan.key_valid == NULL || plan.key_valid[b * plan.valid_batch + j] != 0);
}

/* Each thread corrects one expiry. A key that is kept to the end of kv_len keys is kept to the end
 * of the keys that exist. */
static __global__ void __launch_bounds__(used_threads)
    end_with_used(const used_plan plan, const int64_t heads) {
    const int64_t head = head_of_block(), b = head / plan.kv_heads;
    const int64_t j = (int64_t)blockIdx.x * used_threads + threadIdx.x;
    if (head >= heads || j >= plan.kv_len)
        return;
    int32_t *const expiry = plan.expiry.at(b, head % plan.kv_heads) + j;
    if (*expiry == plan.kv_len)
        *expiry = count_used(plan.kv_used, b, plan.kv_len);
}

static used_plan plan_used(const fdma_problem *problem, fdma_arena *arena) {
    used_plan plan = {};
    plan.kv_used = (const int32_t *)problem->kv_used.data;
    plan.key_valid = (const uint8_t *)problem->key_valid.data;
    plan.valid_batch = problem->key_valid.stride[0];
    plan.valid = take<uint8_t>(arena, problem->batch * problem->kv_len);
    plan.expiry = numbers_of<int32_t>(&problem->expiry);
    plan.kv_heads = (int32_t)problem->kv_heads;
    plan.kv_len = (int32_t)problem->kv_len;
    return plan;
}

static bool used_applies(const fdma_kernel *, const fdma_problem *problem) {
    const bool is_score =
        problem->operation == operation_score || problem->operation == operation_score_backward;
    const bool is_select =
        problem->operation == operation_select && !is_present(&problem->fused.last_keys.list);
    return is_present(&problem->kv_used) && (is_score || is_select);
}

static size_t used_workspace(const adapted_kernel *inner, const fdma_problem *problem,
                             check_depth depth) {
    fdma_arena arena = {};
    const used_plan plan = plan_used(problem, &arena);
    const fdma_problem one = fdma_padded_problem(problem, plan.valid);
    return fdma_arena_size(&arena) + fdma_adapted_workspace(inner, &one, depth);
}

static fdma_status used_run(const adapted_kernel *inner, const fdma_problem *problem) {
    const char *const what = fdma_operation_name(problem->operation);
    fdma_arena arena = fdma_arena_of(problem);
    const used_plan plan = plan_used(problem, &arena);
    fdma_problem one = fdma_padded_problem(problem, plan.valid);
    const int64_t batch = problem->batch, heads = batch * problem->kv_heads;
    const unsigned blocks = (unsigned)divide_up(problem->kv_len, (int64_t)used_threads);
    fdma_set_aside(&one.exec, &arena);
    if (batch == 0 || problem->kv_len == 0)
        return fdma_run_adapted(inner, &one);
    FDMA_TRY(launch(what, find_valid, {grid_of(blocks, batch), dim3(used_threads)}, problem, plan,
                    batch));
    FDMA_TRY(fdma_run_adapted(inner, &one));
    if (plan.expiry.data == NULL)
        return FDMA_OK;
    return launch(what, end_with_used, {grid_of(blocks, heads), dim3(used_threads)}, problem, plan,
                  heads);
}

const kernel_adapter fdma_cuda_used_adapter = {used_applies, used_workspace, used_run};
