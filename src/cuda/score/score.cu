/* Score and bias of each key on any device from compute capability 8.0: v times dt_proj on the
 * tensor cores, reading v once, then softplus and the coefficient.
 *
 * A warp takes 16 keys and up to 64 kv heads at a time, channel by channel: v goes through a ring
 * of its own in shared memory, filled ahead across tiles, so that warps need not wait for others.
 * A block's warps share the weights: all of dt_proj stays in shared memory, or else goes through
 * it in panels, two at a time. A sum is over all channels in order, whoever takes the tile.
 * A float32 dt_proj becomes a sum of three numbers of v's type, in the workspace. */
#include "cuda/score/score_copy.cuh"

static constexpr int mma_channels = 16;
static constexpr int sum_channels = 64; // that a tensor core, which truncates, adds up by itself

/* A warp's keys, of 16 channels from `chunk` on. */
template <typename config> __device__ static void load_keys(uint4 &keys, uint32_t from, int chunk) {
    const int lane = threadIdx.x % 32;
    ldmatrix_x4(keys, from + chunk_offset<config>(lane % 16, chunk + lane / 16));
}

/* Weights of 16 channels from `chunk` on and all heads of a block, as mma wants them. */
template <typename config>
__device__ static void load_weights(uint2 (&weights)[config::head_tiles], uint32_t from,
                                    int chunk) {
    const int lane = threadIdx.x % 32, row = lane % 8;
    chunk += lane / 8 % 2;
    if (config::head_tiles == 1)
        ldmatrix_x2(weights[0], from + chunk_offset<config>(row, chunk));
#pragma unroll
    for (int n = 0; n + 1 < config::head_tiles; n += 2) {
        uint4 two;
        ldmatrix_x4(two, from + chunk_offset<config>((n + lane / 16) * mma_heads + row, chunk));
        weights[n] = make_uint2(two.x, two.y);
        weights[n + 1] = make_uint2(two.z, two.w);
    }
}

/* The products of sum_channels, from `chunk` on, with all parts of the weights. */
template <typename config>
__device__ static void multiply(float (&sums)[config::head_tiles][4], uint32_t keys_from,
                                uint32_t weights_from, int chunk, const score_params &params) {
    constexpr int steps = sum_channels / mma_channels, mma_chunks = mma_channels / chunk_channels;
    uint4 keys[steps];
    float new_sums[config::head_tiles][4] = {};
#pragma unroll
    for (int k = 0; k < steps; k++)
        load_keys<config>(keys[k], keys_from, chunk + k * mma_chunks);
#pragma unroll 1
    for (int part = 0; part < params.parts; part++) {
#pragma unroll
        for (int k = 0; k < steps; k++) {
            uint2 weights[config::head_tiles];
            load_weights<config>(weights, weights_from, chunk + k * mma_chunks);
#pragma unroll
            for (int n = 0; n < config::head_tiles; n++)
                mma_m16n8k16(new_sums[n], keys[k], weights[n], typename config::element());
        }
        weights_from += params.panel_steps * config::heads * config::row_bytes;
    }
#pragma unroll
    for (int n = 0; n < config::head_tiles; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            sums[n][i] += new_sums[n][i];
}

/* The dot product again, in order: splitting a weight turns inf * weight into NaN. */
template <typename T>
__device__ static __noinline__ float dot_plainly(const score_params &params, int64_t b, int64_t j,
                                                 int g) {
    const T *const row = (const T *)params.v + b * params.v_batch + j * params.v_row;
    float sum = 0;
    for (int other = 0; other < params.kv_heads; other++)
        for (int d = 0; d < params.head_dim; d++)
            sum += to_float(row[other * params.v_head + d]) *
                   load_weight<T>(params, g, other * params.head_dim + d);
    return sum;
}

/* What turns sums into scores, loaded long before: of heads lane and 32 + lane of a block, and of
 * keys lane / 4 and 8 + lane / 4 of a tile. */
template <typename config> struct score_facts {
    static constexpr int head_groups = (config::heads + 31) / 32;
    float a[head_groups];
    bool valid[2];
};

template <typename config>
__device__ static void load_facts(score_facts<config> &facts, const score_params &params,
                                  const key_tile &tile, int head) {
    using element = typename config::element;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < facts.head_groups; i++) {
        const int g = min(head + i * 32 + lane, params.kv_heads - 1);
        facts.a[i] = params.a == NULL ? 1
                     : params.wide_a  ? ((const float *)params.a)[g]
                                      : to_float(((const element *)params.a)[g]);
    }
#pragma unroll
    for (int half = 0; half < 2; half++)
        facts.valid[half] = tile.is_there && is_valid(params, tile.b, tile.j + lane / 4 + half * 8);
}

