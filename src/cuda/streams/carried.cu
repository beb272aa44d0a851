/* Backward with carried keys, by kernels that know none: the carried keys and those of the call are
 * copied one after the other, and from there their gradients to the tensors that they belong to.
 * Kernels of forward read the rows of carried keys where they are. Here is also the choice of what
 * stands between a call and its kernel. */
extern "C" {
#include "core/streams.h"
#include "cuda/cuda.h"
}
#include "core/integers.h"
#include "cuda/device/head_view.cuh"
#include "cuda/device/vec.cuh"
#include "cuda/streams/tables.cuh"
#include "cuda/streams/used.cuh"

static constexpr int stream_threads = 256;

/* Rows of carried keys and of those of the call, and of both in the workspace, one after the
 * other. */
struct row_pieces {
    head_view carried, own, joined;
    int32_t rows, kv_len, kv_heads, vecs; // vecs: of a row
    bool is_aligned;
};

/* A number for each key, likewise. */
struct number_pieces {
    number_view<float> carried, own, joined;
    int32_t rows, kv_len, kv_heads;
};

/* Where a vector of a row, or a number, is. */
template <typename element> struct key_addresses {
    element *apart;  // among the carried keys or those of the call
    element *joined; // NULL: past the end
};

__device__ static uint16_t *vec_at(const head_view &view, int64_t b, int64_t j, int32_t g,
                                   int32_t vec) {
    return (uint16_t *)view.data + b * view.batch + j * view.row + g * view.head +
           vec * vec_channels;
}

/* The vector of this thread. */
__device__ static key_addresses<uint16_t> addresses_of_vec(const row_pieces &pieces,
                                                           int64_t count) {
    const int64_t n = (int64_t)blockIdx.x * stream_threads + threadIdx.x;
    if (n >= count)
        return {};
    const int64_t row = n / pieces.vecs, key = row / pieces.kv_heads, b = key / pieces.kv_len;
    const int32_t vec = (int32_t)(n % pieces.vecs), g = (int32_t)(row % pieces.kv_heads);
    const int64_t j = key % pieces.kv_len, own = j - pieces.rows;
    return {own < 0 ? vec_at(pieces.carried, b, j, g, vec) : vec_at(pieces.own, b, own, g, vec),
            vec_at(pieces.joined, b, j, g, vec)};
}

/* The number of this thread. */
__device__ static key_addresses<float> addresses_of_number(const number_pieces &pieces,
                                                           int64_t heads) {
    const int64_t head = head_of_block(), b = head / pieces.kv_heads, g = head % pieces.kv_heads;
    const int32_t j = (int32_t)(blockIdx.x * stream_threads + threadIdx.x), own = j - pieces.rows;
    if (head >= heads || j >= pieces.kv_len)
        return {};
    return {own < 0 ? pieces.carried.at(b, g) + j : pieces.own.at(b, g) + own,
            pieces.joined.at(b, g) + j};
}

__device__ static void copy_vec(uint16_t *to, const uint16_t *from, bool is_aligned) {
    if (is_aligned)
        *(uint4 *)to = *(const uint4 *)from;
    else
        for (int x = 0; x < vec_channels; x++)
            to[x] = from[x];
}

static __global__ void __launch_bounds__(stream_threads)
    join_rows(const __grid_constant__ row_pieces pieces, const int64_t count) {
    const key_addresses<uint16_t> vec = addresses_of_vec(pieces, count);
    if (vec.joined != NULL)
        copy_vec(vec.joined, vec.apart, pieces.is_aligned);
}

static __global__ void __launch_bounds__(stream_threads)
    split_rows(const __grid_constant__ row_pieces pieces, const int64_t count) {
    const key_addresses<uint16_t> vec = addresses_of_vec(pieces, count);
    if (vec.joined != NULL)
        copy_vec(vec.apart, vec.joined, pieces.is_aligned);
}

static __global__ void __launch_bounds__(stream_threads)
    join_numbers(const __grid_constant__ number_pieces pieces, const int64_t heads) {
    const key_addresses<float> number = addresses_of_number(pieces, heads);
    if (number.joined != NULL)
        *number.joined = *number.apart;
}

static __global__ void __launch_bounds__(stream_threads)
    split_numbers(const __grid_constant__ number_pieces pieces, const int64_t heads) {
    const key_addresses<float> number = addresses_of_number(pieces, heads);
    if (number.joined != NULL)
        *number.apart = *number.joined;
}

/* A tensor shaped as k, with the rows of all keys. */
static fdma_tensor take_rows(const fdma_problem *problem, fdma_arena *arena) {
    const int64_t batch = problem->batch, len = problem->kv_len, heads = problem->kv_heads;
    uint16_t *const data = take<uint16_t>(arena, batch * len * heads * problem->head_dim);
    return fdma_tensor_4d(data, problem->dtype, batch, len, heads, problem->head_dim);
}

/* A tensor shaped as bias, with the numbers of all keys; absent if `like` is. */
static fdma_tensor take_numbers(const fdma_problem *problem, const fdma_tensor *like,
                                fdma_arena *arena) {
    const int64_t batch = problem->batch, len = problem->kv_len, heads = problem->kv_heads;
    if (!is_present(like))
        return {};
    return fdma_tensor_3d(take<float>(arena, batch * heads * len), FDMA_FLOAT32, batch, heads, len);
}

