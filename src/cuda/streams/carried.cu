/* Select with a table and backward with carried keys, by kernels that support neither. Kernels of
 * forward read the rows of carried keys where they are.
 *
 * Select: each (b, g) becomes a sequence of its own: first its carried keys, sorted by position,
 * with empty rows at the front as keys that are not valid, and then the keys of the call.
 * core/streams.h says why. Backward: the carried keys and those of the call are copied one after
 * the other; from there their gradients are copied to the tensors that they belong to. */
extern "C" {
#include "core/streams.h"
#include "cuda/cuda.h"
}
#include "core/integers.h"
#include "cuda/device/head_view.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/vec.cuh"
#include "cuda/streams/used.cuh"

static constexpr int stream_threads = 256;
static constexpr int order_warps = stream_threads / 32;
static constexpr int lane_rows = 2;                    // rows that a lane finds the places of
static constexpr int ordered_rows = 32 * lane_rows;    // of a thread block
static constexpr int counted_rows = 2048;              // at a time; a multiple of ordered_rows
static constexpr int copied_keys = 4 * stream_threads; // of a thread block

/* ---- select ---- */

/* What the kernels of a select work from. A head is a (b, g). */
struct stream_plan {
    number_view<float> score, in_score, out_score;
    number_view<int32_t> in_position, out_position, expiry, slot;
    const int32_t *in_seen; // NULL: there is no table_in
    int32_t *out_seen;
    const uint8_t *key_valid; // NULL: all keys of the call are valid
    int64_t valid_batch;
    int32_t kv_heads, rows, new_len, kv_len;
    int32_t out_rows; // of table_out
    // in the workspace, of each head in the order of positions
    float *sequence_score;    // [heads][kv_len]
    uint8_t *sequence_valid;  // [heads][kv_len]
    int32_t *sequence_expiry; // [heads][kv_len]
    int32_t *sequence_slot;   // [heads][kv_len]
    int32_t *row;             // [heads][rows]: the row of each carried key
    int32_t *empty;           // [heads]: empty rows, which stand first
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

/* The numbers of a thread block that orders rows: some of the positions, and what each warp has
 * counted. */
struct order_memory {
    alignas(16) int32_t positions[counted_rows];
    int32_t before[order_warps][ordered_rows];
    int32_t empty;
};

/* Loads the positions of rows `first` to `first + count` - 1, -1 for empty ones, and behind them up
 * to three that no row comes after. Counts the empty ones. */
__device__ static void load_positions(order_memory *shared, const int32_t *position, int32_t first,
                                      int32_t count) {
    int32_t empty = 0;
#pragma unroll 8
    for (int32_t n = threadIdx.x; n < (count + 3) / 4 * 4; n += stream_threads) {
        const int32_t own = n < count ? max(position[first + n], -1) : INT32_MAX;
        shared->positions[n] = own;
        empty += own < 0;
    }
    empty = __reduce_add_sync(~0u, empty);
    if (threadIdx.x % 32 == 0)
        atomicAdd(&shared->empty, empty);
}

/* Counts which of the positions `from` to `end` - 1 precede each of this lane's rows. Both are
 * multiples of 4. is_earlier: they are those of lower rows, which decides ties. */
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

/* The same of the positions of the thread block's own rows, the first of which is at `from`. */
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

/* Counts how many rows precede each of this lane's rows, of those that this warp looks at. The
 * first of the thread block's rows is first_row. */
__device__ static void count_before(order_memory *shared, const int32_t *position, int32_t rows,
                                    int32_t first_row, const int32_t (&own)[lane_rows],
                                    int32_t (&before)[lane_rows]) {
    for (int32_t first = 0; first < rows; first += counted_rows) {
        const int32_t count = min(counted_rows, rows - first), end = (count + 3) / 4 * 4;
        const int32_t from = min(max(first_row - first, 0), end);
        const int32_t behind = min(max(first_row + ordered_rows - first, 0), end);
        __syncthreads();
        load_positions(shared, position, first, count);
        __syncthreads();
        count_positions<true>(shared, 0, from, own, before);
        count_neighbours(shared, from, behind, own, before);
        count_positions<false>(shared, behind, end, own, before);
    }
}

/* Copies some carried keys in order of position: the number of rows that precede a key is its new
 * index. Each warp looks at some of the rows, for all rows of the thread block. */
__device__ static void order_rows(const stream_plan &plan, const stream_element &at) {
    __shared__ order_memory shared;
    const int32_t first_row = blockIdx.x * ordered_rows, warp = threadIdx.x / 32;
    const int32_t *const position = plan.in_position.at(at.b, at.g);
    int32_t own[lane_rows], before[lane_rows] = {};
#pragma unroll
    for (int i = 0; i < lane_rows; i++) {
        const int32_t row = first_row + 32 * i + threadIdx.x % 32;
        own[i] = row < plan.rows ? max(position[row], -1) : -1;
    }
    if (threadIdx.x == 0)
        shared.empty = 0;
    count_before(&shared, position, plan.rows, first_row, own, before);
#pragma unroll
    for (int i = 0; i < lane_rows; i++)
        shared.before[warp][32 * i + threadIdx.x % 32] = before[i];
    __syncthreads();
    if (first_row == 0 && threadIdx.x == 0)
        plan.empty[at.head] = shared.empty;
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

/* Copies some keys of the call behind the carried ones. */
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

/* Writes the sequences. The first `row_blocks` thread blocks of a head order its carried keys, the
 * others copy its keys of the call. */
static __global__ void __launch_bounds__(stream_threads)
    write_sequences(const __grid_constant__ stream_plan plan, const int64_t heads,
                    const int32_t row_blocks) {
    const stream_element at = element_of(plan);
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (at.head >= heads)
        return;
    if ((int32_t)blockIdx.x < row_blocks)
        order_rows(plan, at);
    else
        copy_keys(plan, at, ((int32_t)blockIdx.x - row_blocks) * copied_keys);
}

/* Writes the selection from those of the sequences. Slots of a sequence count its valid keys: with
 * n carried keys, slot s < n is the row of carried key s, and slot s >= n is empty row s - n. */
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
    if (at.n < plan.rows) {
        const int32_t own = row[at.n];
        expiry[own] = at.n >= empty ? ends : own;
        slot[own] = at.n >= empty ? own : -1;
        return;
    }
    const int32_t s = plan.sequence_slot[first + at.n], filled = plan.rows - empty;
    expiry[at.n] = ends;
    slot[at.n] = s < 0 || s >= plan.rows ? -1 : s < filled ? row[empty + s] : row[s - filled];
}

/* Writes the rows of table_out that no key of the call takes: carried keys that are kept to the
 * end, and empty rows. */
static __global__ void __launch_bounds__(stream_threads)
    write_carried_rows(const __grid_constant__ stream_plan plan, const int64_t heads) {
    const stream_element at = element_of(plan);
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (at.head >= heads || at.n >= plan.out_rows)
        return;
    const bool is_kept = at.n < plan.rows && plan.expiry.at(at.b, at.g)[at.n] >= plan.kv_len;
    plan.out_score.at(at.b, at.g)[at.n] = is_kept ? plan.in_score.at(at.b, at.g)[at.n] : -INFINITY;
    plan.out_position.at(at.b, at.g)[at.n] = is_kept ? plan.in_position.at(at.b, at.g)[at.n] : -1;
}

/* Writes the keys of the call that are kept to the end, and how many tokens have passed. */
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
    if (row < 0 || row >= plan.out_rows)
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
    plan.out_rows = (int32_t)problem->slots;
    if (!is_present(&problem->table_in.score))
        return plan;
    plan.sequence_score = take<float>(arena, keys);
    plan.sequence_valid = take<uint8_t>(arena, keys);
    plan.sequence_expiry = take<int32_t>(arena, keys);
    plan.sequence_slot = take<int32_t>(arena, keys);
    plan.row = take<int32_t>(arena, problem->batch * problem->kv_heads * problem->carried_len);
    plan.empty = take<int32_t>(arena, problem->batch * problem->kv_heads);
    return plan;
}

