/* fdma_rotary_table(), fdma_rotate() and its gradient, on any device from compute capability 8.0.
 * Memory bandwidth limits the rotation: a row is read once and written once. The threads of a warp
 * take the heads of a token side by side, so that a warp reads and writes memory in one piece, and
 * a thread takes several heads of a token, whose angles it loads once. One launch rotates q and k.
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
/* Lanes of a row whose halves are not whole vectors. */
static constexpr int element_lanes = 32;

/* The thread blocks that rotate a tensor. The order of dweight's sums follows from them. */
struct rotate_blocks {
    int32_t head_blocks, token_blocks, sequences; // how many along each axis
    int32_t heads_log;    // 2^heads_log threads side by side take heads of a token
    int32_t row_log;      // 2^row_log blocks, of successive tokens, are side by side in the grid
    int64_t block_tokens; // of a thread block

    int64_t count() const { return (int64_t)head_blocks * token_blocks * sequences; }
};

/* The rows of q or of k. */
struct rotated_rows {
    head_view from, to;   // x and out; in the gradient dout and dx
    head_view x;          // in the gradient, with weight
    const void *weight;   // NULL: no norm
    float *sums;          // [blocks, head_dim]: of dweight; NULL: not wanted
    rotate_blocks blocks; // 0 of them without rows
    int32_t heads, rotated_heads;
    bool wide_weight; // float32
};

