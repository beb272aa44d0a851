/* Selection of segments of any length, on any device of compute capability 8.0 and later.
 *
 * Places and positions are cut into chunks, about as many as a chunk has keys, so that tables of
 * chunks by chunks are no larger than the keys.
 *
 *     sort_segments    {order, position} by place, see select_sort.cuh
 *     count_before     of each chunk of places, how many keys are before each chunk of positions
 *     find_floors      for each chunk of positions, the place of the worst key kept before it
 *     judge_places     between which floors is a key? Mostly that settles whether it is kept, else
 *                      how many keys of its chunk may outrank it
 *     judge_positions  counts those
 *     number_kept      the kept keys by position, and where they stand by place
 *     match_kept       the i-th worst expires at the window + i-th by position
 *     find_heads, follow_heads, write_slots    slots are handed down */
#include "cuda/select/sm80/borders.cuh"

/* ---- which keys are ever kept ---- */

enum { few_lanes = 8 }; // that a warp still counts for one after the other

/* For each lane, how many of the words `from` to `to` - 1 of a chunk are below `bound`: where many
 * lanes want to know, each for itself. Their ranges begin, or end, near each other. */
__device__ static uint32_t count_alone(const uint32_t *word, bool wanted, uint32_t from,
                                       uint32_t to, uint32_t bound) {
    const uint32_t least_from = __reduce_min_sync(all_lanes, wanted ? from : UINT32_MAX);
    const uint32_t most_from = __reduce_max_sync(all_lanes, wanted ? from : 0);
    const uint32_t least_to = __reduce_min_sync(all_lanes, wanted ? to : UINT32_MAX);
    const uint32_t most_to = __reduce_max_sync(all_lanes, wanted ? to : 0);
    uint32_t count = 0;
    for (uint32_t n = least_from; n < min(most_from, most_to); n++)
        count += n >= from && n < to && word[n] < bound;
#pragma unroll 8
    for (uint32_t n = most_from; n < least_to; n++)
        count += word[n] < bound;
    for (uint32_t n = max(most_from, least_to); n < most_to; n++)
        count += n >= from && n < to && word[n] < bound;
    return count;
}

/* The same; where few lanes want to know, all count for one after the other. */
__device__ static uint32_t count_below(const uint32_t *word, bool wanted, uint32_t from,
                                       uint32_t to, uint32_t bound) {
    const uint32_t lanes = __ballot_sync(all_lanes, wanted);
    const int own = (int)(threadIdx.x % warp_lanes);
    uint32_t count = 0;
    if (__popc(lanes) > few_lanes)
        return count_alone(word, wanted, from, to, bound);
    for (uint32_t left = lanes; left; left &= left - 1) {
        const int lane = __ffs(left) - 1;
        const uint32_t end = __shfl_sync(all_lanes, to, lane);
        const uint32_t limit = __shfl_sync(all_lanes, bound, lane);
        uint32_t sum = 0;
        for (uint32_t n = __shfl_sync(all_lanes, from, lane) + own; n < end; n += warp_lanes)
            sum += word[n] < limit;
        sum = __reduce_add_sync(all_lanes, sum);
        count = lane == own ? sum : count;
    }
    return count;
}

/* How many keys of its chunk may outrank a key that is kept. By all lanes of a warp. */
__device__ static uint32_t judge_place(const chunk_memory &shared, const select_call &call,
                                       const select_space &space, const chunk_place &at,
                                       uint32_t place) {
    const uint32_t *const floor = space.floor + at.counts + at.segment;
    const uint32_t n = place - at.first, position = shared.word[n];
    const bool present = !(position & absent);
    const uint32_t q = present ? position >> space.shift : 0;
    const uint32_t others = present && place >= floor[q + 1] ? always_kept : 0;
    const bool unsure = present && others == 0 && place >= floor[q];
    uint32_t higher = // keys that are before chunk q of positions
        count_below(shared.word, unsure, n + 1, 1U << space.shift, q << space.shift);
    if (!unsure)
        return others;
    if (q > 0 && at.chunk + 1 < space.chunks)
        higher += space.border[(at.counts + at.chunk + 1) * space.chunks + q - 1];
    return call.window - higher;
}

