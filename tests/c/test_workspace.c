/* test_workspace.c - workspace queries need no data and answer small sizes (test_errors.c tests
 * that a call needs exactly that much); and huge sizes: axes that may have any length because
 * another axis has length 0, and windows longer than all keys. */
#include "problem.h"

#include "core/kernel.h"
#include "cpu/parallel.h"

enum { long_length = 1 << 20 };

/* A call on a long sequence. Its tensors have no data. */
static void make_long(call *x, fdma_operation operation, int64_t kv_heads) {
    const call_sizes n = {.batch = 1,
                          .q_len = long_length,
                          .kv_len = long_length,
                          .q_heads = 4 * kv_heads,
                          .kv_heads = kv_heads,
                          .head_dim = 128};
    *x = (call){.operation = operation};
    if (operation == operation_select)
        x->args.select = (fdma_select_args){.window = 2048};
    if (operation == operation_forward)
        x->args.forward = (fdma_forward_args){.causal = 1};
    if (operation == operation_attention)
        x->args.attention = (fdma_attention_args){.window = 2048, .causal = 1};
    call_make(x, &n, FDMA_BFLOAT16, operation != operation_attention);
    call_describe_selection(x, 2048, FDMA_SCOPE_CAUSAL);
    if (operation == operation_attention)
        call_drop_selection(x);
}

/* O(threads * tile + batch * kv_heads * kv_len). A thread has q, out, logits and lists of a tile of
 * at most 256 rows, a block of at most 256 keys, head_dim 256 and 2048 slots, several times. A key
 * has a score, a bias, an expiry and a slot if the caller gives none, and scratch of the
 * selection. */
enum { bytes_per_thread = 1 << 21, bytes_per_key = 16, bytes_per_key_of_attention = 32 };

static void check_bytes(call *x, int32_t threads, const char *kernel, int64_t bytes_of_keys) {
    size_t bytes = SIZE_MAX;
    call_exec(x)->threads = threads;
    call_exec(x)->kernel = kernel;
    test_context("%s, %d threads, %s", operations[x->operation].name, threads, kernel);
    CHECK_OK(operations[x->operation].workspace(&x->args, &bytes));
    CHECK(bytes <= (size_t)(threads * (int64_t)bytes_per_thread + bytes_of_keys));
}

static void check_small(int64_t kv_heads, int32_t threads, const char *kernel) {
    const int64_t keys = kv_heads * long_length;
    call x;
    make_long(&x, operation_select, kv_heads);
    check_bytes(&x, threads, kernel, keys * bytes_per_key);
    make_long(&x, operation_forward, kv_heads);
    check_bytes(&x, threads, kernel, keys * bytes_per_key);
    call_drop_selection(&x);
    check_bytes(&x, threads, kernel, keys * bytes_per_key);
    make_long(&x, operation_attention, kv_heads);
    check_bytes(&x, threads, kernel, keys * bytes_per_key_of_attention);
}

static void memory_is_linear(void) {
    const kernel_list kernels = kernels_of("forward");
    for (int kernel = 0; kernel < kernels.count; kernel++) {
        if (strcmp(kernels.name[kernel], "reference") == 0)
            continue; /* written for clarity, not for long sequences */
        for (int32_t threads = 1; threads <= 16; threads++) {
            check_small(1, threads, kernels.name[kernel]);
            check_small(8, threads, kernels.name[kernel]);
        }
    }
}

/* Every piece of a workspace begins at a cache line, after pieces of any size. */
static void pieces_are_aligned(void) {
    for (size_t bytes = 1; bytes < 200; bytes++) {
        fdma_problem owner = {.exec = {.workspace = test_alloc(2048)}};
        fdma_arena arena = fdma_arena_of(&owner);
        for (int piece = 0; piece < 4; piece++)
            CHECK_INT((uintptr_t)fdma_arena_take(&arena, bytes) % arena_alignment, 0);
        test_free_all();
    }
}

/* The kernel queries, too, need no data, and name a kernel of this machine. */
static void queries_need_no_data(void) {
    static const fdma_operation asked[] = {operation_select, operation_forward};
    for (int i = 0; i < TEST_COUNT(asked); i++) {
        call x;
        const char *name = NULL;
        make_long(&x, asked[i], 2);
        CHECK_OK(operations[asked[i]].kernel(&x.args, &name));
        CHECK(name != NULL && strcmp(name, "reference") != 0);
    }
}

