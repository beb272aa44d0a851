/* test_cuda_calls.c - calls on a CUDA device: what they refuse, graphs, corrupt selections, and
 * tensors with elements further apart than an int32 counts. */
#include "device.h"
#include "errors.h"

/* ---- what is refused ---- */

/* A forward call on the device, whole. */
typedef struct forward_call {
    problem on_device;
    fdma_forward_args args;
} forward_call;

static forward_call new_call(void) {
    const problem x = device_small_problem(FDMA_BFLOAT16);
    forward_call call = {.on_device = device_problem(&x)};
    call.args = device_args(&call.on_device, NULL);
    call.args.selection = NULL; /* of a copy that is gone when this returns */
    return call;
}

static fdma_status attend(forward_call *call) {
    call->args.selection = &call->on_device.selection;
    return fdma_forward(&call->args);
}

static void give_workspace(forward_call *call) {
    size_t bytes = 0;
    call->args.selection = &call->on_device.selection;
    CHECK_OK(fdma_forward_workspace(&call->args, &bytes));
    device_exec(&call->args.exec, bytes);
}

static void check_refused(forward_call *call, const expectation *want) {
    check_status(attend(call), want);
    device_wait();
    device_check_unwritten(call->args.out);
}

/* Where each tensor's address stands in a call. */
static void **address_of(forward_call *call, int which) {
    void **const addresses[] = {
        &call->args.q.data,
        &call->args.k.data,
        &call->args.v.data,
        &call->args.bias.data,
        &call->args.out.data,
        &call->args.lse.data,
        &call->on_device.selection.expiry.data,
        &call->on_device.selection.slot.data,
        &call->args.exec.workspace,
    };
    return addresses[which];
}

static const char *const address_names[] = {"q",   "k",      "v",    "bias",     "out",
                                            "lse", "expiry", "slot", "workspace"};

enum { elsewhere = 1 << 22 }; /* bytes: more than any of these tensors has */

static void check_elsewhere(void *there, int which, const expectation *want) {
    forward_call call = new_call();
    test_context("%s", address_names[which]);
    give_workspace(&call);
    void *const own = *address_of(&call, which);
    *address_of(&call, which) = there;
    check_status(attend(&call), want);
    *address_of(&call, which) = own;
    device_wait();
    device_check_unwritten(call.args.out);
    device_free_both();
}

static void memory_of_the_cpu_is_refused(void) {
    for (int which = 0; which < TEST_COUNT(address_names); which++) {
        const expectation want = {FDMA_INVALID_ARGUMENT, {address_names[which], "CPU"}, 1};
        unsigned char *const there = malloc(elsewhere);
        memset(there, test_guard_byte, elsewhere);
        check_elsewhere(there, which, &want);
        for (int at = 0; at < elsewhere && CHECK_INT(there[at], test_guard_byte); at++) {
        }
        free(there);
    }
}

