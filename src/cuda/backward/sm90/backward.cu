/* Backward on Hopper (compute capability 9.0 alone), for head_dim up to FDMA_HEAD_DIM, in two
 * passes: the slot pass takes the keys that are live at the first position of a query block, the
 * diagonal pass those that arrive inside one. If no slot changes its key, the slot pass takes all
 * keys. With attn_mask a single pass takes the lists of kept keys: a thread block has a list, or a
 * part of it, and processes it 128 entries at a time. In a thread block one warpgroup loads keys
 * and queries (backward_producer) and two multiply (backward_consumer). */
#include "cuda/backward/sm90/consumer.cuh"
#include "cuda/backward/sm90/producer.cuh"
#include "cuda/plan/backward_host.cuh"

#include <math.h>

static constexpr int most_partitions = 32;
static constexpr int most_ordered = 1024; // blocks of a head

template <class config>
static __global__ void __launch_bounds__(config::threads, config::blocks)
    differentiate(const __grid_constant__ backward_plan plan,
                  const __grid_constant__ backward_pass pass, const float softcap_scale) {
    extern __shared__ __align__(1024) uint8_t bytes[];
    backward_memory<config> *const memory = (backward_memory<config> *)bytes;
    // __shfl_sync tells the compiler that all threads of a warp have the same value
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / warpgroup_threads, 0);
    griddepcontrol_wait(); // for lists, row statistics and zeros, or for the slot pass
    const backward_work work = find_work<config>(plan, pass);
    if (threadIdx.x == 0) {
        init_barriers(memory);
        memory->work = work;
        if (config::is_listed)
            memory->kept_list = kept_list_of(plan, work);
    }
    find_visits<config>(plan, pass, work, memory->visits);
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

/* The number of query blocks that the n-th block of a head visits in the slot pass. */
__device__ static int32_t count_visits(const backward_plan &plan, int32_t slot_blocks, int32_t n) {
    const int32_t first = n / slot_blocks * plan.partition_lists;
    const int32_t end = min(first + plan.partition_lists, plan.forward.lists);
    const int32_t first_slot = n % slot_blocks * (plan.slots / slot_blocks);
    int32_t visits = 0;
    for (int32_t t = first; t < end; t++)
        visits += list_counts(plan, 0, t).x > first_slot;
    return visits;
}

/* Orders the blocks of a head in the slot pass: blocks that visit the most query blocks come first,
 * so that no multiprocessor still has much to do when the others end. The first head stands for
 * all, because they have the same sequences. By one thread block. */
static __global__ void __launch_bounds__(most_ordered)
    order_blocks(const __grid_constant__ backward_plan plan, const int32_t slot_blocks,
                 int32_t *order) {
    __shared__ int32_t visits[most_ordered];
    const int32_t own = threadIdx.x, blocks = slot_blocks * plan.partitions;
    if (own < blocks)
        visits[own] = count_visits(plan, slot_blocks, own);
    __syncthreads();
    if (own >= blocks)
        return;
    int32_t rank = 0;
    for (int32_t n = 0; n < blocks; n++)
        rank += visits[n] > visits[own] || (visits[n] == visits[own] && n < own);
    order[rank] = own;
}

using encode_map = CUresult (*)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                                const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                                const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/* cuTensorMapEncodeTiled() of the driver. The library is not linked to the driver. */
static fdma_status find_encode_map(const char *what, encode_map *encode) {
    static encode_map found; // a race is harmless: threads find the same address
    if (found == NULL) {
        const unsigned version = 12000; // the CUDA version that introduced the function
        void *function = NULL;
        cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
        FDMA_TRY(check_cuda(what,
                            cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                             version, cudaEnableDefault, &result)));
        FDMA_REQUIRE(result == cudaDriverEntryPointSuccess && function != NULL, FDMA_CUDA_ERROR,
                     "%s: the driver has no cuTensorMapEncodeTiled()", what);
        found = (encode_map)function;
    }
    *encode = found;
    return FDMA_OK;
}

/* True if a tensor map can describe these rows: its strides are below 2^40 bytes, and it may repeat
 * heads and sequences, but not rows. */
static bool has_row_map(const fdma_tensor *tensor) {
    const int64_t end = (int64_t)1 << 39; // of strides, in elements
    for (int axis = 0; axis < 3; axis++)
        if (tensor->shape[axis] > 1 && tensor->stride[axis] >= end)
            return false;
    return tensor->shape[1] <= 1 || tensor->stride[1] > 0;
}

