/* test_cuda_gradient_calls.c - calls of gradients on a CUDA device: what they refuse, the fused
 * call against its steps, and graphs. */
#include "device.h"
#include "errors.h"
#include "gradient.h"

/* A fused call on the device, whole; it must stay where it is made. */
typedef struct whole_call {
    fdma_selection selection;
    fdma_attention_backward_args args;
} whole_call;

static void make_call(whole_call *call, fdma_dtype dtype) {
    const problem x = device_small_problem(dtype);
    const gradient_problem p = gradient_of(&x, 1);
    const int64_t heads = x.kv_heads;
    const fdma_tensor dt_proj = new_tensor(dtype, heads, heads * x.head_dim, -1, -1);
    const fdma_tensor a = new_tensor(FDMA_FLOAT32, heads, -1, -1, -1);
    uint64_t state = 6;
    fill_random(dt_proj, &state, 0.2F);
    fill_random(a, &state, 1);
    call->selection = x.selection;
    call->selection.expiry = device_tensor(x.selection.expiry);
    call->selection.slot = device_tensor(x.selection.slot);
    call->args = (fdma_attention_backward_args){
        .size = sizeof call->args,
        .dout = device_tensor(p.dout),
        .dlse = device_tensor(p.dlse),
        .out = device_tensor(p.out),
        .lse = device_tensor(p.lse),
        .q = device_tensor(x.q),
        .k = device_tensor(x.k),
        .v = device_tensor(x.v),
        .dt_proj = device_tensor(dt_proj),
        .a = device_tensor(a),
        .bias = device_tensor(x.bias),
        .dq = device_output(x.q),
        .dk = device_output(x.k),
        .dv = device_output(x.v),
        .ddt_proj = device_output(dt_proj),
        .da = device_output(a),
        .selection = &call->selection,
        .bias_form = FDMA_BIAS_LINEAR,
        .causal = 1,
        .deterministic = 1,
        .exec = {.device = device_number},
    };
}

enum { output_count = 5 };

static void list_outputs(const fdma_attention_backward_args *args, fdma_tensor to[output_count]) {
    const fdma_tensor all[output_count] = {args->dq, args->dk, args->dv, args->ddt_proj, args->da};
    memcpy(to, all, sizeof all);
}

static void read_outputs(const fdma_attention_backward_args *args, fdma_tensor to[output_count]) {
    device_wait();
    list_outputs(args, to);
    for (int i = 0; i < output_count; i++)
        to[i] = device_read(to[i]);
}

static void clear_outputs(const fdma_attention_backward_args *args) {
    fdma_tensor outputs[output_count];
    list_outputs(args, outputs);
    for (int i = 0; i < output_count; i++)
        device_clear(outputs[i]);
    device_wait();
}

static void give_workspace(fdma_attention_backward_args *args) {
    size_t bytes = 0;
    CHECK_OK(fdma_attention_backward_workspace(args, &bytes));
    device_exec(&args->exec, bytes);
}

/* ---- the fused call is its steps ---- */

static fdma_backward_args backward_step(const fdma_attention_backward_args *whole) {
    return (fdma_backward_args){
        .size = sizeof(fdma_backward_args),
        .dout = whole->dout,
        .dlse = whole->dlse,
        .out = whole->out,
        .lse = whole->lse,
        .q = whole->q,
        .k = whole->k,
        .v = whole->v,
        .bias = whole->bias,
        .dq = device_output(whole->dq),
        .dk = device_output(whole->dk),
        .dv = device_output(whole->dv),
        .dbias = device_output(whole->bias),
        .selection = whole->selection,
        .causal = whole->causal,
        .deterministic = whole->deterministic,
    };
}

static void the_fused_call_is_its_steps(void) {
    for (int type = 0; type < device_dtype_count; type++) {
        test_context("%s", dtype_name(device_dtypes[type]));
        whole_call call;
        fdma_tensor fused[output_count];
        make_call(&call, device_dtypes[type]);
        give_workspace(&call.args);
        CHECK_OK(fdma_attention_backward(&call.args));
        read_outputs(&call.args, fused);
        fdma_backward_args step = backward_step(&call.args);
        CHECK_OK(device_run_backward(&step));
        fdma_score_backward_args score = {
            .size = sizeof score,
            .dbias = step.dbias,
            .v = call.args.v,
            .dt_proj = call.args.dt_proj,
            .a = call.args.a,
            .dv = step.dv,
            .ddt_proj = device_output(call.args.ddt_proj),
            .da = device_output(call.args.da),
            .bias_form = call.args.bias_form,
        };
        CHECK_OK(device_run_score_backward(&score));
        device_wait();
        const fdma_tensor steps[output_count] = {step.dq, step.dk, step.dv, score.ddt_proj,
                                                 score.da};
        for (int i = 0; i < output_count; i++)
            CHECK_BYTES(device_read(steps[i]).data, fused[i].data, bytes_of(fused[i]));
        device_free_both();
    }
}

