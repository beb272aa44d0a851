/* Finds the tuning entry of a problem. */
#include "core/tuning.h"

int64_t fdma_nearest_power(int64_t n) {
    int64_t power = 1;
    if (n <= 0)
        return 0;
    while (n - power >= power - power / 2) // below 1.5 times a power of 2, that one is nearest
        power *= 2;
    return power;
}

/* The most keys that a query keeps. */
static int64_t most_kept(const fdma_problem *problem) {
    const bool fewer = problem->selected && problem->slots < problem->kv_len;
    return fewer ? problem->slots : problem->kv_len;
}

tuning_class fdma_class_of(const fdma_problem *problem) {
    return (tuning_class){
        .operation = problem->operation,
        .dtype = problem->dtype,
        .causal = problem->causal,
        .head_dim = problem->head_dim,
        .rows = fdma_nearest_power(problem->q_len * problem->group),
        .keys = fdma_nearest_power(problem->kv_len),
        .kept = fdma_nearest_power(most_kept(problem)),
    };
}

static bool is_same_class(const tuning_class *a, const tuning_class *b) {
    return a->operation == b->operation && a->dtype == b->dtype && a->causal == b->causal &&
           a->head_dim == b->head_dim && a->rows == b->rows && a->keys == b->keys &&
           a->kept == b->kept;
}

const tuning_entry *fdma_find_entry(const fdma_tuning *tuning, const tuning_class *calls) {
    for (int32_t n = 0; n < tuning->count; n++)
        if (is_same_class(&tuning->entries[n].calls, calls))
            return &tuning->entries[n];
    return NULL;
}

const tuning_choice *fdma_tuned(const fdma_problem *problem) {
    static const tuning_choice rules = {.kernel = ""};
    if (problem->tuning == NULL || problem->exec.kernel != NULL ||
        problem->dropout.threshold != 0 || is_present(&problem->attn_mask) ||
        is_present(&problem->attn_bias))
        return &rules;
    const tuning_class calls = fdma_class_of(problem);
    const tuning_entry *const entry = fdma_find_entry(problem->tuning, &calls);
    return entry != NULL ? &entry->choice : &rules;
}
