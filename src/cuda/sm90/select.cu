/* Selection in one launch, a cluster of blocks for each segment, on compute capability 9.0 and
 * later. Longer segments than a cluster holds are sm80/select.cu's.
 *
 * A block owns as many places as positions, a warp of it a chunk of either; what belongs to another
 * block is written into its shared memory.
 *
 *     sort_keys        radix sort, four passes: {order, position} by place
 *     find_borders     for each chunk of positions, the place of the worst key kept before it
 *     judge_places     between which borders is a key? Mostly that settles whether it is kept, else
 *                      how many keys of its chunk may outrank it
 *     judge_positions  counts those
 *     number_kept      the kept keys by position, and where they stand by place
 *     match_kept       the i-th worst expires at the window + i-th by position
 *     follow_slots     slots are handed down: first inside a block, then from block to block
 *
 * Exact, and hardly dependent on the order in which scores come. */
#include "cuda/device/select.cuh"

enum {
    threads = 1024,
    warps = threads / warp_lanes,
    most_blocks = 16, // of a cluster; more than 8 are not portable
    most_borders = warps * most_blocks,
    lane_borders = most_borders / warp_lanes,     // that a lane sums
    row_words = most_borders + warp_lanes + 1,    // odd: a column is free of bank conflicts
    half_rows = sizeof(uint4) / sizeof(uint16_t), // counts in what a lane sends at once
};

template <int items_> struct segment_config {
    static constexpr int items = items_; // keys of a thread
    static constexpr uint32_t chunk = warp_lanes * items;
    static constexpr uint32_t keys = threads * items; // of a block
};

template <class config> struct alignas(16) select_memory {
    union {
        uint2 key[config::keys];     // by place: {order, position}
        uint2 verdict[config::keys]; // by position: {place, how many may outrank it}
        struct {
            uint32_t parent[config::keys]; // by kept number: the evicted key's, in the end the slot
            uint32_t head[config::keys];   // the first of the block that has the same slot
        };
    };
    union {
        struct {
            uint32_t digit_count[warps][digits];
            uint2 sorted[config::keys]; // by digit, on their way to other blocks
        };
        uint32_t border[warps][row_words]; // keys of this warp and the later ones that are before
                                           // the end of chunk d of positions, see column_of()
        struct {
            uint32_t number[config::keys]; // by place: how many kept keys are at lower positions
            uint32_t kept[config::keys];   // by kept number: its position
        };
    };
    alignas(16) uint16_t own_count[most_borders]; // keys of a digit, or before a border: here,
    alignas(16) uint16_t count[most_blocks][most_borders]; // and of each block
    uint32_t start[digits];                                // of a digit in this block,
    uint32_t to[digits];                                   // and what leads from there to its place
    uint32_t floor[most_borders + 1];                      // see find_borders()
    uint32_t own_floor[most_borders];                      // those of this block, a border earlier
    uint32_t above[most_borders];                   // keys of later blocks that are before a border
    uint32_t kept_at[most_blocks][most_blocks / 2]; // kept keys, by block of position and of place
    uint32_t kept_here[most_blocks / 2];            // in pairs of 16 bits
    uint32_t scratch[warps];
    uint32_t kept_before, lower_kept, kept_all;
};

/* Where a thread is. */
struct cluster_place {
    uint32_t rank, blocks, borders;
    uint32_t warp, lane;
};

__device__ static inline void sync_cluster(void) {
    barrier_cluster_arrive();
    barrier_cluster_wait();
}

template <typename value_type>
__device__ static inline void store_at(uint32_t rank, const void *shared, value_type value) {
    st_shared_cluster(mapa(shared_address(shared), rank), value);
}

__device__ static inline uint32_t load_at(uint32_t rank, const void *shared) {
    return ld_shared_cluster(mapa(shared_address(shared), rank));
}

/* ---- sort ---- */

template <class config>
__device__ static inline uint32_t own_index(const cluster_place &at, int r) {
    return at.warp * config::chunk + r * warp_lanes + at.lane;
}

