/* The report of `fdma attend`, as text and as JSON. */
#include "attend/attend.h"
#include "attend/draw.h"
#include "common/arrays.h"
#include "common/json.h"
#include "common/text.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

static const char *scope_name(int scope) {
    return scope == FDMA_SCOPE_CAUSAL ? "causal" : "global";
}

static const char *bias_name(int bias) {
    static const char *const names[] = {
        [FDMA_BIAS_EXP] = "exp", [FDMA_BIAS_LINEAR] = "linear", [FDMA_BIAS_NONE] = "none"};
    return names[bias];
}

attention_mass measure_mass(const attend_results *results) {
    attention_mass mass = {.mean = (double)NAN, .worst = (double)NAN};
    const float *selected = results->lse.data;
    const float *dense = results->dense_lse.data;
    const int64_t *shape = results->lse.shape;
    const int64_t rows = element_count(&results->lse);
    double sum = 0;
    for (int64_t row = 0; row < rows; row++) {
        if (dense[row] == -INFINITY)
            continue; // sees no key
        const double kept = exp((double)selected[row] - (double)dense[row]);
        sum += kept;
        if (mass.rows == 0 || kept < mass.worst || isnan(kept)) {
            mass.worst = kept;
            mass.worst_batch = row / (shape[1] * shape[2]);
            mass.worst_head = row / shape[2] % shape[1];
            mass.worst_query = row % shape[2];
        }
        mass.rows++;
    }
    if (mass.rows > 0)
        mass.mean = sum / (double)mass.rows;
    return mass;
}

kept_keys count_kept_keys(const attend_options *options, const attend_results *results) {
    const fdma_selection *selection = &results->selection;
    const int32_t *expiry = selection->expiry.data;
    const int64_t kv_len = selection->kv_len;
    const int64_t q_len = results->out.shape[1];
    const int64_t heads = selection->expiry.shape[0] * selection->expiry.shape[1];
    const bool causal = options->causal;
    kept_keys keys = {0};
    for (int64_t head = 0; head < heads; head++) {
        for (int64_t j = 0; j < kv_len; j++) {
            const int32_t end = expiry[head * kv_len + j];
            keys.per_query += (double)live_queries(selection, j, end, q_len, causal, 0, q_len);
            keys.ever_kept += end > j;
        }
    }
    for (int64_t j = 0; j < kv_len; j++)
        keys.visible += (double)live_queries(selection, j, INT32_MAX, q_len, causal, 0, q_len);
    keys.per_query /= (double)(heads * q_len);
    keys.ever_kept /= (double)heads;
    keys.visible /= (double)q_len;
    return keys;
}

/* Reports surprises: dtypes that differ, NaN, scores that are not used. */
static void print_surprises(FILE *stream, const attend_options *options,
                            const attend_inputs *inputs) {
    const char *const *dtypes = inputs->dtypes;
    if (strcmp(dtypes[ATTEND_Q], dtypes[ATTEND_K]) != 0 ||
        strcmp(dtypes[ATTEND_Q], dtypes[ATTEND_V]) != 0)
        fprintf(stream, "             in the file q is %s, k %s, v %s\n", dtypes[ATTEND_Q],
                dtypes[ATTEND_K], dtypes[ATTEND_V]);
    if (options->layout == LAYOUT_BHLD)
        fprintf(stream, "             in the file [batch, heads, len, head_dim], and so is out\n");
    for (int t = 0; t < attend_tensor_count; t++)
        if (inputs->nans[t] > 0)
            fprintf(stream, "             %s has %" PRId64 " NaN\n", attend_name((attend_tensor)t),
                    inputs->nans[t]);
    if (inputs->leaves_projection)
        fprintf(stream, "             score is taken; the file has dt_proj and a too\n");
}

static void print_input(FILE *stream, const attend_options *options, const attend_inputs *inputs) {
    const int64_t *q = inputs->q.shape;
    const int64_t *k = inputs->k.shape;
    fprintf(stream, "  input      ");
    print_text(stream, options->file);
    fprintf(stream,
            "\n             q [%" PRId64 ", %" PRId64 ", %" PRId64 ", %" PRId64
            "], k and v [%" PRId64 ", %" PRId64 ", %" PRId64 ", %" PRId64 "], %s\n",
            q[0], q[1], q[2], q[3], k[0], k[1], k[2], k[3], dtype_name(inputs->q.dtype));
    print_surprises(stream, options, inputs);
    fprintf(stream, "  attention  window %" PRId64, options->window);
    if (options->recent > 0)
        fprintf(stream, ", recent %" PRId64, options->recent);
    if (options->sinks > 0)
        fprintf(stream, ", sinks %" PRId64, options->sinks);
    fprintf(stream, ", %s, %s scope, bias %s", options->causal ? "causal" : "not causal",
            scope_name(options->scope), bias_name(options->bias));
    if (options->softcap > 0)
        fprintf(stream, ", softcap %g", options->softcap);
    fprintf(stream, "\n");
}

