/* test_overlap.c - an output that shares elements with another tensor is refused; interleaved
 * slices of one packed buffer that share none are not. test_errors_tensors.c checks that every
 * output of every operation is compared with every other tensor, and may have no stride of 0. */
#include "calls.h"

enum { batch = 2, length = 6, heads = 2, head_dim = 8, row = heads * head_dim };
enum { count = batch * length * row };
static const int64_t shape[4] = {batch, length, heads, head_dim};

/* A buffer with room for `slices` tensors and `floats` more elements. */
static float *new_packed(int64_t slices, int64_t floats) {
    return test_alloc((size_t)(slices * count + floats) * sizeof(float));
}

/* Slice `slice` of a buffer [batch, length, slices, heads, head_dim]. */
static fdma_tensor slice_of(float *packed, int64_t slices, int64_t slice) {
    fdma_tensor tensor = fdma_dense_tensor(packed + slice * row, FDMA_FLOAT32, 4, shape);
    tensor.stride[1] = slices * row;
    tensor.stride[0] = length * tensor.stride[1];
    return tensor;
}

/* q, k and v are the first slices of the buffer. */
static fdma_forward_args packed_args(float *packed, int64_t slices, int64_t out_slice) {
    return (fdma_forward_args){
        .size = sizeof(fdma_forward_args),
        .q = slice_of(packed, slices, 0),
        .k = slice_of(packed, slices, 1),
        .v = slice_of(packed, slices, 2),
        .out = slice_of(packed, slices, out_slice),
        .causal = 1,
    };
}

static void *shifted(void *data, int64_t floats) { return (float *)data + floats; }

static void check_refused(fdma_forward_args args, const char *one, const char *other) {
    test_context("%s and %s", one, other);
    CHECK_INT(run_forward(&args), FDMA_INVALID_ARGUMENT);
    CHECK_WORD(fdma_last_error(), one);
    CHECK_WORD(fdma_last_error(), other);
}

static void check_accepted(fdma_forward_args args) { CHECK_OK(run_forward(&args)); }

static void packed_slices_are_accepted(void) {
    float *const packed = new_packed(4, 0);
    uint64_t state = 1;
    for (int64_t i = 0; i < 4 * count; i++)
        packed[i] = random_float(&state);
    fdma_forward_args apart = packed_args(packed, 4, 3), within = apart;
    apart.out = new_output(FDMA_FLOAT32, batch, length, heads, head_dim);
    CHECK_OK(run_forward(&apart));
    CHECK_OK(run_forward(&within));
    const float *want = apart.out.data, *got = within.out.data;
    for (int64_t i = 0; i < count; i++)
        CHECK(got[i / row * 4 * row + i % row] == want[i]);
}

static void outputs_on_inputs_are_refused(void) {
    static const char *const names[] = {"q", "k", "v"};
    for (int slice = 0; slice < TEST_COUNT(names); slice++)
        check_refused(packed_args(new_packed(4, 0), 4, slice), "out", names[slice]);
}

/* One shared element suffices: the last of out is the first of k, or the first of out the last of
 * k. */
static void one_shared_element_is_refused(void) {
    float *const data = new_packed(3, 0);
    fdma_forward_args args = packed_args(new_packed(4, 0), 4, 3);
    args.k = fdma_dense_tensor(data + count, FDMA_FLOAT32, 4, shape);
    args.out = fdma_dense_tensor(data + 1, FDMA_FLOAT32, 4, shape);
    check_refused(args, "out", "k");
    args.out.data = data + 2 * count - 1;
    check_refused(args, "out", "k");
    args.out.data = data;
    check_accepted(args);
    args.out.data = data + 2 * count;
    check_accepted(args);
}

/* Slices of the same rows that share channels. */
static void shifted_slices_are_refused(void) {
    fdma_forward_args args = packed_args(new_packed(5, 0), 5, 3);
    void *const out = args.out.data;
    args.out.data = shifted(out, -1); /* v's last channel */
    check_refused(args, "out", "v");
    args.out.data = shifted(out, 1);
    check_accepted(args);
}

