/* The host side of forward on Hopper (forward.cu), for head_dim up to FDMA_HEAD_DIM: which calls
 * the kernel supports, the order of its tiles, its launch. Dense attention is the same with the
 * list 0, 1, 2, ... */
#include "cuda/forward/sm90/forward.cuh"
#include "cuda/plan/host.cuh"

static row_strides strides_of(const head_view &own) {
    return {0, (uint32_t)(2 * own.row), 0, 0, 0, false};
}

/* The unit of two pieces is the largest power of 2, up to 64 KB, that divides the distance of any
 * two rows, or of any two rows of a piece if the pieces are far from each other. It is at least 16
 * bytes if rows are aligned to that. */
static row_strides strides_of(const head_view &carried, const head_view &own, int64_t carried_len,
                              bool is_far) {
    const uint64_t most_unit = 1 << 16;
    const uint64_t between = is_far ? 0 : (uint64_t)own.data - (uint64_t)carried.data;
    const uint64_t strides =
        (uint64_t)(carried.batch | carried.row | carried.head | own.batch | own.row | own.head);
    const uint64_t all = between | 2 * strides | most_unit;
    const uint32_t shift = (uint32_t)__builtin_ctzll(all);
    return {(uint32_t)carried_len,
            1u << shift,
            shift,
            (uint32_t)((uint64_t)carried.row * 2 >> shift),
            (uint32_t)((uint64_t)own.row * 2 >> shift),
            is_far};
}

/* The largest distance of a row of either piece from the base of its (b, g), in bytes. */
static double most_distance(const fdma_tensor *carried, const fdma_tensor *own) {
    const double between = (double)((intptr_t)own->data - (intptr_t)carried->data);
    double elements = 0, rows = 0;
    for (int axis = 0; axis <= 2; axis += 2)
        elements += (double)(own->shape[axis] - 1) *
                    fabs((double)own->stride[axis] - (double)carried->stride[axis]);
    rows = fmax((double)(own->shape[1] - 1) * (double)own->stride[1],
                (double)(carried->shape[1] - 1) * (double)carried->stride[1]);
    return fabs(between) + 2 * (elements + rows);
}

/* True if every row has an index below no_row from a base that both pieces share. */
static bool are_near(const fdma_tensor *carried, const fdma_tensor *own) {
    const row_strides strides =
        strides_of(view_of(carried), view_of(own), carried->shape[1], false);
    return most_distance(carried, own) < (double)no_row * strides.unit;
}

/* True if every row has an index, from a shared base or from the base of its own piece. */
static bool are_within_reach(const fdma_tensor *carried, const fdma_tensor *own) {
    const row_strides strides = strides_of(view_of(carried), view_of(own), carried->shape[1], true);
    const double rows = fmax((double)(own->shape[1] - 1) * (double)own->stride[1],
                             (double)(carried->shape[1] - 1) * (double)carried->stride[1]);
    return are_near(carried, own) || 2 * rows < (double)(far_rows::of_own - 1) * strides.unit;
}

/* value: above 0. */
static divisor divisor_of(int32_t value) {
    const uint32_t bits = 31;
    uint32_t shift = bits;
    while (shift < 2 * bits && (int64_t)1 << (shift - bits) < value)
        shift++;
    const uint64_t factor = (((uint64_t)1 << shift) + (uint32_t)value - 1) / (uint32_t)value;
    return {value, (uint32_t)factor, shift};
}

/* Computes as many heads together as fit in L2 with the keys of one list, or with all keys if
 * dense. All tiles of a selection cost about the same. Dense tiles differ, and only keep all
 * multiprocessors busy if many heads are computed together, so they may use more of L2. */
static tile_order order_of(const forward_plan *plan, const forward_kernel &kernel) {
    const int64_t l2_bytes = (plan->list_tile > 0 ? 10 : 32) << 20; // of 50 MB
    const int64_t fitting = l2_bytes / (2 * kernel.row_bytes * (list_keys(*plan) + 1));
    tile_order order;
    order.tiles = (int32_t)divide_up(plan->q_len * plan->group, kernel.rows);
    order.heads = plan->batch * plan->kv_heads;
    const int32_t together = (int32_t)max(min(fitting, (int64_t)order.heads), (int64_t)1);
    order.group = divisor_of(plan->group);
    order.kv_heads = divisor_of(plan->kv_heads);
    order.together = divisor_of(together);
    const int32_t rest = order.heads % together;
    order.last_together = divisor_of(rest == 0 ? together : rest);
    order.turn = divisor_of(order.tiles * together);
    return order;
}

