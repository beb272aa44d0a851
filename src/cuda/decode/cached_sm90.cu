/* fdma_decode() for head_dim up to FDMA_HEAD_DIM on devices of compute capability 9.0.
 *
 * A head here is a pair (b, g). The number of heads decides which kernel is the fastest. A kernel
 * partitions the keys by the rows of the cache alone, so a kernel that is forced by name gives a
 * stream the same bits in a batch of any size.
 *
 * Source: docs/algorithm.md, streams; arXiv:2307.08691. */
#include "cuda/decode/cluster.cuh"
#include "cuda/decode/heads.cuh"

static decode_task lay_out(const fdma_problem *problem, fdma_arena *arena) {
    return fdma_cuda_plan_decode(problem, arena, marks_tokens);
}

/* True if place_tokens() computes the scores. Otherwise fdma_score()'s kernels do. */
static bool scores_tokens(const fdma_problem *problem) {
    const fdma_tensor *const v = &problem->v, *const dt_proj = &problem->dt_proj;
    const bool is_flat = problem->kv_heads == 1 || v->stride[2] == problem->head_dim;
    const uintptr_t two_weights = dt_proj->dtype == FDMA_FLOAT32 ? 8 : 4; // bytes
    const bool is_even = (uintptr_t)v->data % 4 == 0 &&
                         (uintptr_t)dt_proj->data % two_weights == 0 &&
                         (v->stride[0] | v->stride[1] | dt_proj->stride[0]) % 2 == 0;
    return is_flat && is_even &&
           problem->kv_heads * problem->head_dim <= (int64_t)most_sums * sum_channels;
}

template <typename element>
static fdma_status launch_tokens(const fdma_problem *problem, const decode_task &task) {
    token_scores from = {};
    if (!is_present(&problem->score) && scores_tokens(problem))
        from = {problem->dt_proj.data,
                problem->a.data,
                problem->dt_bias.data,
                problem->dt_proj.stride[0],
                task.plan.kv_heads * task.plan.head_dim,
                problem->dt_proj.dtype == FDMA_FLOAT32,
                problem->a.dtype == FDMA_FLOAT32,
                problem->dt_bias.dtype == FDMA_FLOAT32};
    else if (!is_present(&problem->score))
        FDMA_TRY(fdma_cuda_score_tokens(problem, task));
    const int64_t heads = problem->batch * problem->kv_heads;
    const bool are_staged = task.cached.row_keys == NULL;
    const bool have_few_rows = heads <= fdma_cuda_device(problem->exec.device)->multiprocessors ||
                               task.cached.rows > many_heads_rows;
    const int warps = have_few_rows ? few_heads_warps : many_heads_warps;
    return launch("decode",
                  !are_staged     ? place_tokens<element, few_heads_warps, listed_rows>
                  : have_few_rows ? place_tokens<element, few_heads_warps, staged_rows>
                                  : place_tokens<element, many_heads_warps, staged_rows>,
                  {dim3((unsigned)heads), dim3(32 * warps),
                   are_staged ? staged_bytes(task.cached) : 0, start_early},
                  problem, task.cached, task.plan.v, from);
}

enum attend_form { by_eight, by_four, by_two, by_one_block, by_two_blocks };

static constexpr const char *form_names[] = {
    // a cluster of eight, four or two thread blocks for each head
    FDMA_POINT_NAME("cuda/sm90/decode/cluster/d", FDMA_HEAD_DIM),
    FDMA_POINT_NAME("cuda/sm90/decode/cluster4/d", FDMA_HEAD_DIM),
    FDMA_POINT_NAME("cuda/sm90/decode/cluster2/d", FDMA_HEAD_DIM),
    // one thread block on each multiprocessor, which takes one head after the other
    FDMA_POINT_NAME("cuda/sm90/decode/one_block/d", FDMA_HEAD_DIM),
    // two thread blocks on each multiprocessor
    FDMA_POINT_NAME("cuda/sm90/decode/two_blocks/d", FDMA_HEAD_DIM),
};

template <typename element, int tiles, bool in_pages>
static fdma_status attend_by_clusters(const fdma_problem *problem, const decode_task &task,
                                      int32_t ranks) {
    using config = cluster_config<element, tiles, in_pages>;
    constexpr size_t most_shared_bytes = 227 * 1024; // of a thread block
    static_assert(cluster_bytes<config>(most_rank_rows) <= most_shared_bytes, "a partition fits");
    const unsigned blocks = (unsigned)(problem->batch * problem->kv_heads * ranks);
    return launch("decode", attend_cluster<config>,
                  {dim3(blocks), dim3(config::threads),
                   cluster_bytes<config>(rows_of_rank(task.cached.rows, ranks)), start_early,
                   (unsigned)ranks},
                  problem, task.plan, task.cached, ranks, is_aligned(task));
}