/* Other programs only ever make a run slower, so the fastest runs are the ones to compare. */
static void print_time(FILE *stream, const char *name, const samples *times) {
    fprintf(stream, "  %-10s fastest %.3f ms, median %.3f, slowest %.3f", name, quantile(times, 0),
            median(times), quantile(times, 1));
}

static double fastest_speedup(const attend_times *times) {
    return quantile(&times->dense, 0) / quantile(&times->selected, 0);
}

static double median_speedup(const attend_times *times) {
    return median(&times->dense) / median(&times->selected);
}

static void print_times(FILE *stream, const attend_results *results) {
    const attend_times *times = &results->times;
    fprintf(stream, "  kernel     %s, %d %s\n", results->kernel, times->dense.count,
            times->dense.count == 1 ? "run" : "runs of dense and selected attention in turn");
    if (times->score.count > 0) {
        print_time(stream, "score", &times->score);
        fprintf(stream, "\n");
    }
    print_time(stream, "dense", &times->dense);
    fprintf(stream, "\n");
    print_time(stream, "selected", &times->selected);
    fprintf(stream, "; selection %.3f\n", quantile(&times->select, 0));
    fprintf(stream, "  speedup    %.2f by the fastest runs, %.2f by the medians\n",
            fastest_speedup(times), median_speedup(times));
}

static void print_difference(FILE *stream, const reference_difference *difference, int64_t q_len,
                             fdma_dtype dtype) {
    fprintf(stream, "  reference  largest difference %.2g dense, %.2g selected", difference->dense,
            difference->selected);
    fprintf(stream, "; rounding step of %s %.2g\n             ", dtype_name(dtype),
            difference->step);
    if (difference->queries == q_len)
        fprintf(stream, "(all queries compared");
    else
        fprintf(stream, "(%" PRId64 " of %" PRId64 " queries compared", difference->queries, q_len);
    fprintf(stream, difference->own_selection
                        ? ", with the reference's selection)\n"
                        : ", with the same selection: the reference would take too long)\n");
}

static void print_decoded(FILE *stream, const decoded_tokens *decoded) {
    if (decoded->tokens == 0)
        return;
    fprintf(stream,
            "  decode     %" PRId64 " token%s: fastest %.4f ms a token, median %.4f, slowest %.4f\n"
            "             cache %.1f kB, k and v of all positions %.1f kB\n"
            "             largest difference from the whole sequence %.2g (allowed: %.2g)\n",
            decoded->tokens, decoded->tokens == 1 ? "" : "s", quantile(&decoded->times, 0),
            median(&decoded->times), quantile(&decoded->times, 1), 1e-3 * decoded->cache_bytes,
            1e-3 * decoded->full_bytes, decoded->difference, decoded->allowed);
}

void print_report(FILE *stream, const attend_options *options, const attend_inputs *inputs,
                  const attend_results *results, const attend_summary *summary) {
    const attention_mass *mass = &summary->mass;
    const kept_keys *keys = &summary->keys;
    const int64_t q_len = inputs->q.shape[1];
    fprintf(stream, "\n");
    print_input(stream, options, inputs);
    print_times(stream, results);
    fprintf(stream,
            "  kept       %.1f of %.1f visible keys per query (%.1f %%); %.1f of %" PRId64
            " keys are kept by some query\n",
            keys->per_query, keys->visible, 100 * keys->per_query / keys->visible, keys->ever_kept,
            results->selection.kv_len);
    fprintf(stream, "  mass       the kept keys have %.1f %% of the dense probability",
            100 * mass->mean);
    fprintf(stream, "; worst row %.1f %% (head %" PRId64 ", query %" PRId64 ")\n",
            100 * mass->worst, mass->worst_head, mass->worst_query);
    print_difference(stream, &summary->difference, q_len, inputs->q.dtype);
    print_decoded(stream, &summary->decoded);
    if (options->out != NULL) {
        fprintf(stream, "  written    out and lse to ");
        print_text(stream, options->out);
        fprintf(stream, "\n");
    }
    fprintf(stream, "\n  keys (across) that each query (down) keeps, head 0\n");
    draw_selection(stream, &results->selection, q_len, options->causal);
    fprintf(stream, "\n");
}

static void json_field(FILE *stream, const char *name, double number) {
    fprintf(stream, ", \"%s\": ", name);
    json_number(stream, number);
}