/* The verdict on each key that may be kept goes to its position. Global scope keeps the best of
 * all, wherever they are. */
__global__ void __launch_bounds__(threads)
    judge_places(const select_call call, const select_space space) {
    chunk_memory &shared = shared_memory<chunk_memory>();
    const chunk_place at = find_chunk(call, space);
    const uint32_t size = 1U << space.shift;
    for (uint32_t n = threadIdx.x; n < size; n += threads)
        shared.word[n] =
            at.first + n < call.kv_len ? space.sort.key[at.keys + at.first + n].y : absent;
    __syncthreads();
    for (uint32_t n = threadIdx.x; n < size; n += threads) {
        const uint32_t place = at.first + n, position = shared.word[n];
        const bool best = !(position & absent) && place >= call.kv_len - call.window;
        const uint32_t others = call.causal ? judge_place(shared, call, space, at, place)
                                : best      ? always_kept
                                            : 0;
        if (others > 0)
            space.verdict[at.keys + position] = make_uint2(place, others);
    }
}

/* Whether the key that is n-th of this chunk of positions is ever kept. By all lanes of a warp. */
__device__ static bool judge_position(const chunk_memory &shared, uint32_t n, uint32_t others,
                                      uint32_t size) {
    const bool keeps = others >= size, unsure = others > 0 && !keeps;
    const uint32_t lower = count_below(shared.word, unsure, 0, n, shared.word[n] + 1);
    return keeps || (unsure && n - lower < others);
}

/* Counts a warp's kept keys by chunk of places, as a rule the same one for most. */
__device__ static inline void count_places(uint32_t *count, bool keeps, uint32_t chunk) {
    const uint32_t some = __ballot_sync(all_lanes, keeps);
    if (some == 0)
        return;
    const uint32_t first = __shfl_sync(all_lanes, chunk, __ffs(some) - 1);
    const uint32_t same = __ballot_sync(all_lanes, keeps && chunk == first);
    if (threadIdx.x % warp_lanes == 0)
        atomicAdd(&count[first], __popc(same));
    if (keeps && chunk != first)
        atomicAdd(&count[chunk], 1);
}

/* From here on a verdict is 1 for a kept key, else 0. */
__global__ void __launch_bounds__(threads)
    judge_positions(const select_call call, const select_space space) {
    chunk_memory &shared = shared_memory<chunk_memory>();
    const chunk_place at = find_chunk(call, space);
    const uint32_t size = 1U << space.shift;
    uint2 *const verdict = space.verdict + at.keys + at.first;
    uint32_t sum = 0, total;
    for (uint32_t n = threadIdx.x; n < size; n += threads)
        shared.word[n] = at.first + n < call.kv_len ? verdict[n].x : 0;
    __syncthreads();
    for (uint32_t n = threadIdx.x; n < size; n += threads) {
        const bool inside = at.first + n < call.kv_len;
        const uint32_t others = inside ? verdict[n].y : 0;
        const bool keeps = judge_position(shared, n, others, size);
        if (inside)
            verdict[n].y = keeps;
        count_places(space.by_place + at.counts, keeps, shared.word[n] >> space.shift);
        sum += keeps;
    }
    sum_lower_warps<warps>(shared.scratch, __reduce_add_sync(all_lanes, sum), &total);
    if (threadIdx.x == 0)
        space.by_position[at.counts + at.chunk] = total;
}

/* ---- kept keys, numbered by position and by place ---- */

/* What is to be written of a key by position. In global scope its number is its slot. */
__device__ static inline void write_key(const select_call &call, const select_segment &segment,
                                        uint32_t j, bool keeps, uint32_t number) {
    if (keeps && call.causal)
        return; // later
    segment.expiry[j] = (int32_t)(keeps ? call.kv_len : j);
    if (segment.slot)
        segment.slot[j] = keeps ? (int32_t)number : -1;
}

