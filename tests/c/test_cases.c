/* test_cases.c - walks tests/cases.def: on every case, every kernel gives the same bits for any
 * number of threads, stays within its outputs, and answers each sequence as if it were alone.
 * (`fdma check` walks the same list for accuracy.) */
#include "problem.h"

typedef struct shape_case {
    const char *name;
    problem sizes; /* no tensors yet */
} shape_case;

enum { MASK_FULL, MASK_CAUSAL, MASK_GLOBAL };

static const shape_case cases[] = {
#define CASE(case_name, n_batch, n_q, n_kv, n_q_heads, n_kv_heads, n_dim, n_window, mask, form,    \
             cap, scores, layout, padding)                                                         \
    {case_name,                                                                                    \
     {.batch = n_batch,                                                                            \
      .q_len = n_q,                                                                                \
      .kv_len = n_kv,                                                                              \
      .q_heads = n_q_heads,                                                                        \
      .kv_heads = n_kv_heads,                                                                      \
      .head_dim = n_dim,                                                                           \
      .window = n_window,                                                                          \
      .scope = MASK_##mask == MASK_CAUSAL ? FDMA_SCOPE_CAUSAL : FDMA_SCOPE_GLOBAL,                 \
      .causal = MASK_##mask != MASK_FULL,                                                          \
      .softcap = cap}},
#include "../cases.def"
#undef CASE
};

/* Each case in the next of the types. */
static problem problem_of(int index) {
    problem x = cases[index].sizes;
    x.dtype = problem_dtypes[index % problem_dtype_count];
    problem_fill(&x, (uint64_t)index + 100);
    x.key_valid = new_tensor(FDMA_UINT8, x.batch, x.kv_len, -1, -1);
    for (int64_t i = 0; i < x.batch * x.kv_len; i++) {
        ((uint8_t *)x.key_valid.data)[i] = index % 2 || i % 11 != 3;
    }
    problem_select(&x);
    return x;
}

/* Eight bytes of out at a time: what fills an output is a 16-bit number, too. */
static void check_written(fdma_tensor tensor) {
    const unsigned char *data = tensor.data;
    const size_t size = tensor.rank == 4 ? 8 : sizeof(float);
    unsigned char unwritten[8];
    memset(unwritten, test_guard_byte, sizeof unwritten);
    for (size_t at = 0; at < bytes_of(tensor); at += size) {
        if (!CHECK(memcmp(data + at, unwritten, size) != 0)) {
            return;
        }
    }
}

static void every_thread_count_gives_the_same(void) {
    for (int index = 0; index < TEST_COUNT(cases); index++) {
        const kernel_list kernels =
            kernels_for("forward", problem_dtypes[index % problem_dtype_count]);
        for (int kernel = 0; kernel < kernels.count; kernel++) {
            test_context("%s %s", kernels.name[kernel], cases[index].name);
            const problem x = problem_of(index);
            const attended one = problem_attend(&x, kernels.name[kernel], 1);
            check_same_results(problem_attend(&x, kernels.name[kernel], 3), one);
            check_written(one.out);
            check_written(one.lse);
            test_free_all();
        }
    }
}

static fdma_tensor last_of(fdma_tensor tensor) {
    tensor.data = (char *)tensor.data +
                  (size_t)((tensor.shape[0] - 1) * tensor.stride[0]) * dtype_size(tensor.dtype);
    tensor.shape[0] = 1;
    return tensor;
}

static void each_sequence_is_alone(void) {
    for (int index = 0; index < TEST_COUNT(cases); index++) {
        const kernel_list kernels =
            kernels_for("forward", problem_dtypes[index % problem_dtype_count]);
        for (int kernel = 0; kernel < kernels.count && cases[index].sizes.batch > 1; kernel++) {
            test_context("%s %s", kernels.name[kernel], cases[index].name);
            const problem x = problem_of(index);
            problem last = x;
            last.batch = 1;
            last.q = last_of(x.q);
            last.k = last_of(x.k);
            last.v = last_of(x.v);
            last.bias = last_of(x.bias);
            last.key_valid = last_of(x.key_valid);
            if (x.window >= 0) {
                last.selection.expiry = last_of(x.selection.expiry);
                last.selection.slot = last_of(x.selection.slot);
            }
            const attended all = problem_attend(&x, kernels.name[kernel], 1);
            const attended want = {last_of(all.out), last_of(all.lse)};
            check_same_results(problem_attend(&last, kernels.name[kernel], 2), want);
            test_free_all();
        }
    }
}

static const test_entry tests[] = {
    TEST(every_thread_count_gives_the_same),
    TEST(each_sequence_is_alone),
};

int main(void) { return test_run(tests, TEST_COUNT(tests)); }