/* The last slice's channels continue in the first slice of the next row. */
static void slices_past_the_row_are_refused(void) {
    float *const data = new_packed(4, 5 * row);
    for (int64_t first = 0; first < 4 * row; first += 7) {
        fdma_forward_args args = packed_args(data + first, 4, 3);
        args.out.data = shifted(args.out.data, 1);
        check_refused(args, "out", "q");
        args = packed_args(data + first, 4, 0);
        args.q = slice_of(data + first, 4, 3);
        args.q.data = shifted(args.q.data, 1);
        check_refused(args, "out", "q");
    }
}

static void outputs_on_themselves_are_refused(void) {
    fdma_forward_args args = packed_args(new_packed(4, 0), 4, 3);
    args.out.stride[2] = head_dim - 1; /* a head's last channel is the next head's first */
    check_refused(args, "out", "distinct");
}

/* Twice such a stride, in bytes, exceeds int64. Nothing is read: there is no workspace. */
static void far_apart_is_apart(void) {
    float *const data = test_alloc(1024 * sizeof *data);
    fdma_forward_args args = packed_args(new_packed(4, 0), 4, 3);
    args.out.data = data;
    args.out.stride[0] = (INT64_C(1) << 60) + (INT64_C(1) << 59);
    args.out.stride[1] = row;
    args.q = args.out;
    args.q.data = data + length * row;
    args.q.stride[0] = INT64_C(1) << 60;
    CHECK_INT(fdma_forward(&args), FDMA_WORKSPACE_TOO_SMALL);
    args.q.data = data + length * row - 1;
    check_refused(args, "out", "q");
}

/* No tensor, read or written, may share its first or its last byte with the workspace. */
static void workspace_on_tensors_is_refused(void) {
    enum { bytes = 1 << 20 };
    char *const memory = test_alloc(3 * bytes);
    char *const before = memory + bytes - count * sizeof(float), *const after = memory + 2 * bytes;
    char *const wrong[] = {before + sizeof(float), after - sizeof(float), memory + bytes};
    fdma_forward_args args = packed_args(new_packed(4, 0), 4, 3);
    fdma_tensor *const tensors[] = {&args.out, &args.k};
    static const char *const names[] = {"out", "k"};
    args.exec = (fdma_exec){.workspace = memory + bytes, .workspace_size = bytes};
    for (int t = 0; t < TEST_COUNT(tensors); t++) {
        const fdma_tensor right = *tensors[t];
        *tensors[t] = fdma_dense_tensor(before, FDMA_FLOAT32, 4, shape);
        CHECK_OK(fdma_forward(&args));
        tensors[t]->data = after;
        CHECK_OK(fdma_forward(&args));
        for (int i = 0; i < TEST_COUNT(wrong); i++) {
            size_t wanted = 0;
            test_context("%s, address %d", names[t], i);
            tensors[t]->data = wrong[i];
            CHECK_INT(fdma_forward(&args), FDMA_INVALID_ARGUMENT);
            CHECK_WORD(fdma_last_error(), "exec.workspace");
            CHECK_WORD(fdma_last_error(), names[t]);
            CHECK_OK(fdma_forward_workspace(&args, &wanted));
        }
        *tensors[t] = right;
    }
    args.exec.workspace_size = SIZE_MAX;
    args.out.data = memory; /* below the workspace */
    CHECK_OK(fdma_forward(&args));
    args.out.data = after;
    CHECK_INT(fdma_forward(&args), FDMA_INVALID_ARGUMENT);
}

static const test_entry tests[] = {
    TEST(workspace_on_tensors_is_refused),   TEST(packed_slices_are_accepted),
    TEST(outputs_on_inputs_are_refused),     TEST(one_shared_element_is_refused),
    TEST(shifted_slices_are_refused),        TEST(slices_past_the_row_are_refused),
    TEST(outputs_on_themselves_are_refused), TEST(far_apart_is_apart),
};

int main(void) { return test_run(tests, TEST_COUNT(tests)); }
