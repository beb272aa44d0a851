/* fdma_score_backward() on any device from compute capability 8.0: from dbias to dv, ddt_proj, da
 * and ddt_bias. Where dbias is 0, v contributes nothing, even if it is NaN.
 *
 *   fdma_cuda_run_products()  computes dt again, as fdma_score() does
 *   find_gradients()          makes ddt from it, and each round's terms of da and ddt_bias
 *   add_keys()                takes a split of a sequence's keys, and reads v and dv once for every
 *                             32 kv heads: adds to dv, and sums the split's terms of ddt_proj
 *   finish_sums()             adds the sums of rounds and splits, in order
 *
 * The number of splits depends only on kv_len, kv_heads and head_dim, so results do not depend on
 * the batch. Source: docs/algorithm.md, backward. */
#include "cuda/score/score_backward_ddt.cuh"

#include <assert.h>

static constexpr int split_threads = 128;
static constexpr int split_warps = split_threads / 32;
static constexpr int quad_tiles = 4; // tiles of 8 channels; a lane has one vector of each quad

template <typename element_, int limbs_, int head_tiles_, int quads_, int stages_, int step_tiles_>
struct product_config {
    using element = element_;
    using operands = tile_operands<head_tiles_>;
    static constexpr int limbs = limbs_; // of dt_proj
    static constexpr int head_tiles = head_tiles_;
    static constexpr int heads = head_tiles * tile_heads;
    static constexpr int quads = quads_; // quads of channel tiles that a warp has
    static constexpr int channel_tiles = quads * quad_tiles;
    static constexpr int channels = channel_tiles * 8;
    static constexpr int block_channels =
        split_warps * channels; // of a thread block, if there are enough
    static constexpr int row_vecs = channels / vec_channels;
    static constexpr int stages = stages_;         // of a warp's ring
    static constexpr int step_tiles = step_tiles_; // tiles whose operands a thread block loads in a
                                                   // step
};

/* A stage of a warp's ring: the warp's channels of a tile of keys. */
template <typename config> struct tile_stage {
    uint4 v[tile_keys * config::row_vecs], dv[tile_keys * config::row_vecs];
};

/* The swizzled index of a vector: vectors that ldmatrix reads together are in different banks. */
template <typename config> __device__ static int vec_index(int row, int vec) {
    constexpr int line_rows = 8 / config::row_vecs;
    return row * config::row_vecs + (vec ^ row / line_rows % config::row_vecs);
}

/* A lane has rows lane / 4 and lane / 4 + 8 of a tile, and vector lane % 4 of each quad: the
 * addresses of these vectors for the split's first key. */
template <typename config> struct lane_vecs {
    typename config::element *v[config::quads], *dv[config::quads];
    bool are_there[config::quads];
};

/* The offset of a channel, counted over all heads, in a key's row of v or dv. */
__device__ static int64_t channel_offset(const gradient_params &params, int32_t channel,
                                         int64_t head_stride) {
    return channel / params.head_dim * head_stride + channel % params.head_dim;
}

/* Sets the addresses of the vectors of the channels from `first` on. */
template <typename config>
__device__ static lane_vecs<config> find_vecs(const gradient_params &params, int32_t first) {
    using element = typename config::element;
    const split_range range = find_split(params);
    const int64_t key = (int64_t)range.tile * tile_keys + threadIdx.x % 32 / 4;
    lane_vecs<config> at;
#pragma unroll
    for (int n = 0; n < config::quads; n++) {
        const int32_t c = first + (n * quad_tiles + threadIdx.x % 4) * vec_channels;
        at.v[n] = (element *)params.score.v.data + range.b * params.score.v.batch +
                  key * params.score.v.row + channel_offset(params, c, params.score.v.head);
        at.dv[n] = (element *)params.dv.data + range.b * params.dv.batch + key * params.dv.row +
                   channel_offset(params, c, params.dv.head);
        at.are_there[n] = c < params.channels;
    }
    return at;
}

