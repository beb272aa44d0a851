/* test_cuda_calls.c - calls on a CUDA device: refused arguments, graphs, fused gradients against
 * their steps, corrupt selections, and tensors with elements further apart than an int32 counts. */
#include "device.h"
#include "errors.h"

static void make_here(call *x, fdma_operation operation, fdma_dtype dtype) {
    static const call_sizes n = {
        .batch = 2, .q_len = 300, .kv_len = 700, .q_heads = 8, .kv_heads = 2, .head_dim = 64};
    uint64_t state = 9;
    *x = (call){.operation = operation};
    if (operation == operation_forward)
        x->args.forward = (fdma_forward_args){.causal = 1};
    if (operation == operation_attention)
        x->args.attention = (fdma_attention_args){.window = 50, .causal = 1};
    if (operation == operation_backward)
        x->args.backward = (fdma_backward_args){.causal = 1, .deterministic = 1};
    if (operation == operation_score_backward)
        x->args.score_backward = (fdma_score_backward_args){.bias_form = FDMA_BIAS_LINEAR};
    if (operation == operation_attention_backward)
        x->args.attention_backward = (fdma_attention_backward_args){
            .bias_form = FDMA_BIAS_LINEAR, .causal = 1, .deterministic = 1};
    call_make(x, &n, dtype, true);
    *call_tensor_named(x, "key_valid") = (fdma_tensor){0};
    call_alloc(x, &state);
    if (operations[operation].selection != 0 && operation != operation_attention)
        call_select(x, 50, FDMA_SCOPE_CAUSAL, &state);
}

static void make_there(call *there, fdma_operation operation, fdma_dtype dtype) {
    call here;
    make_here(&here, operation, dtype);
    device_copy_call(there, &here);
    CHECK_OK(device_give_workspace(there));
    CHECK(call_exec(there)->workspace_size > 0);
}

static fdma_status run(call *there) { return operations[there->operation].call(&there->args); }

/* ---- refused calls ---- */

static void check_refused(call *there, const expectation *want) {
    check_status(run(there), want);
    device_check_outputs_unwritten(there);
}

static const struct {
    fdma_operation operation;
    const char *names[9];
} pointers[] = {
    {operation_forward, {"q", "k", "v", "bias", "out", "lse", "expiry", "slot", "workspace"}},
    {operation_attention_backward, {"dout", "dlse", "out", "lse", "q", "k", "v", "dt_proj"}},
};

enum { elsewhere = 1 << 22 }; /* bytes; all of these tensors are smaller */

/* Replaces each pointer of a call in turn by `there`. The message must say whose memory that is. */
static void check_elsewhere(void *there, const char *whose) {
    for (int i = 0; i < TEST_COUNT(pointers) * TEST_COUNT(pointers[0].names); i++) {
        const fdma_operation operation = pointers[i / TEST_COUNT(pointers[0].names)].operation;
        const char *const name =
            pointers[i / TEST_COUNT(pointers[0].names)].names[i % TEST_COUNT(pointers[0].names)];
        const expectation want = {FDMA_INVALID_ARGUMENT, {name, whose}, 1};
        call x;
        if (name == NULL)
            continue;
        test_context("%s: %s", operations[operation].name, name);
        make_there(&x, operation, FDMA_BFLOAT16);
        fdma_tensor *const tensor = call_tensor_named(&x, name);
        void **const pointer = tensor != NULL ? &tensor->data : &call_exec(&x)->workspace;
        void *const own = *pointer;
        *pointer = there;
        check_status(run(&x), &want);
        *pointer = own;
        device_check_outputs_unwritten(&x);
        device_free_both();
    }
}

static void memory_of_the_cpu_is_refused(void) {
    unsigned char *const there = malloc(elsewhere);
    memset(there, test_guard_byte, elsewhere);
    check_elsewhere(there, "CPU");
    for (int at = 0; at < elsewhere && CHECK_INT(there[at], test_guard_byte); at++) {
    }
    free(there);
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
    check_elsewhere(there, "device 2");
    device_must(cudaFree(there), "cudaFree");
}

static void devices_and_kernels_elsewhere_are_refused(void) {
    static const expectation no_device = {
        FDMA_INVALID_ARGUMENT, {"exec.device", "the last here"}, 0};
    static const expectation no_kernel = {FDMA_UNSUPPORTED, {"exec.kernel", "cpu"}, 0};
    call x;
    make_there(&x, operation_forward, FDMA_BFLOAT16);
    call_exec(&x)->device = fdma_device_count();
    check_refused(&x, &no_device);
    call_exec(&x)->device = INT32_MAX;
    check_refused(&x, &no_device);
    call_exec(&x)->device = device_number;
    call_exec(&x)->kernel = "cpu";
    check_refused(&x, &no_kernel);
    device_free_both();
}

