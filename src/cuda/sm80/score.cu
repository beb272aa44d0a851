/* Score and bias of each key on any device from compute capability 8.0: v times dt_proj on the
 * tensor cores, reading v once, then softplus and the coefficient.
 *
 * A block takes some keys and 8, 16 or 32 kv heads; its warps share out the channels, and add up
 * their sums in order. Channels of v go from memory straight into the registers where mma.sync
 * wants them: it sums over channels in any order, as long as keys and weights agree on it, so that
 * each lane loads 16 bytes, 8 channels, at a time. arrange_weights() lays out dt_proj likewise.
 * A float32 dt_proj becomes a sum of three numbers of v's type. */
#include "cuda/device/element.cuh"
#include "cuda/device/host.cuh"
#include "cuda/device/ptx.cuh"

static constexpr int mma_keys = 16, mma_heads = 8;
static constexpr int lane_channels = 8;  // of one 16-byte load
static constexpr int step_channels = 32; // of the four lanes that share a row: two mma
static constexpr int score_threads = 256;
static constexpr int arrange_threads = 256;

/* How a block is cut. */
template <typename element_, int head_tiles_, int key_tiles_, int channel_warps_, int ahead_>
struct score_config {
    using element = element_;
    static constexpr int head_tiles = head_tiles_; // mma tiles of each warp
    static constexpr int key_tiles = key_tiles_;
    static constexpr int channel_warps = channel_warps_; // that share out the channels
    static constexpr int ahead = ahead_;                 // steps whose loads are in flight
    static constexpr int heads = head_tiles * mma_heads; // of a block
    static constexpr int warp_keys = key_tiles * mma_keys;
    static constexpr int keys = score_threads / 32 / channel_warps * warp_keys; // of a block
    static constexpr int pitch = keys + 4; // 4 lanes with neighbouring heads: other banks
    struct shared {
        float sums[channel_warps][heads][pitch];
    };
};

/* What the weights of one kv head were multiplied by, and its coefficient. */
struct head_facts {
    float scale;
    float a;
};

struct score_params {
    const void *v, *dt_proj, *a;
    int64_t v_batch, v_row, v_head, dt_row; // strides in elements
    const uint8_t *key_valid;
    int64_t valid_batch;
    float *score, *bias;
    int64_t score_batch, score_head, bias_batch, bias_head;
    uint4 *weights; // [parts][steps][heads / mma_heads][32 lanes]
    head_facts *facts;
    int64_t kv_len;
    int32_t kv_heads, head_dim, parts;
    int32_t steps; // of step_channels, up to a whole number for every warp
    int32_t heads; // kv_heads, up to a whole number of a block's
    fdma_bias_form bias_form;
    bool wide_dt_proj, wide_a; // float32, beside v's type
    bool is_aligned;           // v may be loaded 16 bytes at a time
};

template <typename T>
__device__ static float load_weight(const score_params &params, int g, int channel) {
    const int64_t at = g * params.dt_row + channel;
    return params.wide_dt_proj ? ((const float *)params.dt_proj)[at]
                               : to_float(((const T *)params.dt_proj)[at]);
}

/* Block g finds the power of two that brings kv head g's largest weight up to 2^14, where float16
 * is densest, and which bfloat16, with float32's exponents, can do without. */
template <typename T>
__global__ void __launch_bounds__(arrange_threads) find_scales(const score_params params) {
    __shared__ float most_of_warp[arrange_threads / 32];
    const int g = blockIdx.x, channels = params.kv_heads * params.head_dim;
    float most = 0;
    if (!is_bfloat16<T>() && params.parts > 1)
        for (int channel = threadIdx.x; channel < channels; channel += arrange_threads)
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
    const bool is_scaled = most > 0 && most < INFINITY;
    params.facts[g].scale = is_scaled ? exp2f(14 - floorf(log2f(most))) : 1;
}

/* Part `part` of x: each takes the upper bits of what those before it left over. */
template <typename T> __device__ static T take_part(float x, int part) {
    for (int before = 0; before < part; before++)
        x -= to_float(from_float_toward_zero<T>(x));
    return from_float_toward_zero<T>(x);
}

/* A thread writes what one lane loads of one step: 8 channels of a kv head, in all parts. Heads and
 * channels past the last are zeros. */
