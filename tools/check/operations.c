/* See check/operations.h. */
#include "check/operations.h"

#include "check/caches.h"

#include "common/arrays.h"
#include "common/device.h"

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <string.h>

static bool applies_always(const check_problem *problem) {
    (void)problem;
    return true;
}

/* Selections depend on float32 scores alone, in every dtype of a case, so they are checked for one
 * dtype. */
static bool applies_once(const check_problem *problem) {
    return check_is_selected(problem->test) && problem->dtype == FDMA_FLOAT32;
}

/* Tables are float32 in every dtype of a case. */
static bool applies_to_float32(const check_problem *problem) {
    return problem->dtype == FDMA_FLOAT32;
}

static bool applies_to_bias(const check_problem *problem) {
    return problem->test->bias_form != FDMA_BIAS_NONE;
}

static bool applies_to_decode(const check_problem *problem) {
    return check_has_decode(problem->test);
}

static bool applies_to_cache(const check_problem *problem) {
    return check_has_cache(problem->test);
}

#define LIKE(tensor) offsetof(check_problem, tensor)

const check_operation check_operations[check_operation_count] = {
    [CHECK_SCORE] = {"score", applies_always, {"score", "bias"}, {LIKE(score), LIKE(bias)}},
    [CHECK_SELECT] = {"select", applies_once, {NULL}, {0}},
    [CHECK_FORWARD] = {"forward", applies_always, {"out", "lse"}, {LIKE(q), LIKE(forward_lse)}},
    [CHECK_BACKWARD] = {"backward",
                        applies_always,
                        {"dq", "dk", "dv", "dbias", "dsink_logit", "dattn_bias"},
                        {LIKE(q), LIKE(k), LIKE(v), LIKE(bias), LIKE(sink_logit),
                         LIKE(dattn_bias)}},
    [CHECK_SCORE_BACKWARD] = {"score_backward",
                              applies_to_bias,
                              {"dv", "ddt_proj", "da", "ddt_bias"},
                              {LIKE(prior_dv), LIKE(dt_proj), LIKE(a), LIKE(dt_bias)}},
    [CHECK_MERGE] = {"merge", applies_always, {"out", "lse"}, {LIKE(q), LIKE(forward_lse)}},
    [CHECK_MERGE_BACKWARD] = {"merge_backward",
                              applies_always,
                              {"dout_a", "dlse_a", "dout_b", "dlse_b"},
                              {LIKE(q), LIKE(forward_lse), LIKE(q), LIKE(forward_lse)}},
    [CHECK_DECODE] = {"decode", applies_to_decode, {"out", "lse"}, {LIKE(new_q), LIKE(new_lse)}},
    [CHECK_CACHE_STORE] = {"cache_store", applies_to_cache, {NULL}, {0}},
    [CHECK_CACHE_COPY] = {"cache_copy", applies_to_cache, {NULL}, {0}},
    [CHECK_PROBABILITIES] = {"probabilities", applies_always, {"probability"}, {LIKE(probability)}},
    [CHECK_ROTARY_TABLE] = {"rotary_table",
                            applies_to_float32,
                            {"rotary"},
                            {LIKE(rotation.rotary)}},
    [CHECK_ROTATE] = {"rotate", applies_always, {"out", "k_out"}, {LIKE(q), LIKE(rotation.k)}},
    [CHECK_ROTATE_BACKWARD] = {"rotate_backward",
                               applies_always,
                               {"dx", "dweight", "dk", "dk_weight"},
                               {LIKE(q), LIKE(rotation.dweight), LIKE(rotation.k),
                                LIKE(rotation.dk_weight)}},
};

const check_operation *check_find_operation(const char *name) {
    for (int i = 0; i < check_operation_count; i++)
        if (strcmp(check_operations[i].name, name) == 0)
            return &check_operations[i];
    return NULL;
}

void check_make_outputs(const check_problem *problem, const check_operation *operation,
                        bool in_layout, fdma_tensor outputs[check_output_limit]) {
    for (int n = 0; n < check_output_limit && operation->outputs[n] != NULL; n++) {
        const fdma_tensor like = *(const fdma_tensor *)((const char *)problem + operation->like[n]);
        outputs[n] = in_layout && like.rank == 4
                         ? check_layout_tensor(like.dtype, problem->test->layout, like.shape)
                         : check_tensor_like(like);
        check_fill(outputs[n], (double)NAN);
    }
    if (operation == &check_operations[CHECK_SCORE_BACKWARD])
        check_store_all(outputs[0], check_widen(problem->prior_dv));
}

/* The bias is judged as a function of the score that the kernel itself wrote, so that an error of
 * the score counts once. */
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

static fdma_status judge_select(const check_problem *problem, const char *kernel,
                                check_error *error) {
    const fdma_tensor found[] = {check_tensor_like(problem->selection.expiry),
                                 check_tensor_like(problem->selection.slot)};
    const fdma_status status = check_run(problem, CHECK_SELECT, kernel, found);
    if (status == FDMA_OK)
        *error = check_worse(check_compare_exact("expiry", found[0], problem->selection.expiry),
                             check_compare_exact("slot", found[1], problem->selection.slot));
    return status;
}

static fdma_status judge_outputs(const check_problem *problem, const check_operation *operation,
                                 const char *kernel, check_error *error) {
    const check_operation_id id = (check_operation_id)(operation - check_operations);
    fdma_tensor outputs[check_output_limit];
    check_problem given = *problem;
    if (id == CHECK_DECODE)
        given.cache = check_in_pages(problem, &problem->cache);
    check_make_outputs(problem, operation, true, outputs);
    const fdma_status status = check_run(&given, id, kernel, outputs);
    if (status != FDMA_OK)
        return status;
    *error = check_compare(operation->outputs[0], &problem->results[id][0], outputs[0]);
    if (id == CHECK_SCORE) {
        if (problem->bias.rank > 0)
            *error = check_worse(*error, judge_bias(problem, outputs[0], outputs[1]));
        return status;
    }
    for (int n = 1; n < check_output_limit && operation->outputs[n] != NULL; n++)
        *error = check_worse(
            *error, check_compare(operation->outputs[n], &problem->results[id][n], outputs[n]));
    return status;
}

/* On a device, deterministic calls of backward run code of their own, which is judged as well. On
 * the CPU every call is deterministic. Some kernels take a mask or a bias in other calls only. */
static fdma_status judge_deterministic(const check_problem *problem, const char *kernel,
                                       check_error *error) {
    const bool has_pairs = problem->attn_mask.rank > 0 || problem->attn_bias.rank > 0;
    check_problem deterministic = *problem;
    check_error again;
    deterministic.deterministic = true;
    const fdma_status status =
        judge_outputs(&deterministic, &check_operations[CHECK_BACKWARD], kernel, &again);
    if (status == FDMA_UNSUPPORTED && has_pairs)
        return FDMA_OK;
    if (status == FDMA_OK)
        *error = check_worse(*error, again);
    return status;
}

fdma_status check_judge(const check_problem *problem, const check_operation *operation,
                        const char *kernel, check_error *error) {
    const check_operation_id id = (check_operation_id)(operation - check_operations);
    if (id == CHECK_SELECT)
        return judge_select(problem, kernel, error);
    if (id == CHECK_CACHE_STORE || id == CHECK_CACHE_COPY)
        return check_judge_cache(problem, id, kernel, error);
    const fdma_status status = judge_outputs(problem, operation, kernel, error);
    if (status == FDMA_OK && id == CHECK_BACKWARD && !runs_on(kernel, 0))
        return judge_deterministic(problem, kernel, error);
    return status;
}
