/* fdma_rotary_table(), fdma_rotate() and its gradient, on any device from compute capability 8.0.
 * Memory bandwidth limits the rotation: a row is read once and written once, and the angles of a
 * position are read once for several heads.
 *
 * Source: docs/algorithm.md, rotary embedding. */
#include "cuda/device/grid.cuh"
#include "cuda/device/host.cuh"

extern "C" {
#include "core/rotary.h"
}

/* ---- the table ---- */

struct table_params {
    rotary_frequencies frequencies; // without inv_freq
    const void *inv_freq;           // the caller's, on the device; NULL: absent
    const int32_t *positions;       // likewise
    float *rotary;
    int64_t stride, rows, first;
    double factor;
    int32_t pairs;
    bool wide; // inv_freq is float64
};

static __global__ void __launch_bounds__(row_threads)
    fill_table(const __grid_constant__ table_params params) {
    const double half_turn = 3.14159265358979323846;
    const int64_t step = (int64_t)gridDim.x * row_threads;
    for (int64_t n = (int64_t)blockIdx.x * row_threads + threadIdx.x;
         n < params.rows * params.pairs; n += step) {
        const int32_t d = (int32_t)(n % params.pairs);
        const int64_t row = n / params.pairs;
        const double position =
            params.positions != NULL ? params.positions[row] : (double)(params.first + row);
        double high = params.frequencies.high[d], low = params.frequencies.low[d], sine, cosine;
        if (params.inv_freq != NULL) {
            low = 0;
            high = params.wide ? ((const double *)params.inv_freq)[d]
                               : (double)((const float *)params.inv_freq)[d];
        }
        sincospi(rotary_angle(position, high, low) / half_turn, &sine, &cosine);
        float *const to = params.rotary + row * params.stride + d;
        to[0] = (float)(params.factor * cosine);
        to[params.pairs] = (float)(params.factor * sine);
    }
}

static const char *refuses_table(const fdma_problem *problem) {
    if (problem->rotary.dtype == FDMA_FLOAT64)
        return "a float64 rotary; supported: float32";
    return fdma_refuses_before_sm80(problem);
}

static fdma_status run_table(const fdma_problem *problem) {
    const int64_t most_blocks = 4096;
    table_params params = {};
    params.inv_freq = problem->inv_freq.data;
    params.positions = (const int32_t *)problem->positions.data;
    params.wide = problem->inv_freq.dtype == FDMA_FLOAT64;
    params.rotary = (float *)problem->rotary.data;
    params.stride = problem->rotary.stride[0];
    params.rows = problem->rotary.shape[0];
    params.first = problem->rotation.first;
    params.factor = problem->rotation.factor;
    params.pairs = (int32_t)(rotary_dim(problem) / 2);
    if (!is_present(&problem->inv_freq))
        fdma_find_frequencies(problem, &params.frequencies);
    const int64_t blocks = divide_up(params.rows * params.pairs, row_threads);
    const launch_shape shape = {dim3((unsigned)(blocks < most_blocks ? blocks : most_blocks)),
                                dim3(row_threads)};
    return launch("rotary_table", fill_table, shape, problem, params);
}

/* ---- rows ---- */

static constexpr int rotate_threads = 128; // of a thread block: few, so that many blocks fit

struct rotate_params {
    head_view from, to; // x and out; in the gradient dout and dx
    head_view x;        // in the gradient, with weight
    const float *rotary;
    const int32_t *positions, *starts; // NULL: absent
    const void *weight;                // NULL: no norm
    float *sums;                       // [blocks, head_dim]: of dweight; NULL: not wanted
    int64_t rotary_stride, rotary_rows, positions_stride;
    int64_t first, offset;
    int64_t tokens; // of all sequences: each has a row of every head
    int32_t len, heads, rotated_heads, heads_of_block, head_dim, dim, start_count;
    float eps, sign; // -1: rotates by the negative angle
    bool interleaved;
    bool wide_weight; // float32
    bool aligned;     // rows can be copied 16 bytes at a time
};

/* The position of the first row of row i's packed sequence; i itself after the last one. */
__device__ static int64_t start_of(const rotate_params &params, int32_t i) {
    int32_t low = 0, high = params.start_count; // starts[low] <= i < starts[high]
    if (params.starts == NULL)
        return 0;
    while (high - low > 1) {
        const int32_t middle = low + (high - low) / 2;
        if (params.starts[middle] <= i)
            low = middle;
        else
            high = middle;
    }
    return high < params.start_count ? params.starts[low] : i;
}

