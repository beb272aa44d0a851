/* A small transformer in plain C that generates 100,000 tokens with fdma_decode(), in constant
 * memory and constant time for a token, and checks the first of them against the whole sequence.
 *
 * The model has random weights. A layer: x += attention(norm(x)) Wo, where each query sees its
 * `recent` newest keys and the `window` best of the older ones; then x += relu(norm(x) W1) W2.
 * A token is the one of the highest logit plus noise that depends on its position and the token.
 * The check runs the whole sequence through fdma_attention(), layer by layer: every token must be
 * chosen again, and all logits must agree.
 *
 *     cc -std=c11 -O2 -Iinclude examples/generate.c -Lbuild -lfdma -Wl,-rpath,$PWD/build -lm \
 *        -o generate
 *     ./generate 3000
 *
 * Progress goes to stderr: on a terminal a bar, else a line every ten seconds. Exit status: 0; 1
 * where the whole sequence does not give the same tokens; 2 bad usage. */
#define _POSIX_C_SOURCE 200809L // isatty()

#include "fdma.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { layer_count = 2, width = 64, inner_width = 128, vocabulary = 256 };
enum { q_heads = 4, kv_heads = 2, head_dim = 32, window = 64, recent = 16 };
enum { q_width = q_heads * head_dim, kv_width = kv_heads * head_dim };
enum { default_tokens = 100000, checked_tokens = 2000, intervals = 20, bar_width = 40 };

typedef struct layer {
    float *wq, *wk, *wv, *wo, *w1, *w2; /* [inputs, outputs] */
    float *dt_proj, *a;
    fdma_cache cache; /* cache of one sequence */
    void *memory;     /* memory of the cache */
} layer;

/* Buffers that positions pass through. */
typedef struct rows {
    int64_t len;
    float *x, *normed, *q, *k, *v, *attended, *inner, *logits;
    void *workspace;
    size_t workspace_size;
} rows;

typedef struct model {
    float *embedding, *head; /* [vocabulary, width], [width, vocabulary] */
    layer layers[layer_count];
} model;

static void *allocate(size_t count, size_t size) {
    void *const data = calloc(count + 1, size);
    if (data == NULL) {
        fprintf(stderr, "generate: out of memory\n");
        exit(1);
    }
    return data;
}

static void demand(fdma_status status) {
    if (status != FDMA_OK) {
        fprintf(stderr, "generate: %s: %s\n", fdma_status_name(status), fdma_last_error());
        exit(1);
    }
}

/* The high bits of a linear congruential generator: numbers in [0, 1). */
static double next_random(uint64_t *state) {
    *state = *state * 6364136223846793005U + 1442695040888963407U;
    return (double)(*state >> 11) * 0x1p-53;
}

static float *random_floats(size_t count, double size) {
    static uint64_t state = 1;
    float *const data = allocate(count, sizeof *data);
    for (size_t n = 0; n < count; n++)
        data[n] = (float)(size * (2 * next_random(&state) - 1));
    return data;
}

/* ---- the model ---- */

static float *random_matrix(size_t inputs, size_t outputs) {
    return random_floats(inputs * outputs, 1.7 / sqrt((double)inputs));
}

static layer new_layer(void) {
    layer made = {
        .wq = random_matrix(width, q_width),
        .wk = random_matrix(width, kv_width),
        .wv = random_matrix(width, kv_width),
        .wo = random_matrix(q_width, width),
        .w1 = random_matrix(width, inner_width),
        .w2 = random_matrix(inner_width, width),
        .dt_proj = random_matrix(kv_width, kv_heads),
        .a = random_floats(kv_heads, 1),
        .cache = {.sequences = 1, .kv_heads = kv_heads, .head_dim = head_dim},
    };
    size_t bytes;
    made.cache.window = window, made.cache.recent = recent, made.cache.dtype = FDMA_FLOAT32;
    demand(fdma_cache_bytes(&made.cache, &bytes));
    made.memory = allocate(bytes, 1);
    demand(fdma_cache_init(&made.cache, made.memory));
    return made;
}

