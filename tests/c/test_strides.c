/* test_strides.c - the same numbers at other addresses give the same bits: views, slices of packed
 * buffers, bases aligned to one element only, repeated axes, offsets beyond 2^31. */
#if defined(__linux__)
#define _GNU_SOURCE /* MAP_NORESERVE */
#include <sys/mman.h>
#endif

#include "problem.h"

typedef void (*property)(problem *x, const char *kernel);

static void check_on_all_kernels(property holds) {
    const problem sizes = {.batch = 2,
                           .q_len = 70,
                           .kv_len = 90,
                           .q_heads = 4,
                           .kv_heads = 2,
                           .head_dim = 40,
                           .window = 25,
                           .causal = 1};
    for_each_problem(&sizes, 31, holds);
}

/* ---- a view of [batch, heads, len, head_dim] ---- */

static void check_heads_first(problem *x, const char *kernel) {
    const attended plain = problem_attend(x, kernel, 1);
    fdma_forward_args args = problem_args(x, kernel);
    args.q = heads_first(x->q);
    args.k = heads_first(x->k);
    args.v = heads_first(x->v);
    args.out = heads_first(args.out);
    CHECK_OK(run_forward(&args));
    check_same_results((attended){gathered(args.out), args.lse}, plain);
}

static void heads_before_length(void) { check_on_all_kernels(check_heads_first); }

/* ---- odd bases and odd strides ---- */

static fdma_tensor off_by_one(fdma_tensor like) {
    const int64_t row = like.shape[3] + 3, heads = like.shape[2] * row + 1;
    const int64_t stride[4] = {like.shape[1] * heads + 5, heads, row, 1};
    const size_t size = dtype_size(like.dtype);
    char *base = test_alloc_guarded((size_t)(like.shape[0] * stride[0] + 1) * size);
    return placed(like, base + size, stride);
}

static fdma_tensor off_by_one_word(fdma_tensor like) {
    const size_t size = dtype_size(like.dtype);
    char *base = test_alloc_guarded(bytes_of(like) + size);
    return placed(like, base + size, like.stride);
}

static void check_unaligned(problem *x, const char *kernel) {
    const attended plain = problem_attend(x, kernel, 1);
    problem odd = *x;
    odd.selection.expiry = off_by_one_word(x->selection.expiry);
    odd.selection.slot = off_by_one_word(x->selection.slot);
    fdma_forward_args args = problem_args(&odd, kernel);
    args.q = off_by_one(x->q);
    args.k = off_by_one(x->k);
    args.v = off_by_one(x->v);
    args.bias = off_by_one_word(x->bias);
    args.out = off_by_one(args.out);
    args.lse = off_by_one_word(args.lse);
    size_t bytes = 0;
    CHECK_OK(fdma_forward_workspace(&args, &bytes));
    for (size_t shift = 0; shift < 4; shift++) {
        args.exec.workspace = (char *)test_alloc_guarded(bytes + shift) + shift;
        args.exec.workspace_size = bytes;
        CHECK_OK(fdma_forward(&args));
        check_same_results((attended){gathered(args.out), args.lse}, plain);
    }
}

static void aligned_to_one_element(void) { check_on_all_kernels(check_unaligned); }

/* ---- out is a slice of a packed buffer, and the other slices do not change ---- */

static void check_packed_out(problem *x, const char *kernel) {
    const attended plain = problem_attend(x, kernel, 1);
    const fdma_tensor packed = new_output(x->dtype, x->batch, x->q_len, x->q_heads + 3, 40);
    fdma_forward_args args = problem_args(x, kernel);
    const size_t size = dtype_size(x->dtype);
    args.out = packed;
    args.out.shape[2] = x->q_heads;
    args.out.data = (char *)packed.data + 40 * size; /* one head before, two after */
    CHECK_OK(run_forward(&args));
    check_same_results((attended){gathered(args.out), args.lse}, plain);

    uint8_t untouched[8];
    memset(untouched, test_guard_byte, sizeof untouched);
    for (int64_t i = 0; i < count_of(packed); i++) {
        const int64_t head = i / 40 % (x->q_heads + 3);
        if (head < 1 || head > x->q_heads)
            CHECK_BYTES((char *)packed.data + (size_t)i * size, untouched, size);
    }
}

static void out_within_a_packed_buffer(void) { check_on_all_kernels(check_packed_out); }

/* ---- a stride of 0 repeats ---- */

