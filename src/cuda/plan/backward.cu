/* What stands around the passes of a backward call (device/backward.cuh), on any device from
 * compute capability 8.0: the workspace, facts of rows, zeros, carries, dq out of float32 sums.
 *
 * Source: arXiv:2205.14135, algorithm 4; docs/algorithm.md, backward. */
#include "cuda/device/chunk.cuh"
#include "cuda/device/softmax.cuh"
#include "cuda/plan/backward.cuh"

static constexpr int carry_threads = 128;

/* lse and delta of rows, row_lanes lanes a row. */
template <typename element>
__global__ void __launch_bounds__(row_threads)
    find_row_facts(const backward_plan plan, const bool aligned) {
    const forward_plan &forward = plan.forward;
    const int64_t head = head_of_block(), b = head / forward.q_heads, h = head % forward.q_heads;
    const int32_t i = blockIdx.x * block_rows + threadIdx.x / row_lanes;
    const int32_t lane = threadIdx.x % row_lanes;
    if (head >= (int64_t)forward.batch * forward.q_heads)
        return;
    const bool there = i < forward.q_len;
    const float lse =
        there ? forward.lse[b * forward.lse_batch + h * forward.lse_head + i] : -INFINITY;
    const bool empty = lse == -INFINITY; // NaN is not
    float delta = 0;
    if (there) { // before it is known whether the row is empty, which takes as long
        const element *const dout = row_of<element>(plan.dout, head, forward.q_heads, i);
        const element *const out = row_of<element>(forward.out, head, forward.q_heads, i);
#pragma unroll 2
        for (int32_t d = lane * chunk; d < forward.head_dim; d += row_lanes * chunk) {
            float x[chunk], y[chunk];
            load_chunk(x, dout + d, aligned);
            load_chunk(y, out + d, aligned);
#pragma unroll
            for (int n = 0; n < chunk; n++)
                delta = fmaf(x[n], y[n], delta);
        }
    }
    delta = row_sum(delta);
    if (lane != 0)
        return;
    if (!empty && plan.dlse != nullptr)
        delta -= plan.dlse[b * plan.dlse_batch + h * plan.dlse_head + i];
    plan.row_lse[head * plan.rows + i] = empty ? INFINITY : lse * log2_e;
    plan.row_delta[head * plan.rows + i] = empty ? 0 : delta;
}

/* Zeros in dk and dv, where they do not accumulate, and in dbias; row_lanes lanes a key. */
__global__ void __launch_bounds__(row_threads)
    clear_keys(const backward_plan plan, const bool aligned) {
    const forward_plan &forward = plan.forward;
    const int64_t head = head_of_block();
    const int32_t j = blockIdx.x * block_rows + threadIdx.x / row_lanes;
    const int32_t lane = threadIdx.x % row_lanes;
    if (head >= (int64_t)forward.batch * forward.kv_heads || j >= forward.kv_len)
        return;
    if (plan.dbias != nullptr && lane == 0)
        plan.dbias[head / forward.kv_heads * plan.dbias_batch +
                   head % forward.kv_heads * plan.dbias_head + j] = 0;
    if (plan.accumulate)
        return;
    const float zeros[chunk] = {};
    __half *const dk = row_of<__half>(plan.dk, head, forward.kv_heads, j);
    __half *const dv = row_of<__half>(plan.dv, head, forward.kv_heads, j);
    for (int32_t d = lane * chunk; d < forward.head_dim; d += row_lanes * chunk) {
        store_chunk(dk + d, zeros, aligned);
        store_chunk(dv + d, zeros, aligned);
    }
}

/* dq of the sums in float32; row_lanes lanes a row. */
template <typename element>
__global__ void __launch_bounds__(row_threads)
    round_queries(const backward_plan plan, const bool aligned) {
    const forward_plan &forward = plan.forward;
    const int64_t head = head_of_block();
    const int32_t i = blockIdx.x * block_rows + threadIdx.x / row_lanes;
    if (head >= (int64_t)forward.batch * forward.q_heads || i >= forward.q_len)
        return;
    element *const dq = row_of<element>(plan.dq, head, forward.q_heads, i);
    const float *const from = plan.dq_sum + (head * plan.rows + i) * plan.sum_dim;
    for (int32_t d = threadIdx.x % row_lanes * chunk; d < forward.head_dim;
         d += row_lanes * chunk) {
        float sum[chunk], old[chunk] = {};
        *(float4 *)&sum[0] = *(const float4 *)&from[d];
        *(float4 *)&sum[4] = *(const float4 *)&from[d + 4];
        if (plan.accumulate)
            load_chunk(old, dq + d, aligned);
#pragma unroll
        for (int x = 0; x < chunk; x++)
            sum[x] = fmaf(sum[x], forward.scale, old[x]);
        store_chunk(dq + d, sum, aligned);
    }
}

