/* `fdma attend --decode N`: decodes the last N positions once more, one by one through a cache, and
 * compares them with the attention over the whole sequence. The positions before them enter the
 * cache as a prefill. */
#include "attend/attend.h"

#include "commands.h"
#include "common/arrays.h"
#include "common/text.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { GROUPS = 25 }; /* groups of tokens, each with a time of its own */

typedef struct decoding {
    const attend_options *options;
    const attend_inputs *inputs;
    const attend_results *results;
    fdma_cache cache;
    void *memory; /* memory of the cache */
    fdma_tensor slot, expiry, out;
    void *workspace;
    size_t workspace_size;
} decoding;

static int refuse(const decoding *work) {
    print_error("fdma attend: %s: decode: %s", work->options->file, fdma_last_error());
    return EXIT_USAGE;
}

/* Checks the other options and the file for --decode. */
static int check_options(const attend_options *options, const attend_inputs *inputs) {
    const int64_t q_len = inputs->q.shape[1], kv_len = inputs->k.shape[1];
    const int64_t most = q_len < kv_len ? q_len : kv_len;
    if (options->scope != FDMA_SCOPE_CAUSAL) {
        print_error("fdma attend: --decode needs --causal, and causal scope");
        return EXIT_USAGE;
    }
    if (options->decode > most) {
        print_error("fdma attend: --decode is %" PRId64 ", want at most the file's %" PRId64
                    " positions",
                    options->decode, most);
        return EXIT_USAGE;
    }
    return EXIT_DONE;
}

static fdma_exec exec_of(const decoding *work) {
    return (fdma_exec){.kernel = work->options->kernel,
                       .device = work->options->device,
                       .threads = (int32_t)work->options->threads,
                       .workspace = work->workspace,
                       .workspace_size = work->workspace_size};
}

static void provide_workspace(decoding *work, size_t bytes, fdma_exec *exec) {
    free(work->workspace);
    work->workspace = allocate(bytes);
    work->workspace_size = bytes;
    *exec = exec_of(work);
}

static int make_cache(decoding *work, double *bytes) {
    const attend_options *const options = work->options;
    const int64_t *const k = work->inputs->k.shape;
    const int64_t kv_len = k[1];
    size_t size;
    work->cache = (fdma_cache){
        .sequences = k[0],
        .kv_heads = k[2],
        .head_dim = k[3],
        .window = options->window < kv_len ? options->window : kv_len, /* more keeps no more keys */
        .recent = options->recent < kv_len ? options->recent : kv_len,
        .sinks = options->sinks < kv_len ? options->sinks : kv_len,
        .dtype = work->inputs->k.dtype,
        .device = options->device,
    };
    if (fdma_cache_bytes(&work->cache, &size) != FDMA_OK)
        return refuse(work);
    work->memory = allocate(size);
    *bytes = (double)size;
    return fdma_cache_init(&work->cache, work->memory) != FDMA_OK ? refuse(work) : EXIT_DONE;
}

static size_t bytes_before(const fdma_tensor *tensor, int64_t b, int64_t row, int64_t g) {
    const int64_t at = b * tensor->stride[0] + row * tensor->stride[1] + g * tensor->stride[2];
    return (size_t)at * dtype_bytes(tensor->dtype);
}

static void copy_key(const decoding *work, int64_t b, int64_t g, int64_t row, int64_t j) {
    const fdma_tensor *const to[] = {&work->cache.k, &work->cache.v};
    const fdma_tensor *const from[] = {&work->inputs->k, &work->inputs->v};
    for (int t = 0; t < 2; t++)
        memcpy((char *)to[t]->data + bytes_before(to[t], b, row, g),
               (const char *)from[t]->data + bytes_before(from[t], b, j, g),
               (size_t)from[t]->shape[3] * dtype_bytes(from[t]->dtype));
    if (work->results->bias.rank > 0) {
        const fdma_tensor *const bias = &work->results->bias, *const kept = &work->cache.bias;
        const float *const source = bias->data;
        float *const target = kept->data;
        target[b * kept->stride[0] + g * kept->stride[1] + row] =
            source[b * bias->stride[0] + g * bias->stride[1] + j];
    }
}

/* Puts the first `count` positions into the cache. Their scores alone decide which keys it
 * keeps. */
