/* fdma_score() on any device from compute capability 8.0: v times dt_proj on the tensor cores,
 * reading v once, then dt_bias, softplus and the coefficient.
 *
 * A warp takes 16 keys and up to 64 kv heads at a time. It has a ring for its keys in shared
 * memory, which it fills ahead across tiles, so that warps do not wait for one another. The warps
 * of a thread block share the weights: either all of them stay in shared memory, or two panels of
 * them alternate there. Sums go over all channels in order, whichever warp takes a tile. A float32
 * weight is a sum of three limbs of v's type. */
#include "cuda/device/element.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/score/score.cuh"

static constexpr int arrange_threads = 256;
static constexpr int split_warps = 8; // at least, of a thread block that splits weights

template <typename T>
__device__ static float load_weight(const score_params &params, int g, int channel) {
    const int64_t at = g * params.dt_row + channel;
    return params.wide_dt_proj ? ((const float *)params.dt_proj)[at]
                               : to_float(((const T *)params.dt_proj)[at]);
}

/* Thread block g finds the divisor of the weights of kv head g. */
template <typename T>
static __global__ void __launch_bounds__(arrange_threads) find_scales(const score_params params) {
    __shared__ float most_of_warp[arrange_threads / 32];
    const int g = blockIdx.x;
    float most = 0;
    for (int channel = threadIdx.x; channel < params.channels; channel += arrange_threads)
        most = fmaxf(most, fabsf(load_weight<T>(params, g, channel)));
    for (int lane = 16; lane > 0; lane /= 2)
        most = fmaxf(most, __shfl_xor_sync(~0u, most, lane));
    if (threadIdx.x % 32 == 0)
        most_of_warp[threadIdx.x / 32] = most;
    __syncthreads();
    if (threadIdx.x > 0)
        return;
    for (int warp = 0; warp < arrange_threads / 32; warp++)
        most = fmaxf(most, most_of_warp[warp]);
    params.scales[g] = weight_scale(most);
}

/* The next limb of each remainder. */
template <typename T> __device__ static uint4 take_limbs(float (&remainders)[vec_channels]) {
    alignas(16) T elements[vec_channels];
    for (int i = 0; i < vec_channels; i++)
        elements[i] = from_float<T>(take_limb<T>(remainders[i]));
    return *(const uint4 *)elements;
}

/* Where the vector from `channel` on is in params.weights. */
template <typename T>
__device__ static uint4 *arranged_vec(const score_params &params, int limb, int g, int channel) {
    T *const weights = (T *)params.weights + limb * params.weight_limb;
    return (uint4 *)(weights + g * params.weight_row + channel);
}

/* Each thread writes a vector of the weights of kv head blockIdx.x, all limbs of it. */
template <typename T>
static __global__ void __launch_bounds__(arrange_threads)
    arrange_weights(const score_params params) {
    const int g = blockIdx.x;
    const int channel = (blockIdx.y * arrange_threads + threadIdx.x) * vec_channels;
    griddepcontrol_wait(); // for find_scales()
    griddepcontrol_launch_dependents();
    if (channel >= params.channels)
        return;
    const float scale = params.scales != NULL ? params.scales[g] : 1;
    float remainders[vec_channels];
    for (int i = 0; i < vec_channels; i++)
        remainders[i] = load_weight<T>(params, g, channel + i) / scale;
    for (int limb = 0; limb < params.limbs; limb++)
        *arranged_vec<T>(params, limb, g, channel) = take_limbs<T>(remainders);
}

template <typename T>
static fdma_status launch_arrange(const fdma_problem *problem, const score_params &params) {
    const unsigned heads = (unsigned)params.kv_heads;
    const int64_t blocks = divide_up(params.channels / vec_channels, arrange_threads);
    if (params.scales != NULL)
        FDMA_TRY(
            launch("score", find_scales<T>, {dim3(heads), dim3(arrange_threads)}, problem, params));
    return launch("score", arrange_weights<T>,
                  {dim3(heads, (unsigned)blocks), dim3(arrange_threads), 0,
                   params.scales != NULL ? start_early : start_after},
                  problem, params);
}

static constexpr int mma_keys = 16, mma_heads = 8;