/* Adds eight channels of a key's carries. */
template <typename element>
__device__ static inline void add_chunk(element *to, float (&sum)[chunk], bool aligned) {
    float old[chunk];
    load_chunk(old, to, aligned);
#pragma unroll
    for (int x = 0; x < chunk; x++) {
        old[x] += sum[x];
        sum[x] = 0;
    }
    store_chunk(to, old, aligned);
}

/* Adds eight channels of `from` to a sum. */
__device__ static inline void gather_chunk(float (&sum)[chunk], const float *from) {
#pragma unroll
    for (int x = 0; x < chunk; x++)
        sum[x] += from[x];
}

/* A warp a slot, a lane eight channels: adds up the carries of a key from border to border, and at
 * the last one where it lives adds them to its gradients. */
template <typename element>
__global__ void __launch_bounds__(carry_threads)
    add_carries(const backward_plan plan, const bool aligned) {
    const forward_plan &forward = plan.forward;
    const int64_t head = head_of_block();
    const int32_t slot = blockIdx.x * (carry_threads / 32) + threadIdx.x / 32;
    const int32_t lane = threadIdx.x % 32, d = lane * chunk;
    if (head >= (int64_t)forward.batch * forward.kv_heads || slot >= plan.slots)
        return;
    float dk[chunk] = {}, dv[chunk] = {}, dbias = 0;
    int32_t key = key_in_slot(plan, head, plan.part_lists, slot);
    for (int32_t border = 1; border < plan.parts; border++) {
        const bool is_last = border + 1 == plan.parts;
        const int32_t next =
            is_last ? -1 : key_in_slot(plan, head, (border + 1) * plan.part_lists, slot);
        const int64_t row = carry_row(plan, head, border, slot);
        if (is_key(key, forward.kv_len)) {
            if (d < forward.head_dim) {
                gather_chunk(dk, plan.carry.dk + row * forward.head_dim + d);
                gather_chunk(dv, plan.carry.dv + row * forward.head_dim + d);
            }
            dbias += plan.carry.dbias[row];
        }
        if (is_key(key, forward.kv_len) && next != key) {
            if (d < forward.head_dim) {
                add_chunk(row_of<element>(plan.dk, head, forward.kv_heads, key) + d, dk, aligned);
                add_chunk(row_of<element>(plan.dv, head, forward.kv_heads, key) + d, dv, aligned);
            }
            if (plan.dbias != nullptr && lane == 0)
                plan.dbias[head / forward.kv_heads * plan.dbias_batch +
                           head % forward.kv_heads * plan.dbias_head + key] += dbias;
            dbias = 0;
        }
        key = next;
    }
}

const char *fdma_cuda_refuses_backward(const fdma_problem *problem) {
    const char *const reason = fdma_cuda_refuses_plan(problem);
    if (reason != NULL)
        return reason;
    if (problem->dlse.dtype == FDMA_FLOAT64 || problem->dbias.dtype == FDMA_FLOAT64)
        return "float64 dlse or dbias, supported: float32";
    return fdma_refuses_before_sm80(problem);
}

static int64_t round_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

/* Parts of time: what fills a large device with blocks, of one sequence, so that results do not
 * depend on the batch; as long as carries stay small beside k and v. */
static int32_t count_parts(const fdma_problem *problem, const backward_shape &shape,
                           int32_t lists) {
    enum { wanted_blocks = 128, long_len = 65536 };
    const int64_t window = problem->window > 0 ? problem->window : 1;
    const int64_t blocks =
        problem->kv_heads * (round_up(window, shape.block_slots) / shape.block_slots);
    // bytes of carries in those of k and v: short sequences may have as many, long ones 1/32
    const int64_t share = problem->kv_len < long_len ? 2 : 64;
    int64_t parts = (wanted_blocks + blocks - 1) / blocks;
    const int64_t most = 1 + problem->kv_len / (share * window);
    parts = parts < most ? parts : most;
    parts = parts < shape.most_parts ? parts : shape.most_parts;
    return (int32_t)(parts < lists ? parts : lists);
}

static void describe_gradients(const fdma_problem *problem, backward_plan *plan) {
    plan->dout = view_of(&problem->dout);
    plan->dq = view_of(&problem->dq);
    plan->dk = view_of(&problem->dk);
    plan->dv = view_of(&problem->dv);
    plan->dbias = (float *)problem->dbias.data;
    plan->dbias_batch = problem->dbias.stride[0];
    plan->dbias_head = problem->dbias.stride[1];
    plan->dlse = (const float *)problem->dlse.data;
    plan->dlse_batch = problem->dlse.stride[0];
    plan->dlse_head = problem->dlse.stride[1];
    plan->accumulate = problem->accumulate;
    plan->deterministic = problem->deterministic;
}

static int64_t carry_rows(const backward_plan *plan) {
    return (int64_t)plan->forward.batch * plan->forward.kv_heads * (plan->parts - 1) * plan->slots;
}

