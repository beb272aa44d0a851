/* Gradients as docs/algorithm.md defines them, row by row, in double precision. */
#include "reference/gradients.h"

#include "core/element.h"
#include "core/kernel.h"

#include <math.h>
#include <string.h>

/* Sums of one (b, g): rows of head_dim. */
typedef struct key_sums {
    double *dk, *dv, *dbias, *dq;
} key_sums;

static key_sums take_sums(const fdma_problem *problem, fdma_arena *arena) {
    const size_t keys = (size_t)problem->kv_len, dim = (size_t)problem->head_dim;
    return (key_sums){
        .dk = fdma_arena_take(arena, keys * dim * sizeof(double)),
        .dv = fdma_arena_take(arena, keys * dim * sizeof(double)),
        .dbias = fdma_arena_take(arena, keys * sizeof(double)),
        .dq = fdma_arena_take(arena, dim * sizeof(double)),
    };
}

size_t fdma_reference_backward_workspace(const fdma_problem *problem) {
    fdma_arena arena = {0};
    take_sums(problem, &arena);
    return fdma_arena_size(&arena);
}

static double dot(const fdma_tensor *x, int64_t at_x, const fdma_tensor *y, int64_t at_y,
                  int64_t count) {
    double sum = 0;
    for (int64_t d = 0; d < count; d++)
        sum += fdma_load(x, at_x + d) * fdma_load(y, at_y + d);
    return sum;
}

/* Writes a gradient, or adds it to what is there. */
static void put(const fdma_tensor *tensor, int64_t at, double value, bool add) {
    fdma_store(tensor, at, add ? fdma_load(tensor, at) + value : value);
}

/* One query row: its dq, and its share of what keys get. */
static void add_row(const fdma_problem *problem, int64_t b, int64_t i, int64_t h,
                    const key_sums *sums) {
    const int64_t g = h / problem->group, dim = problem->head_dim;
    const int64_t q = offset_of(&problem->q, b, i, h), dout = offset_of(&problem->dout, b, i, h);
    const double lse = fdma_load(&problem->lse, offset_of(&problem->lse, b, h, i));
    const double dlse = is_present(&problem->dlse)
                            ? fdma_load(&problem->dlse, offset_of(&problem->dlse, b, h, i))
                            : 0;
    const double carried =
        dot(&problem->dout, dout, &problem->out, offset_of(&problem->out, b, i, h), dim) - dlse;
    memset(sums->dq, 0, (size_t)dim * sizeof *sums->dq);
    for (int64_t j = 0; j < problem->kv_len && lse != -(double)INFINITY; j++) {
        if (!is_kept(problem, b, g, j, query_position(problem, i)))
            continue;
        const int64_t k = offset_of(&problem->k, b, j, g), v = offset_of(&problem->v, b, j, g);
        double s = problem->scale * dot(&problem->q, q, &problem->k, k, dim), slope = 1;
        if (problem->softcap > 0) {
            const double t = tanh(s / problem->softcap);
            s = problem->softcap * t;
            slope = 1 - t * t;
        }
        if (is_present(&problem->bias))
            s += fdma_load(&problem->bias, offset_of(&problem->bias, b, g, j));
        const double p = exp(s - lse);
        const double ds = p * (dot(&problem->dout, dout, &problem->v, v, dim) - carried);
        const double step = ds * slope * problem->scale;
        sums->dbias[j] += ds;
        for (int64_t d = 0; d < dim; d++) {
            sums->dv[j * dim + d] += p * fdma_load(&problem->dout, dout + d);
            sums->dk[j * dim + d] += step * fdma_load(&problem->q, q + d);
            sums->dq[d] += step * fdma_load(&problem->k, k + d);
        }
    }
    for (int64_t d = 0; d < dim; d++)
        put(&problem->dq, offset_of(&problem->dq, b, i, h) + d, sums->dq[d], problem->accumulate);
}

static void put_keys(const fdma_problem *problem, int64_t b, int64_t g, const key_sums *sums) {
    const int64_t dim = problem->head_dim;
    for (int64_t j = 0; j < problem->kv_len; j++) {
        const int64_t dk = offset_of(&problem->dk, b, j, g), dv = offset_of(&problem->dv, b, j, g);
        for (int64_t d = 0; d < dim; d++) {
            put(&problem->dk, dk + d, sums->dk[j * dim + d], problem->accumulate);
            put(&problem->dv, dv + d, sums->dv[j * dim + d], problem->accumulate);
        }
        if (is_present(&problem->dbias))
            fdma_store(&problem->dbias, offset_of(&problem->dbias, b, g, j), sums->dbias[j]);
    }
}