static void memory_of_another_device_is_refused(void) {
    int count = 0;
    void *there = NULL;
    device_must(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
    if (!CHECK(count >= 1) || count == 1) {
        printf("skipped memory_of_another_device_is_refused: one device\n");
        return;
    }
    device_must(cudaSetDevice(1), "cudaSetDevice");
    device_must(cudaMalloc(&there, elsewhere), "cudaMalloc");
    device_must(cudaSetDevice(0), "cudaSetDevice");
    for (int which = 0; which < TEST_COUNT(address_names); which++) {
        const expectation want = {FDMA_INVALID_ARGUMENT, {address_names[which], "device 2"}, 1};
        check_elsewhere(there, which, &want);
    }
    device_must(cudaFree(there), "cudaFree");
}

static void devices_that_are_not_there_are_refused(void) {
    const expectation want = {FDMA_INVALID_ARGUMENT, {"exec.device", "the last here is"}, 0};
    forward_call call = new_call();
    give_workspace(&call);
    call.args.exec.device = fdma_device_count();
    check_refused(&call, &want);
    call.args.exec.device = INT32_MAX;
    check_refused(&call, &want);
    device_free_both();
}

static void kernels_of_the_cpu_are_refused(void) {
    const expectation want = {FDMA_UNSUPPORTED, {"exec.kernel", "cpu"}, 0};
    forward_call call = new_call();
    give_workspace(&call);
    call.args.exec.kernel = "cpu";
    check_refused(&call, &want);
    device_free_both();
}

static void small_workspaces_are_refused(void) {
    forward_call call = new_call();
    give_workspace(&call);
    char bytes[32];
    snprintf(bytes, sizeof bytes, "want %zu", call.args.exec.workspace_size);
    const expectation want = {FDMA_WORKSPACE_TOO_SMALL, {"workspace_size", bytes}, 1};
    CHECK(call.args.exec.workspace_size > 0); /* lists */
    call.args.exec.workspace_size--;
    check_refused(&call, &want);
    device_free_both();
}

/* float64 always; float32 where no row takes it, with what to cast to. */
static void types_without_a_kernel_are_refused(void) {
    static const fdma_dtype types[] = {FDMA_FLOAT32, FDMA_FLOAT64};
    const int64_t shape[] = {1, 9, 1, 64};
    for (int type = 0; type < TEST_COUNT(types); type++) {
        const fdma_tensor tensor = fdma_dense_tensor(NULL, types[type], 4, shape);
        const fdma_forward_args args = {.size = sizeof args,
                                        .q = tensor,
                                        .k = tensor,
                                        .v = tensor,
                                        .out = tensor,
                                        .exec = {.device = device_number}};
        size_t bytes;
        const fdma_status status = fdma_forward_workspace(&args, &bytes);
        test_context("%s", dtype_name(types[type]));
        CHECK(status == FDMA_UNSUPPORTED || (status == FDMA_OK && types[type] == FDMA_FLOAT32));
        if (status == FDMA_UNSUPPORTED) {
            CHECK_WORD(fdma_last_error(), "float16");
            CHECK_WORD(fdma_last_error(), "bfloat16");
        }
    }
}

/* After everything that was refused, and beside calls on the device. */
static void the_cpu_works_on(void) {
    const problem x = device_small_problem(FDMA_FLOAT32);
    forward_call call = new_call();
    give_workspace(&call);
    CHECK_OK(attend(&call));
    const attended on_cpu = problem_attend(&x, "cpu", 1);
    check_close_results(&x, on_cpu, problem_attend(&x, "reference", 1));
    device_wait();
    device_free_both();
}

/* ---- one call in a graph ---- */

static fdma_attention_args new_attention(const problem *on_device, fdma_selection *selection) {
    uint64_t state = 9;
    const int64_t heads = on_device->kv_heads;
    const fdma_tensor dt_proj =
        new_tensor(on_device->dtype, heads, heads * on_device->head_dim, -1, -1);
    const fdma_tensor a = new_tensor(FDMA_FLOAT32, heads, -1, -1, -1);
    const fdma_forward_args forward = device_args(on_device, NULL);
    fill_random(dt_proj, &state, 0.2F);
    fill_random(a, &state, 1);
    *selection = on_device->selection;
    selection->expiry = device_output(selection->expiry);
    selection->slot = device_output(selection->slot);
    return (fdma_attention_args){
        .size = sizeof(fdma_attention_args),
        .q = forward.q,
        .k = forward.k,
        .v = forward.v,
        .dt_proj = device_tensor(dt_proj),
        .a = device_tensor(a),
        .out = forward.out,
        .lse = forward.lse,
        .score = device_output(on_device->score),
        .bias = device_output(on_device->bias),
        .selection = selection,
        .window = on_device->window,
        .causal = 1,
    };
}

typedef struct attention_results {
    fdma_tensor tensor[6];
} attention_results;

static attention_results outputs_of(const fdma_attention_args *args) {
    return (attention_results){{args->out, args->lse, args->score, args->bias,
                                args->selection->expiry, args->selection->slot}};
}

static attention_results read_results(const fdma_attention_args *args) {
    attention_results results = outputs_of(args);
    for (int i = 0; i < TEST_COUNT(results.tensor); i++)
        results.tensor[i] = device_read(results.tensor[i]);
    return results;
}

static void clear_results(const fdma_attention_args *args) {
    const attention_results results = outputs_of(args);
    for (int i = 0; i < TEST_COUNT(results.tensor); i++)
        device_clear(results.tensor[i]);
}

/* Captured once, replayed on other numbers. */
static void graphs_replay_a_whole_call(void) {
    const problem x = device_small_problem(FDMA_BFLOAT16), on_device = device_problem(&x);
    fdma_selection selection;
    fdma_attention_args args = new_attention(&on_device, &selection);
    uint64_t state = 31;
    cudaStream_t stream;
    CHECK_OK(device_run_attention(&args));
    device_wait();
    device_must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "a stream");
    device_begin_capture(&args.exec, stream);
    CHECK_OK(fdma_attention(&args));
    const cudaGraphExec_t replayed = device_end_capture(&args.exec);
    for (int round = 0; round < 3; round++) {
        test_context("round %d", round);
        fill_random(x.q, &state, 2);
        fill_random(x.v, &state, 2);
        device_write(on_device.q, x.q);
        device_write(on_device.v, x.v);
        clear_results(&args);
        CHECK_OK(fdma_attention(&args));
        device_wait();
        const attention_results want = read_results(&args);
        clear_results(&args);
        device_wait();
        device_must(cudaGraphLaunch(replayed, stream), "a replay");
        device_wait();
        const attention_results found = read_results(&args);
        for (int i = 0; i < TEST_COUNT(want.tensor); i++)
            CHECK_BYTES(found.tensor[i].data, want.tensor[i].data, bytes_of(want.tensor[i]));
    }
    device_must(cudaGraphExecDestroy(replayed), "destroy");
    device_must(cudaStreamDestroy(stream), "destroy");
    device_free_both();
}

