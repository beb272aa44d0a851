/* The prologue and the epilogue of a backward call (plan/backward.cuh), on any device from compute
 * capability 8.0: the workspace, lse and delta of each row, zeros, and sums across partitions.
 *
 * Source: arXiv:2205.14135, algorithm 4; docs/algorithm.md, backward. */
extern "C" {
#include "core/adapter.h"
}

#include "cuda/device/grid.cuh"
#include "cuda/device/softmax.cuh"
#include "cuda/plan/backward.cuh"
#include "cuda/plan/backward_host.cuh"
#include "cuda/plan/selection.cuh"

/* The end of a backward call with partitions: adds the boundary sums to the gradients of the keys
 * that are live at the boundaries. */

static constexpr int boundary_threads = 128;

template <typename element>
__device__ static void add_channels(element *to, const float (&sum)[vec_channels], bool aligned) {
    float old[vec_channels];
    load_vec(old, to, aligned);
#pragma unroll
    for (int x = 0; x < vec_channels; x++)
        old[x] += sum[x];
    store_vec(to, old, aligned);
}

/* The key in a slot at a boundary; -1 if the slot is empty or there is no such boundary. */
__device__ static int32_t key_at_boundary(const backward_plan &plan, int64_t head, int32_t boundary,
                                          int32_t slot) {
    return boundary < plan.partitions
               ? key_in_slot(plan, head, boundary * plan.partition_lists, slot)
               : -1;
}

/* Adds the boundary sums of each key, in order, and then the total to the key's gradients. For each
 * slot and boundary one set of lanes takes dk and another dv, eight channels per lane. They add all
 * boundary sums of the key that is live there. If it is live at the next boundary too, the lanes of
 * that boundary do so instead. */
template <typename element, int lanes>
static __global__ void __launch_bounds__(boundary_threads)
    add_boundaries(const __grid_constant__ backward_plan plan, const bool aligned) {
    const forward_plan &forward = plan.forward;
    const int64_t head = head_of_block(), b = head / forward.kv_heads, g = head % forward.kv_heads;
    const int32_t group = (blockIdx.x * boundary_threads + threadIdx.x) / lanes;
    const int32_t last = 1 + group / (2 * plan.slots), slot = group / 2 % plan.slots;
    const int32_t d = threadIdx.x % lanes * vec_channels;
    const bool is_dv = group % 2 != 0;
    griddepcontrol_wait(); // for the passes
    if (head >= (int64_t)forward.batch * forward.kv_heads || last >= plan.partitions ||
        d >= forward.head_dim)
        return;
    const int32_t key = key_at_boundary(plan, head, last, slot);
    if (!is_key(key, forward.kv_len) || key_at_boundary(plan, head, last + 1, slot) == key)
        return;
    int32_t first = last;
    while (first > 1 && key_at_boundary(plan, head, first - 1, slot) == key)
        first--;
    const float *const from = (is_dv ? plan.boundary.dv : plan.boundary.dk) + d;
    float sum[vec_channels] = {}, dbias = 0;
    for (int32_t n = first; n <= last; n++) {
        const int64_t row = boundary_row(plan, head, n, slot);
        float more[vec_channels];
        load_vec(more, from + row * forward.head_dim, true);
#pragma unroll
        for (int x = 0; x < vec_channels; x++)
            sum[x] += more[x];
        dbias += plan.boundary.dbias[row];
    }
    element *const to =
        is_dv ? dv_of_key<element>(plan, b, g, key) : dk_of_key<element>(plan, b, g, key);
    add_channels(to + d, sum, aligned);
    if (!is_dv && d == 0 && plan.dbias.data != NULL)
        *dbias_of_key(plan, b, g, key) += dbias;
}

/* The number of this lane's keys that a row attends to. Not inline: it is rare and would take
 * registers. */
