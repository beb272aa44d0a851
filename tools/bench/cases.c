/* See bench/cases.h. The names of cases are made from the table. */
#include "bench/cases.h"

#include "common/arrays.h"

#include <inttypes.h>
#include <stdio.h>

#define DENSE(dtype, head_dim, kv_len)                                                             \
    {BENCH_FORWARD, dtype, ORDER_IID, head_dim, kv_len, 0, 1, 1, 0, 0}
#define SELECTED(dtype, kv_len, window)                                                            \
    {BENCH_FORWARD, dtype, ORDER_IID, 128, kv_len, window, 1, 1, 0, 0}
#define SELECT(order) {BENCH_SELECT, 0, order, 0, 131072, 2048, 1, 1, 0, 0}
#define DECODE(dtype, window, q_heads)                                                             \
    {BENCH_FORWARD, dtype, ORDER_IID, 128, 131072, window, q_heads, 8, 1, 0}
#define SCORE(dtype, heads) {BENCH_SCORE, dtype, ORDER_IID, 128, 16384, 0, heads, heads, 0, 0}
#define BACKWARD(dtype, head_dim, kv_len, window)                                                  \
    {BENCH_BACKWARD, dtype, ORDER_IID, head_dim, kv_len, window, 1, 1, 0, 0}
#define ROTATE(operation, dtype, len, heads)                                                       \
    {operation, dtype, ORDER_IID, 128, len, 0, heads, heads, 0, 0}
#define SCORE_BACKWARD(dtype) {BENCH_SCORE_BACKWARD, dtype, ORDER_IID, 128, 16384, 0, 8, 8, 0, 0}

static const bench_case cases[] = {
    DENSE(FDMA_FLOAT32, 128, 1024),
    DENSE(FDMA_FLOAT32, 128, 4096),
    DENSE(FDMA_FLOAT32, 128, 8192),
    DENSE(FDMA_FLOAT16, 128, 1024),
    DENSE(FDMA_FLOAT16, 128, 4096),
    DENSE(FDMA_FLOAT16, 128, 8192),
    DENSE(FDMA_BFLOAT16, 128, 1024),
    DENSE(FDMA_BFLOAT16, 128, 4096),
    DENSE(FDMA_BFLOAT16, 128, 8192),
    DENSE(FDMA_FLOAT32, 64, 4096),
    DENSE(FDMA_FLOAT32, 256, 4096),
    DENSE(FDMA_BFLOAT16, 64, 4096),
    DENSE(FDMA_BFLOAT16, 256, 4096),
    SELECTED(FDMA_FLOAT32, 16384, 1024),
    SELECTED(FDMA_FLOAT32, 16384, 2048),
    SELECTED(FDMA_FLOAT32, 65536, 2048),
    SELECTED(FDMA_FLOAT16, 16384, 1024),
    SELECTED(FDMA_FLOAT16, 16384, 2048),
    SELECTED(FDMA_BFLOAT16, 16384, 1024),
    SELECTED(FDMA_BFLOAT16, 16384, 2048),
    SELECTED(FDMA_BFLOAT16, 65536, 2048),
    {BENCH_FORWARD, FDMA_FLOAT32, ORDER_IID, 128, 8192, 2048, 32, 8, 0, 0},
    {BENCH_FORWARD, FDMA_BFLOAT16, ORDER_IID, 128, 8192, 2048, 32, 8, 0, 0},
    DECODE(FDMA_FLOAT32, 0, 8),
    DECODE(FDMA_FLOAT32, 0, 32),
    DECODE(FDMA_FLOAT32, 2048, 8),
    DECODE(FDMA_FLOAT16, 0, 8),
    DECODE(FDMA_BFLOAT16, 0, 8),
    DECODE(FDMA_BFLOAT16, 0, 32),
    DECODE(FDMA_BFLOAT16, 2048, 8),
    {BENCH_FORWARD, FDMA_FLOAT32, ORDER_IID, 64, 16, 0, 1, 1, 1, 0},
    SELECT(ORDER_IID),
    {BENCH_SELECT, 0, ORDER_IID, 0, 131072, 1792, 1, 1, 0, 256},
    SELECT(ORDER_DRIFT),
    SELECT(ORDER_RISING),
    SELECT(ORDER_FALLING),
    SELECT(ORDER_EQUAL),
    SELECT(ORDER_SAWTOOTH),
    SELECT(ORDER_NAN),
    SCORE(FDMA_FLOAT32, 8),
    SCORE(FDMA_FLOAT32, 32),
    SCORE(FDMA_FLOAT16, 8),
    SCORE(FDMA_BFLOAT16, 8),
    SCORE(FDMA_BFLOAT16, 32),
    {BENCH_ATTENTION, FDMA_FLOAT32, ORDER_IID, 128, 8192, 1024, 8, 8, 0, 0},
    BACKWARD(FDMA_FLOAT32, 128, 4096, 0),
    BACKWARD(FDMA_BFLOAT16, 128, 4096, 0),
    BACKWARD(FDMA_FLOAT32, 64, 4096, 0),
    BACKWARD(FDMA_FLOAT32, 128, 8192, 2048),
    BACKWARD(FDMA_FLOAT16, 128, 8192, 2048),
    BACKWARD(FDMA_BFLOAT16, 128, 8192, 2048),
    BACKWARD(FDMA_FLOAT32, 128, 32768, 2048),
    BACKWARD(FDMA_BFLOAT16, 128, 32768, 2048),
    {BENCH_BACKWARD, FDMA_FLOAT32, ORDER_RISING, 128, 8192, 2048, 1, 1, 0, 0},
    {BENCH_BACKWARD, FDMA_FLOAT32, ORDER_EQUAL, 128, 8192, 2048, 1, 1, 0, 0},
    {BENCH_BACKWARD, FDMA_FLOAT32, ORDER_SAWTOOTH, 128, 8192, 2048, 1, 1, 0, 0},
    {BENCH_BACKWARD, FDMA_FLOAT32, ORDER_IID, 128, 8192, 2048, 32, 8, 0, 0},
    {BENCH_BACKWARD, FDMA_BFLOAT16, ORDER_IID, 128, 8192, 2048, 32, 8, 0, 0},
    SCORE_BACKWARD(FDMA_FLOAT32),
    SCORE_BACKWARD(FDMA_BFLOAT16),
    ROTATE(BENCH_ROTATE, FDMA_FLOAT32, 8192, 32),
    ROTATE(BENCH_ROTATE, FDMA_BFLOAT16, 8192, 32),
    ROTATE(BENCH_ROTATE_BACKWARD, FDMA_FLOAT32, 8192, 32),
    ROTATE(BENCH_ROTATE_BACKWARD, FDMA_BFLOAT16, 8192, 32),
};