static model new_model(void) {
    model made = {.embedding = random_floats((size_t)vocabulary * width, 1),
                  .head = random_matrix(width, vocabulary)};
    for (int n = 0; n < layer_count; n++)
        made.layers[n] = new_layer();
    return made;
}

static void free_model(model *it) {
    free(it->embedding);
    free(it->head);
    for (int n = 0; n < layer_count; n++) {
        layer *const one = &it->layers[n];
        void *const all[] = {one->wq, one->wk,      one->wv, one->wo,    one->w1,
                             one->w2, one->dt_proj, one->a,  one->memory};
        for (size_t m = 0; m < sizeof all / sizeof all[0]; m++)
            free(all[m]);
    }
}

static rows new_rows(size_t len) {
    return (rows){
        .len = (int64_t)len,
        .x = allocate(len * width, sizeof(float)),
        .normed = allocate(len * width, sizeof(float)),
        .q = allocate(len * q_width, sizeof(float)),
        .k = allocate(len * kv_width, sizeof(float)),
        .v = allocate(len * kv_width, sizeof(float)),
        .attended = allocate(len * q_width, sizeof(float)),
        .inner = allocate(len * inner_width, sizeof(float)),
        .logits = allocate(len * vocabulary, sizeof(float)),
    };
}

static void free_rows(rows *it) {
    void *const all[] = {it->x,        it->normed, it->q,      it->k,        it->v,
                         it->attended, it->inner,  it->logits, it->workspace};
    for (size_t n = 0; n < sizeof all / sizeof all[0]; n++)
        free(all[n]);
}

/* y += x W for each row. A row's sums do not depend on the other rows. */
static void add_product(float *y, const float *x, const float *w, int64_t len, int inputs,
                        int outputs) {
    for (int64_t i = 0; i < len; i++)
        for (int r = 0; r < inputs; r++) {
            const float factor = x[i * inputs + r], *const column = w + (size_t)r * (size_t)outputs;
            float *const sums = y + i * outputs;
            for (int c = 0; c < outputs; c++)
                sums[c] += factor * column[c];
        }
}

static void multiply(float *y, const float *x, const float *w, int64_t len, int inputs,
                     int outputs) {
    memset(y, 0, (size_t)len * (size_t)outputs * sizeof *y);
    add_product(y, x, w, len, inputs, outputs);
}

static void normalize(float *normed, const float *x, int64_t len) {
    for (int64_t i = 0; i < len; i++) {
        float squares = 0;
        for (int c = 0; c < width; c++)
            squares += x[i * width + c] * x[i * width + c];
        const float factor = 1 / sqrtf(squares / width + 1e-6F);
        for (int c = 0; c < width; c++)
            normed[i * width + c] = factor * x[i * width + c];
    }
}

/* Rotary position embedding; row i is at position first + i. */
static void rotate(float *heads, int count, int64_t len, int64_t first) {
    enum { half = head_dim / 2 };
    for (int d = 0; d < half; d++) {
        const double step = pow(10000, -(double)d / half);
        for (int64_t i = 0; i < len; i++) {
            const double angle = (double)(first + i) * step;
            const float c = (float)cos(angle), s = (float)sin(angle);
            for (int h = 0; h < count; h++) {
                float *const low = heads + (i * count + h) * head_dim + d, *const high = low + half;
                const float x = *low, y = *high;
                *low = x * c - y * s;
                *high = y * c + x * s;
            }
        }
    }
}

/* ---- attention ---- */

static fdma_tensor heads_of(float *data, int64_t len, int64_t heads) {
    return fdma_tensor_4d(data, FDMA_FLOAT32, 1, len, heads, head_dim);
}

static fdma_exec exec_of(rows *it, size_t bytes) {
    if (bytes > it->workspace_size) { // once: the sizes of a model's layers are equal
        free(it->workspace);
        it->workspace = allocate(bytes, 1);
        it->workspace_size = bytes;
    }
    return (fdma_exec){.workspace = it->workspace, .workspace_size = it->workspace_size};
}