/* Copies eight elements, or writes zeros if !there. */
template <typename element>
__device__ static void copy_vec(uint4 *to, const element *from, bool there, bool aligned) {
    if (aligned) {
        cp_async_16(shared_address(to), from, there ? sizeof *to : 0);
        return;
    }
    alignas(16) element raw[vec_channels] = {};
    for (int x = 0; x < vec_channels && there; x++)
        raw[x] = from[x];
    *to = *(const uint4 *)raw;
}

/* Starts copying the keys of the mask of tile n of a split, and their dv if it is wanted. */
template <typename config>
__device__ static void copy_tile(tile_stage<config> *stage, const gradient_params &params,
                                 const lane_vecs<config> &at, int32_t n, uint32_t mask) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = half * 8 + lane / 4;
        const int64_t key = n * tile_keys + half * 8;
#pragma unroll
        for (int quad = 0; quad < config::quads; quad++) {
            const bool there = at.are_there[quad] && (mask >> row & 1) != 0;
            const int range = vec_index<config>(row, quad * quad_tiles + lane % 4);
            copy_vec(&stage->v[range], there ? at.v[quad] + key * params.score.v.row : at.v[0],
                     there, params.score.is_aligned);
            if (params.dv.data != NULL)
                copy_vec(&stage->dv[range], there ? at.dv[quad] + key * params.dv.row : at.dv[0],
                         there, params.dv_aligned);
        }
    }
}

/* dt_proj as the right operand for ddt: [limb][tile of heads][tile of channels]. A lane has heads
 * lane % 4 * 2 and the next of a tile. The channels of a quad of tiles are permuted so that a
 * lane's sums are one vector: column c of tile n is channel c / 2 * 8 + n * 2 + c % 2. */
template <typename config> struct warp_weights {
    uint32_t pair[config::limbs][config::head_tiles][config::channel_tiles];
};

/* A vector of a limb of dt_proj: kv head g, from channel c on. */
__device__ static uint4 load_weight_vec(const gradient_params &params, int limb, int32_t g,
                                        int32_t c) {
    const score_params &score = params.score;
    if (g >= params.kv_heads || c >= params.channels)
        return make_uint4(0, 0, 0, 0);
    return *(const uint4 *)((const uint16_t *)score.weights + limb * score.weight_limb +
                            g * score.weight_row + c);
}

template <typename config>
__device__ static void load_weights(warp_weights<config> &weights, const gradient_params &params,
                                    int32_t g, int32_t first) {
    const int lane = threadIdx.x % 32, column = lane / 4;
    const uint32_t selector = column % 2 == 0 ? 0x5410 : 0x7632; // picks the same half of two words
    uint32_t (*const pairs)[config::channel_tiles] = weights.pair[0];
#pragma unroll
    for (int x = 0; x < config::limbs * config::head_tiles; x++)
#pragma unroll
        for (int quad = 0; quad < config::quads; quad++) {
            const int limb = x / config::head_tiles;
            const int32_t head = g + x % config::head_tiles * tile_heads + lane % 4 * 2;
            const int32_t c = first + (quad * quad_tiles + column / 2) * vec_channels;
            const uint4 low = load_weight_vec(params, limb, head, c);
            const uint4 high = load_weight_vec(params, limb, head + 1, c);
            uint32_t *const to = &pairs[x][quad * quad_tiles];
            to[0] = __byte_perm(low.x, high.x, selector);
            to[1] = __byte_perm(low.y, high.y, selector);
            to[2] = __byte_perm(low.z, high.z, selector);
            to[3] = __byte_perm(low.w, high.w, selector);
        }
}

/* Writes old + sums * unscale to dv: a lane's vector of key lane / 4 + half * 8. */
template <typename element>
__device__ static void put_vec(element *to, uint4 old, const float (&sums)[quad_tiles][4], int half,
                               float unscale, bool aligned) {
    const element *const from = (const element *)&old;
    uint4 sum;
    uint32_t *const pairs = (uint32_t *)&sum;
#pragma unroll
    for (int n = 0; n < quad_tiles; n++)
        pairs[n] = element_type<element>::pack(
            fmaf(sums[n][half * 2], unscale, to_float(from[n * 2])),
            fmaf(sums[n][half * 2 + 1], unscale, to_float(from[n * 2 + 1])));
    if (aligned)
        *(uint4 *)to = sum;
    else
        for (int x = 0; x < vec_channels; x++)
            to[x] = ((const element *)&sum)[x];
}

