/* test_mask_lists.c - fdma_mask_lists(): compares calls with lists with calls that read the mask,
 * for every rule that the lists depend on; refused calls; and lists that were changed by hand. */
#include "masks.h"

/* ---- lists of a call whose tensors are on the host ---- */

#if defined(FDMA_HAVE_CUDA)
/* Makes lists on the device and copies them to the host. The call's outputs do not change. */
static fdma_tensor lists_on_device(fdma_forward_args *args) {
    const int kept = device_state.blocks;
    call here, there;
    size_t bytes = 0;
    call_of(&here, operation_forward, args);
    device_copy_call(&there, &here);
    device_clear_outputs(&there);
    fdma_forward_args *const own = &there.args.forward;
    CHECK_OK(fdma_mask_lists_size(own, &bytes));
    CHECK(bytes > 0);
    CHECK_OK(device_give_workspace(&there));
    own->mask_lists = fdma_tensor_1d(device_alloc(bytes), FDMA_UINT8, (int64_t)bytes);
    CHECK_OK(fdma_mask_lists(own));
    device_check_outputs_unwritten(&there);
    const fdma_tensor lists = device_read(own->mask_lists);
    device_free_after(kept);
    return lists;
}
#endif

/* Lists on the CPU have 0 bytes. */
static fdma_tensor lists_of(fdma_forward_args *args) {
    size_t bytes = 1, workspace = 0;
#if defined(FDMA_HAVE_CUDA)
    if (test_backend.run != NULL)
        return lists_on_device(args);
#endif
    fdma_forward_args own = *args;
    CHECK_OK(fdma_mask_lists_size(&own, &bytes));
    CHECK_INT(bytes, 0);
    CHECK_OK(fdma_forward_workspace(&own, &workspace));
    own.exec.workspace = test_alloc(workspace);
    own.exec.workspace_size = workspace;
    own.mask_lists = fdma_tensor_1d(test_alloc(1), FDMA_UINT8, 0);
    CHECK_OK(fdma_mask_lists(&own));
    return own.mask_lists;
}

static fdma_forward_args masked_args(const problem *x, const char *kernel, fdma_tensor mask) {
    fdma_forward_args args = problem_args(x, kernel);
    args.attn_mask = mask;
    return args;
}

static bool is_on_device(void) { return test_backend.run != NULL; }

/* ---- the same results ---- */

/* On a device forward with lists does not read the mask: the mask there no longer keeps any
 * pair. */
static void check_forward(const problem *x, const char *kernel, fdma_tensor mask) {
    const attended want = attend_masked(x, kernel, (pairs){.mask = mask}, 1);
    fdma_forward_args args = masked_args(x, kernel, mask);
    args.mask_lists = lists_of(&args);
    fdma_tensor other = mask;
    other.data = test_alloc(bytes_of(mask));
    memset(other.data, 0, bytes_of(mask));
    args.attn_mask = is_on_device() ? other : mask;
    CHECK_OK(run_forward(&args));
    check_same_results((attended){args.out, args.lse}, want);
}

/* Kernels of few queries read the mask itself. */
static bool lists_are_taken(const problem *x, const char *kernel) {
    fdma_forward_args args = masked_args(x, kernel, new_mask(x, 0, 64, 1));
    args.mask_lists = new_tensor(FDMA_UINT8, (int64_t)1 << 20, -1, -1, -1);
    return masks_are_taken(x, kernel) && call_takes(operation_forward, &args);
}