/* The problem of the sequences. */
static fdma_problem sequences_of(const fdma_problem *problem, const stream_plan &plan) {
    const int64_t heads = problem->batch * problem->kv_heads, len = problem->kv_len;
    fdma_problem one = *problem;
    one.table_in = one.table_out = {};
    one.batch = heads;
    one.kv_heads = 1;
    one.new_len = len;
    one.carried_len = 0;
    one.score = fdma_tensor_3d(plan.sequence_score, FDMA_FLOAT32, heads, 1, len);
    one.key_valid = fdma_tensor_2d(plan.sequence_valid, FDMA_UINT8, heads, len);
    one.expiry = fdma_tensor_3d(plan.sequence_expiry, FDMA_INT32, heads, 1, len);
    one.slot = fdma_tensor_3d(plan.sequence_slot, FDMA_INT32, heads, 1, len);
    return one;
}

static fdma_status run_select(const fdma_kernel *kernel, const fdma_problem *problem) {
    fdma_arena arena = fdma_arena_of(problem);
    const stream_plan plan = plan_select(problem, &arena);
    const int64_t heads = problem->batch * problem->kv_heads;
    const auto over = [&](int64_t elements) {
        return launch_shape{grid_of(divide_up(elements, stream_threads), heads),
                            dim3(stream_threads), 0, start_early};
    };
    if (plan.sequence_score == NULL) {
        FDMA_TRY(kernel->run(problem));
    } else {
        fdma_problem one = sequences_of(problem, plan);
        fdma_set_aside(&one.exec, &arena);
        const int32_t row_blocks = (int32_t)divide_up(plan.rows, ordered_rows);
        const launch_shape all = {grid_of(row_blocks + divide_up(plan.new_len, copied_keys), heads),
                                  dim3(stream_threads), 0, start_early};
        FDMA_TRY(launch("select", write_sequences, all, problem, plan, heads, row_blocks));
        FDMA_TRY(kernel->run(&one));
        FDMA_TRY(launch("select", write_selection, over(plan.kv_len), problem, plan, heads));
    }
    if (!is_present(&problem->table_out.score))
        return FDMA_OK;
    FDMA_TRY(launch("select", write_carried_rows, over(plan.out_rows), problem, plan, heads));
    return launch("select", write_new_rows, over(max(plan.new_len, 1)), problem, plan, heads);
}

