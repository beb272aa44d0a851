/* What a forward kernel works from, whatever its architecture: the tensors, and for each tile of
 * consecutive queries the list of keys that any of them keeps.
 *
 * On the way: fdma_select() -> expiry and slot -> fdma_cuda_plan_forward() lays this out in the
 * workspace, fdma_cuda_build_lists() fills it in on the stream -> a forward kernel walks lists. */
#ifndef FDMA_CUDA_PLAN_PLAN_CUH
#define FDMA_CUDA_PLAN_PLAN_CUH

#include "cuda/device/head_view.cuh"

/* Queries that share a list: a row tile's own first position may be later than the list's. */
enum { list_queries = 128 };

/* What a key brings to a logit. A row at position p keeps a listed key j if p < expiry and, where
 * causal, j <= p. Not causal: expiry is INT32_MAX or INT32_MIN. */
struct alignas(8) key_record {
    int32_t expiry;
    float bias; // times log2(e): logits are exponents of 2
};

/* List t of (b, g) holds what the queries from t * list_queries on keep: first the keys that are
 * visible to all of them (count.x of them, in the order of their slots), then, ascending, those
 * that arrive inside (up to count.y). Three forms:
 *   list NULL                 the keys 0, 1, 2, ...: entry j is key j
 *   list given, count NULL    the same, but some entries are absent
 *   both given                a selection's */
struct forward_plan {
    head_view q, k, v, out;
    float *lse; // [batch, q_heads, q_len] with these strides; NULL: not wanted
    int64_t lse_batch, lse_head;
    key_record *records; // [batch * kv_heads][kv_len]; NULL: every key is kept, no bias
    int32_t *list;       // of (b, g) and t: list + (b * kv_heads + g) * list_head + t * list_tile
    int64_t list_head, list_tile; // multiples of 4; list_tile 0: all tiles share a list
    int2 *count;                  // [batch * kv_heads][lists]
    int32_t lists;                // of each (b, g); not causal: 1, for all queries
    int32_t batch, q_len, kv_len, q_heads, kv_heads, group, head_dim;
    float scale;   // of <q, k>
    float softcap; // 0: off
    bool causal;
};

/* Whether an entry is a key to read. Absent are keys that key_valid leaves out, as ~j, and whatever
 * a corrupt selection leaves in a list. */
__device__ static inline bool is_key(int32_t entry, int32_t kv_len) {
    return (uint32_t)entry < (uint32_t)kv_len;
}

/* NULL, or what no plan can hold: of interest to every row's `refuses`. */
const char *fdma_cuda_refuses_plan(const fdma_problem *problem);

/* Lays out a plan, its lists and records in the arena; with base NULL it only counts. */
forward_plan fdma_cuda_plan_forward(const fdma_problem *problem, fdma_arena *arena);

/* Fills lists and records, on the problem's stream. */
fdma_status fdma_cuda_build_lists(const fdma_problem *problem, const forward_plan *plan);

#endif
