/* Backward on Hopper (compute capability 9.0 alone), for head_dim up to FDMA_HEAD_DIM, in two
 * passes: the slot pass takes the keys that are live at the first position of a query block, the
 * diagonal pass those that arrive inside one. In a thread block one warpgroup loads keys and
 * queries (backward_producer) and two multiply (backward_consumer). */
#include "cuda/backward/sm90/consumer.cuh"
#include "cuda/backward/sm90/producer.cuh"

static constexpr int most_partitions = 32;

template <class config> __device__ static void init_barriers(backward_memory<config> *memory) {
    const int warps = config::consumers * warpgroup_warps;
    for (int i = 0; i < config::stages; i++) {
        mbarrier_init(&memory->step_ready[i], warpgroup_threads + 1); // and its header
        mbarrier_init(&memory->step_free[i], warps);
    }
    for (int i = 0; i < 2; i++)
        mbarrier_init(&memory->ds_ready[i], config::consumers);
    mbarrier_init(&memory->slots_ready, warpgroup_threads);
    mbarrier_init(&memory->keys_ready, warpgroup_threads);
    mbarrier_init(&memory->keys_free, warps);
    for (int i = 0; i < config::consumers; i++)
        memory->held_semaphore[i] = -1;
    fence_mbarrier_init();
}

template <class config>
__global__ void __launch_bounds__(config::threads, 1)
    differentiate(const __grid_constant__ backward_plan plan,
                  const __grid_constant__ backward_pass pass, const float softcap_scale) {
    extern __shared__ __align__(1024) uint8_t bytes[];
    backward_memory<config> *const memory = (backward_memory<config> *)bytes;
    // __shfl_sync tells the compiler that all threads of a warp have the same value
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / warpgroup_threads, 0);
    if (threadIdx.x == 0) {
        init_barriers(memory);
        memory->work = find_work<config>(plan, pass);
    }
    for (int i = threadIdx.x; i < (int)sizeof memory->dbias / 4; i += config::threads)
        ((float *)memory->dbias)[i] = 0;
    __syncthreads();
    if (warpgroup == 0) {
        setmaxnreg_dec<config::producer_registers>();
        backward_producer<config> self;
        self.memory = memory;
        self.run(plan, pass);
    } else {
        setmaxnreg_inc<config::consumer_registers>();
        backward_consumer<config> self;
        self.memory = memory;
        self.softcap_scale = softcap_scale;
        self.index = __shfl_sync(~0u, threadIdx.x / warpgroup_threads, 0) - 1;
        self.run(plan, pass);
    }
}

/* Writes dq from dq_sum, which is laid out as accumulators. A thread block takes a tile of 64
 * queries. */
