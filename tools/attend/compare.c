/* Compares the results of `fdma attend` with the kernel "reference" in float64, query by query.
 * Under causal masking the query at position p is the last one of the first p + 1 keys, its
 * prefix. */
#include "attend/attend.h"
#include "commands.h"
#include "common/arrays.h"
#include "common/text.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct comparison {
    const attend_options *options;
    const attend_results *results;
    fdma_tensor q, k, v, bias; /* float64 */
    fdma_tensor expiry;        /* expiry of all keys */
    fdma_tensor prefix_expiry; /* clipped to a prefix */
    fdma_tensor out;           /* float64 [batch, 1, q_heads, head_dim] */
    void *workspace;
    size_t workspace_size;
} comparison;

static int refuse(const comparison *work) {
    print_error("fdma attend: %s: reference: %s", work->options->file, fdma_last_error());
    return EXIT_USAGE;
}

/* The reference takes some nanoseconds for each multiply-add, so that only some queries of long
 * inputs are compared. */
static int64_t queries_to_compare(const attend_inputs *inputs) {
    const double budget = 2.5e8; // multiply-adds
    const double keys = (double)inputs->k.shape[1];
    const double per_query =
        2 * keys * (double)(inputs->q.shape[0] * inputs->q.shape[2]) * (double)inputs->q.shape[3];
    const double queries = budget / per_query;
    const int64_t q_len = inputs->q.shape[1];
    if (queries >= (double)q_len)
        return q_len;
    return queries < 2 ? 2 : (int64_t)queries;
}

static fdma_exec reference_exec(const comparison *work) {
    return (fdma_exec){.kernel = "reference",
                       .workspace = work->workspace,
                       .workspace_size = work->workspace_size};
}

/* The reference sorts every prefix, which takes time that grows with the square of kv_len. */
static bool reference_selects(const fdma_tensor *score) {
    const double budget = 1e8;
    const double keys = (double)score->shape[2];
    return (double)(score->shape[0] * score->shape[1]) * keys * keys <= budget;
}

static int select_by_reference(comparison *work) {
    fdma_selection selection = {.size = sizeof selection, .expiry = work->expiry};
    fdma_select_args args = {
        .size = sizeof args,
        .score = work->results->score,
        .selection = &selection,
        .window = work->options->window,
        .recent = work->options->recent,
        .sinks = work->options->sinks,
        .scope = (fdma_scope)work->options->scope,
        .exec = {.kernel = "reference"},
    };
    size_t bytes = 0;
    if (fdma_select_workspace(&args, &bytes) != FDMA_OK)
        return refuse(work);
    args.exec.workspace = allocate(bytes);
    args.exec.workspace_size = bytes;
    const fdma_status status = fdma_select(&args);
    free(args.exec.workspace);
    return status != FDMA_OK ? refuse(work) : EXIT_DONE;
}

/* The expiry of the keys of a prefix: keys that outlive it are kept to its end. */
static fdma_tensor clip_expiry(const comparison *work, int64_t prefix) {
    const int32_t *expiry = work->expiry.data;
    int32_t *clipped = work->prefix_expiry.data;
    const int64_t count = element_count(&work->expiry);
    for (int64_t key = 0; key < count; key++)
        clipped[key] = expiry[key] < prefix ? expiry[key] : (int32_t)prefix;
    return axis_slice(work->prefix_expiry, 2, 0, prefix);
}

/* NaN counts as larger than every number. */
static double larger(double x, double y) { return y > x || isnan(y) ? y : x; }

/* The largest difference between query `i` of out and the reference's out. */
static double query_difference(const fdma_tensor *out, const fdma_tensor *reference, int64_t i) {
    const int64_t width = out->shape[2] * out->shape[3];
    double worst = 0;
    for (int64_t b = 0; b < out->shape[0]; b++) {
        for (int64_t c = 0; c < width; c++) {
            const int64_t at = (b * out->shape[1] + i) * width + c;
            const double x = load_element(out->data, out->dtype, at);
            const double y = load_element(reference->data, reference->dtype, b * width + c);
            const bool equal = x == y || (isnan(x) && isnan(y)); // inf - inf is NaN
            worst = larger(worst, equal ? 0 : fabs(x - y));
        }
    }
    return worst;
}