/* Replaces elements that are not finite by 0, for the second limb of dt_proj: inf times a second
 * limb of 0 would be NaN. */
template <typename element> __device__ static void drop_infinite(operand &x) {
    const uint32_t exponents = is_bfloat16<element>() ? 0x7f807f80 : 0x7c007c00;
#pragma unroll
    for (int n = 0; n < 4; n++)
        x.pairs[n] &= ~__vcmpeq2(x.pairs[n] & exponents, exponents);
}

/* Adds ddt times dt_proj to dv, for the keys of the mask of tile n of a split. */
template <typename config>
__device__ static void add_to_dv(const tile_stage<config> &stage,
                                 const warp_weights<config> &weights, const gradient_params &params,
                                 const typename config::operands &operands,
                                 const lane_vecs<config> &at, int32_t n, uint32_t mask) {
    using element = typename config::element;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int quad = 0; quad < config::quads; quad++) {
        float sums[quad_tiles][4] = {};
#pragma unroll
        for (int tile = 0; tile < config::head_tiles; tile++) {
            operand ddt = operands.keys[tile][lane];
#pragma unroll
            for (int limb = 0; limb < config::limbs; limb++) {
                if (limb == 1)
                    drop_infinite<element>(ddt);
#pragma unroll
                for (int x = 0; x < quad_tiles; x++) {
                    const uint32_t pair = weights.pair[limb][tile][quad * quad_tiles + x];
                    mma_m16n8k16<element>(sums[x], ddt.pairs, pair, pair);
                }
            }
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = half * 8 + lane / 4;
            const int64_t key = n * tile_keys + half * 8;
            if (at.are_there[quad] && (mask >> row & 1) != 0)
                put_vec(at.dv[quad] + key * params.dv.row,
                        stage.dv[vec_index<config>(row, quad * quad_tiles + lane % 4)], sums, half,
                        is_bfloat16<element>() ? 1 : operands.key_unscale[row], params.dv_aligned);
        }
    }
}

/* A lane's sums for ddt_proj: for head lane / 4 of a tile of heads, and for channels lane % 4 * 2
 * and the next of a tile of channels. */
template <typename config> struct warp_sums {
    float2 of[config::head_tiles][config::channel_tiles];
};

/* Adds ddt times v of a tile. The tensor cores, which truncate, make only the sums within a
 * tile. */
template <typename config>
__device__ static void add_to_sums(warp_sums<config> &sums, const tile_stage<config> &stage,
                                   const typename config::operands &operands) {
    using element = typename config::element;
    const int lane = threadIdx.x % 32;
    uint32_t v[config::channel_tiles / 2][4];
#pragma unroll
    for (int two = 0; two < config::channel_tiles / 2; two++)
        ldmatrix_x4_trans(
            v[two], shared_address(&stage.v[vec_index<config>(lane % 16, two * 2 + lane / 16)]));
#pragma unroll
    for (int tile = 0; tile < config::head_tiles; tile++) {
        const operand ddt = operands.heads[tile][lane];
        const float unscale =
            is_bfloat16<element>() ? 1 : operands.head_unscale[tile * tile_heads + lane / 4];
#pragma unroll
        for (int c = 0; c < config::channel_tiles; c++) {
            const uint32_t *const pair = &v[c / 2][c % 2 * 2];
            float product[4] = {};
            mma_m16n8k16<element>(product, ddt.pairs, pair[0], pair[1]);
            float2 &sum = sums.of[tile][c];
            sum.x = fmaf(product[0] + product[2], unscale, sum.x);
            sum.y = fmaf(product[1] + product[3], unscale, sum.y);
        }
    }
}