/* The row of the table for row i of sequence b; NULL if the table has no such position. */
__device__ static const float *angles_of(const rotate_params &params, int64_t b, int32_t i) {
    const int64_t position = params.positions != NULL
                                 ? params.positions[b * params.positions_stride + i]
                                 : params.offset + i - start_of(params, i);
    const int64_t row = position - params.first;
    return row >= 0 && row < params.rotary_rows ? params.rotary + row * params.rotary_stride : NULL;
}

/* The factors of a thread's eight channels: out = y c + partner s, where the partner is the other
 * channel of a pair, which another thread of the warp may hold. */
struct lane_factors {
    float c[vec_channels], s[vec_channels];
};

/* The other channel of a pair; a channel that is not rotated itself. */
__device__ static int32_t partner_of(const rotate_params &params, int32_t channel) {
    const int32_t pairs = params.dim / 2;
    if (channel >= params.dim)
        return channel;
    if (params.interleaved)
        return channel ^ 1;
    return channel < pairs ? channel + pairs : channel - pairs;
}

__device__ static lane_factors find_factors(const rotate_params &params, const float *angles,
                                            int32_t first_channel) {
    const int32_t pairs = params.dim / 2;
    lane_factors factors;
#pragma unroll
    for (int x = 0; x < vec_channels; x++) {
        const int32_t channel = first_channel + x, partner = partner_of(params, channel);
        const int32_t low = min(channel, partner);
        const int32_t pair = params.interleaved ? low / 2 : low;
        if (channel >= params.dim) { // a product and a sum change no bit
            factors.c[x] = 1;
            factors.s[x] = 0;
        } else if (angles == NULL) {
            factors.c[x] = factors.s[x] = NAN;
        } else {
            factors.c[x] = angles[pair];
            factors.s[x] = angles[pairs + pair] * (channel < partner ? -params.sign : params.sign);
        }
    }
    return factors;
}

/* The vectors of a warp: channel x of each lane. */
using warp_vectors = float[vec_channels][32];

/* The places of the partners of a thread's channels in the vectors of its warp, a byte each. */
struct partner_places {
    uint32_t bytes[vec_channels / 4];
};

template <int lanes>
__device__ static partner_places find_places(const rotate_params &params, int32_t first_channel) {
    partner_places places = {};
#pragma unroll
    for (int x = 0; x < vec_channels; x++) {
        const uint32_t channel = partner_of(params, first_channel + x);
        const uint32_t lane = threadIdx.x % 32 / lanes * lanes + channel / vec_channels;
        places.bytes[x / 4] |= (channel % vec_channels * 32 + lane) << x % 4 * 8;
    }
    return places;
}

/* Rotates the channels of all rows of a warp. */
__device__ static void rotate_vec(float (&y)[vec_channels], const lane_factors &factors,
                                  warp_vectors &exchange, const partner_places &places, int32_t dim,
                                  int32_t first_channel) {
    __syncwarp(); // all lanes have read what they wanted of the last row
#pragma unroll
    for (int x = 0; x < vec_channels; x++)
        exchange[x][threadIdx.x % 32] = y[x];
    __syncwarp();
#pragma unroll
    for (int x = 0; x < vec_channels; x++) {
        const uint32_t place = places.bytes[x / 4] >> x % 4 * 8 & 255;
        if (first_channel + x < dim)
            y[x] = fmaf((&exchange[0][0])[place], factors.s[x], y[x] * factors.c[x]);
    }
}

template <int lanes> __device__ static float sum_of_lanes(float x) {
#pragma unroll
    for (int step = lanes / 2; step > 0; step /= 2)
        x += __shfl_xor_sync(~0u, x, step);
    return x;
}

template <int lanes>
__device__ static float sum_of_products(const float (&x)[vec_channels],
                                        const float (&y)[vec_channels]) {
    float sum = 0;
#pragma unroll
    for (int n = 0; n < vec_channels; n++)
        sum = fmaf(x[n], y[n], sum);
    return sum_of_lanes<lanes>(sum);
}

template <int lanes>
__device__ static float norm_of(const rotate_params &params, const float (&x)[vec_channels]) {
    return 1 / sqrtf(sum_of_products<lanes>(x, x) / (float)params.head_dim + params.eps);
}

