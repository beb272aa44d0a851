/* Options, inputs and results that the steps of `fdma attend` share. */
#pragma once

#include "common/timing.h"
#include "fdma.h"

#include <stdbool.h>
#include <stdio.h>

/* The tensors of a file. */
typedef enum attend_tensor {
    ATTEND_Q,
    ATTEND_K,
    ATTEND_V,
    ATTEND_SCORE,
    ATTEND_DT_PROJ,
    ATTEND_A,
    attend_tensor_count,
} attend_tensor;

typedef enum attend_layout { LAYOUT_BLHD, LAYOUT_BHLD } attend_layout;

/*! attend_name() - what the tensor is called in options, messages and reports. */
const char *attend_name(attend_tensor tensor);

typedef struct attend_options {
    const char *file;
    const char *names[attend_tensor_count]; /* in the file; NULL: attend_name() */
    const char *kernel;                     /* NULL: the fastest */
    const char *out;                        /* NULL: nothing is written */
    const char *where;                      /* value of --device; NULL: the CPU */
    int64_t window, recent, sinks;
    int64_t decode; /* positions, the last ones, that are decoded one by one */
    int64_t threads;
    double scale;
    double softcap;
    bool causal;
    bool json, list;
    int scope;      /* fdma_scope; while options are read an index of the words, -1: by `causal` */
    int bias;       /* fdma_bias_form */
    int dtype;      /* fdma_dtype - 1; -1: as in the file */
    int layout;     /* attend_layout: of q, k and v in the file, and of out */
    int32_t device; /* fdma_exec.device */
} attend_options;

/* Contiguous tensors in the dtype that runs, [batch, len, heads, head_dim] in any layout of the
 * file. Either score or both of dt_proj and a are there. */
typedef struct attend_inputs {
    fdma_tensor q, k, v;
    fdma_tensor score;
    fdma_tensor dt_proj, a;
    const char *dtypes[attend_tensor_count]; /* in the file, such as "F32"; NULL: was not read */
    int64_t nans[attend_tensor_count];       /* elements that are NaN */
    bool leaves_projection;                  /* the file has dt_proj and a, too; score was taken */
} attend_inputs;

/* Milliseconds. Dense and selected runs alternate; sample n of each is of the same round. */
typedef struct attend_times {
    samples score;    /* empty if the file has the scores */
    samples select;   /* selection alone */
    samples selected; /* selection and attention over the kept keys */
    samples dense;    /* attention over all visible keys */
} attend_times;

typedef struct attend_results {
    fdma_tensor score, bias;
    fdma_selection selection;
    fdma_tensor out, lse;             /* over the kept keys */
    fdma_tensor dense_out, dense_lse; /* over all visible keys, with the same bias */
    const char *kernel;               /* the kernel of forward */
    int64_t threads;                  /* CPU threads that ran; 0: unknown */
    attend_times times;
} attend_results;

/* exp(lse of the kept keys - lse of all visible keys) of each row: the sum of the dense
 * probabilities of its kept keys. */
typedef struct attention_mass {
    double mean, worst; /* NaN if there are no rows */
    int64_t rows;       /* rows that see a key */
    int64_t worst_batch, worst_head, worst_query;
} attention_mass;

typedef struct kept_keys {
    double per_query; /* mean over queries and kv heads */
    double visible;   /* mean over queries */
    double ever_kept; /* keys that any query keeps, mean over kv heads */
} kept_keys;

typedef struct reference_difference {
    double dense, selected; /* largest absolute difference of out; NaN if only one is NaN */
    double step;            /* rounding step of out's dtype at its largest magnitude */
    int64_t queries;        /* compared, of q_len */
    bool own_selection;     /* the reference made its own selection */
} reference_difference;

typedef struct decoded_tokens {
    int64_t tokens;
    samples times;                  /* milliseconds a token */
    double cache_bytes, full_bytes; /* bytes of the cache; bytes of k and v of all positions */
    double difference, allowed;     /* of out, from attention over the whole sequence */
} decoded_tokens;

typedef struct attend_summary {
    attention_mass mass;
    kept_keys keys;
    reference_difference difference;
    decoded_tokens decoded; /* 0 tokens: none */
} attend_summary;

/* Each step returns 0, or an exit code after a line on stderr. */

/*! read_inputs() - input.c: the tensors of the file, converted to the dtype that runs. */
int read_inputs(const attend_options *options, attend_inputs *inputs);

/*! list_tensors() - input.c: prints name, dtype and shape of every tensor of the file. */
int list_tensors(const attend_options *options);

/*! run_attention() - run.c: scores, selection, attention over the kept and over all keys. */
int run_attention(const attend_options *options, const attend_inputs *inputs,
                  attend_results *results);

/*! compare_with_reference() - compare.c. */
int compare_with_reference(const attend_options *options, const attend_inputs *inputs,
                           const attend_results *results, reference_difference *difference);

/*! decode_tokens() - decode.c: the last positions one by one. */
int decode_tokens(const attend_options *options, const attend_inputs *inputs,
                  const attend_results *results, decoded_tokens *decoded);

/*! measure_mass(), count_kept_keys(), print_report(), print_json_report() - report.c. */
attention_mass measure_mass(const attend_results *results);
kept_keys count_kept_keys(const attend_options *options, const attend_results *results);
void print_report(FILE *stream, const attend_options *options, const attend_inputs *inputs,
                  const attend_results *results, const attend_summary *summary);
void print_json_report(FILE *stream, const attend_options *options, const attend_inputs *inputs,
                       const attend_results *results, const attend_summary *summary);
