/* Calls one operation over random tensors, so that valgrind can count its instructions:
 *
 *     instructions dense | selected | backward LEN WINDOW
 *
 * Causal, float32, two query heads on one kv head, head_dim 64, one thread. dense is fdma_forward()
 * over all keys, selected fdma_attention(), and backward its gradients. check_instructions.py runs
 * it. Exit status: 0, or 1 where a call fails. */
#include "fdma.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { q_heads = 2, kv_heads = 1, head_dim = 64 };

static void *allocate(size_t count, size_t size) {
    void *const data = calloc(count, size);
    if (data == NULL)
        exit(1);
    return data;
}

/* Repeatable numbers in [-1, 1): the high bits of a linear congruential generator. */
static fdma_tensor random_rows(int64_t len, int64_t heads) {
    static uint64_t state = 1;
    float *const data = allocate((size_t)(len * heads * head_dim), sizeof(float));
    for (int64_t x = 0; x < len * heads * head_dim; x++) {
        state = state * 6364136223846793005U + 1442695040888963407U;
        data[x] = (float)(state >> 40) * 0x1p-23F - 1;
    }
    return fdma_tensor_4d(data, FDMA_FLOAT32, 1, len, heads, head_dim);
}

static fdma_tensor per_key(fdma_dtype dtype, int64_t heads, int64_t len) {
    return fdma_tensor_3d(allocate((size_t)(heads * len), 4), dtype, 1, heads, len);
}

static void set_workspace(fdma_exec *exec, size_t bytes) {
    exec->workspace = allocate(bytes, 1);
    exec->workspace_size = bytes;
}

static fdma_status run_dense(int64_t len) {
    fdma_forward_args args = {
        .size = sizeof args,
        .q = random_rows(len, q_heads),
        .k = random_rows(len, kv_heads),
        .v = random_rows(len, kv_heads),
        .out = random_rows(len, q_heads),
        .causal = 1,
        .exec = {.threads = 1},
    };
    size_t bytes;
    if (fdma_forward_workspace(&args, &bytes) == FDMA_OK)
        set_workspace(&args.exec, bytes);
    return fdma_forward(&args);
}

static fdma_status run_backward(const fdma_attention_args *args, int64_t len) {
    float ddt_proj[head_dim], da[kv_heads];
    fdma_attention_backward_args back = {
        .size = sizeof back,
        .dout = random_rows(len, q_heads),
        .out = args->out,
        .lse = args->lse,
        .q = args->q,
        .k = args->k,
        .v = args->v,
        .dt_proj = args->dt_proj,
        .a = args->a,
        .bias = args->bias,
        .selection = args->selection,
        .dq = random_rows(len, q_heads),
        .dk = random_rows(len, kv_heads),
        .dv = random_rows(len, kv_heads),
        .ddt_proj = fdma_tensor_2d(ddt_proj, FDMA_FLOAT32, kv_heads, kv_heads * head_dim),
        .da = fdma_tensor_1d(da, FDMA_FLOAT32, kv_heads),
        .causal = 1,
        .exec = {.threads = 1},
    };
    size_t bytes;
    if (fdma_attention_backward_workspace(&back, &bytes) == FDMA_OK)
        set_workspace(&back.exec, bytes);
    return fdma_attention_backward(&back);
}

static fdma_status run_selected(int64_t len, int64_t window, int with_gradients) {
    float dt_proj[head_dim], a[kv_heads] = {1};
    for (int c = 0; c < head_dim; c++)
        dt_proj[c] = (float)(c % 5 - 2) / head_dim;
    fdma_selection selection = {
        .size = sizeof selection,
        .expiry = per_key(FDMA_INT32, kv_heads, len),
        .slot = per_key(FDMA_INT32, kv_heads, len),
    };
    fdma_attention_args args = {
        .size = sizeof args,
        .q = random_rows(len, q_heads),
        .k = random_rows(len, kv_heads),
        .v = random_rows(len, kv_heads),
        .dt_proj = fdma_tensor_2d(dt_proj, FDMA_FLOAT32, kv_heads, kv_heads * head_dim),
        .a = fdma_tensor_1d(a, FDMA_FLOAT32, kv_heads),
        .out = random_rows(len, q_heads),
        .lse = per_key(FDMA_FLOAT32, q_heads, len),
        .bias = per_key(FDMA_FLOAT32, kv_heads, len),
        .selection = &selection,
        .window = window,
        .causal = 1,
        .exec = {.threads = 1},
    };
    size_t bytes;
    if (fdma_attention_workspace(&args, &bytes) == FDMA_OK)
        set_workspace(&args.exec, bytes);
    const fdma_status status = fdma_attention(&args);
    return status == FDMA_OK && with_gradients ? run_backward(&args, len) : status;
}

int main(int count, char **words) {
    const int64_t len = count == 4 ? atoll(words[2]) : 0, window = count == 4 ? atoll(words[3]) : 0;
    fdma_status status = FDMA_INVALID_ARGUMENT;
    if (len > 0 && strcmp(words[1], "dense") == 0)
        status = run_dense(len);
    else if (len > 0)
        status = run_selected(len, window, strcmp(words[1], "backward") == 0);
    if (status != FDMA_OK)
        fprintf(stderr, "instructions: %s: %s\n", fdma_status_name(status), fdma_last_error());
    return status != FDMA_OK;
}