/* ---- backward ---- */

/* Rows of carried keys and of those of the call, and of both in the workspace, one after the
 * other. */
struct row_pieces {
    head_view carried, own, joined;
    int32_t rows, kv_len, kv_heads, vecs; // vecs: of a row
    bool is_aligned;
};

/* A number for each key, likewise. */
struct number_pieces {
    number_view<float> carried, own, joined;
    int32_t rows, kv_len, kv_heads;
};

/* Where a vector of a row, or a number, is. */
template <typename element> struct key_addresses {
    element *apart;  // among the carried keys or those of the call
    element *joined; // NULL: past the end
};

__device__ static uint16_t *vec_at(const head_view &view, int64_t b, int64_t j, int32_t g,
                                   int32_t vec) {
    return (uint16_t *)view.data + b * view.batch + j * view.row + g * view.head +
           vec * vec_channels;
}

/* The vector of this thread. */
__device__ static key_addresses<uint16_t> addresses_of_vec(const row_pieces &pieces,
                                                           int64_t count) {
    const int64_t n = (int64_t)blockIdx.x * stream_threads + threadIdx.x;
    if (n >= count)
        return {};
    const int64_t row = n / pieces.vecs, key = row / pieces.kv_heads, b = key / pieces.kv_len;
    const int32_t vec = (int32_t)(n % pieces.vecs), g = (int32_t)(row % pieces.kv_heads);
    const int64_t j = key % pieces.kv_len, own = j - pieces.rows;
    return {own < 0 ? vec_at(pieces.carried, b, j, g, vec) : vec_at(pieces.own, b, own, g, vec),
            vec_at(pieces.joined, b, j, g, vec)};
}

/* The number of this thread. */
__device__ static key_addresses<float> addresses_of_number(const number_pieces &pieces,
                                                           int64_t heads) {
    const int64_t head = head_of_block(), b = head / pieces.kv_heads, g = head % pieces.kv_heads;
    const int32_t j = (int32_t)(blockIdx.x * stream_threads + threadIdx.x), own = j - pieces.rows;
    if (head >= heads || j >= pieces.kv_len)
        return {};
    return {own < 0 ? pieces.carried.at(b, g) + j : pieces.own.at(b, g) + own,
            pieces.joined.at(b, g) + j};
}