static fdma_status make_row_map(const char *what, const fdma_tensor *tensor, int32_t rows,
                                row_map *made) {
    enum { rank = 4 };
    const int axes[rank] = {3, 1, 2, 0};
    cuuint64_t shape[rank], strides[rank];
    for (int i = 0; i < rank; i++) {
        const int64_t length = tensor->shape[axes[i]], stride = tensor->stride[axes[i]];
        const bool is_there = length > 1 && stride > 0;
        shape[i] = (cuuint64_t)(is_there ? length : 1);
        strides[i] = (cuuint64_t)(is_there ? 2 * stride : vec_bytes);
    }
    shape[0] = (cuuint64_t)tensor->shape[3];
    made->has_heads = shape[2] > 1;
    made->has_batches = shape[3] > 1;
    const cuuint32_t box[rank] = {panel_channels, (cuuint32_t)rows, 1, 1},
                     steps[rank] = {1, 1, 1, 1};
    encode_map encode = NULL;
    FDMA_TRY(find_encode_map(what, &encode));
    const CUresult result =
        encode(&made->map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, rank, tensor->data, shape, strides + 1,
               box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    FDMA_REQUIRE(result == CUDA_SUCCESS, FDMA_CUDA_ERROR,
                 "%s: cuTensorMapEncodeTiled() returned %d", what, (int)result);
    return FDMA_OK;
}

struct backward_task {
    backward_plan plan;
    backward_pass pass;
    int64_t tiles;  // of all heads
    int32_t *order; // see order_blocks(); NULL: not ordered
};

template <class config>
static backward_task lay_out(const fdma_problem *problem, fdma_arena *arena, bool slot_per_key) {
    backward_task task = {};
    task.plan = fdma_cuda_plan_backward(
        problem, arena, {config::slots, most_partitions, config::most_queries, slot_per_key});
    task.pass.tiles = task.plan.rows / q_tile_rows;
    task.pass.pair_factor = 1 / task.plan.forward.scale;
    task.tiles = problem->batch * problem->q_heads * task.pass.tiles;
    const int64_t dq_floats = task.tiles * q_tile_rows * config::channels;
    task.pass.dq_sum = take<float>(arena, dq_floats);
    task.plan.cleared[1] = cleared_floats(task.pass.dq_sum, dq_floats);
    if (is_present(&problem->attn_mask))
        fdma_cuda_take_key_sums(problem, config::channels, arena, &task.plan);
    if (problem->deterministic)
        task.pass.dq_semaphore = take<uint32_t>(arena, task.tiles);
    fdma_cuda_plan_pairs(problem, short_axes_of(problem).any ? pairs_added : pairs_stored, arena,
                         &task.plan);
    task.pass.slot_blocks = task.plan.slots / config::slots;
    const int64_t blocks = (int64_t)task.pass.slot_blocks * task.plan.partitions;
    // with semaphores a block waits for others, which must not start after it
    if (is_present(&problem->starts) && task.plan.is_rolling && !problem->deterministic &&
        blocks <= most_ordered)
        task.order = take<int32_t>(arena, blocks);
    return task;
}

/* Runs a pass with `ranges` thread blocks for each slot block, each with a range of query
 * blocks. */
template <class config>
static fdma_status run_pass(const fdma_problem *problem, const backward_task &task,
                            int64_t ranges) {
    using memory = backward_memory<config>;
    static_assert(sizeof(memory) <= memory::most_bytes, "too many stages for shared memory");
    const forward_plan &forward = task.plan.forward;
    const int64_t blocks = problem->batch * problem->kv_heads * task.pass.slot_blocks * ranges;
    const float softcap_scale =
        forward.softcap == 0 ? 0 : scale_over_cap(forward.scale, forward.softcap);
    if (blocks == 0)
        return FDMA_OK;
    if (task.pass.dq_semaphore != NULL) // each pass counts from 0
        FDMA_TRY(clear("backward", problem, task.pass.dq_semaphore,
                       (size_t)task.tiles * sizeof(uint32_t)));
    return launch("backward", differentiate<config>,
                  {dim3((unsigned)blocks), dim3(config::threads), sizeof(memory), start_early},
                  problem, task.plan, task.pass, softcap_scale);
}

template <class config>
static fdma_status run_slot_pass(const fdma_problem *problem, backward_task task) {
    const backward_plan &plan = task.plan;
    const int64_t slot_blocks = task.pass.slot_blocks;
    task.pass.order = task.order;
    const bool is_packed = plan.forward.sequences.ranges != NULL;
    const bool is_ordered = task.pass.dq_semaphore != NULL;
    if (plan.is_rolling)
        task.pass.visits = is_packed ? ascending : descending;
    else // in order, all slot blocks begin with the last query block, which all of them see
        task.pass.visits = is_packed || !(is_ordered || config::has_pairs) ? by_head : descending;
    if (plan.forward.causal && !plan.is_rolling && plan.partitions == 1 && slot_blocks > 0 &&
        !(is_packed && is_ordered)) // twice the blocks that run at the same time
        task.pass.head_group = (int32_t)divide_up(
            (int64_t)2 * fdma_cuda_device(problem->exec.device)->multiprocessors, slot_blocks);
    if (task.order != NULL && task.pass.slot_blocks > 0)
        FDMA_TRY(launch("backward", order_blocks, {dim3(1), dim3(most_ordered)}, problem, task.plan,
                        task.pass.slot_blocks, task.order));
    return run_pass<config>(problem, task, task.plan.partitions);
}

/* The number of query blocks that a thread block of the diagonal pass takes, one after the
 * other. With one query block it would mostly wait. With several, the queries of the next one
 * are loaded while the current one is multiplied, and the keys while the current gradients are
 * written. The number is the largest that leaves each multiprocessor `waves` thread blocks, to
 * balance the load. */
template <class config>
static int32_t count_blocks_in_row(const fdma_problem *problem, const backward_task &task) {
    const int64_t waves = config::is_narrow ? 32 : 4;
    const int64_t wanted = waves * fdma_cuda_device(problem->exec.device)->multiprocessors;
    const int64_t slot_blocks = problem->batch * problem->kv_heads * task.pass.slot_blocks;
    return (int32_t)max(slot_blocks * task.plan.forward.lists / wanted, (int64_t)1);
}

template <class config>
static fdma_status run_diagonal_pass(const fdma_problem *problem, backward_task task) {
    task.pass.slot_blocks = 1;
    task.pass.dq_semaphore = NULL; // no two blocks add to one tile
    task.pass.query_blocks = count_blocks_in_row<config>(problem, task);
    return run_pass<config>(problem, task,
                            divide_up(task.plan.forward.lists, task.pass.query_blocks));
}

template <class config>
using diagonal_config =
    backward_config<typename config::element, config::channels, config::has_softcap, config::drops,
                    config::has_pairs, diagonal_pass>;

/* If there are few lists, several thread blocks share a list. */
template <class config>
static fdma_status run_listed_pass(const fdma_problem *problem, backward_task task) {
    const int64_t waves = 4;
    const int64_t wanted = waves * fdma_cuda_device(problem->exec.device)->multiprocessors;
    const kept_lists &kept = task.plan.forward.kept;
    const int64_t lists = problem->batch * problem->kv_heads * kept.lists;
    const int64_t most = divide_up(kept.size, (int64_t)config::slots);
    task.pass.list_splits = (int32_t)min(divide_up(wanted, lists), most);
    task.pass.slot_blocks = 1;
    return run_pass<config>(problem, task, kept.lists * (int64_t)task.pass.list_splits);
}

template <class config>
using listed_config =
    backward_config<typename config::element, config::channels, config::has_softcap, config::drops,
                    config::has_pairs, listed_pass>;

/* dq_sum is laid out in the same way in all configurations. */
template <class config>
using plain_config =
    backward_config<typename config::element, config::channels, false, false, false, slot_pass>;

/* True if a thread block takes all slot blocks of a head, and writes dq: where slots do not change
 * their keys, and there are enough heads to keep nearly all multiprocessors busy. */
template <class config>
static bool owns_dq(const fdma_problem *problem, const backward_task &task) {
    const int64_t heads = problem->batch * problem->kv_heads;
    const int64_t device = fdma_cuda_device(problem->exec.device)->multiprocessors;
    return config::may_own_dq && !task.plan.is_rolling && task.plan.key_sums == NULL &&
           !is_present(&problem->starts) && task.pass.dq_semaphore == NULL &&
           task.pass.slot_blocks > 0 && task.pass.slot_blocks <= config::most_slot_blocks &&
           8 * heads >= 7 * round_up(heads, device);
}

template <class config>
static fdma_status run_with(const fdma_problem *problem, bool slot_per_key) {
    fdma_arena arena = fdma_arena_of(problem);
    backward_task task = lay_out<config>(problem, &arena, slot_per_key);
    const backward_plan &plan = task.plan;
    backward_pass &pass = task.pass;
    if (owns_dq<config>(problem, task)) {
        pass.owns_dq = true;
        pass.slot_blocks = 1;
        task.plan.cleared[1] = {}; // the first step of a tile stores its sums
    }
    FDMA_TRY(fdma_cuda_begin_backward(problem, &plan));
    if (task.tiles == 0)
        return FDMA_OK;
    FDMA_TRY(make_row_map("backward", &problem->q, q_tile_rows, &pass.q));
    FDMA_TRY(make_row_map("backward", &problem->dout, q_tile_rows, &pass.dout));
    if (plan.key_sums != NULL) {
        FDMA_TRY(run_listed_pass<listed_config<config>>(problem, task));
    } else {
        FDMA_TRY(run_slot_pass<config>(problem, task));
        if (plan.is_rolling) // and writes dq
            FDMA_TRY(run_diagonal_pass<diagonal_config<config>>(problem, task));
    }
    if (plan.key_sums != NULL || (!plan.is_rolling && !pass.owns_dq))
        FDMA_TRY(launch("backward", write_dq<plain_config<config>>,
                        {dim3((unsigned)task.tiles), dim3(warpgroup_threads)}, problem, plan,
                        pass));
    return fdma_cuda_end_backward(problem, &plan);
}

template <typename element, bool softcap, bool drops, bool pairs>
using slot_config = backward_config<element, FDMA_HEAD_DIM, softcap, drops, pairs, slot_pass>;

template <typename element>
static fdma_status run_elements(const fdma_problem *problem, bool slot_per_key) {
    const bool softcap = problem->softcap != 0, drops = problem->dropout.threshold != 0;
    const bool pairs = is_present(&problem->attn_bias);
    if (softcap && pairs)
        return run_with<slot_config<element, true, false, true>>(problem, slot_per_key);
    if (softcap)
        return drops ? run_with<slot_config<element, true, true, false>>(problem, slot_per_key)
                     : run_with<slot_config<element, true, false, false>>(problem, slot_per_key);
    if (pairs)
        return drops ? run_with<slot_config<element, false, true, true>>(problem, slot_per_key)
                     : run_with<slot_config<element, false, false, true>>(problem, slot_per_key);
    return drops ? run_with<slot_config<element, false, true, false>>(problem, slot_per_key)
                 : run_with<slot_config<element, false, false, false>>(problem, slot_per_key);
}

/* Which objects have slots: every key or, with a selection whose lists roll, an entry of a list. */
enum backward_form { by_key, by_list };

static constexpr const char *form_names[] = {
    FDMA_POINT_NAME("cuda/sm90/by_key/d", FDMA_HEAD_DIM),
    FDMA_POINT_NAME("cuda/sm90/d", FDMA_HEAD_DIM),
};

template <backward_form form> static fdma_status run(const fdma_problem *problem) {
    return problem->dtype == FDMA_FLOAT16 ? run_elements<float16>(problem, form == by_key)
                                          : run_elements<__nv_bfloat16>(problem, form == by_key);
}

/* All configurations use the same workspace, and by_key needs less than by_list. But by_key asks
 * for as much, because by_list or cuda/sm80 may run a call with the workspace that by_key asked
 * for: a workspace query knows no addresses, and its result serves shorter calls too. */
using any_config = slot_config<__half, false, false, false>;

static backward_task lay_out_any(const fdma_problem *problem, fdma_arena *arena) {
    fdma_arena other = *arena;
    const backward_task task = lay_out<any_config>(problem, arena, false);
    if (problem->causal && rolls_lists(problem))
        lay_out<any_config>(problem, &other, true);
    arena->used = max(arena->used, other.used);
    return task;
}

/* A gather multiplies the index of a row by its stride in bytes, both as uint32_t. */
static bool is_near(const fdma_tensor *tensor) { return tensor->stride[1] <= INT32_MAX; }

/* The pairs of a position before `position` with a key up to it that some query keeps, if the
 * scores are random: the key at position p is kept at first if it is among the best `window` of
 * p + 1 keys. With recent keys all are kept. */
static double count_pairs_before(const fdma_problem *problem, double position) {
    const double window = (double)max(problem->slots - problem->recent, (int64_t)1);
    if (problem->recent > 0 || position <= window)
        return position * position / 2;
    return window * window / 2 + window * position * log(position / window);
}

/* The pairs that by_key visits, of a query and a visible key that some query keeps, in whole slot
 * blocks. */
static double count_visible_pairs(const fdma_problem *problem) {
    const double queries = (double)min(problem->q_len, problem->kv_len); // that see keys
    return count_pairs_before(problem, (double)problem->kv_len) -
           count_pairs_before(problem, (double)problem->kv_len - queries) +
           queries * any_config::slots / 2;
}

/* The number of kept pairs if the query at position p keeps min(p + 1, slots) keys. */
static double count_kept_pairs(const fdma_problem *problem) {
    const double queries = (double)min(problem->q_len, problem->kv_len);
    const double slots = (double)problem->slots;
    const double early = max(queries - ((double)problem->kv_len - slots), 0.0); // positions < slots
    return queries * slots - early * early / 2;
}

/* The reason why by_list should take a call, or NULL. In by_list slots change their keys, and there
 * is a diagonal pass, which takes as much time per query as `further` pairs. The numbers are fitted
 * to an H200 (docs/experiments.md). The batch does not count, because results must not depend on
 * it. */
static const char *refuses_by_key(const fdma_problem *problem) {
    const double pair_time = FDMA_HEAD_DIM <= 64 ? 1.1 : 1; // of a pair in by_list, relative to
                                                            // by_key
    const double further = 100 + 500 / (double)problem->group;
    if (!problem->causal || !rolls_lists(problem))
        return "a call in which no slot changes its key";
    if (is_present(&problem->starts) || is_present(&problem->attn_mask))
        return "packed sequences or attn_mask";
    if (forces_kernel(problem, form_names[by_key]))
        return NULL;
    const double by_list_pairs =
        pair_time * count_kept_pairs(problem) + further * (double)problem->q_len;
    return count_visible_pairs(problem) < by_list_pairs
               ? NULL
               : "few kept keys, for which there is a faster kernel";
}

/* True if cuda/sm80 stores the gradient of a bias that the heads of a group share, because one
 * thread has all of them. This kernel would add it to float32 numbers, in the workspace if it has
 * 16 bits. */
static bool is_better_stored(const fdma_problem *problem) {
    const short_axes axes = short_axes_of(problem);
    return FDMA_HEAD_DIM <= 128 && is_present(&problem->attn_mask) && axes.any && !axes.not_heads &&
           problem->dattn_bias.shape[1] == problem->kv_heads &&
           (problem->group == 2 || problem->group == 4);
}

template <backward_form form> static const char *refuses(const fdma_problem *problem) {
    const double least_scale = 1e-6;
    enum { smallest = 64, most_blocks = INT32_MAX / 4 };
    const fdma_tensor *const tensors[] = {
        &problem->q,         &problem->k,          &problem->v,         &problem->dout,
        &problem->dq,        &problem->dk,         &problem->dv,        &problem->k_carried,
        &problem->v_carried, &problem->dk_carried, &problem->dv_carried};
    const char *const reason = fdma_cuda_refuses_backward(problem, FDMA_HEAD_DIM);
    if (reason != NULL)
        return reason;
    if (is_present(&problem->attn_bias) && problem->scale < least_scale)
        return "a scale below 1e-6, by which a bias cannot be divided";
    if (is_better_stored(problem) && !forces_kernel(problem, form_names[form]))
        return "a mask with a dattn_bias that the heads of a group share, which cuda/sm80 stores";
    if (is_present(&problem->attn_mask) && problem->deterministic)
        return "a deterministic call with attn_mask, which cuda/sm80 takes";
    if (is_present(&problem->attn_bias) && problem->softcap != 0 && problem->dropout.threshold != 0)
        return "attn_bias with softcap and dropout, which cuda/sm80 takes";
    if (FDMA_HEAD_DIM > smallest && problem->head_dim <= FDMA_HEAD_DIM / 2)
        return "a head_dim for which there is a smaller kernel";
    for (size_t i = 0; i < sizeof tensors / sizeof tensors[0]; i++) {
        if (!is_aligned(view_of(tensors[i])))
            return "rows that do not begin at multiples of 16 bytes";
        if (!is_near(tensors[i]))
            return "rows more than 2^31 elements apart";
    }
    if (!has_row_map(&problem->q) || !has_row_map(&problem->dout))
        return "q or dout whose rows are one row repeated, or 2^40 bytes apart";
    const int64_t longest = max(problem->q_len, problem->kv_len);
    if (problem->batch * problem->q_heads > most_blocks / (longest / q_tile_rows + 1))
        return "more than 2^29 tiles of queries or keys";
    const char *const by_form = form == by_key ? refuses_by_key(problem) : NULL;
    return by_form != NULL ? by_form : fdma_refuses_all_but_sm90a(problem);
}

template <backward_form form>
static constexpr fdma_kernel kernel_of = {form_names[form],
                                          operation_backward,
                                          fdma_missing_sm90a,
                                          refuses<form>,
                                          workspace_of<lay_out_any>,
                                          run<form>,
                                          true,
                                          0};

FDMA_CUDA_TABLE(FDMA_POINT_TABLE(fdma_cuda_sm90_backward_d, FDMA_HEAD_DIM), kernel_of<by_key>,
                kernel_of<by_list>);