/* ---- graphs ---- */

/* Captured once, replayed on other numbers. */
static void graphs_replay_gradients(void) {
    whole_call call;
    cudaStream_t stream;
    uint64_t state = 31;
    make_call(&call, FDMA_BFLOAT16);
    give_workspace(&call.args);
    CHECK_OK(fdma_attention_backward(&call.args));
    device_wait();
    device_must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "a stream");
    device_begin_capture(&call.args.exec, stream);
    CHECK_OK(fdma_attention_backward(&call.args));
    const cudaGraphExec_t replayed = device_end_capture(&call.args.exec);
    for (int round = 0; round < 3; round++) {
        fdma_tensor want[output_count], found[output_count];
        const fdma_tensor dout = device_read(call.args.dout);
        test_context("round %d", round);
        fill_random(dout, &state, 1);
        device_write(call.args.dout, dout);
        clear_outputs(&call.args);
        CHECK_OK(fdma_attention_backward(&call.args));
        read_outputs(&call.args, want);
        clear_outputs(&call.args);
        device_must(cudaGraphLaunch(replayed, stream), "a replay");
        read_outputs(&call.args, found);
        for (int i = 0; i < output_count; i++)
            CHECK_BYTES(found[i].data, want[i].data, bytes_of(want[i]));
    }
    device_must(cudaGraphExecDestroy(replayed), "destroy");
    device_must(cudaStreamDestroy(stream), "destroy");
    device_free_both();
}

/* ---- what is refused ---- */

static void check_refused(whole_call *call, const expectation *want) {
    fdma_tensor outputs[output_count];
    check_status(fdma_attention_backward(&call->args), want);
    device_wait();
    list_outputs(&call->args, outputs);
    for (int i = 0; i < output_count; i++)
        device_check_unwritten(outputs[i]);
}

static void memory_of_the_cpu_is_refused(void) {
    static const char *const names[] = {"dout", "dlse", "out", "lse", "q", "k", "v", "dt_proj"};
    for (int i = 0; i < TEST_COUNT(names); i++) {
        whole_call call;
        test_context("%s", names[i]);
        make_call(&call, FDMA_FLOAT16);
        give_workspace(&call.args);
        fdma_tensor *const tensors[] = {&call.args.dout, &call.args.dlse,   &call.args.out,
                                        &call.args.lse,  &call.args.q,      &call.args.k,
                                        &call.args.v,    &call.args.dt_proj};
        *tensors[i] = device_read(*tensors[i]);
        const expectation want = {FDMA_INVALID_ARGUMENT, {names[i]}, 1};
        check_refused(&call, &want);
        device_free_both();
    }
}

static void small_workspaces_are_refused(void) {
    whole_call call;
    make_call(&call, FDMA_BFLOAT16);
    give_workspace(&call.args);
    char bytes[64];
    snprintf(bytes, sizeof bytes, "want %zu", call.args.exec.workspace_size);
    const expectation want = {FDMA_WORKSPACE_TOO_SMALL, {"workspace_size", bytes}, 1};
    CHECK(call.args.exec.workspace_size > 0);
    call.args.exec.workspace_size--;
    check_refused(&call, &want);
    device_free_both();
}

static void selections_without_slots_are_refused(void) {
    whole_call call;
    const expectation want = {FDMA_UNSUPPORTED, {"slots"}, 0};
    make_call(&call, FDMA_BFLOAT16);
    give_workspace(&call.args);
    call.selection.slot = (fdma_tensor){0};
    check_refused(&call, &want);
    device_free_both();
}

static void float32_is_refused(void) {
    const problem x = device_small_problem(FDMA_FLOAT32);
    const gradient_problem p = gradient_of(&x, 0);
    fdma_backward_args args = gradient_args(&p, NULL);
    size_t bytes = 99;
    args.exec = (fdma_exec){.device = device_number};
    CHECK_INT(fdma_backward_workspace(&args, &bytes), FDMA_UNSUPPORTED);
    CHECK(bytes == 99);
}

static const test_entry tests[] = {
    TEST(the_fused_call_is_its_steps),          TEST(graphs_replay_gradients),
    TEST(memory_of_the_cpu_is_refused),         TEST(small_workspaces_are_refused),
    TEST(selections_without_slots_are_refused), TEST(float32_is_refused),
};

int main(void) { return device_test_run(tests, TEST_COUNT(tests)); }