__device__ static __noinline__ float count_own_keys(const forward_plan &plan,
                                                    const selection_view &selection, int64_t b,
                                                    int32_t h, int32_t i) {
    const head_selection of =
        selection_of(plan, selection, (int)(b * plan.kv_heads) + h / plan.group);
    const int32_t p = query_position(plan, (int32_t)b, i);
    float count = 0;
#pragma unroll 1
    for (int32_t j = threadIdx.x % row_lanes; j < of.kv_len; j += row_lanes)
        count += p < record_expiry(plan, of, j) &&
                 (!plan.by_position || p >= first_position(plan, j)) &&
                 is_unmasked(plan.mask, b, h, i, j);
    return count;
}

/* True if a row attends to no key, so that its lse is the sink logit. Only rows with numbers that
 * are not finite need this test: 0 times such a number is NaN, while P = 0 makes other rows 0.
 * row_lanes lanes take a row. They differ in `i`, and all lanes of a warp call this. */
template <typename element>
__device__ static bool is_empty_beside_sink(const backward_plan &plan,
                                            const selection_view &selection, int64_t head,
                                            int32_t i, float lse, float delta) {
    const forward_plan &forward = plan.forward;
    const int64_t b = head / forward.q_heads, h = head % forward.q_heads;
    const float sink = forward.sink_logit != NULL ? forward.sink_logit[h] : -INFINITY;
    // lse was an exponent of 2 in between, which costs its last bits
    const bool is_sink =
        sink != -INFINITY && i < forward.q_len && fabsf(lse - sink) <= 1e-6f * fabsf(sink);
    if (!__any_sync(~0u, is_sink))
        return false;
    float zero = delta * 0; // NaN if a number is not finite
    const element *const q = row_of<element>(forward.q, head, forward.q_heads, is_sink ? i : 0);
#pragma unroll 1
    for (int32_t d = threadIdx.x % row_lanes * vec_channels; d < forward.head_dim;
         d += row_lanes * vec_channels) {
        float x[vec_channels];
        load_vec(x, q + d, false);
        for (int n = 0; n < vec_channels; n++)
            zero = fmaf(x[n], 0, zero);
    }
    zero = row_sum(zero);
    const bool is_searched = is_sink && isnan(zero);
    const float own = is_searched ? count_own_keys(forward, selection, b, (int32_t)h, i) : 0;
    const float count = row_sum(own);
    return is_searched && count == 0;
}

/* Writes row_lse, row_delta and the element of empty_blocks of the rows of a query head from row
 * `first` on. row_lanes lanes take a row. lse, delta: of this thread's row; delta of its lane's
 * channels. */
template <typename element>
__device__ static void write_row_stats(const backward_plan &plan, const selection_view &selection,
                                       int64_t head, int32_t first, float lse, float delta) {
    const forward_plan &forward = plan.forward;
    const int64_t b = head / forward.q_heads, h = head % forward.q_heads;
    const int32_t i = first + threadIdx.x / row_lanes;
    const int32_t lane = threadIdx.x % row_lanes;
    const bool there = i < forward.q_len;
    delta = row_sum(delta);
    if (there && plan.dlse.data != NULL)
        delta -= plan.dlse.at(b, h)[i];
    const bool empty = // a row of NaN is not empty
        is_empty_beside_sink<element>(plan, selection, head, i, lse, delta) || lse == -INFINITY;
    static_assert(empty_rows == block_rows, "a thread block writes one element");
    const bool has_empty = __syncthreads_or(there && empty);
    if (threadIdx.x == 0)
        plan.empty_blocks[(head * plan.rows + first) / empty_rows] = has_empty;
    if (lane != 0)
        return;
    plan.row_lse[head * plan.rows + i] = empty ? INFINITY : lse * log2_e;
    plan.row_delta[head * plan.rows + i] = empty ? 0 : delta;
}

/* write_row_stats() of list_queries rows, whose numbers are all loaded first: a thread block with
 * fewer would mostly wait. */
