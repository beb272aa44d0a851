/* Hands down slots (slots.cuh) in three launches, on any device from compute capability 8.0. */
#include "cuda/select/slots.cuh"

enum {
    head_threads = 1024,
    head_items = 8,
    head_keys = head_threads * head_items, // keys whose chains one block follows by itself
};

/* What a block handles: head_keys consecutive keys of one segment. */
struct head_work {
    uint32_t segment, first, end; // first, end: numbers of its keys
    size_t keys, shared;          // where the segment begins in chain_space, and in `position`
};

__device__ static head_work find_head_work(const select_call &call, const slot_chains &chains) {
    head_work work;
    work.segment = blockIdx.x % chains.segments; // the first keys of all segments come first
    work.first = blockIdx.x / chains.segments * head_keys;
    const uint32_t sharers = work.segment / chains.sharing;
    const uint32_t count = chains.count != NULL ? chains.count[sharers] : end_of_sequences(call);
    work.end = min(work.first + head_keys, count);
    work.keys = (size_t)work.segment * call.kv_len;
    work.shared = (size_t)sharers * call.kv_len;
    return work;
}

/* The number of key n in its own sequence. */
__device__ static uint32_t number_of(const select_call &call, const slot_chains &chains,
                                     const head_work &work, uint32_t n) {
    if (call.ranges == NULL)
        return n;
    const uint32_t j = chains.position != NULL ? chains.position[work.shared + n] : n;
    const uint32_t first = (uint32_t)call.ranges[j].x;
    return n - (chains.number != NULL ? chains.number[work.shared + first] : first);
}

struct head_memory {
    uint32_t head[head_keys];
};

/* head: the first key of the block that has the same slot. Its parent is in an earlier block, or,
 * if it is the first key of its slot, is the slot itself. */
static __global__ void __launch_bounds__(head_threads)
    find_heads(const select_call call, const slot_chains chains) {
    head_memory &shared = shared_memory<head_memory>();
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    const head_work work = find_head_work(call, chains);
    uint32_t *const parent = chains.space.parent + work.keys;
    if (work.first >= work.end)
        return;
    uint32_t head[head_items]; // entries past the end are their own heads
#pragma unroll
    for (int r = 0; r < head_items; r++) {
        const uint32_t index = r * head_threads + threadIdx.x, n = work.first + index;
        const uint32_t number = n < work.end ? number_of(call, chains, work, n) : 0;
        if (number < chains.slots && n < work.end)
            parent[n] = number | is_slot;
        const bool follows = number >= chains.slots && parent[n] >= work.first;
        shared.head[index] = head[r] = follows ? parent[n] - work.first : index;
    }
    jump_to_heads(shared.head, head, threadIdx.x, head_threads);
#pragma unroll
    for (int r = 0; r < head_items; r++) {
        const uint32_t n = work.first + r * head_threads + threadIdx.x;
        if (n < work.end)
            chains.space.head[work.keys + n] = work.first + head[r];
    }
}

/* Each head goes from head to head up to its slot, all heads of a thread at once. A parent that it
 * reads may already have been moved by another thread: then it is an earlier key of the same slot,
 * or the slot, and the way is shorter. */
static __global__ void __launch_bounds__(head_threads)
    follow_heads(const select_call call, const slot_chains chains) {
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    const head_work work = find_head_work(call, chains);
    const uint32_t *const head = chains.space.head + work.keys;
    uint32_t *const parent = chains.space.parent + work.keys;
    uint32_t slot[head_items];
#pragma unroll
    for (int r = 0; r < head_items; r++) {
        const uint32_t n = work.first + r * head_threads + threadIdx.x;
        const bool is_head = n < work.end && head[n] == n;
        slot[r] = is_head ? parent[n] : is_slot;
    }
    for (bool found = false; !found;) {
        uint32_t next[head_items];
        found = true;
#pragma unroll
        for (int r = 0; r < head_items; r++)
            next[r] = (slot[r] & is_slot) != 0 ? slot[r] : ld_relaxed_gpu(&parent[head[slot[r]]]);
#pragma unroll
        for (int r = 0; r < head_items; r++) {
            if (next[r] != slot[r])
                st_relaxed_gpu(&parent[work.first + r * head_threads + threadIdx.x], next[r]);
            slot[r] = next[r];
            found &= (slot[r] & is_slot) != 0;
        }
    }
}

static __global__ void __launch_bounds__(head_threads)
    write_slots(const select_call call, const slot_chains chains) {
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    const head_work work = find_head_work(call, chains);
    const select_segment segment = segment_of(call, work.segment);
    const uint32_t *const position = chains.position;
    for (uint32_t n = work.first + threadIdx.x; n < work.end; n += head_threads)
        segment.slot[position != NULL ? position[work.shared + n] : n] =
            (int32_t)(chains.space.parent[work.keys + chains.space.head[work.keys + n]] & ~is_slot);
}

fdma_status fdma_cuda_hand_down_slots(const fdma_problem *problem, const select_call &call,
                                      const slot_chains &chains) {
    const uint32_t blocks = (uint32_t)divide_up(call.kv_len, head_keys);
    launch_shape shape = {dim3(chains.segments * blocks), dim3(head_threads), sizeof(head_memory),
                          start_early};
    FDMA_TRY(launch("select", find_heads, shape, problem, call, chains));
    shape.shared_bytes = 0;
    FDMA_TRY(launch("select", follow_heads, shape, problem, call, chains));
    return launch("select", write_slots, shape, problem, call, chains);
}
