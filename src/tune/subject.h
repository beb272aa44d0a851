/* The calls that fdma_tune() measures, of one shape, on random tensors. */
#pragma once

#include "tune/tune.h"

typedef struct tuning_subject {
    fdma_operation operation; /* forward or backward: the one that is measured */
    fdma_forward_args forward;
    fdma_backward_args backward; /* backward of the forward call */
    fdma_selection selection;
    tuning_class calls;
    int64_t rows;    /* rows of a kv head */
    void *tensors;   /* memory that the subject owns */
    void *workspace; /* as large as the measured call needs */
    size_t workspace_size;
    fdma_tuning *trial; /* the measured choice, as its only entry */
} tuning_subject;

/* Checks the shape, and makes the tensors. The subject must be ended even after an error, and must
 * not move. */
fdma_status fdma_begin_subject(const fdma_tune_args *args, tuning_subject *subject);
void fdma_end_subject(tuning_subject *subject);

fdma_status fdma_measure_operation(tuning_subject *subject, fdma_operation operation);

/* Makes later calls follow this choice; `kernel` becomes the name of the kernel that will run. */
fdma_status fdma_set_choice(tuning_subject *subject, const tuning_choice *choice,
                            const char **kernel);

/* Makes `calls` calls, and returns the seconds of one. */
fdma_status fdma_time_calls(tuning_subject *subject, int64_t calls, double *seconds);