/* Makes dx of u, the gradient before the rotation, and adds to the sums of dweight. */
template <int lanes>
__device__ static void
differentiate_norm(float (&u)[vec_channels], float (&sums)[vec_channels], float (&x)[vec_channels],
                   const float (&weight)[vec_channels], const rotate_params &params, bool there) {
    const float norm = norm_of<lanes>(params, x);
#pragma unroll
    for (int n = 0; n < vec_channels; n++) {
        x[n] *= norm;
        if (there)
            sums[n] = fmaf(x[n], u[n], sums[n]);
        u[n] *= weight[n];
    }
    const float along = sum_of_products<lanes>(x, u) / -(float)params.head_dim;
#pragma unroll
    for (int n = 0; n < vec_channels; n++)
        u[n] = norm * fmaf(along, x[n], u[n]);
}

template <typename element>
__device__ static void load_weight(float (&weight)[vec_channels], const rotate_params &params,
                                   int32_t first_channel) {
#pragma unroll
    for (int x = 0; x < vec_channels; x++) {
        const int32_t channel = first_channel + x;
        weight[x] = 1;
        if (params.weight != NULL && channel < params.head_dim)
            weight[x] = params.wide_weight ? ((const float *)params.weight)[channel]
                                           : to_float(((const element *)params.weight)[channel]);
    }
}

/* Loads eight channels of a row, or zeros for a lane that has none. offset: of head 0. */
template <typename element>
__device__ static void load_row_vec(float (&to)[vec_channels], const head_view &view,
                                    int64_t offset, int32_t h, bool there, bool aligned) {
#pragma unroll
    for (int x = 0; x < vec_channels; x++)
        to[x] = 0;
    if (there)
        load_vec(to, (const element *)view.data + (offset + h * view.head), aligned);
}

/* The offset of a channel of head 0 in row i of sequence b. */
__device__ static int64_t offset_of_row(const head_view &view, int64_t b, int32_t i,
                                        int32_t channel) {
    return b * view.batch + i * view.row + channel;
}

/* Adds the sums of the groups of a thread block in their order. */
template <int lanes>
__device__ static void write_sums(const float (&sums)[vec_channels], warp_vectors *exchange,
                                  const rotate_params &params) {
    const int64_t block = blockIdx.x + (int64_t)gridDim.x * blockIdx.y;
    __syncthreads(); // all warps have rotated their last rows
#pragma unroll
    for (int x = 0; x < vec_channels; x++)
        exchange[threadIdx.x / 32][x][threadIdx.x % 32] = sums[x];
    __syncthreads();
    for (int channel = threadIdx.x; channel < params.head_dim; channel += rotate_threads) {
        float sum = 0;
        for (int thread = channel / vec_channels; thread < rotate_threads; thread += lanes)
            sum += exchange[thread / 32][channel % vec_channels][thread % 32];
        params.sums[block * params.head_dim + channel] = sum;
    }
}

/* Rotates all rows. `lanes` lanes hold a row, eight channels each; they take the heads of a
 * position one after the other. The heads are divided among the second axis of the grid. */
