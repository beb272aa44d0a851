/* check_judge.c - what each operation is judged by: its results against the oracle and the plain
 * evaluation, or, where they must be equal, against the reference's. */
#include "check/check.h"
#include "common/arrays.h"
#include "common/device.h"

#include <float.h>
#include <math.h>

static check_verdict worse(check_verdict x, check_verdict y) {
    return (check_verdict){
        .excess = x.excess >= y.excess ? x.excess : y.excess,
        .compared = x.compared + y.compared,
        .tensor = x.excess >= y.excess ? x.tensor : y.tensor,
    };
}

/* The bias is judged as a function of the score that the kernel wrote: what that is off by is the
 * score's own matter. */
static check_verdict judge_bias(const check_problem *problem, fdma_tensor score, fdma_tensor bias) {
    const double *z = check_widen(score);
    const int64_t count = element_count(&score);
    double *oracle = check_alloc(count, sizeof *oracle), *plain = check_alloc(count, sizeof *plain);
    const int is_exp = problem->test->bias_form == FDMA_BIAS_EXP;
    for (int64_t i = 0; i < count; i++) {
        oracle[i] = is_exp ? exp(z[i]) : z[i];
        plain[i] = is_exp ? (double)expf((float)z[i]) : z[i];
        if (oracle[i] > (double)FLT_MAX) {
            oracle[i] = plain[i]; /* what is infinite in float32 */
        }
    }
    const check_result result = {.count = count, .oracle = oracle, .plain = plain};
    return check_compare("bias", &result, bias);
}

static fdma_status judge_score(const check_problem *problem, const char *kernel,
                               check_verdict *verdict) {
    const int biased = problem->test->bias_form != FDMA_BIAS_NONE;
    const fdma_tensor score = check_tensor(FDMA_FLOAT32, 3, problem->score.shape);
    const fdma_tensor bias =
        biased ? check_tensor(FDMA_FLOAT32, 3, problem->score.shape) : (fdma_tensor){0};
    const fdma_status status = check_run_score(problem, kernel, score, bias);
    *verdict = check_compare("score", &problem->z, score);
    if (biased) {
        *verdict = worse(*verdict, judge_bias(problem, score, bias));
    }
    return status;
}

static fdma_status judge_select(const check_problem *problem, const char *kernel,
                                check_verdict *verdict) {
    fdma_selection selection = {
        .size = sizeof selection,
        .expiry = check_tensor(FDMA_INT32, 3, problem->score.shape),
        .slot = check_tensor(FDMA_INT32, 3, problem->score.shape),
    };
    const fdma_status status = check_run_select(problem, kernel, &selection);
    *verdict = worse(check_compare_exact("expiry", selection.expiry, problem->selection.expiry),
                     check_compare_exact("slot", selection.slot, problem->selection.slot));
    return status;
}

/* What is beyond a list is 0 in both. */
static fdma_status judge_lists(const check_problem *problem, const char *kernel,
                               check_verdict *verdict) {
    static const int64_t tile_lens[] = {5, 128};
    const check_case *test = problem->test;
    fdma_status status = FDMA_OK;
    *verdict = (check_verdict){0};
    for (size_t t = 0; t < sizeof tile_lens / sizeof tile_lens[0] && status == FDMA_OK; t++) {
        const int64_t tiles = (test->q_len + tile_lens[t] - 1) / tile_lens[t];
        const int64_t list_shape[] = {test->batch, test->kv_heads, tiles, test->kv_len};
        const int64_t count_shape[] = {test->batch, test->kv_heads, tiles, 2};
        const fdma_tensor list = check_tensor(FDMA_INT32, 4, list_shape);
        const fdma_tensor count = check_tensor(FDMA_INT32, 4, count_shape);
        const fdma_tensor want_list = check_tensor(FDMA_INT32, 4, list_shape);
        const fdma_tensor want_count = check_tensor(FDMA_INT32, 4, count_shape);
        status = check_run_lists(problem, "reference", tile_lens[t], want_list, want_count);
        if (status == FDMA_OK) {
            status = check_run_lists(problem, kernel, tile_lens[t], list, count);
        }
        *verdict = worse(*verdict, worse(check_compare_exact("list", list, want_list),
                                         check_compare_exact("count", count, want_count)));
    }
    return status;
}

static fdma_status judge_forward(const check_problem *problem, const char *kernel,
                                 check_verdict *verdict) {
    const check_case *test = problem->test;
    const int64_t lse_shape[3] = {test->batch, test->q_heads, test->q_len};
    const fdma_tensor lse = check_tensor(FDMA_FLOAT32, 3, lse_shape);
    const fdma_tensor out = check_layout_tensor(problem->dtype, test->layout, problem->q.shape);
    const fdma_status status = check_run_forward(problem, kernel, out, lse);
    *verdict =
        worse(check_compare("out", &problem->out, out), check_compare("lse", &problem->lse, lse));
    return status;
}