__device__ static void copy_vec(uint16_t *to, const uint16_t *from, bool is_aligned) {
    if (is_aligned)
        *(uint4 *)to = *(const uint4 *)from;
    else
        for (int x = 0; x < vec_channels; x++)
            to[x] = from[x];
}

static __global__ void __launch_bounds__(stream_threads)
    join_rows(const __grid_constant__ row_pieces pieces, const int64_t count) {
    const key_addresses<uint16_t> vec = addresses_of_vec(pieces, count);
    if (vec.joined != NULL)
        copy_vec(vec.joined, vec.apart, pieces.is_aligned);
}

static __global__ void __launch_bounds__(stream_threads)
    split_rows(const __grid_constant__ row_pieces pieces, const int64_t count) {
    const key_addresses<uint16_t> vec = addresses_of_vec(pieces, count);
    if (vec.joined != NULL)
        copy_vec(vec.apart, vec.joined, pieces.is_aligned);
}

static __global__ void __launch_bounds__(stream_threads)
    join_numbers(const __grid_constant__ number_pieces pieces, const int64_t heads) {
    const key_addresses<float> number = addresses_of_number(pieces, heads);
    if (number.joined != NULL)
        *number.joined = *number.apart;
}

static __global__ void __launch_bounds__(stream_threads)
    split_numbers(const __grid_constant__ number_pieces pieces, const int64_t heads) {
    const key_addresses<float> number = addresses_of_number(pieces, heads);
    if (number.joined != NULL)
        *number.apart = *number.joined;
}

/* A tensor shaped as k, with the rows of all keys. */
static fdma_tensor take_rows(const fdma_problem *problem, fdma_arena *arena) {
    const int64_t batch = problem->batch, len = problem->kv_len, heads = problem->kv_heads;
    uint16_t *const data = take<uint16_t>(arena, batch * len * heads * problem->head_dim);
    return fdma_tensor_4d(data, problem->dtype, batch, len, heads, problem->head_dim);
}

/* A tensor shaped as bias, with the numbers of all keys; absent if `like` is. */
static fdma_tensor take_numbers(const fdma_problem *problem, const fdma_tensor *like,
                                fdma_arena *arena) {
    const int64_t batch = problem->batch, len = problem->kv_len, heads = problem->kv_heads;
    if (!is_present(like))
        return {};
    return fdma_tensor_3d(take<float>(arena, batch * heads * len), FDMA_FLOAT32, batch, heads, len);
}

/* The problem whose keys are all of one piece. */
static fdma_problem joined_problem(const fdma_problem *problem, fdma_arena *arena) {
    fdma_problem one = *problem;
    one.k = take_rows(problem, arena);
    one.v = take_rows(problem, arena);
    one.bias = take_numbers(problem, &problem->bias, arena);
    one.dk = take_rows(problem, arena);
    one.dv = take_rows(problem, arena);
    one.dbias = take_numbers(problem, &problem->dbias, arena);
    one.k_carried = one.v_carried = one.bias_carried = {};
    one.dk_carried = one.dv_carried = one.dbias_carried = {};
    one.carried_len = 0;
    one.new_len = problem->kv_len;
    return one;
}

/* Copies rows, by join_rows() or split_rows(). */
static fdma_status copy_rows(void (*kernel)(row_pieces, int64_t), const fdma_problem *problem,
                             const fdma_tensor *carried, const fdma_tensor *own,
                             const fdma_tensor *joined) {
    row_pieces pieces = {};
    pieces.carried = view_of(carried);
    pieces.own = view_of(own);
    pieces.joined = view_of(joined);
    pieces.rows = (int32_t)problem->carried_len;
    pieces.kv_len = (int32_t)problem->kv_len;
    pieces.kv_heads = (int32_t)problem->kv_heads;
    pieces.vecs = (int32_t)problem->head_dim / vec_channels;
    pieces.is_aligned = is_aligned(pieces.carried) && is_aligned(pieces.own);
    const int64_t count = problem->batch * problem->kv_len * problem->kv_heads * pieces.vecs;
    return launch(fdma_operation_name(problem->operation), kernel,
                  {dim3((unsigned)divide_up(count, stream_threads)), dim3(stream_threads)}, problem,
                  pieces, count);
}