template <typename T>
__global__ void __launch_bounds__(arrange_threads) arrange_weights(const score_params params) {
    const int index = blockIdx.x * arrange_threads + threadIdx.x, tiles = params.heads / mma_heads;
    const int lane = index % 32, tile = index / 32 % tiles, step = index / 32 / tiles;
    const int g = tile * mma_heads + lane / 4, channels = params.kv_heads * params.head_dim;
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    if (step >= params.steps)
        return;
    const float scale = g < params.kv_heads && params.parts > 1 ? params.facts[g].scale : 1;
    for (int part = 0; part < params.parts; part++) {
        alignas(16) T elements[lane_channels];
        for (int i = 0; i < lane_channels; i++) {
            const int channel = step * step_channels + lane % 4 * lane_channels + i;
            const bool is_weight = g < params.kv_heads && channel < channels;
            const float x = is_weight ? load_weight<T>(params, g, channel) * scale : 0;
            elements[i] = take_part<T>(x, part);
        }
        params.weights[(int64_t)part * params.steps * tiles * 32 + index] =
            *(const uint4 *)elements;
    }
    if (step == 0 && lane % 4 == 0 && g < params.kv_heads) {
        const float a =
            params.wide_a ? ((const float *)params.a)[g] : to_float(((const T *)params.a)[g]);
        params.facts[g] = {scale, a};
    }
}

/* Where the row of key j begins; NULL: it is not there, or not valid. */
template <typename T>
__device__ static const T *find_row(const score_params &params, int64_t b, int64_t j) {
    const bool valid = j < params.kv_len && (params.key_valid == NULL ||
                                             params.key_valid[b * params.valid_batch + j] != 0);
    return valid ? (const T *)params.v + b * params.v_batch + j * params.v_row : NULL;
}

template <typename T> __device__ static uint4 load_channels(const T *from, bool is_aligned) {
    if (is_aligned)
        return ld_global_nc_no_allocate(from);
    alignas(16) T elements[lane_channels];
    for (int i = 0; i < lane_channels; i++)
        elements[i] = from[i];
    return *(const uint4 *)elements;
}

/* One step of a warp's rows, lane / 4 and that + 8 of each mma tile: the channels of this lane,
 * zeros past the last. */
