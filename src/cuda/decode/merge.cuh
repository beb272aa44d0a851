/* The second kernel of decode: a thread block merges the splits of one row, in order. */
#pragma once

#include "cuda/decode/split.cuh"

static constexpr int merge_threads = 256;

template <typename config> struct merge_memory {
    static constexpr int warps = merge_threads / warp_lanes;
    float weight[most_splits], sum[most_splits];
    float out[warps][config::head_dim];
};

/* Turns the row_max of each split into the weight of the split. Returns row_max and row_sum of the
 * whole row. Every warp sums the same numbers in the same order. */
template <typename config>
__device__ static float2 weigh_splits(merge_memory<config> &shared, const float2 *stats,
                                      int32_t count) {
    float max = least_max, sum = 0;
    for (int n = threadIdx.x; n < count; n += merge_threads) {
        shared.weight[n] = stats[n].x;
        shared.sum[n] = stats[n].y;
    }
    __syncthreads();
    const int lane = threadIdx.x % warp_lanes;
    for (int n = lane; n < count; n += warp_lanes)
        max = fmaxf(max, shared.weight[n]);
    for (int other = 1; other < warp_lanes; other *= 2)
        max = fmaxf(max, __shfl_xor_sync(~0u, max, other));
    for (int n = lane; n < count; n += warp_lanes)
        sum += shared.sum[n] == 0 ? 0 : ex2_approx(shared.weight[n] - max) * shared.sum[n];
    for (int other = 1; other < warp_lanes; other *= 2)
        sum += __shfl_xor_sync(~0u, sum, other);
    __syncthreads();
    for (int n = threadIdx.x; n < count; n += merge_threads)
        shared.weight[n] = shared.sum[n] == 0 ? 0 : ex2_approx(shared.weight[n] - max);
    __syncthreads();
    return make_float2(max, sum);
}

/* Each warp adds up the weighted out of every eighth split, in shared memory. */
template <typename config>
__device__ static void sum_splits(merge_memory<config> &shared, const float *out, int32_t count,
                                  int32_t head_dim) {
    constexpr int warps = merge_memory<config>::warps;
    const int warp = threadIdx.x / warp_lanes, lane = threadIdx.x % warp_lanes;
    for (int d = lane * 4; d < head_dim; d += warp_lanes * 4) {
        float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 8
        for (int n = warp; n < count; n += warps) {
            const float weight = shared.weight[n];
            const float4 x = *(const float4 *)(out + n * head_dim + d);
            // not 0 * x: out of an empty split may be NaN
            sum.x += weight == 0 ? 0 : weight * x.x;
            sum.y += weight == 0 ? 0 : weight * x.y;
            sum.z += weight == 0 ? 0 : weight * x.z;
            sum.w += weight == 0 ? 0 : weight * x.w;
        }
        *(float4 *)&shared.out[warp][d] = sum;
    }
}

/* Writes out and lse of row `row` of a range. Its partial results begin at `first`. */
template <typename config>
__device__ static void merge_row(merge_memory<config> &shared, const forward_plan &plan,
                                 const split_plan &splits, const row_range &range, int32_t row,
                                 int64_t first) {
    const float2 all = weigh_splits(shared, splits.stats + first, splits.count);
    sum_splits(shared, splits.out + first * plan.head_dim, splits.count, plan.head_dim);
    __syncthreads();
    const row_result result = result_of(all.x, all.y, sink_of_row(plan, range, row));
    typename config::element *const to =
        (typename config::element *)plan.out.data + row_offset(plan.out, plan, range, row);
    for (int d = threadIdx.x; d < plan.head_dim; d += merge_threads) {
        float out = 0;
        for (int w = 0; w < merge_memory<config>::warps; w++)
            out += shared.out[w][d];
        to[d] = (typename config::element)(result.scale == 0 ? 0 : out * result.scale);
    }
    if (threadIdx.x == 0 && plan.lse.data != NULL)
        *lse_at(plan, range, row) = result.lse;
}

template <typename config>
static __global__ void __launch_bounds__(merge_threads, 1)
    merge_splits(const __grid_constant__ forward_plan plan,
                 const __grid_constant__ split_plan splits) {
    __shared__ merge_memory<config> shared;
    const int32_t total = plan.q_len * plan.group, row = blockIdx.x % total;
    const row_range range = row_range_of(plan, blockIdx.x / total, 0);
    griddepcontrol_wait(); // for attend_split()
    merge_row(shared, plan, splits, range, row, (int64_t)blockIdx.x * splits.count);
}
