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

/* True if the kernel that places the tokens computes their scores. Otherwise fdma_score()'s kernels
 * do. */
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

static token_scores token_scores_of(const fdma_problem *problem) {
    if (is_present(&problem->score) || !scores_tokens(problem))
        return {};
    return {problem->dt_proj.data,
            problem->a.data,
            problem->dt_bias.data,
            problem->dt_proj.stride[0],
            (int32_t)(problem->kv_heads * problem->head_dim),
            problem->dt_proj.dtype == FDMA_FLOAT32,
            problem->a.dtype == FDMA_FLOAT32,
            problem->dt_bias.dtype == FDMA_FLOAT32};
}

template <typename element>
static fdma_status launch_tokens(const fdma_problem *problem, const decode_task &task,
                                 const token_scores &from) {
    const int64_t heads = problem->batch * problem->kv_heads;
    const bool are_few = heads <= fdma_cuda_device(problem->exec.device)->multiprocessors ||
                         task.cached.rows > most_staged_rows(many_heads_warps);
    return launch("decode",
                  are_few ? place_tokens<element, few_heads_warps>
                          : place_tokens<element, many_heads_warps>,
                  {dim3((unsigned)heads), dim3(32 * (are_few ? few_heads_warps : many_heads_warps)),
                   staged_bytes(task.cached), start_early},
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

static constexpr size_t most_shared_bytes = 227 * 1024; // of a thread block
static constexpr size_t half_shared_bytes = 113 * 1024; // of each of two thread blocks

template <typename config>
static fdma_status attend_by_clusters(const fdma_problem *problem, const decode_task &task,
                                      const token_scores &from, int32_t ranks) {
    constexpr size_t bytes_of_16 = sizeof(cluster_keys);
    static_assert(sizeof(cluster_memory<config>) +
                          (most_rank_rows + most_new_tokens) / 16 * bytes_of_16 <=
                      most_shared_bytes,
                  "a partition fits");
    const unsigned blocks = (unsigned)(problem->batch * problem->kv_heads * ranks);
    const size_t keys = (size_t)rank_rows(task.cached.rows, ranks) + most_new_tokens;
    FDMA_TRY(launch_tokens<typename config::element>(problem, task, from));
    return launch("decode", attend_cluster<config>,
                  {dim3(blocks), dim3(config::threads),
                   sizeof(cluster_memory<config>) + keys / 16 * bytes_of_16, start_early,
                   (unsigned)ranks},
                  problem, task.plan, task.cached, ranks, is_aligned(task));
}

/* True if the heads of a stream run as a cluster, which then counts its tokens. Larger clusters
 * than two multiprocessors take would leave some without blocks if there are many heads. */
template <typename config>
static bool are_clusters(const fdma_problem *problem, int64_t most_blocks) {
    const int64_t heads = problem->batch * problem->kv_heads;
    return problem->kv_heads <= 2 * config::blocks ||
           (problem->kv_heads <= most_ranks && heads <= most_blocks / 4 * 3);
}

template <typename config>
static fdma_status attend_by_heads(const fdma_problem *problem, const decode_task &task,
                                   const token_scores &from) {
    static_assert(sizeof(heads_memory<config>) <=
                      (config::blocks == 1 ? most_shared_bytes : half_shared_bytes),
                  "as many thread blocks fit");
    const int32_t multiprocessors = fdma_cuda_device(problem->exec.device)->multiprocessors;
    const int64_t most_blocks = (int64_t)config::blocks * multiprocessors;
    const bool counts = are_clusters<config>(problem, most_blocks);
    const int64_t cluster = counts ? problem->kv_heads : 1;
    const int64_t blocks =
        min(problem->batch * problem->kv_heads, max(most_blocks / cluster, (int64_t)1) * cluster);
    FDMA_TRY(launch("decode", attend_heads<config>,
                    {dim3((unsigned)blocks), dim3(config::threads), sizeof(heads_memory<config>),
                     start_early, counts && cluster > 1 ? (unsigned)cluster : 0},
                    problem, task.plan, task.cached, from, counts, is_aligned(task)));
    if (counts)
        return FDMA_OK;
    const unsigned streams = (unsigned)divide_up(problem->batch, count_threads);
    return launch("decode", count_tokens, {dim3(streams), dim3(count_threads), 0, start_early},
                  problem, task.cached);
}

template <attend_form form, typename element, int tiles, bool in_pages>
static fdma_status attend_rows(const fdma_problem *problem, const decode_task &task,
                               const token_scores &from) {
    if constexpr (form <= by_two)
        return attend_by_clusters<cluster_config<element, tiles, in_pages>>(problem, task, from,
                                                                            most_ranks >> form);
    else
        return attend_by_heads<heads_config<element, tiles, form == by_one_block, in_pages>>(
            problem, task, from);
}

template <attend_form form, typename element, int tiles>
static fdma_status attend(const fdma_problem *problem, const decode_task &task,
                          const token_scores &from) {
    return has_pages(&problem->cache)
               ? attend_rows<form, element, tiles, true>(problem, task, from)
               : attend_rows<form, element, tiles, false>(problem, task, from);
}

template <attend_form form, typename element>
static fdma_status run_type(const fdma_problem *problem) {
    constexpr int most_tiles = FDMA_HEAD_DIM <= 128 ? 2 : 1;
    fdma_arena arena = fdma_arena_of(problem);
    const decode_task task = lay_out(problem, &arena);
    const token_scores from = token_scores_of(problem);
    if (!is_present(&problem->score) && from.dt_proj == NULL)
        FDMA_TRY(fdma_cuda_score_tokens(problem, task));
    return problem->q_len * problem->group <= mma_rows
               ? attend<form, element, 1>(problem, task, from)
               : attend<form, element, most_tiles>(problem, task, from);
}

template <attend_form form> static fdma_status run(const fdma_problem *problem) {
    if (problem->batch == 0 || problem->new_len == 0)
        return FDMA_OK;
    return problem->dtype == FDMA_FLOAT16 ? run_type<form, float16>(problem)
                                          : run_type<form, __nv_bfloat16>(problem);
}

/* The reason why another form is faster, or NULL. Measured on an H200. The clusters of the first
 * two forms take only half of the multiprocessors, as those that lie together are not as many as a
 * multiple of eight or four. */
template <attend_form form> static const char *refuses_slow(const fdma_problem *problem) {
    if (forces_kernel(problem, form_names[form]))
        return NULL;
    const int64_t multiprocessors = fdma_cuda_device(problem->exec.device)->multiprocessors;
    // of all forms, cluster2 loses least to the fastest one over all sizes of a batch
    const int64_t heads =
        problem->batch_invariant ? multiprocessors / 2 : problem->batch * problem->kv_heads;
    const int64_t most[] = {multiprocessors / 16, multiprocessors / 8, multiprocessors / 2,
                            multiprocessors, INT64_MAX}; // heads of each form
    if (form != by_eight && heads <= most[form - 1])
        return "few heads, for which there is a faster kernel";
    return heads > most[form] ? "many heads, for which there is a faster kernel" : NULL;
}

template <attend_form form> static const char *refuses(const fdma_problem *problem) {
    const char *const reason = fdma_cuda_refuses_decode(problem, FDMA_HEAD_DIM);
    if (reason != NULL)
        return reason;
    constexpr int64_t of_cluster = (int64_t)(most_ranks >> form) * most_rank_rows;
    if (problem->carried_len >
        (form > by_two ? most_head_rows : min(of_cluster, most_staged_rows(few_heads_warps))))
        return "more rows of a cache than fit in shared memory";
    if (problem->batch * problem->kv_heads > INT32_MAX / most_ranks)
        return "2^28 or more pairs of a stream and a kv head";
    const char *const device = fdma_refuses_all_but_sm90a(problem);
    return device != NULL ? device : refuses_slow<form>(problem);
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
