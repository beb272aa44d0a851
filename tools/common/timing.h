/* Wall-clock time, and what a few samples of it say. */
#ifndef FDMA_TOOLS_COMMON_TIMING_H
#define FDMA_TOOLS_COMMON_TIMING_H

enum { SAMPLE_LIMIT = 100 };

typedef struct samples {
    double values[SAMPLE_LIMIT];
    int count;
} samples;

/*! now_ms() - milliseconds of a clock that only goes forward. */
double now_ms(void);

/*! add_sample() - keeps a value; one beyond SAMPLE_LIMIT is dropped. */
void add_sample(samples *set, double value);

/*! quantile() - the value below which `share` of the samples lie, interpolated; NaN without
 * samples. */
double quantile(const samples *set, double share);
double median(const samples *set);

/*! spread() - (90th percentile - 10th percentile) / median. */
double spread(const samples *set);

#endif /* FDMA_TOOLS_COMMON_TIMING_H */
