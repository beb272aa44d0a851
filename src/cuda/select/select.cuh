/* Selection on the GPU: the arguments of its kernels, and the code that they share. Two kernels
 * select for all positions, in the order of device/order.cuh: sm80.cu takes any segment in several
 * launches, sm90.cu a segment that fits in a cluster of blocks in one launch. Before them, rules.cu
 * finds the sinks, to which load_key() gives an order above all scores. After them, it applies the
 * rules `recent` and `gap`. The kernels of fused calls also write what forward works from: fused.cu
 * its plan for short sequences, top.cu the list of the last positions alone.
 *
 * A segment is the keys of one (batch, kv head). The `rank` of a key is its index when they are
 * sorted, worst first; absent keys come before all others. Ranks and positions are cut into
 * partitions of equal size. The figure in docs/algorithm.md ("On a GPU") draws the tables:
 *
 *     earlier_count[c][d]  keys of rank partition c and above that come before the end of position
 *                          partition d
 *     threshold_rank[d]    rank of the worst key that is kept when position partition d begins;
 *                          0 while the set is not full
 *     kept_index           of a key that is ever kept: the number of such keys before it
 *
 * The steps have the same names in both implementations:
 *
 *     sort_keys            radix sort: {order, position} of each key, by rank. It is stable, which
 *                          decides ties: of equal scores the later key has the higher rank
 *     count_earlier        fills earlier_count
 *     find_thresholds      fills threshold_rank from it
 *     decide_by_threshold  decides most keys by the two thresholds around their position; for each
 *                          of the others, finds how many keys of its position partition may
 *                          outrank it if it is to be kept
 *     decide_by_count      decides the others by counting the keys that outrank them
 *     index_kept           kept_index of each kept key; its position by kept_index
 *     match_evictions      the i-th worst kept key expires at the position of kept key window + i
 *     find_roots           a slot passes along a chain, from each evicted key to its evictor: finds
 *                          the first key of a key's chain that the same block handles
 *     follow_roots         follows chains from block to block up to the slot
 *
 * Global scope needs no thresholds: the `window` best keys of the segment are kept, and a kept
 * key's kept_index is its slot.
 *
 * Packed sequences are one segment in which every key outranks all keys of earlier sequences. Then
 * the keys of its own sequence that a query keeps are those that it would keep in that sequence
 * alone, and an expiry beyond the end of the sequence becomes that end. So sort_keys sorts by score
 * and then by the index of the sequence, and slots start at 0 with the first key of each sequence.
 * In global scope the keys of a sequence occupy the ranks equal to its positions, and the best of
 * them are kept. */
#pragma once

#include "core/integers.h"
#include "cuda/device/host.cuh"
#include "cuda/device/order.cuh"
#include "cuda/device/ptx.cuh"

/* Pointers to the first key of one segment. */
struct select_segment {
    const float *score;
    const uint8_t *valid; // NULL: all keys are valid
    uint32_t sink_end;    // the valid keys before this position are sinks
    int32_t *expiry;
    int32_t *slot;         // NULL: slots are not wanted
    uint32_t *first_index; // see select_call
};

struct select_call {
    number_view<const float> score;
    number_view<int32_t> expiry, slot;
    const uint8_t *valid;
    int64_t valid_batch;
    uint32_t kv_heads, kv_len;
    uint32_t window;          // at most kv_len
    uint32_t sinks;           // at most the window
    const uint32_t *sink_end; // [batch]; NULL: `sinks`, because no key before it is padding
    uint32_t recent;          // keys that rules.cu adds afterwards; 0 also if they change nothing
    // tables of packed sequences, by position; ranges is NULL if sequences are not packed
    const int2 *ranges;     // see packed_sequences
    const uint32_t *index;  // see packed_sequences
    const uint32_t *number; // with padding, if needed: valid keys before each position; NULL: the
                            // position
    uint32_t *first_index;  // [segments][kv_len]: at a sequence's first position, the kept keys of
                            // the segment before it; NULL: slots are not wanted
    int index_digits;       // digits of 8 bits in the index of a sequence, to sort by; 0: not
                            // packed
    bool causal;            // scope; also false if the window is 0
};

/* True if some query keeps keys by the rule `recent`. If there are at least as many slots as keys,
 * every query keeps all that it sees, and the rule changes nothing. */
static inline bool keeps_recent(const fdma_problem *problem) {
    return problem->recent > 0 && problem->slots < problem->kv_len;
}

/* Digits of 8 bits in the indices of packed sequences. Positions after the last sequence have the
 * number of sequences as their index. */
static inline int count_index_digits(const fdma_problem *problem) {
    const int64_t count = is_present(&problem->starts) ? problem->starts.shape[0] - 1 : 0;
    int digits = is_present(&problem->starts) ? 1 : 0;
    while (digits > 0 && count >> 8 * digits != 0)
        digits++;
    return digits;
}

