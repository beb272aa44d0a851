/* See check/rotary.h. */
#include "check/rotary.h"

#include "commands.h"
#include "common/random.h"
#include "common/text.h"

#include <stdlib.h>

/* Half of the cases have given frequencies, the others powers of the base. */
static void make_frequencies(check_problem *problem, int64_t pairs, uint64_t *random) {
    check_rotary *const rotary = &problem->rotation;
    rotary->base = 10000;
    if (random_bits(random) % 2 == 0)
        return;
    rotary->inv_freq = check_tensor(FDMA_FLOAT64, 1, &pairs);
    for (int64_t d = 0; d < pairs; d++)
        check_store(rotary->inv_freq, d, 1 / (1 + 0.25 * (double)(d * d)));
}

/* Of packed sequences positions follow from starts; of others they are given in half of the
 * cases. */
static void make_positions(check_problem *problem, int64_t rows, uint64_t *random) {
    const check_case *const test = problem->test;
    check_rotary *const rotary = &problem->rotation;
    const int64_t batch = random_bits(random) % 2 == 0 ? 1 : test->batch;
    const int64_t shape[2] = {batch, test->q_len};
    rotary->offset = rotary->first;
    if (check_is_packed(test) || random_bits(random) % 2 == 0)
        return;
    rotary->offset = 0;
    rotary->positions = check_tensor(FDMA_INT32, 2, shape);
    for (int64_t n = 0; n < batch * test->q_len; n++)
        ((int32_t *)rotary->positions.data)[n] =
            (int32_t)(rotary->first + (int64_t)(random_bits(random) % (uint64_t)rows));
}

/* Of half of the tables whose first row would have position 0; some are negative. */
static void make_row_positions(check_rotary *rotary, int64_t rows, uint64_t *random) {
    if (rotary->first != 0 || random_bits(random) % 2 == 0)
        return;
    rotary->row_positions = check_tensor(FDMA_INT32, 1, &rows);
    for (int64_t n = 0; n < rows; n++)
        ((int32_t *)rotary->row_positions.data)[n] =
            (int32_t)(random_bits(random) % 20000000) - 10000000;
}

static void make_table(check_problem *problem, int64_t rows, int64_t dim) {
    const int64_t shape[2] = {rows, dim};
    check_rotary *const rotary = &problem->rotation;
    fdma_rotary_table_args args = {
        .size = sizeof args,
        .rotary = check_tensor(FDMA_FLOAT32, 2, shape),
        .inv_freq = rotary->inv_freq,
        .base = rotary->base,
        .first = rotary->first,
        .exec = {.kernel = "reference"},
    };
    if (fdma_rotary_table(&args) != FDMA_OK) {
        print_error("fdma check: the reference makes no rotary table: %s", fdma_last_error());
        exit(EXIT_FAILED);
    }
    rotary->rotary = args.rotary;
}

/* In half of the cases, with a norm if q has one. */
static void make_keys(check_problem *problem, uint64_t *random) {
    const check_case *const test = problem->test;
    check_rotary *const rotary = &problem->rotation;
    const int64_t shape[4] = {test->batch, test->q_len, test->kv_heads, test->head_dim};
    if (random_bits(random) % 2 == 0)
        return;
    rotary->k = check_tensor(problem->dtype, 4, shape);
    rotary->dk_out = check_tensor(problem->dtype, 4, shape);
    rotary->k_nope_heads = random_bits(random) % 4 == 0 ? test->kv_heads / 2 : 0;
    check_fill_normal(rotary->k, random, 1);
    check_fill_normal(rotary->dk_out, random, 1);
    if (rotary->weight.rank == 0)
        return;
    rotary->k_weight = check_tensor(rotary->weight.dtype, 1, &test->head_dim);
    rotary->dk_weight = rotary->dweight;
    check_fill_normal(rotary->k_weight, random, 1);
}

/* In two thirds of the cases. */
static void make_norm(check_problem *problem, uint64_t *random) {
    const int64_t *const head_dim = &problem->test->head_dim;
    check_rotary *const rotary = &problem->rotation;
    if (random_bits(random) % 3 == 0)
        return;
    rotary->weight =
        check_tensor(random_bits(random) % 2 == 0 ? FDMA_FLOAT32 : problem->dtype, 1, head_dim);
    rotary->dweight = fdma_dense_tensor(NULL, FDMA_FLOAT32, 1, head_dim);
    rotary->eps = 1e-6;
    check_fill_normal(rotary->weight, random, 1);
}

void check_make_rotary(check_problem *problem) {
    const check_case *const test = problem->test;
    check_rotary *const rotary = &problem->rotation;
    const int64_t rows = test->q_len + 3;
    uint64_t random = check_seed(test) + 4;
    const int64_t dims[] = {test->head_dim, test->head_dim, test->head_dim / 2, 6};
    const int64_t dim = dims[random_bits(&random) % 4];
    rotary->first = (int64_t)(random_bits(&random) % 3) * 5000000;
    rotary->nope_heads = random_bits(&random) % 4 == 0 ? test->q_heads / 2 : 0;
    rotary->interleaved = random_bits(&random) % 2 == 0;
    make_frequencies(problem, dim / 2, &random);
    make_positions(problem, rows, &random);
    make_row_positions(rotary, rows, &random);
    make_table(problem, rows, dim);
    make_norm(problem, &random);
    make_keys(problem, &random);
}
