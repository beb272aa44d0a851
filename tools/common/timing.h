/* Wall-clock time, and statistics of a few samples. */
#pragma once

enum { SAMPLE_LIMIT = 100 };

typedef struct samples {
    double values[SAMPLE_LIMIT];
    int count;
} samples;

/*! now_ms() - milliseconds of a monotonic clock. */
double now_ms(void);

/*! add_sample() - adds a value; those beyond SAMPLE_LIMIT are dropped. */
void add_sample(samples *set, double value);

/*! quantile() - the value below which that fraction of the samples lies, interpolated; NaN if there
 *  are no samples. */
double quantile(const samples *set, double fraction);
double median(const samples *set);

/*! spread() - (90th percentile - 10th percentile) / median. */
double spread(const samples *set);