#define DEVICE_SELECT(order, kv_len, window, heads)                                                \
    {BENCH_SELECT, 0, order, 0, kv_len, window, heads, heads, 0, 0}
#define DEVICE_FORWARD(order, head_dim, kv_len, window, q_heads, kv_heads)                         \
    {BENCH_FORWARD, FDMA_BFLOAT16, order, head_dim, kv_len, window, q_heads, kv_heads, 0, 0}
#define DEVICE_BACKWARD(head_dim, kv_len, window, q_heads, kv_heads)                               \
    {BENCH_BACKWARD, FDMA_BFLOAT16, ORDER_IID, head_dim, kv_len, window, q_heads, kv_heads, 0, 0}
#define DEVICE_SCORE_BACKWARD(head_dim, kv_len, heads)                                             \
    {BENCH_SCORE_BACKWARD, FDMA_BFLOAT16, ORDER_IID, head_dim, kv_len, 0, heads, heads, 0, 0}
#define DEVICE_ATTENTION(kv_len)                                                                   \
    {BENCH_ATTENTION, FDMA_BFLOAT16, ORDER_IID, 128, kv_len, 2048, 32, 8, 0, 0}

static const bench_case device_cases[] = {
    DEVICE_SELECT(ORDER_IID, 32768, 1024, 1),
    DEVICE_SELECT(ORDER_IID, 32768, 2048, 8),
    DEVICE_SELECT(ORDER_RISING, 32768, 2048, 8),
    DEVICE_SELECT(ORDER_FALLING, 32768, 2048, 8),
    DEVICE_SELECT(ORDER_EQUAL, 32768, 2048, 8),
    DEVICE_SELECT(ORDER_SAWTOOTH, 32768, 2048, 8),
    DEVICE_SELECT(ORDER_IID, 131072, 2048, 8),
    DEVICE_SELECT(ORDER_RISING, 131072, 2048, 8),
    DEVICE_SELECT(ORDER_EQUAL, 131072, 2048, 8),
    DEVICE_SELECT(ORDER_SAWTOOTH, 131072, 2048, 8),
    DEVICE_SELECT(ORDER_IID, 1048576, 2048, 8),
    {BENCH_SELECT, 0, ORDER_IID, 0, 32768, 1792, 8, 8, 0, 256},
    {BENCH_SELECT, 0, ORDER_IID, 0, 131072, 1792, 8, 8, 0, 256},
    {BENCH_SELECT, 0, ORDER_FALLING, 0, 131072, 1792, 8, 8, 0, 256},
    {BENCH_SCORE, FDMA_BFLOAT16, ORDER_IID, 128, 131072, 0, 8, 8, 0, 0},
    {BENCH_SCORE, FDMA_BFLOAT16, ORDER_IID, 128, 131072, 0, 32, 32, 0, 0},
    DECODE(FDMA_BFLOAT16, 0, 32),
    DECODE(FDMA_BFLOAT16, 2048, 32),
    {BENCH_FORWARD, FDMA_BFLOAT16, ORDER_IID, 64, 16, 0, 1, 1, 1, 0},
    DEVICE_FORWARD(ORDER_IID, 128, 8192, 0, 32, 8),
    DEVICE_FORWARD(ORDER_IID, 128, 32768, 0, 32, 8),
    DEVICE_FORWARD(ORDER_IID, 128, 8192, 2048, 32, 8),
    DEVICE_FORWARD(ORDER_IID, 128, 32768, 2048, 32, 8),
    DEVICE_FORWARD(ORDER_RISING, 128, 32768, 2048, 32, 8),
    DEVICE_FORWARD(ORDER_EQUAL, 128, 32768, 2048, 32, 8),
    DEVICE_FORWARD(ORDER_SAWTOOTH, 128, 32768, 2048, 32, 8),
    DEVICE_FORWARD(ORDER_IID, 128, 131072, 2048, 32, 8),
    DEVICE_FORWARD(ORDER_IID, 128, 32768, 2048, 32, 32),
    DEVICE_FORWARD(ORDER_IID, 64, 32768, 2048, 32, 8),
    DEVICE_FORWARD(ORDER_IID, 256, 32768, 2048, 16, 4),
    DEVICE_FORWARD(ORDER_IID, 64, 32768, 1024, 2, 1),
    {BENCH_FORWARD, FDMA_BFLOAT16, ORDER_IID, 128, 32768, 1792, 32, 8, 0, 256},
    DEVICE_ATTENTION(8192),
    DEVICE_ATTENTION(32768),
    DEVICE_ATTENTION(131072),
    DEVICE_ATTENTION(1048576),
    {BENCH_ATTENTION, FDMA_BFLOAT16, ORDER_IID, 128, 32768, 1792, 32, 8, 0, 256},
    {BENCH_BACKWARD, FDMA_BFLOAT16, ORDER_IID, 128, 32768, 1792, 32, 8, 0, 256},
    DEVICE_BACKWARD(128, 32768, 2048, 32, 8),
    DEVICE_BACKWARD(128, 16384, 2048, 32, 32),
    DEVICE_BACKWARD(64, 32768, 1024, 2, 1),
    DEVICE_SCORE_BACKWARD(128, 32768, 8),
    DEVICE_SCORE_BACKWARD(128, 131072, 8),
    DEVICE_SCORE_BACKWARD(128, 16384, 32),
    DEVICE_SCORE_BACKWARD(64, 32768, 1),
    ROTATE(BENCH_ROTATE, FDMA_BFLOAT16, 1, 32),
    ROTATE(BENCH_ROTATE, FDMA_BFLOAT16, 8192, 32),
    ROTATE(BENCH_ROTATE, FDMA_BFLOAT16, 131072, 32),
    ROTATE(BENCH_ROTATE_BACKWARD, FDMA_BFLOAT16, 8192, 32),
    ROTATE(BENCH_ROTATE_BACKWARD, FDMA_BFLOAT16, 131072, 32),
};