template <typename T>
__device__ static void write_score(const score_params &params, int64_t b, int64_t j, int g,
                                   float sum, float a, bool valid) {
    if (j >= params.kv_len || g >= params.kv_heads)
        return;
    float dot = params.scales != NULL ? sum * params.scales[g] : sum;
    if (isnan(dot) && params.parts > 1 && valid)
        dot = dot_plainly<T>(params, b, j, g);
    const float z = params.a == NULL ? dot : valid ? a * softplus(dot) : -INFINITY;
    if (params.score != NULL)
        params.score[b * params.score_batch + g * params.score_head + j] = z;
    if (params.bias != NULL)
        params.bias[b * params.bias_batch + g * params.bias_head + j] =
            params.bias_form == FDMA_BIAS_EXP ? expf(z) : z;
}

/* A lane has keys lane / 4 and that + 8, of heads lane % 4 * 2 and that + 1 of each mma tile, which
 * come to sums[0] one after the other: the code stays small. */
template <typename config>
__device__ static void write_scores(float (&sums)[config::head_tiles][4],
                                    const score_params &params, const key_tile &tile, int head,
                                    const score_facts<config> &facts) {
    const int lane = threadIdx.x % 32;
    const int64_t j = tile.j + lane / 4;
#pragma unroll 1
    for (int n = 0; n < config::heads && head + n < params.kv_heads; n += mma_heads) {
        const float a_of_lane = n < 32 ? facts.a[0] : facts.a[facts.head_groups - 1];
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            const int g = n + lane % 4 * 2 + odd;
            const float a = __shfl_sync(~0u, a_of_lane, g % 32);
#pragma unroll
            for (int half = 0; half < 2; half++)
                write_score<typename config::element>(params, tile.b, j + half * 8, head + g,
                                                      sums[0][half * 2 + odd], a,
                                                      facts.valid[half]);
        }
#pragma unroll
        for (int next = 1; next < config::head_tiles; next++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                sums[next - 1][i] = sums[next][i];
    }
}

/* Until at most `pending` of the latest copies are not done, or fewer. */
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