static constexpr int finish_columns = 32, finish_rows = 8; // threads of finish_sums()

/* few_heads: up to 8 kv heads; many_heads: more, 32 at a time. A float32 dt_proj has two limbs,
 * which are as precise as ddt. */
template <typename element, int limbs> using few_heads = product_config<element, limbs, 1, 2, 2, 8>;
template <typename element, int limbs>
using many_heads = product_config<element, limbs, 4, 1, 3, 4>;

template <typename config> struct split_memory {
    uint32_t masks[3][config::step_tiles];
    typename config::operands operands[2][config::step_tiles];
    union {
        tile_stage<config> ring[split_warps][config::stages];
        warp_sums<config> sums[split_warps][32];
    };
};

/* Starts copying the items of step n of a split, if it has that many steps. `from` has an item for
 * each tile. */
template <typename config, typename item>
__device__ static void copy_step(item *to, const void *from, const gradient_params &params,
                                 int32_t g, int32_t n) {
    constexpr int count = config::step_tiles;
    const split_range range = find_split(params);
    const int64_t first = first_tile(params, g / config::heads, range.b) + range.tile + n * count;
    const char *const bytes = (const char *)from + first * (int64_t)sizeof(item);
    if (n * count >= split_length(params, range))
        return;
    for (int x = threadIdx.x * 16; x < count * (int)sizeof(item); x += split_threads * 16)
        cp_async_16(shared_address(to) + x, bytes + x, 16);
}

/* Multiplies the tiles of a split by a warp's channels: adds to dv and to `sums`. Operands are
 * loaded one step ahead. Masks are loaded two steps ahead, because the rings, which need them, run
 * ahead too. */
template <typename config>
__device__ static void take_split(warp_sums<config> &sums, split_memory<config> *shared,
                                  const gradient_params &params, int32_t g, int32_t first) {
    constexpr int stages = config::stages, step_tiles = config::step_tiles;
    const int32_t tiles = split_length(params, find_split(params));
    const lane_vecs<config> at = find_vecs<config>(params, first);
    tile_stage<config> *const ring = shared->ring[threadIdx.x / 32];
    warp_weights<config> weights;
    copy_step<config>(shared->masks[0], params.masks, params, g, 0);
    copy_step<config>(shared->masks[1], params.masks, params, g, 1);
    copy_step<config>(shared->operands[0], params.operands, params, g, 0);
    cp_async_commit_group();
    load_weights(weights, params, g, first);
    cp_async_wait_group<0>();
    __syncthreads();
    int32_t next = threadIdx.x / 32 % params.key_warps;
    int filled = 0, free = 0;
#pragma unroll 1
    for (; free < stages - 1; free++, next += params.key_warps) {
        if (next < tiles)
            copy_tile(ring + free, params, at, next,
                      shared->masks[next / step_tiles][next % step_tiles]);
        cp_async_commit_group();
    }
    for (int32_t step = 0; step * step_tiles < tiles; step++) {
        __syncthreads(); // each warp has waited for its own copies: this step has arrived
        copy_step<config>(shared->operands[(step + 1) % 2], params.operands, params, g, step + 1);
        copy_step<config>(shared->masks[(step + 2) % 3], params.masks, params, g, step + 2);
        for (int t = threadIdx.x / 32 % params.key_warps; t < step_tiles; t += params.key_warps) {
            __syncwarp(); // every lane has read the stage
            if (next < tiles)
                copy_tile(ring + free, params, at, next,
                          shared->masks[next / step_tiles % 3][next % step_tiles]);
            next += params.key_warps;
            cp_async_commit_group();
            cp_async_wait_group<stages - 1>();
            __syncwarp();
            const uint32_t mask = shared->masks[step % 3][t];
            const typename config::operands &operands = shared->operands[step % 2][t];
            if (mask != 0 && params.dv.data != NULL)
                add_to_dv(ring[filled], weights, params, operands, at, step * step_tiles + t, mask);
            if (mask != 0)
                add_to_sums(sums, ring[filled], operands);
            free = filled;
            filled = filled + 1 < stages ? filled + 1 : 0;
        }
    }
}

