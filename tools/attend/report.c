/* What `fdma attend` has to say. */
#include "attend/attend.h"
#include "attend/draw.h"
#include "common/arrays.h"
#include "common/json.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>

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
        const double share = exp((double)selected[row] - (double)dense[row]);
        sum += share;
        if (mass.rows == 0 || share < mass.worst || isnan(share)) {
            mass.worst = share;
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
    kept_keys keys = {0};
    for (int64_t head = 0; head < heads; head++) {
        for (int64_t j = 0; j < kv_len; j++) {
            const int32_t end = expiry[head * kv_len + j];
            keys.a_query +=
                (double)live_queries(selection, j, end, q_len, options->causal, 0, q_len);
            keys.ever_kept += end > j;
        }
    }
    for (int64_t j = 0; j < kv_len; j++)
        keys.visible +=
            (double)live_queries(selection, j, INT32_MAX, q_len, options->causal, 0, q_len);
    keys.a_query /= (double)(heads * q_len);
    keys.ever_kept /= (double)heads;
    keys.visible /= (double)q_len;
    return keys;
}

static void print_input(const attend_options *options, const attend_inputs *inputs) {
    const int64_t *q = inputs->q.shape;
    const int64_t *k = inputs->k.shape;
    printf("  input      %s\n", options->file);
    printf("             q [%" PRId64 ", %" PRId64 ", %" PRId64 ", %" PRId64 "], k and v [%" PRId64
           ", %" PRId64 ", %" PRId64 ", %" PRId64 "], %s\n",
           q[0], q[1], q[2], q[3], k[0], k[1], k[2], k[3], dtype_name(inputs->q.dtype));
    printf("  attention  window %" PRId64 ", %s, %s ranking, bias %s", options->window,
           options->causal ? "causal" : "every query sees every key",
           options->scope == FDMA_SCOPE_CAUSAL ? "each query's own" : "one",
           bias_name(options->bias));
    if (options->softcap > 0)
        printf(", softcap %g", options->softcap);
    printf("\n");
}

static void print_times(const attend_results *results) {
    printf("  kernel     %s\n", results->kernel);
    if (!isnan(results->score_ms))
        printf("  score      %.3f ms\n", results->score_ms);
    printf("  dense      %.3f ms\n", results->dense_ms);
    printf("  selected   %.3f ms (%.3f ms of them selection): %.1f times as fast\n",
           results->selected_ms, results->select_ms, results->dense_ms / results->selected_ms);
}

static void print_difference(const reference_difference *difference, int64_t q_len,
                             fdma_dtype dtype) {
    printf("  reference  largest difference %.2g dense, %.2g selected", difference->dense,
           difference->selected);
    printf("; a step of %s is up to %.2g\n             ", dtype_name(dtype), difference->step);
    if (difference->queries == q_len)
        printf("(over every query");
    else
        printf("(sampled: %" PRId64 " of %" PRId64 " queries", difference->queries, q_len);
    printf(difference->own_selection ? ", selection included)\n"
                                     : "; the selection is not compared)\n");
}

void print_report(const attend_options *options, const attend_inputs *inputs,
                  const attend_results *results, const attend_summary *summary) {
    const attention_mass *mass = &summary->mass;
    const kept_keys *keys = &summary->keys;
    const int64_t q_len = inputs->q.shape[1];
    printf("\n");
    print_input(options, inputs);
    print_times(results);
    printf("  kept       %.1f of %.1f keys a query (%.1f %%); %.1f of %" PRId64
           " keys are kept by some query\n",
           keys->a_query, keys->visible, 100 * keys->a_query / keys->visible, keys->ever_kept,
           results->selection.kv_len);
    printf("  mass       the kept keys carry %.1f %% of the dense attention", 100 * mass->mean);
    printf("; worst row %.1f %%", 100 * mass->worst);
    printf(" (head %" PRId64 ", query %" PRId64 ")\n", mass->worst_head, mass->worst_query);
    print_difference(&summary->difference, q_len, inputs->q.dtype);
    if (options->out)
        printf("  written    %s: out, lse\n", options->out);
    printf("\n  which keys (across) each query (down) keeps, first head\n");
    draw_selection(stdout, &results->selection, q_len, options->causal);
    printf("\n");
}

static void json_field(const char *name, double number) {
    printf(", \"%s\": ", name);
    json_number(stdout, number);
}

void print_json_report(const attend_options *options, const attend_inputs *inputs,
                       const attend_results *results, const attend_summary *summary) {
    const attention_mass *mass = &summary->mass;
    printf("{\"file\": ");
    json_string(stdout, options->file);
    printf(", \"q\": ");
    json_shape(stdout, &inputs->q);
    printf(", \"k\": ");
    json_shape(stdout, &inputs->k);
    printf(", \"dtype\": \"%s\", \"window\": %" PRId64 ", \"causal\": %s, \"scope\": \"%s\"",
           dtype_name(inputs->q.dtype), options->window, options->causal ? "true" : "false",
           scope_name(options->scope));
    printf(", \"bias\": \"%s\", \"kernel\": \"%s\"", bias_name(options->bias), results->kernel);
    json_field("scale", options->scale > 0 ? options->scale : 1 / sqrt((double)inputs->q.shape[3]));
    json_field("softcap", options->softcap);
    printf(", \"threads\": %" PRId64, options->threads);
    json_field("score_ms", results->score_ms);
    json_field("dense_ms", results->dense_ms);
    json_field("select_ms", results->select_ms);
    json_field("selected_ms", results->selected_ms);
    json_field("keys_a_query", summary->keys.a_query);
    json_field("keys_visible", summary->keys.visible);
    json_field("keys_ever_kept", summary->keys.ever_kept);
    json_field("mass_mean", mass->mean);
    json_field("mass_worst", mass->worst);
    printf(", \"mass_worst_row\": [%" PRId64 ", %" PRId64 ", %" PRId64 "]", mass->worst_batch,
           mass->worst_head, mass->worst_query);
    json_field("difference_dense", summary->difference.dense);
    json_field("difference_selected", summary->difference.selected);
    json_field("output_step", summary->difference.step);
    printf(", \"queries_compared\": %" PRId64 ", \"sampled\": %s", summary->difference.queries,
           summary->difference.queries < inputs->q.shape[1] ? "true" : "false");
    printf(", \"reference_selected\": %s, \"out\": ",
           summary->difference.own_selection ? "true" : "false");
    json_string(stdout, options->out);
    printf("}\n");
}
