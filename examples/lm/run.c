/* See run.h. */
#include "run.h"

#include "commands.h"
#include "common/arrays.h"
#include "common/text.h"

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#if defined(_OPENMP)
#include <omp.h>
#endif

static float *allocate_floats(int64_t count) { return allocate((size_t)count * sizeof(float)); }

/* A call fails only if the file has sizes that the library does not support. */
static void demand(fdma_status status) {
    if (status != FDMA_OK) {
        print_error("lm: %s: %s", fdma_status_name(status), fdma_last_error());
        exit(EXIT_USAGE);
    }
}

static rotation new_rotation(int64_t dim, int64_t room) {
    return (rotation){
        .dim = dim,
        .cosines = allocate_floats(room * dim / 2),
        .sines = allocate_floats(room * dim / 2),
    };
}

static void make_caches(run_state *state, int64_t context) {
    const model *const of = state->of;
    state->cache = allocate((size_t)of->layers * sizeof *state->cache);
    state->cache_memory = allocate((size_t)of->layers * sizeof *state->cache_memory);
    for (int64_t n = 0; n < of->layers; n++) {
        const int64_t window = of->layer[n].window;
        state->cache[n] = (fdma_cache){
            .sequences = 1,
            .kv_heads = of->kv_heads,
            .head_dim = of->head_dim,
            .window = window == FDMA_WINDOW_ALL ? context : window,
            .recent = of->layer[n].recent,
            .sinks = of->sinks,
            .dtype = FDMA_FLOAT32,
        };
        size_t bytes;
        demand(fdma_cache_bytes(&state->cache[n], &bytes));
        state->cache_memory[n] = allocate(bytes);
        state->cache_bytes += bytes;
        demand(fdma_cache_init(&state->cache[n], state->cache_memory[n]));
    }
}

static int default_threads(void) {
#if defined(_OPENMP)
    return omp_get_max_threads();
#else
    return 1;
#endif
}

run_state new_state(const model *of, int64_t capacity, int64_t context, int threads) {
    const int64_t room = (capacity + ROWS_MULTIPLE - 1) / ROWS_MULTIPLE * ROWS_MULTIPLE;
    const int64_t kv_width = of->kv_heads * of->head_dim;
    run_state made = {
        .of = of,
        .capacity = capacity,
        .threads = threads > 0 ? threads : default_threads(),
        .byte_threads = threads > 0 ? threads : 1,
        .x = allocate_floats(room * of->width),
        .normed = allocate_floats(room * of->width),
        .change = allocate_floats(room * of->width),
        .q = allocate_floats(room * of->width),
        .k = allocate_floats(room * kv_width),
        .v = allocate_floats(room * kv_width),
        .attended = allocate_floats(room * of->width),
        .inner = allocate_floats(room * EXPANSION * of->width),
        .rotary = new_rotation(of->head_dim, room),
        .nope = new_rotation(of->nope_rotary_dim, room),
        .logits = allocate_floats((context > 0 ? 1 : room) * BYTE_VALUES),
    };
    if (context > 0)
        make_caches(&made, context);
    return made;
}

void empty_caches(run_state *state) {
    for (int64_t n = 0; n < state->of->layers; n++)
        demand(fdma_cache_drop(&state->cache[n], 0));
    state->seen = 0;
}

static void free_rotation(const rotation *one) {
    free(one->cosines);
    free(one->sines);
}

void free_state(run_state *state) {
    void *const all[] = {state->x,      state->normed, state->change,   state->q,
                         state->k,      state->v,      state->attended, state->inner,
                         state->logits, state->cache,  state->workspace};
    free_rotation(&state->rotary);
    free_rotation(&state->nope);
    for (int64_t n = 0; state->cache != NULL && n < state->of->layers; n++)
        free(state->cache_memory[n]);
    free(state->cache_memory);
    for (size_t n = 0; n < sizeof all / sizeof all[0]; n++)
        free(all[n]);
}

/* ---- between the products ---- */

/* rmsnorm of each row. `normed` may be x. */
static void normalize(const model *of, const float *weight, const float *x, int64_t rows,
                      int64_t columns, float *normed) {
    for (int64_t r = 0; r < rows; r++) {
        const float *const row = x + r * columns;
        float squares = 0;
#pragma omp simd reduction(+ : squares)
        for (int64_t c = 0; c < columns; c++)
            squares += row[c] * row[c];
        const float factor = 1 / sqrtf(squares / (float)columns + (float)of->norm_eps);
        for (int64_t c = 0; c < columns; c++)
            normed[r * columns + c] = factor * row[c] * weight[c];
    }
}

