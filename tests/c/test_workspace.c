/* test_workspace.c - workspace queries need no data and answer small sizes. (test_errors.c tests
 * that a call needs exactly that much.) */
#include "calls.h"
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
                          .head_dim = 128,
                          .tiles = long_length / 128,
                          .width = 2048 + 127};
    *x = (call){.operation = operation};
    if (operation == operation_select)
        x->args.select = (fdma_select_args){.window = 2048};
    if (operation == operation_lists)
        x->args.lists = (fdma_lists_args){.q_len = long_length, .tile_len = 128, .causal = 1};
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
    make_long(&x, operation_lists, kv_heads);
    check_bytes(&x, threads, kernel, 0);
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
        fdma_problem problem = {.exec = {.workspace = test_alloc(2048)}};
        fdma_arena arena = fdma_arena_of(&problem);
        for (int piece = 0; piece < 4; piece++)
            CHECK_INT((uintptr_t)fdma_arena_take(&arena, bytes) % arena_alignment, 0);
        test_free_all();
    }
}

/* The kernel queries, too, need no data, and name a kernel of this machine. */
static void queries_need_no_data(void) {
    static const fdma_operation asked[] = {operation_select, operation_lists, operation_forward};
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

static const test_entry tests[] = {
    TEST(memory_is_linear),
    TEST(pieces_are_aligned),
    TEST(queries_need_no_data),
    TEST(messages_name_the_threads),
};

int main(void) { return test_run(tests, TEST_COUNT(tests)); }