/* If a call has more threads than its workspace was asked for, the message names their number. */
static void messages_name_the_threads(void) {
    enum { len = 512, heads = 4, dim = 64 };
    float *const data = test_alloc(2 * len * heads * dim * sizeof(float));
    const fdma_tensor q = fdma_tensor_4d(data, FDMA_FLOAT32, 1, len, heads, dim);
    fdma_tensor out = q;
    out.data = data + len * heads * dim;
    fdma_forward_args args = {
        .size = sizeof args, .q = q, .k = q, .v = q, .out = out, .causal = 1, .exec.threads = 1};
    CHECK_OK(fdma_forward_workspace(&args, &args.exec.workspace_size));
    args.exec.workspace = test_alloc(args.exec.workspace_size);
    CHECK_OK(fdma_forward(&args));
    args.exec.threads = 4;
    if (fdma_thread_count(4, 4) < 4)
        return; // built without threads
    CHECK_INT(fdma_forward(&args), FDMA_WORKSPACE_TOO_SMALL);
    CHECK_WORD(fdma_last_error(), "or more with 4 threads");
}

/* ---- packed sequences ---- */

/* The workspace of a call whose tensors have no data. packed: for packed sequences that
 * divide kv_len positions in any way. */
static size_t workspace_of(fdma_operation operation, const problem *sizes, int64_t kv_len,
                           int32_t threads, bool packed) {
    const call_sizes n = {.batch = 1,
                          .q_len = kv_len,
                          .kv_len = kv_len,
                          .q_heads = sizes->q_heads,
                          .kv_heads = sizes->kv_heads,
                          .head_dim = sizes->head_dim};
    call x = {.operation = operation};
    size_t bytes = 0;
    if (operation == operation_select)
        x.args.select = (fdma_select_args){.window = sizes->window, .recent = sizes->recent};
    call_make(&x, &n, FDMA_BFLOAT16, sizes->causal);
    call_describe_selection(&x, sizes->window, FDMA_SCOPE_GLOBAL);
    if (sizes->window < 0)
        call_drop_selection(&x);
    call_exec(&x)->threads = threads;
    if (packed)
        *call_tensor_named(&x, "starts") = fdma_tensor_1d(NULL, FDMA_INT32, 9);
    CHECK_OK(operations[operation].workspace(&x.args, &bytes));
    return bytes;
}

static void check_workspace_for_all(fdma_operation operation, const problem *sizes,
                                    int32_t threads) {
    static const int64_t lens[] = {5, 700, 5000, 40000, 300000, 530000, 1000000};
    for (int n = 0; n < TEST_COUNT(lens); n++) {
        const size_t packed = workspace_of(operation, sizes, lens[n], threads, true);
        for (int64_t len = 1; len <= lens[n]; len += 1 + len / 29)
            CHECK(workspace_of(operation, sizes, len, threads, false) <= packed);
    }
}

/* The workspace query of packed sequences serves every way to divide the positions, although a
 * shorter sequence may need more than a longer one. */
static void workspace_serves_all_sequences(void) {
    static const fdma_operation asked[] = {operation_select, operation_forward, operation_backward};
    static const int64_t windows[] = {-1, 1, 100, 3000};
    for (int c = 0; c < 4 * 4 * 3 * 2; c++) {
        const int64_t kv_heads = 1 << (c % 4);
        const problem sizes = {.q_heads = kv_heads * (c % 5 + 1),
                               .kv_heads = kv_heads,
                               .head_dim = c % 3 ? 64 : 128,
                               .window = windows[c / 4 % 4],
                               .recent = c / 48 * 50,
                               .causal = c % 7 < 3};
        const fdma_operation operation = asked[c / 16 % 3];
        test_context("case %d", c);
        for (int32_t threads = 1; threads <= 48 && (c % 4 < 3 || threads < 2);
             threads = 3 * threads)
            if (operation != operation_select || sizes.window > 0)
                check_workspace_for_all(operation, &sizes, threads);
    }
}

/* ---- huge sizes ---- */

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
    TEST(memory_is_linear),
    TEST(pieces_are_aligned),
    TEST(queries_need_no_data),
    TEST(messages_name_the_threads),
    TEST(workspace_serves_all_sequences),
    TEST(more_than_memory_is_refused),
    TEST(nothing_takes_no_time),
    TEST(windows_beyond_every_key_are_one),
};

int main(void) { return test_run(tests, TEST_COUNT(tests)); }