template <typename element_, int head_tiles_, int step_channels_, int most_warps_>
struct score_config {
    using element = element_;
    static constexpr int head_tiles = head_tiles_;       // mma tiles
    static constexpr int step_channels = step_channels_; // of a stage
    static constexpr int most_warps = most_warps_; // of a thread block: as many as fit in registers
    static constexpr int heads = head_tiles * mma_heads;
    static constexpr int row_bytes = step_channels * (int)sizeof(element);
    static constexpr int row_vecs = step_channels / vec_channels;
    static constexpr int copy_rows = 32 / row_vecs; // rows that a warp copies at once
    static constexpr int copies = mma_keys / copy_rows;
    static constexpr int stage_bytes = mma_keys * row_bytes;
};

/* True if this warp takes keys. If there are few keys, some warps only copy weights. */
__device__ static bool has_keys(const score_params &params) {
    return threadIdx.x / 32 < params.key_warps;
}

/* The keys of a warp in a round: a tile of mma_keys. A tile takes one round for each block of kv
 * heads. */
struct key_tile {
    int64_t b, j;
    bool is_there;
};

__device__ static key_tile find_tile(const score_params &params, int round) {
    const int block = round / params.head_blocks * gridDim.x + blockIdx.x;
    const int index = block * params.key_warps + threadIdx.x / 32;
    const int b = index / params.sequence_tiles;
    return {b, (int64_t)(index - b * params.sequence_tiles) * mma_keys,
            has_keys(params) && index < params.key_tiles};
}

__device__ static bool is_valid(const score_params &params, int64_t b, int64_t j) {
    return j < params.kv_len &&
           (params.key_valid == NULL || params.key_valid[b * params.valid_batch + j] != 0);
}

/* A warp's ring of stages, and the next copies of this lane: a vector of every copy_rows-th key of
 * a tile. */
template <typename config> struct key_ring {
    char *stages;
    int filled, free;                     // the stages to read next and to fill next
    const typename config::element *from; // the vector of the first key
    uint32_t valid;                       // bit i: key i exists and is valid
    int channel, d;                       // of the vector: counted over all heads, and in its head
    int round, step;
};

template <typename config>
__device__ static void advance(key_ring<config> &ring, const score_params &params, int channels) {
    ring.channel += channels;
    ring.d += channels;
    ring.from += channels;
    for (; ring.d >= params.head_dim; ring.d -= params.head_dim)
        ring.from += params.v.head - params.head_dim;
}

template <typename config>
__device__ static void enter_round(key_ring<config> &ring, const score_params &params, int round) {
    const key_tile tile = find_tile(params, round);
    const int lane = threadIdx.x % 32;
    const int64_t j = tile.j + lane / config::row_vecs;
    ring.round = round;
    ring.step = ring.channel = ring.d = 0;
    ring.valid = 0;
    ring.from = (const typename config::element *)params.v.data;
    if (!tile.is_there)
        return;
    ring.from += tile.b * params.v.batch + j * params.v.row;
#pragma unroll
    for (int i = 0; i < config::copies; i++)
        ring.valid |= (uint32_t)is_valid(params, tile.b, j + i * config::copy_rows) << i;
    advance(ring, params, lane % config::row_vecs * vec_channels);
}

/* The swizzled offset of a vector: vectors that ldmatrix reads together are in different banks. */
template <typename config> __device__ static uint32_t vec_offset(int row, int vec) {
    return row * config::row_bytes + (vec ^ row % 8) * vec_bytes;
}

/* The copies of a lane if v is not aligned: element by element. */
template <typename config>
__device__ static __noinline__ void
copy_unaligned(char *stage, const typename config::element *from, int64_t stride, uint32_t valid) {
    const int row = threadIdx.x % 32 / config::row_vecs, vec = threadIdx.x % config::row_vecs;
    for (int i = 0; i < config::copies; i++) {
        alignas(16) typename config::element elements[vec_channels] = {};
        if (valid >> i & 1)
            for (int d = 0; d < vec_channels; d++)
                elements[d] = from[i * stride + d];
        *(uint4 *)(stage + vec_offset<config>(row + i * config::copy_rows, vec)) =
            *(const uint4 *)elements;
    }
}

