/* See check/judge.h. */
#include "check/judge.h"

#include "check/run.h"
#include "common/arrays.h"
#include "common/device.h"

#include <float.h>
#include <math.h>
#include <string.h>

/* An output full of NaN: elements that the kernel does not write are seen. */
static fdma_tensor spoilt(fdma_tensor output) {
    check_fill(output, (double)NAN);
    return output;
}

static fdma_tensor spoilt_like(fdma_tensor tensor) {
    return tensor.rank > 0 ? spoilt(check_tensor_like(tensor)) : tensor;
}

/* The same, in the memory layout of the case. */
static fdma_tensor spoilt_in_layout(const check_problem *problem, fdma_tensor like) {
    return spoilt(check_layout_tensor(problem->dtype, problem->test->layout, like.shape));
}

/* The bias is judged as a function of the score that the kernel itself wrote: an error of the score
 * counts once. */
static check_error judge_bias(const check_problem *problem, fdma_tensor score, fdma_tensor bias) {
    const double *z = check_widen(score);
    const int64_t count = element_count(&score);
    double *exact = check_alloc(count, sizeof *exact), *plain = check_alloc(count, sizeof *plain);
    const bool is_exp = problem->test->bias_form == FDMA_BIAS_EXP;
    for (int64_t i = 0; i < count; i++) {
        exact[i] = is_exp ? exp(z[i]) : z[i];
        plain[i] = is_exp ? (double)expf((float)z[i]) : z[i];
        if (exact[i] > (double)FLT_MAX)
            exact[i] = plain[i]; // infinity in float32
    }
    const check_result result = {.count = count, .reference = exact, .plain = plain};
    return check_compare("bias", &result, bias);
}

static fdma_status judge_score(const check_problem *problem, const char *kernel,
                               check_error *error) {
    const bool biased = problem->test->bias_form != FDMA_BIAS_NONE;
    const fdma_tensor score = spoilt_like(problem->score), bias = spoilt_like(problem->bias);
    const fdma_status status = check_run_score(problem, kernel, score, bias);
    *error = check_compare("score", &problem->z, score);
    if (biased)
        *error = check_worse(*error, judge_bias(problem, score, bias));
    return status;
}

static fdma_status judge_select(const check_problem *problem, const char *kernel,
                                check_error *error) {
    fdma_selection selection = {
        .size = sizeof selection,
        .expiry = check_tensor(FDMA_INT32, 3, problem->score.shape),
        .slot = check_tensor(FDMA_INT32, 3, problem->score.shape),
    };
    const fdma_status status = check_run_select(problem, kernel, &selection);
    *error = check_worse(check_compare_exact("expiry", selection.expiry, problem->selection.expiry),
                         check_compare_exact("slot", selection.slot, problem->selection.slot));
    return status;
}

/* Entries beyond the end of a list are not written: they are 0 in both lists. */
static fdma_status judge_lists(const check_problem *problem, const char *kernel,
                               check_error *error) {
    static const int64_t tile_lens[] = {5, 128};
    const check_case *test = problem->test;
    fdma_status status = FDMA_OK;
    *error = (check_error){0};
    for (size_t t = 0; t < sizeof tile_lens / sizeof tile_lens[0] && status == FDMA_OK; t++) {
        const int64_t tiles = (test->q_len + tile_lens[t] - 1) / tile_lens[t];
        const int64_t list_shape[] = {test->batch, test->kv_heads, tiles, test->kv_len};
        const int64_t count_shape[] = {test->batch, test->kv_heads, tiles, 2};
        const fdma_tensor list = check_tensor(FDMA_INT32, 4, list_shape);
        const fdma_tensor count = check_tensor(FDMA_INT32, 4, count_shape);
        const fdma_tensor expected_list = check_tensor(FDMA_INT32, 4, list_shape);
        const fdma_tensor expected_count = check_tensor(FDMA_INT32, 4, count_shape);
        status = check_run_lists(problem, "reference", tile_lens[t], expected_list, expected_count);
        if (status == FDMA_OK)
            status = check_run_lists(problem, kernel, tile_lens[t], list, count);
        *error = check_worse(*error, check_compare_exact("list", list, expected_list));
        *error = check_worse(*error, check_compare_exact("count", count, expected_count));
    }
    return status;
}

static fdma_status judge_forward(const check_problem *problem, const char *kernel,
                                 check_error *error) {
    const fdma_tensor out = spoilt_in_layout(problem, problem->q);
    const fdma_tensor lse = spoilt_like(problem->forward_lse);
    const fdma_status status = check_run_forward(problem, kernel, out, lse);
    *error = check_worse(check_compare("out", &problem->out, out),
                         check_compare("lse", &problem->lse, lse));
    return status;
}

