/* What a backward kernel works from, whatever its architecture: forward's plan, the gradients, and
 * what stands in the workspace between them.
 *
 * On the way: fdma_cuda_plan_backward() lays this out, fdma_cuda_begin_backward() fills in lists,
 * rows and zeros on the stream, a row's kernels add to dk, dv and dbias, and to dq or dq_sum;
 * fdma_cuda_end_backward() adds what parts of time carry over, and makes dq of dq_sum.
 *
 * Time is cut in epochs, one for each list (list_queries positions). The slot pass takes the keys
 * that live at an epoch's first position, slot by slot: list entries below count.x. The diagonal
 * pass takes those that arrive inside: entries from count.x to count.y. So a key has at most two
 * contributions, which are added to what dk, dv and dbias hold, in the order of the launches.
 *
 * Where slots are few, epochs are dealt to parts, and blocks of slots run once for each part. A key
 * that lives at the first position of a part, a border, then has sums in more than one. They go to
 * the carry of a border and slot, at most two of them to each, so that the order of adding does
 * not matter; fdma_cuda_end_backward() adds up a key's carries in the order of borders. */
#ifndef FDMA_CUDA_PLAN_BACKWARD_CUH
#define FDMA_CUDA_PLAN_BACKWARD_CUH

#include "cuda/plan/plan.cuh"

/* What a row's kernels ask of a plan. */
struct backward_shape {
    int32_t block_slots; // slots of a block of the slot pass
    int32_t most_parts;
    int32_t sum_dim; // channels of a row of dq_sum; 0: no dq_sum
};

/* Sums of keys that live at a border, [batch * kv_heads][parts - 1][slots], all zero at first; dk
 * is times scale already. */
struct border_carries {
    float *dk, *dv; // rows of head_dim
    float *dbias;
};

struct backward_plan {
    forward_plan forward; // its out and lse are inputs here
    head_view dout, dq, dk, dv;
    float *dbias; // [batch, kv_heads, kv_len] with these strides; NULL: not wanted
    int64_t dbias_batch, dbias_head;
    const float *dlse; // [batch, q_heads, q_len] with these strides; NULL: none
    int64_t dlse_batch, dlse_head;
    // of row i of (b, h), at (b * q_heads + h) * rows + i:
    float *row_lse;   // times log2(e); +inf: empty, or past q_len, so that weights are 0
    float *row_delta; // <dout, out> - dlse; 0 where empty or past q_len
    float *dq_sum;    // rows of sum_dim, not yet times scale; NULL: not asked for
    border_carries carry;
    int32_t sum_dim;
    int32_t rows;  // q_len rounded up to whole epochs
    int32_t slots; // of a list, rounded up to whole blocks; keys of a list that all epochs share
    int32_t parts, part_lists; // epochs of a part; the last one may have fewer
    bool is_rolling;           // every epoch has a list of its own; otherwise slots keep their keys
    bool accumulate, deterministic;
};

/* Entries of list t of a (b, g) that live at its first position (x), and all of them (y), whatever
 * a corrupt selection says. Of rolling plans. */
__device__ static inline int2 list_counts(const backward_plan &plan, int64_t head, int32_t t) {
    const int2 count = plan.forward.count[head * plan.forward.lists + t];
    const int32_t all = (int32_t)min((int64_t)max(count.y, 0), plan.forward.list_tile);
    return make_int2(min(max(count.x, 0), all), all);
}

/* The key that lives in a slot at the first position of epoch t, or what is_key() says no to. */
__device__ static inline int32_t key_in_slot(const backward_plan &plan, int64_t head, int32_t t,
                                             int32_t slot) {
    const forward_plan &forward = plan.forward;
    if (slot >= list_counts(plan, head, t).x)
        return -1;
    return forward.list[head * forward.list_head + t * forward.list_tile + slot];
}

/* The border whose carry takes what a part has summed for the key in a slot: the part's own, or the
 * one at its end; 0: no border, the sums go straight to dk, dv and dbias. */
__device__ static inline int32_t border_of(const backward_plan &plan, int64_t head, int32_t part,
                                           int32_t slot, int32_t key) {
    if (part > 0 && key_in_slot(plan, head, part * plan.part_lists, slot) == key)
        return part;
    if (part + 1 < plan.parts && key_in_slot(plan, head, (part + 1) * plan.part_lists, slot) == key)
        return part + 1;
    return 0;
}

/* A row of carry.dbias; times head_dim: of carry.dk and carry.dv. */
__device__ static inline int64_t carry_row(const backward_plan &plan, int64_t head, int32_t border,
                                           int32_t slot) {
    return (head * (plan.parts - 1) + border - 1) * plan.slots + slot;
}

/* NULL, or what no plan can hold. */
const char *fdma_cuda_refuses_backward(const fdma_problem *problem);

/* Lays out a plan in the arena; with base NULL it only counts. */
backward_plan fdma_cuda_plan_backward(const fdma_problem *problem, fdma_arena *arena,
                                      const backward_shape &shape);

/* Lists, records, rows; zeros in dk and dv (unless they accumulate), dbias, dq_sum and carries. */
fdma_status fdma_cuda_begin_backward(const fdma_problem *problem, const backward_plan *plan);

/* Adds carries to dk, dv and dbias; dq from dq_sum, if there is one. */
fdma_status fdma_cuda_end_backward(const fdma_problem *problem, const backward_plan *plan);

#endif