template <typename config>
__device__ static void
load_step(uint4 (&keys)[config::key_tiles][2], const score_params &params,
          const typename config::element *const (&rows)[config::key_tiles][2], int step) {
    const int channel = step * step_channels + threadIdx.x % 4 * lane_channels;
    const int g = channel / params.head_dim;
    const int64_t offset = g * params.v_head + (channel - g * params.head_dim);
#pragma unroll
    for (int m = 0; m < config::key_tiles; m++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            keys[m][half] = rows[m][half] != NULL && g < params.kv_heads
                                ? load_channels(rows[m][half] + offset, params.is_aligned)
                                : make_uint4(0, 0, 0, 0);
}

/* The products of one step, with all parts of the weights. The first mma takes the first half of
 * each lane's channels, the second the second half. */
template <typename config>
__device__ static void multiply_step(float (&sums)[config::key_tiles][config::head_tiles][4],
                                     const uint4 (&keys)[config::key_tiles][2],
                                     const score_params &params, int step) {
    const int tiles = params.heads / mma_heads, lane = threadIdx.x % 32;
    for (int part = 0; part < params.parts; part++) {
#pragma unroll
        for (int n = 0; n < config::head_tiles; n++) {
            const int tile = blockIdx.y * config::head_tiles + n;
            const int64_t group = ((int64_t)part * params.steps + step) * tiles + tile;
            const uint4 weight = params.weights[group * 32 + lane];
#pragma unroll
            for (int m = 0; m < config::key_tiles; m++) {
                const uint4 low = keys[m][0], high = keys[m][1];
                mma_m16n8k16(sums[m][n], make_uint4(low.x, high.x, low.y, high.y),
                             make_uint2(weight.x, weight.y), typename config::element());
                mma_m16n8k16(sums[m][n], make_uint4(low.z, high.z, low.w, high.w),
                             make_uint2(weight.z, weight.w), typename config::element());
            }
        }
    }
}

/* The dot product again, in order: splitting a weight turns inf * weight into NaN. */
template <typename T>
__device__ static float dot_plainly(const score_params &params, int64_t b, int64_t j, int g) {
    const T *const row = (const T *)params.v + b * params.v_batch + j * params.v_row;
    float sum = 0;
    for (int other = 0; other < params.kv_heads; other++)
        for (int d = 0; d < params.head_dim; d++)
            sum += to_float(row[other * params.v_head + d]) *
                   load_weight<T>(params, g, other * params.head_dim + d);
    return sum;
}

__device__ static float softplus(float x) {
    return isnan(x) ? x : fmaxf(x, 0) + log1pf(expf(-fabsf(x)));
}

template <typename T>
__device__ static void write_score(const score_params &params, int64_t b, int64_t j, int g,
                                   float sum) {
    if (j >= params.kv_len || g >= params.kv_heads)
        return;
    const head_facts facts = params.facts[g];
    const bool valid =
        params.key_valid == NULL || params.key_valid[b * params.valid_batch + j] != 0;
    float dot = sum / facts.scale;
    if (isnan(dot) && params.parts > 1)
        dot = dot_plainly<T>(params, b, j, g);
    const float z = valid ? facts.a * softplus(dot) : -INFINITY;
    if (params.score != NULL)
        params.score[b * params.score_batch + g * params.score_head + j] = z;
    if (params.bias != NULL)
        params.bias[b * params.bias_batch + g * params.bias_head + j] =
            params.bias_form == FDMA_BIAS_EXP ? expf(z) : z;
}

/* The sums of a warp over its share of the channels; loads are `ahead` steps before products. */
template <typename config>
__device__ static void
multiply_rows(float (&sums)[config::key_tiles][config::head_tiles][4], const score_params &params,
              const typename config::element *const (&rows)[config::key_tiles][2]) {
    const int span = params.steps / config::channel_warps;
    const int first = threadIdx.x / 32 % config::channel_warps * span, end = first + span;
    uint4 keys[config::ahead][config::key_tiles][2];
#pragma unroll
    for (int slot = 0; slot < config::ahead; slot++)
        if (first + slot < end)
            load_step<config>(keys[slot], params, rows, first + slot);
    griddepcontrol_wait(); // for the weights
    for (int step = first; step < end; step += config::ahead)
#pragma unroll
        for (int slot = 0; slot < config::ahead; slot++)
            if (step + slot < end) {
                multiply_step<config>(sums, keys[slot], params, step + slot);
                if (step + slot + config::ahead < end)
                    load_step<config>(keys[slot], params, rows, step + slot + config::ahead);
            }
}

/* Lays out a warp's sums for the block to add up. */
template <typename config>
__device__ static void share_sums(typename config::shared *shared,
                                  const float (&sums)[config::key_tiles][config::head_tiles][4],
                                  int first_key) {
    const int lane = threadIdx.x % 32, share = threadIdx.x / 32 % config::channel_warps;
#pragma unroll
    for (int m = 0; m < config::key_tiles; m++)
#pragma unroll
        for (int n = 0; n < config::head_tiles; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                shared->sums[share][n * mma_heads + lane % 4 * 2 + i % 2]
                            [first_key + m * mma_keys + lane / 4 + i / 2 * 8] = sums[m][n][i];
}

template <typename config>
__global__ void __launch_bounds__(score_threads, 1) score_keys(const score_params params) {
    using element = typename config::element;
    extern __shared__ float memory[];
    typename config::shared *const shared = (typename config::shared *)memory;
    const int lane = threadIdx.x % 32;
    const int64_t b = blockIdx.z, block_key = (int64_t)blockIdx.x * config::keys;
    const int warp_key = threadIdx.x / 32 / config::channel_warps * config::warp_keys;
    const element *rows[config::key_tiles][2];
    float sums[config::key_tiles][config::head_tiles][4] = {};
#pragma unroll
    for (int m = 0; m < config::key_tiles; m++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            rows[m][half] = find_row<element>(
                params, b, block_key + warp_key + m * mma_keys + lane / 4 + half * 8);
    multiply_rows<config>(sums, params, rows);
    share_sums<config>(shared, sums, warp_key);
    __syncthreads();
    for (int index = threadIdx.x; index < config::heads * config::keys; index += score_threads) {
        const int key = index % config::keys, head = index / config::keys;
        float sum = 0;
#pragma unroll
        for (int share = 0; share < config::channel_warps; share++)
            sum += shared->sums[share][head][key];
        write_score<element>(params, b, block_key + key, blockIdx.y * config::heads + head, sum);
    }
}

/* The blocks for up to 8, up to 16, and more kv heads. */
template <typename T> using few_heads = score_config<T, 1, 2, 8, 4>;
template <typename T> using some_heads = score_config<T, 2, 2, 8, 4>;
template <typename T> using many_heads = score_config<T, 4, 4, 4, 2>;

static score_params plan_score(const fdma_problem *problem, fdma_arena *arena) {
    const fdma_tensor *const v = &problem->v;
    const int64_t block_heads = problem->kv_heads <= 8 ? 8 : problem->kv_heads <= 16 ? 16 : 32;
    const int64_t share = step_channels * (score_threads / 32); // whole steps for every warp
    const int64_t channels = problem->kv_heads * problem->head_dim;
    const int64_t strides = v->stride[0] | v->stride[1] | v->stride[2];
    score_params params = {};
    params.v = v->data;
    params.dt_proj = problem->dt_proj.data;
    params.a = problem->a.data;
    params.v_batch = v->stride[0];
    params.v_row = v->stride[1];
    params.v_head = v->stride[2];
    params.dt_row = problem->dt_proj.stride[0];
    params.key_valid = (const uint8_t *)problem->key_valid.data;
    params.valid_batch = problem->key_valid.stride[0];
    params.score = (float *)problem->score.data;
    params.bias = (float *)problem->bias.data;
    params.score_batch = problem->score.stride[0];
    params.score_head = problem->score.stride[1];
    params.bias_batch = problem->bias.stride[0];
    params.bias_head = problem->bias.stride[1];
    params.kv_len = problem->kv_len;
    params.kv_heads = (int32_t)problem->kv_heads;
    params.head_dim = (int32_t)problem->head_dim;
    params.parts = problem->dt_proj.dtype == FDMA_FLOAT32 ? 3 : 1;
    params.steps = (int32_t)((channels + share - 1) / share * share / step_channels);
    params.heads = (int32_t)((problem->kv_heads + block_heads - 1) / block_heads * block_heads);
    params.bias_form = problem->bias_form;
    params.wide_dt_proj = problem->dt_proj.dtype == FDMA_FLOAT32;
    params.wide_a = problem->a.dtype == FDMA_FLOAT32;
    params.is_aligned = (uintptr_t)v->data % 16 == 0 && strides % lane_channels == 0;
    const size_t weights = (size_t)params.parts * params.steps * step_channels * params.heads;
    params.weights = (uint4 *)fdma_arena_take(arena, weights * sizeof(uint16_t));
    params.facts =
        (head_facts *)fdma_arena_take(arena, (size_t)params.heads * sizeof *params.facts);
    return params;
}

static size_t workspace(const fdma_problem *problem) {
    fdma_arena arena = {};
    plan_score(problem, &arena);
    return fdma_arena_size(&arena);
}

template <typename T>
static fdma_status launch_arrange(const fdma_problem *problem, const score_params &params) {
    const unsigned threads = (unsigned)(params.steps * (params.heads / mma_heads) * 32);
    launch_shape scales, arrange;
    scales.grid = dim3((unsigned)params.kv_heads);
    scales.block = arrange.block = dim3(arrange_threads);
    arrange.grid = dim3((threads + arrange_threads - 1) / arrange_threads);
    arrange.after_dependency = params.parts > 1;
    if (params.parts > 1)
        FDMA_TRY(launch("score", find_scales<T>, scales, problem, params));
    return launch("score", arrange_weights<T>, arrange, problem, params);
}

template <typename config>
static fdma_status launch_score(const fdma_problem *problem, const score_params &params) {
    launch_shape score;
    score.grid = dim3((unsigned)((problem->kv_len + config::keys - 1) / config::keys),
                      (unsigned)(params.heads / config::heads), (unsigned)problem->batch);
    score.block = dim3(score_threads);
    score.shared_bytes = sizeof(typename config::shared);
    score.after_dependency = true;
    FDMA_TRY(launch_arrange<typename config::element>(problem, params));
    return launch("score", score_keys<config>, score, problem, params);
}

template <typename T>
static fdma_status run_type(const fdma_problem *problem, const score_params &params) {
    if (problem->kv_heads <= few_heads<T>::heads)
        return launch_score<few_heads<T>>(problem, params);
    if (problem->kv_heads <= some_heads<T>::heads)
        return launch_score<some_heads<T>>(problem, params);
    return launch_score<many_heads<T>>(problem, params);
}

static fdma_status run(const fdma_problem *problem) {
    fdma_arena arena = fdma_arena_of(problem);
    const score_params params = plan_score(problem, &arena);
    return problem->dtype == FDMA_BFLOAT16 ? run_type<__nv_bfloat16>(problem, params)
                                           : run_type<__half>(problem, params);
}

static const char *refuses(const fdma_problem *problem) {
    enum { most_batches = 65535, most_channels = 1 << 24 };
    if (problem->dtype != FDMA_FLOAT16 && problem->dtype != FDMA_BFLOAT16)
        return "float32 tensors on CUDA: cast v to bfloat16 or float16";
    if (problem->score.dtype == FDMA_FLOAT64 || problem->bias.dtype == FDMA_FLOAT64)
        return "float64 tensors, supported: float32 scores";
    if (problem->batch > most_batches || problem->kv_heads * problem->head_dim > most_channels)
        return "more than 65535 sequences or 2^24 channels a key";
    return fdma_refuses_before_sm80(problem);
}

static const kernel_row rows[] = {
    {"cuda/sm80", operation_score, fdma_missing_sm80, refuses, workspace, run, true},
};

extern "C" const kernel_table fdma_cuda_sm80_score = {rows, sizeof rows / sizeof rows[0]};