/* Adds the sums of warps with the same channels to the sums of the first of these warps. */
template <typename config>
__device__ static void reduce_warps(warp_sums<config> &sums, split_memory<config> *shared,
                                    int key_warps) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    __syncthreads(); // every warp has read its ring, whose memory is reused here
    if (warp % key_warps != 0)
        shared->sums[warp][lane] = sums;
    __syncthreads();
    for (int other = warp + 1; warp % key_warps == 0 && other < warp + key_warps; other++)
#pragma unroll
        for (int tile = 0; tile < config::head_tiles; tile++)
#pragma unroll
            for (int n = 0; n < config::channel_tiles; n++) {
                const float2 more = shared->sums[other][lane].of[tile][n];
                sums.of[tile][n].x += more.x;
                sums.of[tile][n].y += more.y;
            }
}

/* Writes the terms of a split in ddt_proj. True if none of them is NaN. */
template <typename config>
__device__ static bool put_sums(const warp_sums<config> &sums, const gradient_params &params,
                                float *to, int32_t g, int32_t first) {
    const int lane = threadIdx.x % 32;
    bool no_nan = true;
#pragma unroll
    for (int tile = 0; tile < config::head_tiles; tile++)
#pragma unroll
        for (int n = 0; n < config::channel_tiles; n++) {
            const int32_t head = g + tile * tile_heads + lane / 4, c = first + n * 8 + lane % 4 * 2;
            const float2 sum = sums.of[tile][n];
            if (head < params.kv_heads && c < params.channels) {
                *(float2 *)(to + (int64_t)head * params.channels + c) = sum;
                no_nan &= !isnan(sum.x) && !isnan(sum.y);
            }
        }
    return no_nan;
}

/* The sum of a split for one head and channel, computed key by key. */
template <typename element>
__device__ static float sum_sequentially(const gradient_params &params, int32_t g, int32_t c) {
    const split_range range = find_split(params);
    const element *const v = (const element *)params.score.v.data + range.b * params.score.v.batch +
                             channel_offset(params, c, params.score.v.head);
    const float *const ddt = ddt_of(params, range.b, g);
    const int32_t end = min((range.tile + split_length(params, range)) * tile_keys, params.kv_len);
    float sum = 0;
    for (int32_t j = range.tile * tile_keys; j < end; j++)
        if (is_term(ddt[j]))
            sum += ddt[j] * to_float(v[j * params.score.v.row]);
    return sum;
}

/* Computes the sums that are NaN again. A product includes keys whose gradient is 0 in this head
 * but not in others: they count as 0 * v, which is NaN if v is not finite. */
template <typename config>
__device__ static __noinline__ void redo_sums(const gradient_params &params, float *to, int32_t g,
                                              int32_t first) {
    const int end_of_heads = min(config::heads, params.kv_heads - g);
    const int end_of_channels = min(config::channels, params.channels - first);
    __syncwarp();
#pragma unroll 1
    for (int head = g; head < g + end_of_heads; head++)
#pragma unroll 1
        for (int c = first + threadIdx.x % 32; c < first + end_of_channels; c += 32) {
            float *const sum = to + (int64_t)head * params.channels + c;
            if (isnan(*sum))
                *sum = sum_sequentially<typename config::element>(params, head, c);
        }
}

/* Adds to dv of a split's keys, and sums their terms of ddt_proj, for the kv heads from g on and a
 * block of channels. */
template <typename config>
static __global__ void __launch_bounds__(split_threads, 2)
    add_keys(const __grid_constant__ gradient_params params, const int32_t g) {
    split_memory<config> *const shared = &shared_memory<split_memory<config>>();
    const int warp = threadIdx.x / 32, channel_warps = split_warps / params.key_warps;
    const int32_t first = (blockIdx.y * channel_warps + warp / params.key_warps) * config::channels;
    warp_sums<config> sums = {};
    griddepcontrol_wait(); // for find_gradients()
    griddepcontrol_launch_dependents();
    take_split(sums, shared, params, g, first);
    reduce_warps(sums, shared, params.key_warps);
    float *const to = params.dt_sums + (int64_t)blockIdx.x * params.kv_heads * params.channels;
    if (warp % params.key_warps == 0 && !__all_sync(~0u, put_sums(sums, params, to, g, first)))
        redo_sums<config>(params, to, g, first);
}

