/* See generate/run.h. */
#include "generate/run.h"

#include "commands.h"
#include "common/arrays.h"
#include "common/text.h"

#include <math.h>
#include <stdlib.h>

static float *allocate_floats(int64_t count) { return allocate((size_t)count * sizeof(float)); }

static void demand(fdma_status status) {
    if (status != FDMA_OK) {
        print_error("fdma generate: %s: %s", fdma_status_name(status), fdma_last_error());
        exit(EXIT_USAGE);
    }
}

static void make_caches(run_state *state) {
    const config *const sizes = &state->of->config;
    state->cache = allocate((size_t)sizes->layers * sizeof *state->cache);
    state->cache_memory = allocate((size_t)sizes->layers * sizeof *state->cache_memory);
    for (int64_t n = 0; n < sizes->layers; n++) {
        state->cache[n] = (fdma_cache){
            .sequences = 1,
            .kv_heads = sizes->kv_heads,
            .head_dim = sizes->head_dim,
            .window = sizes->window,
            .dtype = FDMA_FLOAT32,
        };
        size_t bytes;
        demand(fdma_cache_bytes(&state->cache[n], &bytes));
        state->cache_memory[n] = allocate(bytes);
        state->cache_bytes += bytes;
        demand(fdma_cache_init(&state->cache[n], state->cache_memory[n]));
    }
}

run_state new_state(const model *of, int threads) {
    const config *const sizes = &of->config;
    const int64_t width = sizes->hidden_size, inner = sizes->intermediate_size;
    const int64_t q_width = sizes->q_heads * sizes->head_dim;
    const int64_t kv_width = sizes->kv_heads * sizes->head_dim;
    run_state made = {
        .of = of,
        .threads = new_crew(threads),
        .x = allocate_floats(PIECE * width),
        .normed = allocate_floats(PIECE * width),
        .change = allocate_floats(PIECE * width),
        .q = allocate_floats(PIECE * q_width),
        .k = allocate_floats(PIECE * kv_width),
        .v = allocate_floats(PIECE * kv_width),
        .attended = allocate_floats(PIECE * q_width),
        .gate = allocate_floats(PIECE * inner),
        .up = allocate_floats(PIECE * inner),
        .rotary = allocate_floats(PIECE * sizes->head_dim),
        .logits = allocate_floats(sizes->vocab_size),
        .inverse = allocate((size_t)sizes->head_dim / 2 * sizeof(double)),
    };
    made.thread_count = crew_size(made.threads);
    made.parallel = (fdma_parallel){sizeof made.parallel, run_tasks, made.threads};
    make_caches(&made);
    return made;
}

void free_state(run_state *state) {
    void *const all[] = {state->x,      state->normed, state->change,   state->q,
                         state->k,      state->v,      state->gate,     state->up,
                         state->rotary, state->logits, state->attended, state->inverse};
    for (int64_t n = 0; n < state->of->config.layers; n++)
        free(state->cache_memory[n]);
    free(state->cache_memory);
    free(state->cache);
    free(state->workspace);
    for (size_t n = 0; n < sizeof all / sizeof all[0]; n++)
        free(all[n]);
    free_crew(state->threads);
}

/* ---- between the products ---- */

static void normalize(const run_state *state, const float *weight, const float *x, int64_t rows,
                      float *normed) {
    const int64_t width = state->of->config.hidden_size;
    for (int64_t i = 0; i < rows; i++) {
        const float *const row = x + i * width;
        double squares = 0;
        for (int64_t c = 0; c < width; c++)
            squares += (double)row[c] * (double)row[c];
        const float factor =
            (float)(1 / sqrt(squares / (double)width + state->of->config.norm_eps));
        for (int64_t c = 0; c < width; c++)
            normed[i * width + c] = weight[c] * (row[c] * factor);
    }
}