/* With the rule `recent`, slots follow from the moved expiries, so the selection by score writes
 * none. fdma_cuda_find_sinks() adds sink_end and number. */
static inline select_call describe_select(const fdma_problem *problem,
                                          const packed_sequences &sequences,
                                          uint32_t *first_index) {
    const bool moves = keeps_recent(problem);
    select_call call = {};
    call.score = numbers_of<const float>(&problem->score);
    call.expiry = numbers_of<int32_t>(&problem->expiry);
    if (!moves)
        call.slot = numbers_of<int32_t>(&problem->slot);
    call.valid = (const uint8_t *)problem->key_valid.data;
    call.valid_batch = problem->key_valid.stride[0];
    call.kv_heads = (uint32_t)problem->kv_heads;
    call.kv_len = (uint32_t)problem->kv_len;
    call.window = (uint32_t)min(moves ? problem->window : problem->slots, problem->kv_len);
    call.sinks = (uint32_t)min(problem->sinks, problem->kv_len);
    call.recent = moves ? (uint32_t)problem->recent : 0;
    call.causal = problem->scope == FDMA_SCOPE_CAUSAL && problem->window > 0;
    call.ranges = sequences.ranges;
    call.index = sequences.index;
    call.first_index = first_index;
    call.index_digits = count_index_digits(problem);
    return call;
}

/* Takes first_index from the arena, if a selection by score has slots of packed sequences. */
static inline uint32_t *take_first_index(const fdma_problem *problem, fdma_arena *arena) {
    if (!is_present(&problem->starts) || !is_present(&problem->slot) || keeps_recent(problem))
        return NULL;
    return take<uint32_t>(arena, problem->kv_heads * problem->kv_len);
}

__device__ static select_segment segment_of(const select_call &call, uint32_t segment) {
    const int64_t b = segment / call.kv_heads, g = segment % call.kv_heads;
    return {call.score.at(b, g),
            call.valid != NULL ? call.valid + b * call.valid_batch : NULL,
            call.sink_end != NULL ? call.sink_end[b] : call.sinks,
            call.expiry.at(b, g),
            call.slot.data != NULL ? call.slot.at(b, g) : NULL,
            call.first_index + (size_t)segment * call.kv_len};
}

/* The end of the last sequence. Keys from there on belong to none. */
__device__ static uint32_t end_of_sequences(const select_call &call) {
    return call.ranges == NULL ? call.kv_len : (uint32_t)call.ranges[call.kv_len - 1].y;
}

/* The number of valid keys of its own sequence before position j, in packed sequences. */
__device__ static uint32_t number_in_sequence(const select_call &call, uint32_t j) {
    const uint32_t first = (uint32_t)call.ranges[j].x;
    return call.number == NULL ? j - first : call.number[j] - call.number[first];
}

/* Set in the position of a key that is not valid or lies past the end, which puts it after every
 * position. */
static constexpr uint32_t absent = 1U << 31;

/* True if valid key j of a segment is a sink. Sequences may be packed. */
__device__ static bool is_sink(const select_call &call, const select_segment &segment, uint32_t j) {
    return call.ranges != NULL && segment.sink_end > 0
               ? number_in_sequence(call, j) < segment.sink_end
               : j < segment.sink_end;
}

/* The sort key of key j of a segment: {order, position}. */
template <bool packed>
__device__ static uint2 load_key(const select_call &call, const select_segment &segment,
                                 uint32_t j) {
    if (j >= call.kv_len || (segment.valid != NULL && segment.valid[j] == 0))
        return make_uint2(order_none, j | absent);
    if (packed && j >= (uint32_t)call.ranges[j].y)
        return make_uint2(order_none, j | absent);
    const bool outranks_all = packed ? is_sink(call, segment, j) : j < segment.sink_end;
    return make_uint2(outranks_all ? order_sink : order_of(segment.score[j]), j);
}

/* The second sort criterion, after the order: the index of a key's sequence. A key past the end
 * comes after the keys of all sequences. */
__device__ static uint32_t sequence_of(const select_call &call, uint32_t position) {
    const uint32_t j = position & ~absent;
    return j < call.kv_len ? call.index[j] : UINT32_MAX;
}

/* `allowed` in the allowance {rank, allowed} of a key that is kept in any case. Another key is kept
 * if fewer than `allowed` earlier keys of its position partition outrank it; 0: never kept. */
static constexpr uint32_t always_kept = UINT32_MAX;

/* Marks a parent that is a slot: the slot of the first key of a chain. */
static constexpr uint32_t is_slot = 1U << 31;

enum { warp_lanes = 32, digit_bits = 8, digits = 1 << digit_bits, key_bits = 32 };

static constexpr uint32_t all_lanes = 0xffffffff;

__device__ static uint32_t digit_of(uint32_t order, int shift) {
    return order >> shift & (digits - 1);
}