/* By kept number: positions; by place: numbers, in `key` where the order was. */
__global__ void __launch_bounds__(threads)
    number_kept(const select_call call, const select_space space) {
    chunk_memory &shared = shared_memory<chunk_memory>();
    const chunk_place at = find_chunk(call, space);
    const select_segment segment = segment_of(call, at.segment);
    uint32_t number = sum_counts(shared.scratch, space.by_position + at.counts, at.chunk);
    const uint32_t before = number;
    uint32_t sum = 0, total;
    const uint32_t first = at.first + at.warp * at.share;
    for (uint32_t j = first + at.lane; j < first + at.share; j += warp_lanes)
        sum += j < call.kv_len && space.verdict[at.keys + j].y;
    sum = __reduce_add_sync(all_lanes, sum);
    number += sum_lower_warps<warps>(shared.scratch, sum, &total);
    if (threadIdx.x == 0 && at.chunk + 1 == space.chunks)
        space.kept_all[at.segment] = before + total;
    for (uint32_t j = first + at.lane; j < first + at.share; j += warp_lanes) {
        const bool inside = j < call.kv_len;
        const uint2 verdict = inside ? space.verdict[at.keys + j] : make_uint2(0, 0);
        const bool keeps = verdict.y != 0;
        const uint32_t some = __ballot_sync(all_lanes, keeps);
        const uint32_t mine = number + __popc(some & lanemask_lt());
        number += __popc(some);
        if (!inside)
            continue;
        write_key(call, segment, j, keeps, mine);
        if (!keeps)
            continue;
        space.sort.key[at.keys + verdict.x].x = mine;
        space.kept[at.keys + mine] = j;
    }
}

/* By place: the i-th worst kept key is evicted by the kept key window + i, which is told whose slot
 * it takes. */
__global__ void __launch_bounds__(threads)
    match_kept(const select_call call, const select_space space) {
    chunk_memory &shared = shared_memory<chunk_memory>();
    const chunk_place at = find_chunk(call, space);
    const select_segment segment = segment_of(call, at.segment);
    const uint2 *const key = space.sort.key + at.keys;
    uint32_t rank = sum_counts(shared.scratch, space.by_place + at.counts, at.chunk);
    uint32_t sum = 0, total;
    const uint32_t first = at.first + at.warp * at.share;
    for (uint32_t place = first + at.lane; place < first + at.share; place += warp_lanes)
        sum += place < call.kv_len && key[place].x != UINT32_MAX;
    sum = __reduce_add_sync(all_lanes, sum);
    rank += sum_lower_warps<warps>(shared.scratch, sum, &total);
    for (uint32_t place = first + at.lane; place < first + at.share; place += warp_lanes) {
        const uint2 own = place < call.kv_len ? key[place] : make_uint2(UINT32_MAX, 0);
        const bool keeps = own.x != UINT32_MAX;
        const uint32_t some = __ballot_sync(all_lanes, keeps);
        const uint32_t evictor = rank + __popc(some & lanemask_lt()) + call.window;
        const bool evicted = evictor < space.kept_all[at.segment];
        rank += __popc(some);
        if (!keeps)
            continue;
        segment.expiry[own.y] = (int32_t)(evicted ? space.kept[at.keys + evictor] : call.kv_len);
        if (evicted && segment.slot)
            space.parent[at.keys + evictor] = own.x;
    }
}

/* ---- slots: a block has head_keys kept numbers of one segment ---- */

struct head_place {
    uint32_t segment, first, end;
    size_t keys;
};

__device__ static inline head_place find_head_block(const select_call &call,
                                                    const select_space &space) {
    head_place at;
    at.segment = blockIdx.x % space.sort.segments; // all segments' first keys come first
    at.first = blockIdx.x / space.sort.segments * head_keys;
    at.end = min(at.first + head_keys, space.kept_all[at.segment]);
    at.keys = (size_t)at.segment * call.kv_len;
    return at;
}

struct head_memory {
    uint32_t head[head_keys];
};

/* head: the first kept key of the block that has the same slot. Its parent is in an earlier block,
 * or it is the slot's first: its parent is the slot. */