/* The problem whose keys are all of one piece. */
static fdma_problem joined_problem(const fdma_problem *problem, fdma_arena *arena) {
    fdma_problem one = *problem;
    one.k = take_rows(problem, arena);
    one.v = take_rows(problem, arena);
    one.bias = take_numbers(problem, &problem->bias, arena);
    one.dk = take_rows(problem, arena);
    one.dv = take_rows(problem, arena);
    one.dbias = take_numbers(problem, &problem->dbias, arena);
    one.k_carried = one.v_carried = one.bias_carried = {};
    one.dk_carried = one.dv_carried = one.dbias_carried = {};
    one.carried_len = 0;
    one.new_len = problem->kv_len;
    return one;
}

/* Copies rows, by join_rows() or split_rows(). */
static fdma_status copy_rows(void (*kernel)(row_pieces, int64_t), const fdma_problem *problem,
                             const fdma_tensor *carried, const fdma_tensor *own,
                             const fdma_tensor *joined) {
    row_pieces pieces = {};
    pieces.carried = view_of(carried);
    pieces.own = view_of(own);
    pieces.joined = view_of(joined);
    pieces.rows = (int32_t)problem->carried_len;
    pieces.kv_len = (int32_t)problem->kv_len;
    pieces.kv_heads = (int32_t)problem->kv_heads;
    pieces.vecs = (int32_t)problem->head_dim / vec_channels;
    pieces.is_aligned = is_aligned(pieces.carried) && is_aligned(pieces.own);
    const int64_t count = problem->batch * problem->kv_len * problem->kv_heads * pieces.vecs;
    return launch(fdma_operation_name(problem->operation), kernel,
                  {dim3((unsigned)divide_up(count, stream_threads)), dim3(stream_threads)}, problem,
                  pieces, count);
}

/* Copies numbers, if there are any, by join_numbers() or split_numbers(). */
static fdma_status copy_numbers(void (*kernel)(number_pieces, int64_t), const fdma_problem *problem,
                                const fdma_tensor *carried, const fdma_tensor *own,
                                const fdma_tensor *joined) {
    const int64_t heads = problem->batch * problem->kv_heads;
    const number_pieces pieces = {numbers_of<float>(carried), numbers_of<float>(own),
                                  numbers_of<float>(joined),  (int32_t)problem->carried_len,
                                  (int32_t)problem->kv_len,   (int32_t)problem->kv_heads};
    if (!is_present(joined))
        return FDMA_OK;
    return launch(
        fdma_operation_name(problem->operation), kernel,
        {grid_of(divide_up(problem->kv_len, stream_threads), heads), dim3(stream_threads)}, problem,
        pieces, heads);
}

static fdma_status join_inputs(const fdma_problem *problem, const fdma_problem *one) {
    FDMA_TRY(copy_rows(join_rows, problem, &problem->k_carried, &problem->k, &one->k));
    FDMA_TRY(copy_rows(join_rows, problem, &problem->v_carried, &problem->v, &one->v));
    return copy_numbers(join_numbers, problem, &problem->bias_carried, &problem->bias, &one->bias);
}

/* What the kernel adds the gradients to. dbias is never added to. */
static fdma_status join_gradients(const fdma_problem *problem, const fdma_problem *one) {
    FDMA_TRY(copy_rows(join_rows, problem, &problem->dk_carried, &problem->dk, &one->dk));
    return copy_rows(join_rows, problem, &problem->dv_carried, &problem->dv, &one->dv);
}

static fdma_status split_gradients(const fdma_problem *problem, const fdma_problem *one) {
    FDMA_TRY(copy_rows(split_rows, problem, &problem->dk_carried, &problem->dk, &one->dk));
    FDMA_TRY(copy_rows(split_rows, problem, &problem->dv_carried, &problem->dv, &one->dv));
    return copy_numbers(split_numbers, problem, &problem->dbias_carried, &problem->dbias,
                        &one->dbias);
}

static fdma_status run_joined(const fdma_kernel *kernel, const fdma_problem *problem) {
    fdma_arena arena = fdma_arena_of(problem);
    fdma_problem one = joined_problem(problem, &arena);
    fdma_set_aside(&one.exec, &arena);
    FDMA_TRY(join_inputs(problem, &one));
    if (problem->accumulate)
        FDMA_TRY(join_gradients(problem, &one));
    FDMA_TRY(kernel->run(&one));
    return split_gradients(problem, &one);
}

/* Whether the keys of the call and the carried ones are to be joined. */
static bool joins_keys(const fdma_problem *problem) {
    return problem->operation == operation_backward && is_present(&problem->k_carried);
}

size_t fdma_cuda_workspace(const fdma_kernel *kernel, const fdma_problem *problem) {
    fdma_arena arena = {};
    if (fdma_cuda_pads_unused(problem))
        return fdma_cuda_padded_workspace(kernel, problem);
    if (has_table(problem))
        return fdma_cuda_workspace_with_tables(kernel, problem);
    if (!joins_keys(problem))
        return kernel->workspace(problem);
    const fdma_problem one = joined_problem(problem, &arena);
    return fdma_arena_size(&arena) + kernel->workspace(&one);
}

fdma_status fdma_cuda_run_kernel(const fdma_kernel *kernel, const fdma_problem *problem) {
    if (fdma_cuda_pads_unused(problem))
        return fdma_cuda_run_padded(kernel, problem);
    if (has_table(problem))
        return fdma_cuda_run_with_tables(kernel, problem);
    return joins_keys(problem) ? run_joined(kernel, problem) : kernel->run(problem);
}