static void check_backward(const problem *x, const char *kernel, fdma_tensor mask) {
    fdma_forward_args forward = masked_args(x, kernel, mask);
    const pairs given =
        gradient_pairs(x, kernel, (pairs){mask, new_pair_bias(x, x->dtype, all_axes, 3)});
    const gradient_problem p = gradient_masked(x, given);
    const masked_gradients want = run_masked(&p, kernel, given, 1);
    fdma_backward_args args = gradient_args(&p, kernel);
    args.mask_lists = lists_of(&forward);
    args.attn_mask = given.mask;
    args.attn_bias = given.bias;
    if (given.bias.rank > 0)
        args.dattn_bias = new_output(FDMA_FLOAT32, x->batch, x->q_heads, x->q_len, x->kv_len);
    CHECK_OK(run_backward(&args));
    check_equal_gradients(kernel, gradient_outputs(&args), want.rows);
    if (given.bias.rank > 0)
        CHECK_BYTES(args.dattn_bias.data, want.dpairs.data, bytes_of(want.dpairs));
}

static const problem sizes[] = {
    SIZES(2, 70, 70, 4, 2, 64, 20, 1),   SIZES(1, 131, 170, 6, 2, 40, 30, 0),
    SIZES(2, 1, 300, 8, 2, 128, 50, 1),  SIZES(1, 30, 20, 2, 2, 24, -1, 0),
    SIZES(2, 150, 263, 4, 1, 64, -1, 1),
};

static const int axes[] = {all_axes, axis_i | axis_j, axis_h | axis_j | per_kv_head,
                           axis_b | axis_i | axis_j, axis_h | axis_i | axis_j | per_kv_head};

static void give_what_the_mask_does(problem *x, const char *kernel) {
    for (int n = 0; n < TEST_COUNT(axes) && lists_are_taken(x, kernel); n++) {
        const fdma_tensor mask = new_mask(x, axes[n], 20, (uint64_t)n + 1);
        check_forward(x, kernel, mask);
        if (n % 2 == 0)
            check_backward(x, kernel, mask);
    }
}

static void know_sequences_and_the_keys_that_exist(const char *kernel, fdma_dtype dtype) {
    for (int n = 0; n < 2; n++) {
        const problem x = pieces_problem(n == 0, dtype);
        if (!lists_are_taken(&x, kernel))
            return;
        const fdma_tensor mask = new_mask(&x, all_axes, 20, 4);
        check_forward(&x, kernel, mask);
        check_backward(&x, kernel, mask);
    }
}

/* ---- bad input ---- */

static fdma_forward_args described(problem *x, const char *kernel, fdma_dtype dtype) {
    *x = new_problem(&sizes[0], dtype, 1);
    return masked_args(x, kernel, new_mask(x, all_axes, 20, 1));
}

static void need_a_mask(void) {
    problem x;
    size_t bytes = 0;
    fdma_forward_args args = described(&x, NULL, backend_dtype());
    args.attn_mask = (fdma_tensor){0};
    CHECK_INT(fdma_mask_lists_size(&args, &bytes), FDMA_INVALID_ARGUMENT);
    CHECK_WORD(fdma_last_error(), "attn_mask");
    args.mask_lists = fdma_tensor_1d(test_alloc(16), FDMA_UINT8, 16);
    CHECK_INT(fdma_forward_workspace(&args, &bytes), FDMA_INVALID_ARGUMENT);
    CHECK_WORD(fdma_last_error(), "mask_lists");
    CHECK_WORD(fdma_last_error(), "attn_mask");
    CHECK_INT(fdma_mask_lists_size(&args, NULL), FDMA_INVALID_ARGUMENT);
}

static void refuse_too_few_bytes(void) {
    problem x;
    fdma_forward_args args = described(&x, is_on_device() ? "cuda" : NULL, backend_dtype());
    const fdma_tensor lists = lists_of(&args);
    if (!is_on_device())
        return;
    args.mask_lists = lists;
    args.mask_lists.shape[0] -= 1;
    CHECK_INT(run_forward(&args), FDMA_INVALID_ARGUMENT);
    CHECK_WORD(fdma_last_error(), "mask_lists");
    args.exec.device = 1;
    args.mask_lists = fdma_tensor_1d((char *)lists.data + 1, FDMA_UINT8, lists.shape[0]);
    size_t bytes = 0;
    CHECK_INT(fdma_forward_workspace(&args, &bytes), FDMA_INVALID_ARGUMENT);
    CHECK_WORD(fdma_last_error(), "multiple of 16");
}