__device__ static uint32_t match_digit(uint32_t order, int shift) {
    uint32_t same = all_lanes;
#pragma unroll
    for (int bit = 0; bit < digit_bits; bit++)
        same &= vote_ballot_same(order >> shift, 1U << bit);
    return same;
}

/* Counts the digits of a warp's keys into count[]. before[r]: the number of the warp's keys with
 * the same digit before key r of this lane, which is the warp's key 32 r + lane. */
template <int items>
__device__ static void count_digits(uint32_t *count, const uint32_t (&order)[items], int shift,
                                    uint32_t (&before)[items]) {
    const uint32_t lane = threadIdx.x % warp_lanes;
    uint4 *const quads = reinterpret_cast<uint4 *>(count);
    for (uint32_t n = lane; n < digits / 4; n += warp_lanes)
        quads[n] = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int r = 0; r < items; r++)
        before[r] = match_digit(order[r], shift);
    __syncwarp();
#pragma unroll
    for (int r = 0; r < items; r++) {
        const uint32_t same = before[r], lower = same & lanemask_lt();
        uint32_t *const digit_count = &count[digit_of(order[r], shift)];
        const uint32_t base = *digit_count;
        __syncwarp();
        if (lower == 0)
            *digit_count = base + __popc(same);
        __syncwarp();
        before[r] = base + __popc(lower);
    }
}

/* Replaces each warp's count of a digit by the sum over the lower warps. Returns the sum of all. */
template <int warps>
__device__ static uint32_t sum_digit(uint32_t (&digit_count)[warps][digits], uint32_t digit) {
    uint32_t sum = 0;
#pragma unroll
    for (int w = 0; w < warps; w++) {
        const uint32_t count = digit_count[w][digit];
        digit_count[w][digit] = sum;
        sum += count;
    }
    return sum;
}

__device__ static uint32_t sum_lower_lanes(uint32_t value) {
    const uint32_t lane = threadIdx.x % warp_lanes;
    uint32_t sum = value;
#pragma unroll
    for (uint32_t step = 1; step < warp_lanes; step *= 2) {
        const uint32_t lower = __shfl_up_sync(all_lanes, sum, step);
        sum += lane >= step ? lower : 0;
    }
    return sum - value;
}

/* The sum of `value`, one per warp, over the lower warps; *total: over all warps. count[] is
 * scratch, one word per warp. All threads of the block call it. */
template <int warps>
__device__ static uint32_t sum_lower_warps(uint32_t *count, uint32_t value, uint32_t *total) {
    const uint32_t warp = threadIdx.x / warp_lanes, lane = threadIdx.x % warp_lanes;
    if (lane == 0)
        count[warp] = value;
    __syncthreads();
    const uint32_t others = lane < warps ? count[lane] : 0;
    *total = __reduce_add_sync(all_lanes, others);
    const uint32_t lower = __reduce_add_sync(all_lanes, lane < warp ? others : 0);
    __syncthreads();
    return lower;
}

/* Gives the lanes whose `flag` is set the numbers from *next on, and advances *next past them. */
__device__ static uint32_t number_flag(bool flag, uint32_t *next) {
    const uint32_t lanes = __ballot_sync(all_lanes, flag), first = *next;
    *next += __popc(lanes);
    return first + __popc(lanes & lanemask_lt());
}

/* Key r of a thread has entry first + r * stride of next[]. next[] and root[r] hold the entry of
 * the key before it in its chain, or its own entry if it is the first. Moves both to the first
 * entry of the chain. Each iteration halves the length of all chains. */
template <int items>
__device__ static void jump_to_roots(uint32_t *next, uint32_t (&root)[items], uint32_t first,
                                     uint32_t stride) {
    bool changed = true;
    while (__syncthreads_or(changed)) {
        changed = false;
#pragma unroll
        for (int r = 0; r < items; r++) {
            const uint32_t farther = next[root[r]];
            changed |= farther != root[r];
            root[r] = farther;
        }
        __syncthreads();
#pragma unroll
        for (int r = 0; r < items; r++)
            next[first + r * stride] = root[r];
    }
}

/* Writes the result of key j once it is known to be kept or not. In causal scope the expiry and
 * slot of a kept key follow in later steps. */
__device__ static void write_key(const select_segment &segment, uint32_t j, uint32_t expiry,
                                 int32_t slot) {
    segment.expiry[j] = (int32_t)expiry;
    if (segment.slot != NULL)
        segment.slot[j] = slot;
}

/* The reason why no kernel of a table takes a call: its device, with the reason or NULL in
 * `device`, or its scores. */
static inline const char *refuses_scores(const fdma_problem *problem, const char *device) {
    if (device != NULL)
        return device;
    if (is_present(&problem->starts) && problem->starts.shape[0] > INT32_MAX)
        return "2^31 or more packed sequences";
    return problem->dtype == FDMA_FLOAT32 ? NULL : "float64 scores; supported: float32";
}
