/* The plan of a forward call, on the host: which problems it supports, its contents and its layout
 * in the workspace. */
extern "C" {
#include "cuda/cuda.h"
}
#include "cuda/plan/host.cuh"

/* True if lists leave out keys that are not kept. Otherwise entry j is key j, or absent. */
static bool is_listed(const fdma_problem *problem) {
    return problem->selected && problem->slots < problem->kv_len;
}

static bool is_global(const fdma_problem *problem) { return problem->scope == FDMA_SCOPE_GLOBAL; }

void fdma_cuda_describe_problem(const fdma_problem *problem, forward_plan *plan) {
    plan->q = view_of(&problem->q);
    plan->k = view_of(&problem->k);
    plan->v = view_of(&problem->v);
    plan->k_carried = view_of(&problem->k_carried);
    plan->v_carried = view_of(&problem->v_carried);
    plan->carried_len = is_present(&problem->k_carried) ? (int32_t)problem->carried_len : 0;
    plan->out = view_of(&problem->out);
    plan->lse = numbers_of<float>(&problem->lse);
    plan->sink_logit = (const float *)problem->sink_logit.data;
    plan->mask = pairs_of(&problem->attn_mask, problem->q_heads);
    plan->pair_bias = pairs_of(&problem->attn_bias, problem->q_heads);
    plan->kv_used = (const int32_t *)problem->kv_used.data;
    plan->batch = (int32_t)problem->batch;
    plan->q_len = (int32_t)problem->q_len;
    plan->kv_len = (int32_t)problem->kv_len;
    plan->q_heads = (int32_t)problem->q_heads;
    plan->kv_heads = (int32_t)problem->kv_heads;
    plan->group = (int32_t)problem->group;
    plan->head_dim = (int32_t)problem->head_dim;
    plan->scale = (float)problem->scale;
    plan->softcap = softcap_of(problem);
    plan->dropout = problem->dropout;
    plan->dropout_scale = (float)dropout_scale(problem->dropout.threshold);
    plan->rng_state = (const int64_t *)problem->rng_state.data;
    plan->causal = problem->causal;
    plan->by_position = problem->causal || is_present(&problem->starts);
    plan->block_queries = list_queries;
}

static int64_t list_size(const fdma_problem *problem, int64_t block_queries) {
    if (!is_listed(problem))
        return problem->kv_len;
    if (is_global(problem))
        return is_present(&problem->starts) ? problem->kv_len : problem->slots;
    return problem->slots + min(problem->q_len, block_queries) - 1;
}

/* True if the lists, one per query block with an entry per slot, are too large. No check of a
 * single tensor bounds them. */
static bool has_vast_lists(const fdma_problem *problem) {
    const double most_entries = (double)(INT64_C(1) << 46);
    const double lists =
        (double)(problem->batch * problem->kv_heads) * (double)(problem->q_len / list_queries + 1);
    const bool has_lists = is_listed(problem) || is_present(&problem->attn_mask);
    const int64_t words = problem->group < 1024 ? 4 * problem->group + 1 : INT32_MAX; // of a key
    const int64_t size = is_present(&problem->attn_mask) ? problem->kv_len * words
                                                         : list_size(problem, list_queries);
    return has_lists && lists * (double)size > most_entries;
}

