/* test_vast.c - huge sizes: axes that may have any length because another axis has length 0, and
 * windows longer than all keys. */
#include "calls.h"

static const int64_t vast = INT64_C(1) << 40;

/* Gives inputs zeros, and outputs ones, which a gradient of nothing must overwrite. Leaves out
 * optional tensors that do not fit in memory. */
static void give_elements(call *x) {
    const tensor_table table = fdma_tensors[x->operation];
    for (const tensor_entry *entry = table.entries; entry < table.entries + table.count; entry++) {
        fdma_tensor *const tensor = call_tensor(x, entry);
        if (count_of(*tensor) > INT32_MAX) // sink logits of so many heads
            *tensor = (fdma_tensor){0};
        tensor->data = count_of(*tensor) > 0 ? test_alloc(bytes_of(*tensor)) : NULL;
        for (int64_t i = 0; i < count_of(*tensor) && is_output(entry); i++)
            store_float(tensor->data, tensor->dtype, i, 1);
    }
}

static void check_zeros(call *x) {
    const tensor_table table = fdma_tensors[x->operation];
    for (const tensor_entry *entry = table.entries; entry < table.entries + table.count; entry++) {
        const fdma_tensor tensor = *call_tensor(x, entry);
        for (int64_t i = 0; i < count_of(tensor) && is_output(entry); i++)
            CHECK(load_double(tensor.data, tensor.dtype, i) == 0);
    }
}

/* A loop over 2^40 empty heads or sequences would not end. */
static void nothing_takes_no_time(void) {
    const struct {
        fdma_operation operation;
        call_sizes sizes;
    } empty[] = {
        {operation_backward, {.batch = 1, .kv_len = 3, .q_heads = vast, .kv_heads = 1}},
        {operation_score_backward, {.batch = vast, .kv_heads = 1}},
        {operation_merge, {.batch = vast, .q_len = 1}},
        {operation_merge_backward, {.batch = vast, .q_len = 1}},
    };
    for (int e = 0; e < TEST_COUNT(empty); e++) {
        const char *const name = operations[empty[e].operation].name;
        const kernel_list kernels = kernels_of(name);
        for (int kernel = 0; kernel < kernels.count; kernel++) {
            call x = {.operation = empty[e].operation};
            call_sizes n = empty[e].sizes;
            n.head_dim = 8;
            test_context("%s %s", kernels.name[kernel], name);
            call_make(&x, &n, FDMA_FLOAT32, true);
            call_drop_selection(&x);
            give_elements(&x);
            call_exec(&x)->kernel = kernels.name[kernel];
            CHECK_OK(call_run(&x));
            check_zeros(&x);
            test_free_all();
        }
    }
}

static size_t bytes_with_window(const char *kernel, int64_t window) {
    static const call_sizes n = {
        .batch = 1, .q_len = 700, .kv_len = 1000, .q_heads = 4, .kv_heads = 2, .head_dim = 64};
    call x = {.operation = operation_backward,
              .args.backward = {.causal = 1, .exec = {.kernel = kernel, .threads = 1}}};
    size_t bytes = 0;
    call_make(&x, &n, FDMA_FLOAT32, true);
    call_describe_selection(&x, window, FDMA_SCOPE_CAUSAL);
    CHECK_OK(fdma_backward_workspace(&x.args.backward, &bytes));
    return bytes;
}

static void windows_beyond_every_key_are_one(void) {
    static const int64_t windows[] = {1001, INT32_MAX, INT64_C(1) << 62, INT64_MAX - 1, INT64_MAX};
    const kernel_list kernels = kernels_of("backward");
    for (int kernel = 0; kernel < kernels.count; kernel++) {
        const size_t all = bytes_with_window(kernels.name[kernel], 1000);
        test_context("%s", kernels.name[kernel]);
        for (int n = 0; n < TEST_COUNT(windows); n++)
            CHECK(bytes_with_window(kernels.name[kernel], windows[n]) == all);
    }
}

/* The bytes of these elements can be counted, but fit in no memory. Nothing is allocated. */
static void more_than_memory_is_refused(void) {
    for (int64_t batch = INT64_C(1) << 30; batch <= INT64_C(1) << 40; batch <<= 10) {
        const call_sizes n = {.batch = batch,
                              .q_len = 1 << 12,
                              .kv_len = 1,
                              .q_heads = 1,
                              .kv_heads = 1,
                              .head_dim = 8};
        call x = {.operation = operation_forward};
        size_t bytes;
        call_make(&x, &n, FDMA_FLOAT32, false);
        call_drop_selection(&x);
        const fdma_status status = fdma_forward_workspace(&x.args.forward, &bytes);
        CHECK_INT(status, batch == INT64_C(1) << 30 ? FDMA_OK : FDMA_INVALID_ARGUMENT);
    }
    CHECK_WORD(fdma_last_error(), "q");
}

static const test_entry tests[] = {
    TEST(more_than_memory_is_refused),
    TEST(nothing_takes_no_time),
    TEST(windows_beyond_every_key_are_one),
};

int main(void) { return test_run(tests, TEST_COUNT(tests)); }