/* Tells every block this one's counts, a warp each. */
template <class config>
__device__ static void share_counts(select_memory<config> &shared, const cluster_place &at,
                                    uint32_t counts) {
    const uint32_t n = at.lane * half_rows;
    for (uint32_t first = 0; first < counts; first += warp_lanes * half_rows)
        if (at.warp < at.blocks && first + n < counts)
            store_at(at.warp, &shared.count[at.rank][first + n],
                     *reinterpret_cast<const uint4 *>(&shared.own_count[first + n]));
}

/* Of each digit, the sum over the lower digits of what its thread brings. All threads call it. */
template <class config>
__device__ static uint32_t sum_lower_digits(select_memory<config> &shared, uint32_t value) {
    enum { digit_warps = digits / warp_lanes };
    const uint32_t warp = threadIdx.x / warp_lanes, lane = threadIdx.x % warp_lanes;
    uint32_t sum = 0;
    if (warp < digit_warps) {
        sum = sum_lower_lanes(value);
        if (lane == warp_lanes - 1)
            shared.scratch[warp] = sum + value;
    }
    __syncthreads();
    if (warp < digit_warps)
        for (uint32_t w = 0; w < warp; w++)
            sum += shared.scratch[w];
    return sum;
}

/* Puts this block's keys in the order of a digit, and counts them. */
template <class config>
__device__ static void sort_block(select_memory<config> &shared, const cluster_place &at,
                                  const uint2 (&key)[config::items], int shift) {
    const uint32_t digit = threadIdx.x;
    uint32_t before[config::items], sum = 0;
    count_digits(shared.digit_count[at.warp], key, shift, before);
    __syncthreads();
    if (digit < digits) {
#pragma unroll
        for (int w = 0; w < warps; w++) {
            const uint32_t count = shared.digit_count[w][digit];
            shared.digit_count[w][digit] = sum;
            sum += count;
        }
        shared.own_count[digit] = (uint16_t)sum;
    }
    const uint32_t start = sum_lower_digits(shared, sum);
    if (digit < digits)
        shared.start[digit] = start;
    share_counts(shared, at, digits);
    __syncthreads();
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const uint32_t own = digit_of(key[r].x, shift);
        const uint32_t n = shared.start[own] + shared.digit_count[at.warp][own] + before[r];
        shared.sorted[n] = key[r];
    }
}

/* Sends keys from this order to their places: keys of a digit are neighbours in both, and scattered
 * words are what other blocks' memory is slow at. */
template <class config>
__device__ static void send_keys(select_memory<config> &shared, const cluster_place &at,
                                 int shift) {
    const uint32_t digit = threadIdx.x;
    uint32_t all = 0, earlier = 0;
    if (digit < digits)
        for (uint32_t rank = 0; rank < at.blocks; rank++) {
            const uint32_t count = shared.count[rank][digit];
            earlier += rank < at.rank ? count : 0;
            all += count;
        }
    const uint32_t first = sum_lower_digits(shared, all) + earlier;
    if (digit < digits)
        shared.to[digit] = first - shared.start[digit];
    __syncthreads();
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const uint32_t n = r * threads + threadIdx.x;
        const uint2 key = shared.sorted[n];
        const uint32_t place = shared.to[digit_of(key.x, shift)] + n;
        store_at(place / config::keys, &shared.key[place % config::keys], key);
    }
}

template <class config>
__device__ static void sort_pass(select_memory<config> &shared, const cluster_place &at,
                                 uint2 (&key)[config::items], int shift) {
    sort_block(shared, at, key, shift);
    sync_cluster();
    send_keys(shared, at, shift);
    sync_cluster();
#pragma unroll
    for (int r = 0; r < config::items; r++)
        key[r] = shared.key[own_index<config>(at, r)];
}

/* Ascending and stable: of equal keys the later one is the better. */
template <class config>
__device__ static void sort_keys(select_memory<config> &shared, const cluster_place &at,
                                 const select_segment &segment, uint32_t kv_len,
                                 uint2 (&key)[config::items]) {
#pragma unroll
    for (int r = 0; r < config::items; r++)
        key[r] = load_key(segment, at.rank * config::keys + own_index<config>(at, r), kv_len);
    barrier_cluster_wait(); // every block has begun: there is shared memory to write to
    for (int shift = 0; shift < key_bits; shift += digit_bits)
        sort_pass(shared, at, key, shift);
#pragma unroll
    for (int r = 0; r < config::items; r++) // of the keys that are surely not kept
        shared.verdict[own_index<config>(at, r)] = make_uint2(0, 0);
}

