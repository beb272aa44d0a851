/* test_cuda_carried.c - carried keys and the keys of the call lie at unrelated addresses in a
 * device's memory. Out, lse and gradients have the bits of the same kernel with all keys in one
 * tensor. */
#include "device.h"
#include "gradient.h"

enum { batch = 2, carried_len = 77, new_len = 190, kv_len = carried_len + new_len };

/* Position of the pieces of k or v in one block of memory. */
typedef struct placement {
    const char *name;
    int64_t carried_gap, own_gap; /* elements after each row */
    int64_t shift;                /* elements from a multiple of 16 bytes to the first row */
    int64_t apart;                /* bytes from the end of one piece to the other */
    bool own_first, heads_first;  /* heads_first: carried rows of one head are adjacent */
    bool is_plain;                /* the kernel that takes one tensor takes these, too */
} placement;

static const placement placements[] = {
    {.name = "side by side", .is_plain = true},
    {.name = "in reverse order", .own_first = true, .is_plain = true},
    {.name = "far apart", .apart = 1 << 22, .is_plain = true},
    {.name = "far apart in reverse order", .apart = 1 << 22, .own_first = true, .is_plain = true},
    {.name = "with other strides", .carried_gap = 8, .own_gap = 24, .is_plain = true},
    {.name = "head by head", .heads_first = true, .own_gap = 8, .apart = 48, .is_plain = true},
    {.name = "carried rows not aligned", .carried_gap = 1, .own_first = true},
    {.name = "own rows not aligned", .own_gap = 3},
    {.name = "nothing aligned", .shift = 1, .apart = 2},
};

/* A tensor shaped as `like` at `data`, which need not be allocated yet. */
static fdma_tensor piece_at(fdma_tensor like, char *data, int64_t gap, bool heads_first) {
    const int64_t row = like.shape[3] + gap, length = like.shape[1], heads = like.shape[2];
    fdma_tensor tensor = like;
    tensor.data = data;
    tensor.stride[0] = length * heads * row;
    tensor.stride[1] = heads_first ? row : heads * row;
    tensor.stride[2] = heads_first ? length * row : row;
    tensor.stride[3] = 1;
    return tensor;
}

/* Copies only the rows of a piece to the device, so that the bytes between them do not change. */
static void write_piece(fdma_tensor to, fdma_tensor from) {
    fdma_tensor here = to;
    here.data = test_alloc(device_extent(to));
    device_must(cudaMemcpy(here.data, to.data, device_extent(to), cudaMemcpyDeviceToHost), "read");
    copy_elements(here, from);
    device_write(to, here);
}

/* Places the pieces of `all`, a tensor of all keys, at `memory`, or in a new block if that is
 * NULL. */
static void write_pieces(const placement *how, fdma_tensor all, char *memory, fdma_tensor *carried,
                         fdma_tensor *own) {
    const fdma_tensor first = positions_of(all, 1, 0, carried_len);
    const fdma_tensor rest = positions_of(all, 1, carried_len, kv_len);
    const size_t shift = (size_t)how->shift * dtype_size(all.dtype);
    *carried = piece_at(first, NULL, how->carried_gap, how->heads_first);
    *own = piece_at(rest, NULL, how->own_gap, false);
    fdma_tensor *const lower = how->own_first ? own : carried;
    fdma_tensor *const upper = how->own_first ? carried : own;
    const size_t between = (device_extent(*lower) + 15) / 16 * 16 + (size_t)how->apart;
    if (memory == NULL)
        memory = device_alloc(shift + between + device_extent(*upper));
    lower->data = memory + shift;
    upper->data = memory + shift + between;
    write_piece(*carried, first);
    write_piece(*own, rest);
}

static problem stream_problem(int64_t q_len, int64_t head_dim, int64_t window, fdma_dtype dtype) {
    problem x = SIZES(batch, q_len, kv_len, 6, 3, head_dim, window, 1);
    x.dtype = dtype;
    problem_fill(&x, 5);
    problem_select(&x);
    return x;
}

/* Copies a call to the device, with k and v in two pieces each. `memory` has room for both. */
static void split_call(call *there, call *here, const placement *how, char *memory) {
    fdma_forward_args *const args = &there->args.forward;
    const fdma_tensor k = here->args.forward.k, v = here->args.forward.v;
    const fdma_tensor bias = here->args.forward.bias;
    device_copy_call(there, here);
    write_pieces(how, k, memory, &args->k_carried, &args->k);
    write_pieces(how, v, memory == NULL ? NULL : memory + (1 << 24), &args->v_carried, &args->v);
    args->bias_carried = device_tensor(gathered(positions_of(bias, 2, 0, carried_len)));
    args->bias = device_tensor(gathered(positions_of(bias, 2, carried_len, kv_len)));
}

/* Runs a call whose pieces lie as `how` says, and compares it with the same kernel on whole
 * tensors. `want`: the kernel that must take the call, or NULL. */