/* An output that nobody has written shows: it is NaN. */
static fdma_tensor spoilt(fdma_tensor output) {
    check_fill(output, (double)NAN);
    return output;
}

static fdma_tensor spoilt_like(fdma_tensor tensor) {
    return tensor.rank > 0 ? spoilt(check_tensor(tensor.dtype, tensor.rank, tensor.shape)) : tensor;
}

static fdma_tensor spoilt_rows(const check_problem *problem, fdma_tensor like) {
    return spoilt(check_layout_tensor(problem->dtype, problem->test->layout, like.shape));
}

static fdma_status judge_form(const check_problem *problem, const char *kernel, int deterministic,
                              check_verdict *verdict) {
    const check_backward_outputs to = {
        spoilt_rows(problem, problem->q), spoilt_rows(problem, problem->k),
        spoilt_rows(problem, problem->v), spoilt_like(problem->bias)};
    const fdma_status status = check_run_backward(problem, kernel, deterministic, &to);
    *verdict = worse(
        worse(check_compare("dq", &problem->dq, to.dq), check_compare("dk", &problem->dk, to.dk)),
        worse(check_compare("dv", &problem->dv, to.dv),
              check_compare("dbias", &problem->dbias, to.dbias)));
    return status;
}

/* The CPU has one form of it, a device two. */
static fdma_status judge_backward(const check_problem *problem, const char *kernel,
                                  check_verdict *verdict) {
    fdma_status status = judge_form(problem, kernel, 0, verdict);
    if (status == FDMA_OK && !runs_on(kernel, 0)) {
        check_verdict deterministic;
        status = judge_form(problem, kernel, 1, &deterministic);
        *verdict = worse(*verdict, deterministic);
    }
    return status;
}

static fdma_status judge_score_backward(const check_problem *problem, const char *kernel,
                                        check_verdict *verdict) {
    const check_score_outputs to = {
        check_layout_tensor(problem->dtype, problem->test->layout, problem->v.shape),
        spoilt_like(problem->dt_proj), spoilt_like(problem->a)};
    const double *held = check_widen(problem->held_dv);
    for (int64_t i = 0; i < problem->added_dv.count; i++) {
        check_store(to.dv, i, held[i]);
    }
    const fdma_status status = check_run_score_backward(problem, kernel, &to);
    *verdict = worse(check_compare("dv", &problem->added_dv, to.dv),
                     worse(check_compare("ddt_proj", &problem->ddt_proj, to.ddt_proj),
                           check_compare("da", &problem->da, to.da)));
    return status;
}

static fdma_status judge_merge(const check_problem *problem, const char *kernel,
                               check_verdict *verdict) {
    const fdma_tensor out = spoilt_rows(problem, problem->q);
    const fdma_tensor lse = spoilt_like(problem->given_lse);
    const fdma_status status = check_run_merge(problem, kernel, out, lse);
    *verdict = worse(check_compare("out", &problem->merged_out, out),
                     check_compare("lse", &problem->merged_lse, lse));
    return status;
}

static fdma_status judge_merge_backward(const check_problem *problem, const char *kernel,
                                        check_verdict *verdict) {
    check_part_outputs to;
    for (int n = 0; n < 2; n++) {
        to.dout[n] = spoilt_rows(problem, problem->q);
        to.dlse[n] = spoilt_like(problem->given_lse);
    }
    const fdma_status status = check_run_merge_backward(problem, kernel, &to);
    *verdict = (check_verdict){0};
    for (int n = 0; n < 2; n++) {
        *verdict = worse(
            *verdict,
            worse(check_compare(n ? "dout_b" : "dout_a", &problem->part_dout[n], to.dout[n]),
                  check_compare(n ? "dlse_b" : "dlse_a", &problem->part_dlse[n], to.dlse[n])));
    }
    return status;
}

static int concerns_all(const check_problem *problem) { return problem->test != NULL; }

/* A selection is of float32 scores, whatever the type of the case: one type is enough, and for its
 * lists too. */
static int is_of_scores(const check_problem *problem) {
    return problem->test->window >= 0 && problem->dtype == FDMA_FLOAT32;
}

static int is_biased(const check_problem *problem) {
    return problem->test->bias_form != FDMA_BIAS_NONE;
}

const check_operation check_operations[check_operation_count] = {
    {"score", concerns_all, judge_score},
    {"select", is_of_scores, judge_select},
    {"lists", is_of_scores, judge_lists},
    {"forward", concerns_all, judge_forward},
    {"backward", concerns_all, judge_backward},
    {"score_backward", is_biased, judge_score_backward},
    {"merge", concerns_all, judge_merge},
    {"merge_backward", concerns_all, judge_merge_backward},
};