/* ---- borders: border d is the end of chunk d of positions ---- */

/* A word is left out after the borders that a lane sums. */
__device__ static inline uint32_t column_of(uint32_t d) { return d + d / lane_borders; }

/* A warp's row: how many of its keys are before each border. */
template <class config>
__device__ static void count_before(select_memory<config> &shared, const cluster_place &at,
                                    const uint2 (&key)[config::items]) {
    uint32_t *const row = shared.border[at.warp];
    for (uint32_t word = at.lane; word < row_words; word += warp_lanes)
        row[word] = 0;
    __syncwarp();
#pragma unroll
    for (int r = 0; r < config::items; r++)
        if (!(key[r].y & absent))
            atomicAdd(&row[column_of(key[r].y / config::chunk)], 1);
    __syncwarp();
    uint32_t *const mine = row + at.lane * (lane_borders + 1);
    uint32_t sum = 0;
#pragma unroll
    for (int d = 0; d < lane_borders; d++)
        sum += mine[d];
    sum = sum_lower_lanes(sum);
#pragma unroll
    for (int d = 0; d < lane_borders; d++)
        mine[d] = sum += mine[d];
}

/* Of border `threadIdx.x`: sums over the later warps. */
template <class config> __device__ static void sum_border(select_memory<config> &shared) {
    const uint32_t column = column_of(threadIdx.x);
    uint32_t sum = 0;
#pragma unroll
    for (int w = warps - 1; w >= 0; w--)
        shared.border[w][column] = sum += shared.border[w][column];
    shared.own_count[threadIdx.x] = (uint16_t)sum;
}

/* Which warp has the `sought`-th key from this block's end among those before a border. */
template <class config>
__device__ static uint32_t find_warp(const select_memory<config> &shared, uint32_t column,
                                     uint32_t sought) {
    uint32_t w = 0;
#pragma unroll
    for (uint32_t step = warps / 2; step > 0; step /= 2)
        w += shared.border[w + step][column] >= sought ? step : 0;
    return w;
}

/* The block that has the floor of border `threadIdx.x`; none: there are fewer keys than the window
 * before it. If it is this one, also finds the floor. */
template <class config>
__device__ static uint32_t find_floor(select_memory<config> &shared, const cluster_place &at,
                                      uint32_t window) {
    const uint32_t d = threadIdx.x;
    uint32_t sum = 0, owner = at.blocks;
    for (uint32_t rank = at.blocks; rank-- > 0;) {
        const uint32_t reached = sum + shared.count[rank][d];
        if (rank == at.rank)
            shared.above[d] = sum;
        if (sum < window && reached >= window) {
            owner = rank;
            if (rank == at.rank)
                shared.own_floor[d] =
                    rank * warps + find_warp(shared, column_of(d), window - sum) + 1;
        }
        sum = reached;
    }
    return owner;
}

/* The floor of chunk d of positions: one more than the chunk of places that has the worst of the
 * keys kept when it begins; 0: as yet every key is. */
template <class config>
__device__ static void find_borders(select_memory<config> &shared, const cluster_place &at,
                                    const uint2 (&key)[config::items], uint32_t window) {
    const uint32_t d = threadIdx.x;
    uint32_t owner = at.blocks;
    count_before(shared, at, key);
    __syncthreads();
    if (d < at.borders)
        sum_border(shared);
    __syncthreads();
    share_counts(shared, at, at.borders);
    sync_cluster();
    if (d < at.borders)
        owner = find_floor(shared, at, window);
    sync_cluster();
    if (d < at.borders)
        shared.floor[d + 1] = owner < at.blocks ? load_at(owner, &shared.own_floor[d]) : 0;
    if (d == 0)
        shared.floor[0] = 0;
    __syncthreads();
}

/* ---- which keys are ever kept ---- */