template <typename element, bool aligned>
__device__ static void find_row_stats(const backward_plan &plan, const selection_view &selection,
                                      int64_t head, int32_t first) {
    constexpr int rounds = list_queries / block_rows;
    const forward_plan &forward = plan.forward;
    const float *const lse_row = forward.lse.at(head / forward.q_heads, head % forward.q_heads);
    const int32_t own = first + threadIdx.x / row_lanes;
    float lse[rounds], delta[rounds] = {};
#pragma unroll
    for (int r = 0; r < rounds; r++)
        lse[r] = own + r * block_rows < forward.q_len ? lse_row[own + r * block_rows] : -INFINITY;
    // of empty rows, too: waiting for lse first would take longer
#pragma unroll 1
    for (int32_t d = threadIdx.x % row_lanes * vec_channels; d < forward.head_dim;
         d += row_lanes * vec_channels) {
        float x[rounds][vec_channels], y[rounds][vec_channels];
#pragma unroll
        for (int r = 0; r < rounds; r++) {
            const int32_t i = min(own + r * block_rows, forward.q_len - 1);
            load_vec(x[r], row_of<element>(plan.dout, head, forward.q_heads, i) + d, aligned);
            load_vec(y[r], row_of<element>(forward.out, head, forward.q_heads, i) + d, aligned);
        }
#pragma unroll
        for (int r = 0; r < rounds; r++)
#pragma unroll
            for (int n = 0; n < vec_channels; n++)
                delta[r] = fmaf(x[r][n], y[r][n], delta[r]);
    }
#pragma unroll
    for (int r = 0; r < rounds; r++)
        write_row_stats<element>(plan, selection, head, first + r * block_rows, lse[r],
                                 own + r * block_rows < forward.q_len ? delta[r] : 0);
}

/* The term of an empty row, or of one past q_len, in dsink_logit. */
__device__ static float dlse_of_empty(const backward_plan &plan, int32_t b, int32_t h, int32_t i) {
    const bool adds = plan.dlse.data != NULL && i < plan.forward.q_len &&
                      plan.forward.lse.at(b, h)[i] != -INFINITY;
    return adds ? plan.dlse.at(b, h)[i] : 0;
}

/* dsink_logit: minus the sum of the sink's probability times delta, over all rows of a query head.
 * A thread block takes a head. Each thread adds every row_threads-th row, and thread 0 adds the
 * sums of the threads, so the order of every sum is fixed. */
static __global__ void __launch_bounds__(row_threads)
    sum_sinks(const __grid_constant__ backward_plan plan) {
    __shared__ float sums[row_threads];
    const int32_t h = blockIdx.x;
    const float sink = sink_exponent(plan.forward, h);
    float sum = 0;
    for (int32_t b = 0; b < plan.forward.batch; b++) {
        const int64_t first = ((int64_t)b * plan.forward.q_heads + h) * plan.rows;
        for (int32_t i = threadIdx.x; i < plan.rows && sink != -INFINITY; i += row_threads)
            sum += plan.row_lse[first + i] == INFINITY
                       ? dlse_of_empty(plan, b, h, i)
                       : -exp2f(sink - plan.row_lse[first + i]) * plan.row_delta[first + i];
    }
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x != 0)
        return;
    for (int n = 1; n < row_threads; n++)
        sum += sums[n];
    plan.dsink_logit[h] = plan.accumulate ? plan.dsink_logit[h] + sum : sum;
}

/* Clears dbias, dk and dv of the keys of a kv head from key `first` on, unless the call adds to
 * them. row_lanes lanes take a key. */
__device__ static void clear_keys(const backward_plan &plan, int64_t head, int32_t first,
                                  bool aligned) {
    const forward_plan &forward = plan.forward;
    const int64_t b = head / forward.kv_heads, g = head % forward.kv_heads;
    const int32_t j = first + threadIdx.x / row_lanes;
    const int32_t lane = threadIdx.x % row_lanes;
    if (j >= forward.kv_len)
        return;
    if (plan.slot_per_key &&
        forward.records[head * forward.kv_len + j].expiry > query_position(forward, (int32_t)b, 0))
        return; // the pass writes them
    // a call without keys of its own may lack memory for dbias and have it for carried keys
    const bool has_dbias = (j < forward.carried_len ? plan.dbias_carried : plan.dbias).data != NULL;
    if (has_dbias && lane == 0 && !adds_dbias(plan, j))
        *dbias_of_key(plan, b, g, j) = 0;
    if (plan.accumulate)
        return;
    const float zeros[vec_channels] = {};
    __half *const dk = dk_of_key<__half>(plan, b, g, j);
    __half *const dv = dv_of_key<__half>(plan, b, g, j);
    for (int32_t d = lane * vec_channels; d < forward.head_dim; d += row_lanes * vec_channels) {
        store_vec(dk + d, zeros, aligned);
        store_vec(dv + d, zeros, aligned);
    }
}