static void small_workspaces_are_refused(void) {
    for (int i = 0; i < TEST_COUNT(pointers); i++) {
        call x;
        char bytes[32];
        make_there(&x, pointers[i].operation, FDMA_BFLOAT16);
        snprintf(bytes, sizeof bytes, "want %zu", call_exec(&x)->workspace_size);
        const expectation want = {FDMA_WORKSPACE_TOO_SMALL, {"workspace_size", bytes}, 1};
        call_exec(&x)->workspace_size--;
        check_refused(&x, &want);
        device_free_both();
    }
}

static void gradients_without_slots_are_refused(void) {
    static const expectation want = {FDMA_UNSUPPORTED, {"slots"}, 0};
    call x;
    make_there(&x, operation_attention_backward, FDMA_BFLOAT16);
    x.selection.slot = (fdma_tensor){0};
    check_refused(&x, &want);
    device_free_both();
}

/* float64 is always refused. float32 is refused if no kernel takes it, as for gradients; then the
 * message says what to cast to. */
static void types_without_a_kernel_are_refused(void) {
    static const fdma_operation asked[] = {operation_forward, operation_backward};
    static const fdma_dtype types[] = {FDMA_FLOAT32, FDMA_FLOAT64};
    for (int i = 0; i < TEST_COUNT(asked) * TEST_COUNT(types); i++) {
        const fdma_operation operation = asked[i / TEST_COUNT(types)];
        const fdma_dtype dtype = types[i % TEST_COUNT(types)];
        size_t bytes = 99;
        call x;
        test_context("%s %s", operations[operation].name, dtype_name(dtype));
        make_here(&x, operation, dtype);
        call_exec(&x)->device = device_number;
        const fdma_status status = operations[operation].workspace(&x.args, &bytes);
        CHECK(status == FDMA_UNSUPPORTED ||
              (status == FDMA_OK && dtype == FDMA_FLOAT32 && operation == operation_forward));
        if (status == FDMA_UNSUPPORTED) {
            CHECK(bytes == 99);
            CHECK_WORD(fdma_last_error(), "float16");
            CHECK_WORD(fdma_last_error(), "bfloat16");
        }
        test_free_all();
    }
}

/* After all refused calls, and beside calls on the device. */
static void the_cpu_works_on(void) {
    const problem x = device_small_problem(FDMA_FLOAT32);
    call there;
    make_there(&there, operation_forward, FDMA_BFLOAT16);
    CHECK_OK(run(&there));
    const attended on_cpu = problem_attend(&x, "cpu", 1);
    check_close_results(&x, on_cpu, problem_attend(&x, "reference", 1));
    device_wait();
    device_free_both();
}

/* ---- graphs ---- */

static cudaGraphExec_t capture(call *x, cudaStream_t stream) {
    cudaGraph_t graph;
    cudaGraphExec_t replayed;
    call_exec(x)->stream = stream;
    device_must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "begin capture");
    CHECK_OK(run(x));
    device_must(cudaStreamEndCapture(stream, &graph), "end capture");
    device_must(cudaGraphInstantiate(&replayed, graph, 0), "instantiate");
    device_must(cudaGraphDestroy(graph), "destroy");
    call_exec(x)->stream = NULL;
    return replayed;
}

static void fill_anew(fdma_tensor tensor, uint64_t *state) {
    if (tensor.dtype != FDMA_UINT8)
        fill_random(tensor, state, 2);
    for (int64_t i = 0; tensor.dtype == FDMA_UINT8 && i < count_of(tensor); i++)
        ((uint8_t *)tensor.data)[i] = random_below(state, 3) > 0;
}

/* Captures a call once and replays it after other numbers are written to a tensor. */
static void check_replays(call *x, const char *changed) {
    uint64_t state = 31;
    cudaStream_t stream;
    call want, found;
    CHECK_OK(run(x));
    device_wait();
    device_must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "a stream");
    const cudaGraphExec_t replayed = capture(x, stream);
    for (int round = 0; round < 3; round++) {
        const fdma_tensor on_device = *call_tensor_named(x, changed);
        const fdma_tensor numbers = device_read(on_device);
        test_context("%s, round %d", operations[x->operation].name, round);
        fill_anew(numbers, &state);
        device_write(on_device, numbers);
        device_clear_outputs(x);
        CHECK_OK(run(x));
        device_fetch(&want, x);
        device_clear_outputs(x);
        // results of the direct call in the workspace must not serve the graph
        if (call_exec(x)->workspace_size > 0)
            device_must(cudaMemset(call_exec(x)->workspace, 0xff, call_exec(x)->workspace_size),
                        "cudaMemset");
        device_wait();
        device_must(cudaGraphLaunch(replayed, stream), "a replay");
        device_fetch(&found, x);
        check_same_outputs(&found, &want);
    }
    device_must(cudaGraphExecDestroy(replayed), "destroy");
    device_must(cudaStreamDestroy(stream), "destroy");
    device_free_both();
}

