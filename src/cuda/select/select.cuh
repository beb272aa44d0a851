/* Selection, whatever its kernels: what they are called with, the order of keys, ranks by digits.
 *
 * All valid keys of a segment, a (batch, kv head) pair, are sorted: `place` is a key's place in
 * that order, the worst first. A key of causal scope is ever kept if fewer than `window` earlier
 * keys have a higher place; of those that are,
 * - the i-th worst is evicted by the one that is `window` + i-th by position,
 * - the k-th by position takes slot k, or after the first `window` the slot of the one it evicts,
 * because the worst kept key only gets better. Padding and NaN: see order_of(). */
#ifndef FDMA_CUDA_SELECT_SELECT_CUH
#define FDMA_CUDA_SELECT_SELECT_CUH

#include "cuda/device/host.cuh"
#include "cuda/device/ptx.cuh"

/* One segment: pointers to its first key. */
struct select_segment {
    const float *score;
    const uint8_t *valid; // NULL: all are
    int32_t *expiry;
    int32_t *slot; // NULL: nobody wants slots
};

struct select_call {
    select_segment first;
    int64_t score_batch, score_head, valid_batch; // strides in elements
    int64_t expiry_batch, expiry_head, slot_batch, slot_head;
    uint32_t kv_heads, kv_len;
    uint32_t window; // at most kv_len
    bool causal;     // scope; false too where the window is 0
};

static inline select_call describe_select(const fdma_problem *problem) {
    const fdma_tensor *const score = &problem->score, *const expiry = &problem->expiry;
    const fdma_tensor *const slot = &problem->slot, *const valid = &problem->key_valid;
    select_call call = {};
    call.first.score = (const float *)score->data;
    call.first.valid = is_present(valid) ? (const uint8_t *)valid->data : NULL;
    call.first.expiry = (int32_t *)expiry->data;
    call.first.slot = is_present(slot) ? (int32_t *)slot->data : NULL;
    call.score_batch = score->stride[0];
    call.score_head = score->stride[1];
    call.valid_batch = is_present(valid) ? valid->stride[0] : 0;
    call.expiry_batch = expiry->stride[0];
    call.expiry_head = expiry->stride[1];
    call.slot_batch = is_present(slot) ? slot->stride[0] : 0;
    call.slot_head = is_present(slot) ? slot->stride[1] : 0;
    call.kv_heads = (uint32_t)problem->kv_heads;
    call.kv_len = (uint32_t)problem->kv_len;
    call.window = (uint32_t)(problem->window < problem->kv_len ? problem->window : problem->kv_len);
    call.causal = problem->scope == FDMA_SCOPE_CAUSAL && problem->window > 0;
    return call;
}

__device__ static inline select_segment segment_of(const select_call &call, uint32_t segment) {
    const int64_t b = segment / call.kv_heads, g = segment % call.kv_heads;
    select_segment here = call.first;
    here.score += b * call.score_batch + g * call.score_head;
    here.expiry += b * call.expiry_batch + g * call.expiry_head;
    if (here.valid)
        here.valid += b * call.valid_batch;
    if (here.slot)
        here.slot += b * call.slot_batch + g * call.slot_head;
    return here;
}

/* A key as it is sorted: its position, with this bit where there is none to keep. So that absent
 * keys are before no position. */
static constexpr uint32_t absent = 1U << 31;

/* The score's place in the order of the reals: both zeros alike, NaN below all, no key below NaN.
 * In integers, because subnormal numbers count for what they are. */
__device__ static inline uint32_t order_of(float score) {
    const uint32_t bits = __float_as_uint(score), magnitude = bits & ~(1U << 31);
    const uint32_t infinity = 0x7f800000, order_nan = 1;
    if (magnitude > infinity)
        return order_nan;
    if (magnitude == 0)
        return 1U << 31;
    return bits >> 31 ? ~bits : bits | 1U << 31;
}

/* Key j of a segment: {order, position}. */
__device__ static inline uint2 load_key(const select_segment &segment, uint32_t j,
                                        uint32_t kv_len) {
    if (j >= kv_len || (segment.valid && !segment.valid[j]))
        return make_uint2(0, j | absent);
    return make_uint2(order_of(segment.score[j]), j);
}

/* What says how many earlier keys of its chunk may outrank a key that is kept. */
static constexpr uint32_t always_kept = UINT32_MAX;

enum { warp_lanes = 32, digit_bits = 8, digits = 1 << digit_bits, key_bits = 32 };

static constexpr uint32_t all_lanes = 0xffffffff;

__device__ static inline uint32_t digit_of(uint32_t order, int shift) {
    return order >> shift & (digits - 1);
}

/* The lanes whose digit, at this bit of the order and the next ones, is the same. */
__device__ static inline uint32_t match_digit(uint32_t order, int shift) {
    uint32_t same = all_lanes;
#pragma unroll
    for (int bit = 0; bit < digit_bits; bit++)
        same &= vote_ballot_same(order >> shift, 1U << bit);
    return same;
}

/* Counts the digits of a warp's keys, key `r` of lane l being the 32 r + l-th, into count[], and
 * how many keys of the same digit precede each. */
template <int items>
__device__ static inline void count_digits(uint32_t *count, const uint32_t (&order)[items],
                                           int shift, uint32_t (&before)[items]) {
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
        uint32_t *const mine = &count[digit_of(order[r], shift)];
        const uint32_t base = *mine;
        __syncwarp();
        if (lower == 0)
            *mine = base + __popc(same);
        __syncwarp();
        before[r] = base + __popc(lower);
    }
}

/* Sum over the lower lanes. */
__device__ static inline uint32_t sum_lower_lanes(uint32_t value) {
    const uint32_t lane = threadIdx.x % warp_lanes;
    uint32_t sum = value;
#pragma unroll
    for (uint32_t step = 1; step < warp_lanes; step *= 2) {
        const uint32_t lower = __shfl_up_sync(all_lanes, sum, step);
        sum += lane >= step ? lower : 0;
    }
    return sum - value;
}

/* Of each warp's count, the sum over the lower warps, and the sum of all; count[]: scratch, one
 * word a warp. All threads of the block. */
template <int warps>
__device__ static inline uint32_t sum_lower_warps(uint32_t *count, uint32_t value,
                                                  uint32_t *total) {
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

#endif