/* Starts a warp's copies of a step. Keys that are not valid become zeros. */
template <typename config>
__device__ static void copy_keys(key_ring<config> &ring, const score_params &params) {
    const int row = threadIdx.x % 32 / config::row_vecs, vec = threadIdx.x % config::row_vecs;
    const int64_t stride = config::copy_rows * params.v.row;
    const uint32_t valid = ring.channel < params.channels ? ring.valid : 0;
    char *const stage = ring.stages + ring.free * config::stage_bytes;
    const uint32_t to = shared_address(stage);
    const typename config::element *from = ring.from;
    if (!params.is_aligned)
        copy_unaligned<config>(stage, from, stride, valid);
    else
#pragma unroll
        for (int i = 0; i < config::copies; i++, from += stride)
            cp_async_16(to + vec_offset<config>(row + i * config::copy_rows, vec), from,
                        valid & 1u << i ? vec_bytes : 0);
    advance(ring, params, config::step_channels);
    if (++ring.step == params.panels * params.panel_steps)
        enter_round(ring, params, ring.round + 1);
}

/* Starts a thread block's copies of a panel: [limbs][panel_steps][heads] rows of the weights of the
 * kv heads from `head` on. */
template <typename config>
__device__ static void copy_panel(char *panel, const score_params &params, int head, int index) {
    const int vecs = params.panel_steps * config::heads * config::row_vecs;
    const int first = index * params.panel_steps * config::step_channels;
    const typename config::element *from =
        (const typename config::element *)params.weights + head * params.weight_row + first;
    uint32_t to = shared_address(panel);
    for (int limb = 0; limb < params.limbs; limb++) {
        for (int i = threadIdx.x; i < vecs; i += blockDim.x) {
            const int vec = i % config::row_vecs, row = i / config::row_vecs;
            const int g = row % config::heads, step = row / config::heads;
            const int channel = step * config::step_channels + vec * vec_channels;
            const bool is_there = head + g < params.kv_heads && first + channel < params.channels;
            cp_async_16(to + vec_offset<config>(row, vec), from + g * params.weight_row + channel,
                        is_there ? vec_bytes : 0);
        }
        from += params.weight_limb;
        to += vecs * vec_bytes;
    }
}

/* In place of arrange_weights() and copy_panel() where all weights are one panel without divisors.
 * The first thread block also writes them to params.weights, for score_backward. */
template <typename config>
__device__ static __noinline__ void split_panel(char *panel, const score_params &params) {
    using element = typename config::element;
    const int vecs = params.panel_steps * config::heads * config::row_vecs;
    for (int i = threadIdx.x; i < vecs; i += blockDim.x) {
        const int vec = i % config::row_vecs, row = i / config::row_vecs, g = row % config::heads;
        const int channel = row / config::heads * config::step_channels + vec * vec_channels;
        const bool is_there = g < params.kv_heads && channel < params.channels;
        float remainders[vec_channels] = {};
        for (int n = 0; n < vec_channels && is_there; n++)
            remainders[n] = load_weight<element>(params, g, channel + n);
        for (int limb = 0; limb < params.limbs; limb++) {
            const uint4 elements = take_limbs<element>(remainders);
            *(uint4 *)(panel + limb * vecs * vec_bytes + vec_offset<config>(row, vec)) = elements;
            if (is_there && blockIdx.x == 0)
                *arranged_vec<element>(params, limb, g, channel) = elements;
        }
    }
}

static constexpr int mma_channels = 16;
static constexpr int sum_channels = 64; // summed by a tensor core, which truncates

/* A warp's keys: 16 channels from `vec` on. */
template <typename config>
__device__ static void load_keys(uint32_t (&keys)[4], uint32_t from, int vec) {
    const int lane = threadIdx.x % 32;
    ldmatrix_x4(keys, from + vec_offset<config>(lane % 16, vec + lane / 16));
}

/* The weights of all heads of a block in 16 channels from `vec` on, as the right operand of mma. */
template <typename config>
__device__ static void load_weights(uint32_t (&weights)[config::head_tiles][2], uint32_t from,
                                    int vec) {
    const int lane = threadIdx.x % 32, row = lane % 8;
    vec += lane / 8 % 2;
    if (config::head_tiles == 1)
        ldmatrix_x2(weights[0], from + vec_offset<config>(row, vec));
#pragma unroll
    for (int n = 0; n + 1 < config::head_tiles; n += 2) {
        uint32_t (&two)[4] = *(uint32_t (*)[4])weights[n];
        ldmatrix_x4(two, from + vec_offset<config>((n + lane / 16) * mma_heads + row, vec));
    }
}

