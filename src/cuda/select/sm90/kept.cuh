/* Which keys are ever kept: from places and positions to a verdict on each. */
#ifndef FDMA_CUDA_SELECT_SM90_KEPT_CUH
#define FDMA_CUDA_SELECT_SM90_KEPT_CUH

#include "cuda/select/sm90/memory.cuh"

/* ---- borders: border d is the end of chunk d of positions ---- */

/* A word is left out after the borders that a lane sums. */
template <class config> __device__ static inline uint32_t column_of(uint32_t d) {
    return d + d / config::lane_borders;
}

/* A warp's row: how many of its keys are before each border. */
template <class config>
__device__ static void count_before(select_memory<config> &shared, const cluster_place &at,
                                    const uint32_t (&position)[config::items]) {
    uint32_t *const row = shared.border[at.warp];
    for (uint32_t word = at.lane; word < column_of<config>(at.borders); word += warp_lanes)
        row[word] = 0;
    __syncwarp();
#pragma unroll
    for (int r = 0; r < config::items; r++)
        if (!(position[r] & absent))
            atomicAdd(&row[column_of<config>(position[r] / config::chunk)], 1);
    __syncwarp();
    uint32_t *const mine = row + at.lane * (config::lane_borders + 1); // past the borders: anything
    uint32_t sum = 0;
#pragma unroll
    for (int d = 0; d < config::lane_borders; d++)
        sum += mine[d];
    sum = sum_lower_lanes(sum);
#pragma unroll
    for (int d = 0; d < config::lane_borders; d++)
        mine[d] = sum += mine[d];
}

/* Of border `threadIdx.x`: sums over the later warps. */
template <class config> __device__ static void sum_border(select_memory<config> &shared) {
    const uint32_t column = column_of<config>(threadIdx.x);
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
    uint32_t sum = 0, owner = at.blocks, sought = 0;
#pragma unroll
    for (uint32_t rank = config::most_blocks; rank-- > 0;) {
        const uint32_t reached = sum + (rank < at.blocks ? shared.count[rank][d] : 0);
        if (rank == at.rank)
            shared.above[d] = sum;
        if (sum < window && reached >= window) {
            owner = rank;
            sought = window - sum;
        }
        sum = reached;
    }
    if (owner == at.rank)
        shared.own_floor[d] = at.rank * warps + find_warp(shared, column_of<config>(d), sought) + 1;
    return owner;
}

/* The floor of chunk d of positions: one more than the chunk of places that has the worst of the
 * keys kept when it begins; 0: as yet every key is. */
template <class config>
__device__ static void find_borders(select_memory<config> &shared, const cluster_place &at,
                                    const uint32_t (&position)[config::items], uint32_t window) {
    const uint32_t d = threadIdx.x;
    uint32_t owner = at.blocks;
    count_before(shared, at, position);
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
__device__ static uint32_t
count_higher(const select_memory<config> &shared, const cluster_place &at,
             const uint32_t (&position)[config::items], uint32_t index, uint32_t q) {
    uint32_t count = 0;
#pragma unroll
    for (int r = 0; r < config::items; r++)
        count += r * warp_lanes + at.lane > index && position[r] < q * config::chunk;
    count = __reduce_add_sync(all_lanes, count);
    if (q == 0)
        return 0;
    const uint32_t later =
        at.warp + 1 < warps ? shared.border[at.warp + 1][column_of<config>(q - 1)] : 0;
    return count + later + shared.above[q - 1];
}

/* The verdict on each key that may be kept goes to the block of its position. */
template <class config>
__device__ static void judge_places(select_memory<config> &shared, const cluster_place &at,
                                    const uint32_t (&position)[config::items], uint32_t window) {
    const uint32_t mine = at.rank * warps + at.warp + 1; // chunk, as floors are
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const uint32_t j = position[r] & ~absent, q = j / config::chunk;
        const bool present = j == position[r];
        uint32_t others = present && mine > shared.floor[q + 1] ? always_kept : 0;
        const bool unsure = present && others == 0 && mine >= shared.floor[q];
        for (uint32_t left = __ballot_sync(all_lanes, unsure); left; left &= left - 1) {
            const int lane = __ffs(left) - 1;
            const uint32_t higher = count_higher(shared, at, position, r * warp_lanes + lane,
                                                 __shfl_sync(all_lanes, q, lane));
            if (lane == (int)at.lane)
                others = higher < window ? window - higher : 0;
        }
        const uint32_t place = at.rank * config::keys + own_index<config>(at, r);
        if (others > 0)
            store_at(j / config::keys, &shared.verdict[j % config::keys],
                     make_uint2(place, others));
    }
}

/* Global scope: the best of all, wherever they are. */
template <class config>
__device__ static void judge_global(select_memory<config> &shared, const cluster_place &at,
                                    const uint32_t (&position)[config::items], uint32_t window) {
    const uint32_t floor = at.blocks * config::keys - window;
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const uint32_t place = at.rank * config::keys + own_index<config>(at, r);
        if (!(position[r] & absent) && place >= floor)
            store_at(position[r] / config::keys, &shared.verdict[position[r] % config::keys],
                     make_uint2(place, always_kept));
    }
}

/* Bit r: whether key r, now by position, is ever kept. */
template <class config>
__device__ static uint32_t judge_positions(const select_memory<config> &shared,
                                           const cluster_place &at) {
    uint32_t place[config::items], kept = 0;
#pragma unroll
    for (int r = 0; r < config::items; r++)
        place[r] = shared.verdict[own_index<config>(at, r)].x;
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const uint32_t others = shared.verdict[own_index<config>(at, r)].y;
        bool keeps = others >= config::chunk;
        for (uint32_t left = __ballot_sync(all_lanes, others > 0 && !keeps); left;
             left &= left - 1) {
            const int lane = __ffs(left) - 1;
            const uint32_t its_place = __shfl_sync(all_lanes, place[r], lane);
            uint32_t count = 0;
#pragma unroll
            for (int other = 0; other < config::items; other++)
                count += other * warp_lanes + at.lane < (uint32_t)(r * warp_lanes + lane) &&
                         place[other] > its_place;
            count = __reduce_add_sync(all_lanes, count);
            keeps = lane == (int)at.lane ? count < others : keeps;
        }
        kept |= (uint32_t)keeps << r;
    }
    return kept;
}

#endif
