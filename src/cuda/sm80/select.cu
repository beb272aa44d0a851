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
#include "cuda/sm80/select_sort.cuh"

enum {
    threads = 256,
    warps = threads / warp_lanes,
    column_threads = 1024,
    column_warps = column_threads / warp_lanes,
    head_threads = 1024,
    head_items = 8,
    head_keys = head_threads * head_items, // kept keys whose slots a block follows by itself
    least_chunk_shift = 8,
    most_kv_len = 1 << 30, // counts have two bits beside them
};

struct select_space {
    sort_space sort;
    uint2 *verdict;   // [segments][kv_len], by position: {place, how many may outrank it}
    uint32_t *border; // [segments][chunks][chunks]: keys of a chunk of places, in the end of it
                      // and the later ones, that are before the end of a chunk of positions
    uint32_t *floor;  // [segments][chunks + 1]: see find_floors
    uint32_t *kept;   // [segments][kv_len], by kept number: its position
    uint32_t *parent; // [segments][kv_len], by kept number: the evicted key's, then the slot
    uint32_t *head;   // [segments][kv_len], by kept number: see find_heads
    uint32_t *by_position, *by_place; // [segments][chunks]: kept keys
    uint32_t *kept_all;               // [segments]
    uint32_t chunks;
    int shift; // log2 of a chunk's keys
};

/* A block's chunk: warp w has `share` consecutive keys of it. */
struct chunk_place {
    uint32_t segment, chunk, first, share, warp, lane;
    size_t keys, counts; // where the segment begins in arrays of keys, of chunks
};

__device__ static inline chunk_place find_chunk(const select_call &call,
                                                const select_space &space) {
    chunk_place at;
    at.segment = blockIdx.x / space.chunks;
    at.chunk = blockIdx.x % space.chunks;
    at.first = at.chunk << space.shift;
    at.share = (1U << space.shift) / warps;
    at.warp = threadIdx.x / warp_lanes;
    at.lane = threadIdx.x % warp_lanes;
    at.keys = (size_t)at.segment * call.kv_len;
    at.counts = (size_t)at.segment * space.chunks;
    return at;
}

struct chunk_memory {
    uint32_t scratch[warps];
    uint32_t word[1]; // of each key of a chunk, or of each chunk
};

/* Sum of count[0] to count[n - 1], by all threads. */
__device__ static inline uint32_t sum_counts(uint32_t *scratch, const uint32_t *count, uint32_t n) {
    uint32_t sum = 0, total;
    for (uint32_t i = threadIdx.x; i < n; i += threads)
        sum += count[i];
    sum_lower_warps<warps>(scratch, __reduce_add_sync(all_lanes, sum), &total);
    return total;
}

/* ---- borders: border d is the end of chunk d of positions ---- */

__global__ void __launch_bounds__(threads)
    count_before(const select_call call, const select_space space) {
    chunk_memory &shared = shared_memory<chunk_memory>();
    const chunk_place at = find_chunk(call, space);
    for (uint32_t d = threadIdx.x; d < space.chunks; d += threads)
        shared.word[d] = 0;
    __syncthreads();
    const uint32_t end = at.first + (1U << space.shift);
    for (uint32_t place = at.first + threadIdx.x; place < end; place += threads) {
        const uint32_t position = place < call.kv_len ? space.sort.key[at.keys + place].y : absent;
        if (!(position & absent))
            atomicAdd(&shared.word[position >> space.shift], 1);
    }
    __syncthreads();
    const uint32_t each = (space.chunks + threads - 1) / threads;
    const uint32_t from = threadIdx.x * each, to = min(from + each, space.chunks);
    uint32_t sum = 0, total;
    for (uint32_t d = from; d < to; d++)
        sum += shared.word[d];
    const uint32_t lower = sum_lower_lanes(sum);
    const uint32_t warp_sum = __shfl_sync(all_lanes, lower + sum, warp_lanes - 1);
    sum = lower + sum_lower_warps<warps>(shared.scratch, warp_sum, &total);
    for (uint32_t d = from; d < to; d++)
        shared.word[d] = sum += shared.word[d];
    __syncthreads();
    uint32_t *const row = space.border + (at.counts + at.chunk) * space.chunks;
    for (uint32_t d = threadIdx.x; d < space.chunks; d += threads)
        row[d] = shared.word[d];
}

struct column_memory {
    uint32_t part[column_warps][warp_lanes + 1];
    uint32_t chunk[warp_lanes], sought[warp_lanes]; // where a border's floor is, from its end
};

/* Sums a lane's column over the later chunks, a slice of rows a warp; notes where it reaches the
 * window. */
