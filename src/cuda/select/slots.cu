/* Hands down slots (slots.cuh) in three launches, on any device from compute capability 8.0. */
#include "cuda/select/slots.cuh"

enum {
    chain_threads = 1024,
    chain_items = 8,
    chain_keys = chain_threads * chain_items, // keys whose chains one block follows itself
};

/* The work of a block: chain_keys consecutive keys of one segment. */
struct chain_work {
    uint32_t segment, first, end; // first, end: numbers of its keys
    size_t keys, shared;          // offset of the segment in chain_space, and in `position`
};

__device__ static chain_work find_work(const select_call &call, const slot_chains &chains) {
    chain_work work;
    work.segment = blockIdx.x % chains.segments; // the first keys of all segments come first
    work.first = blockIdx.x / chains.segments * chain_keys;
    const uint32_t sharers = work.segment / chains.sharing;
    const uint32_t count = chains.count != NULL ? chains.count[sharers] : end_of_sequences(call);
    work.end = min(work.first + chain_keys, count);
    work.keys = (size_t)work.segment * call.kv_len;
    work.shared = (size_t)sharers * call.kv_len;
    return work;
}

__device__ static uint32_t number_of(const select_call &call, const slot_chains &chains,
                                     const chain_work &work, uint32_t n) {
    if (call.ranges == NULL)
        return n;
    const uint32_t j = chains.position != NULL ? chains.position[work.shared + n] : n;
    const uint32_t first = (uint32_t)call.ranges[j].x;
    return n - (chains.number != NULL ? chains.number[work.shared + first] : first);
}

struct root_memory {
    uint32_t root[chain_keys];
};

/* root: the first key of the block with the same slot. Its parent is in an earlier block or, if it
 * is the first key of its slot, is the slot itself. */
static __global__ void __launch_bounds__(chain_threads)
    find_roots(const select_call call, const slot_chains chains) {
    root_memory &shared = shared_memory<root_memory>();
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    const chain_work work = find_work(call, chains);
    uint32_t *const parent = chains.space.parent + work.keys;
    if (work.first >= work.end)
        return;
    uint32_t root[chain_items]; // entries past the end are their own roots
#pragma unroll
    for (int r = 0; r < chain_items; r++) {
        const uint32_t index = r * chain_threads + threadIdx.x, n = work.first + index;
        const uint32_t number = n < work.end ? number_of(call, chains, work, n) : 0;
        if (number < chains.slots && n < work.end)
            parent[n] = number | is_slot;
        const bool follows = number >= chains.slots && parent[n] >= work.first;
        shared.root[index] = root[r] = follows ? parent[n] - work.first : index;
    }
    jump_to_roots(shared.root, root, threadIdx.x, chain_threads);
#pragma unroll
    for (int r = 0; r < chain_items; r++) {
        const uint32_t n = work.first + r * chain_threads + threadIdx.x;
        if (n < work.end)
            chains.space.root[work.keys + n] = work.first + root[r];
    }
}

/* Each root follows the roots before it to its slot, all roots of a thread at once. Another thread
 * may already have moved a parent that it reads: then the parent is an earlier key of the same
 * slot, or the slot, and the path is shorter. */
static __global__ void __launch_bounds__(chain_threads)
    follow_roots(const select_call call, const slot_chains chains) {
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    const chain_work work = find_work(call, chains);
    const uint32_t *const root = chains.space.root + work.keys;
    uint32_t *const parent = chains.space.parent + work.keys;
    uint32_t slot[chain_items];
#pragma unroll
    for (int r = 0; r < chain_items; r++) {
        const uint32_t n = work.first + r * chain_threads + threadIdx.x;
        const bool is_root = n < work.end && root[n] == n;
        slot[r] = is_root ? parent[n] : is_slot;
    }
    for (bool found = false; !found;) {
        uint32_t next[chain_items];
        found = true;
#pragma unroll
        for (int r = 0; r < chain_items; r++)
            next[r] = (slot[r] & is_slot) != 0 ? slot[r] : ld_relaxed_gpu(&parent[root[slot[r]]]);
#pragma unroll
        for (int r = 0; r < chain_items; r++) {
            if (next[r] != slot[r])
                st_relaxed_gpu(&parent[work.first + r * chain_threads + threadIdx.x], next[r]);
            slot[r] = next[r];
            found &= (slot[r] & is_slot) != 0;
        }
    }
}

static __global__ void __launch_bounds__(chain_threads)
    write_slots(const select_call call, const slot_chains chains) {
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    const chain_work work = find_work(call, chains);
    const select_segment segment = segment_of(call, work.segment);
    const uint32_t *const position = chains.position;
    for (uint32_t n = work.first + threadIdx.x; n < work.end; n += chain_threads)
        segment.slot[position != NULL ? position[work.shared + n] : n] =
            (int32_t)(chains.space.parent[work.keys + chains.space.root[work.keys + n]] & ~is_slot);
}

fdma_status fdma_cuda_hand_down_slots(const fdma_problem *problem, const select_call &call,
                                      const slot_chains &chains) {
    const uint32_t blocks = (uint32_t)divide_up(call.kv_len, chain_keys);
    launch_shape shape = {dim3(chains.segments * blocks), dim3(chain_threads), sizeof(root_memory),
                          start_early};
    FDMA_TRY(launch("select", find_roots, shape, problem, call, chains));
    shape.shared_bytes = 0;
    FDMA_TRY(launch("select", follow_roots, shape, problem, call, chains));
    return launch("select", write_slots, shape, problem, call, chains);
}
