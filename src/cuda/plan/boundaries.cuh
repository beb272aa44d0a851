/* The end of a backward call with partitions: adds the boundary sums to the gradients of the keys
 * that are live at the boundaries. */
#pragma once

#include "cuda/device/grid.cuh"
#include "cuda/plan/backward.cuh"

static constexpr int boundary_threads = 128;

template <typename element>
__device__ static void add_channels(element *to, const float (&sum)[vec_channels], bool aligned) {
    float old[vec_channels];
    load_vec(old, to, aligned);
#pragma unroll
    for (int x = 0; x < vec_channels; x++)
        old[x] += sum[x];
    store_vec(to, old, aligned);
}

/* The key in a slot at a boundary; -1 if the slot is empty or there is no such boundary. */
__device__ static int32_t key_at_boundary(const backward_plan &plan, int64_t head, int32_t boundary,
                                          int32_t slot) {
    return boundary < plan.partitions
               ? key_in_slot(plan, head, boundary * plan.partition_lists, slot)
               : -1;
}

/* Adds the boundary sums of each key, in order, and then the total to the key's gradients. For each
 * slot and boundary one set of lanes takes dk and another dv, eight channels per lane. They add all
 * boundary sums of the key that is live there. If it is live at the next boundary too, the lanes of
 * that boundary do so instead. */
template <typename element, int lanes>
static __global__ void __launch_bounds__(boundary_threads)
    add_boundaries(const __grid_constant__ backward_plan plan, const bool aligned) {
    const forward_plan &forward = plan.forward;
    const int64_t head = head_of_block(), b = head / forward.kv_heads, g = head % forward.kv_heads;
    const int32_t group = (blockIdx.x * boundary_threads + threadIdx.x) / lanes;
    const int32_t last = 1 + group / (2 * plan.slots), slot = group / 2 % plan.slots;
    const int32_t d = threadIdx.x % lanes * vec_channels;
    const bool is_dv = group % 2 != 0;
    griddepcontrol_wait(); // for the passes
    if (head >= (int64_t)forward.batch * forward.kv_heads || last >= plan.partitions ||
        d >= forward.head_dim)
        return;
    const int32_t key = key_at_boundary(plan, head, last, slot);
    if (!is_key(key, forward.kv_len) || key_at_boundary(plan, head, last + 1, slot) == key)
        return;
    int32_t first = last;
    while (first > 1 && key_at_boundary(plan, head, first - 1, slot) == key)
        first--;
    const float *const from = (is_dv ? plan.boundary.dv : plan.boundary.dk) + d;
    float sum[vec_channels] = {}, dbias = 0;
    for (int32_t n = first; n <= last; n++) {
        const int64_t row = boundary_row(plan, head, n, slot);
        float more[vec_channels];
        load_vec(more, from + row * forward.head_dim, true);
#pragma unroll
        for (int x = 0; x < vec_channels; x++)
            sum[x] += more[x];
        dbias += plan.boundary.dbias[row];
    }
    element *const to =
        is_dv ? dv_of_key<element>(plan, b, g, key) : dk_of_key<element>(plan, b, g, key);
    add_channels(to + d, sum, aligned);
    if (!is_dv && d == 0 && plan.dbias.data != NULL)
        *dbias_of_key(plan, b, g, key) += dbias;
}
