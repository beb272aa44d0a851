/* cases.h - tests/cases.def as problems: each case's shape and options, with random tensors, and
 * every eleventh key of every other case not valid. */
#ifndef CASES_H
#define CASES_H

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

static inline problem case_problem(int index, fdma_dtype dtype) {
    problem x = cases[index].sizes;
    x.dtype = dtype;
    problem_fill(&x, (uint64_t)index + 100);
    x.key_valid = new_tensor(FDMA_UINT8, x.batch, x.kv_len, -1, -1);
    for (int64_t i = 0; i < x.batch * x.kv_len; i++) {
        ((uint8_t *)x.key_valid.data)[i] = index % 2 || i % 11 != 3;
    }
    problem_select(&x);
    return x;
}

/* Eight bytes of out at a time: what fills an output is a 16-bit number, too. */
static inline void check_written(fdma_tensor tensor) {
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

#endif /* CASES_H */