static void graphs_replay_whole_calls(void) {
    static const struct {
        fdma_operation operation;
        const char *changed;
    } cases[] = {{operation_attention, "q"},
                 {operation_attention, "v"},
                 {operation_attention_backward, "dout"}};
    for (int i = 0; i < TEST_COUNT(cases); i++) {
        call x;
        make_there(&x, cases[i].operation, FDMA_BFLOAT16);
        call_exec(&x)->trusted = i % 2;
        check_replays(&x, cases[i].changed);
    }
}

/* Padding decides where sinks end and which keys are the newest, and all that happens on the
 * device. */
static void graphs_replay_selections(void) {
    static const call_sizes n = {.batch = 3, .kv_len = 20000, .kv_heads = 2};
    static const char *const kernels[] = {NULL, "cuda/sm80"};
    for (int kernel = 0; kernel < TEST_COUNT(kernels); kernel++) {
        uint64_t state = 33;
        call here = {.operation = operation_select,
                     .args.select = {.window = 500, .recent = 200, .sinks = 30}};
        call there;
        here.args.select.exec.kernel = kernels[kernel];
        call_make(&here, &n, FDMA_FLOAT32, true);
        call_alloc(&here, &state);
        fill_anew(here.args.select.key_valid, &state);
        device_copy_call(&there, &here);
        CHECK_OK(device_give_workspace(&there));
        check_replays(&there, "key_valid");
    }
}

/* Two requests are of lengths that decode takes. The graph keeps the lists. */
static void graphs_replay_prefills(void) {
    enum { rows = 40, tokens = 150 };
    static const call_sizes n = {.q_len = tokens,
                                 .kv_len = rows + tokens,
                                 .carried = rows,
                                 .sequences = 3,
                                 .q_heads = 8,
                                 .kv_heads = 2,
                                 .head_dim = 64};
    int32_t starts[] = {0, 90, 91, tokens}, index[] = {2, 0, 1};
    for (int scored = 0; scored < 2; scored++) {
        uint64_t state = 35;
        call there, here = {.operation = operation_prefill};
        fdma_prefill_args *const args = &here.args.prefill;
        args->cache = (fdma_cache){
            .sequences = 3, .kv_heads = 2, .head_dim = 64, .window = rows, .dtype = FDMA_BFLOAT16};
        args->starts = starts, args->index = index, args->requests = 3;
        call_make(&here, &n, FDMA_BFLOAT16, true);
        if (scored)
            args->dt_proj = args->a = args->dt_bias = (fdma_tensor){0};
        else
            args->score = (fdma_tensor){0};
        call_alloc(&here, &state);
        device_copy_call(&there, &here);
        CHECK_OK(device_give_workspace(&there));
        check_replays(&there, "q");
    }
}

/* ---- the fused call is its steps ---- */

static void check_steps(fdma_dtype dtype) {
    call fused, backward, score;
    test_context("%s", dtype_name(dtype));
    make_here(&fused, operation_attention_backward, dtype);
    make_here(&backward, operation_backward, dtype);
    make_here(&score, operation_score_backward, dtype);
    fdma_attention_backward_args *const want = &fused.args.attention_backward;
    fdma_backward_args *const first = &backward.args.backward;
    fdma_score_backward_args *const second = &score.args.score_backward;
    call_take_inputs(&backward, &fused);
    call_take_inputs(&score, &fused);
    second->dbias = first->dbias;
    second->dv = first->dv;
    CHECK_OK(device_run(fused.operation, want));
    CHECK_OK(device_run(backward.operation, first));
    CHECK_OK(device_run(score.operation, second));
    CHECK(same_tensor(first->dq, want->dq) && same_tensor(first->dk, want->dk));
    CHECK(same_tensor(second->dv, want->dv) && same_tensor(second->da, want->da));
    CHECK(same_tensor(second->ddt_proj, want->ddt_proj));
}

static void the_fused_call_is_its_steps(void) {
    for (int type = first_dtype(); type < test_dtype_count; type++) {
        check_steps(test_dtypes[type]);
        test_free_all();
    }
}

/* ---- corrupt selections ---- */