__device__ static void sum_column(column_memory &shared, const select_space &space,
                                  uint32_t *column, bool inside, uint32_t window) {
    const uint32_t warp = threadIdx.x / warp_lanes, lane = threadIdx.x % warp_lanes;
    const uint32_t each = (space.chunks + column_warps - 1) / column_warps;
    const uint32_t from = min(warp * each, space.chunks), to = min(from + each, space.chunks);
    uint32_t sum = 0;
#pragma unroll 8
    for (uint32_t c = from; c < to; c++)
        sum += inside ? column[(size_t)c * space.chunks] : 0;
    shared.part[warp][lane] = sum;
    if (warp == 0)
        shared.sought[lane] = 0;
    __syncthreads();
    sum = 0;
    for (uint32_t w = warp + 1; w < column_warps; w++)
        sum += shared.part[w][lane];
#pragma unroll 8
    for (uint32_t c = to; c > from; c--) {
        uint32_t *const count = column + (size_t)(c - 1) * space.chunks;
        const uint32_t reached = sum + (inside ? *count : 0);
        if (sum < window && reached >= window) {
            shared.chunk[lane] = c - 1;
            shared.sought[lane] = window - sum;
        }
        if (inside)
            *count = reached;
        sum = reached;
    }
    __syncthreads();
}

/* A warp finds the `sought`-th place from a chunk's end whose position is before `end`. */
__device__ static uint32_t find_place(const uint2 *key, const select_space &space, uint32_t kv_len,
                                      uint32_t chunk, uint32_t sought, uint32_t end) {
    const uint32_t lane = threadIdx.x % warp_lanes, first = chunk << space.shift;
    for (uint32_t from = first + (1U << space.shift); from > first;) {
        from -= warp_lanes;
        const bool before = from + lane < kv_len && key[from + lane].y < end;
        const uint32_t some = __ballot_sync(all_lanes, before), count = __popc(some);
        if (count >= sought) {
            const bool found = before && (uint32_t)__popc(some & ~lanemask_lt()) == sought;
            return from + __ffs(__ballot_sync(all_lanes, found)) - 1;
        }
        sought -= count;
    }
    return 0;
}

/* floor[d]: the place of the worst key that is kept when chunk d of positions begins, 0 if every
 * key is. A block takes 32 borders. */
__global__ void __launch_bounds__(column_threads)
    find_floors(const select_call call, const select_space space) {
    column_memory &shared = shared_memory<column_memory>();
    const uint32_t blocks = (space.chunks + warp_lanes - 1) / warp_lanes;
    const uint32_t segment = blockIdx.x / blocks, first = blockIdx.x % blocks * warp_lanes;
    const uint32_t warp = threadIdx.x / warp_lanes, lane = threadIdx.x % warp_lanes;
    const size_t counts = (size_t)segment * space.chunks;
    uint32_t *const floor = space.floor + counts + segment; // one more than chunks
    sum_column(shared, space, space.border + counts * space.chunks + first + lane,
               first + lane < space.chunks, call.window);
    const uint32_t d = first + warp, sought = shared.sought[warp];
    uint32_t place = 0;
    if (d < space.chunks && sought > 0)
        place = find_place(space.sort.key + (size_t)segment * call.kv_len, space, call.kv_len,
                           shared.chunk[warp], sought, (d + 1) << space.shift);
    if (d < space.chunks && lane == 0)
        floor[d + 1] = place;
    if (first == 0 && threadIdx.x == 0)
        floor[0] = 0;
}

/* ---- which keys are ever kept ---- */

/* How many keys of higher place than `place` are before chunk q of positions. By one warp. */
__device__ static uint32_t count_higher(const chunk_memory &shared, const select_space &space,
                                        const chunk_place &at, uint32_t place, uint32_t q) {
    const uint32_t end = q << space.shift, size = 1U << space.shift;
    uint32_t count = 0;
    if (q == 0)
        return 0;
    for (uint32_t n = (place - at.first) / warp_lanes * warp_lanes + at.lane; n < size;
         n += warp_lanes)
        count += n > place - at.first && shared.word[n] < end;
    count = __reduce_add_sync(all_lanes, count);
    return at.chunk + 1 < space.chunks
               ? count + space.border[(at.counts + at.chunk + 1) * space.chunks + q - 1]
               : count;
}

/* How many keys of its chunk may outrank a key that is kept. By all lanes of a warp. */
__device__ static uint32_t judge_place(const chunk_memory &shared, const select_call &call,
                                       const select_space &space, const chunk_place &at,
                                       uint32_t place) {
    const uint32_t *const floor = space.floor + at.counts + at.segment;
    const uint32_t position = shared.word[place - at.first];
    const bool present = !(position & absent);
    const uint32_t q = present ? position >> space.shift : 0;
    uint32_t others = present && place >= floor[q + 1] ? always_kept : 0;
    const bool unsure = present && others == 0 && place >= floor[q];
    for (uint32_t left = __ballot_sync(all_lanes, unsure); left; left &= left - 1) {
        const int lane = __ffs(left) - 1;
        const uint32_t higher = count_higher(shared, space, at, __shfl_sync(all_lanes, place, lane),
                                             __shfl_sync(all_lanes, q, lane));
        others = lane == (int)at.lane ? call.window - higher : others;
    }
    return others;
}