/* Writes a sum, or adds it to the contents, in float32 (wide) or v's type. */
template <typename element>
__device__ static void put_sum(void *to, int64_t at, float sum, bool wide, bool add) {
    if (wide)
        ((float *)to)[at] = add ? ((float *)to)[at] + sum : sum;
    else
        ((element *)to)[at] = from_float<element>(add ? to_float(((element *)to)[at]) + sum : sum);
}

/* Adds up the numbers of each column of threads. The first row of threads gets the sums. */
__device__ static float sum_columns(float sum) {
    __shared__ float sums[finish_rows][finish_columns];
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    for (int n = 1; n < finish_rows && threadIdx.y == 0; n++)
        sum += sums[n][threadIdx.x];
    return sum;
}

/* Divides `count` numbers, `stride` apart, into `slices` ranges, and returns the sum of one
 * range. */
__device__ static float sum_slice(const float *from, int64_t count, int64_t stride, int slice,
                                  int slices) {
    const int64_t each = divide_up(count, slices), end = min((slice + 1) * each, count);
    float sum = 0;
#pragma unroll 8
    for (int64_t n = slice * each; n < end; n++)
        sum += from[n * stride];
    return sum;
}

/* Sums over all rounds, and writes the result for kv head blockIdx.y. */
template <typename element>
__device__ static void put_rounds(const gradient_params &params, const float *sums, void *to,
                                  bool wide) {
    const int64_t rounds = (int64_t)params.batch * (params.tiles / round_tiles);
    const int slice = threadIdx.y * finish_columns + threadIdx.x;
    float sum = sum_columns(
        sum_slice(sums + blockIdx.y, rounds, params.kv_heads, slice, finish_columns * finish_rows));
    if (threadIdx.y == 0)
        sum = sum_lanes(sum);
    if (slice == 0)
        put_sum<element>(to, blockIdx.y, sum, wide, params.accumulate);
}

__host__ __device__ static int32_t count_column_blocks(const gradient_params &params) {
    return (int32_t)divide_up(params.channels, finish_columns);
}

/* Writes the gradients of dt_proj, a and dt_bias for kv head blockIdx.y. Each column of threads
 * takes a channel of dt_proj; a thread block after these takes a, and one more dt_bias. */
template <typename element>
static __global__ void __launch_bounds__(finish_columns *finish_rows)
    finish_sums(const __grid_constant__ gradient_params params) {
    const score_params &score = params.score;
    const int32_t g = blockIdx.y, c = blockIdx.x * finish_columns + threadIdx.x;
    griddepcontrol_wait(); // for add_keys()
    griddepcontrol_launch_dependents();
    const int32_t after = (int32_t)blockIdx.x - count_column_blocks(params);
    if (after == 0)
        put_rounds<element>(params, params.a_sums, params.da, score.wide_a);
    else if (after == 1)
        put_rounds<element>(params, params.dt_bias_sums, params.ddt_bias, score.wide_dt_bias);
    if (after >= 0)
        return;
    const float *const from = params.dt_sums + (int64_t)g * params.channels + c;
    const int64_t splits = (int64_t)params.batch * params.splits;
    const float sum = sum_columns(
        c < params.channels ? sum_slice(from, splits, (int64_t)params.kv_heads * params.channels,
                                        threadIdx.y, finish_rows)
                            : 0);
    if (threadIdx.y == 0 && c < params.channels)
        put_sum<element>(params.ddt_proj, g * params.ddt_row + c, sum, score.wide_dt_proj,
                         params.accumulate);
}

static int32_t count_head_tiles(const gradient_params *params) {
    return params->kv_heads <= tile_heads ? 1 : 4;
}