template <typename element, int lanes, bool backward>
static __global__ void __launch_bounds__(rotate_threads, backward ? 4 : 5)
    rotate_rows(const __grid_constant__ rotate_params params) {
    __shared__ warp_vectors exchange[rotate_threads / 32];
    const int32_t first_channel = threadIdx.x % lanes * vec_channels;
    const int32_t first_head = blockIdx.y * params.heads_of_block;
    const int32_t end_head = min(first_head + params.heads_of_block, params.heads);
    const int64_t step = (int64_t)gridDim.x * (rotate_threads / lanes);
    float weight[vec_channels], sums[vec_channels] = {};
    const partner_places places = find_places<lanes>(params, first_channel);
    load_weight<element>(weight, params, first_channel);
    for (int64_t first = (int64_t)blockIdx.x * (rotate_threads / lanes); first < params.tokens;
         first += step) {
        const int64_t token = first + threadIdx.x / lanes;
        const bool there = token < params.tokens && first_channel < params.head_dim;
        const int64_t b = token / params.len;
        const int32_t i = (int32_t)(token % params.len);
        const lane_factors factors =
            find_factors(params, there ? angles_of(params, b, i) : NULL, first_channel);
        const int64_t from = offset_of_row(params.from, b, i, first_channel);
        const int64_t to = offset_of_row(params.to, b, i, first_channel);
        const int64_t of_x = offset_of_row(params.x, b, i, first_channel);
        for (int32_t h = first_head; h < end_head; h++) {
            float y[vec_channels];
            load_row_vec<element>(y, params.from, from, h, there, params.aligned);
            if (!backward && params.weight != NULL) {
                const float norm = norm_of<lanes>(params, y);
#pragma unroll
                for (int x = 0; x < vec_channels; x++)
                    y[x] *= norm * weight[x];
            }
            if (h < params.rotated_heads)
                rotate_vec(y, factors, exchange[threadIdx.x / 32], places, params.dim,
                           first_channel);
            if (backward && params.weight != NULL) {
                float own[vec_channels];
                load_row_vec<element>(own, params.x, of_x, h, there, params.aligned);
                differentiate_norm<lanes>(y, sums, own, weight, params, there);
            }
            if (there)
                store_vec((element *)params.to.data + (to + h * params.to.head), y, params.aligned);
        }
    }
    if (backward && params.sums != NULL)
        write_sums<lanes>(sums, exchange, params);
}

/* The threads that add the blocks' sums: each takes every sum_slices-th block of a channel. */
static constexpr int sum_channels = 8, sum_slices = row_threads / sum_channels;

static __global__ void __launch_bounds__(row_threads)
    add_sums(const float *sums, float *dweight, const int32_t blocks, const int32_t head_dim) {
    __shared__ float slices[sum_slices][sum_channels];
    const int32_t slice = threadIdx.x / sum_channels, place = threadIdx.x % sum_channels;
    const int32_t channel = blockIdx.x * sum_channels + place;
    float sum = 0;
    for (int32_t n = slice; n < blocks; n += sum_slices)
        sum += sums[(int64_t)n * head_dim + channel];
    slices[slice][place] = sum;
    __syncthreads();
    if (slice != 0)
        return;
    for (int other = 1; other < sum_slices; other++)
        sum += slices[other][place];
    dweight[channel] = sum;
}

/* ---- launches ---- */

/* Lanes of a row. */
static int lanes_of(const fdma_problem *problem) {
    return problem->head_dim <= 64 ? 8 : problem->head_dim <= 128 ? 16 : 32;
}

struct rotate_grid {
    int64_t token_blocks, head_blocks, heads_of_block;
};

/* The order of dweight's sums follows from the grid, which therefore depends on sizes alone. */
static rotate_grid grid_of_rows(const fdma_problem *problem) {
    const int64_t wanted = 1024;                                           // blocks fill any device
    const int64_t most = is_present(&problem->dweight) ? 2048 : INT32_MAX; // whose sums are added
    const int64_t heads = problem->q_heads, groups = rotate_threads / lanes_of(problem);
    const int64_t blocks = divide_up(problem->batch * problem->q_len, groups);
    rotate_grid grid = {};
    if (blocks == 0 || heads == 0)
        return grid;
    const int64_t parts = blocks >= wanted ? 1 : wanted / blocks;
    grid.heads_of_block = divide_up(heads, parts < heads ? parts : heads);
    grid.head_blocks = divide_up(heads, grid.heads_of_block);
    grid.token_blocks = blocks <= most / grid.head_blocks ? blocks : most / grid.head_blocks;
    return grid;
}

static float *lay_out(const fdma_problem *problem, fdma_arena *arena) {
    const rotate_grid grid = grid_of_rows(problem);
    const int64_t blocks = is_present(&problem->dweight) ? grid.token_blocks * grid.head_blocks : 0;
    return take<float>(arena, blocks * problem->head_dim);
}