/* No fault, no write outside (the guards check that), and no harm to later calls. */
static void corrupt_selections_stay_inside(const char *kernel, fdma_dtype dtype) {
    const problem x = device_small_problem(dtype);
    problem wrong = x;
    uint64_t state = 77;
    if (!problem_is_taken(&x, kernel))
        return;
    const attended want = problem_attend(&x, kernel, 1);
    for (int i = 0; i < corruption_count * (corruption_count + 1); i++) {
        test_context("%s %s, expiry %d, slot %d", kernel, dtype_name(dtype), i / corruption_count,
                     i % corruption_count);
        wrong.selection.expiry = copy_tensor(x.selection.expiry);
        wrong.selection.slot = copy_tensor(x.selection.slot);
        if (i / corruption_count < corruption_count) /* else expiry is right */
            corrupt(wrong.selection.expiry, (corruption)(i / corruption_count), &state);
        corrupt(wrong.selection.slot, (corruption)(i % corruption_count), &state);
        problem_attend(&wrong, kernel, 1);
    }
    check_same_results(problem_attend(&x, kernel, 1), want);
}

/* ---- elements further apart than an int32 counts ---- */

enum { far_rows = 70 };
static const int64_t far_stride = ((int64_t)1 << 31) / 64 + 1024; /* elements between two rows */

static void copy_rows(fdma_tensor to, fdma_tensor from) {
    const size_t size = dtype_size(to.dtype);
    device_must(cudaMemcpy2D(to.data, (size_t)to.stride[1] * size, from.data,
                             (size_t)from.stride[1] * size,
                             (size_t)(to.shape[2] * to.shape[3]) * size, (size_t)to.shape[1],
                             cudaMemcpyDeviceToDevice),
                "cudaMemcpy2D");
}

/* Runs a call whose tensors of these names have rows far apart, in `memory`. */
static void check_far(const call *here, const char *const *names, int count, char *memory) {
    call near, far, want, found;
    size_t offset = 0;
    device_copy_call(&near, here);
    CHECK_OK(device_run_call(&near));
    device_fetch(&want, &near);
    device_clear_outputs(&near);
    call_copy(&far, &near);
    for (int n = 0; n < count; n++) {
        fdma_tensor *const tensor = call_tensor_named(&far, names[n]);
        tensor->data = memory + offset;
        offset += (size_t)tensor->stride[1] * dtype_size(tensor->dtype);
        tensor->stride[1] = far_stride;
        copy_rows(*tensor, *call_tensor_named(&near, names[n]));
    }
    CHECK_OK(device_run_call(&far));
    for (int n = 0; n < count; n++)
        copy_rows(*call_tensor_named(&near, names[n]), *call_tensor_named(&far, names[n]));
    device_fetch(&found, &near);
    check_same_outputs(&found, &want);
    device_free_all();
}

static char *far_memory;

static void check_far_forward(const char *kernel, fdma_dtype dtype) {
    static const char *const names[] = {"q", "k", "v", "out"};
    for (int window = -1; window < 60 && dtype == FDMA_BFLOAT16; window += 20) {
        problem x = SIZES(1, far_rows, far_rows, 4, 2, 64, window, 1);
        x.dtype = dtype;
        problem_fill(&x, 8);
        problem_select(&x);
        const fdma_forward_args args = problem_args(&x, kernel);
        call here;
        test_context("%s, window %d", kernel, window);
        call_of(&here, operation_forward, &args);
        if (problem_is_taken(&x, kernel))
            check_far(&here, names, TEST_COUNT(names), far_memory);
    }
}

static void check_far_score(const char *kernel, fdma_dtype dtype) {
    static const char *const names[] = {"v"};
    static const call_sizes n = {.batch = 1, .kv_len = far_rows, .kv_heads = 2, .head_dim = 64};
    uint64_t state = 4;
    call here = {.operation = operation_score, .args.score = {.exec = {.kernel = kernel}}};
    call_make(&here, &n, dtype, true);
    call_alloc(&here, &state);
    check_far(&here, names, TEST_COUNT(names), far_memory);
}

static void rows_far_apart(void) {
    far_memory = device_large((size_t)far_stride * far_rows * 2);
    if (far_memory != NULL) {
        for_each_kernel("forward", check_far_forward);
        for_each_kernel("score", check_far_score);
    }
    cudaFree(far_memory);
}

static const test_entry tests[] = {
    TEST(memory_of_the_cpu_is_refused),
    TEST(memory_of_another_device_is_refused),
    TEST(devices_and_kernels_elsewhere_are_refused),
    TEST(small_workspaces_are_refused),
    TEST(gradients_without_slots_are_refused),
    TEST(types_without_a_kernel_are_refused),
    TEST(the_cpu_works_on),
    TEST(graphs_replay_whole_calls),
    TEST(graphs_replay_selections),
    TEST(graphs_replay_prefills),
    TEST(the_fused_call_is_its_steps),
    EACH_KERNEL("forward", corrupt_selections_stay_inside),
    TEST(rows_far_apart),
};

int main(void) { return device_test_run(tests, TEST_COUNT(tests)); }
