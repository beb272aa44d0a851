/* test_workspace.c - what the workspace queries answer: the truth, without data, and little. */
#include "core/kernel.h"
#include "fixture.h"

#include <stdlib.h>

enum { long_length = 1 << 20 };

/* Tensors of a long sequence that exist on paper only. */
static fdma_tensor paper(fdma_dtype dtype, int32_t rank, int64_t n0, int64_t n1, int64_t n2,
                         int64_t n3) {
    const int64_t shape[4] = {n0, n1, n2, n3};
    return fdma_dense_tensor(NULL, dtype, rank, shape);
}

typedef struct paper_call {
    fdma_selection selection;
    fdma_select_args select;
    fdma_lists_args lists;
    fdma_forward_args forward;
    fdma_attention_args attention;
} paper_call;

static void paper_make(paper_call *x, int64_t kv_heads, int64_t length, int32_t threads,
                       const char *kernel) {
    const int64_t q_heads = 4 * kv_heads, head_dim = 128;
    const fdma_tensor q = paper(FDMA_BFLOAT16, 4, 1, length, q_heads, head_dim);
    const fdma_tensor k = paper(FDMA_BFLOAT16, 4, 1, length, kv_heads, head_dim);
    const fdma_tensor scores = paper(FDMA_FLOAT32, 3, 1, kv_heads, length, 0);
    const fdma_exec exec = {.threads = threads, .kernel = kernel};
    x->selection = (fdma_selection){.size = sizeof x->selection,
                                    .expiry = paper(FDMA_INT32, 3, 1, kv_heads, length, 0),
                                    .slot = paper(FDMA_INT32, 3, 1, kv_heads, length, 0),
                                    .window = 2048,
                                    .kv_len = length,
                                    .scope = FDMA_SCOPE_CAUSAL};
    x->select = (fdma_select_args){.size = sizeof x->select,
                                   .score = scores,
                                   .selection = &x->selection,
                                   .window = 2048,
                                   .exec = exec};
    x->lists = (fdma_lists_args){.size = sizeof x->lists,
                                 .selection = &x->selection,
                                 .list = paper(FDMA_INT32, 4, 1, kv_heads, length / 128, 2175),
                                 .count = paper(FDMA_INT32, 4, 1, kv_heads, length / 128, 2),
                                 .q_len = length,
                                 .tile_len = 128,
                                 .causal = 1,
                                 .exec = exec};
    x->forward = (fdma_forward_args){.size = sizeof x->forward,
                                     .q = q,
                                     .k = k,
                                     .v = k,
                                     .bias = scores,
                                     .out = q,
                                     .lse = paper(FDMA_FLOAT32, 3, 1, q_heads, length, 0),
                                     .selection = &x->selection,
                                     .causal = 1,
                                     .exec = exec};
    x->attention = (fdma_attention_args){
        .size = sizeof x->attention,
        .q = q,
        .k = k,
        .v = k,
        .dt_proj = paper(FDMA_BFLOAT16, 2, kv_heads, kv_heads * head_dim, 0, 0),
        .a = paper(FDMA_BFLOAT16, 1, kv_heads, 0, 0, 0),
        .out = q,
        .window = 2048,
        .causal = 1,
        .exec = exec,
    };
}

/* O(threads * tile + batch * kv_heads * kv_len). A thread's share: q, out, logits and lists of a
 * tile of at most 256 rows, a block of at most 256 keys, head_dim 256 and 2048 slots, some times
 * over. A key's share: a score, a bias, an expiry and a slot where the caller gives none, and
 * scratch of the selection. */
enum { bytes_a_thread = 1 << 21, bytes_a_key = 16, bytes_a_key_of_attention = 32 };

static size_t bound(int64_t threads, int64_t keys, int64_t each) {
    return (size_t)(threads * bytes_a_thread + keys * each);
}