static rotate_params describe(const fdma_problem *problem, float *sums) {
    const bool backward = problem->operation == operation_rotate_backward;
    rotate_params params = {};
    params.from = view_of(backward ? &problem->dout : &problem->x);
    params.to = view_of(backward ? &problem->dx : &problem->out);
    params.x = view_of(&problem->x);
    params.rotary = (const float *)problem->rotary.data;
    params.positions = (const int32_t *)problem->positions.data;
    params.starts = (const int32_t *)problem->starts.data;
    params.weight = problem->weight.data;
    params.sums = is_present(&problem->dweight) ? sums : NULL;
    params.rotary_stride = problem->rotary.stride[0];
    params.rotary_rows = problem->rotary.shape[0];
    params.positions_stride = problem->positions.stride[0];
    params.first = problem->rotation.first;
    params.offset = problem->rotation.offset;
    params.tokens = problem->batch * problem->q_len;
    params.len = (int32_t)problem->q_len;
    params.heads = (int32_t)problem->q_heads;
    params.rotated_heads = (int32_t)(problem->q_heads - problem->rotation.nope_heads);
    params.heads_of_block = (int32_t)grid_of_rows(problem).heads_of_block;
    params.head_dim = (int32_t)problem->head_dim;
    params.dim = (int32_t)rotary_dim(problem);
    params.start_count = (int32_t)problem->starts.shape[0];
    params.eps = (float)problem->rotation.eps;
    params.sign = backward ? -1.0f : 1.0f;
    params.interleaved = problem->rotation.interleaved;
    params.wide_weight = problem->weight.dtype == FDMA_FLOAT32;
    params.aligned = is_aligned(params.from) && is_aligned(params.to) &&
                     (problem->weight.data == NULL || is_aligned(params.x));
    return params;
}

static const char *refuses(const fdma_problem *problem) {
    // so that the numbers of rows fit int32_t
    const int64_t most = INT32_MAX - 1024;
    if (problem->dtype == FDMA_FLOAT64 || problem->rotary.dtype == FDMA_FLOAT64 ||
        problem->weight.dtype == FDMA_FLOAT64 || problem->dweight.dtype == FDMA_FLOAT64)
        return "float64 tensors; supported: float32, float16, bfloat16; for rotary, float32";
    if (problem->q_len > most || problem->q_heads > most || problem->starts.shape[0] > most)
        return "more than 2^31 - 1025 rows, heads or sequences";
    return fdma_refuses_before_sm80(problem);
}

template <typename element, int lanes>
static fdma_status run_lanes(const fdma_problem *problem, const rotate_params &params) {
    const rotate_grid grid = grid_of_rows(problem);
    const launch_shape shape = {dim3((unsigned)grid.token_blocks, (unsigned)grid.head_blocks),
                                dim3(rotate_threads)};
    if (problem->operation == operation_rotate)
        return launch("rotate", rotate_rows<element, lanes, false>, shape, problem, params);
    FDMA_TRY(launch("rotate_backward", rotate_rows<element, lanes, true>, shape, problem, params));
    if (params.sums == NULL)
        return FDMA_OK;
    const launch_shape of_sums = {dim3((unsigned)(problem->head_dim / sum_channels)),
                                  dim3(row_threads)};
    return launch("rotate_backward", add_sums, of_sums, problem, params.sums,
                  (float *)problem->dweight.data, (int32_t)(grid.token_blocks * grid.head_blocks),
                  (int32_t)problem->head_dim);
}

template <typename element>
static fdma_status run_type(const fdma_problem *problem, const rotate_params &params) {
    switch (lanes_of(problem)) {
    case 8:
        return run_lanes<element, 8>(problem, params);
    case 16:
        return run_lanes<element, 16>(problem, params);
    default:
        return run_lanes<element, 32>(problem, params);
    }
}

static fdma_status run(const fdma_problem *problem) {
    fdma_arena arena = fdma_arena_of(problem);
    const rotate_params params = describe(problem, lay_out(problem, &arena));
    if (params.tokens == 0 || params.heads == 0)
        return clear("rotate_backward", problem, problem->dweight.data,
                     is_present(&problem->dweight) ? problem->head_dim * sizeof(float) : 0);
    if (problem->dtype == FDMA_FLOAT32)
        return run_type<float>(problem, params);
    return problem->dtype == FDMA_FLOAT16 ? run_type<float16>(problem, params)
                                          : run_type<__nv_bfloat16>(problem, params);
}

FDMA_CUDA_TABLE(fdma_cuda_sm80_rotate,
                {"cuda/sm80", operation_rotary_table, fdma_missing_sm80, refuses_table,
                 no_workspace, run_table, true, 0},
                {"cuda/sm80", operation_rotate, fdma_missing_sm80, refuses, no_workspace, run, true,
                 0},
                {"cuda/sm80", operation_rotate_backward, fdma_missing_sm80, refuses,
                 workspace_of<lay_out>, run, true, 0});