/* Clears the slice of a range that belongs to thread block n of `blocks`. */
__device__ static void clear_slice(const cleared_range &range, int64_t n, int64_t blocks) {
    const int64_t each = divide_up(range.vecs, blocks), end = min((n + 1) * each, range.vecs);
    for (int64_t i = n * each + threadIdx.x; i < end; i += row_threads)
        range.data[i] = make_float4(0, 0, 0, 0);
}

/* Clears sums and the gradients of keys, and computes lse and delta of rows; it needs no lists. The
 * first key_blocks blocks of a kv head take its keys. The others take its query heads, row_blocks
 * each.
 *
 * It may run while write_lists or list_kept makes the lists. One block waits for them at its end,
 * so a kernel that waits for this one has them. */
template <typename element>
static __global__ void __launch_bounds__(row_threads)
    begin_rows(const __grid_constant__ backward_plan plan,
               const __grid_constant__ selection_view selection, const int32_t key_blocks,
               const int32_t row_blocks, const bool aligned_rows, const bool aligned_keys) {
    const int64_t head = head_of_block();
    const int32_t n = (int32_t)blockIdx.x - key_blocks;
    const int64_t heads = (int64_t)plan.forward.batch * plan.forward.kv_heads;
    if (head >= heads)
        return;
    for (const cleared_range &range : plan.cleared)
        clear_slice(range, head * gridDim.x + blockIdx.x, heads * gridDim.x);
    if (n < 0 && plan.slot_per_key)
        griddepcontrol_wait(); // for the records
    const int64_t q_head = head * plan.forward.group + n / row_blocks;
    const int32_t first = n % row_blocks * list_queries;
#pragma unroll 1
    for (int32_t j = 0; n < 0 && j < list_queries; j += block_rows)
        clear_keys(plan, head, (int32_t)blockIdx.x * list_queries + j, aligned_keys);
    if (n >= 0 && aligned_rows)
        find_row_stats<element, true>(plan, selection, q_head, first);
    else if (n >= 0)
        find_row_stats<element, false>(plan, selection, q_head, first);
    if (blockIdx.x + blockIdx.y + blockIdx.z == 0)
        griddepcontrol_wait();
}

/* Adds eight channels of a row of key_sums, from channel d on, times scale, to a gradient. */
template <typename element>
__device__ static void add_key_channels(element *to, const float *sums, int32_t d, float scale,
                                        bool aligned) {
    float total[vec_channels];
    load_vec(total, to + d, aligned);
#pragma unroll
    for (int c = 0; c < vec_channels; c += 2) {
        const float2 pair = *(const float2 *)&sums[d / 16 * 16 + d / 8 % 2 * 2 + c * 2];
        total[c] = fmaf(pair.x, scale, total[c]);
        total[c + 1] = fmaf(pair.y, scale, total[c + 1]);
    }
    store_vec(to + d, total, aligned);
}

/* Adds key_sums to dk and dv. row_lanes lanes take a key. */
template <typename element>
static __global__ void __launch_bounds__(row_threads)
    add_key_sums(const __grid_constant__ backward_plan plan, const bool aligned) {
    const forward_plan &forward = plan.forward;
    const int64_t head = head_of_block(), b = head / forward.kv_heads, g = head % forward.kv_heads;
    const int32_t j = blockIdx.x * block_rows + threadIdx.x / row_lanes;
    if (head >= (int64_t)forward.batch * forward.kv_heads || j >= forward.kv_len)
        return;
    const float *const sums = plan.key_sums + (head * forward.kv_len + j) * 2 * plan.sum_channels;
    element *const dk = dk_of_key<element>(plan, b, g, j);
    element *const dv = dv_of_key<element>(plan, b, g, j);
    for (int32_t d = threadIdx.x % row_lanes * vec_channels; d < forward.head_dim;
         d += row_lanes * vec_channels) {
        add_key_channels(dk, sums, d, forward.scale, aligned);
        add_key_channels(dv, sums + plan.sum_channels, d, forward.dropout_scale, aligned);
    }
}