/* NAME is the median, NAME_range the fastest and the slowest run. */
static void json_times(FILE *stream, const char *name, const samples *times) {
    json_field(stream, name, median(times));
    fprintf(stream, ", \"%s_range\": [", name);
    json_number(stream, quantile(times, 0));
    fputs(", ", stream);
    json_number(stream, quantile(times, 1));
    fputs("]", stream);
}

/* For each tensor that was read: its dtype in the file, and its number of NaN. */
static void json_inputs(FILE *stream, const attend_options *options, const attend_inputs *inputs) {
    const char *between = "";
    fprintf(stream, ", \"layout\": \"%s\", \"inputs\": {",
            options->layout == LAYOUT_BHLD ? "bhld" : "blhd");
    for (int t = 0; t < attend_tensor_count; t++) {
        if (inputs->dtypes[t] == NULL)
            continue;
        fprintf(stream, "%s\"%s\": {\"dtype\": \"%s\", \"nan\": %" PRId64 "}", between,
                attend_name((attend_tensor)t), inputs->dtypes[t], inputs->nans[t]);
        between = ", ";
    }
    fputs("}", stream);
}

static void json_options(FILE *stream, const attend_options *options, const attend_inputs *inputs,
                         const attend_results *results) {
    fprintf(stream, "{\"file\": ");
    json_string(stream, options->file);
    fprintf(stream, ", \"q\": ");
    json_shape(stream, &inputs->q);
    fprintf(stream, ", \"k\": ");
    json_shape(stream, &inputs->k);
    fprintf(stream, ", \"dtype\": \"%s\", \"window\": %" PRId64, dtype_name(inputs->q.dtype),
            options->window);
    fprintf(stream,
            ", \"recent\": %" PRId64 ", \"sinks\": %" PRId64 ", \"causal\": ", options->recent,
            options->sinks);
    json_bool(stream, options->causal);
    fprintf(stream, ", \"scope\": \"%s\", \"bias\": \"%s\", \"kernel\": \"%s\"",
            scope_name(options->scope), bias_name(options->bias), results->kernel);
    json_field(stream, "scale",
               options->scale > 0 ? options->scale : 1 / sqrt((double)inputs->q.shape[3]));
    json_field(stream, "softcap", options->softcap);
    fprintf(stream, ", \"threads\": %" PRId64, results->threads);
    json_inputs(stream, options, inputs);
}

static void json_decoded(FILE *stream, const decoded_tokens *decoded) {
    fprintf(stream, ", \"decode_tokens\": %" PRId64, decoded->tokens);
    json_times(stream, "decode_ms", &decoded->times);
    json_field(stream, "cache_bytes", decoded->cache_bytes);
    json_field(stream, "full_cache_bytes", decoded->full_bytes);
    json_field(stream, "difference_decode", decoded->difference);
    json_field(stream, "difference_allowed", decoded->allowed);
}

void print_json_report(FILE *stream, const attend_options *options, const attend_inputs *inputs,
                       const attend_results *results, const attend_summary *summary) {
    const attention_mass *mass = &summary->mass;
    const attend_times *times = &results->times;
    json_options(stream, options, inputs, results);
    fprintf(stream, ", \"runs\": %d", times->dense.count);
    json_times(stream, "score_ms", &times->score);
    json_times(stream, "dense_ms", &times->dense);
    json_times(stream, "select_ms", &times->select);
    json_times(stream, "selected_ms", &times->selected);
    json_field(stream, "speedup", fastest_speedup(times));
    json_field(stream, "speedup_median", median_speedup(times));
    json_field(stream, "keys_per_query", summary->keys.per_query);
    json_field(stream, "keys_visible", summary->keys.visible);
    json_field(stream, "keys_ever_kept", summary->keys.ever_kept);
    json_field(stream, "mass_mean", mass->mean);
    json_field(stream, "mass_worst", mass->worst);
    fprintf(stream, ", \"mass_worst_row\": [%" PRId64 ", %" PRId64 ", %" PRId64 "]",
            mass->worst_batch, mass->worst_head, mass->worst_query);
    json_field(stream, "difference_dense", summary->difference.dense);
    json_field(stream, "difference_selected", summary->difference.selected);
    json_field(stream, "output_step", summary->difference.step);
    fprintf(stream,
            ", \"queries_compared\": %" PRId64 ", \"sampled\": ", summary->difference.queries);
    json_bool(stream, summary->difference.queries < inputs->q.shape[1]);
    fprintf(stream, ", \"reference_selected\": ");
    json_bool(stream, summary->difference.own_selection);
    if (summary->decoded.tokens > 0)
        json_decoded(stream, &summary->decoded);
    fprintf(stream, ", \"out\": ");
    json_string(stream, options->out);
    fprintf(stream, "}\n");
}
