/* Select with a table, and forward with carried keys, by kernels that know neither.
 *
 * Select: each (b, g) becomes a sequence of its own: first its carried keys, sorted by position,
 * with empty rows at the front as keys that are not valid, and then the keys of the call.
 * core/streams.h says why. Forward: the carried keys and those of the call are copied one after the
 * other. */
extern "C" {
#include "core/streams.h"
#include "cuda/cuda.h"
}
#include "core/integers.h"
#include "cuda/device/head_view.cuh"
#include "cuda/device/vec.cuh"

static constexpr int stream_threads = 256;

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

/* Fills in scores and validity. Before a carried key
 * are the rows with lower positions. */
static __global__ void __launch_bounds__(stream_threads)
    fill_sequences(const __grid_constant__ stream_plan plan, const int64_t heads) {
    const stream_element at = element_of(plan);
    if (at.head >= heads || at.n >= plan.kv_len)
        return;
    const int64_t first = at.head * plan.kv_len;
    if (at.n >= plan.rows) {
        const int32_t j = at.n - plan.rows;
        plan.sequence_score[first + at.n] = plan.score.at(at.b, at.g)[j];
        plan.sequence_valid[first + at.n] =
            plan.key_valid == NULL || plan.key_valid[at.b * plan.valid_batch + j] != 0;
        return;
    }
    const int32_t *const position = plan.in_position.at(at.b, at.g);
    const int32_t own = max(position[at.n], -1);
    int32_t before = 0;
#pragma unroll 8
    for (int32_t other = 0; other < plan.rows; other++) {
        const int32_t p = max(position[other], -1);
        before += p < own || (p == own && other < at.n);
    }
    plan.row[at.head * plan.rows + before] = at.n;
    plan.sequence_score[first + before] = plan.in_score.at(at.b, at.g)[at.n];
    plan.sequence_valid[first + before] = own >= 0;
}

/* The number of empty rows, which stand first. */
__device__ static int32_t count_empty(const uint8_t *valid, int32_t rows) {
    int32_t low = 0, high = rows; // rows before `low` are empty, those from `high` on are not
    while (low < high) {
        const int32_t middle = low + (high - low) / 2;
        low = valid[middle] ? low : middle + 1;
        high = valid[middle] ? middle : high;
    }
    return low;
}

/* Writes the selection from those of the sequences. Slot s of a sequence is that of its valid key
 * s, which has a row already, or, beyond the carried keys, the next empty row. */
static __global__ void __launch_bounds__(stream_threads)
    write_selection(const __grid_constant__ stream_plan plan, const int64_t heads) {
    const stream_element at = element_of(plan);
    if (at.head >= heads || at.n >= plan.kv_len)
        return;
    const int64_t first = at.head * plan.kv_len;
    const uint8_t *const valid = plan.sequence_valid + first;
    const int32_t *const row = plan.row + at.head * plan.rows;
    const int32_t ends = plan.sequence_expiry[first + at.n];
    int32_t *const expiry = plan.expiry.at(at.b, at.g), *const slot = plan.slot.at(at.b, at.g);
    if (at.n < plan.rows) {
        const int32_t own = row[at.n];
        expiry[own] = valid[at.n] ? ends : own;
        slot[own] = valid[at.n] ? own : -1;
        return;
    }
    const int32_t empty = count_empty(valid, plan.rows), filled = plan.rows - empty;
    const int32_t s = plan.sequence_slot[first + at.n];
    expiry[at.n] = ends;
    slot[at.n] = s < 0 || s >= plan.rows ? -1 : s < filled ? row[empty + s] : row[s - filled];
}

/* Writes the rows of table_out that no key of the call takes: carried keys that are kept to the
 * end, and empty rows. */
static __global__ void __launch_bounds__(stream_threads)
    write_carried_rows(const __grid_constant__ stream_plan plan, const int64_t heads) {
    const stream_element at = element_of(plan);
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
                            dim3(stream_threads)};
    };
    if (plan.sequence_score == NULL) {
        FDMA_TRY(kernel->run(problem));
    } else {
        fdma_problem one = sequences_of(problem, plan);
        fdma_set_aside(&one.exec, &arena);
        FDMA_TRY(launch("select", fill_sequences, over(plan.kv_len), problem, plan, heads));
        FDMA_TRY(kernel->run(&one));
        FDMA_TRY(launch("select", write_selection, over(plan.kv_len), problem, plan, heads));
    }
    if (!is_present(&problem->table_out.score))
        return FDMA_OK;
    FDMA_TRY(launch("select", write_carried_rows, over(plan.out_rows), problem, plan, heads));
    return launch("select", write_new_rows, over(max(plan.new_len, 1)), problem, plan, heads);
}

/* ---- forward ---- */

/* Carried rows and those of the call, and where both are copied to, one after the other. */
struct join_plan {
    head_view carried, own, all;
    int32_t rows, kv_len, kv_heads, vecs; // vecs: of a row
    bool is_aligned;
};