/* How many keys of higher place than item `index` of this warp are before chunk q. */
template <class config>
__device__ static uint32_t count_higher(const select_memory<config> &shared,
                                        const cluster_place &at, const uint2 (&key)[config::items],
                                        uint32_t index, uint32_t q) {
    uint32_t count = 0;
#pragma unroll
    for (int r = 0; r < config::items; r++)
        count += r * warp_lanes + at.lane > index && key[r].y < q * config::chunk;
    count = __reduce_add_sync(all_lanes, count);
    if (q == 0)
        return 0;
    const uint32_t later = at.warp + 1 < warps ? shared.border[at.warp + 1][column_of(q - 1)] : 0;
    return count + later + shared.above[q - 1];
}

/* The verdict on each key that may be kept goes to the block of its position. */
template <class config>
__device__ static void judge_places(select_memory<config> &shared, const cluster_place &at,
                                    const uint2 (&key)[config::items], uint32_t window) {
    const uint32_t mine = at.rank * warps + at.warp + 1; // chunk, as floors are
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const uint32_t position = key[r].y & ~absent, q = position / config::chunk;
        const bool present = position == key[r].y;
        uint32_t others = present && mine > shared.floor[q + 1] ? always_kept : 0;
        const bool unsure = present && others == 0 && mine >= shared.floor[q];
        for (uint32_t left = __ballot_sync(all_lanes, unsure); left; left &= left - 1) {
            const int lane = __ffs(left) - 1;
            const uint32_t higher = count_higher(shared, at, key, r * warp_lanes + lane,
                                                 __shfl_sync(all_lanes, q, lane));
            if (lane == (int)at.lane)
                others = higher < window ? window - higher : 0;
        }
        const uint32_t place = at.rank * config::keys + own_index<config>(at, r);
        if (others > 0)
            store_at(position / config::keys, &shared.verdict[position % config::keys],
                     make_uint2(place, others));
    }
}

/* Global scope: the best of all, wherever they are. */
template <class config>
__device__ static void judge_global(select_memory<config> &shared, const cluster_place &at,
                                    const uint2 (&key)[config::items], uint32_t window) {
    const uint32_t floor = at.blocks * config::keys - window;
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const uint32_t place = at.rank * config::keys + own_index<config>(at, r);
        if (!(key[r].y & absent) && place >= floor)
            store_at(key[r].y / config::keys, &shared.verdict[key[r].y % config::keys],
                     make_uint2(place, always_kept));
    }
}

/* Bit r: whether key r, now by position, is ever kept. */
template <class config>
__device__ static uint32_t judge_positions(const select_memory<config> &shared,
                                           const cluster_place &at) {
    uint2 verdict[config::items];
    uint32_t kept = 0;
#pragma unroll
    for (int r = 0; r < config::items; r++)
        verdict[r] = shared.verdict[own_index<config>(at, r)];
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const uint32_t others = verdict[r].y;
        bool keeps = others >= config::chunk;
        for (uint32_t left = __ballot_sync(all_lanes, others > 0 && !keeps); left;
             left &= left - 1) {
            const int lane = __ffs(left) - 1;
            const uint32_t place = __shfl_sync(all_lanes, verdict[r].x, lane);
            uint32_t count = 0;
#pragma unroll
            for (int other = 0; other < config::items; other++)
                count += other * warp_lanes + at.lane < (uint32_t)(r * warp_lanes + lane) &&
                         verdict[other].x > place;
            count = __reduce_add_sync(all_lanes, count);
            keeps = lane == (int)at.lane ? count < others : keeps;
        }
        kept |= (uint32_t)keeps << r;
    }
    return kept;
}

/* ---- kept keys, numbered by position and by place ---- */

/* Of each flag of a thread's keys, how many are set before it in the block; the block's sum. */
template <class config>
__device__ static void number_flags(select_memory<config> &shared, uint32_t flags,
                                    uint32_t (&number)[config::items]) {
    uint32_t sum = 0, total;
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const uint32_t set = __ballot_sync(all_lanes, flags >> r & 1);
        number[r] = sum + __popc(set & lanemask_lt());
        sum += __popc(set);
    }
    const uint32_t base = sum_lower_warps<warps>(shared.scratch, sum, &total);