int64_t bench_case_count(int32_t device) {
    return device > 0 ? sizeof device_cases / sizeof device_cases[0]
                      : sizeof cases / sizeof cases[0];
}

const bench_case *bench_case_at(int32_t device, int64_t index) {
    return device > 0 ? &device_cases[index] : &cases[index];
}

enum { TINY_KEYS = 64 };

int64_t bench_case_queries(const bench_case *item) {
    return item->q_len > 0 ? item->q_len : item->kv_len;
}

bool bench_case_rotates(const bench_case *item) {
    return item->operation == BENCH_ROTATE || item->operation == BENCH_ROTATE_BACKWARD;
}

bool bench_case_reads(const bench_case *item) {
    return bench_case_rotates(item) || item->operation == BENCH_SCORE ||
           item->operation == BENCH_SCORE_BACKWARD ||
           (item->q_len == 1 && item->kv_len > TINY_KEYS);
}

static const char *form_of(const bench_case *item) {
    if (item->operation != BENCH_FORWARD && item->operation != BENCH_BACKWARD)
        return "";
    if (item->q_len == 1)
        return item->kv_len > TINY_KEYS ? "/decode" : "/tiny";
    return item->window > 0 ? "/selected" : "/dense";
}

static const char *const operations[] = {
    [BENCH_FORWARD] = "forward",   [BENCH_SELECT] = "select",
    [BENCH_SCORE] = "score",       [BENCH_ATTENTION] = "attention",
    [BENCH_BACKWARD] = "backward", [BENCH_SCORE_BACKWARD] = "score_backward",
    [BENCH_ROTATE] = "rotate",     [BENCH_ROTATE_BACKWARD] = "rotate_backward",
};