fdma_status fdma_reference_backward(const fdma_problem *problem) {
    fdma_arena arena = fdma_arena_of(problem);
    const key_sums sums = take_sums(problem, &arena);
    const size_t keys = (size_t)problem->kv_len, dim = (size_t)problem->head_dim;
    const int64_t group = problem->q_len > 0 ? problem->group : 0; // without queries it may be vast
    for (int64_t b = 0; b < problem->batch; b++)
        for (int64_t g = 0; g < problem->kv_heads; g++) {
            memset(sums.dk, 0, keys * dim * sizeof *sums.dk);
            memset(sums.dv, 0, keys * dim * sizeof *sums.dv);
            memset(sums.dbias, 0, keys * sizeof *sums.dbias);
            for (int64_t h = g * group; h < (g + 1) * group; h++)
                for (int64_t i = 0; i < problem->q_len; i++)
                    add_row(problem, b, i, h, &sums);
            put_keys(problem, b, g, &sums);
        }
    return FDMA_OK;
}

/* Of one (b, j, g): softplus(dt), and the gradients of z and dt. */
typedef struct score_gradient {
    double softplus, dz, ddt;
} score_gradient;

static score_gradient gradient_of(const fdma_problem *problem, int64_t b, int64_t j, int64_t g,
                                  double dbias) {
    const fdma_tensor *const v = &problem->v, *const weights = &problem->dt_proj;
    const int64_t dim = problem->head_dim;
    double dt = 0;
    for (int64_t other = 0; other < problem->kv_heads; other++)
        dt += dot(v, offset_of(v, b, j, other), weights, g * weights->stride[0] + other * dim, dim);
    const double a = fdma_load(&problem->a, g);
    const double softplus = fmax(dt, 0) + log1p(exp(-fabs(dt)));
    const double dz = problem->bias_form == FDMA_BIAS_EXP ? dbias * exp(a * softplus) : dbias;
    return (score_gradient){.softplus = softplus, .dz = dz, .ddt = dz * a / (1 + exp(-dt))};
}

/* What all keys add to ddt_proj [kv_heads, kv_heads * head_dim] and da [kv_heads]; with dv as it
 * goes, which has a sum of its own: [kv_heads * head_dim]. */
typedef struct score_sums {
    double *ddt_proj, *da, *dv;
} score_sums;

static score_sums take_score_sums(const fdma_problem *problem, fdma_arena *arena) {
    const size_t heads = (size_t)problem->kv_heads, width = heads * (size_t)problem->head_dim;
    return (score_sums){
        .ddt_proj = fdma_arena_take(arena, heads * width * sizeof(double)),
        .da = fdma_arena_take(arena, heads * sizeof(double)),
        .dv = fdma_arena_take(arena, width * sizeof(double)),
    };
}

size_t fdma_reference_score_backward_workspace(const fdma_problem *problem) {
    fdma_arena arena = {0};
    take_score_sums(problem, &arena);
    return fdma_arena_size(&arena);
}

/* Adds one key; false: nothing reaches it. */
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
        const score_gradient at = gradient_of(problem, b, j, g, dbias);
        sums->da[g] += at.dz * at.softplus;
        for (int64_t c = 0; c < width; c++) {
            const int64_t from = offset_of(v, b, j, c / dim) + c % dim;
            sums->ddt_proj[g * width + c] += at.ddt * fdma_load(v, from);
            sums->dv[c] += at.ddt * fdma_load(weights, g * weights->stride[0] + c);
        }
    }
    return any;
}

