/* The parts of `fdma bench`: a list of cases, a job made of a case and a kernel, its timing. */
#ifndef FDMA_TOOLS_BENCH_BENCH_H
#define FDMA_TOOLS_BENCH_BENCH_H

#include "fdma.h"

typedef enum bench_operation {
    BENCH_FORWARD, /* dense where window is 0; else selection and forward */
    BENCH_SELECT,
    BENCH_SCORE,
    BENCH_ATTENTION, /* score, selection and forward in one call */
    BENCH_LISTS,     /* tile lists of a selection that is there */
    BENCH_BACKWARD,  /* of a forward call and its selection that are there */
    BENCH_SCORE_BACKWARD,
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
    int64_t window;
    int64_t q_heads, kv_heads;
    int64_t q_len; /* 0: kv_len */
} bench_case;

/* Where a case runs. */
typedef struct bench_place {
    const char *kernel; /* NULL: the dispatched one */
    int32_t device;     /* fdma_exec.device */
    int threads;        /* of the CPU */
} bench_place;

enum { BENCH_NAME = 112 };

/* The cases of a device are not those of the CPU. */
int64_t bench_case_count(int32_t device);
const bench_case *bench_case_at(int32_t device, int64_t index);

/*! bench_case_name() - such as "forward/selected/f32/d128/n16384/w2048". */
void bench_case_name(const bench_case *row, char name[BENCH_NAME]);

/*! bench_case_operation() - what a kernel must do to take it: fdma_kernel_info.operation. */
const char *bench_case_operation(const bench_case *row);

/*! bench_case_queries() - its q_len. */
int64_t bench_case_queries(const bench_case *row);

/*! bench_case_tile() - queries that share a list: those of a tile of 512 rows, a row being a query
 *  and one of the query heads of its kv head. */
int64_t bench_case_tile(const bench_case *row);

/*! bench_case_flops() - useful ones; 0 where the case has none. */
double bench_case_flops(const bench_case *row);

/*! bench_case_reads() - whether reading k and v, or a score's v, is most of the work. */
int bench_case_reads(const bench_case *row);

typedef struct bench_job bench_job;

/*! open_job() - tensors, filled, and workspace for a case.
 *  Returns NULL where no such kernel takes the case: fdma_last_error() says why. */
bench_job *open_job(const bench_case *row, const bench_place *place);
void close_job(bench_job *job);

/*! job_kernel() - the name of the kernel that does the job's main part. */
const char *job_kernel(const bench_job *job);

/*! run_job() - does it once. */
fdma_status run_job(bench_job *job);

typedef struct bench_figures {
    double ms, spread;
    double useful_gflops, of_peak; /* NaN where the case has no useful FLOP, or no peak is known */
    double ns_per_key;             /* and kv head; NaN but for select and lists */
    double of_read; /* the time that a plain read takes / ms; NaN where reading is not the work */
    double of_forward; /* lists: ms / the time of attention over the same selection; else NaN */
} bench_figures;

/*! measure_job() - times a job in turn with the peak loop and, where reading is the work, a plain
 *  read, or with the attention that lists are for; returns the status of its calls. A device has no
 *  peak loop; its plain read is half of a copy. */
fdma_status measure_job(const bench_case *row, bench_job *job, bench_figures *figures);

#endif /* FDMA_TOOLS_BENCH_BENCH_H */