/* The lengths of dattn_bias, and the offset of element n in row-major order. */
struct pair_lengths {
    int64_t batch, heads, queries, keys;

    __device__ int64_t total() const { return batch * heads * queries * keys; }

    __device__ int64_t offset(const pair_view &pairs, int64_t n) const {
        const int64_t rows = n / keys, of_queries = rows / queries;
        return of_queries / heads * pairs.batch + of_queries % heads * pairs.head +
               rows % queries * pairs.query + n % keys * pairs.key;
    }
};

/* Each thread writes an element of dattn_bias: the rounded sum, or 0 without sums. */
template <typename element>
static __global__ void __launch_bounds__(row_threads)
    write_pairs(const pair_view pairs, const pair_lengths lengths, const float *sums) {
    const int64_t n = (int64_t)blockIdx.x * row_threads + threadIdx.x;
    if (n < lengths.total())
        ((element *)pairs.data)[lengths.offset(pairs, n)] =
            from_float<element>(sums == NULL ? 0 : sums[n]);
}

static fdma_status launch_write_pairs(const fdma_problem *problem, const float *sums) {
    const fdma_tensor *const pairs = &problem->dattn_bias;
    const int64_t *const shape = pairs->shape;
    const auto kernel = pairs->dtype == FDMA_FLOAT32   ? write_pairs<float>
                        : pairs->dtype == FDMA_FLOAT16 ? write_pairs<__half>
                                                       : write_pairs<__nv_bfloat16>;
    return launch(
        "backward", kernel,
        {dim3((unsigned)divide_up(count_elements(pairs), row_threads)), dim3(row_threads)}, problem,
        pairs_of(pairs, problem->q_heads), pair_lengths{shape[0], shape[1], shape[2], shape[3]},
        sums);
}

/* True if a tensor of rank 4 has no gaps between its elements. */
static bool is_contiguous(const fdma_tensor *tensor) {
    int64_t stride = 1;
    for (int axis = 3; axis >= 0; axis--) {
        if (tensor->shape[axis] > 1 && tensor->stride[axis] != stride)
            return false;
        stride *= tensor->shape[axis];
    }
    return true;
}

static bool has_pair_sums(const fdma_problem *problem, const backward_plan *plan) {
    return has_short_pairs(problem) && plan->dpair_writing == pairs_added;
}

static fdma_status clear_dattn_bias(const fdma_problem *problem, const backward_plan *plan) {
    const fdma_tensor *const pairs = &problem->dattn_bias;
    const bool has_sums = has_pair_sums(problem, plan);
    if (count_elements(pairs) == 0 || plan->dpair_writing == rows_stored)
        return FDMA_OK;
    const size_t size = has_sums ? sizeof(float) : fdma_dtype_size(pairs->dtype);
    if (has_sums || is_contiguous(pairs))
        return clear("backward", problem, plan->dpairs.data, (size_t)count_elements(pairs) * size);
    return launch_write_pairs(problem, NULL);
}

static fdma_status round_dattn_bias(const fdma_problem *problem, const backward_plan *plan) {
    if (!has_pair_sums(problem, plan) || count_elements(&problem->dattn_bias) == 0)
        return FDMA_OK;
    return launch_write_pairs(problem, (const float *)plan->dpairs.data);
}