const char *fdma_cuda_refuses_plan(const fdma_problem *problem, int64_t most_head_dim) {
    const int64_t most_rows = INT32_MAX - 1024; // so that positions of rows past the end do not
                                                // overflow
    if (problem->dtype == FDMA_FLOAT32)
        return "float32 tensors: cast q, k and v to bfloat16 or float16";
    if (problem->dtype != FDMA_FLOAT16 && problem->dtype != FDMA_BFLOAT16)
        return "float64 tensors: cast q, k and v to bfloat16 or float16";
    if (problem->bias.dtype == FDMA_FLOAT64 || problem->bias_carried.dtype == FDMA_FLOAT64 ||
        problem->lse.dtype == FDMA_FLOAT64)
        return "float64 bias or lse; supported: float32";
    if (problem->sink_logit.dtype == FDMA_FLOAT64)
        return "float64 sink_logit; supported: float32";
    if (problem->attn_bias.dtype == FDMA_FLOAT64 || problem->dattn_bias.dtype == FDMA_FLOAT64)
        return "float64 attn_bias or dattn_bias; supported: q's dtype and float32";
    if (problem->q_len > most_rows || problem->kv_len > most_rows ||
        problem->batch * problem->q_heads > most_rows)
        return "more than 2^31 - 1025 queries, keys or heads";
    const int64_t tile_rows = 16;                         // of the smallest tile
    const int64_t rows = problem->q_len * problem->group; // of a kv head
    if (rows > INT32_MAX / 2 ||
        problem->batch * problem->kv_heads > INT32_MAX / (rows / tile_rows + 1))
        return "2^30 or more rows of a kv head, or 2^31 or more tiles of 16 rows";
    if (is_present(&problem->starts) && problem->starts.shape[0] > INT32_MAX)
        return "2^31 or more packed sequences";
    if (is_listed(problem) && !is_present(&problem->slot))
        return "a selection without slots";
    if (has_vast_lists(problem))
        return "more than 2^46 keys in lists";
    return problem->head_dim > most_head_dim ? "a larger head_dim than its own" : NULL;
}

/* A list has room for every key, because the host does not know how many keys the mask keeps. */
static kept_lists lay_out_kept(const fdma_problem *problem, fdma_arena *arena) {
    const fdma_tensor *const mask = &problem->attn_mask;
    kept_lists kept = {};
    const bool differ = problem->selected; // expiries differ between kv heads
    const bool differ_in_batch = differ || is_present(&problem->key_valid) ||
                                 is_present(&problem->kv_used) || mask->shape[0] > 1;
    kept.batches = differ_in_batch ? (int32_t)problem->batch : 1;
    kept.heads = differ || mask->shape[1] > 1 ? (int32_t)problem->kv_heads : 1;
    kept.mask_heads = (int32_t)max(mask->shape[1] / max(problem->kv_heads, (int64_t)1), (int64_t)1);
    kept.lists = (int32_t)divide_up(problem->q_len, list_queries);
    kept.size = round_up(max(problem->kv_len, (int64_t)1), list_queries);
    const int64_t lists = (int64_t)kept.batches * kept.heads * kept.lists;
    kept.bits = take<uint4>(arena, lists * kept.size * kept.mask_heads);
    kept.listed = take<uint32_t>(arena, lists * (kept.size / 32));
    kept.list = take<int32_t>(arena, lists * kept.size);
    kept.count = take<int32_t>(arena, lists);
    return kept;
}

static kept_lists kept_lists_of(const fdma_problem *problem, fdma_arena *arena) {
    fdma_arena given = {(uint8_t *)problem->mask_lists.data, 0};
    if (!is_present(&problem->attn_mask) || problem->operation == operation_probabilities)
        return {}; // probabilities are written per pair, from the mask
    return lay_out_kept(problem, is_present(&problem->mask_lists) ? &given : arena);
}

size_t fdma_cuda_mask_lists_size(const fdma_problem *problem) {
    fdma_arena arena = {};
    lay_out_kept(problem, &arena);
    return arena.used;
}

fdma_status fdma_cuda_check_mask_lists(const fdma_problem *problem) {
    const fdma_tensor *const lists = &problem->mask_lists;
    const size_t given = is_present(lists) ? (size_t)lists->shape[0] : 0;
    const size_t wanted = fdma_cuda_mask_lists_size(problem);
    FDMA_REQUIRE(given >= wanted, FDMA_INVALID_ARGUMENT,
                 "mask_lists: axis 0 has %s, want %zu or more",
                 fdma_count_text((int64_t)given, "element").text, wanted);
    FDMA_REQUIRE((uintptr_t)lists->data % alignof(uint4) == 0, FDMA_INVALID_ARGUMENT,
                 "mask_lists: is at address %p, want a multiple of %zu", lists->data,
                 alignof(uint4));
    return FDMA_OK;
}

/* Points the plan to the lists that the selection of a call with few queries has written. */
static void take_last_keys(const fdma_last_keys &last, forward_plan *plan) {
    plan->records = (key_record *)last.record.data;
    plan->list = (int32_t *)last.list.data;
    plan->list_head = plan->list_tile = last.list.shape[2];
    plan->count = (int2 *)last.count.data;
}

