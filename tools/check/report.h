/* The results of each kernel: the cases that it took, passed, failed and refused. */
#pragma once

#include "check/operations.h"

/* A kernel and the sums of its results. */
typedef struct check_tally {
    fdma_kernel_info info;
    int passed, failed;
    int taken[FDMA_UINT8 + 1], refused[FDMA_UINT8 + 1]; /* cases, by dtype */
    int64_t compared;                                   /* elements */
    double worst;                                       /* the largest error ratio, and where */
    const char *worst_case;
    fdma_dtype worst_dtype;
} check_tally;

/* Cases of an operation and a dtype, of all kernels together. */
typedef struct check_coverage {
    int taken[check_operation_count][FDMA_UINT8 + 1]; /* by at least one kernel */
    int left[check_operation_count][FDMA_UINT8 + 1];  /* refused by every kernel that was asked */
} check_coverage;

/*! check_count() - adds one result to the tally, and prints a line if it is a failure. */
void check_count(check_tally *tally, const check_problem *problem, fdma_status status,
                 const check_error *error);

/*! check_say() - a line on standard output, at once. */
void check_say(const char *line);

/*! check_report_family() - prints a line for a family of cases that is done: how many cases, how
 *  many failures so far, how long it took. `name` is the name of one of the cases. */
void check_report_family(const char *name, int cases, const check_tally *tallies, int count,
                         double seconds);

/*! check_report() - prints a line for each kernel and the sums. `coverage` is NULL if not all
 *  kernels were asked. Returns the exit code. */
int check_report(const check_tally *tallies, int count, const check_coverage *coverage);