template <class config>
__global__ void __launch_bounds__(warpgroup_threads)
    finish_dq(const __grid_constant__ backward_plan plan,
              const __grid_constant__ backward_pass pass) {
    using element = typename config::element;
    const forward_plan &forward = plan.forward;
    const int32_t tile = blockIdx.x, lane = threadIdx.x % 4, head_tile = tile % pass.tiles;
    const int32_t b = tile / pass.tiles / forward.q_heads, h = tile / pass.tiles % forward.q_heads;
    const float4 *const sums =
        (const float4 *)pass.dq_sum + (int64_t)tile * (config::q_rows * config::channels / 4);
    element *const rows = (element *)plan.dq.data + b * plan.dq.batch + h * plan.dq.head;
#pragma unroll
    for (int c = 0; c < config::channels; c += quad_channels) {
        const int channel = c + 8 * lane;
        float4 four[4];
#pragma unroll
        for (int n = 0; n < 4; n++)
            four[n] = sums[(c / 8 + n) * warpgroup_threads + threadIdx.x];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int32_t query =
                head_tile * config::q_rows + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * i;
            uint32_t words[4];
#pragma unroll
            for (int n = 0; n < 4; n++)
                words[n] = element_type<element>::pack((i ? four[n].z : four[n].x) * forward.scale,
                                                       (i ? four[n].w : four[n].y) * forward.scale);
            transpose_quad(words);
            if (query >= forward.q_len || channel >= forward.head_dim)
                continue;
            uint4 *const to = (uint4 *)(rows + query * plan.dq.row + channel);
            if (plan.accumulate) {
                const uint4 old = *to;
                words[0] = add_pairs<element>(old.x, words[0]);
                words[1] = add_pairs<element>(old.y, words[1]);
                words[2] = add_pairs<element>(old.z, words[2]);
                words[3] = add_pairs<element>(old.w, words[3]);
            }
            *to = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
}

/* Takes from the arena what this kernel needs beside the plan. */
static backward_pass plan_pass(const backward_plan *plan, int32_t channels, int32_t consumers,
                               fdma_arena *arena) {
    backward_pass pass = {};
    const int64_t heads = (int64_t)plan->forward.batch * plan->forward.q_heads;
    pass.tiles = plan->rows / q_tile_rows;
    pass.dq_sum = (float *)fdma_arena_take(arena, (size_t)(heads * plan->rows * channels) *
                                                      sizeof *pass.dq_sum);
    if (plan->deterministic)
        pass.dq_semaphore = (uint32_t *)fdma_arena_take(
            arena, (size_t)(heads * pass.tiles * consumers) * sizeof *pass.dq_semaphore);
    return pass;
}

template <class config>
static backward_plan plan_with(const fdma_problem *problem, fdma_arena *arena,
                               backward_pass *pass) {
    const backward_shape shape = {config::slots, most_partitions, 0};
    const backward_plan plan = fdma_cuda_plan_backward(problem, arena, shape);
    *pass = plan_pass(&plan, config::channels, config::consumers, arena);
    return plan;
}

/* Clears a buffer that has tile_bytes bytes for each tile of each head. */
static fdma_status clear_tiles(const fdma_problem *problem, const backward_plan *plan,
                               const backward_pass *pass, void *buffer, size_t tile_bytes) {
    const size_t tiles = (size_t)plan->forward.batch * plan->forward.q_heads * pass->tiles;
    return check_cuda("backward", cudaMemsetAsync(buffer, 0, tiles * tile_bytes,
                                                  (cudaStream_t)problem->exec.stream));
}

template <class config>
static fdma_status run_pass(const fdma_problem *problem, const backward_plan *plan,
                            const backward_pass *pass, int64_t ranges) {
    using memory = backward_memory<config>;
    static_assert(sizeof(memory) <= memory::most_bytes, "too many stages for shared memory");
    const int64_t heads = (int64_t)plan->forward.batch * plan->forward.kv_heads;
    launch_shape shape;
    shape.grid = dim3((unsigned)(pass->slot_blocks * heads * ranges));
    shape.block = dim3(config::threads);
    shape.shared_bytes = sizeof(memory);
    const float softcap_scale =
        plan->forward.softcap == 0 ? 0 : plan->forward.scale / plan->forward.softcap;
    if (shape.grid.x == 0)
        return FDMA_OK;
    if (pass->dq_semaphore != NULL) // each pass counts from 0
        FDMA_TRY(clear_tiles(problem, plan, pass, pass->dq_semaphore,
                             config::consumers * sizeof *pass->dq_semaphore));
    return launch("backward", differentiate<config>, shape, problem, *plan, *pass, softcap_scale);
}

/* How many query blocks a thread block of the diagonal pass takes, one after the other. With one
 * query block it would mostly wait; with several, the queries of the next one are loaded while the
 * current one is multiplied, and the keys while the current gradients are written. As many as leave
 * each multiprocessor `waves` thread blocks, so that the load evens out. */
static int32_t count_blocks_in_row(const fdma_problem *problem, const backward_plan *plan,
                                   int32_t slot_blocks) {
    const int64_t waves = 4;
    const int64_t wanted = waves * fdma_cuda_device(problem->exec.device)->multiprocessors;
    const int64_t heads = (int64_t)plan->forward.batch * plan->forward.kv_heads;
    const int64_t query_blocks = heads * slot_blocks * plan->forward.lists / wanted;
    return (int32_t)(query_blocks > 1 ? query_blocks : 1);
}

template <class config> static fdma_status run_with(const fdma_problem *problem) {
    fdma_arena arena = fdma_arena_of(problem);
    backward_pass pass;
    const backward_plan plan = plan_with<config>(problem, &arena, &pass);
    FDMA_TRY(fdma_cuda_begin_backward(problem, &plan));
    const int64_t tiles = (int64_t)plan.forward.batch * plan.forward.q_heads * pass.tiles;
    if (tiles == 0)
        return FDMA_OK;
    FDMA_TRY(clear_tiles(problem, &plan, &pass, pass.dq_sum,
                         config::q_rows * config::channels * sizeof *pass.dq_sum));
    pass.slot_blocks = plan.slots / config::slots;
    FDMA_TRY(run_pass<config>(problem, &plan, &pass, plan.partitions));
    if (plan.is_rolling) {
        pass.is_diagonal = true;
        pass.slot_blocks = (int32_t)divide_up(list_queries - 1, config::slots);
        pass.query_blocks = count_blocks_in_row(problem, &plan, pass.slot_blocks);
        FDMA_TRY(run_pass<config>(problem, &plan, &pass,
                                  divide_up(plan.forward.lists, pass.query_blocks)));
    }
    launch_shape shape;
    shape.grid = dim3((unsigned)tiles);
    shape.block = dim3(warpgroup_threads);
    FDMA_TRY(launch("backward", finish_dq<config>, shape, problem, plan, pass));
    return fdma_cuda_end_backward(problem, &plan);
}

template <typename element> static fdma_status run_elements(const fdma_problem *problem) {
    if (problem->softcap != 0)
        return run_with<backward_config<element, FDMA_HEAD_DIM, true>>(problem);
    return run_with<backward_config<element, FDMA_HEAD_DIM, false>>(problem);
}

static fdma_status run(const fdma_problem *problem) {
    if (problem->dtype == FDMA_FLOAT16)
        return run_elements<__half>(problem);
    return run_elements<__nv_bfloat16>(problem);
}

static size_t workspace(const fdma_problem *problem) {
    fdma_arena arena = {};
    backward_pass pass;
    plan_with<backward_config<__half, FDMA_HEAD_DIM, false>>(problem, &arena, &pass);
    return fdma_arena_size(&arena);
}

/* A gather multiplies the index of a row by its stride in bytes, both as uint32_t. */
static bool is_near(const fdma_tensor *tensor) { return tensor->stride[1] <= INT32_MAX; }

static const char *refuses(const fdma_problem *problem) {
    enum { smallest = 64, most_blocks = INT32_MAX / 4 };
    const fdma_tensor *const tensors[] = {&problem->q,  &problem->k,  &problem->v, &problem->dout,
                                          &problem->dq, &problem->dk, &problem->dv};
    const char *const reason = fdma_cuda_refuses_backward(problem);
    if (reason != NULL)
        return reason;
    if (problem->head_dim > FDMA_HEAD_DIM)
        return "a larger head_dim than its own";
    if (FDMA_HEAD_DIM > smallest && problem->head_dim <= FDMA_HEAD_DIM / 2)
        return "a head_dim that a smaller shape takes";
    for (size_t i = 0; i < sizeof tensors / sizeof tensors[0]; i++) {
        if (!is_aligned(view_of(tensors[i])))
            return "rows that do not begin at multiples of 16 bytes";
        if (!is_near(tensors[i]))
            return "rows more than 2^31 elements apart";
    }
    const int64_t longest = problem->q_len > problem->kv_len ? problem->q_len : problem->kv_len;
    if (problem->batch * problem->q_heads > most_blocks / (longest / q_tile_rows + 1))
        return "more than 2^29 tiles of queries or keys";
    return fdma_refuses_but_sm90a(problem);
}

static const fdma_kernel kernels[] = {{FDMA_POINT_NAME("cuda/sm90/d", FDMA_HEAD_DIM),
                                       operation_backward, fdma_missing_sm90a, refuses, workspace,
                                       run, true}};

extern "C" const kernel_table FDMA_POINT_TABLE(fdma_cuda_sm90_backward_d, FDMA_HEAD_DIM) = {
    kernels, sizeof kernels / sizeof kernels[0]};
