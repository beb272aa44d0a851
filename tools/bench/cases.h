/* The cases of `fdma bench`: their calls, names and amounts of work. */
#pragma once

#include "fdma.h"

#include <stdbool.h>

typedef enum bench_operation {
    BENCH_FORWARD, /* dense if window is 0, else selection and forward */
    BENCH_SELECT,
    BENCH_SCORE,
    BENCH_ATTENTION, /* score, selection and forward in one call */
    BENCH_BACKWARD,  /* of a given selection and forward call */
    BENCH_SCORE_BACKWARD,
    BENCH_ROTATE,          /* all heads, without a norm */
    BENCH_ROTATE_BACKWARD, /* after a norm, with dweight */
} bench_operation;

typedef enum score_order {
    ORDER_IID,
    ORDER_DRIFT,    /* random around a slow rise */
    ORDER_RISING,   /* every key is kept for a while */
    ORDER_FALLING,  /* the first keys stay */
    ORDER_EQUAL,    /* all ties: a sliding window */
    ORDER_SAWTOOTH, /* rises over 4096 keys, again and again */
    ORDER_NAN,      /* random, every eighth a NaN */
} score_order;

typedef struct bench_case {
    bench_operation operation;
    fdma_dtype dtype;  /* 0 for select, whose scores are float32 */
    score_order order; /* of the scores */
    int64_t head_dim;  /* 0 for select */
    int64_t kv_len;
    int64_t window; /* 0: dense */
    int64_t q_heads, kv_heads;
    int64_t q_len;  /* 0: kv_len */
    int64_t recent; /* newest keys that a query keeps beside the window */
} bench_case;

enum { BENCH_NAME = 112 };

/*! bench_case_count(), bench_case_at() - the cases of the CPU, or of CUDA devices. */
int64_t bench_case_count(int32_t device);
const bench_case *bench_case_at(int32_t device, int64_t index);

/*! bench_case_name() - such as "forward/selected/f32/d128/n16384/w2048". */
void bench_case_name(const bench_case *item, char name[BENCH_NAME]);

/*! bench_case_operation() - the fdma_kernel_info.operation of the kernels that run it. */
const char *bench_case_operation(const bench_case *item);

/*! bench_case_queries() - its q_len. */
int64_t bench_case_queries(const bench_case *item);

/*! bench_case_flops() - its useful floating-point operations; 0 if it has none. */
double bench_case_flops(const bench_case *item);

/*! bench_case_rotates() - whether it rotates kv_len rows of kv_heads heads. */
bool bench_case_rotates(const bench_case *item);

/*! bench_case_reads() - whether its time is mostly spent on reading k and v, or a score's v, or on
 *  reading and writing rows that it rotates. */
bool bench_case_reads(const bench_case *item);
