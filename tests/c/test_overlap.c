/* test_overlap.c - an output that shares elements with another tensor is refused; slices that lie
 * interleaved in one packed buffer and share none are not. */
#include "fixture.h"

enum { batch = 2, length = 6, heads = 2, head_dim = 8 };

/* A buffer [batch, length, parts, heads, head_dim], of which a tensor is one part. */
typedef struct packed_buffer {
    float *data;
    int64_t parts;
} packed_buffer;

static packed_buffer new_packed(int64_t parts) {
    return (packed_buffer){
        .data = test_alloc((size_t)(batch * length * parts * heads * head_dim) * sizeof(float)),
        .parts = parts,
    };
}

static fdma_tensor part_of(packed_buffer packed, int64_t part) {
    const int64_t shape[4] = {batch, length, heads, head_dim};
    fdma_tensor tensor =
        fdma_dense_tensor(packed.data + part * heads * head_dim, FDMA_FLOAT32, 4, shape);
    tensor.stride[1] = packed.parts * heads * head_dim;
    tensor.stride[0] = length * tensor.stride[1];
    return tensor;
}

static fdma_forward_args packed_args(packed_buffer packed, int64_t out_part) {
    return (fdma_forward_args){
        .size = sizeof(fdma_forward_args),
        .q = part_of(packed, 0),
        .k = part_of(packed, 1),
        .v = part_of(packed, 2),
        .out = part_of(packed, out_part),
        .causal = 1,
    };
}

static void packed_slices_are_accepted(void) {
    const packed_buffer packed = new_packed(4);
    uint64_t state = 1;
    for (int64_t i = 0; i < batch * length * 4 * heads * head_dim; i++) {
        packed.data[i] = random_float(&state);
    }
    fdma_forward_args apart = packed_args(packed, 3);
    apart.out = new_output(FDMA_FLOAT32, batch, length, heads, head_dim);
    CHECK_OK(run_forward(&apart));
    fdma_forward_args within = packed_args(packed, 3);
    CHECK_OK(run_forward(&within));
    const float *want = apart.out.data, *got = within.out.data;
    const int64_t row = heads * head_dim;
    for (int64_t i = 0; i < batch * length * row; i++) {
        CHECK(got[i / row * 4 * row + i % row] == want[i]);
    }
}

static void check_refused(fdma_forward_args *args, const char *one, const char *other) {
    test_context("%s and %s", one, other);
    CHECK_INT(run_forward(args), FDMA_INVALID_ARGUMENT);
    CHECK_WORD(fdma_last_error(), one);
    CHECK_WORD(fdma_last_error(), other);
}

static void outputs_on_inputs_are_refused(void) {
    static const char *const names[] = {"q", "k", "v"};
    const packed_buffer packed = new_packed(4);
    for (int64_t part = 0; part < 3; part++) {
        fdma_forward_args args = packed_args(packed, part);
        check_refused(&args, "out", names[part]);
    }
}

/* One element is enough: the last of out is the first of k's last row, and the like. */
static void one_shared_element_is_refused(void) {
    float *data = test_alloc(4096 * sizeof *data);
    const packed_buffer packed = new_packed(4);
    fdma_forward_args args = packed_args(packed, 3);
    const int64_t shape[4] = {batch, length, heads, head_dim};
    const int64_t count = (int64_t)batch * length * heads * head_dim;
    args.k = fdma_dense_tensor(data + 1000, FDMA_FLOAT32, 4, shape);
    args.out = fdma_dense_tensor(data + 1000 - count + 1, FDMA_FLOAT32, 4, shape);
    check_refused(&args, "out", "k");
    args.out.data = data + 1000 + count - 1;
    check_refused(&args, "out", "k");
    args.out.data = data + 1000 - count;
    CHECK_OK(run_forward(&args));
    args.out.data = data + 1000 + count;
    CHECK_OK(run_forward(&args));
}

/* Slices of the same rows that do share channels. */
static void shifted_slices_are_refused(void) {
    const packed_buffer packed = new_packed(5);
    fdma_forward_args args = packed_args(packed, 3);
    args.out.data = (float *)part_of(packed, 3).data - 1; /* one channel into v's part */
    check_refused(&args, "out", "v");
    args.out.data = (float *)part_of(packed, 3).data + 1;
    CHECK_OK(run_forward(&args));
}

/* Slices at either end of a row: the last one's channels run on into the next row's first slice. */
static void slices_past_the_row_are_refused(void) {
    float *data = test_alloc((size_t)(batch * length * 4 + 1) * heads * head_dim * sizeof *data);
    for (int64_t first = 0; first < 4 * heads * head_dim; first += 7) {
        const packed_buffer packed = {.data = data + first, .parts = 4};
        fdma_forward_args args = packed_args(packed, 3);
        args.out.data = (float *)args.out.data + 1;
        check_refused(&args, "out", "q");
        args = packed_args(packed, 0);
        args.q.data = (float *)part_of(packed, 3).data + 1;
        check_refused(&args, "out", "q");
    }
}