/* Adds the products of sum_channels channels from `vec` on, with all limbs of the weights. */
template <typename config>
__device__ static void multiply(float (&sums)[config::head_tiles][4], uint32_t keys_from,
                                uint32_t weights_from, int vec, const score_params &params) {
    constexpr int steps = sum_channels / mma_channels, mma_vecs = mma_channels / vec_channels;
    uint32_t keys[steps][4];
    float new_sums[config::head_tiles][4] = {};
#pragma unroll
    for (int k = 0; k < steps; k++)
        load_keys<config>(keys[k], keys_from, vec + k * mma_vecs);
#pragma unroll 1
    for (int limb = 0; limb < params.limbs; limb++) {
#pragma unroll
        for (int k = 0; k < steps; k++) {
            uint32_t weights[config::head_tiles][2];
            load_weights<config>(weights, weights_from, vec + k * mma_vecs);
#pragma unroll
            for (int n = 0; n < config::head_tiles; n++)
                mma_m16n8k16<typename config::element>(new_sums[n], keys[k], weights[n][0],
                                                       weights[n][1]);
        }
        weights_from += params.panel_steps * config::heads * config::row_bytes;
    }
#pragma unroll
    for (int n = 0; n < config::head_tiles; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            sums[n][i] += new_sums[n][i];
}

/* The inputs of the epilogue of a tile, loaded ahead: a and dt_bias of heads lane and 32 + lane of
 * a block, and `valid` of keys lane / 4 and 8 + lane / 4 of the tile. */
template <typename config> struct epilogue_inputs {
    static constexpr int head_groups = (config::heads + 31) / 32;
    float a[head_groups], dt_bias[head_groups];
    bool valid[2];
};

template <typename config>
__device__ static void load_epilogue_inputs(epilogue_inputs<config> &inputs,
                                            const score_params &params, const key_tile &tile,
                                            int head) {
    using element = typename config::element;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < inputs.head_groups; i++) {
        const int g = min(head + i * 32 + lane, params.kv_heads - 1);
        inputs.a[i] = params.a != NULL ? load_of_head<element>(params.a, params.wide_a, g) : 1;
        inputs.dt_bias[i] = params.dt_bias != NULL
                                ? load_of_head<element>(params.dt_bias, params.wide_dt_bias, g)
                                : 0;
    }
#pragma unroll
    for (int half = 0; half < 2; half++)
        inputs.valid[half] =
            tile.is_there && is_valid(params, tile.b, tile.j + lane / 4 + half * 8);
}

template <typename T>
__device__ static void write_score(const score_params &params, int64_t b, int64_t j, int g,
                                   float sum, float a, float dt_bias, bool valid) {
    if (j >= params.kv_len || g >= params.kv_heads)
        return;
    float dot = params.scales != NULL ? sum * params.scales[g] : sum;
    if (isnan(dot) && params.limbs > 1 && valid)
        dot = dot_sequentially((const T *)params.v.data + b * params.v.batch + j * params.v.row,
                               params.v.head, params.kv_heads, params.head_dim,
                               (const float *)params.dt_proj + g * params.dt_row);
    const float dt = dot + dt_bias;
    const float z = params.a == NULL ? dt : valid ? a * softplus(dt) : -INFINITY;
    if (params.score.data != NULL)
        params.score.at(b, g)[j] = z;
    if (params.bias.data != NULL)
        params.bias.at(b, g)[j] = params.bias_form == FDMA_BIAS_EXP ? expf(z) : z;
}

/* Writes the scores of a tile. A lane has keys lane / 4 and lane / 4 + 8, and heads lane % 4 * 2
 * and the next of each mma tile. The mma tiles are moved to sums[0] one after the other, so that
 * the loop is not unrolled. */
