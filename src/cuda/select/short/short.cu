/* The selection of a fused call of short sequences, on any device from compute capability 8.0. One
 * thread block takes a segment, and also writes the records and lists that forward works from,
 * which saves a launch between the scores and attention. select.cuh names the steps.
 *
 * A block counts exactly the keys that outrank a key when it arrives. Keys of earlier position
 * partitions are counted by rank, from a table and by the lanes of its rank partition. Keys of its
 * own position partition are counted by the lanes of a warp. So no thresholds are needed. */
extern "C" {
#include "core/streams.h"
}
#include "cuda/plan/host.cuh"
#include "cuda/select/rules.cuh"
#include "cuda/select/short/kept.cuh"
#include "cuda/select/short/lists.cuh"

#include <assert.h>

/* The biases of the keys by position, as exponents of 2. Loaded long before they are written, to
 * hide the latency. */
template <class config>
__device__ static void load_bias(const number_view<const float> &view, uint32_t segment,
                                 const select_call &call, float (&bias)[config::items]) {
    const float *const from =
        view.data == NULL ? NULL : view.at(segment / call.kv_heads, segment % call.kv_heads);
#pragma unroll
    for (int r = 0; r < config::items; r++) {
        const uint32_t j = own_index<config>(r);
        bias[r] = from != NULL && j < call.kv_len ? log2_e * from[j] : 0;
    }
}

template <class config>
static __global__ void __launch_bounds__(config::threads, 1)
    select_short(const select_call call, const forward_plan plan,
                 const number_view<const float> bias_view) {
    short_memory<config> &shared = shared_memory<short_memory<config>>();
    const list_target to = target_of(plan, call.window + call.recent);
    uint32_t position[config::items];
    float bias[config::items];
    griddepcontrol_wait(); // for the scores and the sinks
    griddepcontrol_launch_dependents();
    const select_segment segment = segment_of(call, blockIdx.x);
    sort_keys(shared, call, segment, position);
    count_earlier(shared, position);
    const kept_flags kept = index_kept(shared, call.window);
    load_bias<config>(bias_view, blockIdx.x, call, bias);
    clear_live(shared, to);
    match_evictions(shared, call, position, kept.total);
    const uint32_t total = call.recent > 0 ? move_expiries(shared, call, kept) : kept.total;
    follow_slots(shared, total);
    write_keys(shared, segment, to, bias);
    write_lists(shared, to);
}

/* ---- the kernel of the table ---- */

template <int keys>
static fdma_status run_with(const fdma_problem *problem, const select_call &call,
                            const forward_plan &plan) {
    using config = short_config<keys>;
    // not early: beside the blocks of score, several blocks would share a multiprocessor
    const launch_shape shape = {dim3((unsigned)(problem->batch * problem->kv_heads)),
                                dim3(config::threads), sizeof(short_memory<config>), start_after};
    return launch("select", select_short<config>, shape, problem, call, plan,
                  numbers_of<const float>(&problem->fused.forward->bias));
}

/* A configuration of a block that holds a segment. */
static const struct short_choice {
    int64_t keys, entries;
    size_t shared_bytes;
    fdma_status (*run)(const fdma_problem *problem, const select_call &call,
                       const forward_plan &plan);
} choices[] = {
    {1024, short_config<1024>::entries, sizeof(short_memory<short_config<1024>>), run_with<1024>},
    {2048, short_config<2048>::entries, sizeof(short_memory<short_config<2048>>), run_with<2048>},
    {4096, short_config<4096>::entries, sizeof(short_memory<short_config<4096>>), run_with<4096>},
};

/* The smallest block that holds the segment; kv_len is at most most_short_keys. */
static const short_choice *choose(const fdma_problem *problem) {
    const short_choice *choice = choices;
    while (choice->keys < problem->kv_len)
        choice++;
    return choice;
}

static const char *refuses_call(const fdma_problem *problem) {
    const fdma_problem *const forward = problem->fused.forward;
    if (forward == NULL)
        return "a selection by itself";
    if (problem->scope != FDMA_SCOPE_CAUSAL || is_present(&problem->starts) || problem->gap > 0)
        return "global scope, packed sequences or a gap";
    if (is_present(&problem->kv_used) || has_table(problem) || problem->carried_len > 0)
        return "kv_used, tables or carried keys";
    if (problem->kv_len > most_short_keys || forward->q_len > problem->kv_len)
        return "more than 4096 keys, or fewer keys than queries";
    return problem->slots >= problem->kv_len ? "no more keys than slots" : NULL;
}

static const char *refuses(const fdma_problem *problem) {
    const char *refused = refuses_scores(problem, fdma_refuses_before_sm80(problem));
    if (refused == NULL)
        refused = refuses_call(problem);
    if (refused != NULL)
        return refused;
    const short_choice *const choice = choose(problem);
    const int64_t lists = divide_up(problem->fused.forward->q_len, list_queries);
    if (lists * problem->slots > choice->entries)
        return "a window of so many keys for its queries";
    const cuda_device *const device = fdma_cuda_device(problem->exec.device);
    return choice->shared_bytes > (size_t)device->shared_bytes
               ? "a device with less shared memory per block than this kernel needs"
               : NULL;
}

/* The plan comes first, where forward expects it. */
struct short_space {
    forward_plan plan;
    rules_space rules;
};

static short_space lay_out(const fdma_problem *problem, fdma_arena *arena) {
    short_space space = {};
    space.plan = fdma_cuda_plan_forward(problem->fused.forward, arena);
    space.rules = fdma_cuda_lay_out_rules(problem, arena);
    return space;
}

static fdma_status run(const fdma_problem *problem) {
    fdma_arena arena = fdma_arena_of(problem);
    const short_space space = lay_out(problem, &arena);
    assert(space.plan.block_queries == list_queries);
    select_call call = describe_select(problem, {}, NULL);
    call.slot = numbers_of<int32_t>(&problem->slot); // also with recent keys
    if (problem->batch == 0 || problem->kv_len == 0)
        return FDMA_OK;
    FDMA_TRY(fdma_cuda_find_sinks(problem, space.rules, &call));
    return choose(problem)->run(problem, call, space.plan);
}

FDMA_CUDA_TABLE(fdma_cuda_sm80_short,
                {"cuda/sm80/short", operation_select, fdma_missing_sm80, refuses,
                 workspace_of<lay_out>, run, true, trait_writes_plan});