const char *fdma_cuda_refuses_backward(const fdma_problem *problem, int64_t most_head_dim) {
    if (problem->dlse.dtype == FDMA_FLOAT64 || problem->dbias.dtype == FDMA_FLOAT64)
        return "float64 dlse or dbias; supported: float32";
    if (problem->dsink_logit.dtype == FDMA_FLOAT64)
        return "float64 dsink_logit; supported: float32";
    const int64_t *const shape = problem->dattn_bias.shape; // not above the product of all lengths
    if (is_present(&problem->dattn_bias) &&
        (double)shape[0] * (double)shape[1] * (double)shape[2] * (double)shape[3] / row_threads >
            INT32_MAX)
        return "2^39 or more elements of dattn_bias";
    if (problem->deterministic && short_axes_of(problem).any)
        return "a deterministic dattn_bias that is broadcast: expand attn_bias";
    return fdma_cuda_refuses_plan(problem, most_head_dim);
}

/* Partitions wanted so that one sequence fills a large device with thread blocks while the boundary
 * sums stay small beside the tensors of the call. The batch does not count, because results must
 * not depend on it. */
static int32_t count_partitions(const fdma_problem *problem, const backward_shape &shape,
                                int32_t lists) {
    enum { wanted_blocks = 128, packed_blocks = 512, long_len = 65536 };
    const int64_t slots = max(problem->slots, (int64_t)1);
    const int64_t blocks = problem->kv_heads * divide_up(slots, shape.block_slots);
    // boundary sums take at most about the bytes of k and v, or a quarter of the bytes of q and out
    // if that is more; 1/32 of that for a long sequence
    const int64_t rows = max(problem->kv_len, problem->q_len * (problem->group / 4));
    const int64_t most = 1 + rows / (problem->kv_len < long_len ? 2 : 64) / slots;
    // only long sequences use the high slots, so the blocks of packed ones differ in work
    const int64_t wanted = is_present(&problem->starts) ? packed_blocks : wanted_blocks;
    const int64_t partitions = min(divide_up(wanted, blocks), most);
    return (int32_t)min(partitions, (int64_t)min(shape.most_partitions, lists));
}

static void describe_gradients(const fdma_problem *problem, backward_plan *plan) {
    plan->dout = view_of(&problem->dout);
    plan->dq = view_of(&problem->dq);
    plan->dk = view_of(&problem->dk);
    plan->dv = view_of(&problem->dv);
    plan->dk_carried = view_of(&problem->dk_carried);
    plan->dv_carried = view_of(&problem->dv_carried);
    plan->dbias = numbers_of<float>(&problem->dbias);
    plan->dbias_carried = numbers_of<float>(&problem->dbias_carried);
    plan->dlse = numbers_of<const float>(&problem->dlse);
    plan->dsink_logit = (float *)problem->dsink_logit.data;
    plan->dpairs = pairs_of(&problem->dattn_bias, problem->q_heads);
    plan->accumulate = problem->accumulate;
    plan->add_dbias_carried = problem->add_dbias_carried;
    plan->deterministic = problem->deterministic;
}

static int64_t boundary_rows(const backward_plan *plan) {
    return (int64_t)plan->forward.batch * plan->forward.kv_heads * (plan->partitions - 1) *
           plan->slots;
}

/* The number of queries that share a list. The slot pass stops at the end of a query block whenever
 * a slot changes its key, so longer blocks take less time. On an H200, with random scores and
 * head_dim 128, blocks of 256 queries make backward 1 to 7 % faster, and blocks of 512 queries 11 %
 * if a kv head has one query head. But the slots of keys that leave inside a query block are idle
 * until its end, and the diagonal pass takes the keys that arrive instead. That costs most if every
 * key arrives, as with rising scores: backward then takes 3 to 5 % longer with the numbers of slots
 * below. The batch does not count, because results must not depend on it. */
static int32_t choose_block_queries(const fdma_problem *problem, const backward_shape &shape) {
    const int64_t long_queries = 256, long_slots = 1024, longest_slots = 2048;
    // query blocks of a sequence over all kv heads, as thread blocks of the diagonal pass; with
    // more query heads per kv head each block takes longer, and more blocks are needed
    const int64_t least_blocks = min(max((int64_t)32, 16 * problem->group), (int64_t)128);
    const bool is_rolling = problem->causal && rolls_lists(problem);
    const bool all_arrive = problem->recent > 0;
    const bool is_packed = is_present(&problem->starts); // see seeing_blocks()
    int64_t queries = list_queries;
    if (!is_rolling || all_arrive || is_packed || is_present(&problem->attn_mask))
        return list_queries;
    if (problem->slots >= long_slots)
        queries = long_queries;
    if (problem->slots >= longest_slots && problem->group == 1)
        queries = most_block_queries;
    queries = min(queries, (int64_t)shape.most_queries);
    const bool has_blocks = problem->kv_heads * problem->q_len >= least_blocks * queries;
    return has_blocks ? (int32_t)queries : (int32_t)list_queries;
}

