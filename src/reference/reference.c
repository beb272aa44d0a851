/* Score, select, list and attend as docs/algorithm.md defines them; every other kernel is checked
 * against this one. Takes float64 too. */
#include "reference/reference.h"

#include "core/element.h"
#include "reference/gradients.h"

#include <math.h>

/* z = a * softplus(<v, dt_proj>) of one key and kv head. */
static double key_score(const fdma_problem *problem, int64_t b, int64_t j, int64_t g) {
    double dt = 0;
    for (int64_t other = 0; other < problem->kv_heads; other++)
        for (int64_t d = 0; d < problem->head_dim; d++)
            dt += fdma_load(&problem->v, offset_of(&problem->v, b, j, other) + d) *
                  fdma_load(&problem->dt_proj,
                            g * problem->dt_proj.stride[0] + other * problem->head_dim + d);
    const double softplus = fmax(dt, 0) + log1p(exp(-fabs(dt)));
    return fdma_load(&problem->a, g) * (isnan(dt) ? dt : softplus);
}

/* The bias is a function of the score as its type holds it. */
static fdma_status run_score(const fdma_problem *problem) {
    const fdma_tensor *const score = &problem->score, *const bias = &problem->bias;
    const fdma_dtype dtype = is_present(score) ? score->dtype : bias->dtype;
    for (int64_t b = 0; b < problem->batch; b++)
        for (int64_t g = 0; g < problem->kv_heads; g++)
            for (int64_t j = 0; j < problem->kv_len; j++) {
                const bool valid = is_valid_key(problem, b, j);
                const double exact = valid ? key_score(problem, b, j, g) : -(double)INFINITY;
                const double z = dtype == FDMA_FLOAT32 ? (double)(float)exact : exact;
                const double term = problem->bias_form == FDMA_BIAS_EXP ? exp(z) : z;
                if (is_present(score))
                    fdma_store(score, offset_of(score, b, g, j), z);
                if (is_present(bias))
                    fdma_store(bias, offset_of(bias, b, g, j), term);
            }
    return FDMA_OK;
}

/* Whether a key of score x, more recent than one of score y, outranks it. */
static bool outranks(double x, double y) { return x >= y || isnan(y); }

/* Sorts every prefix, by insertion: ranked[] holds the valid keys so far, best first, and the kept
 * set at position j is its beginning. Fills in expiry and slot of one (b, g) for causal scope. */
static void select_prefixes(const fdma_problem *problem, int64_t b, int64_t g, int32_t *ranked,
                            int32_t *expiry, int32_t *slot) {
    const fdma_tensor *const score = &problem->score;
    const int64_t row = offset_of(score, b, g, 0);
    int64_t count = 0;
    for (int32_t j = 0; j < (int32_t)problem->kv_len; j++) {
        expiry[j] = j;
        slot[j] = -1;
        if (!is_valid_key(problem, b, j))
            continue;
        int64_t rank = count++;
        for (; rank > 0; rank--) {
            if (!outranks(fdma_load(score, row + j), fdma_load(score, row + ranked[rank - 1])))
                break;
            ranked[rank] = ranked[rank - 1];
        }
        ranked[rank] = j;
        if (rank >= problem->window)
            continue;
        expiry[j] = (int32_t)problem->kv_len;
        slot[j] = (int32_t)(count - 1);
        if (count <= problem->window)
            continue;
        const int32_t evicted = ranked[problem->window];
        expiry[evicted] = j;
        slot[j] = slot[evicted];
    }
}

/* Global scope keeps what the last prefix keeps, for everyone; slots count the kept keys. */
static void keep_last_prefix(const fdma_problem *problem, int32_t *expiry, int32_t *slot) {
    int32_t kept = 0;
    for (int32_t j = 0; j < (int32_t)problem->kv_len; j++) {
        const bool stays = slot[j] >= 0 && expiry[j] == (int32_t)problem->kv_len;
        expiry[j] = stays ? expiry[j] : j;
        slot[j] = stays ? kept++ : -1;
    }
}

static fdma_arena select_scratch(const fdma_problem *problem, int32_t **ranked, int32_t **slot) {
    fdma_arena arena = fdma_arena_of(problem);
    *ranked = fdma_arena_take(&arena, (size_t)problem->kv_len * sizeof **ranked);
    *slot = fdma_arena_take(&arena, (size_t)problem->kv_len * sizeof **slot);
    return arena;
}