static void add(float *x, const float *change, int64_t count) {
    for (int64_t n = 0; n < count; n++)
        x[n] += change[n];
}

static void square_positive(float *inner, int64_t count) {
    for (int64_t n = 0; n < count; n++) {
        const float positive = inner[n] > 0 ? inner[n] : 0;
        inner[n] = positive * positive;
    }
}

/* Angles are rounded to float32, as in the PyTorch layer. */
static void find_angles(const rotation *by, double base, int64_t len, int64_t first) {
    const int64_t half = by->dim / 2;
    for (int64_t d = 0; d < half; d++) {
        const float step = (float)pow(base, -(double)d / (double)half);
        for (int64_t i = 0; i < len; i++) {
            const float angle = (float)(first + i) * step;
            by->cosines[i * half + d] = cosf(angle);
            by->sines[i * half + d] = sinf(angle);
        }
    }
}

static fdma_tensor heads_of(const run_state *state, float *data, int64_t len, int64_t heads) {
    return fdma_tensor_4d(data, FDMA_FLOAT32, 1, len, heads, state->of->head_dim);
}

/* rmsnorm of each head of the queries or keys, in place, if the model has a weight for it. */
static void normalize_heads(const run_state *state, const float *weight, fdma_tensor heads) {
    const int64_t rows = heads.shape[1] * heads.shape[2];
    if (weight != NULL)
        normalize(state->of, weight, heads.data, rows, heads.shape[3], heads.data);
}

/* Rotary position embedding: rotates channels d and d + dim / 2 of heads `begin` to `end` - 1.
 * Source: arXiv:2104.09864, section 3.4.2 */
static void rotate(const rotation *by, fdma_tensor heads, int64_t begin, int64_t end) {
    const int64_t half = by->dim / 2;
    for (int64_t i = 0; i < heads.shape[1]; i++) {
        const float *const c = by->cosines + i * half, *const s = by->sines + i * half;
        for (int64_t h = begin; h < end; h++) {
            float *const low = (float *)heads.data + i * heads.stride[1] + h * heads.stride[2];
            float *const high = low + half;
            for (int64_t d = 0; d < half; d++) {
                const float x = low[d], y = high[d];
                low[d] = x * c[d] - y * s[d];
                high[d] = y * c[d] + x * s[d];
            }
        }
    }
}

/* Rotates keys or queries. The last `nope_heads` kv heads, and the query heads of their groups, are
 * NoPE heads. */
static void rotate_heads(const run_state *state, fdma_tensor heads, int64_t nope_heads) {
    const int64_t count = heads.shape[2], group = count / state->of->kv_heads;
    const int64_t rotary_heads = count - nope_heads * group;
    rotate(&state->rotary, heads, 0, rotary_heads);
    rotate(&state->nope, heads, rotary_heads, count);
}

/* ---- attention ---- */

static fdma_tensor dt_proj_of(const model *of, const layer *one) {
    return fdma_tensor_2d(one->dt_proj, FDMA_FLOAT32, of->kv_heads, of->kv_heads * of->head_dim);
}

static fdma_exec lend(run_state *state, size_t bytes, int32_t threads) {
    if (bytes > state->workspace_size) {
        free(state->workspace);
        state->workspace = allocate(bytes);
        state->workspace_size = bytes;
    }
    return (fdma_exec){
        .workspace = state->workspace, .workspace_size = state->workspace_size, .threads = threads};
}

/* The rows are a whole text. */
static void attend_text(run_state *state, int64_t n, int64_t len) {
    const model *const of = state->of;
    fdma_attention_args args = {
        .size = sizeof args,
        .q = heads_of(state, state->q, len, of->q_heads),
        .k = heads_of(state, state->k, len, of->kv_heads),
        .v = heads_of(state, state->v, len, of->kv_heads),
        .dt_proj = dt_proj_of(of, &of->layer[n]),
        .a = fdma_tensor_1d(of->layer[n].a, FDMA_FLOAT32, of->kv_heads),
        .out = heads_of(state, state->attended, len, of->q_heads),
        .window = of->layer[n].window,
        .recent = of->layer[n].recent,
        .sinks = of->sinks,
        .bias_form = of->bias_form,
        .causal = 1,
    };
    size_t bytes;
    args.exec.threads = state->threads;
    demand(fdma_attention_workspace(&args, &bytes));
    args.exec = lend(state, bytes, state->threads);
    demand(fdma_attention(&args));
}