static key_strides strides_of(const fdma_problem *problem, const forward_plan *plan) {
    if (plan->carried_len == 0)
        return {strides_of(plan->k), strides_of(plan->v)};
    const bool far[] = {!are_near(&problem->k_carried, &problem->k),
                        !are_near(&problem->v_carried, &problem->v)};
    return {strides_of(plan->k_carried, plan->k, plan->carried_len, far[0]),
            strides_of(plan->v_carried, plan->v, plan->carried_len, far[1])};
}

static fdma_status attend(const fdma_problem *problem, const forward_plan *plan) {
    const forward_kernel kernel =
        fdma_cuda_sm90_kernel<FDMA_HEAD_DIM>(*plan, problem->dtype == FDMA_FLOAT16);
    const tile_order order = order_of(plan, kernel);
    const int64_t tiles = (int64_t)order.tiles * order.heads;
    const int64_t blocks = fdma_cuda_device(problem->exec.device)->multiprocessors;
    const launch_shape shape = {dim3((unsigned)min(tiles, blocks)), dim3(kernel.threads),
                                kernel.shared_bytes, start_early};
    const float softcap_scale = plan->softcap == 0 ? 0 : scale_over_cap(plan->scale, plan->softcap);
    if (tiles == 0)
        return FDMA_OK;
    return launch("forward", kernel.attend, shape, problem, *plan, strides_of(problem, plan), order,
                  softcap_scale, 1 / (plan->scale * log2_e));
}

/* A gather multiplies the index of a row by its stride in bytes, both as uint32_t; so does a load
 * of attn_bias. */
static bool is_within_reach(const fdma_problem *problem) {
    const int64_t q_last =
        (problem->q_len - 1) * problem->q.stride[1] + (problem->group - 1) * problem->q.stride[2];
    return problem->k.stride[1] <= INT32_MAX && problem->v.stride[1] <= INT32_MAX &&
           problem->attn_bias.stride[3] <= INT32_MAX / 2 &&
           q_last / vec_channels < (int64_t)no_row &&
           (!is_present(&problem->k_carried) ||
            (are_within_reach(&problem->k_carried, &problem->k) &&
             are_within_reach(&problem->v_carried, &problem->v)));
}

static const char *refuses(const fdma_problem *problem) {
    const double least_scale = 1e-6;
    enum { few_queries = 16, smallest = 64 };
    const char *const reason = fdma_cuda_refuses_plan(problem, FDMA_HEAD_DIM);
    if (reason != NULL)
        return reason;
    if (FDMA_HEAD_DIM > smallest && problem->head_dim <= FDMA_HEAD_DIM / 2)
        return "a head_dim for which there is a smaller kernel";
    if (!is_aligned(view_of(&problem->q)) || !is_aligned(view_of(&problem->k)) ||
        !is_aligned(view_of(&problem->v)) || !is_aligned(view_of(&problem->out)) ||
        !is_aligned(view_of(&problem->k_carried)) || !is_aligned(view_of(&problem->v_carried)))
        return "rows that do not begin at multiples of 16 bytes";
    if (!is_within_reach(problem))
        return "rows more than 2^31 elements apart, or keys of attn_bias more than 2^30";
    if (problem->scale < least_scale)
        return "a scale below 1e-6, by which a bias cannot be divided";
    // also with few keys: if the alignment of tensors makes another kernel take the call, that
    // kernel must not need more workspace
    if (problem->q_len <= few_queries)
        return "few queries, which are better split over keys";
    return fdma_refuses_all_but_sm90a(problem);
}

static fdma_status run(const fdma_problem *problem) {
    fdma_arena arena = fdma_arena_of(problem);
    const forward_plan plan = fdma_cuda_plan_forward(problem, &arena);
    FDMA_TRY(fdma_cuda_build_lists(problem, &plan));
    if (problem->only_mask_lists)
        return FDMA_OK;
    return attend(problem, &plan);
}

FDMA_CUDA_TABLE(FDMA_POINT_TABLE(fdma_cuda_sm90_d, FDMA_HEAD_DIM),
                {FDMA_POINT_NAME("cuda/sm90/d", FDMA_HEAD_DIM), operation_forward,
                 fdma_missing_sm90a, refuses, workspace_of<fdma_cuda_plan_forward>, run, true, 0});