static void check_small(int64_t kv_heads, int32_t threads, const char *kernel) {
    test_context("%d kv heads, %d threads, %s", (int)kv_heads, threads, kernel);
    static paper_call x;
    size_t bytes = SIZE_MAX;
    const int64_t keys = kv_heads * long_length;
    paper_make(&x, kv_heads, long_length, threads, kernel);
    CHECK_OK(fdma_select_workspace(&x.select, &bytes));
    CHECK(bytes <= bound(threads, keys, bytes_a_key));
    CHECK_OK(fdma_lists_workspace(&x.lists, &bytes));
    CHECK(bytes <= bound(threads, 0, 0));
    CHECK_OK(fdma_forward_workspace(&x.forward, &bytes));
    CHECK(bytes <= bound(threads, keys, bytes_a_key));
    CHECK_OK(fdma_attention_workspace(&x.attention, &bytes));
    CHECK(bytes <= bound(threads, keys, bytes_a_key_of_attention));
    x.forward.selection = NULL;
    CHECK_OK(fdma_forward_workspace(&x.forward, &bytes));
    CHECK(bytes <= bound(threads, keys, bytes_a_key));
}

static void memory_is_linear(void) {
    const kernel_list kernels = kernels_of("forward");
    for (int kernel = 0; kernel < kernels.count; kernel++) {
        if (strcmp(kernels.name[kernel], "reference") == 0)
            continue; /* made to be read, not for long sequences */
        for (int32_t threads = 1; threads <= 16; threads++) {
            check_small(1, threads, kernels.name[kernel]);
            check_small(8, threads, kernels.name[kernel]);
        }
    }
}

/* ---- small problems that are really run ---- */

typedef struct small_call {
    fdma_selection selection;
    fdma_score_args score;
    fdma_select_args select;
    fdma_lists_args lists;
    fdma_forward_args forward;
    fdma_attention_args attention;
} small_call;

static void small_make(small_call *x, const char *kernel) {
    const fdma_exec exec = {.kernel = kernel, .threads = 2};
    const fdma_tensor q = new_tensor(FDMA_FLOAT16, 2, 40, 4, 24);
    const fdma_tensor v = new_tensor(FDMA_FLOAT16, 2, 50, 2, 24);
    const fdma_tensor dt_proj = new_tensor(FDMA_FLOAT16, 2, 48, -1, -1);
    const fdma_tensor a = new_tensor(FDMA_FLOAT16, 2, -1, -1, -1);
    const fdma_tensor score = new_tensor(FDMA_FLOAT32, 2, 2, 50, -1);
    const fdma_tensor bias = new_tensor(FDMA_FLOAT32, 2, 2, 50, -1);
    x->selection = (fdma_selection){.size = sizeof x->selection,
                                    .expiry = new_tensor(FDMA_INT32, 2, 2, 50, -1),
                                    .slot = new_tensor(FDMA_INT32, 2, 2, 50, -1)};
    x->score = (fdma_score_args){.size = sizeof x->score,
                                 .v = v,
                                 .dt_proj = dt_proj,
                                 .a = a,
                                 .score = score,
                                 .bias = bias,
                                 .exec = exec};
    x->select = (fdma_select_args){.size = sizeof x->select,
                                   .score = score,
                                   .selection = &x->selection,
                                   .window = 9,
                                   .exec = exec};
    x->lists = (fdma_lists_args){.size = sizeof x->lists,
                                 .selection = &x->selection,
                                 .list = new_tensor(FDMA_INT32, 2, 2, 8, 13),
                                 .count = new_tensor(FDMA_INT32, 2, 2, 8, 2),
                                 .q_len = 40,
                                 .tile_len = 5,
                                 .causal = 1,
                                 .exec = exec};
    x->forward = (fdma_forward_args){.size = sizeof x->forward,
                                     .q = q,
                                     .k = v,
                                     .v = v,
                                     .bias = bias,
                                     .out = new_tensor(FDMA_FLOAT16, 2, 40, 4, 24),
                                     .lse = new_tensor(FDMA_FLOAT32, 2, 4, 40, -1),
                                     .selection = &x->selection,
                                     .causal = 1,
                                     .exec = exec};
    x->attention = (fdma_attention_args){.size = sizeof x->attention,
                                         .q = q,
                                         .k = v,
                                         .v = v,
                                         .dt_proj = dt_proj,
                                         .a = a,
                                         .out = x->forward.out,
                                         .window = 9,
                                         .causal = 1,
                                         .exec = exec};
}