template <typename config>
__device__ static void write_scores(float (&sums)[config::head_tiles][4],
                                    const score_params &params, const key_tile &tile, int head,
                                    const epilogue_inputs<config> &inputs) {
    const int lane = threadIdx.x % 32;
    const int64_t j = tile.j + lane / 4;
#pragma unroll 1
    for (int n = 0; n < config::heads && head + n < params.kv_heads; n += mma_heads) {
        const int group = n < 32 ? 0 : inputs.head_groups - 1;
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            const int g = n + lane % 4 * 2 + odd;
            const float a = __shfl_sync(~0u, inputs.a[group], g % 32);
            const float dt_bias = __shfl_sync(~0u, inputs.dt_bias[group], g % 32);
#pragma unroll
            for (int half = 0; half < 2; half++)
                write_score<typename config::element>(params, tile.b, j + half * 8, head + g,
                                                      sums[0][half * 2 + odd], a, dt_bias,
                                                      inputs.valid[half]);
        }
#pragma unroll
        for (int next = 1; next < config::head_tiles; next++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                sums[next - 1][i] = sums[next][i];
    }
}

/* Waits until at most `pending` of the latest groups of copies are in flight. */
__device__ static void wait_for_copies(int pending) {
    if (pending >= 6)
        cp_async_wait_group<6>();
    else if (pending >= 4)
        cp_async_wait_group<4>();
    else if (pending >= 2)
        cp_async_wait_group<2>();
    else if (pending >= 1)
        cp_async_wait_group<1>();
    else
        cp_async_wait_group<0>();
}

/* Starts the next copies of a warp, and adds the products of the oldest stage. */
template <typename config>
__device__ static void take_step(float (&sums)[config::head_tiles][4], key_ring<config> &ring,
                                 uint32_t weights, const score_params &params, int rounds) {
    wait_for_copies(params.stages - 2);
    __syncwarp();
    if (ring.round < rounds)
        copy_keys(ring, params);
    cp_async_commit_group();
    const uint32_t keys = shared_address(ring.stages) + ring.filled * config::stage_bytes;
#pragma unroll(config::head_tiles == 1 ? 2 : 1) // as far as registers allow
    for (int vec = 0; vec < config::row_vecs; vec += sum_channels / vec_channels)
        multiply<config>(sums, keys, weights, vec, params);
    ring.free = ring.filled;
    ring.filled = ring.filled + 1 < params.stages ? ring.filled + 1 : 0;
}

template <typename config>
__device__ static void fill_ring(key_ring<config> &ring, const score_params &params) {
    for (ring.free = 0; ring.free < params.stages - 1; ring.free++) {
        copy_keys(ring, params);
        cp_async_commit_group();
    }
    ring.filled = 0;
}

/* Waits for panel `index` of the weights, and starts copying the one after it. */
template <typename config>
__device__ static void next_panel(char *next, const score_params &params, int round, int index,
                                  int rounds) {
    wait_for_copies(has_keys(params) ? params.stages - 2 : 0);
    __syncthreads();
    if (params.is_resident || (round + 1 == rounds && index + 1 == params.panels))
        return;
    if (++index == params.panels) {
        index = 0;
        round++;
    }
    copy_panel<config>(next, params, round % params.head_blocks * config::heads, index);
    if (!has_keys(params))
        cp_async_commit_group();
}

/* All tiles of a thread block, one for each of its warps at a time. */
template <typename config>
static __global__ void __launch_bounds__(32 * config::most_warps, 1)
    score_keys(const __grid_constant__ score_params params) {
    extern __shared__ uint4 memory[];
    const int step_bytes = config::heads * config::row_bytes;
    const int panel_bytes = params.limbs * params.panel_steps * step_bytes;
    const int block_tiles = params.key_warps * gridDim.x;
    const int rounds = (params.key_tiles + block_tiles - 1) / block_tiles * params.head_blocks;
    char *panel = (char *)memory, *other = panel + (params.is_resident ? 0 : panel_bytes);
    key_ring<config> ring;
    ring.stages = other + panel_bytes + threadIdx.x / 32 * params.stages * config::stage_bytes;
    if (params.key_valid != NULL)
        griddepcontrol_wait(); // for find_valid(), see adapt/adapt.cu
    enter_round(ring, params, 0);
    griddepcontrol_wait(); // for arrange_weights()
    griddepcontrol_launch_dependents();
    if (!params.is_split)
        copy_panel<config>(panel, params, 0, 0);
    if (has_keys(params))
        fill_ring(ring, params);
    else
        cp_async_commit_group();
    if (params.is_split) // while keys arrive
        split_panel<config>(panel, params);
    for (int round = 0; round < rounds; round++) {
        const key_tile tile = find_tile(params, round);
        const int head = round % params.head_blocks * config::heads;
        float sums[config::head_tiles][4] = {};
        epilogue_inputs<config> inputs;
        load_epilogue_inputs(inputs, params, tile, head);
        for (int index = 0; index < params.panels; index++) {
            if (!params.is_resident || round == 0)
                next_panel<config>(other, params, round, index, rounds);
            for (int step = 0; has_keys(params) && step < params.panel_steps; step++)
                take_step(sums, ring, shared_address(panel) + step * step_bytes, params, rounds);
            char *const last = panel;
            panel = other;
            other = last;
        }
        if (tile.is_there)
            write_scores(sums, params, tile, head, inputs);
    }
}