static void check_repeated(problem *x, const char *kernel) {
    problem repeated = *x;
    repeated.k.stride[0] = repeated.v.stride[0] = 0; /* the batch shares its keys */
    repeated.q.stride[2] = 0;                        /* all heads have the same query */
    repeated.bias.stride[0] = repeated.bias.stride[1] = 0;
    problem copied = repeated;
    copied.q = gathered(repeated.q);
    copied.k = gathered(repeated.k);
    copied.v = gathered(repeated.v);
    copied.bias = gathered(repeated.bias);
    check_same_results(problem_attend(&repeated, kernel, 1), problem_attend(&copied, kernel, 1));
}

static void repeated_axes(void) { check_on_all_kernels(check_repeated); }

/* ---- strides of axes of length 1 are ignored ---- */

static void check_single(problem *x, const char *kernel) {
    problem single = problem_sequence(x, 0);
    const attended plain = problem_attend(&single, kernel, 1);
    single.q.stride[0] = -7;
    single.k.stride[0] = INT64_MAX;
    single.v.stride[0] = 0;
    single.bias.stride[0] = INT64_MIN;
    single.selection.expiry.stride[0] = -1;
    fdma_forward_args args = problem_args(&single, kernel);
    args.out.stride[0] = 0;
    args.lse.stride[0] = INT64_MAX;
    CHECK_OK(run_forward(&args));
    check_same_results((attended){args.out, args.lse}, plain);
}

static void axes_of_length_one(void) { check_on_all_kernels(check_single); }

/* ---- offsets beyond 32 bits ---- */

#if defined(__linux__)
/* Two sequences, more than 2^31 elements apart. Only pages that are touched exist. */
static void check_far(problem *x, const char *kernel) {
    const int64_t apart = (INT64_C(1) << 32) + 64;
    const size_t size = dtype_size(x->dtype), bytes = (size_t)(apart + (1 << 20)) * size;
    const attended plain = problem_attend(x, kernel, 1);
    fdma_forward_args args = problem_args(x, kernel);
    fdma_tensor *const far[] = {&args.q, &args.k, &args.v, &args.out};
    void *pages[4];
    int mapped = 0;
    for (; mapped < TEST_COUNT(far); mapped++) {
        pages[mapped] = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (pages[mapped] == MAP_FAILED) {
            printf("skipped: %zu bytes of address space are not to be had\n", bytes);
            break;
        }
        const int64_t *near = far[mapped]->stride;
        const int64_t stride[4] = {apart, near[1], near[2], near[3]};
        *far[mapped] = placed(*far[mapped], pages[mapped], stride);
    }
    if (mapped == TEST_COUNT(far)) {
        CHECK_OK(run_forward(&args));
        check_same_results((attended){gathered(args.out), args.lse}, plain);
    }
    while (mapped-- > 0)
        munmap(pages[mapped], bytes);
}

static void offsets_beyond_32_bits(void) { check_on_all_kernels(check_far); }
#endif

/* ---- rows of dt_proj that lie apart ---- */

static void check_projection(const char *kernel, fdma_dtype dtype) {
    static const call_sizes n = {.batch = 1, .kv_len = 40, .kv_heads = 2, .head_dim = 24};
    static const int64_t stride[4] = {2 * 24 + 5, 1};
    call plain = {.operation = operation_score, .args.score = {.exec = {.kernel = kernel}}}, apart;
    uint64_t state = 9;
    call_make(&plain, &n, dtype, true);
    call_alloc(&plain, &state);
    call_copy(&apart, &plain);
    call_own_outputs(&apart);
    apart.args.score.dt_proj =
        placed(plain.args.score.dt_proj,
               test_alloc_guarded((size_t)(2 * stride[0]) * dtype_size(dtype)), stride);
    CHECK_OK(call_run(&plain));
    CHECK_OK(call_run(&apart));
    check_same_outputs(&apart, &plain);
}

static void rows_of_dt_proj_apart(void) { for_each_kernel("score", check_projection); }

static const test_entry tests[] = {
    TEST(rows_of_dt_proj_apart),      TEST(heads_before_length), TEST(aligned_to_one_element),
    TEST(out_within_a_packed_buffer), TEST(repeated_axes),       TEST(axes_of_length_one),
#if defined(__linux__)
    TEST(offsets_beyond_32_bits),
#endif
};

int main(void) { return test_run(tests, TEST_COUNT(tests)); }