static void check_placement(const problem *x, const placement *how, char *memory,
                            const char *want) {
    fdma_forward_args args = problem_args(x, "cuda");
    const char *name = NULL, *usual = NULL;
    call here, there, whole, found;
    test_context("%s, %d queries, head_dim %d, window %d, %s", how->name, (int)x->q_len,
                 (int)x->head_dim, (int)x->window, want == NULL ? "any kernel" : want);
    call_of(&here, operation_forward, &args);
    split_call(&there, &here, how, memory);
    if (want != NULL)
        there.args.forward.exec.kernel = want;
    CHECK_OK(fdma_forward_kernel(&there.args.forward, &name));
    CHECK_OK(device_run_call(&there));
    device_fetch(&found, &there);
    device_copy_call(&whole, &here);
    CHECK_OK(fdma_forward_kernel(&whole.args.forward, &usual));
    CHECK(!how->is_plain || want != NULL || strcmp(name, usual) == 0);
    whole.args.forward.exec.kernel = name;
    CHECK_OK(device_run_call(&whole));
    device_read_outputs(&here, &whole);
    check_same_results((attended){found.args.forward.out, found.args.forward.lse},
                       (attended){here.args.forward.out, here.args.forward.lse});
    device_free_all();
}

static void pieces_are_the_whole(int64_t q_len) {
    static const int64_t head_dims[] = {64, 128, 40, 256};
    for (int d = 0; d < TEST_COUNT(head_dims); d++)
        for (int n = 0; n < TEST_COUNT(placements); n++)
            for (int64_t window = -1; window <= 60; window += 61) {
                const problem x = stream_problem(q_len, head_dims[d], window,
                                                 n % 2 ? FDMA_FLOAT16 : FDMA_BFLOAT16);
                check_placement(&x, &placements[n], NULL, NULL);
                if (placements[n].is_plain && q_len > 16)
                    check_placement(&x, &placements[n], NULL, "cuda/sm80");
                test_free_all();
            }
}

static void pieces_for_many_queries(void) { pieces_are_the_whole(131); }

static void pieces_for_few_queries(void) { pieces_are_the_whole(7); }

/* The pieces are more than 2^32 times 16 bytes apart. A kernel that counts in units of 16 bytes,
 * the largest that divides the row distances, needs a base for each piece. */
static void pieces_at_both_ends_of_memory(void) {
    static const int64_t gaps[] = {0, 8};
    const int64_t apart = (INT64_C(65) << 30) + (1 << 20);
    char *const memory = device_large((size_t)apart + (1 << 25));
    for (int n = 0; n < 2 * TEST_COUNT(gaps) && memory != NULL; n++) {
        const placement far = {.name = "at both ends of memory",
                               .carried_gap = gaps[n / 2],
                               .own_gap = gaps[n / 2],
                               .apart = apart,
                               .own_first = n % 2,
                               .is_plain = true};
        const problem x = stream_problem(131, 64, 60, FDMA_BFLOAT16);
        check_placement(&x, &far, memory, NULL);
        test_free_all();
    }
    cudaFree(memory);
}

/* ---- backward ---- */

static void split_gradients(call *there, call *here, const placement *how) {
    fdma_backward_args *const args = &there->args.backward, *const all = &here->args.backward;
    device_copy_call(there, here);
    write_pieces(how, all->k, NULL, &args->k_carried, &args->k);
    write_pieces(how, all->v, NULL, &args->v_carried, &args->v);
    write_pieces(how, all->dk, NULL, &args->dk_carried, &args->dk);
    write_pieces(how, all->dv, NULL, &args->dv_carried, &args->dv);
    args->bias_carried = device_tensor(gathered(positions_of(all->bias, 2, 0, carried_len)));
    args->bias = device_tensor(gathered(positions_of(all->bias, 2, carried_len, kv_len)));
    args->dbias_carried = device_tensor(gathered(positions_of(all->dbias, 2, 0, carried_len)));
    args->dbias = device_tensor(gathered(positions_of(all->dbias, 2, carried_len, kv_len)));
}

static void check_pieces(fdma_tensor carried, fdma_tensor own, fdma_tensor all, int axis) {
    const fdma_tensor first = gathered(positions_of(all, axis, 0, carried_len));
    const fdma_tensor rest = gathered(positions_of(all, axis, carried_len, kv_len));
    CHECK_BYTES(gathered(carried).data, first.data, bytes_of(first));
    CHECK_BYTES(gathered(own).data, rest.data, bytes_of(rest));
}

/* Fills the outputs of a call that adds to them. */
static void fill_gradients(const fdma_backward_args *args) {
    uint64_t state = 3;
    const gradients outputs = gradient_outputs(args);
    for (int t = 0; t < 3; t++)
        fill_random(outputs.all[t], &state, 1);
}