static __global__ void __launch_bounds__(stream_threads)
    join_rows(const __grid_constant__ join_plan plan, const int64_t count) {
    const int64_t n = (int64_t)blockIdx.x * stream_threads + threadIdx.x;
    if (n >= count)
        return;
    const int32_t vec = (int32_t)(n % plan.vecs), g = (int32_t)(n / plan.vecs % plan.kv_heads);
    const int64_t key = n / plan.vecs / plan.kv_heads, b = key / plan.kv_len;
    const int64_t j = key % plan.kv_len;
    const head_view &from = j < plan.rows ? plan.carried : plan.own;
    const int64_t row = j < plan.rows ? j : j - plan.rows;
    const uint16_t *const source = (const uint16_t *)from.data + b * from.batch + row * from.row +
                                   g * from.head + vec * vec_channels;
    uint16_t *const target = (uint16_t *)plan.all.data + b * plan.all.batch + j * plan.all.row +
                             g * plan.all.head + vec * vec_channels;
    if (plan.is_aligned)
        *(uint4 *)target = *(const uint4 *)source;
    else
        for (int x = 0; x < vec_channels; x++)
            target[x] = source[x];
}

static __global__ void __launch_bounds__(stream_threads)
    join_biases(const __grid_constant__ number_view<float> carried,
                const __grid_constant__ number_view<float> own,
                const __grid_constant__ number_view<float> all, const int32_t rows,
                const int32_t kv_len, const int32_t kv_heads, const int64_t heads) {
    const int64_t head = head_of_block();
    const int32_t j = (int32_t)(blockIdx.x * stream_threads + threadIdx.x);
    if (head >= heads || j >= kv_len)
        return;
    const int64_t b = head / kv_heads, g = head % kv_heads;
    all.at(b, g)[j] = j < rows ? carried.at(b, g)[j] : own.at(b, g)[j - rows];
}

/* The problem whose keys are all of one piece. */
static fdma_problem joined_problem(const fdma_problem *problem, fdma_arena *arena) {
    const int64_t batch = problem->batch, heads = problem->kv_heads, len = problem->kv_len;
    const int64_t numbers = batch * len * heads * problem->head_dim;
    fdma_problem one = *problem;
    one.k = fdma_tensor_4d(take<uint16_t>(arena, numbers), problem->dtype, batch, len, heads,
                           problem->head_dim);
    one.v = fdma_tensor_4d(take<uint16_t>(arena, numbers), problem->dtype, batch, len, heads,
                           problem->head_dim);
    if (is_present(&problem->bias))
        one.bias = fdma_tensor_3d(take<float>(arena, batch * heads * len), FDMA_FLOAT32, batch,
                                  heads, len);
    one.k_carried = one.v_carried = one.bias_carried = {};
    one.carried_len = 0;
    one.new_len = len;
    return one;
}

static fdma_status join(const fdma_problem *problem, const fdma_tensor *carried,
                        const fdma_tensor *own, const fdma_tensor *all) {
    join_plan plan = {};
    plan.carried = view_of(carried);
    plan.own = view_of(own);
    plan.all = view_of(all);
    plan.rows = (int32_t)problem->carried_len;
    plan.kv_len = (int32_t)problem->kv_len;
    plan.kv_heads = (int32_t)problem->kv_heads;
    plan.vecs = (int32_t)problem->head_dim / vec_channels;
    plan.is_aligned = is_aligned(plan.carried) && is_aligned(plan.own);
    const int64_t count = problem->batch * problem->kv_len * problem->kv_heads * plan.vecs;
    return launch("forward", join_rows,
                  {dim3((unsigned)divide_up(count, stream_threads)), dim3(stream_threads)}, problem,
                  plan, count);
}

static fdma_status run_forward(const fdma_kernel *kernel, const fdma_problem *problem) {
    fdma_arena arena = fdma_arena_of(problem);
    fdma_problem one = joined_problem(problem, &arena);
    const int64_t heads = problem->batch * problem->kv_heads;
    fdma_set_aside(&one.exec, &arena);
    FDMA_TRY(join(problem, &problem->k_carried, &problem->k, &one.k));
    FDMA_TRY(join(problem, &problem->v_carried, &problem->v, &one.v));
    if (is_present(&problem->bias))
        FDMA_TRY(launch(
            "forward", join_biases,
            {grid_of(divide_up(problem->kv_len, stream_threads), heads), dim3(stream_threads)},
            problem, numbers_of<float>(&problem->bias_carried), numbers_of<float>(&problem->bias),
            numbers_of<float>(&one.bias), (int32_t)problem->carried_len, (int32_t)problem->kv_len,
            (int32_t)problem->kv_heads, heads));
    return kernel->run(&one);
}

/* ---- either ---- */

size_t fdma_cuda_workspace(const fdma_kernel *kernel, const fdma_problem *problem) {
    fdma_arena arena = {};
    if (has_table(problem)) {
        const stream_plan plan = plan_select(problem, &arena);
        const bool carried = is_present(&problem->table_in.score);
        const fdma_problem one = carried ? sequences_of(problem, plan) : *problem;
        return fdma_arena_size(&arena) + kernel->workspace(&one);
    }
    if (!is_present(&problem->k_carried))
        return kernel->workspace(problem);
    const fdma_problem one = joined_problem(problem, &arena);
    return fdma_arena_size(&arena) + kernel->workspace(&one);
}

fdma_status fdma_cuda_run_kernel(const fdma_kernel *kernel, const fdma_problem *problem) {
    if (has_table(problem))
        return run_select(kernel, problem);
    return is_present(&problem->k_carried) ? run_forward(kernel, problem) : kernel->run(problem);
}