#pragma unroll
    for (int r = 0; r < config::items; r++)
        number[r] += base;
}

/* Tells every block how many keys of each block by place this block by position keeps. */
template <class config>
__device__ static void share_kept(select_memory<config> &shared, const cluster_place &at,
                                  uint32_t kept) {
    static_assert(config::items < 16, "counts of a thread have four bits");
    uint64_t counts = 0;
#pragma unroll
    for (int r = 0; r < config::items; r++)
        counts += (uint64_t)(kept >> r & 1)
                  << 4 * (shared.verdict[own_index<config>(at, r)].x / config::keys);
#pragma unroll
    for (uint32_t n = 0; n < most_blocks / 2; n++, counts >>= 8) {
        const uint32_t pair = (uint32_t)(counts & 15) | (uint32_t)(counts >> 4 & 15) << 16;
        const uint32_t sum = __reduce_add_sync(all_lanes, pair);
        if (at.lane == n && sum > 0)
            atomicAdd(&shared.kept_here[n], sum);
    }
    __syncthreads();
    const uint32_t to = threadIdx.x / (most_blocks / 2), of = threadIdx.x % (most_blocks / 2);
    if (to < at.blocks)
        store_at(to, &shared.kept_at[at.rank][of], shared.kept_here[of]);
}

/* By one warp: what is kept at the positions and at the places of earlier blocks, and in all. */
template <class config>
__device__ static void sum_kept(select_memory<config> &shared, const cluster_place &at) {
    uint32_t before = 0, lower = 0, all = 0;
    for (uint32_t n = at.lane; n < at.blocks * most_blocks; n += warp_lanes) {
        const uint32_t by_position = n / most_blocks, by_place = n % most_blocks;
        const uint32_t pair = shared.kept_at[by_position][by_place / 2];
        const uint32_t count = by_place % 2 ? pair >> 16 : pair & 0xffff;
        before += by_position < at.rank ? count : 0;
        lower += by_place < at.rank ? count : 0;
        all += count;
    }
    shared.kept_before = __reduce_add_sync(all_lanes, before);
    shared.lower_kept = __reduce_add_sync(all_lanes, lower);
    shared.kept_all = __reduce_add_sync(all_lanes, all);
}

/* Never kept: it expires at once. Kept: its number goes to its place, its position to its number;
 * in global scope the number is the slot. */
template <class config>
__device__ static void number_kept(select_memory<config> &shared, const cluster_place &at,
                                   const select_segment &segment, const select_call &call) {
    uint32_t number[config::items];
#pragma unroll
    for (int r = 0; r < config::items; r++)
        shared.number[own_index<config>(at, r)] = UINT32_MAX;
    const uint32_t kept = judge_positions(shared, at);
    number_flags(shared, kept, number);
    share_kept(shared, at, kept);
    sync_cluster();
    if (at.warp == 0)
        sum_kept(shared, at);
    __syncthreads();
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const uint32_t j = at.rank * config::keys + own_index<config>(at, r);
        const bool keeps = kept >> r & 1;
        const uint32_t mine = shared.kept_before + number[r];
        if (j < call.kv_len && !(keeps && call.causal)) {
            segment.expiry[j] = (int32_t)(keeps ? call.kv_len : j);
            if (segment.slot)
                segment.slot[j] = keeps ? (int32_t)mine : -1;
        }
        if (!keeps || !call.causal)
            continue;
        const uint32_t place = shared.verdict[own_index<config>(at, r)].x;
        store_at(place / config::keys, &shared.number[place % config::keys], mine);
        store_at(mine / config::keys, &shared.kept[mine % config::keys], j);
    }
}

/* By place: the i-th worst kept key is evicted by the kept key window + i, which is told whose slot
 * it takes. */
