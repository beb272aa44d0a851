/* See generate/bench.h. */
#include "generate/bench.h"

#include "common/arrays.h"
#include "common/timing.h"

#include <dlfcn.h>
#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { ROUNDS = 21, PIECE_ROUNDS = 7, READ_LANES = 32, STREAMS = 4, LAYER_MATRICES = 7 };

static void matrices_of(const layer *one, const matrix *matrices[LAYER_MATRICES]) {
    const matrix *const all[LAYER_MATRICES] = {&one->q_proj,   &one->k_proj,    &one->v_proj,
                                               &one->o_proj,   &one->gate_proj, &one->up_proj,
                                               &one->down_proj};
    memcpy(matrices, all, sizeof all);
}

/* ---- a token ---- */

static atomic_uint_fast64_t kept; // so that the compiler cannot leave out the read

typedef uint64_t read_lanes __attribute__((vector_size(32), aligned(1), may_alias));

/* Part `index` of `count` of a matrix, in STREAMS places at a time: a core then has more bytes
 * under way than with one. */
static void read_part(const matrix *w, int index, int count) {
    const char *const from = w->data;
    const int64_t bytes = w->rows * w->columns * (w->is_bfloat16 ? 2 : 4);
    const int64_t begin = bytes * index / count, end = bytes * (index + 1) / count;
    const int64_t stride = (end - begin) / STREAMS;
    read_lanes sums[STREAMS] = {{0}};
    for (int64_t at = 0; at + 2 * READ_LANES <= stride; at += 2 * READ_LANES)
        for (int n = 0; n < STREAMS; n++) {
            const char *const place = from + begin + n * stride + at;
            sums[n] ^= *(const read_lanes *)place ^ *(const read_lanes *)(place + READ_LANES);
        }
    const read_lanes all = sums[0] ^ sums[1] ^ sums[2] ^ sums[3];
    atomic_fetch_xor(&kept, all[0] ^ all[1] ^ all[2] ^ all[3]);
}

/* Part `index` of `count` of each matrix; the threads meet once, after all of them. */
static void read_weights(void *argument, int index, int count) {
    const model *const of = argument;
    for (int64_t n = 0; n < of->config.layers; n++) {
        const matrix *matrices[LAYER_MATRICES];
        matrices_of(&of->layer[n], matrices);
        for (int m = 0; m < LAYER_MATRICES; m++)
            read_part(matrices[m], index, count);
    }
    read_part(&of->head, index, count);
}

static void time_token(run_state *state, bench_result *result) {
    samples tokens = {0}, reads = {0};
    model of = *state->of;
    const int32_t id = 0;
    for (int round = 0; round < ROUNDS; round++) {
        const double start = now_ms();
        run_tokens(state, &id, 1);
        const double middle = now_ms();
        run_crew(state->threads, read_weights, &of);
        add_sample(&tokens, middle - start);
        add_sample(&reads, now_ms() - middle);
    }
    result->token_ms = median(&tokens);
    result->read_ms = median(&reads);
}

/* ---- a piece of a prompt ---- */

/* Source: the interface cblas.h of the BLAS Technical Forum */
typedef void (*cblas_sgemm)(int order, int x_form, int w_form, int len, int rows, int columns,
                            float factor, const float *x, int x_stride, const float *w,
                            int w_stride, float kept_part, float *y, int y_stride);
enum { ROW_MAJOR = 101, AS_IS = 111, TRANSPOSED = 112 };

typedef struct products {
    cblas_sgemm multiply; /* NULL: our own */
    float *x, *w, *y;     /* of any size that a matrix of a layer has */
} products;

static cblas_sgemm find_blas(int threads, const char **name) {
    void *const library = dlopen("libopenblas.so.0", RTLD_NOW | RTLD_LOCAL);
    if (library == NULL)
        return NULL;
    cblas_sgemm multiply_by;
    void (*set_threads)(int);
    char *(*core_name)(void);
    *(void **)&multiply_by = dlsym(library, "cblas_sgemm"); // POSIX's way to a function
    *(void **)&set_threads = dlsym(library, "openblas_set_num_threads");
    *(void **)&core_name = dlsym(library, "openblas_get_corename");
    if (set_threads != NULL)
        set_threads(threads);
    if (multiply_by != NULL)
        *name = core_name != NULL ? core_name() : "OpenBLAS";
    return multiply_by;
}

static products new_products(const model *of) {
    int64_t most = 0, widest = 0;
    const matrix *matrices[LAYER_MATRICES];
    matrices_of(&of->layer[0], matrices);
    for (int m = 0; m < LAYER_MATRICES; m++) {
        const int64_t rows = matrices[m]->rows, columns = matrices[m]->columns;
        most = rows * columns > most ? rows * columns : most;
        widest = rows > widest ? rows : widest;
        widest = columns > widest ? columns : widest;
    }
    return (products){
        .x = allocate((size_t)(PIECE * widest) * sizeof(float)),
        .w = allocate((size_t)most * sizeof(float)),
        .y = allocate((size_t)(PIECE * widest) * sizeof(float)),
    };
}

/* A BLAS gets weights that are float32 and aligned. */
static void multiply_layers(const products *by, const run_state *state) {
    for (int64_t n = 0; n < state->of->config.layers; n++) {
        const matrix *matrices[LAYER_MATRICES];
        matrices_of(&state->of->layer[n], matrices);
        for (int m = 0; m < LAYER_MATRICES; m++) {
            const matrix *const w = matrices[m];
            const int rows = (int)w->rows, columns = (int)w->columns;
            const bool is_usable = !w->is_bfloat16 && (uintptr_t)w->data % sizeof(float) == 0;
            if (by->multiply == NULL)
                multiply(state->threads, 1, &w, by->x, PIECE, &(float *){by->y});
            else
                by->multiply(ROW_MAJOR, AS_IS, TRANSPOSED, PIECE, rows, columns, 1, by->x, columns,
                             is_usable ? w->data : by->w, columns, 0, by->y, rows);
        }
    }
}

static void time_piece(run_state *state, bench_result *result) {
    samples pieces = {0}, own_times = {0}, blas_times = {0};
    int32_t ids[PIECE];
    for (int n = 0; n < PIECE; n++)
        ids[n] = (int32_t)(n % state->of->config.vocab_size);
    const products own = new_products(state->of);
    products blas = own;
    result->blas_core = NULL;
    blas.multiply = find_blas(state->thread_count, &result->blas_core);
    for (int round = 0; round < PIECE_ROUNDS; round++) {
        const double start = now_ms();
        run_tokens(state, ids, PIECE);
        const double piece = now_ms();
        multiply_layers(&own, state);
        const double end = now_ms();
        add_sample(&pieces, piece - start);
        add_sample(&own_times, end - piece);
        if (blas.multiply == NULL)
            continue;
        multiply_layers(&blas, state);
        add_sample(&blas_times, now_ms() - end);
    }
    result->piece_ms = median(&pieces);
    result->products_ms = median(&own_times);
    result->blas_ms = median(&blas_times);
    free(own.x);
    free(own.w);
    free(own.y);
}

bench_result bench_tokens(run_state *state) {
    bench_result result;
    time_token(state, &result);
    time_piece(state, &result);
    return result;
}