/* Splits of a sequence: enough to fill a large device with thread blocks, as long as their sums
 * take at most an eighth of v or 16 MB, whichever is more. */
static void plan_splits(gradient_params *params) {
    const int64_t few = 512, many = 384; // thread blocks that fill a device
    const int64_t least_sums = 4 << 20;  // floats
    const int64_t wanted = count_head_tiles(params) == 1
                               ? few * few_heads<__half, 1>::block_channels
                               : many * many_heads<__half, 1>::block_channels;
    const int64_t each = (int64_t)params->kv_heads * params->channels;
    const int64_t v_sums = (int64_t)params->kv_len * params->channels / 16;
    const int64_t fit = max(max(v_sums, least_sums) / each, (int64_t)1);
    const int64_t fill = max(wanted / params->channels, (int64_t)1);
    const int32_t rounds = (int32_t)divide_up(params->kv_len, round_keys);
    const int32_t most = (int32_t)min(fit, fill);
    const int32_t split_rounds = rounds > most ? (int32_t)divide_up(rounds, most) : 1;
    params->tiles = rounds * round_tiles;
    params->split_tiles = split_rounds * round_tiles;
    params->splits = (int32_t)divide_up(rounds, split_rounds);
}

static gradient_params plan_gradients(const fdma_problem *problem, fdma_arena *arena) {
    gradient_params params = {};
    params.score = fdma_cuda_plan_products(problem, arena);
    params.ddt = params.score.score.data;
    params.a = problem->a.data;
    params.dbias = numbers_of<const float>(&problem->dbias);
    params.dv = view_of(&problem->dv);
    params.dv_aligned = is_aligned(params.dv);
    params.ddt_proj = problem->ddt_proj.data;
    params.ddt_row = problem->ddt_proj.stride[0];
    params.da = problem->da.data;
    params.ddt_bias = problem->ddt_bias.data;
    params.key_valid = (const uint8_t *)problem->key_valid.data;
    params.valid_batch = problem->key_valid.stride[0];
    params.kv_len = (int32_t)problem->kv_len;
    params.batch = (int32_t)problem->batch;
    params.kv_heads = (int32_t)problem->kv_heads;
    params.head_dim = (int32_t)problem->head_dim;
    params.channels = params.kv_heads * params.head_dim;
    params.is_exp = problem->bias_form == FDMA_BIAS_EXP;
    params.accumulate = problem->accumulate;
    plan_splits(&params);
    const int32_t head_tiles = count_head_tiles(&params), heads = head_tiles * tile_heads;
    const int64_t tiles = divide_up(params.kv_heads, heads) * params.batch * params.tiles;
    const size_t tile_bytes = head_tiles == 1 ? sizeof(tile_operands<1>) : sizeof(tile_operands<4>);
    params.operands = fdma_arena_take(arena, (size_t)tiles * tile_bytes);
    params.masks = take<uint32_t>(arena, tiles);
    const int64_t splits = (int64_t)params.batch * params.splits * params.kv_heads;
    params.dt_sums = take<float>(arena, splits * params.channels);
    const int64_t rounds = (int64_t)params.batch * (params.tiles / round_tiles);
    params.a_sums = take<float>(arena, rounds * params.kv_heads);
    if (is_present(&problem->ddt_bias))
        params.dt_bias_sums = take<float>(arena, rounds * params.kv_heads);
    return params;
}

/* Gives each warp of a thread block channels of its own, as long as there are enough of them. The
 * other warps share channels and take tiles in turn. */