template <class config>
__device__ static void match_kept(select_memory<config> &shared, const cluster_place &at,
                                  const select_segment &segment, const select_call &call,
                                  const uint2 (&key)[config::items]) {
    uint32_t own[config::items], number[config::items], kept = 0;
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        own[r] = shared.number[own_index<config>(at, r)];
        kept |= (uint32_t)(own[r] != UINT32_MAX) << r;
    }
    number_flags(shared, kept, number);
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const uint32_t evictor = shared.lower_kept + number[r] + call.window;
        const bool evicted = evictor < shared.kept_all;
        const uint32_t rank = evictor / config::keys, index = evictor % config::keys;
        if (!(kept >> r & 1))
            continue;
        segment.expiry[key[r].y] =
            (int32_t)(evicted ? load_at(rank, &shared.kept[index]) : call.kv_len);
        if (evicted && segment.slot)
            store_at(rank, &shared.parent[index], own[r]);
    }
}

/* ---- slots ---- */

/* Of each kept key of this block, the first here that has the same slot: its own parent is in an
 * earlier block, or it is the slot's first. */
template <class config>
__device__ static void find_heads(select_memory<config> &shared, const cluster_place &at,
                                  uint32_t window, uint32_t (&head)[config::items]) {
    const uint32_t first = at.rank * config::keys;
    bool changed = true;
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const uint32_t index = own_index<config>(at, r), number = first + index;
        if (number < window || number >= shared.kept_all)
            shared.parent[index] = number;
        const uint32_t parent = shared.parent[index];
        head[r] = parent >= first && number >= window ? parent - first : index;
        shared.head[index] = head[r];
    }
    while (__syncthreads_or(changed)) {
        changed = false;
#pragma unroll
        for (int r = 0; r < config::items; r++) {
            const uint32_t next = *(volatile uint32_t *)&shared.head[head[r]];
            changed |= next != head[r];
            *(volatile uint32_t *)&shared.head[own_index<config>(at, r)] = head[r] = next;
        }
    }
}

template <class config>
__device__ static void follow_slots(select_memory<config> &shared, const cluster_place &at,
                                    const select_segment &segment, uint32_t window) {
    uint32_t head[config::items];
    find_heads(shared, at, window, head);
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const uint32_t index = own_index<config>(at, r);
        if (head[r] != index) // heads' parents stay as they are
            shared.parent[index] = shared.parent[head[r]];
    }
    sync_cluster();
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const uint32_t index = own_index<config>(at, r);
        if (head[r] != index || at.rank * config::keys + index >= shared.kept_all)
            continue;
        uint32_t slot = shared.parent[index];
        while (slot >= window) { // what others found by now shortens the way
            slot = load_at(slot / config::keys, &shared.parent[slot % config::keys]);
            *(volatile uint32_t *)&shared.parent[index] = slot;
        }
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const uint32_t index = own_index<config>(at, r);
        if (at.rank * config::keys + index < shared.kept_all)
            segment.slot[shared.kept[index]] = (int32_t)shared.parent[head[r]];
    }
}

/* ---- the kernel ---- */

template <class config>
__device__ static void select_causal(select_memory<config> &shared, const cluster_place &at,
                                     const select_segment &segment, const select_call &call,
                                     const uint2 (&key)[config::items]) {
    find_borders(shared, at, key, call.window);
    judge_places(shared, at, key, call.window);
    sync_cluster();
    number_kept(shared, at, segment, call);
    sync_cluster();
    match_kept(shared, at, segment, call, key);
    if (segment.slot) {
        sync_cluster();
        follow_slots(shared, at, segment, call.window);
    }
}

template <class config>
__global__ void __launch_bounds__(threads)
    select_segments(const select_call call, uint32_t blocks) {
    select_memory<config> &shared = shared_memory<select_memory<config>>();
    cluster_place at;
    at.rank = cluster_ctarank();
    at.blocks = blocks;
    at.borders = at.blocks * warps;
    at.warp = threadIdx.x / warp_lanes;
    at.lane = threadIdx.x % warp_lanes;
    const select_segment segment = segment_of(call, blockIdx.x / blocks);
    uint2 key[config::items];
    barrier_cluster_arrive();
    if (threadIdx.x < most_blocks / 2)
        shared.kept_here[threadIdx.x] = 0;
    sort_keys(shared, at, segment, call.kv_len, key);
    if (call.causal) {
        select_causal(shared, at, segment, call, key);
    } else {
        sync_cluster(); // verdicts take the place of keys
        judge_global(shared, at, key, call.window);
        sync_cluster();
        number_kept(shared, at, segment, call);
    }
    sync_cluster(); // the others may still read what is here
}