/* As check_placement(). */
static void check_gradients(const problem *x, const placement *how, const char *want) {
    const gradient_problem p = gradient_of(x, 1);
    fdma_backward_args args = gradient_args(&p, "cuda");
    const char *name = NULL, *usual = NULL;
    call here, there, whole, found;
    args.deterministic = 1;
    args.accumulate = how->own_first;
    fill_gradients(&args);
    test_context("gradients, %s, head_dim %d, window %d, %s", how->name, (int)x->head_dim,
                 (int)x->window, want == NULL ? "any kernel" : want);
    call_of(&here, operation_backward, &args);
    split_gradients(&there, &here, how);
    if (want != NULL)
        there.args.backward.exec.kernel = want;
    CHECK_OK(fdma_backward_kernel(&there.args.backward, &name));
    CHECK_OK(device_run_call(&there));
    device_fetch(&found, &there);
    device_copy_call(&whole, &here);
    CHECK_OK(fdma_backward_kernel(&whole.args.backward, &usual));
    CHECK(!how->is_plain || want != NULL || strcmp(name, usual) == 0);
    whole.args.backward.exec.kernel = name;
    CHECK_OK(device_run_call(&whole));
    device_read_outputs(&here, &whole);
    const fdma_backward_args *const got = &found.args.backward, *const all = &here.args.backward;
    CHECK_BYTES(got->dq.data, all->dq.data, bytes_of(all->dq));
    check_pieces(got->dk_carried, got->dk, all->dk, 1);
    check_pieces(got->dv_carried, got->dv, all->dv, 1);
    check_pieces(got->dbias_carried, got->dbias, all->dbias, 2);
    device_free_all();
}

static void gradients_of_pieces_are_those_of_the_whole(void) {
    static const int64_t head_dims[] = {64, 128, 256};
    for (int d = 0; d < TEST_COUNT(head_dims); d++)
        for (int n = 0; n < TEST_COUNT(placements); n++)
            for (int64_t window = n % 2 ? -1 : 20; window <= 60; window += 61) {
                const problem x = stream_problem(n % 3 == 0 ? new_len : 131, head_dims[d], window,
                                                 n % 2 ? FDMA_FLOAT16 : FDMA_BFLOAT16);
                check_gradients(&x, &placements[n], NULL);
                if (placements[n].is_plain)
                    check_gradients(&x, &placements[n], "cuda/sm80");
                test_free_all();
            }
}

static void cut_to_carried_keys(fdma_backward_args *args) {
    fdma_tensor *const rows[] = {&args->q,  &args->k,    &args->v,  &args->out,
                                 &args->dq, &args->dout, &args->dk, &args->dv};
    fdma_tensor *const numbers[] = {&args->lse, &args->dlse, &args->bias, &args->dbias};
    for (int t = 0; t < TEST_COUNT(rows); t++)
        *rows[t] = positions_of(*rows[t], 1, 0, 0);
    for (int t = 0; t < TEST_COUNT(numbers); t++)
        *numbers[t] = positions_of(*numbers[t], 2, 0, 0);
    args->dk.data = args->dv.data = args->dbias.data = NULL;
}

static void check_cleared(fdma_tensor on_device) {
    const fdma_tensor found = gathered(device_read(on_device));
    for (int64_t n = 0; n < count_of(found); n++)
        if (!CHECK(load_double(found.data, found.dtype, n) == 0))
            return;
}

/* A call may have no keys and queries of its own, and no memory for their outputs. It clears the
 * gradients of the carried keys. */
static void gradients_of_carried_keys_alone_are_zeros(void) {
    static const char *const kernels[] = {"cuda", "cuda/sm80"};
    for (int n = 0; n < 2 * TEST_COUNT(kernels); n++) {
        const problem x = stream_problem(131, 64, -1, FDMA_BFLOAT16);
        const gradient_problem p = gradient_of(&x, 1);
        fdma_backward_args args = gradient_args(&p, kernels[n / 2]);
        call here, there;
        args.deterministic = n % 2;
        call_of(&here, operation_backward, &args);
        split_gradients(&there, &here, &placements[0]);
        test_context("%s, deterministic %d", kernels[n / 2], n % 2);
        cut_to_carried_keys(&there.args.backward);
        CHECK_OK(device_run_call(&there));
        device_wait();
        check_cleared(there.args.backward.dk_carried);
        check_cleared(there.args.backward.dv_carried);
        check_cleared(there.args.backward.dbias_carried);
        device_free_both();
    }
}

static const test_entry tests[] = {
    TEST(pieces_for_many_queries),
    TEST(pieces_for_few_queries),
    TEST(pieces_at_both_ends_of_memory),
    TEST(gradients_of_pieces_are_those_of_the_whole),
    TEST(gradients_of_carried_keys_alone_are_zeros),
};

int main(void) { return device_test_run(tests, TEST_COUNT(tests)); }