fdma_status fdma_reference_score_backward(const fdma_problem *problem) {
    fdma_arena arena = fdma_arena_of(problem);
    const score_sums sums = take_score_sums(problem, &arena);
    const fdma_tensor *const dv = &problem->dv, *const ddt_proj = &problem->ddt_proj;
    const int64_t heads = problem->kv_heads, dim = problem->head_dim, width = heads * dim;
    memset(sums.ddt_proj, 0, (size_t)(heads * width) * sizeof *sums.ddt_proj);
    memset(sums.da, 0, (size_t)heads * sizeof *sums.da);
    const int64_t batch = problem->kv_len > 0 ? problem->batch : 0; // without keys it may be vast
    for (int64_t b = 0; b < batch; b++)
        for (int64_t j = 0; j < problem->kv_len; j++)
            if (add_key(problem, b, j, &sums) && is_present(dv))
                for (int64_t c = 0; c < width; c++)
                    put(dv, offset_of(dv, b, j, c / dim) + c % dim, sums.dv[c], true);
    for (int64_t g = 0; g < heads; g++) {
        put(&problem->da, g, sums.da[g], problem->accumulate);
        for (int64_t c = 0; c < width; c++)
            put(ddt_proj, g * ddt_proj->stride[0] + c, sums.ddt_proj[g * width + c],
                problem->accumulate);
    }
    return FDMA_OK;
}

/* Shares of two parts in their sum, by their lse. */
typedef struct merge_shares {
    double lse;
    double of[2]; /* 0 where the part is empty */
} merge_shares;

static merge_shares shares_of(const fdma_problem *problem, int64_t b, int64_t i, int64_t h) {
    double each[2];
    for (int n = 0; n < 2; n++)
        each[n] = fdma_load(&problem->part[n].lse, offset_of(&problem->part[n].lse, b, h, i));
    if (isnan(each[0]) || isnan(each[1]))
        return (merge_shares){(double)NAN, {(double)NAN, (double)NAN}};
    const double most = fmax(each[0], each[1]);
    if (most == -(double)INFINITY)
        return (merge_shares){.lse = most};
    const double lse = most + log(exp(each[0] - most) + exp(each[1] - most));
    return (merge_shares){lse, {exp(each[0] - lse), exp(each[1] - lse)}};
}

static double merged_at(const fdma_problem *problem, const merge_shares *shares, int64_t b,
                        int64_t i, int64_t h, int64_t d) {
    double sum = 0;
    for (int n = 0; n < 2; n++) {
        const fdma_tensor *const out = &problem->part[n].out;
        if (shares->of[n] != 0)
            sum += shares->of[n] * fdma_load(out, offset_of(out, b, i, h) + d);
    }
    return sum;
}

fdma_status fdma_reference_merge(const fdma_problem *problem) {
    for (int64_t b = 0; b < problem->batch; b++)
        for (int64_t h = 0; h < problem->q_heads; h++)
            for (int64_t i = 0; i < problem->q_len; i++) {
                const merge_shares shares = shares_of(problem, b, i, h);
                for (int64_t d = 0; d < problem->head_dim; d++)
                    fdma_store(&problem->out, offset_of(&problem->out, b, i, h) + d,
                               merged_at(problem, &shares, b, i, h, d));
                if (is_present(&problem->lse))
                    fdma_store(&problem->lse, offset_of(&problem->lse, b, h, i), shares.lse);
            }
    return FDMA_OK;
}

static void split_gradient(const fdma_problem *problem, int64_t b, int64_t i, int64_t h) {
    const merge_shares shares = shares_of(problem, b, i, h);
    const fdma_tensor *const dout = &problem->dout, *const dlse = &problem->dlse;
    const int64_t row = offset_of(dout, b, i, h);
    for (int n = 0; n < 2; n++) {
        const fdma_partial *const part = &problem->part[n];
        double sum = is_present(dlse) ? fdma_load(dlse, offset_of(dlse, b, h, i)) : 0;
        for (int64_t d = 0; d < problem->head_dim; d++) {
            const double gradient = fdma_load(dout, row + d), share = shares.of[n];
            if (share != 0)
                sum += gradient * (fdma_load(&part->out, offset_of(&part->out, b, i, h) + d) -
                                   merged_at(problem, &shares, b, i, h, d));
            fdma_store(&part->dout, offset_of(&part->dout, b, i, h) + d,
                       share != 0 ? share * gradient : 0);
        }
        fdma_store(&part->dlse, offset_of(&part->dlse, b, h, i),
                   shares.of[n] != 0 ? shares.of[n] * sum : 0);
    }
}

fdma_status fdma_reference_merge_backward(const fdma_problem *problem) {
    for (int64_t b = 0; b < problem->batch; b++)
        for (int64_t h = 0; h < problem->q_heads; h++)
            for (int64_t i = 0; i < problem->q_len; i++)
                split_gradient(problem, b, i, h);
    return FDMA_OK;
}