/* Starts the next copies of a warp, and adds the products of the oldest. */
template <typename config>
__device__ static void take_step(float (&sums)[config::head_tiles][4], key_ring<config> &ring,
                                 uint32_t weights, const score_params &params, int rounds) {
    wait_for_copies(params.stages - 2);
    __syncwarp();
    if (ring.round < rounds)
        copy_keys(ring, params);
    cp_async_commit_group();
    const uint32_t keys = shared_address(ring.slots) + ring.filled * config::slot_bytes;
#pragma unroll(config::head_tiles == 1 ? 2 : 1) // registers do not suffice for more
    for (int chunk = 0; chunk < config::row_chunks; chunk += sum_channels / chunk_channels)
        multiply<config>(sums, keys, weights, chunk, params);
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

/* Waits for panel `index` of the weights, and starts the copies of the one after it. */
template <typename config>
__device__ static void turn_panel(char *next, const score_params &params, int round, int index,
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

template <typename config>
__global__ void __launch_bounds__(32 * config::most_warps, 1)
    score_keys(const __grid_constant__ score_params params) {
    extern __shared__ uint4 memory[];
    const int step_bytes = config::heads * config::row_bytes;
    const int panel_bytes = params.parts * params.panel_steps * step_bytes;
    const int block_tiles = params.key_warps * gridDim.x;
    const int rounds = (params.key_tiles + block_tiles - 1) / block_tiles * params.head_blocks;
    char *panel = (char *)memory, *other = panel + (params.is_resident ? 0 : panel_bytes);
    key_ring<config> ring;
    ring.slots = other + panel_bytes + threadIdx.x / 32 * params.stages * config::slot_bytes;
    enter_round(ring, params, 0);
    griddepcontrol_wait(); // for the weights
    griddepcontrol_launch_dependents();
    copy_panel<config>(panel, params, 0, 0);
    if (has_keys(params))
        fill_ring(ring, params);
    else
        cp_async_commit_group();
    for (int round = 0; round < rounds; round++) {
        const key_tile tile = find_tile(params, round);
        const int head = round % params.head_blocks * config::heads;
        float sums[config::head_tiles][4] = {};
        score_facts<config> facts;
        load_facts(facts, params, tile, head);
        for (int index = 0; index < params.panels; index++) {
            if (!params.is_resident || round == 0)
                turn_panel<config>(other, params, round, index, rounds);
            for (int step = 0; has_keys(params) && step < params.panel_steps; step++)
                take_step(sums, ring, shared_address(panel) + step * step_bytes, params, rounds);
            char *const last = panel;
            panel = other;
            other = last;
        }
        if (tile.is_there)
            write_scores(sums, params, tile, head, facts);
    }
}

static score_params plan_score(const fdma_problem *problem, fdma_arena *arena) {
    const fdma_tensor *const v = &problem->v, *const dt_proj = &problem->dt_proj;
    score_params params = {};
    params.v = v->data;
    params.dt_proj = dt_proj->data;
    params.a = problem->a.data;
    params.v_batch = v->stride[0];
    params.v_row = v->stride[1];
    params.v_head = v->stride[2];
    params.dt_row = dt_proj->stride[0];
    params.key_valid = (const uint8_t *)problem->key_valid.data;
    params.valid_batch = problem->key_valid.stride[0];
    params.score = (float *)problem->score.data;
    params.bias = (float *)problem->bias.data;
    params.score_batch = problem->score.stride[0];
    params.score_head = problem->score.stride[1];
    params.bias_batch = problem->bias.stride[0];
    params.bias_head = problem->bias.stride[1];
    params.batch = problem->batch;
    params.kv_len = problem->kv_len;
    params.kv_heads = (int32_t)problem->kv_heads;
    params.head_dim = (int32_t)problem->head_dim;
    params.channels = params.kv_heads * params.head_dim;
    params.bias_form = problem->bias_form;
    params.wide_dt_proj = dt_proj->dtype == FDMA_FLOAT32;
    params.wide_a = problem->a.dtype == FDMA_FLOAT32;
    params.is_aligned = is_aligned(v->data, v->stride[0] | v->stride[1] | v->stride[2]);
    params.parts = params.wide_dt_proj ? 3 : 1;
    params.weights = dt_proj->data;
    params.weight_row = params.dt_row;
    params.weight_part = (int64_t)params.kv_heads * params.channels;
    // taken in any case: whether it is needed shows only where there is data
    void *const arranged =
        fdma_arena_take(arena, (size_t)(params.parts * params.weight_part) * sizeof(uint16_t));
    if (params.wide_dt_proj || !is_aligned(dt_proj->data, params.dt_row)) {
        params.weight_row = params.channels;
        params.weights = arranged;
    }
    if (params.wide_dt_proj && problem->dtype == FDMA_FLOAT16)
        params.scales =
            (float *)fdma_arena_take(arena, (size_t)params.kv_heads * sizeof *params.scales);
    return params;
}

static size_t workspace(const fdma_problem *problem) {
    fdma_arena arena = {};
    plan_score(problem, &arena);
    return fdma_arena_size(&arena);
}

template <typename config> static int count_panel_bytes(const score_params &params, int steps) {
    return params.parts * steps * config::heads * config::row_bytes;
}

/* Gives a third of shared memory to all weights, if that is enough, or else to two panels what
 * leaves most slots to the rings. A panel must not arrive later than the keys that want it, so a
 * ring runs ahead by one at most. False: the rings of so many warps do not fit. */
template <typename config> static bool plan_shared(score_params *params, int shared) {
    enum { most_stages = 8, most_panel_steps = 8 };
    const int steps = (params->channels + config::step_channels - 1) / config::step_channels;
    const int slots_bytes = params->key_warps * config::slot_bytes;
    params->is_resident = params->head_blocks == 1 && steps < shared / config::row_bytes &&
                          count_panel_bytes<config>(*params, steps) <= shared / 3;
    params->stages = 0;
    if (params->is_resident) {
        const int fit = (shared - count_panel_bytes<config>(*params, steps)) / slots_bytes;
        params->panels = 1;
        params->panel_steps = steps;
        params->stages = fit < most_stages ? fit : most_stages;
    }
    for (int most = most_panel_steps; !params->is_resident && most > 0; most /= 2) {
        const int panels = (steps + most - 1) / most, panel_steps = (steps + panels - 1) / panels;
        const int fit =
            (shared - 2 * count_panel_bytes<config>(*params, panel_steps)) / slots_bytes;
        const int stages = fit < panel_steps + 1 ? fit : panel_steps + 1;
        if (stages <= params->stages)
            continue;
        params->panels = panels;
        params->panel_steps = panel_steps;
        params->stages = stages < most_stages ? stages : most_stages;
    }
    return params->stages >= 2;
}

/* Blocks of as many warps as keep every multiprocessor as busy as the busiest. */
template <typename config>
static fdma_status launch_score(const fdma_problem *problem, score_params params) {
    const cuda_device *const facts = fdma_cuda_device(problem->exec.device);
    const bool is_arranged = params.weights != params.dt_proj;
    params.sequence_tiles = (int32_t)((params.kv_len + mma_keys - 1) / mma_keys);
    params.key_tiles = (int32_t)params.batch * params.sequence_tiles;
    params.head_blocks = (params.kv_heads + config::heads - 1) / config::heads;
    const int each = (params.key_tiles + facts->multiprocessors - 1) / facts->multiprocessors;
    const int turns = (each + config::most_warps - 1) / config::most_warps;
    params.key_warps = (each + turns - 1) / turns;
    while (!plan_shared<config>(&params, facts->shared_bytes))
        params.key_warps /= 2;
    const int warps = params.is_resident ? params.key_warps : config::most_warps;
    const int blocks = (params.key_tiles + params.key_warps - 1) / params.key_warps;
    const int panel_bytes = count_panel_bytes<config>(params, params.panel_steps);
    launch_shape score;
    score.grid =
        dim3((unsigned)(blocks < facts->multiprocessors ? blocks : facts->multiprocessors));
    score.block = dim3(32 * (unsigned)warps);
    score.shared_bytes = (size_t)(params.is_resident ? 1 : 2) * panel_bytes +
                         (size_t)params.key_warps * params.stages * config::slot_bytes;
    score.after_dependency = is_arranged;
    if (is_arranged)
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
    score_params params = plan_score(problem, arena);
    params.a = NULL;
    params.key_valid = NULL;
    params.bias = NULL;
    params.score_head = params.kv_len;
    params.score_batch = params.kv_heads * params.score_head;
    params.score = (float *)fdma_arena_take(arena, (size_t)(params.batch * params.score_batch) *
                                                       sizeof(float));
    return params;
}

static fdma_status run(const fdma_problem *problem) {
    fdma_arena arena = fdma_arena_of(problem);
    return fdma_cuda_run_products(problem, plan_score(problem, &arena));
}

static const char *refuses(const fdma_problem *problem) {
    enum { most_tiles = 1 << 30, most_channels = 1 << 24 };
    if (problem->dtype != FDMA_FLOAT16 && problem->dtype != FDMA_BFLOAT16)
        return "float32 tensors on CUDA: cast v to bfloat16 or float16";
    if (problem->score.dtype == FDMA_FLOAT64 || problem->bias.dtype == FDMA_FLOAT64)
        return "float64 tensors, supported: float32 scores";
    if (problem->batch * (problem->kv_len / mma_keys + 1) > most_tiles ||
        problem->kv_heads * problem->head_dim > most_channels)
        return "more than 2^30 tiles of 16 keys or 2^24 channels a key";
    return fdma_refuses_before_sm80(problem);
}

static const fdma_kernel rows[] = {
    {"cuda/sm80", operation_score, fdma_missing_sm80, refuses, workspace, run, true},
};

extern "C" const kernel_table fdma_cuda_sm80_score = {rows, sizeof rows / sizeof rows[0]};
