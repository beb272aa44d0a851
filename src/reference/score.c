/* Scores and their gradients, key by key. */
#include "reference/reference.h"

#include <math.h>
#include <string.h>

/* dt = <v, dt_proj> over the channels of all kv heads. */
static double key_dt(const fdma_problem *problem, int64_t b, int64_t j, int64_t g) {
    const fdma_tensor *const v = &problem->v, *const weights = &problem->dt_proj;
    const int64_t dim = problem->head_dim;
    double dt = 0;
    for (int64_t other = 0; other < problem->kv_heads; other++)
        for (int64_t d = 0; d < dim; d++)
            dt += fdma_load(v, offset_of(v, b, j, other) + d) *
                  fdma_load(weights, g * weights->stride[0] + other * dim + d);
    return dt;
}

static double softplus(double x) { return fmax(x, 0) + log1p(exp(-fabs(x))); }

/* The bias is a function of the score as its type holds it, rounded. */
fdma_status fdma_reference_score(const fdma_problem *problem) {
    const fdma_tensor *const score = &problem->score, *const bias = &problem->bias;
    const fdma_dtype dtype = is_present(score) ? score->dtype : bias->dtype;
    for (int64_t b = 0; b < problem->batch; b++)
        for (int64_t g = 0; g < problem->kv_heads; g++)
            for (int64_t j = 0; j < problem->kv_len; j++) {
                const double exact =
                    is_valid_key(problem, b, j)
                        ? fdma_load(&problem->a, g) * softplus(key_dt(problem, b, j, g))
                        : -(double)INFINITY;
                const double z = dtype == FDMA_FLOAT32 ? (double)(float)exact : exact;
                if (is_present(score))
                    fdma_store(score, offset_of(score, b, g, j), z);
                if (is_present(bias))
                    fdma_store(bias, offset_of(bias, b, g, j),
                               problem->bias_form == FDMA_BIAS_EXP ? exp(z) : z);
            }
    return FDMA_OK;
}

/* Sums over all keys, of the shapes of ddt_proj and da; and the dv of one key,
 * [kv_heads * head_dim]. */
typedef struct score_sums {
    double *ddt_proj, *da, *dv;
} score_sums;

static score_sums take_sums(const fdma_problem *problem, fdma_arena *arena) {
    const size_t heads = (size_t)problem->kv_heads, width = heads * (size_t)problem->head_dim;
    return (score_sums){
        .ddt_proj = fdma_arena_take(arena, heads * width * sizeof(double)),
        .da = fdma_arena_take(arena, heads * sizeof(double)),
        .dv = fdma_arena_take(arena, width * sizeof(double)),
    };
}

size_t fdma_reference_score_backward_workspace(const fdma_problem *problem) {
    fdma_arena arena = {0};
    take_sums(problem, &arena);
    return fdma_arena_size(&arena);
}

/* Adds one key to the sums; false if it contributes to no gradient. */
static bool add_key(const fdma_problem *problem, int64_t b, int64_t j, const score_sums *sums) {
    const fdma_tensor *const v = &problem->v, *const weights = &problem->dt_proj;
    const int64_t heads = problem->kv_heads, dim = problem->head_dim, width = heads * dim;
    bool any = false;
    memset(sums->dv, 0, (size_t)width * sizeof *sums->dv);
    for (int64_t g = 0; g < heads; g++) {
        const double dbias = fdma_load(&problem->dbias, offset_of(&problem->dbias, b, g, j));
        if (dbias == 0 || !is_valid_key(problem, b, j))
            continue;
        any = true;
        const double a = fdma_load(&problem->a, g), dt = key_dt(problem, b, j, g);
        const double dz =
            problem->bias_form == FDMA_BIAS_EXP ? dbias * exp(a * softplus(dt)) : dbias;
        const double ddt = dz * a / (1 + exp(-dt));
        sums->da[g] += dz * softplus(dt);
        for (int64_t c = 0; c < width; c++) {
            const int64_t from = offset_of(v, b, j, c / dim) + c % dim;
            sums->ddt_proj[g * width + c] += ddt * fdma_load(v, from);
            sums->dv[c] += ddt * fdma_load(weights, g * weights->stride[0] + c);
        }
    }
    return any;
}

fdma_status fdma_reference_score_backward(const fdma_problem *problem) {
    fdma_arena arena = fdma_arena_of(problem);
    const score_sums sums = take_sums(problem, &arena);
    const fdma_tensor *const dv = &problem->dv, *const ddt_proj = &problem->ddt_proj;
    const int64_t heads = problem->kv_heads, dim = problem->head_dim, width = heads * dim;
    memset(sums.ddt_proj, 0, (size_t)(heads * width) * sizeof *sums.ddt_proj);
    memset(sums.da, 0, (size_t)heads * sizeof *sums.da);
    const int64_t batch = problem->kv_len > 0 ? problem->batch : 0; // without keys it may be vast
    for (int64_t b = 0; b < batch; b++)
        for (int64_t j = 0; j < problem->kv_len; j++)
            if (add_key(problem, b, j, &sums) && is_present(dv))
                for (int64_t c = 0; c < width; c++)
                    store_gradient(dv, offset_of(dv, b, j, c / dim) + c % dim, sums.dv[c], true);
    for (int64_t g = 0; g < heads; g++) {
        store_gradient(&problem->da, g, sums.da[g], problem->accumulate);
        for (int64_t c = 0; c < width; c++)
            store_gradient(ddt_proj, g * ddt_proj->stride[0] + c, sums.ddt_proj[g * width + c],
                           problem->accumulate);
    }
    return FDMA_OK;
}