__global__ void __launch_bounds__(head_threads)
    find_heads(const select_call call, const select_space space) {
    head_memory &shared = shared_memory<head_memory>();
    const head_place at = find_head_block(call, space);
    uint32_t *const parent = space.parent + at.keys;
    if (at.first >= at.end)
        return;
    bool changed = true;
    uint32_t head[head_items]; // past the end: its own
#pragma unroll
    for (int r = 0; r < head_items; r++) {
        const uint32_t index = r * head_threads + threadIdx.x, n = at.first + index;
        if (n < call.window && n < at.end)
            parent[n] = n;
        const bool follows = n >= call.window && n < at.end && parent[n] >= at.first;
        shared.head[index] = head[r] = follows ? parent[n] - at.first : index;
    }
    while (__syncthreads_or(changed)) {
        changed = false;
#pragma unroll
        for (int r = 0; r < head_items; r++) {
            const uint32_t next = shared.head[head[r]];
            changed |= next != head[r];
            head[r] = next;
        }
        __syncthreads();
#pragma unroll
        for (int r = 0; r < head_items; r++)
            shared.head[r * head_threads + threadIdx.x] = head[r];
    }
#pragma unroll
    for (int r = 0; r < head_items; r++) {
        const uint32_t n = at.first + r * head_threads + threadIdx.x;
        if (n < at.end)
            space.head[at.keys + n] = at.first + head[r];
    }
}

/* Heads go from head to head up to the slot, all of a thread at once. What they read may be on its
 * way there already: an earlier one of the same slot all the same, and a shorter way. */
__global__ void __launch_bounds__(head_threads)
    follow_heads(const select_call call, const select_space space) {
    const head_place at = find_head_block(call, space);
    const uint32_t *const head = space.head + at.keys;
    uint32_t *const parent = space.parent + at.keys;
    uint32_t slot[head_items];
#pragma unroll
    for (int r = 0; r < head_items; r++) {
        const uint32_t n = at.first + r * head_threads + threadIdx.x;
        const bool is_head = n < at.end && head[n] == n;
        slot[r] = is_head ? parent[n] : 0;
    }
    for (bool found = false; !found;) {
        uint32_t next[head_items];
        found = true;
#pragma unroll
        for (int r = 0; r < head_items; r++)
            next[r] = slot[r] < call.window ? slot[r] : ld_relaxed_gpu(&parent[head[slot[r]]]);
#pragma unroll
        for (int r = 0; r < head_items; r++) {
            if (next[r] != slot[r])
                st_relaxed_gpu(&parent[at.first + r * head_threads + threadIdx.x], next[r]);
            slot[r] = next[r];
            found &= slot[r] < call.window;
        }
    }
}

__global__ void __launch_bounds__(head_threads)
    write_slots(const select_call call, const select_space space) {
    const head_place at = find_head_block(call, space);
    const select_segment segment = segment_of(call, at.segment);
    for (uint32_t n = at.first + threadIdx.x; n < at.end; n += head_threads)
        segment.slot[space.kept[at.keys + n]] =
            (int32_t)space.parent[at.keys + space.head[at.keys + n]];
}

/* ---- the row ---- */

static const char *refuses(const fdma_problem *problem) {
    if (problem->dtype != FDMA_FLOAT32)
        return "float64 scores, supported: float32";
    if (problem->kv_len > most_kv_len)
        return "more than 2^28 keys";
    return fdma_refuses_before_sm80(problem);
}

/* Chunks have no more keys than there are chunks, or the least. */
static int chunk_shift(int64_t kv_len) {
    int shift = least_chunk_shift;
    while ((int64_t)1 << 2 * shift < kv_len)
        shift++;
    return shift;
}

static select_space lay_out(const fdma_problem *problem, fdma_arena *arena, size_t *zeros) {
    select_space space = {};
    const size_t segments = (size_t)(problem->batch * problem->kv_heads);
    const size_t kv_len = (size_t)problem->kv_len, word = sizeof(uint32_t);
    space.shift = chunk_shift(problem->kv_len);
    space.chunks = (uint32_t)((kv_len + ((size_t)1 << space.shift) - 1) >> space.shift);
    space.sort.segments = (uint32_t)segments;
    space.sort.tiles = (uint32_t)((kv_len + sort_tile - 1) / sort_tile);
    const size_t counts = segments * space.chunks, tiles = segments * space.sort.tiles;
    // what must be zero at first
    space.sort.ticket = (uint32_t *)fdma_arena_take(arena, passes * word);
    space.sort.digit_total = (uint32_t *)fdma_arena_take(arena, segments * passes * digits * word);
    space.sort.tile_count = (uint32_t *)fdma_arena_take(arena, tiles * passes * digits * word);
    space.by_place = (uint32_t *)fdma_arena_take(arena, counts * word);
    *zeros = arena->used;
    space.by_position = (uint32_t *)fdma_arena_take(arena, counts * word);
    space.kept_all = (uint32_t *)fdma_arena_take(arena, segments * word);
    space.floor = (uint32_t *)fdma_arena_take(arena, (counts + segments) * word);
    space.border = (uint32_t *)fdma_arena_take(arena, counts * space.chunks * word);
    space.kept = (uint32_t *)fdma_arena_take(arena, segments * kv_len * word);
    space.sort.key = (uint2 *)fdma_arena_take(arena, segments * kv_len * sizeof(uint2));
    space.sort.other = (uint2 *)fdma_arena_take(arena, segments * kv_len * sizeof(uint2));
    // one after the other in the same memory
    space.verdict = space.sort.other;
    space.parent = (uint32_t *)space.sort.other;
    space.head = space.parent ? space.parent + segments * kv_len : NULL;
    return space;
}