static void outputs_on_each_other_are_refused(void) {
    const packed_buffer packed = new_packed(4);
    fdma_forward_args args = packed_args(packed, 3);
    args.lse = new_tensor(FDMA_FLOAT32, batch, heads, length, -1);
    CHECK_OK(run_forward(&args));
    args.lse.data = args.out.data;
    check_refused(&args, "out", "lse");
}

static void outputs_on_bias_and_padding_are_refused(void) {
    const packed_buffer packed = new_packed(4);
    fdma_forward_args args = packed_args(packed, 3);
    args.bias = new_tensor(FDMA_FLOAT32, batch, heads, length, -1);
    args.key_valid = new_tensor(FDMA_UINT8, batch, length, -1, -1);
    CHECK_OK(run_forward(&args));
    const fdma_tensor bias = args.bias;
    args.bias.data = args.out.data;
    check_refused(&args, "out", "bias");
    args.bias = bias;
    args.key_valid.data = (uint8_t *)args.out.data + 3;
    check_refused(&args, "out", "key_valid");
}

/* An output's own elements must be distinct. */
static void outputs_on_themselves_are_refused(void) {
    for (int axis = 0; axis < 3; axis++) {
        const packed_buffer packed = new_packed(4);
        fdma_forward_args args = packed_args(packed, 3);
        args.out.stride[axis] = 0;
        check_refused(&args, "out", "out");
    }
    const packed_buffer packed = new_packed(4);
    fdma_forward_args args = packed_args(packed, 3);
    args.out.stride[2] = head_dim - 1; /* a head's last channel is the next head's first */
    check_refused(&args, "out", "out");
}

/* Strides of which two are beyond int64. Nothing is read: there is no workspace. */
static void far_apart_is_apart(void) {
    float *data = test_alloc(1024 * sizeof *data);
    const packed_buffer packed = new_packed(4);
    fdma_forward_args args = packed_args(packed, 3);
    args.out.data = data;
    args.out.stride[0] = (INT64_C(1) << 60) + (INT64_C(1) << 59);
    args.out.stride[1] = heads * head_dim;
    args.q = args.out;
    args.q.data = data + length * heads * head_dim;
    args.q.stride[0] = INT64_C(1) << 60;
    CHECK_INT(fdma_forward(&args), FDMA_WORKSPACE_TOO_SMALL);
    args.q.data = data + length * heads * head_dim - 1;
    check_refused(&args, "out", "q");
}

/* No tensor, read or written, may lie in the workspace: here by its last or its first byte. */
static void workspace_on_tensors_is_refused(void) {
    enum { bytes = 1 << 20 };
    char *const memory = test_alloc(3 * bytes);
    const int64_t shape[4] = {batch, length, heads, head_dim};
    const size_t size = sizeof(float) * batch * length * heads * head_dim;
    const packed_buffer packed = new_packed(4);
    fdma_forward_args args = packed_args(packed, 3);
    fdma_tensor *const tensors[] = {&args.out, &args.k};
    static const char *const names[] = {"out", "k"};
    args.exec = (fdma_exec){.workspace = memory + bytes, .workspace_size = bytes};
    for (int t = 0; t < TEST_COUNT(tensors); t++) {
        const fdma_tensor before = *tensors[t];
        char *const first = memory + bytes - size, *const last = memory + 2 * bytes;
        *tensors[t] = fdma_dense_tensor(first, FDMA_FLOAT32, 4, shape);
        CHECK_OK(fdma_forward(&args));
        tensors[t]->data = last;
        CHECK_OK(fdma_forward(&args));
        char *const shared[] = {first + sizeof(float), last - sizeof(float), memory + bytes};
        for (int s = 0; s < TEST_COUNT(shared); s++) {
            size_t wanted = 0;
            test_context("%s, place %d", names[t], s);
            tensors[t]->data = shared[s];
            CHECK_INT(fdma_forward(&args), FDMA_INVALID_ARGUMENT);
            CHECK_WORD(fdma_last_error(), "exec.workspace");
            CHECK_WORD(fdma_last_error(), names[t]);
            CHECK_OK(fdma_forward_workspace(&args, &wanted));
        }
        *tensors[t] = before;
    }
    args.exec.workspace_size = SIZE_MAX;
    args.out.data = memory; // below it
    CHECK_OK(fdma_forward(&args));
    args.out.data = memory + 2 * bytes;
    CHECK_INT(fdma_forward(&args), FDMA_INVALID_ARGUMENT);
}

static const test_entry tests[] = {
    TEST(workspace_on_tensors_is_refused),   TEST(packed_slices_are_accepted),
    TEST(outputs_on_inputs_are_refused),     TEST(one_shared_element_is_refused),
    TEST(shifted_slices_are_refused),        TEST(slices_past_the_row_are_refused),
    TEST(outputs_on_each_other_are_refused), TEST(outputs_on_bias_and_padding_are_refused),
    TEST(outputs_on_themselves_are_refused), TEST(far_apart_is_apart),
};

int main(void) { return test_run(tests, TEST_COUNT(tests)); }