static float *take_floats(fdma_arena *arena, int64_t count) {
    return (float *)fdma_arena_take(arena, (size_t)count * sizeof(float));
}

backward_plan fdma_cuda_plan_backward(const fdma_problem *problem, fdma_arena *arena,
                                      const backward_shape &shape) {
    backward_plan plan = {};
    plan.forward = fdma_cuda_plan_forward(problem, arena);
    describe_gradients(problem, &plan);
    const forward_plan *const forward = &plan.forward;
    const int64_t heads = problem->batch * problem->q_heads;
    plan.is_rolling = forward->list_tile > 0;
    const bool is_listed = problem->selected && problem->window < problem->kv_len;
    plan.slots = (int32_t)round_up(is_listed ? problem->window : problem->kv_len,
                                   (int64_t)shape.block_slots);
    plan.rows = (int32_t)round_up(problem->q_len, list_queries);
    plan.sum_dim = shape.sum_dim;
    const int32_t lists = forward->lists > 0 ? forward->lists : 1;
    plan.parts = plan.is_rolling && plan.slots > 0 ? count_parts(problem, shape, lists) : 1;
    plan.part_lists = (lists + plan.parts - 1) / plan.parts;
    plan.parts = (lists + plan.part_lists - 1) / plan.part_lists;
    plan.row_lse = take_floats(arena, heads * plan.rows);
    plan.row_delta = take_floats(arena, heads * plan.rows);
    if (shape.sum_dim > 0)
        plan.dq_sum = take_floats(arena, heads * plan.rows * shape.sum_dim);
    if (plan.parts > 1) {
        plan.carry.dk = take_floats(arena, carry_rows(&plan) * forward->head_dim);
        plan.carry.dv = take_floats(arena, carry_rows(&plan) * forward->head_dim);
        plan.carry.dbias = take_floats(arena, carry_rows(&plan));
    }
    return plan;
}

static fdma_status clear_floats(const fdma_problem *problem, float *at, int64_t count) {
    if (at == NULL || count == 0)
        return FDMA_OK;
    return check_cuda("backward", cudaMemsetAsync(at, 0, (size_t)count * sizeof *at,
                                                  (cudaStream_t)problem->exec.stream));
}

static fdma_status clear_workspace(const fdma_problem *problem, const backward_plan *plan) {
    const int64_t heads = problem->batch * problem->q_heads, carries = carry_rows(plan);
    const int64_t dim = problem->head_dim;
    FDMA_TRY(clear_floats(problem, plan->dq_sum, heads * plan->rows * plan->sum_dim));
    FDMA_TRY(clear_floats(problem, plan->carry.dk, carries * dim));
    FDMA_TRY(clear_floats(problem, plan->carry.dv, carries * dim));
    return clear_floats(problem, plan->carry.dbias, carries);
}

fdma_status fdma_cuda_begin_backward(const fdma_problem *problem, const backward_plan *plan) {
    const int64_t heads = problem->batch * problem->q_heads;
    const int64_t key_heads = problem->batch * problem->kv_heads;
    if (problem->kv_len > 0 && key_heads > 0)
        FDMA_TRY(launch("backward", clear_keys, over_rows(problem->kv_len, key_heads), problem,
                        *plan, is_aligned(plan->dk) && is_aligned(plan->dv)));
    if (plan->rows == 0 || heads == 0)
        return FDMA_OK;
    const bool aligned = is_aligned(plan->dout) && is_aligned(plan->forward.out);
    const bool is_half = problem->dtype == FDMA_FLOAT16;
    FDMA_TRY(clear_workspace(problem, plan));
    FDMA_TRY(launch("backward", is_half ? find_row_facts<__half> : find_row_facts<__nv_bfloat16>,
                    over_rows(plan->rows, heads), problem, *plan, aligned));
    return fdma_cuda_build_lists(problem, &plan->forward);
}

fdma_status fdma_cuda_end_backward(const fdma_problem *problem, const backward_plan *plan) {
    const int64_t heads = problem->batch * problem->q_heads;
    const int64_t key_heads = problem->batch * problem->kv_heads;
    const bool is_half = problem->dtype == FDMA_FLOAT16;
    if (plan->rows == 0 || heads == 0)
        return FDMA_OK;
    if (plan->parts > 1) {
        const int64_t blocks = (plan->slots + carry_threads / 32 - 1) / (carry_threads / 32);
        FDMA_TRY(launch("backward", is_half ? add_carries<__half> : add_carries<__nv_bfloat16>,
                        {grid_of(blocks, key_heads), dim3(carry_threads)}, problem, *plan,
                        is_aligned(plan->dk) && is_aligned(plan->dv)));
    }
    if (plan->dq_sum == NULL)
        return FDMA_OK;
    return launch("backward", is_half ? round_queries<__half> : round_queries<__nv_bfloat16>,
                  over_rows(problem->q_len, heads), problem, *plan, is_aligned(plan->dq));
}