static int compare_query(const comparison *work, int64_t i, reference_difference *difference) {
    const int64_t kv_len = work->k.shape[1];
    const int64_t position = i + kv_len - work->q.shape[1];
    const int64_t prefix = !work->options->causal ? kv_len : position < 0 ? 0 : position + 1;
    fdma_selection selection = {
        .size = sizeof selection,
        .expiry = clip_expiry(work, prefix),
        .window = work->options->window,
        .recent = work->options->recent,
        .kv_len = prefix,
        .scope = (fdma_scope)work->options->scope,
    };
    fdma_forward_args args = {
        .size = sizeof args,
        .q = axis_slice(work->q, 1, i, prefix > 0),
        .k = axis_slice(work->k, 1, 0, prefix),
        .v = axis_slice(work->v, 1, 0, prefix),
        .bias = axis_slice(work->bias, 2, 0, prefix),
        .out = axis_slice(work->out, 1, 0, prefix > 0),
        .scale = work->options->scale,
        .softcap = work->options->softcap,
        .causal = work->options->causal,
        .exec = reference_exec(work),
    };
    memset(work->out.data, 0,
           (size_t)element_count(&work->out) * sizeof(double)); // where prefix is 0
    if (fdma_forward(&args) != FDMA_OK)
        return refuse(work);
    difference->dense =
        larger(difference->dense, query_difference(&work->results->dense_out, &work->out, i));
    args.selection = &selection;
    if (fdma_forward(&args) != FDMA_OK)
        return refuse(work);
    difference->selected =
        larger(difference->selected, query_difference(&work->results->out, &work->out, i));
    return EXIT_DONE;
}

static int compare_queries(const comparison *work, reference_difference *difference) {
    const int64_t q_len = work->q.shape[1];
    const int64_t last = difference->queries - 1;
    for (int64_t sample = 0; sample <= last; sample++) {
        // evenly spaced, with the first and the last query
        const int64_t i =
            last == 0 ? 0 : (int64_t)((double)sample * (double)(q_len - 1) / (double)last);
        const int code = compare_query(work, i, difference);
        if (code != EXIT_DONE)
            return code;
    }
    return EXIT_DONE;
}

static void prepare(const attend_inputs *inputs, const attend_results *results, comparison *work) {
    const int64_t *q = inputs->q.shape;
    const int64_t one_query[] = {q[0], 1, q[2], q[3]};
    const fdma_tensor *expiry = &results->selection.expiry;
    work->q = convert_array(&inputs->q, FDMA_FLOAT64);
    work->k = convert_array(&inputs->k, FDMA_FLOAT64);
    work->v = convert_array(&inputs->v, FDMA_FLOAT64);
    if (results->bias.rank > 0)
        work->bias = convert_array(&results->bias, FDMA_FLOAT64);
    work->out = allocate_array(FDMA_FLOAT64, 4, one_query);
    work->expiry = allocate_array(FDMA_INT32, 3, expiry->shape);
    work->prefix_expiry = allocate_array(FDMA_INT32, 3, expiry->shape);
    memcpy(work->expiry.data, expiry->data, (size_t)element_count(expiry) * sizeof(int32_t));
}

/* The workspace of one query over all keys is enough for every prefix. */
static int allocate_workspace(comparison *work) {
    const fdma_forward_args args = {
        .size = sizeof args,
        .q = axis_slice(work->q, 1, 0, 1),
        .k = work->k,
        .v = work->v,
        .bias = work->bias,
        .out = work->out,
        .exec = {.kernel = "reference"},
    };
    if (fdma_forward_workspace(&args, &work->workspace_size) != FDMA_OK)
        return refuse(work);
    work->workspace = allocate(work->workspace_size);
    return EXIT_DONE;
}

/* The rounding step of out's dtype where out is largest, for comparison with the difference. */
static double largest_step(const fdma_tensor *out) {
    const int64_t count = element_count(out);
    double largest = 0;
    for (int64_t x = 0; x < count; x++)
        largest = fmax(largest, fabs(load_element(out->data, out->dtype, x))); // ignores NaN
    return largest > 0 && isfinite(largest) ? rounding_step(out->dtype, largest) : 0;
}

int compare_with_reference(const attend_options *options, const attend_inputs *inputs,
                           const attend_results *results, reference_difference *difference) {
    comparison work = {.options = options, .results = results};
    prepare(inputs, results, &work);
    *difference = (reference_difference){
        .queries = queries_to_compare(inputs),
        .own_selection = reference_selects(&results->score),
        .step = largest_step(&results->dense_out),
    };
    int code = difference->own_selection ? select_by_reference(&work) : EXIT_DONE;
    if (code == EXIT_DONE)
        code = allocate_workspace(&work);
    if (code == EXIT_DONE)
        code = compare_queries(&work, difference);
    void *const owned[] = {work.q.data,
                           work.k.data,
                           work.v.data,
                           work.bias.data,
                           work.out.data,
                           work.expiry.data,
                           work.prefix_expiry.data,
                           work.workspace};
    for (size_t o = 0; o < sizeof owned / sizeof owned[0]; o++)
        free(owned[o]);
    return code;
}
