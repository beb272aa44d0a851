/* The parts of `fdma attend`: read the inputs, run dense and selected, compare with the reference,
 * report, write. */
#ifndef FDMA_TOOLS_ATTEND_ATTEND_H
#define FDMA_TOOLS_ATTEND_ATTEND_H

#include "fdma.h"

typedef struct attend_options {
    const char *file;
    const char *kernel; /* NULL: the fastest */
    const char *out;    /* NULL: nothing is written */
    const char *where;  /* NULL: the CPU */
    int64_t window;
    int64_t threads;
    double scale;
    double softcap;
    int causal;
    int scope; /* fdma_scope; -1: by causal */
    int bias;  /* fdma_bias_form */
    int dtype; /* fdma_dtype - 1; -1: as in the file */
    int json;
    int32_t device; /* what `where` means */
} attend_options;

/* Contiguous tensors in the dtype that runs; score or both of dt_proj and a, the others absent. */
typedef struct attend_inputs {
    fdma_tensor q, k, v;
    fdma_tensor score;
    fdma_tensor dt_proj, a;
} attend_inputs;

typedef struct attend_results {
    fdma_tensor score, bias;
    fdma_selection selection;
    fdma_tensor out, lse;             /* of the kept keys */
    fdma_tensor dense_out, dense_lse; /* of all visible keys, with the same bias */
    const char *kernel;
    double score_ms; /* NaN where the file brings the scores */
    double select_ms, selected_ms, dense_ms;
} attend_results;

/* exp(lse selected - lse dense), the share of a row's dense attention that its kept keys carry. */
typedef struct attention_mass {
    double mean, worst; /* NaN without rows */
    int64_t rows;       /* those that see a key */
    int64_t worst_batch, worst_head, worst_query;
} attention_mass;

typedef struct kept_keys {
    double a_query;   /* mean over queries and kv heads */
    double visible;   /* mean over queries */
    double ever_kept; /* keys that any position keeps, mean over kv heads */
} kept_keys;

typedef struct reference_difference {
    double dense, selected; /* largest absolute difference of out; NaN where only one is NaN */
    double step;            /* between values of out's dtype at its largest magnitude */
    int64_t queries;        /* compared, of q_len */
    int own_selection;      /* the reference selected for itself */
} reference_difference;

typedef struct attend_summary {
    attention_mass mass;
    kept_keys keys;
    reference_difference difference;
} attend_summary;

/* Each returns 0, or an exit code after a line on stderr. */
int read_inputs(const attend_options *options, attend_inputs *inputs);
int run_attention(const attend_options *options, const attend_inputs *inputs,
                  attend_results *results);
int compare_with_reference(const attend_options *options, const attend_inputs *inputs,
                           const attend_results *results, reference_difference *difference);

attention_mass measure_mass(const attend_results *results);
kept_keys count_kept_keys(const attend_options *options, const attend_results *results);

void print_report(const attend_options *options, const attend_inputs *inputs,
                  const attend_results *results, const attend_summary *summary);
void print_json_report(const attend_options *options, const attend_inputs *inputs,
                       const attend_results *results, const attend_summary *summary);

#endif /* FDMA_TOOLS_ATTEND_ATTEND_H */