template <typename config>
static fdma_status launch_keys(const fdma_problem *problem, gradient_params params) {
    static_assert(sizeof(split_memory<config>) <= least_shared_bytes, "every device has as much");
    params.key_warps = split_warps;
    while (params.key_warps > 1 &&
           split_warps / params.key_warps * config::channels < params.channels)
        params.key_warps /= 2;
    // so that at the beginning of a step its copies are complete, and its masks have arrived
    assert(params.key_warps * config::stages <= config::step_tiles);
    const int block_channels = split_warps / params.key_warps * config::channels;
    const dim3 grid((unsigned)params.batch * params.splits,
                    (unsigned)divide_up(params.channels, block_channels));
    const launch_shape keys = {grid, dim3(split_threads), sizeof(split_memory<config>),
                               start_early};
    for (int32_t g = 0; g < params.kv_heads; g += config::heads)
        FDMA_TRY(launch("score_backward", add_keys<config>, keys, problem, params, g));
    return FDMA_OK;
}

template <typename element, int head_tiles>
static fdma_status launch_gradients(const fdma_problem *problem, const gradient_params &params) {
    const dim3 grid((unsigned)params.batch * (params.tiles / round_tiles),
                    (unsigned)divide_up(params.kv_heads, head_tiles * tile_heads));
    return launch("score_backward", find_gradients<element, head_tiles>,
                  {grid, dim3(find_threads), 0, start_early}, problem, params);
}

template <typename element>
static fdma_status launch_finish(const fdma_problem *problem, const gradient_params &params,
                                 launch_start start) {
    const int32_t blocks = count_column_blocks(params) + (params.ddt_bias != NULL ? 2 : 1);
    const dim3 grid((unsigned)blocks, (unsigned)params.kv_heads);
    return launch("score_backward", finish_sums<element>,
                  {grid, dim3(finish_columns, finish_rows), 0, start}, problem, params);
}

template <typename element>
static fdma_status run_type(const fdma_problem *problem, const gradient_params &params) {
    const bool is_wide = params.score.limbs > 1;
    if (params.batch == 0 || params.kv_len == 0)
        return launch_finish<element>(problem, params, start_after);
    FDMA_TRY(fdma_cuda_run_products(problem, params.score));
    if (count_head_tiles(&params) == 1) {
        FDMA_TRY((launch_gradients<element, 1>(problem, params)));
        FDMA_TRY((is_wide ? launch_keys<few_heads<element, 2>>(problem, params)
                          : launch_keys<few_heads<element, 1>>(problem, params)));
    } else {
        FDMA_TRY((launch_gradients<element, 4>(problem, params)));
        FDMA_TRY((is_wide ? launch_keys<many_heads<element, 2>>(problem, params)
                          : launch_keys<many_heads<element, 1>>(problem, params)));
    }
    return launch_finish<element>(problem, params, start_early);
}

static fdma_status run(const fdma_problem *problem) {
    fdma_arena arena = fdma_arena_of(problem);
    const gradient_params params = plan_gradients(problem, &arena);
    return problem->dtype == FDMA_BFLOAT16 ? run_type<__nv_bfloat16>(problem, params)
                                           : run_type<__half>(problem, params);
}

static const char *refuses(const fdma_problem *problem) {
    const int64_t most_keys = INT32_MAX - 1023, most_sequences = 1 << 22, most_tiles = 1 << 30;
    const int64_t most_channels = 1 << 20, most_heads = 65535;
    if (problem->dtype != FDMA_FLOAT16 && problem->dtype != FDMA_BFLOAT16)
        return "float32 or float64 tensors: cast v to bfloat16 or float16";
    if (problem->dbias.dtype == FDMA_FLOAT64)
        return "float64 dbias; supported: float32";
    if (problem->batch > most_sequences || problem->kv_heads > most_heads ||
        problem->kv_heads * problem->head_dim > most_channels)
        return "more than 2^22 sequences, 65535 kv heads or 2^20 channels per key";
    if (problem->kv_len > most_keys ||
        problem->batch * (problem->kv_len / tile_keys + round_tiles) > most_tiles)
        return "more than 2^31 - 1024 keys of a sequence, or 2^30 tiles of 16 keys";
    return fdma_refuses_before_sm80(problem);
}

FDMA_CUDA_TABLE(fdma_cuda_sm80_score_backward,
                {"cuda/sm80", operation_score_backward, fdma_missing_sm80, refuses,
                 workspace_of<plan_gradients>, run, true, 0});