static size_t select_workspace(const fdma_problem *problem) {
    int32_t *ranked, *slot;
    const fdma_arena arena = select_scratch(problem, &ranked, &slot);
    return fdma_arena_size(&arena);
}

static fdma_status run_select(const fdma_problem *problem) {
    const fdma_tensor *const expiry = &problem->expiry, *const slots = &problem->slot;
    int32_t *ranked, *scratch;
    select_scratch(problem, &ranked, &scratch);
    for (int64_t b = 0; b < problem->batch; b++)
        for (int64_t g = 0; g < problem->kv_heads; g++) {
            int32_t *const out = (int32_t *)expiry->data + offset_of(expiry, b, g, 0);
            int32_t *const slot =
                is_present(slots) ? (int32_t *)slots->data + offset_of(slots, b, g, 0) : scratch;
            select_prefixes(problem, b, g, ranked, out, slot);
            if (problem->scope == FDMA_SCOPE_GLOBAL)
                keep_last_prefix(problem, out, slot);
        }
    return FDMA_OK;
}

/* NULL where there are no elements. */
static int32_t *ints_at(const fdma_tensor *tensor, int64_t b, int64_t g, int64_t t) {
    return tensor->data ? (int32_t *)tensor->data + offset_of(tensor, b, g, t) : NULL;
}

/* The keys of tile t: what its first position keeps by slots, then what arrives, in order. Numbers
 * of places, and no key but those of the sequence, whatever expiry and slot say. */
static void list_tile(const fdma_problem *problem, int64_t b, int64_t g, int64_t t) {
    const int32_t *const slot = ints_at(&problem->slot, b, g, 0);
    int32_t *const list = ints_at(&problem->list, b, g, t);
    int32_t *const count = ints_at(&problem->count, b, g, t);
    const tile_span span = span_of(problem, t);
    int32_t alive = 0;
    for (int64_t j = 0; j <= span.first; j++)
        alive += alive < problem->window && is_kept(problem, b, g, j, span.first);
    for (int32_t n = 0; n < alive; n++)
        list[n] = 0;
    for (int64_t j = 0; j <= span.first; j++)
        if (is_kept(problem, b, g, j, span.first) && slot[j] >= 0 && slot[j] < alive)
            list[slot[j]] = (int32_t)j;
    int32_t used = alive;
    for (int64_t j = span.first < 0 ? 0 : span.first + 1; j <= span.last; j++)
        if (is_kept(problem, b, g, j, j))
            list[used++] = (int32_t)j;
    count[0] = alive;
    count[1] = used;
}

static fdma_status run_lists(const fdma_problem *problem) {
    for (int64_t b = 0; b < problem->batch; b++)
        for (int64_t g = 0; g < problem->kv_heads; g++)
            for (int64_t t = 0; t < count_tiles(problem); t++)
                list_tile(problem, b, g, t);
    return FDMA_OK;
}

static double logit(const fdma_problem *problem, int64_t b, int64_t i, int64_t h, int64_t j) {
    const int64_t g = h / problem->group;
    double s = 0;
    for (int64_t d = 0; d < problem->head_dim; d++)
        s += fdma_load(&problem->q, offset_of(&problem->q, b, i, h) + d) *
             fdma_load(&problem->k, offset_of(&problem->k, b, j, g) + d);
    s *= problem->scale;
    if (problem->softcap > 0)
        s = problem->softcap * tanh(s / problem->softcap);
    if (is_present(&problem->bias))
        s += fdma_load(&problem->bias, offset_of(&problem->bias, b, g, j));
    return s;
}

/* Softmax over the kept keys of one row: weights[j] = exp(s[j] - max), 0 where not kept. Returns
 * their sum, 0 for an empty row, NaN where a kept logit is NaN or +inf. */