/* x = residual * x + change */
static void add(const run_state *state, const float *residual, int64_t rows) {
    const int64_t width = state->of->config.hidden_size;
    for (int64_t i = 0; i < rows; i++)
        for (int64_t c = 0; c < width; c++) {
            float *const x = &state->x[i * width + c];
            *x = residual[c] * *x + state->change[i * width + c];
        }
}

/* gate = silu(gate) * up */
static void combine(const run_state *state, int64_t rows) {
    const int64_t count = rows * state->of->config.intermediate_size;
    for (int64_t n = 0; n < count; n++) {
        const float gate = state->gate[n];
        state->gate[n] = gate / (1 + expf(-gate)) * state->up[n];
    }
}

static fdma_tensor heads_of(const run_state *state, float *data, int64_t len, int64_t heads) {
    return fdma_tensor_4d(data, FDMA_FLOAT32, 1, len, heads, state->of->config.head_dim);
}

/* The frequencies of a text of state->longest tokens. */
static void find_frequencies(run_state *state) {
    const config *const sizes = &state->of->config;
    const double dim = (double)sizes->head_dim, trained = (double)sizes->trained_length;
    double base = sizes->rotary_base, divisor = 1;
    if (sizes->rotary_rule == ROTARY_LINEAR)
        divisor = sizes->rotary_factor;
    if (sizes->rotary_rule == ROTARY_DYNAMIC && state->longest > sizes->trained_length)
        base *= pow(sizes->rotary_factor * (double)state->longest / trained -
                        (sizes->rotary_factor - 1),
                    dim / (dim - 2));
    for (int64_t d = 0; d < sizes->head_dim / 2; d++)
        state->inverse[d] = pow(base, -2 * (double)d / dim) / divisor;
}

static fdma_tensor rotary_of(const run_state *state, int64_t len) {
    return fdma_tensor_2d(state->rotary, FDMA_FLOAT32, len, state->of->config.head_dim);
}

static void find_angles(run_state *state, int64_t len) {
    fdma_rotary_table_args args = {
        .size = sizeof args,
        .rotary = rotary_of(state, len),
        .inv_freq = fdma_tensor_1d(state->inverse, FDMA_FLOAT64, state->of->config.head_dim / 2),
        .first = state->seen,
    };
    args.exec.threads = 1;
    demand(fdma_rotary_table(&args));
}

static void rotate(const run_state *state, const layer *one, fdma_tensor q, fdma_tensor k) {
    const int64_t head_dim = state->of->config.head_dim;
    fdma_rotate_args args = {
        .size = sizeof args,
        .x = q,
        .out = q,
        .weight = fdma_tensor_1d(one->q_norm, FDMA_FLOAT32, head_dim),
        .k = k,
        .k_out = k,
        .k_weight = fdma_tensor_1d(one->k_norm, FDMA_FLOAT32, head_dim),
        .rotary = rotary_of(state, q.shape[1]),
        .eps = state->of->config.norm_eps,
        .first = state->seen,
        .offset = state->seen,
    };
    args.exec.threads = q.shape[1] == 1 ? 1 : state->thread_count;
    args.exec.parallel = &state->parallel;
    demand(fdma_rotate(&args));
}

/* ---- attention ---- */

static fdma_exec lend(run_state *state, size_t bytes) {
    if (bytes > state->workspace_size) {
        free(state->workspace);
        state->workspace = allocate(bytes);
        state->workspace_size = bytes;
    }
    return (fdma_exec){
        .workspace = state->workspace,
        .workspace_size = state->workspace_size,
        .threads = state->thread_count,
        .parallel = &state->parallel,
    };
}

static fdma_tensor dt_proj_of(const run_state *state, int64_t n) {
    const config *const sizes = &state->of->config;
    return fdma_tensor_2d(state->of->layer[n].dt_proj, FDMA_FLOAT32, sizes->kv_heads,
                          sizes->kv_heads * sizes->head_dim);
}

