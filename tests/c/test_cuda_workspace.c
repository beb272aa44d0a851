/* test_cuda_workspace.c - workspace on a CUDA device that was asked for before there was data
 * suffices for data at any address: kernels that need 16-byte alignment leave the call to others,
 * or copy. Also the size of the workspace for gradients, with and without carried keys. */
#include "device.h"

/* A copy on the device that begins one element into its memory if `shift` is set. */
static fdma_tensor shifted(fdma_tensor host, int shift) {
    const size_t offset = shift ? dtype_size(host.dtype) : 0;
    fdma_tensor copy = host;
    copy.data = (char *)device_alloc(device_extent(host) + offset) + offset;
    device_write(copy, host);
    return copy;
}

/* Runs a call on the device, with workspace asked for before any tensor has data. Bit n of `shifts`
 * shifts the tensor names[n]. Copies the outputs to `here`. */
static void run_shifted(call *here, const char *const *names, int count, int shifts) {
    const tensor_table table = fdma_tensors[here->operation];
    const int kept = device_state.blocks;
    size_t bytes = 0;
    call there, bare;
    call_copy(&bare, here);
    for (size_t t = 0; t < table.count; t++)
        call_tensor(&bare, &table.entries[t])->data = NULL;
    call_exec(&bare)->device = device_number;
    CHECK_OK(operations[bare.operation].workspace(&bare.args, &bytes));
    device_copy_call(&there, here);
    for (int n = 0; n < count; n++)
        *call_tensor_named(&there, names[n]) =
            shifted(*call_tensor_named(here, names[n]), shifts >> n & 1);
    device_exec(call_exec(&there), bytes);
    CHECK_OK(operations[there.operation].call(&there.args));
    device_read_outputs(here, &there);
    device_free_after(kept);
}

/* ---- score ---- */

/* The kernels add the same numbers in the same order for every alignment. */
static void scores_of_shifted_data(void) {
    static const call_sizes n = {.batch = 2, .kv_len = 300, .kv_heads = 3, .head_dim = 64};
    static const char *const names[] = {"v", "dt_proj"};
    for (int type = first_dtype(); type < test_dtype_count; type++) {
        call x = {.operation = operation_score, .args.score = {.bias_form = FDMA_BIAS_NONE}};
        call on_cpu;
        uint64_t state = 21;
        call_make(&x, &n, test_dtypes[type], false);
        call_alloc(&x, &state);
        x.args.score.score = new_output(FDMA_FLOAT32, n.batch, n.kv_heads, n.kv_len, -1);
        call_copy(&on_cpu, &x);
        call_own_outputs(&on_cpu);
        CHECK_OK(call_run(&on_cpu));
        run_shifted(&x, names, TEST_COUNT(names), 0);
        const fdma_tensor aligned = copy_tensor(x.args.score.score);
        const double sums = (double)(n.kv_heads * n.head_dim) * (double)FLT_EPSILON;
        for (int64_t i = 0; i < count_of(aligned); i++) {
            const double score = load_double(on_cpu.args.score.score.data, FDMA_FLOAT32, i);
            CHECK_NEAR(load_double(aligned.data, FDMA_FLOAT32, i), score, (1 + fabs(score)) * sums);
        }
        for (int shifts = 1; shifts < 4; shifts++) {
            test_context("%s, shifts %d", dtype_name(test_dtypes[type]), shifts);
            run_shifted(&x, names, TEST_COUNT(names), shifts);
            CHECK(same_tensor(x.args.score.score, aligned));
        }
        device_free_both();
    }
}

/* ---- forward ---- */