/* Copies numbers, if there are any, by join_numbers() or split_numbers(). */
static fdma_status copy_numbers(void (*kernel)(number_pieces, int64_t), const fdma_problem *problem,
                                const fdma_tensor *carried, const fdma_tensor *own,
                                const fdma_tensor *joined) {
    const int64_t heads = problem->batch * problem->kv_heads;
    const number_pieces pieces = {numbers_of<float>(carried), numbers_of<float>(own),
                                  numbers_of<float>(joined),  (int32_t)problem->carried_len,
                                  (int32_t)problem->kv_len,   (int32_t)problem->kv_heads};
    if (!is_present(joined))
        return FDMA_OK;
    return launch(
        fdma_operation_name(problem->operation), kernel,
        {grid_of(divide_up(problem->kv_len, stream_threads), heads), dim3(stream_threads)}, problem,
        pieces, heads);
}

static fdma_status join_inputs(const fdma_problem *problem, const fdma_problem *one) {
    FDMA_TRY(copy_rows(join_rows, problem, &problem->k_carried, &problem->k, &one->k));
    FDMA_TRY(copy_rows(join_rows, problem, &problem->v_carried, &problem->v, &one->v));
    return copy_numbers(join_numbers, problem, &problem->bias_carried, &problem->bias, &one->bias);
}

/* What the kernel adds the gradients to. dbias is never added to. */
static fdma_status join_gradients(const fdma_problem *problem, const fdma_problem *one) {
    FDMA_TRY(copy_rows(join_rows, problem, &problem->dk_carried, &problem->dk, &one->dk));
    return copy_rows(join_rows, problem, &problem->dv_carried, &problem->dv, &one->dv);
}

static fdma_status split_gradients(const fdma_problem *problem, const fdma_problem *one) {
    FDMA_TRY(copy_rows(split_rows, problem, &problem->dk_carried, &problem->dk, &one->dk));
    FDMA_TRY(copy_rows(split_rows, problem, &problem->dv_carried, &problem->dv, &one->dv));
    return copy_numbers(split_numbers, problem, &problem->dbias_carried, &problem->dbias,
                        &one->dbias);
}

static fdma_status run_joined(const fdma_kernel *kernel, const fdma_problem *problem) {
    fdma_arena arena = fdma_arena_of(problem);
    fdma_problem one = joined_problem(problem, &arena);
    fdma_set_aside(&one.exec, &arena);
    FDMA_TRY(join_inputs(problem, &one));
    if (problem->accumulate)
        FDMA_TRY(join_gradients(problem, &one));
    FDMA_TRY(kernel->run(&one));
    return split_gradients(problem, &one);
}

/* Whether the keys of the call and the carried ones are to be joined. */
static bool joins_keys(const fdma_problem *problem) {
    return problem->operation == operation_backward && is_present(&problem->k_carried);
}

/* ---- all of them ---- */

size_t fdma_cuda_workspace(const fdma_kernel *kernel, const fdma_problem *problem) {
    fdma_arena arena = {};
    if (fdma_cuda_pads_unused(problem))
        return fdma_cuda_padded_workspace(kernel, problem);
    if (has_table(problem)) {
        const stream_plan plan = plan_select(problem, &arena);
        const bool carried = is_present(&problem->table_in.score);
        const fdma_problem one = carried ? sequences_of(problem, plan) : *problem;
        return fdma_arena_size(&arena) + kernel->workspace(&one);
    }
    if (!joins_keys(problem))
        return kernel->workspace(problem);
    const fdma_problem one = joined_problem(problem, &arena);
    return fdma_arena_size(&arena) + kernel->workspace(&one);
}

fdma_status fdma_cuda_run_kernel(const fdma_kernel *kernel, const fdma_problem *problem) {
    if (fdma_cuda_pads_unused(problem))
        return fdma_cuda_run_padded(kernel, problem);
    if (has_table(problem))
        return run_select(kernel, problem);
    return joins_keys(problem) ? run_joined(kernel, problem) : kernel->run(problem);
}