/* A vector of a number for each kv head; absent for NULL. */
static fdma_tensor by_head(const run_state *state, float *data) {
    const fdma_tensor absent = {0};
    return data == NULL ? absent : fdma_tensor_1d(data, FDMA_FLOAT32, state->of->config.kv_heads);
}

/* Queries, keys or values without the axis of a batch. */
static fdma_tensor tokens_of(fdma_tensor heads) {
    return fdma_dense_tensor(heads.data, heads.dtype, 3, heads.shape + 1);
}

static void attend(run_state *state, int64_t n, fdma_tensor q, fdma_tensor k, fdma_tensor v) {
    const int64_t len = q.shape[1];
    const int32_t starts[] = {0, (int32_t)len};
    fdma_prefill_args args = {
        .size = sizeof args,
        .cache = state->cache[n],
        .q = tokens_of(q),
        .k = tokens_of(k),
        .v = tokens_of(v),
        .dt_proj = dt_proj_of(state, n),
        .a = by_head(state, state->of->layer[n].a),
        .dt_bias = by_head(state, state->of->layer[n].dt_bias),
        .out = tokens_of(heads_of(state, state->attended, len, state->of->config.q_heads)),
        .starts = starts,
        .requests = 1,
    };
    args.exec.threads = state->thread_count;
    size_t bytes;
    demand(fdma_prefill_workspace(&args, &bytes));
    args.exec = lend(state, bytes);
    demand(fdma_prefill(&args));
}

/* ---- the model ---- */

static void multiply_one(const run_state *state, const matrix *w, const float *x, int64_t len,
                         float *y) {
    multiply(state->threads, 1, &w, x, len, &y);
}

static void run_layer(run_state *state, int64_t n, int64_t len) {
    const config *const sizes = &state->of->config;
    const layer *const one = &state->of->layer[n];
    crew *const threads = state->threads;
    const fdma_tensor q = heads_of(state, state->q, len, sizes->q_heads);
    const fdma_tensor k = heads_of(state, state->k, len, sizes->kv_heads);
    const fdma_tensor v = heads_of(state, state->v, len, sizes->kv_heads);
    normalize(state, one->attention_norm, state->x, len, state->normed);
    multiply(threads, 3, (const matrix *[]){&one->q_proj, &one->k_proj, &one->v_proj},
             state->normed, len, (float *[]){state->q, state->k, state->v});
    rotate(state, one, q, k);
    attend(state, n, q, k, v);
    multiply_one(state, &one->o_proj, state->attended, len, state->change);
    add(state, one->attention_residual, len);

    normalize(state, one->mlp_norm, state->x, len, state->normed);
    multiply(threads, 2, (const matrix *[]){&one->gate_proj, &one->up_proj}, state->normed, len,
             (float *[]){state->gate, state->up});
    combine(state, len);
    multiply_one(state, &one->down_proj, state->gate, len, state->change);
    add(state, one->mlp_residual, len);
}

static void run_piece(run_state *state, const int32_t *tokens, int64_t len) {
    const int64_t width = state->of->config.hidden_size;
    for (int64_t i = 0; i < len; i++)
        read_row(&state->of->embedding, tokens[i], state->x + i * width);
    find_angles(state, len);
    for (int64_t n = 0; n < state->of->config.layers; n++)
        run_layer(state, n, len);
    state->seen += len;
}

void run_tokens(run_state *state, const int32_t *tokens, int64_t len) {
    int64_t last = 0; // tokens of the last piece
    state->longest = state->seen + len;
    find_frequencies(state);
    for (int64_t done = 0; done < len; done += last) {
        last = len - done < PIECE ? len - done : PIECE;
        run_piece(state, tokens + done, last);
    }
    const float *const x = state->x + (last - 1) * state->of->config.hidden_size;
    normalize(state, state->of->norm, x, 1, state->normed);
    multiply_one(state, &state->of->head, state->normed, 1, state->logits);
}