/* The rows are the next tokens of the sequence in the layer's cache. */
static void attend_cached(const layer *of, rows *it) {
    fdma_decode_args args = {
        .size = sizeof args,
        .cache = of->cache,
        .q = heads_of(it->q, it->len, q_heads),
        .k = heads_of(it->k, it->len, kv_heads),
        .v = heads_of(it->v, it->len, kv_heads),
        .dt_proj = fdma_tensor_2d(of->dt_proj, FDMA_FLOAT32, kv_heads, kv_width),
        .a = fdma_tensor_1d(of->a, FDMA_FLOAT32, kv_heads),
        .out = heads_of(it->attended, it->len, q_heads),
    };
    size_t bytes;
    demand(fdma_decode_workspace(&args, &bytes));
    args.exec = exec_of(it, bytes);
    demand(fdma_decode(&args));
}

/* The rows are the whole sequence. */
static void attend_whole(const layer *of, rows *it) {
    fdma_attention_args args = {
        .size = sizeof args,
        .q = heads_of(it->q, it->len, q_heads),
        .k = heads_of(it->k, it->len, kv_heads),
        .v = heads_of(it->v, it->len, kv_heads),
        .dt_proj = fdma_tensor_2d(of->dt_proj, FDMA_FLOAT32, kv_heads, kv_width),
        .a = fdma_tensor_1d(of->a, FDMA_FLOAT32, kv_heads),
        .out = heads_of(it->attended, it->len, q_heads),
        .window = window,
        .recent = recent,
        .causal = 1,
    };
    size_t bytes;
    demand(fdma_attention_workspace(&args, &bytes));
    args.exec = exec_of(it, bytes);
    demand(fdma_attention(&args));
}

/* The logits that follow each of the tokens. The first token is at position `first`. */
static void run(const model *of, rows *it, const int *tokens, int64_t first,
                void (*attend)(const layer *of, rows *it)) {
    const int64_t len = it->len;
    for (int64_t i = 0; i < len; i++)
        memcpy(it->x + i * width, of->embedding + (size_t)tokens[i] * width, width * sizeof *it->x);
    for (int n = 0; n < layer_count; n++) {
        const layer *const one = &of->layers[n];
        normalize(it->normed, it->x, len);
        multiply(it->q, it->normed, one->wq, len, width, q_width);
        multiply(it->k, it->normed, one->wk, len, width, kv_width);
        multiply(it->v, it->normed, one->wv, len, width, kv_width);
        rotate(it->q, q_heads, len, first);
        rotate(it->k, kv_heads, len, first);
        attend(one, it);
        add_product(it->x, it->attended, one->wo, len, q_width, width);
        normalize(it->normed, it->x, len);
        multiply(it->inner, it->normed, one->w1, len, width, inner_width);
        for (int64_t c = 0; c < len * inner_width; c++)
            it->inner[c] = fmaxf(it->inner[c], 0);
        add_product(it->x, it->inner, one->w2, len, inner_width, width);
    }
    normalize(it->normed, it->x, len);
    multiply(it->logits, it->normed, of->head, len, width, vocabulary);
}

/* ---- generating ---- */

/* Adds Gumbel noise to the logits that follow a position: the highest sum then belongs to a token
 * with the probability that softmax gives it. */
static void add_noise(float *logits, int64_t position) {
    uint64_t state = (uint64_t)position * 0x9E3779B97F4A7C15U + 1;
    next_random(&state);
    for (int token = 0; token < vocabulary; token++)
        logits[token] -= (float)log(-log(next_random(&state) + 0x1p-60));
}

static int best_of(const float *logits) {
    int best = 0;
    for (int token = 1; token < vocabulary; token++)
        if (logits[token] > logits[best])
            best = token;
    return best;
}