backward_plan fdma_cuda_plan_backward(const fdma_problem *problem, fdma_arena *arena,
                                      const backward_shape &shape) {
    backward_plan plan = {};
    plan.slot_per_key = shape.slot_per_key;
    plan.forward = plan.slot_per_key
                       ? fdma_cuda_plan_kept(problem, arena)
                       : fdma_cuda_plan_lists(problem, arena, choose_block_queries(problem, shape));
    describe_gradients(problem, &plan);
    const forward_plan *const forward = &plan.forward;
    const int64_t heads = problem->batch * problem->q_heads;
    plan.is_rolling = forward->list_tile > 0;
    const bool is_listed = problem->selected && problem->slots < problem->kv_len;
    // a list that packed sequences share holds the kept keys of all of them
    const bool has_slots =
        is_listed && !plan.slot_per_key && (plan.is_rolling || !is_present(&problem->starts));
    plan.slots =
        (int32_t)round_up(has_slots ? problem->slots : problem->kv_len, (int64_t)shape.block_slots);
    plan.rows = (int32_t)round_up(problem->q_len, list_queries);
    const int32_t lists = forward->lists > 0 ? forward->lists : 1;
    plan.partitions =
        plan.is_rolling && plan.slots > 0 ? count_partitions(problem, shape, lists) : 1;
    plan.partition_lists = (int32_t)divide_up(lists, plan.partitions);
    plan.partitions = (int32_t)divide_up(lists, plan.partition_lists);
    plan.row_lse = take<float>(arena, heads * plan.rows);
    plan.row_delta = take<float>(arena, heads * plan.rows);
    plan.empty_blocks = take<uint8_t>(arena, heads * plan.rows / empty_rows);
    if (plan.partitions > 1) {
        plan.boundary.dk = take<float>(arena, boundary_rows(&plan) * forward->head_dim);
        plan.boundary.dv = take<float>(arena, boundary_rows(&plan) * forward->head_dim);
        plan.boundary.dbias = take<float>(arena, boundary_rows(&plan));
        // adjacent in the workspace
        const size_t before =
            (size_t)((uintptr_t)plan.boundary.dbias - (uintptr_t)plan.boundary.dk);
        plan.cleared[0] = cleared_floats(plan.boundary.dk,
                                         (int64_t)(before / sizeof(float)) + boundary_rows(&plan));
    }
    return plan;
}

void fdma_cuda_plan_pairs(const fdma_problem *problem, pair_writing writing, fdma_arena *arena,
                          backward_plan *plan) {
    const fdma_tensor *const pairs = &problem->dattn_bias;
    const int64_t *const stride = pairs->stride;
    if (!is_present(pairs))
        return;
    plan->dpair_writing = writing;
    const size_t size = fdma_dtype_size(pairs->dtype);
    const size_t strides = (size_t)(stride[0] | stride[1] | stride[2]) * size;
    plan->aligned_pairs = (uintptr_t)pairs->data % sizeof(uint4) == 0 &&
                          (strides | (size_t)pairs->shape[3] * size) % sizeof(uint4) == 0 &&
                          stride[3] == 1;
    if (!has_pair_sums(problem, plan))
        return;
    const fdma_tensor sums =
        dense_pairs(pairs, take<float>(arena, count_elements(pairs)), FDMA_FLOAT32);
    plan->dpairs = pairs_of(&sums, problem->q_heads);
}