#if defined(FDMA_HAVE_CUDA)
/* The lists may not lie in the memory of the mask. */
static void are_apart_from_what_they_are_made_of(void) {
    problem x;
    fdma_forward_args args = described(&x, "cuda", backend_dtype());
    call here, there;
    size_t bytes = 0;
    if (!is_on_device())
        return;
    call_of(&here, operation_forward, &args);
    device_copy_call(&there, &here);
    fdma_forward_args *const own = &there.args.forward;
    CHECK_OK(fdma_mask_lists_size(own, &bytes));
    CHECK(bytes <= bytes_of(args.attn_mask));
    CHECK_OK(device_give_workspace(&there));
    own->mask_lists = fdma_tensor_1d(own->attn_mask.data, FDMA_UINT8, (int64_t)bytes);
    CHECK_INT(fdma_mask_lists(own), FDMA_INVALID_ARGUMENT);
    CHECK_WORD(fdma_last_error(), "shares elements with");
    device_free_all();
}

/* Calls with lists, and probabilities, need no lists of their own in the workspace. */
static void save_workspace(void) {
    problem x;
    fdma_forward_args args = described(&x, NULL, backend_dtype());
    size_t bytes = 0, with_mask = 0, with_lists = 0, plain = 0;
    if (!is_on_device())
        return;
    args.exec.device = device_number;
    CHECK_OK(fdma_mask_lists_size(&args, &bytes));
    CHECK_OK(fdma_forward_workspace(&args, &with_mask));
    args.mask_lists = fdma_tensor_1d(NULL, FDMA_UINT8, (int64_t)bytes);
    CHECK_OK(fdma_forward_workspace(&args, &with_lists));
    CHECK(with_lists + bytes <= with_mask + 64);
    fdma_probabilities_args probabilities = {
        .size = sizeof probabilities,
        .q = x.q,
        .k = x.k,
        .lse = args.lse,
        .probability = new_output(FDMA_FLOAT32, x.batch, x.q_heads, x.q_len, x.kv_len),
        .selection = &x.selection,
        .causal = x.causal,
        .exec.device = device_number,
    };
    CHECK_OK(fdma_probabilities_workspace(&probabilities, &plain));
    probabilities.attn_mask = args.attn_mask;
    CHECK_OK(fdma_probabilities_workspace(&probabilities, &with_mask));
    CHECK_INT(with_mask, plain);
}
#endif

/* Any bytes give some results, and the memory around the tensors does not change. */
static void may_hold_anything(const char *kernel, fdma_dtype dtype) {
    problem x;
    fdma_forward_args args = described(&x, kernel, dtype);
    if (!lists_are_taken(&x, kernel))
        return;
    const pairs given = {.mask = args.attn_mask};
    const gradient_problem p = gradient_masked(&x, given);
    fdma_backward_args backward = gradient_args(&p, kernel);
    const fdma_tensor lists = lists_of(&args);
    uint64_t seed = 7;
    for (int64_t n = 0; n < lists.shape[0]; n++)
        ((uint8_t *)lists.data)[n] = (uint8_t)random_bits(&seed);
    args.mask_lists = backward.mask_lists = lists;
    backward.attn_mask = given.mask;
    CHECK_OK(run_forward(&args));
    CHECK_OK(run_backward(&backward));
}

static const test_entry tests[] = {
    EACH_SIZE(give_what_the_mask_does, sizes),
    EACH_KERNEL("forward", know_sequences_and_the_keys_that_exist),
    TEST(need_a_mask),
    TEST(refuse_too_few_bytes),
    EACH_KERNEL("forward", may_hold_anything),
#if defined(FDMA_HAVE_CUDA)
    TEST(are_apart_from_what_they_are_made_of),
    TEST(save_workspace),
#endif
};

int main(int argc, char **argv) { return test_run_backend(argc, argv, tests, TEST_COUNT(tests)); }