/* ---- corrupt selections ---- */

/* No fault, nothing written outside (the guards say), and no harm to the calls that follow. */
static void check_corrupt(const problem *x, const problem *on_device, const char *kernel) {
    const attended want = device_attend(on_device, kernel);
    uint64_t state = 77;
    const fdma_tensor expiry = copy_tensor(x->selection.expiry);
    const fdma_tensor slot = copy_tensor(x->selection.slot);
    for (int i = 0; i < corruption_count * (corruption_count + 1); i++) {
        test_context("%s %s, expiry %d, slot %d", kernel, dtype_name(x->dtype),
                     i / corruption_count, i % corruption_count);
        memcpy(expiry.data, x->selection.expiry.data, bytes_of(expiry));
        if (i / corruption_count < corruption_count) /* else right */
            corrupt(expiry, (corruption)(i / corruption_count), &state);
        corrupt(slot, (corruption)(i % corruption_count), &state);
        device_write(on_device->selection.expiry, expiry);
        device_write(on_device->selection.slot, slot);
        device_attend(on_device, kernel);
    }
    device_write(on_device->selection.expiry, x->selection.expiry);
    device_write(on_device->selection.slot, x->selection.slot);
    check_same_results(device_attend(on_device, kernel), want);
}

static void corrupt_selections_stay_inside(void) {
    const kernel_list kernels = device_kernels("forward");
    for (int i = 0; i < kernels.count * device_dtype_count; i++) {
        const char *const kernel = kernels.name[i / device_dtype_count];
        const problem x = device_small_problem(device_dtypes[i % device_dtype_count]);
        if (device_takes(&x, kernel)) {
            const problem on_device = device_problem(&x);
            check_corrupt(&x, &on_device, kernel);
        }
        device_free_both();
    }
}

/* ---- elements further apart than an int32 counts ---- */

enum { far_rows = 70, far_heads = 4 };
static const int64_t far_stride = ((int64_t)1 << 31) / 64 + 1024; /* elements between two rows */

/* The rows of a contiguous tensor, far apart, `offset` elements into each. */
static fdma_tensor spread(fdma_tensor near, char *memory, int64_t offset) {
    const size_t size = dtype_size(near.dtype), row = (size_t)near.stride[1] * size;
    fdma_tensor far = near;
    far.data = memory + (size_t)offset * size;
    far.stride[1] = far_stride;
    device_must(cudaMemcpy2D(far.data, (size_t)far_stride * size, near.data, row, row,
                             (size_t)near.shape[1], cudaMemcpyDeviceToDevice),
                "cudaMemcpy2D");
    return far;
}