void fdma_cuda_take_key_sums(const fdma_problem *problem, int32_t channels, fdma_arena *arena,
                             backward_plan *plan) {
    plan->sum_channels = channels;
    const int64_t floats = problem->batch * problem->kv_heads * problem->kv_len * 2 * channels;
    plan->key_sums = take<float>(arena, floats);
    plan->cleared[0] = cleared_floats(plan->key_sums, floats);
}

static fdma_status launch_begin_rows(const fdma_problem *problem, const backward_plan *plan,
                                     launch_start start) {
    const int64_t key_heads = problem->batch * problem->kv_heads;
    const int64_t key_blocks = divide_up(problem->kv_len, (int64_t)list_queries);
    const int64_t row_blocks = plan->rows / list_queries;
    const int64_t blocks = key_blocks + problem->group * row_blocks;
    const bool aligned = is_aligned(plan->dout) && is_aligned(plan->forward.out);
    if (blocks == 0 || key_heads == 0)
        return FDMA_OK;
    return launch("backward",
                  problem->dtype == FDMA_FLOAT16 ? begin_rows<__half> : begin_rows<__nv_bfloat16>,
                  {grid_of(blocks, key_heads), dim3(row_threads), 0, start}, problem, *plan,
                  fdma_cuda_describe_selection(problem, &plan->forward), (int32_t)key_blocks,
                  (int32_t)row_blocks, aligned, has_aligned_sums(*plan));
}

fdma_status fdma_cuda_begin_backward(const fdma_problem *problem, const backward_plan *plan) {
    const bool has_rows = plan->rows > 0 && problem->batch > 0;
    // write_lists and list_kept start later kernels only after they have waited for the work before
    // this call
    const bool lists = has_rows && (plan->is_rolling || plan->slot_per_key) && problem->kv_len > 0;
    FDMA_TRY(clear_dattn_bias(problem, plan));
    if (has_rows)
        FDMA_TRY(fdma_cuda_build_lists(problem, &plan->forward));
    FDMA_TRY(launch_begin_rows(problem, plan, lists ? start_early : start_after));
    if (plan->dsink_logit != NULL)
        FDMA_TRY(launch("backward", sum_sinks,
                        {dim3((uint32_t)problem->q_heads), dim3(row_threads)}, problem, *plan));
    return FDMA_OK;
}

/* A row gets a lane for each of its vectors, rounded up to 8, 16 or 32. */
template <typename element>
static fdma_status launch_add_boundaries(const fdma_problem *problem, const backward_plan &plan) {
    const int lanes = problem->head_dim <= 8 * vec_channels    ? 8
                      : problem->head_dim <= 16 * vec_channels ? 16
                                                               : 32;
    const auto kernel = lanes == 8    ? add_boundaries<element, 8>
                        : lanes == 16 ? add_boundaries<element, 16>
                                      : add_boundaries<element, 32>;
    const int64_t groups = (int64_t)(plan.partitions - 1) * plan.slots * 2;
    const int64_t blocks = divide_up(groups * lanes, (int64_t)boundary_threads);
    return launch("backward", kernel,
                  {grid_of(blocks, problem->batch * problem->kv_heads), dim3(boundary_threads), 0,
                   start_early},
                  problem, plan, has_aligned_sums(plan));
}

fdma_status fdma_cuda_end_backward(const fdma_problem *problem, const backward_plan *plan) {
    const int64_t key_heads = problem->batch * problem->kv_heads;
    const bool is_half = problem->dtype == FDMA_FLOAT16;
    FDMA_TRY(round_dattn_bias(problem, plan));
    if (plan->rows == 0 || problem->batch == 0)
        return FDMA_OK;
    if (plan->key_sums != NULL)
        return problem->kv_len == 0 || key_heads == 0
                   ? FDMA_OK
                   : launch("backward",
                            is_half ? add_key_sums<__half> : add_key_sums<__nv_bfloat16>,
                            over_rows(problem->kv_len, key_heads), problem, *plan,
                            has_aligned_sums(*plan));
    if (plan->partitions == 1)
        return FDMA_OK;
    return is_half ? launch_add_boundaries<__half>(problem, *plan)
                   : launch_add_boundaries<__nv_bfloat16>(problem, *plan);
}