static int prefill(decoding *work, int64_t count) {
    const int64_t *const k = work->inputs->k.shape;
    const int64_t keys[] = {k[0], k[2], count};
    const fdma_cache *const cache = &work->cache;
    const int64_t rows = cache->window + cache->recent;
    if (count == 0)
        return EXIT_DONE;
    work->expiry = allocate_array(FDMA_INT32, 3, keys);
    work->slot = allocate_array(FDMA_INT32, 3, keys);
    fdma_selection selection = {
        .size = sizeof selection, .expiry = work->expiry, .slot = work->slot};
    fdma_select_args args = {
        .size = sizeof args,
        .score = axis_slice(work->results->score, 2, 0, count),
        .table_out = cache->table,
        .selection = &selection,
        .window = cache->window,
        .recent = cache->recent,
        .sinks = cache->sinks,
        .exec = exec_of(work),
    };
    size_t bytes;
    if (fdma_select_workspace(&args, &bytes) != FDMA_OK)
        return refuse(work);
    provide_workspace(work, bytes, &args.exec);
    if (fdma_select(&args) != FDMA_OK)
        return refuse(work);
    const fdma_tensor *const table = &cache->table.position;
    for (int64_t b = 0; b < k[0]; b++)
        for (int64_t g = 0; g < k[2]; g++)
            for (int64_t row = 0; row < rows; row++) {
                const int64_t at = b * table->stride[0] + g * table->stride[1] + row;
                const int32_t position = ((const int32_t *)table->data)[at];
                if (position >= 0)
                    copy_key(work, b, g, row, position);
            }
    return EXIT_DONE;
}

static fdma_decode_args call_at(const decoding *work, int64_t t) {
    const attend_inputs *const inputs = work->inputs;
    const int64_t later = inputs->k.shape[1] - inputs->q.shape[1]; /* position of query 0 */
    return (fdma_decode_args){
        .size = sizeof(fdma_decode_args),
        .cache = work->cache,
        .q = axis_slice(inputs->q, 1, t - later, 1),
        .k = axis_slice(inputs->k, 1, t, 1),
        .v = axis_slice(inputs->v, 1, t, 1),
        .score = axis_slice(work->results->score, 2, t, 1),
        .out = axis_slice(work->out, 1, t - later, 1),
        .scale = work->options->scale,
        .softcap = work->options->softcap,
        .bias_form = (fdma_bias_form)work->options->bias,
        .exec = exec_of(work),
    };
}

static int decode_from(decoding *work, int64_t first, samples *times) {
    const int64_t count = work->options->decode;
    const int64_t groups = count < GROUPS ? count : GROUPS;
    fdma_decode_args args = call_at(work, first);
    size_t bytes;
    if (fdma_decode_workspace(&args, &bytes) != FDMA_OK)
        return refuse(work);
    provide_workspace(work, bytes, &args.exec);
    for (int64_t group = 0; group < groups; group++) {
        const int64_t begin = count * group / groups, end = count * (group + 1) / groups;
        const double start = now_ms();
        for (int64_t t = first + begin; t < first + end; t++) {
            args = call_at(work, t);
            if (fdma_decode(&args) != FDMA_OK)
                return refuse(work);
        }
        add_sample(times, (now_ms() - start) / (double)(end - begin));
    }
    return EXIT_DONE;
}

/* Fills in the largest difference of the last queries' out from the out of the whole sequence, and
 * the difference that rounding may cause. */
static void compare(const decoding *work, decoded_tokens *decoded) {
    const fdma_tensor *const whole = &work->results->out;
    const int64_t q_len = whole->shape[1], width = whole->shape[2] * whole->shape[3];
    double largest = 0;
    decoded->difference = 0;
    for (int64_t b = 0; b < whole->shape[0]; b++)
        for (int64_t n = (q_len - decoded->tokens) * width; n < q_len * width; n++) {
            const int64_t at = b * q_len * width + n;
            const double x = load_element(work->out.data, whole->dtype, at);
            const double y = load_element(whole->data, whole->dtype, at);
            const bool equal = x == y || (isnan(x) && isnan(y)); // inf - inf is NaN
            const double off = equal ? 0 : fabs(x - y);
            if (!(off <= decoded->difference)) // also if it is NaN
                decoded->difference = off;
            if (isfinite(y))
                largest = fmax(largest, fabs(y));
        }
    decoded->allowed = 4 * rounding_step(whole->dtype, largest) + 1e-4 * largest;
}

int decode_tokens(const attend_options *options, const attend_inputs *inputs,
                  const attend_results *results, decoded_tokens *decoded) {
    const int64_t kv_len = inputs->k.shape[1], first = kv_len - options->decode;
    decoding work = {.options = options, .inputs = inputs, .results = results};
    int code = check_options(options, inputs);
    if (code != EXIT_DONE)
        return code;
    decoded->tokens = options->decode;
    decoded->full_bytes =
        2 * (double)element_count(&inputs->k) * (double)dtype_bytes(inputs->k.dtype);
    work.out = allocate_array(inputs->q.dtype, 4, inputs->q.shape);
    code = make_cache(&work, &decoded->cache_bytes);
    if (code == EXIT_DONE)
        code = prefill(&work, first);
    if (code == EXIT_DONE)
        code = decode_from(&work, first, &decoded->times);
    if (code == EXIT_DONE)
        compare(&work, decoded);
    void *const owned[] = {work.out.data, work.slot.data, work.expiry.data, work.workspace,
                           work.memory};
    for (size_t o = 0; o < sizeof owned / sizeof owned[0]; o++)
        free(owned[o]);
    return code;
}