/* The verdict on each key goes to its position. Global scope keeps the best of all, wherever they
 * are. */
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
        if (place < call.kv_len)
            space.verdict[at.keys + (position & ~absent)] = make_uint2(place, others);
    }
}

/* Whether the key that is n-th of this chunk of positions is ever kept. By all lanes of a warp. */
__device__ static bool judge_position(const chunk_memory &shared, const chunk_place &at, uint32_t n,
                                      uint32_t others, uint32_t size) {
    bool keeps = others >= size;
    for (uint32_t left = __ballot_sync(all_lanes, others > 0 && !keeps); left; left &= left - 1) {
        const int lane = __ffs(left) - 1;
        const uint32_t end = __shfl_sync(all_lanes, n, lane), place = shared.word[end];
        uint32_t count = 0;
        for (uint32_t m = at.lane; m < end; m += warp_lanes)
            count += shared.word[m] > place;
        count = __reduce_add_sync(all_lanes, count);
        keeps = lane == (int)at.lane ? count < others : keeps;
    }
    return keeps;
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
        const bool keeps = judge_position(shared, at, n, others, size);
        if (inside)
            verdict[n].y = keeps;
        if (keeps)
            atomicAdd(&space.by_place[at.counts + (shared.word[n] >> space.shift)], 1);
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

/* By kept number: positions; by place: in `key`, instead of the order, numbers. */
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
        space.sort.key[at.keys + verdict.x].x = keeps ? mine : UINT32_MAX;
        if (keeps)
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
    const uint32_t blocks = (call.kv_len + head_keys - 1) / head_keys;
    head_place at;
    at.segment = blockIdx.x / blocks;
    at.first = blockIdx.x % blocks * head_keys;
    at.end = min(at.first + head_keys, space.kept_all[at.segment]);
    at.keys = (size_t)at.segment * call.kv_len;
    return at;
}

struct head_memory {
    uint32_t head[head_keys];
};

/* head: the first kept key of the block that has the same slot. Its parent is in an earlier block,
 * or it is the slot's first: its parent is the slot. All others get their head's parent. */
__global__ void __launch_bounds__(head_threads)
    find_heads(const select_call call, const select_space space) {
    head_memory &shared = shared_memory<head_memory>();
    const head_place at = find_head_block(call, space);
    uint32_t *const parent = space.parent + at.keys;
    if (at.first >= at.end)
        return;
    bool changed = true;
    for (uint32_t n = at.first + threadIdx.x; n < at.end; n += head_threads) {
        if (n < call.window)
            parent[n] = n;
        const bool inside = n >= call.window && parent[n] >= at.first;
        shared.head[n - at.first] = inside ? parent[n] - at.first : n - at.first;
    }
    while (__syncthreads_or(changed)) {
        changed = false;
        for (uint32_t n = threadIdx.x; n < at.end - at.first; n += head_threads) {
            volatile uint32_t *const head = shared.head;
            const uint32_t own = head[n], next = head[own];
            changed |= next != own;
            head[n] = next;
        }
    }
    for (uint32_t n = at.first + threadIdx.x; n < at.end; n += head_threads) {
        const uint32_t head = at.first + shared.head[n - at.first];
        space.head[at.keys + n] = head;
        if (head != n) // heads' parents stay as they are
            parent[n] = head < call.window ? head : parent[head];
    }
}

/* Heads go from parent to parent up to the slot. What they read may be on its way there already:
 * an earlier one of the same slot all the same. */
__global__ void __launch_bounds__(head_threads)
    follow_heads(const select_call call, const select_space space) {
    const head_place at = find_head_block(call, space);
    uint32_t *const parent = space.parent + at.keys;
    for (uint32_t n = at.first + threadIdx.x; n < at.end; n += head_threads) {
        if (space.head[at.keys + n] != n)
            continue;
        uint32_t slot = parent[n];
        while (slot >= call.window) {
            slot = ld_relaxed_gpu(&parent[slot]);
            st_relaxed_gpu(&parent[n], slot);
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
        return "more than 2^30 keys";
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
    by_chunk.shared_bytes =
        sizeof(chunk_memory) + sizeof(uint32_t) * (size > space.chunks ? size : space.chunks);
    by_column.shared_bytes = sizeof(column_memory);
    FDMA_TRY(check_cuda("select",
                        cudaMemsetAsync(arena.base, 0, zeros, (cudaStream_t)problem->exec.stream)));
    FDMA_TRY(sort_segments(problem, call, space.sort));
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

static const kernel_row rows[] = {
    {"cuda/sm80", operation_select, fdma_missing_sm80, refuses, workspace, run, true}};

extern "C" const kernel_table fdma_cuda_sm80_select = {rows, sizeof rows / sizeof rows[0]};