const char *bench_case_operation(const bench_case *item) {
    return operations[item->operation == BENCH_ATTENTION ? BENCH_FORWARD : item->operation];
}

void bench_case_name(const bench_case *item, char name[BENCH_NAME]) {
    static const char *const orders[] = {"iid",   "drift",    "rising", "falling",
                                         "equal", "sawtooth", "nan"};
    char form[32] = "";
    char heads[64] = "";
    char window[48] = "";
    if (item->operation == BENCH_SELECT)
        snprintf(form, sizeof form, "/%s", orders[item->order]);
    else
        snprintf(form, sizeof form, "%s%s%s/%s/d%" PRId64, form_of(item),
                 item->order != ORDER_IID ? "/" : "",
                 item->order != ORDER_IID ? orders[item->order] : "", dtype_name(item->dtype),
                 item->head_dim);
    if (item->window > 0)
        snprintf(window, sizeof window, "/w%" PRId64, item->window);
    if (item->recent > 0)
        snprintf(window, sizeof window, "/w%" PRId64 "r%" PRId64, item->window, item->recent);
    if (item->q_heads > 1)
        snprintf(heads, sizeof heads, "/h%" PRId64 "g%" PRId64, item->q_heads, item->kv_heads);
    snprintf(name, BENCH_NAME, "%.15s%.31s/n%" PRId64 "%.20s%.14s", operations[item->operation],
             form, item->kv_len, window, heads);
}

/* Forward has 4 * head_dim operations for each query head, query and key that the query keeps. */
double bench_case_flops(const bench_case *item) {
    const double len = (double)item->kv_len;
    const int64_t kept = item->window + item->recent;
    const double most = item->window > 0 && kept < item->kv_len ? (double)kept : len;
    const double pairs = item->q_len == 1 ? most : most * (most + 1) / 2 + (len - most) * most;
    const double heads = (double)item->kv_heads;
    switch (item->operation) {
    case BENCH_FORWARD:
    case BENCH_ATTENTION:
        return 4 * (double)item->head_dim * (double)item->q_heads * pairs;
    case BENCH_BACKWARD: // five products, forward has two
        return 10 * (double)item->head_dim * (double)item->q_heads * pairs;
    case BENCH_SCORE_BACKWARD: // dt once more, ddt_proj, dv
        return 6 * heads * heads * (double)item->head_dim * len;
    case BENCH_ROTATE: // two products and a sum for each channel
        return 3 * heads * (double)item->head_dim * len;
    case BENCH_ROTATE_BACKWARD: // three sums of products more, and three products
        return 12 * heads * (double)item->head_dim * len;
    case BENCH_SCORE:
        return 2 * heads * heads * (double)item->head_dim * len;
    default:
        return 0;
    }
}