struct rotate_params {
    rotated_rows rows[2]; // q's and k's
    const float *rotary;
    const int32_t *positions, *starts; // NULL: absent
    int64_t rotary_stride, rotary_rows, positions_stride;
    int64_t first, offset, batch;
    int32_t len, head_dim, dim, start_count;
    int32_t thread_heads; // heads of a token that each thread takes
    float eps, sign;      // -1: rotates by the negative angle
    bool interleaved;
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

/* The channels of a row that a lane holds: two vectors of up to eight, in whole pairs. Halves:
 * channels first[0] + x and first[1] + x are a pair. Interleaved: neighbours are. */
struct lane_channels {
    int32_t first[2], count[2];
    int32_t pairs;      // rotated ones; 0: the channels from dim on
    int32_t first_pair; // its angles
};

/* Lanes are counted from the start of a row. The first ones hold rotated channels. */
__device__ static lane_channels channels_of(const rotate_params &params, int32_t lane) {
    const int32_t rotating_lanes = (params.dim + 15) / 16, pairs = params.dim / 2;
    lane_channels channels = {};
    int32_t end[2] = {params.dim, params.dim};
    channels.first[0] = 16 * lane;
    channels.first[1] = 16 * lane + 8;
    if (lane >= rotating_lanes) {
        channels.first[0] += params.dim - 16 * rotating_lanes;
        channels.first[1] += params.dim - 16 * rotating_lanes;
        end[0] = end[1] = params.head_dim;
    } else if (!params.interleaved) {
        channels.first[0] = 8 * lane;
        channels.first[1] = pairs + 8 * lane;
        end[0] = pairs;
    }
    for (int n = 0; n < 2; n++)
        channels.count[n] = max(0, min(vec_channels, end[n] - channels.first[n]));
    if (lane < rotating_lanes)
        channels.pairs = (channels.count[0] + channels.count[1]) / 2;
    channels.first_pair = 8 * lane;
    return channels;
}

/* A lane's channels of a row, as they are in memory and as numbers. */
template <typename element> struct memory_row {
    alignas(16) element channel[2][vec_channels];
};
using lane_row = float[2][vec_channels];

/* Copies one vector of 16 bytes after the other. */
template <typename element>
__device__ static void copy_vec(element (&to)[vec_channels], const element *from) {
#pragma unroll
    for (int n = 0; n < (int)(sizeof to / sizeof(uint4)); n++)
        ((uint4 *)to)[n] = ((const uint4 *)from)[n];
}

/* Loads a lane's channels of a row. There is no branch around the loads of vectors, and numbers are
 * made of them by widen() alone, so that all loads of a thread are under way together: a lane
 * without channels loads the first ones. */
template <bool vectors, typename element>
__device__ static memory_row<element> load_row(const element *row, const lane_channels &channels) {
    memory_row<element> found;
#pragma unroll
    for (int n = 0; n < 2; n++)
        if constexpr (vectors) {
            copy_vec(found.channel[n], row + (channels.count[n] > 0 ? channels.first[n] : 0));
        } else {
#pragma unroll
            for (int x = 0; x < vec_channels; x++)
                found.channel[n][x] = row[x < channels.count[n] ? channels.first[n] + x : 0];
        }
    return found;
}

template <typename element>
__device__ static void widen(lane_row &to, const memory_row<element> &from) {
#pragma unroll
    for (int n = 0; n < 2 * vec_channels; n++)
        to[n / vec_channels][n % vec_channels] =
            to_float(from.channel[n / vec_channels][n % vec_channels]);
}

/* As widen(), with zeros in place of channels that the lane does not have. */
template <typename element>
__device__ static void widen_own(lane_row &to, const memory_row<element> &from,
                                 const lane_channels &channels) {
    widen(to, from);
#pragma unroll
    for (int n = 0; n < 2 * vec_channels; n++)
        if (n % vec_channels >= channels.count[n / vec_channels])
            to[n / vec_channels][n % vec_channels] = 0;
}

template <bool vectors, typename element>
__device__ static void store_row(element *row, const lane_row &from,
                                 const lane_channels &channels) {
#pragma unroll
    for (int n = 0; n < 2; n++) {
        element *const to = row + channels.first[n];
        if constexpr (vectors) {
            if (channels.count[n] > 0)
                store_vec(to, from[n], true);
        } else {
#pragma unroll
            for (int x = 0; x < vec_channels; x++)
                if (x < channels.count[n])
                    to[x] = from_float<element>(from[n][x]);
        }
    }
}

/* The cosines and sines of a lane's pairs. */
struct lane_factors {
    alignas(16) float c[vec_channels], s[vec_channels];
};

template <bool vectors>
__device__ static lane_factors find_factors(const rotate_params &params, const float *angles,
                                            const lane_channels &channels) {
    lane_factors factors = {};
    if (channels.pairs == 0)
        return factors;
    if (angles == NULL) {
#pragma unroll
        for (int x = 0; x < vec_channels; x++)
            factors.c[x] = factors.s[x] = NAN;
        return factors;
    }
    const float *const c = angles + channels.first_pair, *const s = c + params.dim / 2;
    if constexpr (vectors) {
        copy_vec(factors.c, c);
        copy_vec(factors.s, s);
    } else {
#pragma unroll
        for (int x = 0; x < vec_channels; x++)
            if (x < channels.pairs) {
                factors.c[x] = c[x];
                factors.s[x] = s[x];
            }
    }
    return factors;
}

__device__ static void rotate_pair(float &low, float &high, float c, float s) {
    const float before = low;
    low = fmaf(high, -s, low * c);
    high = fmaf(before, s, high * c);
}

/* Rotates a row by `sign` times its angles. */
__device__ static void rotate_row(lane_row &y, const lane_factors &factors, float sign,
                                  bool interleaved) {
    if (interleaved)
#pragma unroll
        for (int x = 0; x < vec_channels; x++)
            rotate_pair(y[x / 4][x % 4 * 2], y[x / 4][x % 4 * 2 + 1], factors.c[x],
                        sign * factors.s[x]);
    else
#pragma unroll
        for (int x = 0; x < vec_channels; x++)
            rotate_pair(y[0][x], y[1][x], factors.c[x], sign * factors.s[x]);
}

template <int lanes> __device__ static float sum_of_lanes(float x) {
#pragma unroll
    for (int step = lanes / 2; step > 0; step /= 2)
        x += __shfl_xor_sync(~0u, x, step);
    return x;
}

template <int lanes> __device__ static float sum_of_products(const lane_row &x, const lane_row &y) {
    float sum = 0;
#pragma unroll
    for (int n = 0; n < 2 * vec_channels; n++)
        sum =
            fmaf(x[n / vec_channels][n % vec_channels], y[n / vec_channels][n % vec_channels], sum);
    return sum_of_lanes<lanes>(sum);
}

template <int lanes>
__device__ static float norm_of(const rotate_params &params, const lane_row &x) {
    return 1 / sqrtf(sum_of_products<lanes>(x, x) / (float)params.head_dim + params.eps);
}

template <int lanes>
__device__ static void normalize(lane_row &y, const lane_row &weight, const rotate_params &params) {
    const float norm = norm_of<lanes>(params, y);
#pragma unroll
    for (int n = 0; n < 2 * vec_channels; n++)
        y[n / vec_channels][n % vec_channels] *= norm * weight[n / vec_channels][n % vec_channels];
}

/* Makes dx of u, the gradient before the rotation, and adds to the sums of dweight. */
template <int lanes>
__device__ static void differentiate_norm(lane_row &u, lane_row &sums, lane_row &x,
                                          const lane_row &weight, const rotate_params &params,
                                          bool exists) {
    const float norm = norm_of<lanes>(params, x);
#pragma unroll
    for (int n = 0; n < 2 * vec_channels; n++) {
        const int half = n / vec_channels, place = n % vec_channels;
        x[half][place] *= norm;
        if (exists)
            sums[half][place] = fmaf(x[half][place], u[half][place], sums[half][place]);
        u[half][place] *= weight[half][place];
    }
    const float along = sum_of_products<lanes>(x, u) / -(float)params.head_dim;
#pragma unroll
    for (int n = 0; n < 2 * vec_channels; n++) {
        const int half = n / vec_channels, place = n % vec_channels;
        u[half][place] = norm * fmaf(along, x[half][place], u[half][place]);
    }
}

/* A lane's channels of the weight as they are in memory: 16 words of float32, or 8 of two elements.
 */
struct memory_weight {
    uint4 vector[4];
};

template <bool vectors, typename element>
__device__ static memory_weight load_weight(const rotated_rows &rows,
                                            const lane_channels &channels) {
    memory_weight found = {};
#pragma unroll
    for (int n = 0; n < 2; n++) {
        const int32_t first = channels.count[n] > 0 ? channels.first[n] : 0;
        if (!vectors) {
            float *const to = (float *)&found.vector[2 * n];
#pragma unroll
            for (int x = 0; x < vec_channels; x++) {
                const int32_t d = x < channels.count[n] ? channels.first[n] + x : 0;
                to[x] = rows.wide_weight ? ((const float *)rows.weight)[d]
                                         : to_float(((const element *)rows.weight)[d]);
            }
        } else if (rows.wide_weight) {
            const uint4 *const from = (const uint4 *)((const float *)rows.weight + first);
            found.vector[2 * n] = from[0];
            found.vector[2 * n + 1] = from[1];
        } else {
            found.vector[n] = *(const uint4 *)((const element *)rows.weight + first);
        }
    }
    return found;
}

template <typename element>
__device__ static void widen(lane_row &to, const memory_weight &from, bool is_wide) {
    const uint32_t *const words = (const uint32_t *)from.vector;
#pragma unroll
    for (int n = 0; n < vec_channels; n++) {
        float2 pair = make_float2(__uint_as_float(words[2 * n]), __uint_as_float(words[2 * n + 1]));
        if constexpr (sizeof(element) == 2) {
            const float2 own = unpack<element>(words[n]);
            pair = is_wide ? pair : own;
        }
        to[n / 4][n % 4 * 2] = pair.x;
        to[n / 4][n % 4 * 2 + 1] = pair.y;
    }
}

/* Adds the sums of the rows of a thread block in their order. `block` counts the thread blocks of a
 * tensor. */
template <int lanes>
__device__ static void write_sums(const lane_row &sums, const rotate_params &params, float *to,
                                  int64_t block) {
    __shared__ lane_row of_threads[rotate_threads];
#pragma unroll
    for (int n = 0; n < 2 * vec_channels; n++)
        of_threads[threadIdx.x][n / vec_channels][n % vec_channels] =
            sums[n / vec_channels][n % vec_channels];
    __syncthreads();
    for (int place = threadIdx.x; place < 2 * vec_channels * lanes; place += rotate_threads) {
        const int x = place % vec_channels, half = place / vec_channels % 2;
        const int lane = place / (2 * vec_channels);
        const lane_channels channels = channels_of(params, lane);
        const int32_t count = half == 0 ? channels.count[0] : channels.count[1];
        const int32_t channel = (half == 0 ? channels.first[0] : channels.first[1]) + x;
        float sum = 0;
        for (int thread = lane; thread < rotate_threads; thread += lanes)
            sum += of_threads[thread][half][x];
        if (x < count)
            to[block * params.head_dim + channel] = sum;
    }
}

/* Row i of head h of sequence b. */
template <typename element>
__device__ static element *row_at(const head_view &view, int64_t b, int64_t i, int64_t h) {
    return (element *)view.data + b * view.batch + i * view.row + h * view.head;
}

/* What a kernel does with a row. */
enum row_work {
    rotates,
    normalizes,         // and rotates
    differentiates_norm // after the rotation
};

/* Heads of a token that a thread takes where there are many rows. */
static constexpr int most_heads(bool is_wide, row_work work) {
    return is_wide || work == differentiates_norm ? 1 : 4;
}

/* Thread blocks that share a multiprocessor at least, so that enough loads are under way. */
static constexpr int blocks_at_once(bool vectors, row_work work, int heads) {
    if (!vectors)
        return 1;
    if (work == rotates)
        return heads == 1 ? 8 : 5;
    return work == normalizes && heads == 1 ? 6 : 4;
}

/* Rotates all rows. `lanes` lanes hold a row, each some of its pairs; a thread takes `heads` rows
 * of a token. The grid has the axes of grid_of(). Threads past the last head or token load the
 * last one's row. vectors: rows are in whole vectors and aligned. */
template <typename element, int lanes, bool vectors, row_work work, int heads>
static __global__ void __launch_bounds__(rotate_threads, blocks_at_once(vectors, work, heads))
    rotate_rows(const __grid_constant__ rotate_params params) {
    const int32_t before = params.rows[0].blocks.head_blocks << params.rows[0].blocks.row_log;
    const bool is_k = blockIdx.x >= before;
    const rotated_rows &rows = params.rows[is_k];
    const rotate_blocks &blocks = rows.blocks;
    const int32_t column = blockIdx.x - (is_k ? before : 0);
    const int32_t head_block = column >> blocks.row_log;
    const int32_t token_block =
        (blockIdx.y << blocks.row_log) + (column & ((1 << blocks.row_log) - 1));
    if (token_block >= blocks.token_blocks || blockIdx.z >= blocks.sequences)
        return;
    const lane_channels channels = channels_of(params, threadIdx.x % lanes);
    const int32_t row = threadIdx.x / lanes, heads_log = blocks.heads_log;
    const int32_t own_h = (head_block << heads_log) + (row & ((1 << heads_log) - 1));
    const int64_t head_step = rows.heads / heads; // between the heads of a thread
    const int32_t h = min(own_h, (int32_t)head_step - 1);
    lane_row sums = {};
    for (int64_t b = blockIdx.z; b < params.batch; b += blocks.sequences)
        for (int64_t first = token_block * blocks.block_tokens; first < params.len;
             first += blocks.token_blocks * blocks.block_tokens) {
            const int64_t own_i = first + (row >> heads_log);
            const int64_t i = min(own_i, (int64_t)params.len - 1);
            const bool there = own_h == h && own_i == i;
            // first, because they are behind branches, before which the compiler would convert rows
            const lane_factors factors =
                find_factors<vectors>(params, angles_of(params, b, (int32_t)i), channels);
            memory_weight found_weight;
            if (work != rotates)
                found_weight = load_weight<vectors, element>(rows, channels);
            const element *const from = row_at<element>(rows.from, b, i, h);
            element *const to = row_at<element>(rows.to, b, i, h);
            memory_row<element> found[heads], found_x;
#pragma unroll
            for (int n = 0; n < heads; n++)
                found[n] = load_row<vectors>(from + n * head_step * rows.from.head, channels);
            if (work == differentiates_norm)
                found_x = load_row<vectors>(row_at<element>(rows.x, b, i, h), channels);
            lane_row weight;
            if (work != rotates)
                widen<element>(weight, found_weight, rows.wide_weight || !vectors);
#pragma unroll
            for (int n = 0; n < heads; n++) {
                lane_row y, x;
                if (work == rotates)
                    widen(y, found[n]);
                else
                    widen_own(y, found[n], channels);
                if (work == normalizes)
                    normalize<lanes>(y, weight, params);
                if (h + n * head_step < rows.rotated_heads && channels.pairs > 0)
                    rotate_row(y, factors, params.sign, params.interleaved);
                if (work == differentiates_norm) {
                    widen_own(x, found_x, channels);
                    differentiate_norm<lanes>(y, sums, x, weight, params, there);
                }
                if (there)
                    store_row<vectors>(to + n * head_step * rows.to.head, y, channels);
            }
        }
    const int64_t block_row = token_block + (int64_t)blocks.token_blocks * blockIdx.z;
    if (work == differentiates_norm && rows.sums != NULL)
        write_sums<lanes>(sums, params, rows.sums, head_block + blocks.head_blocks * block_row);
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

static constexpr int64_t most_axis = 32768; // thread blocks along an axis of a grid

/* Lanes of a row: some hold the rotated channels, the others the rest. */
static int lanes_of(const fdma_problem *problem) {
    const int64_t dim = rotary_dim(problem);
    const int64_t lanes = divide_up(dim, 16) + divide_up(problem->head_dim - dim, 16);
    return dim % 16 != 0 ? element_lanes : lanes <= 4 ? 4 : lanes <= 8 ? 8 : 16;
}

/* The tensors of q, or of k: without k no heads. */
struct row_tensors {
    const fdma_tensor *from, *to, *x, *weight, *dweight;
    int64_t heads, nope_heads;
};

static row_tensors tensors_of(const fdma_problem *problem, bool is_k) {
    const bool backward = problem->operation == operation_rotate_backward;
    const rotary_options &options = problem->rotation;
    if (is_k)
        return {backward ? &problem->dk_out : &problem->k,
                backward ? &problem->dk : &problem->k_out,
                &problem->k,
                &problem->k_weight,
                &problem->dk_weight,
                problem->kv_heads,
                options.k_nope_heads};
    return {backward ? &problem->dout : &problem->x,
            backward ? &problem->dx : &problem->out,
            &problem->x,
            &problem->weight,
            &problem->dweight,
            problem->q_heads,
            options.nope_heads};
}

static row_work work_of(const fdma_problem *problem) {
    if (!is_present(&problem->weight))
        return rotates;
    return problem->operation == operation_rotate ? normalizes : differentiates_norm;
}

/* Heads of a token that each thread takes. */
static int32_t thread_heads_of(const fdma_problem *problem) {
    const int64_t enough = 1 << 18; // threads: more than most devices run at once
    const int32_t heads = most_heads(problem->dtype == FDMA_FLOAT32, work_of(problem));
    const int64_t rows = problem->batch * problem->q_len * (problem->q_heads + problem->kv_heads);
    const bool divides = problem->q_heads % heads == 0 && problem->kv_heads % heads == 0;
    const bool takes = lanes_of(problem) != element_lanes && rows * lanes_of(problem) >= enough;
    return takes && divides ? heads : 1;
}

/* As many heads side by side, a power of two, as leave no more threads idle than an eighth of the
 * heads would take. */
static int32_t heads_log_of(const fdma_problem *problem, int64_t heads) {
    const int64_t rows = rotate_threads / lanes_of(problem);
    int32_t log = 0;
    for (int32_t n = 1; (int64_t)1 << n <= rows; n++)
        if ((divide_up(heads, (int64_t)1 << n) << n) - heads <= heads / 8)
            log = n;
    return log;
}

/* The thread blocks for the rows of q or k. The order of dweight's sums follows from them, so that
 * they depend on sizes alone. */
static rotate_blocks blocks_of_rows(const fdma_problem *problem, const row_tensors &tensors,
                                    int32_t thread_heads) {
    const int64_t heads = tensors.heads / thread_heads;
    rotate_blocks blocks = {};
    blocks.heads_log = heads_log_of(problem, heads);
    blocks.head_blocks = (int32_t)divide_up(heads, (int64_t)1 << blocks.heads_log);
    blocks.block_tokens = rotate_threads / lanes_of(problem) >> blocks.heads_log;
    const int64_t most = is_present(tensors.dweight) && blocks.head_blocks > 0
                             ? divide_up(2048, blocks.head_blocks) // whose sums are added
                             : most_axis * most_axis;
    const int64_t tokens = divide_up(problem->q_len, blocks.block_tokens);
    blocks.token_blocks = (int32_t)min(min(tokens, most_axis), most);
    if (blocks.token_blocks > 0)
        blocks.sequences =
            (int32_t)min(min(problem->batch, most_axis), divide_up(most, blocks.token_blocks));
    return blocks;
}

/* The sums of dweight in the workspace. */
struct weight_sums {
    float *q, *k;
};

static float *take_sums(const fdma_problem *problem, const row_tensors &tensors,
                        fdma_arena *arena) {
    if (!is_present(tensors.dweight))
        return NULL;
    return take<float>(arena, blocks_of_rows(problem, tensors, 1).count() * problem->head_dim);
}

static weight_sums lay_out(const fdma_problem *problem, fdma_arena *arena) {
    weight_sums sums;
    sums.q = take_sums(problem, tensors_of(problem, false), arena);
    sums.k = take_sums(problem, tensors_of(problem, true), arena);
    return sums;
}

static rotated_rows describe_rows(const row_tensors &tensors, float *sums) {
    rotated_rows rows = {};
    rows.from = view_of(tensors.from);
    rows.to = view_of(tensors.to);
    rows.x = view_of(tensors.x);
    rows.weight = tensors.weight->data;
    rows.sums = sums;
    rows.heads = (int32_t)tensors.heads;
    rows.rotated_heads = (int32_t)(tensors.heads - tensors.nope_heads);
    rows.wide_weight = tensors.weight->dtype == FDMA_FLOAT32;
    return rows;
}

/* True if rows of all tensors can be copied 16 bytes at a time. */
static bool is_aligned(const rotated_rows &rows) {
    return is_aligned(rows.from) && is_aligned(rows.to) && is_aligned(rows.weight, 0) &&
           (rows.weight == NULL || is_aligned(rows.x));
}

static bool is_aligned(const rotate_params &params) {
    return is_aligned(params.rows[0]) && is_aligned(params.rows[1]) &&
           is_aligned(params.rotary, params.rotary_stride);
}

/* Sets the thread blocks of each tensor. Those that have the same tokens are near each other in the
 * grid, so that they run at about the same time and read the angles from a cache. */
static void divide_rows(const fdma_problem *problem, rotate_params *params) {
    rotate_blocks &q = params->rows[0].blocks, &k = params->rows[1].blocks;
    q = blocks_of_rows(problem, tensors_of(problem, false), params->thread_heads);
    k = blocks_of_rows(problem, tensors_of(problem, true), params->thread_heads);
    q.row_log = q.head_blocks < most_axis ? max(0, q.heads_log - k.heads_log) : 0;
    k.row_log = k.head_blocks < most_axis ? max(0, k.heads_log - q.heads_log) : 0;
}

static rotate_params describe(const fdma_problem *problem) {
    fdma_arena arena = fdma_arena_of(problem);
    const weight_sums sums = lay_out(problem, &arena);
    rotate_params params = {};
    params.rows[0] = describe_rows(tensors_of(problem, false), sums.q);
    params.rows[1] = describe_rows(tensors_of(problem, true), sums.k);
    params.rotary = (const float *)problem->rotary.data;
    params.positions = (const int32_t *)problem->positions.data;
    params.starts = (const int32_t *)problem->starts.data;
    params.rotary_stride = problem->rotary.stride[0];
    params.rotary_rows = problem->rotary.shape[0];
    params.positions_stride = problem->positions.stride[0];
    params.first = problem->rotation.first;
    params.offset = problem->rotation.offset;
    params.batch = problem->batch;
    params.len = (int32_t)problem->q_len;
    params.head_dim = (int32_t)problem->head_dim;
    params.dim = (int32_t)rotary_dim(problem);
    params.start_count = (int32_t)problem->starts.shape[0];
    params.eps = (float)problem->rotation.eps;
    params.sign = problem->operation == operation_rotate_backward ? -1.0f : 1.0f;
    params.interleaved = problem->rotation.interleaved;
    params.thread_heads = is_aligned(params) ? thread_heads_of(problem) : 1;
    divide_rows(problem, &params);
    return params;
}

static const char *refuses(const fdma_problem *problem) {
    // so that the numbers of rows fit int32_t
    const int64_t most = INT32_MAX - 1024;
    const int64_t heads = max(problem->q_heads, problem->kv_heads);
    if (problem->dtype == FDMA_FLOAT64 || problem->rotary.dtype == FDMA_FLOAT64 ||
        problem->weight.dtype == FDMA_FLOAT64 || problem->dweight.dtype == FDMA_FLOAT64 ||
        problem->k_weight.dtype == FDMA_FLOAT64 || problem->dk_weight.dtype == FDMA_FLOAT64)
        return "float64 tensors; supported: float32, float16, bfloat16; for rotary, float32";
    if (problem->q_len > most || heads > most || problem->starts.shape[0] > most)
        return "more than 2^31 - 1025 rows, heads or sequences";
    return fdma_refuses_before_sm80(problem);
}

static dim3 grid_of(const rotate_params &params) {
    dim3 grid(0, 0, 0);
    for (const rotated_rows &rows : params.rows) {
        const rotate_blocks &blocks = rows.blocks;
        grid.x += (unsigned)blocks.head_blocks << blocks.row_log;
        grid.y = max(grid.y, (unsigned)divide_up(blocks.token_blocks, 1 << blocks.row_log));
        grid.z = max(grid.z, (unsigned)blocks.sequences);
    }
    return grid;
}

template <typename element, int lanes, bool vectors, row_work work>
static fdma_status run_work(const fdma_problem *problem, const rotate_params &params) {
    const char *const name = problem->operation == operation_rotate ? "rotate" : "rotate_backward";
    const launch_shape shape = {grid_of(params), dim3(rotate_threads)};
    constexpr int heads = vectors ? most_heads(sizeof(element) > 2, work) : 1;
    if (params.thread_heads == heads)
        return launch(name, rotate_rows<element, lanes, vectors, work, heads>, shape, problem,
                      params);
    return launch(name, rotate_rows<element, lanes, vectors, work, 1>, shape, problem, params);
}

template <typename element, int lanes, bool vectors>
static fdma_status run_lanes(const fdma_problem *problem, const rotate_params &params) {
    switch (work_of(problem)) {
    case rotates:
        return run_work<element, lanes, vectors, rotates>(problem, params);
    case normalizes:
        return run_work<element, lanes, vectors, normalizes>(problem, params);
    default:
        return run_work<element, lanes, vectors, differentiates_norm>(problem, params);
    }
}

/* dweight of the rows, or zeros without rows. */
static fdma_status add_weights(const fdma_problem *problem, const fdma_tensor *dweight,
                               const rotated_rows &rows) {
    const launch_shape shape = {dim3((unsigned)(problem->head_dim / sum_channels)),
                                dim3(row_threads)};
    const int32_t blocks = (int32_t)rows.blocks.count();
    if (!is_present(dweight))
        return FDMA_OK;
    if (blocks == 0)
        return clear("rotate_backward", problem, dweight->data, problem->head_dim * sizeof(float));
    return launch("rotate_backward", add_sums, shape, problem, rows.sums, (float *)dweight->data,
                  blocks, (int32_t)problem->head_dim);
}

template <typename element, int lanes>
static fdma_status run_aligned(const fdma_problem *problem, const rotate_params &params) {
    return is_aligned(params) ? run_lanes<element, lanes, true>(problem, params)
                              : run_lanes<element, lanes, false>(problem, params);
}

template <typename element>
static fdma_status run_type(const fdma_problem *problem, const rotate_params &params) {
    switch (lanes_of(problem)) {
    case 4:
        return run_aligned<element, 4>(problem, params);
    case 8:
        return run_aligned<element, 8>(problem, params);
    case 16:
        return run_aligned<element, 16>(problem, params);
    default:
        return run_lanes<element, element_lanes, false>(problem, params);
    }
}

static fdma_status run_rows(const fdma_problem *problem, const rotate_params &params) {
    if (params.rows[0].blocks.count() == 0 && params.rows[1].blocks.count() == 0)
        return FDMA_OK;
    if (problem->dtype == FDMA_FLOAT32)
        return run_type<float>(problem, params);
    return problem->dtype == FDMA_FLOAT16 ? run_type<float16>(problem, params)
                                          : run_type<__nv_bfloat16>(problem, params);
}

static fdma_status run(const fdma_problem *problem) {
    const rotate_params params = describe(problem);
    FDMA_TRY(run_rows(problem, params));
    FDMA_TRY(add_weights(problem, &problem->dweight, params.rows[0]));
    return add_weights(problem, &problem->dk_weight, params.rows[1]);
}

FDMA_CUDA_TABLE(fdma_cuda_sm80_rotate,
                {"cuda/sm80", operation_rotary_table, fdma_missing_sm80, refuses_table,
                 no_workspace, run_table, true, 0},
                {"cuda/sm80", operation_rotate, fdma_missing_sm80, refuses, no_workspace, run, true,
                 0},
                {"cuda/sm80", operation_rotate_backward, fdma_missing_sm80, refuses,
                 workspace_of<lay_out>, run, true, 0});