static void check_too_small(fdma_status status, size_t bytes, fdma_tensor output) {
    char wanted[32];
    snprintf(wanted, sizeof wanted, "%zu", bytes);
    CHECK_INT(status, FDMA_WORKSPACE_TOO_SMALL);
    CHECK_WORD(fdma_last_error(), "workspace_size");
    CHECK_WORD(fdma_last_error(), wanted);
    const unsigned char *data = output.data;
    for (size_t i = 0; i < bytes_of(output); i++)
        CHECK(data[i] == 0);
}

/* One byte less than the query says is refused, and nothing is written; wherever in memory the
 * workspace lies, what the query says is enough, and nothing around it is touched. */
static void the_query_tells_the_truth(void) {
    const kernel_list kernels = kernels_of("forward");
    for (int kernel = 0; kernel < kernels.count; kernel++) {
        for (size_t shift = 0; shift < 70; shift += 23) {
            test_context("%s, base off by %zu", kernels.name[kernel], shift);
            static small_call x;
            small_make(&x, kernels.name[kernel]);
            fdma_exec *const execs[] = {&x.score.exec, &x.select.exec, &x.forward.exec,
                                        &x.attention.exec, &x.lists.exec};
            size_t bytes[5];
            CHECK_OK(fdma_score_workspace(&x.score, &bytes[0]));
            CHECK_OK(fdma_select_workspace(&x.select, &bytes[1]));
            x.selection.window = 9;
            x.selection.kv_len = 50;
            x.selection.scope = FDMA_SCOPE_CAUSAL;
            CHECK_OK(fdma_forward_workspace(&x.forward, &bytes[2]));
            CHECK_OK(fdma_attention_workspace(&x.attention, &bytes[3]));
            CHECK_OK(fdma_lists_workspace(&x.lists, &bytes[4]));
            for (int call = 0; call < TEST_COUNT(execs); call++) {
                execs[call]->workspace = (char *)test_alloc_guarded(bytes[call] + shift) + shift;
                execs[call]->workspace_size = bytes[call] - (bytes[call] > 0);
            }
            if (bytes[0] > 0)
                check_too_small(fdma_score(&x.score), bytes[0], x.score.score);
            if (bytes[1] > 0)
                check_too_small(fdma_select(&x.select), bytes[1], x.selection.expiry);
            if (bytes[2] > 0)
                check_too_small(fdma_forward(&x.forward), bytes[2], x.forward.out);
            if (bytes[4] > 0)
                check_too_small(fdma_lists(&x.lists), bytes[4], x.lists.count);
            CHECK(bytes[3] > 0);
            check_too_small(fdma_attention(&x.attention), bytes[3], x.attention.out);
            for (int call = 0; call < TEST_COUNT(execs); call++)
                execs[call]->workspace_size = bytes[call];
            CHECK_OK(fdma_score(&x.score));
            CHECK_OK(fdma_select(&x.select));
            CHECK_OK(fdma_lists(&x.lists));
            CHECK_OK(fdma_forward(&x.forward));
            CHECK_OK(fdma_attention(&x.attention));
            test_free_all();
        }
    }
}

/* Every piece of a workspace begins at a cache line, whatever was taken before it. */
static void pieces_are_aligned(void) {
    for (size_t bytes = 1; bytes < 200; bytes++) {
        fdma_problem problem = {.exec = {.workspace = test_alloc(2048)}};
        fdma_arena arena = fdma_arena_of(&problem);
        for (int piece = 0; piece < 4; piece++)
            CHECK_INT((uintptr_t)fdma_arena_take(&arena, bytes) % arena_alignment, 0);
        test_free_all();
    }
}

/* The kernel queries, too, work on paper, and name a kernel of this machine. */
static void queries_need_no_data(void) {
    static paper_call x;
    const char *name = NULL;
    paper_make(&x, 2, long_length, 1, NULL);
    CHECK_OK(fdma_select_kernel(&x.select, &name));
    CHECK(name != NULL && strlen(name) > 0);
    CHECK_OK(fdma_lists_kernel(&x.lists, &name));
    CHECK(name != NULL && strcmp(name, "reference") != 0);
    CHECK_OK(fdma_forward_kernel(&x.forward, &name));
    CHECK(name != NULL && strcmp(name, "reference") != 0);
}

static const test_entry tests[] = {
    TEST(memory_is_linear),
    TEST(the_query_tells_the_truth),
    TEST(pieces_are_aligned),
    TEST(queries_need_no_data),
};

int main(void) { return test_run(tests, TEST_COUNT(tests)); }
