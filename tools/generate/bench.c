/* See generate/bench.h. */
#include "generate/bench.h"

#include "common/timing.h"

#include <stdatomic.h>
#include <stdint.h>

enum { ROUNDS = 21, READ_LANES = 32 };

static atomic_uint_fast64_t kept; // so that the compiler cannot leave out the read

typedef struct bytes_read {
    const char *from;
    int64_t count;
} bytes_read;

typedef uint64_t read_lanes __attribute__((vector_size(32), aligned(1), may_alias));

/* Thread `index` of `count` reads its part. */
static void read_part(void *argument, int index, int count) {
    const bytes_read *const of = argument;
    const int64_t begin = of->count * index / count, end = of->count * (index + 1) / count;
    read_lanes sums[4] = {{0}};
    for (int64_t at = begin; at + 4 * READ_LANES <= end; at += 4 * READ_LANES)
        for (int n = 0; n < 4; n++)
            sums[n] ^= *(const read_lanes *)(of->from + at + n * READ_LANES);
    const read_lanes all = sums[0] ^ sums[1] ^ sums[2] ^ sums[3];
    atomic_fetch_xor(&kept, all[0] ^ all[1] ^ all[2] ^ all[3]);
}

static void read_matrix(run_state *state, const matrix *w) {
    bytes_read of = {w->data, w->rows * w->columns * (w->is_bfloat16 ? 2 : 4)};
    run_crew(state->threads, read_part, &of);
}

static void read_weights(run_state *state) {
    const model *const of = state->of;
    for (int64_t n = 0; n < of->config.layers; n++) {
        const layer *const one = &of->layer[n];
        const matrix *const matrices[] = {&one->q_proj,   &one->k_proj,    &one->v_proj,
                                          &one->o_proj,   &one->gate_proj, &one->up_proj,
                                          &one->down_proj};
        for (size_t m = 0; m < sizeof matrices / sizeof matrices[0]; m++)
            read_matrix(state, matrices[m]);
    }
    read_matrix(state, &of->head);
}

bench_result bench_tokens(run_state *state) {
    samples tokens = {0}, reads = {0};
    const int32_t id = 0;
    for (int round = 0; round < ROUNDS; round++) {
        const double start = now_ms();
        run_tokens(state, &id, 1);
        const double middle = now_ms();
        read_weights(state);
        add_sample(&tokens, middle - start);
        add_sample(&reads, now_ms() - middle);
    }
    return (bench_result){median(&tokens), median(&reads)};
}
