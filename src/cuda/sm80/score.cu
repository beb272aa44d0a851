/* Score and bias of each key on any device from compute capability 8.0: v times dt_proj on the
 * tensor cores, reading v once, then softplus and the coefficient.
 *
 * A warp takes 16 or 32 keys and 8, 16 or 32 kv heads. Channels of v go from memory straight into
 * the registers where mma.sync wants them: it sums over channels in any order, as long as keys and
 * weights agree on it, so that each lane loads 16 bytes, 8 channels, at a time. arrange_weights()
 * lays dt_proj out in that order. A float32 dt_proj becomes a sum of three numbers of v's type. */
#include "cuda/device/element.cuh"
#include "cuda/device/host.cuh"
#include "cuda/device/ptx.cuh"

static constexpr int mma_keys = 16, mma_heads = 8;
static constexpr int lane_channels = 8;  // of one 16-byte load
static constexpr int step_channels = 32; // of the four lanes that share a row: two mma
static constexpr int ahead_steps = 4;    // whose loads are in flight at once
static constexpr int score_warps = 4;
static constexpr int arrange_threads = 256;

/* What the weights of one kv head were multiplied by, and its coefficient. */
struct head_facts {
    float a;
    float unscale;
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
    int32_t kv_heads, head_dim, parts, steps;
    int32_t heads; // kv_heads, up to a whole number of a warp's
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

/* A power of two that brings a head's largest weight up to 2^14, where float16 is densest; bfloat16
 * has float32's exponents. */
template <typename T> __device__ static float find_scale(const score_params &params, int g) {
    __shared__ float most_of_warp[arrange_threads / 32];
    const int channels = params.kv_heads * params.head_dim;
    float most = 0;
    if (params.parts == 1 || is_bfloat16<T>())
        return 1;
    for (int channel = threadIdx.x; channel < channels; channel += arrange_threads)
        most = fmaxf(most, fabsf(load_weight<T>(params, g, channel)));
    for (int lane = 16; lane > 0; lane /= 2)
        most = fmaxf(most, __shfl_xor_sync(~0u, most, lane));
    if (threadIdx.x % 32 == 0)
        most_of_warp[threadIdx.x / 32] = most;
    __syncthreads();
    for (int warp = 0; warp < arrange_threads / 32; warp++)
        most = fmaxf(most, most_of_warp[warp]);
    return most > 0 && most < INFINITY ? exp2f(14.0f - floorf(log2f(most))) : 1;
}

/* Part `part` of x: each takes the upper bits of what those before it left over. */
template <typename T> __device__ static T take_part(float x, int part) {
    for (int before = 0; before < part; before++)
        x -= to_float(from_float_toward_zero<T>(x));
    return from_float_toward_zero<T>(x);
}

/* Block g writes the weights of kv head g; heads past the last, and channels, are zeros. */
template <typename T> __global__ void arrange_weights(const score_params params) {
    const int g = blockIdx.x, channels = params.kv_heads * params.head_dim;
    const bool is_head = g < params.kv_heads;
    const float scale = is_head ? find_scale<T>(params, g) : 1;
    const int row = params.steps * step_channels;
    T *const weights = (T *)params.weights;
    for (int at = threadIdx.x; at < params.parts * row; at += arrange_threads) {
        const int part = at / row, channel = at % row;
        const float x = is_head && channel < channels ? load_weight<T>(params, g, channel) : 0;
        const int step = channel / step_channels, quarter = channel / lane_channels % 4;
        const int64_t group =
            ((int64_t)part * params.steps + step) * (params.heads / mma_heads) + g / mma_heads;
        const int64_t lane = g % mma_heads * 4 + quarter;
        weights[(group * 32 + lane) * lane_channels + channel % lane_channels] =
            take_part<T>(x * scale, part);
    }
    if (threadIdx.x == 0 && is_head) {
        const float a =
            params.wide_a ? ((const float *)params.a)[g] : to_float(((const T *)params.a)[g]);
        params.facts[g] = {a, 1 / scale};
    }
}

/* A key's row of v as one lane reads it: `channel`, `channel` + step_channels, ... */
struct row_reader {
    const void *row; // NULL: a key that is not there, or not valid
    int channel;
};

/* 8 channels of v, beginning at `channel` of the row of all heads; zeros past its end. */
template <typename T>
__device__ static uint4 load_channels(const score_params &params, const row_reader &reader,
                                      int step) {
    const int channel = reader.channel + step * step_channels;
    const int g = channel / params.head_dim;
    if (reader.row == NULL || g >= params.kv_heads)
        return make_uint4(0, 0, 0, 0);
    const T *const from =
        (const T *)reader.row + g * params.v_head + (channel - g * params.head_dim);
    if (params.is_aligned)
        return ld_global_nc_no_allocate(from);
    alignas(16) T elements[lane_channels];
    for (int i = 0; i < lane_channels; i++)
        elements[i] = from[i];
    return *(const uint4 *)elements;
}

template <typename T>
__device__ static row_reader read_row(const score_params &params, int64_t b, int64_t j) {
    const bool valid = j < params.kv_len && (params.key_valid == NULL ||
                                             params.key_valid[b * params.valid_batch + j] != 0);
    const T *const row = (const T *)params.v + b * params.v_batch + j * params.v_row;
    return {valid ? row : NULL, (int)(threadIdx.x % 4) * lane_channels};
}

/* The products of one step, with all parts of the weights. The first mma takes the first half of
 * each lane's channels, the second the second half. */
template <typename T, int head_tiles, int key_tiles>
__device__ static void multiply_step(float (&sums)[key_tiles][head_tiles][4],
                                     const uint4 (&keys)[key_tiles][2], const score_params &params,
                                     int step, int first_tile) {
    const int tiles = params.heads / mma_heads, lane = threadIdx.x % 32;
    for (int part = 0; part < params.parts; part++) {
#pragma unroll
        for (int n = 0; n < head_tiles; n++) {
            const int64_t group = ((int64_t)part * params.steps + step) * tiles + first_tile + n;
            const uint4 weight = __ldg(&params.weights[group * 32 + lane]);
#pragma unroll
            for (int m = 0; m < key_tiles; m++) {
                const uint4 low = keys[m][0], high = keys[m][1]; // rows lane / 4 and that + 8
                mma_m16n8k16(sums[m][n], make_uint4(low.x, high.x, low.y, high.y),
                             make_uint2(weight.x, weight.y), T());
                mma_m16n8k16(sums[m][n], make_uint4(low.z, high.z, low.w, high.w),
                             make_uint2(weight.z, weight.w), T());
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
    float dot = sum * facts.unscale;
    if (isnan(dot) && params.parts > 1)
        dot = dot_plainly<T>(params, b, j, g);
    const float z = valid ? facts.a * softplus(dot) : -INFINITY;
    if (params.score != NULL)
        params.score[b * params.score_batch + g * params.score_head + j] = z;
    if (params.bias != NULL)
        params.bias[b * params.bias_batch + g * params.bias_head + j] =
            params.bias_form == FDMA_BIAS_EXP ? expf(z) : z;
}

/* Sums of ahead_steps steps stand apart before they are added: tensor cores truncate as they add,
 * which shows in long sums. */
template <typename T, int head_tiles, int key_tiles>
__device__ static void multiply_rows(float (&sums)[key_tiles][head_tiles][4],
                                     const score_params &params,
                                     const row_reader (&rows)[key_tiles][2], int first_tile) {
    for (int first = 0; first < params.steps; first += ahead_steps) {
        uint4 keys[ahead_steps][key_tiles][2];
        float part[key_tiles][head_tiles][4] = {};
#pragma unroll
        for (int step = 0; step < ahead_steps; step++)
#pragma unroll
            for (int m = 0; m < key_tiles; m++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    keys[step][m][half] = load_channels<T>(params, rows[m][half], first + step);
#pragma unroll
        for (int step = 0; step < ahead_steps; step++)
            multiply_step<T>(part, keys[step], params, first + step, first_tile);
#pragma unroll
        for (int m = 0; m < key_tiles; m++)
#pragma unroll
            for (int n = 0; n < head_tiles; n++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    sums[m][n][i] += part[m][n][i];
    }
}

template <typename T, int head_tiles, int key_tiles>
__global__ void __launch_bounds__(score_warps * 32, 2) score_keys(const score_params params) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t b = blockIdx.z;
    const int64_t first_key =
        ((int64_t)blockIdx.x * score_warps + warp) * key_tiles * mma_keys + lane / 4;
    const int first_tile = blockIdx.y * head_tiles;
    row_reader rows[key_tiles][2];
    float sums[key_tiles][head_tiles][4] = {};
#pragma unroll
    for (int m = 0; m < key_tiles; m++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            rows[m][half] = read_row<T>(params, b, first_key + m * mma_keys + half * 8);
    multiply_rows<T>(sums, params, rows, first_tile);
#pragma unroll
    for (int m = 0; m < key_tiles; m++)
#pragma unroll
        for (int n = 0; n < head_tiles; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                write_score<T>(params, b, first_key + m * mma_keys + i / 2 * 8,
                               (first_tile + n) * mma_heads + lane % 4 * 2 + i % 2, sums[m][n][i]);
}

/* mma tiles of kv heads that a warp takes. */
static int head_tiles_of(const fdma_problem *problem) {
    return problem->kv_heads <= 8 ? 1 : problem->kv_heads <= 16 ? 2 : 4;
}

static score_params plan_score(const fdma_problem *problem, fdma_arena *arena) {
    const fdma_tensor *const v = &problem->v;
    const int warp_heads = head_tiles_of(problem) * mma_heads;
    const int step_block = step_channels * ahead_steps;
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
    params.steps = (int32_t)((channels + step_block - 1) / step_block * ahead_steps);
    params.heads = (int32_t)((problem->kv_heads + warp_heads - 1) / warp_heads * warp_heads);
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

template <typename T, int head_tiles, int key_tiles>
static fdma_status launch_score(const fdma_problem *problem, const score_params &params) {
    const int64_t block_keys = score_warps * key_tiles * mma_keys;
    launch_shape arrange, score;
    arrange.grid = dim3((unsigned)params.heads);
    arrange.block = dim3(arrange_threads);
    score.grid =
        dim3((unsigned)((problem->kv_len + block_keys - 1) / block_keys),
             (unsigned)(params.heads / (head_tiles * mma_heads)), (unsigned)problem->batch);
    score.block = dim3(score_warps * 32);
    FDMA_TRY(launch("score", arrange_weights<T>, arrange, problem, params));
    return launch("score", score_keys<T, head_tiles, key_tiles>, score, problem, params);
}

template <typename T>
static fdma_status run_type(const fdma_problem *problem, const score_params &params) {
    switch (head_tiles_of(problem)) {
    case 1:
        return launch_score<T, 1, 1>(problem, params);
    case 2:
        return launch_score<T, 2, 2>(problem, params);
    default:
        return launch_score<T, 4, 2>(problem, params);
    }
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