score_params fdma_cuda_plan_score(const fdma_problem *problem, fdma_arena *arena) {
    const fdma_tensor *const dt_proj = &problem->dt_proj;
    score_params params = {};
    params.v = view_of(&problem->v);
    params.dt_proj = dt_proj->data;
    params.a = problem->a.data;
    params.dt_bias = problem->dt_bias.data;
    params.dt_row = dt_proj->stride[0];
    params.key_valid = (const uint8_t *)problem->key_valid.data;
    params.valid_batch = problem->key_valid.stride[0];
    params.score = numbers_of<float>(&problem->score);
    params.bias = numbers_of<float>(&problem->bias);
    params.batch = problem->batch;
    params.kv_len = problem->kv_len;
    params.kv_heads = (int32_t)problem->kv_heads;
    params.head_dim = (int32_t)problem->head_dim;
    params.channels = params.kv_heads * params.head_dim;
    params.bias_form = problem->bias_form;
    params.wide_dt_proj = dt_proj->dtype == FDMA_FLOAT32;
    params.wide_a = problem->a.dtype == FDMA_FLOAT32;
    params.wide_dt_bias = problem->dt_bias.dtype == FDMA_FLOAT32;
    params.is_aligned = is_aligned(params.v);
    params.limbs = params.wide_dt_proj ? weight_limbs : 1;
    params.weights = dt_proj->data;
    params.weight_row = params.dt_row;
    params.weight_limb = (int64_t)params.kv_heads * params.channels;
    // taken in any case, because a query of the size has no data whose alignment could be tested
    void *const arranged = take<uint16_t>(arena, params.limbs * params.weight_limb);
    if (params.wide_dt_proj || !is_aligned(dt_proj->data, params.dt_row)) {
        params.weight_row = params.channels;
        params.weights = arranged;
    }
    if (params.wide_dt_proj && problem->dtype == FDMA_FLOAT16)
        params.scales = take<float>(arena, params.kv_heads);
    return params;
}

template <typename config> static int count_panel_bytes(const score_params &params, int steps) {
    return params.limbs * steps * config::heads * config::row_bytes;
}

/* Divides shared memory between weights and rings. All weights stay there if they fit in a third of
 * it. Otherwise two panels do, of the size that leaves most stages to the rings. A ring runs ahead
 * by one panel at most, so that a panel does not arrive later than the keys that are multiplied
 * with it. Returns false if the rings of params->key_warps warps do not fit. */
template <typename config> static bool plan_shared(score_params *params, int shared) {
    const int most_stages = 8, most_panel_steps = 8;
    const int steps = (int)divide_up(params->channels, config::step_channels);
    const int stages_bytes = params->key_warps * config::stage_bytes;
    params->is_resident = params->head_blocks == 1 && steps < shared / config::row_bytes &&
                          count_panel_bytes<config>(*params, steps) <= shared / 3;
    params->stages = 0;
    if (params->is_resident) {
        const int fit = (shared - count_panel_bytes<config>(*params, steps)) / stages_bytes;
        params->panels = 1;
        params->panel_steps = steps;
        params->stages = min(fit, most_stages);
    }
    for (int most = most_panel_steps; !params->is_resident && most > 0; most /= 2) {
        const int panels = (int)divide_up(steps, most);
        const int panel_steps = (int)divide_up(steps, panels);
        const int fit =
            (shared - 2 * count_panel_bytes<config>(*params, panel_steps)) / stages_bytes;
        const int stages = min(fit, panel_steps + 1);
        if (stages <= params->stages)
            continue;
        params->panels = panels;
        params->panel_steps = panel_steps;
        params->stages = min(stages, most_stages);
    }
    return params->stages >= 2;
}