/* The number of queries that share a list. Fewer lists take less time to make. But a tile also
 * visits the keys that arrived and were evicted since its query block began, and longer blocks have
 * more of these. With at least the numbers of slots below they are few, whatever the scores. With
 * recent keys or in packed sequences they may be many. */
static int32_t choose_block_queries(const fdma_problem *problem) {
    const int64_t long_slots = 512, longest_slots = 2048;
    const bool many_leave = problem->recent > 0 || is_present(&problem->starts);
    if (!problem->causal || !rolls_lists(problem) || many_leave || problem->gap > 0 ||
        is_present(&problem->attn_mask) || problem->kv_len <= most_short_keys)
        return list_queries;
    return problem->slots >= longest_slots ? most_block_queries
           : problem->slots >= long_slots  ? 2 * list_queries
                                           : list_queries;
}

/* True if every key is kept, as far as the host knows. */
static bool is_plain(const fdma_problem *problem) {
    return !problem->selected && !is_present(&problem->key_valid);
}

forward_plan fdma_cuda_plan_forward(const fdma_problem *problem, fdma_arena *arena) {
    return fdma_cuda_plan_lists(problem, arena, choose_block_queries(problem));
}

/* A plan that takes nothing of the workspace yet. */
static forward_plan begin_plan(const fdma_problem *problem, int32_t block_queries) {
    forward_plan plan = {};
    fdma_cuda_describe_problem(problem, &plan);
    plan.block_queries = block_queries;
    plan.lists = problem->causal ? (int32_t)divide_up(problem->q_len, block_queries) : 1;
    return plan;
}

/* A plan with records and without lists. */
static forward_plan plan_records(const fdma_problem *problem, fdma_arena *arena,
                                 int32_t block_queries) {
    forward_plan plan = begin_plan(problem, block_queries);
    plan.sequences = fdma_cuda_lay_out_sequences(problem, arena, false);
    if (!is_plain(problem) || is_present(&problem->bias) || is_present(&problem->starts))
        plan.records =
            take<key_record>(arena, problem->batch * problem->kv_heads * problem->kv_len);
    plan.kept = kept_lists_of(problem, arena);
    return plan;
}

forward_plan fdma_cuda_plan_kept(const fdma_problem *problem, fdma_arena *arena) {
    const int64_t heads = problem->batch * problem->kv_heads;
    forward_plan plan = plan_records(problem, arena, list_queries);
    plan.list_head = round_up(problem->kv_len, 4);
    plan.list = take<int32_t>(arena, heads * plan.list_head);
    plan.count = take<int2>(arena, heads * plan.lists);
    return plan;
}

forward_plan fdma_cuda_plan_lists(const fdma_problem *problem, fdma_arena *arena,
                                  int32_t block_queries) {
    const int64_t heads = problem->batch * problem->kv_heads;
    if (is_present(&problem->fused.last_keys.list)) {
        forward_plan plan = begin_plan(problem, block_queries);
        take_last_keys(problem->fused.last_keys, &plan);
        return plan;
    }
    forward_plan plan = plan_records(problem, arena, block_queries);
    // forward needs only the lists of kept keys
    if (is_plain(problem) ||
        (is_present(&problem->attn_mask) && problem->operation == operation_forward))
        return plan;
    const bool is_rolling = rolls_lists(problem);
    const int64_t size = round_up(list_size(problem, block_queries), 4);
    plan.list_tile = is_rolling ? size : 0;
    // a list of one query has no other entry for misfits; see plan/lists.cu
    plan.list_head = is_rolling ? size * plan.lists + 4 : size;
    plan.list = take<int32_t>(arena, heads * plan.list_head);
    if (is_listed(problem) && !is_rolling && is_present(&problem->starts))
        plan.entries_before = take<int32_t>(arena, heads * (problem->kv_len + 1));
    else if (is_listed(problem))
        plan.count = take<int2>(arena, heads * plan.lists);
    if (is_rolling && problem->operation == operation_forward) // backward finds keys by slot
        plan.changes = take<key_changes>(arena, heads * plan.lists * block_queries);
    return plan;
}
