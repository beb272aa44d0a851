/* Forward on Hopper (compute capability 9.0 alone), for head_dim up to FDMA_HEAD_DIM: a persistent
 * block of threads on each multiprocessor, in which one warpgroup gathers k and v (forward_producer)
 * and two multiply (forward_consumer). Dense attention is the same with the list 0, 1, 2, ...
 * Source: FlashAttention-3, arXiv:2407.08608, for the roles and their overlap. */
#include "cuda/sm90/forward_consumer.cuh"
#include "cuda/sm90/forward_producer.cuh"

template <class config> __device__ static void init_barriers(forward_memory<config> *memory) {
    const int warps = config::consumers * warpgroup_warps;
    for (int i = 0; i < config::q_buffers; i++) {
        mbarrier_init(&memory->q_full[i], warpgroup_threads + 1); // and the tile itself
        mbarrier_init(&memory->q_empty[i], warps);
    }
    for (int i = 0; i < config::buffers; i++) {
        mbarrier_init(&memory->kv_full[i], warpgroup_threads);
        mbarrier_init(&memory->kv_empty[i], warps);
    }
    for (int i = 0; i < config::notes; i++) {
        mbarrier_init(&memory->notes_full[i], warpgroup_warps);
        mbarrier_init(&memory->notes_empty[i], warps);
    }
    fence_mbarrier_init();
}

template <class config>
__global__ void __launch_bounds__(config::threads, 1)
    attend(const __grid_constant__ forward_plan plan, const tile_order order) {
    extern __shared__ __align__(1024) uint8_t bytes[];
    forward_memory<config> *const memory = (forward_memory<config> *)bytes;
    // the same for all threads of a warp, which the compiler cannot know
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / warpgroup_threads, 0);
    if (threadIdx.x == 0)
        init_barriers(memory);
    __syncthreads();
    if (warpgroup == 0) {
        setmaxnreg_dec<config::producer_registers>();
        producer<config> self;
        self.memory = memory;
        self.order = order;
        self.warp = threadIdx.x / 32;
        self.own_row = self.warp * config::group_keys + threadIdx.x % config::group_keys;
        self.run(plan);
    } else {
        setmaxnreg_inc<config::consumer_registers>();
        consumer<config> self;
        self.memory = memory;
        self.order = order;
        self.index = warpgroup - 1;
        self.run(plan);
    }
}

/* As many heads together as have the keys of one position, or all of them if dense, in L2. */
template <class config> static tile_order order_of(const forward_plan *plan) {
    const int64_t l2_bytes = 32 << 20; // of 50 MB
    const int64_t keys = plan->count == NULL ? plan->kv_len : plan->list_tile;
    const int64_t fitting = l2_bytes / (2 * config::row_bytes * (keys + 1));
    tile_order order;
    order.tiles = (plan->q_len * plan->group + config::rows - 1) / config::rows;
    order.heads = plan->batch * plan->kv_heads;
    order.together = (int32_t)(fitting < 1 ? 1 : fitting < order.heads ? fitting : order.heads);
    return order;
}

template <class config>
static fdma_status attend_with(const fdma_problem *problem, const forward_plan *plan) {
    const tile_order order = order_of<config>(plan);
    const int64_t tiles = (int64_t)order.tiles * order.heads;
    const int64_t blocks = fdma_cuda_facts(problem->exec.device)->multiprocessors;
    launch_shape shape;
    shape.grid = dim3((unsigned)(tiles < blocks ? tiles : blocks));
    shape.block = dim3(config::threads);
    shape.shared_bytes = sizeof(forward_memory<config>);
    return tiles == 0 ? FDMA_OK : launch("forward", attend<config>, shape, problem, *plan, order);
}

static fdma_status attend_plan(const fdma_problem *problem, const forward_plan *plan) {
    if (problem->dtype == FDMA_FLOAT16)
        return attend_with<forward_config<__half, FDMA_HEAD_DIM>>(problem, plan);
    return attend_with<forward_config<__nv_bfloat16, FDMA_HEAD_DIM>>(problem, plan);
}

#define TEXT_OF(number) #number
#define ROW_NAME(head_dim) "cuda/sm90/d" TEXT_OF(head_dim)
#define JOIN(name, head_dim) name##head_dim
#define TABLE_NAME(name, head_dim) JOIN(name, head_dim)

/* Fewer channels belong to the next smaller point. */
static constexpr int smaller_dim = FDMA_HEAD_DIM == 64 ? 0 : FDMA_HEAD_DIM == 128 ? 64 : 128;

static bool is_aligned(const fdma_tensor *tensor) {
    const int64_t strides = tensor->stride[0] | tensor->stride[1] | tensor->stride[2];
    return (uintptr_t)tensor->data % 16 == 0 && strides % 8 == 0;
}

static const char *refuses(const fdma_problem *problem) {
    const char *const refused = fdma_cuda_refuses_plan(problem);
    if (refused != NULL)
        return refused;
    if (problem->head_dim > FDMA_HEAD_DIM || problem->head_dim <= smaller_dim)
        return "this head_dim";
    if (problem->q_len <= 16)
        return "few queries, for which there is a faster kernel";
    if (!is_aligned(&problem->q) || !is_aligned(&problem->k) || !is_aligned(&problem->v) ||
        !is_aligned(&problem->out))
        return "rows that are not aligned to 16 bytes";
    return fdma_refuses_but_sm90a(problem);
}

static size_t workspace(const fdma_problem *problem) {
    fdma_arena arena = {};
    fdma_cuda_plan_forward(problem, &arena);
    return fdma_arena_size(&arena);
}

static fdma_status run(const fdma_problem *problem) {
    fdma_arena arena = fdma_arena_of(problem);
    const forward_plan plan = fdma_cuda_plan_forward(problem, &arena);
    FDMA_TRY(fdma_cuda_build_lists(problem, &plan));
    return attend_plan(problem, &plan);
}

static const kernel_row rows[] = {
    {ROW_NAME(FDMA_HEAD_DIM), operation_forward, fdma_missing_sm90a, refuses, workspace, run, true},
};

extern "C" const kernel_table TABLE_NAME(fdma_cuda_sm90_d,
                                         FDMA_HEAD_DIM) = {rows, sizeof rows / sizeof rows[0]};