/* ---- the row ---- */

enum { most_items = 10, portable_blocks = 8 };

/* Blocks that a cluster may have. */
static int64_t most_blocks_on(const cuda_facts *facts) {
    return facts->capability < 110 ? (int64_t)most_blocks : (int64_t)portable_blocks;
}

static int64_t divide_up(int64_t n, int64_t by) { return (n + by - 1) / by; }

typedef struct segment_plan {
    int items; // 0: there is no such cluster
    uint32_t blocks;
} segment_plan;

/* Rough times, in us, of a cluster of so many blocks and keys a thread; and how many of them run at
 * once. Fewer keys a thread are faster, as long as all clusters run at once. */
static segment_plan plan_segments(const fdma_problem *problem) {
    static const int choices[] = {1, 2, 3, 4, 6, 8, most_items};
    const cuda_facts *const facts = fdma_cuda_facts(problem->exec.device);
    const int64_t segments = problem->batch * problem->kv_heads;
    segment_plan best = {};
    int64_t best_time = INT64_MAX;
    for (size_t i = 0; i < sizeof choices / sizeof choices[0]; i++) {
        const int64_t blocks = divide_up(problem->kv_len, (int64_t)threads * choices[i]);
        if (blocks > most_blocks_on(facts))
            continue;
        const int64_t at_once = facts->multiprocessors / 16 * (blocks > 8 ? 1 : 16 / blocks);
        const int64_t waves = divide_up(segments, at_once > 0 ? at_once : 1);
        const int64_t time = waves * (14 + blocks + 5 * choices[i]);
        if (time >= best_time)
            continue;
        best_time = time;
        best.items = choices[i];
        best.blocks = (uint32_t)blocks;
    }
    return best;
}

static const char *refuses(const fdma_problem *problem) {
    const char *const refused = fdma_refuses_before_sm90(problem);
    if (refused)
        return refused;
    if (problem->dtype != FDMA_FLOAT32)
        return "float64 scores, supported: float32";
    if (problem->kv_len > 0 && plan_segments(problem).items == 0)
        return "more keys than a cluster of blocks holds";
    const cuda_facts *const facts = fdma_cuda_facts(problem->exec.device);
    if (sizeof(select_memory<segment_config<most_items>>) > (size_t)facts->shared_bytes)
        return "a device of less shared memory than its tables take";
    return NULL;
}

static size_t workspace(const fdma_problem *problem) {
    (void)problem;
    return 0;
}

template <int items>
static fdma_status run_with(const fdma_problem *problem, const segment_plan &plan) {
    typedef segment_config<items> config;
    const auto kernel = select_segments<config>;
    const uint32_t segments = (uint32_t)(problem->batch * problem->kv_heads);
    launch_shape shape = {dim3(segments * plan.blocks), dim3(threads)};
    shape.shared_bytes = sizeof(select_memory<config>);
    shape.cluster = plan.blocks;
    if (plan.blocks > portable_blocks)
        FDMA_TRY(check_cuda(
            "select",
            cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1)));
    return launch("select", kernel, shape, problem, describe_select(problem), plan.blocks);
}

static fdma_status run_plan(const fdma_problem *problem, const segment_plan &plan) {
    switch (plan.items) {
    case 1:
        return run_with<1>(problem, plan);
    case 2:
        return run_with<2>(problem, plan);
    case 3:
        return run_with<3>(problem, plan);
    case 4:
        return run_with<4>(problem, plan);
    case 6:
        return run_with<6>(problem, plan);
    case 8:
        return run_with<8>(problem, plan);
    default:
        return run_with<most_items>(problem, plan);
    }
}

static fdma_status run(const fdma_problem *problem) {
    if (problem->batch == 0 || problem->kv_heads == 0 || problem->kv_len == 0)
        return FDMA_OK;
    return run_plan(problem, plan_segments(problem));
}

static const kernel_row rows[] = {
    {"cuda/sm90", operation_select, fdma_missing_sm90, refuses, workspace, run, true}};

extern "C" const kernel_table fdma_cuda_sm90_select = {rows, sizeof rows / sizeof rows[0]};