static void check_forward_shifted(const problem *x) {
    static const char *const names[] = {"q", "k", "v", "out"};
    const attended want = problem_attend(x, "reference", 1);
    const fdma_forward_args args = problem_args(x, NULL);
    for (int shifts = 0; shifts < 1 << TEST_COUNT(names); shifts++) {
        call here;
        call_of(&here, operation_forward, &args);
        test_context("q_len %d, window %d, %s, shifts %d", (int)x->q_len, (int)x->window,
                     dtype_name(x->dtype), shifts);
        run_shifted(&here, names, TEST_COUNT(names), shifts);
        check_close_results(x, (attended){args.out, args.lse}, want);
    }
}

/* Few queries and many, few keys and many: aligned data of each goes to another kernel. */
static void forward_of_shifted_data(void) {
    static const int64_t lengths[][2] = {{1, 1000}, {16, 1024}, {16, 40}, {7, 3000}, {200, 300}};
    for (int i = 0; i < TEST_COUNT(lengths) * 4; i++) {
        problem x = SIZES(2, lengths[i / 4][0], lengths[i / 4][1], 4, 2, 64, i % 2 ? 33 : -1, 1);
        x.dtype = test_dtypes[1 + i / 2 % 2];
        problem_fill(&x, (uint64_t)i);
        problem_select(&x);
        check_forward_shifted(&x);
        device_free_both();
    }
}

/* ---- gradients ---- */

/* The workspace beside inputs, outputs and gradients is four bytes for each element of dq, and 30 %
 * of k and v. */
static void gradients_want_little_memory(void) {
    static const call_sizes n = {.batch = 1,
                                 .q_len = 131072,
                                 .kv_len = 131072,
                                 .q_heads = 32,
                                 .kv_heads = 8,
                                 .head_dim = 128};
    for (int type = first_dtype(); type < test_dtype_count; type++) {
        call x = {.operation = operation_attention_backward};
        fdma_attention_backward_args *const args = &x.args.attention_backward;
        size_t bytes = 0;
        args->bias_form = FDMA_BIAS_LINEAR;
        args->causal = 1;
        args->exec.device = device_number;
        call_make(&x, &n, test_dtypes[type], true);
        args->dlse = args->key_valid = (fdma_tensor){0};
        call_describe_selection(&x, 2048, FDMA_SCOPE_CAUSAL);
        test_context("%s", dtype_name(test_dtypes[type]));
        CHECK_OK(fdma_attention_backward_workspace(args, &bytes));
        const double sums = 4 * (double)count_of(args->q), keys = 2 * (double)bytes_of(args->k);
        CHECK((double)bytes > sums);
        CHECK((double)bytes <= sums + 0.3 * keys);
    }
}

/* Asks for the workspace of a call with so many carried keys. Returns the bytes of its k, v and
 * bias, and of the gradients of these. */
static double ask_for_gradients(int64_t carried, size_t *bytes) {
    const call_sizes n = {.batch = 2,
                          .q_len = 600,
                          .kv_len = 900,
                          .q_heads = 4,
                          .kv_heads = 2,
                          .head_dim = 64,
                          .carried = carried};
    call x = {.operation = operation_backward};
    fdma_backward_args *const args = &x.args.backward;
    args->causal = 1;
    args->exec.device = device_number;
    call_make(&x, &n, backend_dtype(), true);
    args->key_valid = (fdma_tensor){0};
    call_describe_selection(&x, 300, FDMA_SCOPE_CAUSAL);
    CHECK_OK(fdma_backward_workspace(args, bytes));
    return 4 * (double)bytes_of(args->k) + 2 * (double)bytes_of(args->bias);
}

static void gradients_of_carried_keys_want_no_copies(void) {
    size_t with_carried = 0, without = 0;
    ask_for_gradients(300, &with_carried);
    ask_for_gradients(0, &without);
    CHECK_INT(with_carried, without);
}

static const test_entry tests[] = {
    TEST(scores_of_shifted_data),
    TEST(forward_of_shifted_data),
    TEST(gradients_want_little_memory),
    TEST(gradients_of_carried_keys_want_no_copies),
};

int main(void) { return device_test_run(tests, TEST_COUNT(tests)); }