static size_t workspace(const fdma_problem *problem) {
    fdma_arena arena = {};
    size_t zeros;
    lay_out(problem, &arena, &zeros);
    return fdma_arena_size(&arena);
}

static fdma_status follow_slots(const fdma_problem *problem, const select_call &call,
                                const select_space &space) {
    const uint32_t blocks = (call.kv_len + head_keys - 1) / head_keys;
    launch_shape shape = {dim3(space.sort.segments * blocks), dim3(head_threads)};
    shape.shared_bytes = sizeof(head_memory);
    FDMA_TRY(launch("select", find_heads, shape, problem, call, space));
    shape.shared_bytes = 0;
    FDMA_TRY(launch("select", follow_heads, shape, problem, call, space));
    return launch("select", write_slots, shape, problem, call, space);
}

static fdma_status run(const fdma_problem *problem) {
    const select_call call = describe_select(problem);
    fdma_arena arena = fdma_arena_of(problem);
    size_t zeros;
    const select_space space = lay_out(problem, &arena, &zeros);
    if (space.sort.segments == 0 || call.kv_len == 0)
        return FDMA_OK;
    const uint32_t chunk_blocks = space.sort.segments * space.chunks;
    const uint32_t column_blocks =
        space.sort.segments * ((space.chunks + warp_lanes - 1) / warp_lanes);
    launch_shape by_chunk = {dim3(chunk_blocks), dim3(threads)};
    launch_shape by_column = {dim3(column_blocks), dim3(column_threads)};
    const uint32_t size = 1U << space.shift;
    const size_t verdict_bytes = (size_t)space.sort.segments * call.kv_len * sizeof(uint2);
    by_chunk.shared_bytes =
        sizeof(chunk_memory) + sizeof(uint32_t) * (size > space.chunks ? size : space.chunks);
    by_column.shared_bytes = sizeof(column_memory);
    FDMA_TRY(check_cuda("select",
                        cudaMemsetAsync(arena.base, 0, zeros, (cudaStream_t)problem->exec.stream)));
    FDMA_TRY(sort_segments(problem, call, space.sort));
    FDMA_TRY(check_cuda("select", cudaMemsetAsync(space.verdict, 0, verdict_bytes,
                                                  (cudaStream_t)problem->exec.stream)));
    if (call.causal) {
        FDMA_TRY(launch("select", count_before, by_chunk, problem, call, space));
        FDMA_TRY(launch("select", find_floors, by_column, problem, call, space));
    }
    FDMA_TRY(launch("select", judge_places, by_chunk, problem, call, space));
    FDMA_TRY(launch("select", judge_positions, by_chunk, problem, call, space));
    FDMA_TRY(launch("select", number_kept, by_chunk, problem, call, space));
    if (!call.causal)
        return FDMA_OK;
    FDMA_TRY(launch("select", match_kept, by_chunk, problem, call, space));
    return call.first.slot ? follow_slots(problem, call, space) : FDMA_OK;
}

static const fdma_kernel rows[] = {
    {"cuda/sm80", operation_select, fdma_missing_sm80, refuses, workspace, run, true}};

extern "C" const kernel_table fdma_cuda_sm80_select = {rows, sizeof rows / sizeof rows[0]};