static double seconds_now(void) {
    struct timespec now;
    timespec_get(&now, TIME_UTC);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* On a terminal a bar; else a line every ten seconds. */
static void show_progress(int64_t done, int64_t count) {
    static double said;
    const int filled = (int)(bar_width * done / count);
    const double now = seconds_now();
    if (isatty(STDERR_FILENO)) {
        fprintf(stderr, "\r[%.*s%*s] %lld of %lld tokens%s", filled,
                "########################################", bar_width - filled, "", (long long)done,
                (long long)count, done == count ? "\n" : "");
    } else if (now - said >= 10) {
        fprintf(stderr, "generate: %lld of %lld tokens\n", (long long)done, (long long)count);
        said = now;
    }
}

/* Generates `count` tokens after tokens[0], and keeps the first `kept` of them with their logits.
 * seconds[n] is the time of the n-th interval. */
static void generate(const model *of, int64_t count, int64_t kept, int *tokens, float *logits,
                     double *seconds) {
    rows one = new_rows(1);
    int token = tokens[0];
    for (int n = 0; n < intervals; n++) {
        const int64_t first = count * n / intervals, end = count * (n + 1) / intervals;
        const double start = seconds_now();
        for (int64_t t = first; t < end; t++) {
            run(of, &one, &token, t, attend_cached);
            add_noise(one.logits, t);
            token = best_of(one.logits);
            if (t < kept) {
                tokens[t + 1] = token;
                memcpy(logits + t * vocabulary, one.logits, vocabulary * sizeof *logits);
            }
        }
        seconds[n] = seconds_now() - start;
        show_progress(end, count);
    }
    free_rows(&one);
}

/* Number of tokens that the whole sequence does not choose. `difference`: the largest difference of
 * logits. */
static int64_t check_tokens(const model *of, int64_t kept, const int *tokens, const float *logits,
                            double *difference) {
    rows whole = new_rows((size_t)kept);
    int64_t wrong = 0;
    *difference = 0;
    run(of, &whole, tokens, 0, attend_whole);
    for (int64_t t = 0; t < kept; t++) {
        float *const row = whole.logits + t * vocabulary;
        add_noise(row, t);
        wrong += best_of(row) != tokens[t + 1];
        for (int c = 0; c < vocabulary; c++) {
            const double off = fabs((double)(row[c] - logits[t * vocabulary + c]));
            if (!(off <= *difference)) // also if it is NaN
                *difference = off;
        }
    }
    free_rows(&whole);
    return wrong;
}

static void show_times(int64_t count, const double *seconds) {
    double most = 0;
    for (int n = 0; n < intervals; n++)
        most = fmax(most, seconds[n]);
    printf("tokens so far   microseconds a token\n");
    for (int n = 0; n < intervals; n++) {
        const int64_t first = count * n / intervals, end = count * (n + 1) / intervals;
        printf("%13lld %8.1f  ", (long long)end, 1e6 * seconds[n] / (double)(end - first));
        for (int c = 0; c < bar_width && c * most < bar_width * seconds[n]; c++)
            putchar('#');
        putchar('\n');
    }
}

static void show_memory(int64_t count, const fdma_cache *cache) {
    const double full = 2.0 * layer_count * kv_width * sizeof(float) * (double)count;
    size_t bytes;
    demand(fdma_cache_bytes(cache, &bytes));
    printf("cache %.1f kB for any number of tokens; all keys would take %.1f kB\n",
           1e-3 * layer_count * (double)bytes, 1e-3 * full);
}

int main(int argc, char **argv) {
    const double tolerance = 1e-3;
    char *end = NULL;
    const int64_t count = argc > 1 ? strtoll(argv[1], &end, 10) : default_tokens;
    const bool help = argc == 2 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0);
    if (help || argc > 2 || (end != NULL && *end != '\0') || count < intervals) {
        fprintf(help ? stdout : stderr,
                "usage: generate [TOKENS], %d or more (default %d, some seconds)\n", intervals,
                default_tokens);
        return help ? 0 : 2;
    }
    const int64_t kept = count < checked_tokens ? count : checked_tokens;
    model it = new_model();
    int *const tokens = allocate((size_t)kept + 1, sizeof *tokens);
    float *const logits = allocate((size_t)(kept * vocabulary), sizeof *logits);
    double seconds[intervals], difference;
    generate(&it, count, kept, tokens, logits, seconds);
    show_times(count, seconds);
    show_memory(count, &it.layers[0].cache);
    const int64_t wrong = check_tokens(&it, kept, tokens, logits, &difference);
    printf("the whole sequence: %lld of %lld tokens differ, logits by at most %.2g\n",
           (long long)wrong, (long long)kept, difference);
    free(tokens);
    free(logits);
    free_model(&it);
    return wrong > 0 || !(difference < tolerance);
}