static double weigh_keys(const fdma_problem *problem, int64_t b, int64_t i, int64_t h,
                         double *weights, double *max) {
    const int64_t g = h / problem->group, p = query_position(problem, i);
    double sum = 0;
    *max = -(double)INFINITY;
    for (int64_t j = 0; j < problem->kv_len; j++) {
        const bool kept = is_kept(problem, b, g, j, p);
        weights[j] = kept ? logit(problem, b, i, h, j) : -(double)INFINITY;
        *max = isnan(weights[j]) || weights[j] > *max ? weights[j] : *max;
        if (isnan(*max))
            return *max;
    }
    for (int64_t j = 0; j < problem->kv_len; j++) {
        // -inf - -inf is NaN
        weights[j] = weights[j] == -(double)INFINITY ? 0 : exp(weights[j] - *max);
        sum += weights[j];
    }
    return sum;
}

/* What a row's sums are made of: doubles. */
typedef struct row_scratch {
    double *weights; /* [kv_len] */
    double *out;     /* [head_dim] */
} row_scratch;

static row_scratch take_row(const fdma_problem *problem, fdma_arena *arena) {
    return (row_scratch){
        .weights = fdma_arena_take(arena, (size_t)problem->kv_len * sizeof(double)),
        .out = fdma_arena_take(arena, (size_t)problem->head_dim * sizeof(double)),
    };
}

static void attend_row(const fdma_problem *problem, int64_t b, int64_t i, int64_t h,
                       const row_scratch *row) {
    const int64_t g = h / problem->group, p = query_position(problem, i);
    double max;
    const double sum = weigh_keys(problem, b, i, h, row->weights, &max);
    for (int64_t d = 0; d < problem->head_dim; d++)
        row->out[d] = isnan(sum) ? sum : 0;
    for (int64_t j = 0; j < problem->kv_len && sum > 0; j++) {
        if (!is_kept(problem, b, g, j, p))
            continue;
        const double share = row->weights[j] / sum;
        const int64_t v = offset_of(&problem->v, b, j, g);
        for (int64_t d = 0; d < problem->head_dim; d++)
            row->out[d] += share * fdma_load(&problem->v, v + d);
    }
    for (int64_t d = 0; d < problem->head_dim; d++)
        fdma_store(&problem->out, offset_of(&problem->out, b, i, h) + d, row->out[d]);
    if (is_present(&problem->lse))
        fdma_store(&problem->lse, offset_of(&problem->lse, b, h, i), max + log(sum));
}

static size_t forward_workspace(const fdma_problem *problem) {
    fdma_arena arena = {0};
    take_row(problem, &arena);
    return fdma_arena_size(&arena);
}

static fdma_status run_forward(const fdma_problem *problem) {
    fdma_arena arena = fdma_arena_of(problem);
    const row_scratch row = take_row(problem, &arena);
    for (int64_t b = 0; b < problem->batch; b++)
        for (int64_t h = 0; h < problem->q_heads; h++)
            for (int64_t i = 0; i < problem->q_len; i++)
                attend_row(problem, b, i, h, &row);
    return FDMA_OK;
}

static const char *nothing_missing(void) { return NULL; }

static const char *refuses_nothing(const fdma_problem *problem) {
    (void)problem;
    return NULL;
}

static size_t no_workspace(const fdma_problem *problem) {
    (void)problem;
    return 0;
}

static const fdma_kernel rows[] = {
    {"reference", operation_score, nothing_missing, refuses_nothing, no_workspace, run_score,
     false},
    {"reference", operation_select, nothing_missing, refuses_nothing, select_workspace, run_select,
     false},
    {"reference", operation_lists, nothing_missing, refuses_nothing, no_workspace, run_lists,
     false},
    {"reference", operation_forward, nothing_missing, refuses_nothing, forward_workspace,
     run_forward, false},
    {"reference", operation_backward, nothing_missing, refuses_nothing,
     fdma_reference_backward_workspace, fdma_reference_backward, false},
    {"reference", operation_score_backward, nothing_missing, refuses_nothing,
     fdma_reference_score_backward_workspace, fdma_reference_score_backward, false},
    {"reference", operation_merge, nothing_missing, refuses_nothing, no_workspace,
     fdma_reference_merge, false},
    {"reference", operation_merge_backward, nothing_missing, refuses_nothing, no_workspace,
     fdma_reference_merge_backward, false},
};

static const kernel_table table = {rows, sizeof rows / sizeof rows[0]};
const kernel_table *const fdma_reference_tables[] = {&table, NULL};