static fdma_status judge_backward_mode(const check_problem *problem, const char *kernel,
                                       bool deterministic, check_error *error) {
    const check_backward_outputs outputs = {
        spoilt_in_layout(problem, problem->q), spoilt_in_layout(problem, problem->k),
        spoilt_in_layout(problem, problem->v), spoilt_like(problem->bias)};
    const fdma_status status = check_run_backward(problem, kernel, deterministic, &outputs);
    *error = check_compare("dq", &problem->dq, outputs.dq);
    *error = check_worse(*error, check_compare("dk", &problem->dk, outputs.dk));
    *error = check_worse(*error, check_compare("dv", &problem->dv, outputs.dv));
    *error = check_worse(*error, check_compare("dbias", &problem->dbias, outputs.dbias));
    return status;
}

/* A device has code of its own for deterministic calls; the CPU always is. */
static fdma_status judge_backward(const check_problem *problem, const char *kernel,
                                  check_error *error) {
    fdma_status status = judge_backward_mode(problem, kernel, false, error);
    if (status == FDMA_OK && !runs_on(kernel, 0)) {
        check_error deterministic;
        status = judge_backward_mode(problem, kernel, true, &deterministic);
        *error = check_worse(*error, deterministic);
    }
    return status;
}

static fdma_status judge_score_backward(const check_problem *problem, const char *kernel,
                                        check_error *error) {
    const check_score_outputs outputs = {
        check_layout_tensor(problem->dtype, problem->test->layout, problem->v.shape),
        spoilt_like(problem->dt_proj), spoilt_like(problem->a)};
    const double *prior = check_widen(problem->prior_dv);
    for (int64_t i = 0; i < problem->score_dv.count; i++)
        check_store(outputs.dv, i, prior[i]);
    const fdma_status status = check_run_score_backward(problem, kernel, &outputs);
    *error = check_compare("dv", &problem->score_dv, outputs.dv);
    *error = check_worse(*error, check_compare("ddt_proj", &problem->ddt_proj, outputs.ddt_proj));
    *error = check_worse(*error, check_compare("da", &problem->da, outputs.da));
    return status;
}

static fdma_status judge_merge(const check_problem *problem, const char *kernel,
                               check_error *error) {
    const fdma_tensor out = spoilt_in_layout(problem, problem->q);
    const fdma_tensor lse = spoilt_like(problem->forward_lse);
    const fdma_status status = check_run_merge(problem, kernel, out, lse);
    *error = check_worse(check_compare("out", &problem->merged_out, out),
                         check_compare("lse", &problem->merged_lse, lse));
    return status;
}

static fdma_status judge_merge_backward(const check_problem *problem, const char *kernel,
                                        check_error *error) {
    static const char *const dout[] = {"dout_a", "dout_b"}, *const dlse[] = {"dlse_a", "dlse_b"};
    check_merge_outputs outputs;
    for (int n = 0; n < 2; n++) {
        outputs.dout[n] = spoilt_in_layout(problem, problem->q);
        outputs.dlse[n] = spoilt_like(problem->forward_lse);
    }
    const fdma_status status = check_run_merge_backward(problem, kernel, &outputs);
    *error = (check_error){0};
    for (int n = 0; n < 2; n++) {
        *error =
            check_worse(*error, check_compare(dout[n], &problem->partial_dout[n], outputs.dout[n]));
        *error =
            check_worse(*error, check_compare(dlse[n], &problem->partial_dlse[n], outputs.dlse[n]));
    }
    return status;
}

static bool applies_always(const check_problem *problem) { return problem->test != NULL; }

/* Selections and lists depend on float32 scores alone, whatever the dtype of the case is: they are
 * checked for one dtype. */
static bool applies_once(const check_problem *problem) {
    return check_is_selected(problem->test) && problem->dtype == FDMA_FLOAT32;
}

static bool applies_to_bias(const check_problem *problem) {
    return problem->test->bias_form != FDMA_BIAS_NONE;
}

const check_operation check_operations[check_operation_count] = {
    {"score", applies_always, judge_score},
    {"select", applies_once, judge_select},
    {"lists", applies_once, judge_lists},
    {"forward", applies_always, judge_forward},
    {"backward", applies_always, judge_backward},
    {"score_backward", applies_to_bias, judge_score_backward},
    {"merge", applies_always, judge_merge},
    {"merge_backward", applies_always, judge_merge_backward},
};

const check_operation *check_find_operation(const char *name) {
    for (int i = 0; i < check_operation_count; i++)
        if (strcmp(check_operations[i].name, name) == 0)
            return &check_operations[i];
    return NULL;
}