static void check_far(const problem *near, char *memory, const char *kernel) {
    const int64_t width = near->q_heads * near->head_dim,
                  kv_width = near->kv_heads * near->head_dim;
    const size_t row = (size_t)width * dtype_size(near->dtype);
    const attended want = device_attend(near, kernel);
    problem far = *near;
    far.q = spread(near->q, memory, 0);
    far.k = spread(near->k, memory, width);
    far.v = spread(near->v, memory, width + kv_width);
    fdma_forward_args args = device_args(&far, kernel);
    const fdma_tensor out = args.out;
    args.out = spread(out, memory, width + 2 * kv_width);
    CHECK_OK(device_run_forward(&args));
    device_wait();
    device_must(cudaMemcpy2D(out.data, row, args.out.data,
                             (size_t)far_stride * dtype_size(near->dtype), row, far_rows,
                             cudaMemcpyDeviceToDevice),
                "cudaMemcpy2D");
    const attended found = {device_read(out), device_read(args.lse)};
    check_same_results(found, want);
}

static void check_far_score(const problem *near, char *memory, const char *kernel) {
    uint64_t state = 4;
    const int64_t heads = near->kv_heads;
    const fdma_tensor dt_proj = new_tensor(near->dtype, heads, heads * near->head_dim, -1, -1);
    const fdma_tensor a = new_tensor(FDMA_FLOAT32, heads, -1, -1, -1);
    fill_random(dt_proj, &state, 0.2F);
    fill_random(a, &state, 1);
    fdma_score_args args = {
        .size = sizeof args,
        .v = near->v,
        .dt_proj = device_tensor(dt_proj),
        .a = device_tensor(a),
        .score = device_output(near->score),
        .bias_form = FDMA_BIAS_NONE,
        .exec = {.kernel = kernel},
    };
    const size_t bytes = bytes_of(near->score);
    CHECK_OK(device_run_score(&args));
    const fdma_tensor want = device_read(args.score);
    device_clear(args.score);
    args.v = spread(near->v, memory, 0);
    CHECK_OK(device_run_score(&args));
    CHECK_BYTES(device_read(args.score).data, want.data, bytes);
}

static void rows_far_apart(void) {
    char *const memory = device_large((size_t)far_stride * far_rows * 2);
    const kernel_list forward = device_kernels("forward"), score = device_kernels("score");
    for (int window = -1; window < 60 && memory != NULL; window += 20) {
        problem x = {.batch = 1,
                     .q_len = far_rows,
                     .kv_len = far_rows,
                     .q_heads = far_heads,
                     .kv_heads = 2,
                     .head_dim = 64,
                     .window = window,
                     .scope = FDMA_SCOPE_CAUSAL,
                     .causal = 1,
                     .dtype = FDMA_BFLOAT16};
        problem_fill(&x, 8);
        problem_select(&x);
        const problem near = device_problem(&x);
        for (int kernel = 0; kernel < forward.count; kernel++) {
            test_context("%s, window %d", forward.name[kernel], window);
            if (device_takes(&x, forward.name[kernel]))
                check_far(&near, memory, forward.name[kernel]);
        }
        for (int kernel = 0; kernel < score.count; kernel++) {
            test_context("%s", score.name[kernel]);
            check_far_score(&near, memory, score.name[kernel]);
        }
        device_free_both();
    }
    cudaFree(memory);
}

static const test_entry tests[] = {
    TEST(memory_of_the_cpu_is_refused),
    TEST(memory_of_another_device_is_refused),
    TEST(devices_that_are_not_there_are_refused),
    TEST(kernels_of_the_cpu_are_refused),
    TEST(small_workspaces_are_refused),
    TEST(types_without_a_kernel_are_refused),
    TEST(the_cpu_works_on),
    TEST(graphs_replay_a_whole_call),
    TEST(corrupt_selections_stay_inside),
    TEST(rows_far_apart),
};

int main(void) { return device_test_run(tests, TEST_COUNT(tests)); }