template <attend_form form, typename element, int tiles, bool in_pages>
static fdma_status attend_rows(const fdma_problem *problem, const decode_task &task) {
    if constexpr (form <= by_two) {
        return attend_by_clusters<element, tiles, in_pages>(problem, task, most_ranks >> form);
    } else {
        using config = heads_config<element, tiles, form == by_one_block, in_pages>;
        const int64_t heads = problem->batch * problem->kv_heads;
        const int32_t multiprocessors = fdma_cuda_device(problem->exec.device)->multiprocessors;
        const int64_t blocks = min(heads, (int64_t)config::blocks * multiprocessors);
        return launch("decode", attend_heads<config>,
                      {dim3((unsigned)blocks), dim3(config::threads), sizeof(heads_memory<config>),
                       start_early},
                      problem, task.plan, task.cached, is_aligned(task));
    }
}

template <attend_form form, typename element, int tiles>
static fdma_status attend(const fdma_problem *problem, const decode_task &task) {
    return has_pages(&problem->cache) ? attend_rows<form, element, tiles, true>(problem, task)
                                      : attend_rows<form, element, tiles, false>(problem, task);
}

template <attend_form form, typename element>
static fdma_status run_type(const fdma_problem *problem) {
    constexpr int most_tiles = FDMA_HEAD_DIM <= 128 ? 2 : 1;
    fdma_arena arena = fdma_arena_of(problem);
    const decode_task task = lay_out(problem, &arena);
    FDMA_TRY(launch_tokens<element>(problem, task));
    return problem->q_len * problem->group <= mma_rows
               ? attend<form, element, 1>(problem, task)
               : attend<form, element, most_tiles>(problem, task);
}

template <attend_form form> static fdma_status run(const fdma_problem *problem) {
    if (problem->batch == 0 || problem->new_len == 0)
        return FDMA_OK;
    return problem->dtype == FDMA_FLOAT16 ? run_type<form, float16>(problem)
                                          : run_type<form, __nv_bfloat16>(problem);
}

/* The most rows of a cache that a form takes. */
static int64_t most_rows_of(int form) {
    return form <= by_two ? (int64_t)(most_ranks >> form) * most_rank_rows : INT64_MAX;
}

/* The fastest form, as measured on an H200. The clusters of the first two forms take only half of
 * the multiprocessors, as those that lie together are not as many as a multiple of eight or
 * four. */
static int fastest_form(const fdma_problem *problem) {
    const int64_t multiprocessors = fdma_cuda_device(problem->exec.device)->multiprocessors;
    // of all forms, cluster2 loses least to the fastest one over all sizes of a batch
    const int64_t heads =
        problem->batch_invariant ? multiprocessors / 2 : problem->batch * problem->kv_heads;
    const int64_t most[] = {multiprocessors / 16, multiprocessors / 8, multiprocessors / 2,
                            multiprocessors, INT64_MAX}; // heads of each form
    int form = by_eight;
    while (heads > most[form])
        form++;
    return problem->carried_len <= most_rows_of(form) ? form : by_eight;
}

template <attend_form form> static const char *refuses(const fdma_problem *problem) {
    const char *const reason = fdma_cuda_refuses_decode(problem, FDMA_HEAD_DIM);
    if (reason != NULL)
        return reason;
    if (problem->carried_len > most_rows_of(form))
        return "more rows of a cache than fit in shared memory";
    if (problem->batch * problem->kv_heads > INT32_MAX / most_ranks)
        return "2^28 or more pairs of a stream and a kv head";
    const char *const device = fdma_refuses_all_but_sm90a(problem);
    if (device != NULL || forces_kernel(problem, form_names[form]))
        return device;
    return form != fastest_form(problem)
               ? "this number of heads, for which there is a faster kernel"
               : NULL;
}

template <attend_form form>
static constexpr fdma_kernel kernel_of = {form_names[form],
                                          operation_decode,
                                          fdma_missing_sm90a,
                                          refuses<form>,
                                          workspace_of<lay_out>,
                                          run<form>,
                                          true,
                                          0};

FDMA_CUDA_TABLE(FDMA_POINT_TABLE(fdma_cuda_sm90_cached_d, FDMA_HEAD_DIM), kernel_of<by_eight>,
                kernel_of<by_four>, kernel_of<by_two>, kernel_of<by_one_block>,
                kernel_of<by_two_blocks>);