/* Launches one thread block on each multiprocessor, with the fewest warps that finish in the same
 * number of rounds. */
template <typename config>
static fdma_status launch_score(const fdma_problem *problem, score_params params) {
    const cuda_device *const device = fdma_cuda_device(problem->exec.device);
    params.sequence_tiles = (int32_t)divide_up(params.kv_len, mma_keys);
    params.key_tiles = (int32_t)params.batch * params.sequence_tiles;
    params.head_blocks = (int32_t)divide_up(params.kv_heads, config::heads);
    const int64_t each = divide_up(params.key_tiles, device->multiprocessors);
    params.key_warps = (int32_t)divide_up(each, divide_up(each, config::most_warps));
    while (!plan_shared<config>(&params, device->shared_bytes))
        params.key_warps /= 2;
    const bool is_arranged = params.weights != params.dt_proj;
    params.is_split = is_arranged && params.is_resident && params.scales == NULL;
    const int least_warps = params.is_split ? min(split_warps, config::most_warps) : 1;
    const int warps = params.is_resident ? max(params.key_warps, least_warps) : config::most_warps;
    const int blocks = (int)divide_up(params.key_tiles, params.key_warps);
    const int panel_bytes = count_panel_bytes<config>(params, params.panel_steps);
    const launch_shape score = {dim3((unsigned)min(blocks, device->multiprocessors)),
                                dim3(32 * (unsigned)warps),
                                (size_t)(params.is_resident ? 1 : 2) * panel_bytes +
                                    (size_t)params.key_warps * params.stages * config::stage_bytes,
                                start_early};
    if (is_arranged && !params.is_split)
        FDMA_TRY(launch_arrange<typename config::element>(problem, params));
    return launch("score", score_keys<config>, score, problem, params);
}

/* For up to 8, up to 32, and more kv heads. */
template <typename T> using few_heads = score_config<T, 1, 128, 16>;
template <typename T> using some_heads = score_config<T, 4, 128, 16>;
template <typename T> using many_heads = score_config<T, 8, 64, 12>;

template <typename T>
static fdma_status run_type(const fdma_problem *problem, const score_params &params) {
    if (problem->kv_heads <= few_heads<T>::heads)
        return launch_score<few_heads<T>>(problem, params);
    if (problem->kv_heads <= some_heads<T>::heads)
        return launch_score<some_heads<T>>(problem, params);
    return launch_score<many_heads<T>>(problem, params);
}

fdma_status fdma_cuda_run_products(const fdma_problem *problem, const score_params &params) {
    return problem->dtype == FDMA_BFLOAT16 ? run_type<__nv_bfloat16>(problem, params)
                                           : run_type<__half>(problem, params);
}

score_params fdma_cuda_plan_products(const fdma_problem *problem, fdma_arena *arena) {
    score_params params = fdma_cuda_plan_score(problem, arena);
    params.a = NULL;
    params.key_valid = NULL;
    params.bias = {};
    const int64_t each = params.kv_heads * params.kv_len; // of a sequence
    params.score = {take<float>(arena, params.batch * each), each, params.kv_len};
    return params;
}

static fdma_status run(const fdma_problem *problem) {
    fdma_arena arena = fdma_arena_of(problem);
    return fdma_cuda_run_products(problem, fdma_cuda_plan_score(problem, &arena));
}

static const char *refuses(const fdma_problem *problem) {
    enum { most_tiles = 1 << 30, most_channels = 1 << 24 };
    if (problem->dtype != FDMA_FLOAT16 && problem->dtype != FDMA_BFLOAT16)
        return "float32 or float64 tensors: cast v to bfloat16 or float16";
    if (problem->score.dtype == FDMA_FLOAT64 || problem->bias.dtype == FDMA_FLOAT64)
        return "float64 scores; supported: float32";
    if (problem->batch * (problem->kv_len / mma_keys + 1) > most_tiles ||
        problem->kv_heads * problem->head_dim > most_channels)
        return "more than 2^30 tiles of 16 keys or 2^24 channels per key";
    return fdma_refuses_before_sm80(problem);
}

FDMA_CUDA_TABLE(fdma_cuda_sm80_score, {"cuda/sm80", operation_score, fdma_missing_sm80, refuses,
                                       workspace_of<fdma_cuda_plan_score>, run, true, 0});