static fdma_tensor rows_of(const run_state *state, float *data, int64_t len, int64_t heads) {
    return fdma_tensor_3d(data, FDMA_FLOAT32, len, heads, state->of->head_dim);
}

/* The rows are the next bytes. Attention of one takes less time than waking a second thread. */
static void attend_bytes(run_state *state, int64_t n, int64_t len) {
    const model *const of = state->of;
    const int32_t starts[] = {0, (int32_t)len};
    fdma_prefill_args args = {
        .size = sizeof args,
        .cache = state->cache[n],
        .q = rows_of(state, state->q, len, of->q_heads),
        .k = rows_of(state, state->k, len, of->kv_heads),
        .v = rows_of(state, state->v, len, of->kv_heads),
        .dt_proj = dt_proj_of(of, &of->layer[n]),
        .a = fdma_tensor_1d(of->layer[n].a, FDMA_FLOAT32, of->kv_heads),
        .out = rows_of(state, state->attended, len, of->q_heads),
        .starts = starts,
        .requests = 1,
        .bias_form = of->bias_form,
    };
    const int threads = len == 1 ? 1 : state->threads;
    size_t bytes;
    args.exec.threads = threads;
    demand(fdma_prefill_workspace(&args, &bytes));
    args.exec = lend(state, bytes, threads);
    demand(fdma_prefill(&args));
}

/* ---- the model ---- */

/* Differences between a text and the next bytes. */
typedef struct passage {
    int64_t len, first; /* positions, and the first of them */
    int threads;
    void (*attend)(run_state *state, int64_t n, int64_t len);
    void (*multiply)(const matrix *w, const float *x, int64_t len, float *y, int threads);
} passage;

static void run_layer(run_state *state, int64_t n, const passage *by) {
    const model *const of = state->of;
    const layer *const one = &of->layer[n];
    const int64_t len = by->len;
    const fdma_tensor q = heads_of(state, state->q, len, of->q_heads);
    const fdma_tensor k = heads_of(state, state->k, len, of->kv_heads);
    normalize(of, one->attention_norm, state->x, len, of->width, state->normed);
    by->multiply(&one->q_proj, state->normed, len, state->q, by->threads);
    by->multiply(&one->k_proj, state->normed, len, state->k, by->threads);
    by->multiply(&one->v_proj, state->normed, len, state->v, by->threads);
    normalize_heads(state, one->q_norm, q);
    normalize_heads(state, one->k_norm, k);
    rotate_heads(state, q, one->nope_heads);
    rotate_heads(state, k, one->nope_heads);
    by->attend(state, n, len);
    by->multiply(&one->o_proj, state->attended, len, state->change, by->threads);
    add(state->x, state->change, len * of->width);

    normalize(of, one->norm, state->x, len, of->width, state->normed);
    by->multiply(&one->expand, state->normed, len, state->inner, by->threads);
    square_positive(state->inner, len * EXPANSION * of->width);
    by->multiply(&one->contract, state->inner, len, state->change, by->threads);
    add(state->x, state->change, len * of->width);
}

static void run_layers(run_state *state, const uint8_t *text, const passage *by) {
    for (int64_t i = 0; i < by->len; i++)
        widen_row(&state->of->embedding, text[i], state->x + i * state->of->width);
    find_angles(&state->rotary, state->of->rotary_base, by->len, by->first);
    find_angles(&state->nope, state->of->rotary_base, by->len, by->first);
    for (int64_t n = 0; n < state->of->layers; n++)
        run_layer(state, n, by);
}

/* The logits of the last `count` rows of x. */
static void find_logits(run_state *state, int64_t count, const passage *by) {
    const model *const of = state->of;
    const float *const rows = state->x + (by->len - count) * of->width;
    normalize(of, of->norm, rows, count, of->width, state->normed);
    by->multiply(&of->head, state->normed, count, state->logits, by->threads);
}

void run_text(run_state *state, const uint8_t *text, int64_t len) {
    const passage by = {len, 0, state->threads, attend_text, multiply_text};
    run_layers(state, text, &by);
    find_logits(state, len, &by);
}

void run_next(run_state *state, const uint8_t *text, int64_t len) {
    for (int64_t done = 0; done < len;) {
        passage by = {len - done, state->seen, state->threads, attend_bytes, multiply_rows};
        if (by.len > state->capacity)
            by.len = state->capacity;
        if (by.len == 1)
            by.threads = state->byte_threads;
        run_layers(state, text + done, &by);
        state->seen += by.len;
        done += by.len;
        if (done == len)
            find_logits(state, 1, &by);
    }
}
