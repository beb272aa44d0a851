/* Random arguments for every call that has tensors. Most calls are nearly right, so that they pass
 * the checks and kernels run. For any bytes this must hold: a call is refused if its workspace
 * query failed, its workspace is too small or its tensors lack data; a refusal has one line of text
 * and has written nothing; a success has written only to its outputs. */
#include "fuzz.h"

#include "arguments.h"
#include "caches.h"
#include "common/calls.h"

enum {
    max_workspace = 1 << 20, /* bytes */
    max_work = 1 << 21,      /* multiply-adds of a call that may run */
};

static int64_t make_window(call *to) {
    if (seldom(&to->in))
        return strange_number(&to->in);
    return 1 + take_up_to(&to->in, 23);
}

static void make_score(call *to) {
    const int64_t proj_shape[] = {to->kv_heads, wrap(to->kv_heads, to->head_dim)};
    fdma_score_args *const args = &to->args.score;
    *args = (fdma_score_args){.size = sizeof *args, .exec = make_exec(&to->in)};
    args->bias_form = (fdma_bias_form)take_up_to(&to->in, 3);
    args->v = make_keys(to);
    args->dt_proj = make(to, false, seldom(&to->in) ? FDMA_FLOAT32 : to->dtype, 2, proj_shape);
    args->a = make(to, false, seldom(&to->in) ? FDMA_FLOAT32 : to->dtype, 1, proj_shape);
    args->dt_bias = maybe_dt_bias(to);
    args->key_valid = maybe_valid(to);
    args->score = maybe_per_key(to, true);
    args->bias = maybe_per_key(to, true);
    args->kv_used = maybe_used(to);
    to->work = elements(&args->v) * (double)args->v.shape[2];
}

static void make_select(call *to) {
    fdma_select_args *const args = &to->args.select;
    *args = (fdma_select_args){.size = sizeof *args, .exec = make_exec(&to->in)};
    args->scope = (fdma_scope)take_up_to(&to->in, 3);
    args->window = make_window(to);
    args->reserved = make_reserved(&to->in);
    args->score = make_per_key(to, false, FDMA_FLOAT32);
    args->key_valid = maybe_valid(to);
    args->starts = maybe_starts(to);
    args->table_in = make_table(to, false);
    if (to->rows == 0 && take_up_to(&to->in, 3) == 0)
        to->rows = 1 + take_up_to(&to->in, 23); // the first call of a stream has no table_in
    args->table_out = make_table(to, true);
    to->rows = args->table_in.score.rank > 0 ? to->rows : 0;
    make_selection(to, true, 0, FDMA_SCOPE_CAUSAL);
    if (!seldom(&to->in))
        args->selection = &to->selection;
    args->recent = make_rule(to, 23);
    args->sinks = make_rule(to, 2);
    to->rows = args->table_out.score.rank > 0 ? args->table_out.score.shape[2] : 0;
    if (to->rows > 0)
        fit_rows(to, &args->window, &args->recent);
    args->kv_used = maybe_used(to), args->gap = make_gap(to);
    to->work = elements(&args->score) * (double)args->score.shape[2];
}

static void make_forward(call *to) {
    fdma_forward_args *const args = &to->args.forward;
    *args = (fdma_forward_args){.size = sizeof *args, .exec = make_exec(&to->in)};
    args->causal = make_causal(to);
    args->scale = make_number(&to->in), args->softcap = make_number(&to->in);
    args->dropout = make_dropout(to), args->rng_state = maybe_rng_state(to);
    args->reserved = make_reserved(&to->in);
    args->q = make_queries(to, false);
    args->k = make_keys(to);
    args->v = make_keys(to);
    args->bias = maybe_per_key(to, false);
    args->key_valid = maybe_valid_keys(to);
    args->starts = maybe_starts(to);
    args->k_carried = make_carried_rows(to, false);
    args->v_carried = make_carried_rows(to, false);
    if (args->bias.rank > 0)
        args->bias_carried = make_carried_numbers(to, false, FDMA_FLOAT32);
    args->out = make_queries(to, true);
    args->lse = maybe_lse(to);
    if (take_up_to(&to->in, 1)) {
        const int64_t window = make_window(to);
        make_selection(to, false, window, args->causal ? FDMA_SCOPE_CAUSAL : FDMA_SCOPE_GLOBAL);
        args->selection = &to->selection;
    }
    args->kv_used = maybe_used(to);
    give_pairs(to, &args->attn_mask, &args->attn_bias, NULL);
    args->mask_lists = maybe_mask_lists(to, &args->attn_mask);
    to->work = elements(&args->q) * (1 + (double)args->k.shape[1]);
}

static void make_attention(call *to) {
    const int64_t proj_shape[] = {to->kv_heads, wrap(to->kv_heads, to->head_dim)};
    fdma_attention_args *const args = &to->args.attention;
    *args = (fdma_attention_args){.size = sizeof *args, .exec = make_exec(&to->in)};
    args->causal = make_causal(to);
    args->scope = (fdma_scope)take_up_to(&to->in, 3);
    args->bias_form = (fdma_bias_form)take_up_to(&to->in, 3);
    args->scale = make_number(&to->in), args->softcap = make_number(&to->in);
    args->dropout = make_dropout(to), args->rng_state = maybe_rng_state(to);
    args->window = make_window(to);
    args->reserved = make_reserved(&to->in);
    args->q = make_queries(to, false);
    args->k = make_keys(to);
    args->v = make_keys(to);
    args->dt_proj = make(to, false, to->dtype, 2, proj_shape);
    args->a = make(to, false, to->dtype, 1, proj_shape);
    args->dt_bias = maybe_dt_bias(to);
    args->key_valid = maybe_valid(to);
    args->starts = maybe_starts(to);
    args->table_in = make_table(to, false);
    args->table_out = make_table(to, true);
    args->k_carried = make_carried_rows(to, false);
    args->v_carried = make_carried_rows(to, false);
    if (args->bias_form != FDMA_BIAS_NONE)
        args->bias_carried = make_carried_numbers(to, false, FDMA_FLOAT32);
    args->out = make_queries(to, true);
    args->lse = maybe_lse(to);
    args->score = maybe_per_key(to, true);
    args->bias = maybe_per_key(to, true);
    if (take_up_to(&to->in, 1)) {
        make_selection(to, true, 0, FDMA_SCOPE_CAUSAL);
        args->selection = &to->selection;
    }
    args->recent = make_rule(to, 23);
    args->sinks = make_rule(to, 2);
    fit_rows(to, &args->window, &args->recent);
    const double keys = (double)args->k.shape[1];
    to->work =
        elements(&args->q) * (1 + keys) + elements(&args->v) * (keys + (double)args->v.shape[2]);
    args->kv_used = maybe_used(to), args->gap = make_gap(to);
}

static void make_backward(call *to) {
    fdma_backward_args *const args = &to->args.backward;
    *args = (fdma_backward_args){.size = sizeof *args, .exec = make_exec(&to->in)};
    args->causal = make_causal(to);
    args->deterministic = (int32_t)take_up_to(&to->in, 1);
    args->accumulate = (int32_t)take_up_to(&to->in, 1);
    args->scale = make_number(&to->in), args->softcap = make_number(&to->in);
    args->dropout = make_dropout(to), args->rng_state = maybe_rng_state(to);
    args->reserved = make_reserved(&to->in);
    args->dout = make_queries(to, false);
    args->dlse = maybe_per_row(to, false);
    args->out = make_queries(to, false);
    args->lse = make_lse(to, false);
    args->q = make_queries(to, false);
    args->k = make_keys(to);
    args->v = make_keys(to);
    args->bias = maybe_per_key(to, false);
    args->key_valid = maybe_valid_keys(to);
    args->starts = maybe_starts(to);
    args->k_carried = make_carried_rows(to, false);
    args->v_carried = make_carried_rows(to, false);
    if (args->bias.rank > 0)
        args->bias_carried = make_carried_numbers(to, false, FDMA_FLOAT32);
    args->dq = make_queries(to, true);
    args->dk = make_key_rows(to, true);
    args->dv = make_key_rows(to, true);
    args->dbias = maybe_per_key(to, true);
    args->dk_carried = make_carried_rows(to, true);
    args->dv_carried = make_carried_rows(to, true);
    if (args->dbias.rank > 0)
        args->dbias_carried = make_carried_numbers(to, true, FDMA_FLOAT32);
    if (take_up_to(&to->in, 1)) {
        const int64_t window = make_window(to);
        make_selection(to, false, window, args->causal ? FDMA_SCOPE_CAUSAL : FDMA_SCOPE_GLOBAL);
        args->selection = &to->selection;
    }
    args->kv_used = maybe_used(to);
    give_pairs(to, &args->attn_mask, &args->attn_bias, &args->dattn_bias);
    args->mask_lists = maybe_mask_lists(to, &args->attn_mask);
    to->work = 4 * elements(&args->q) * (1 + (double)args->k.shape[1]);
}

static void make_score_backward(call *to) {
    const int64_t proj_shape[] = {to->kv_heads, wrap(to->kv_heads, to->head_dim)};
    fdma_score_backward_args *const args = &to->args.score_backward;
    *args = (fdma_score_backward_args){.size = sizeof *args, .exec = make_exec(&to->in)};
    args->bias_form = (fdma_bias_form)take_up_to(&to->in, seldom(&to->in) ? 3 : 1);
    args->accumulate = (int32_t)take_up_to(&to->in, 1);
    args->dbias = make_per_key(to, false, FDMA_FLOAT32);
    args->v = make_keys(to);
    args->dt_proj = make(to, false, to->dtype, 2, proj_shape);
    args->a = make(to, false, to->dtype, 1, proj_shape);
    args->dt_bias = maybe_dt_bias(to);
    args->key_valid = maybe_valid(to);
    if (take_up_to(&to->in, 1))
        args->dv = make_key_rows(to, true);
    args->ddt_proj = make(to, true, to->dtype, 2, proj_shape);
    args->da = make(to, true, to->dtype, 1, proj_shape);
    args->ddt_bias = maybe_ddt_bias(to, &args->dt_bias);
    args->kv_used = maybe_used(to);
    to->work = 3 * elements(&args->v) * (double)args->v.shape[2];
}

static void make_whole_tensors(call *to, fdma_attention_backward_args *args) {
    const int64_t proj_shape[] = {to->kv_heads, wrap(to->kv_heads, to->head_dim)};
    const bool learns = args->bias_form != FDMA_BIAS_NONE || seldom(&to->in);
    args->dout = make_queries(to, false);
    args->dlse = maybe_per_row(to, false);
    args->out = make_queries(to, false);
    args->lse = make_lse(to, false);
    args->q = make_queries(to, false);
    args->k = make_keys(to);
    args->v = make_keys(to);
    args->k_carried = make_carried_rows(to, false);
    args->v_carried = make_carried_rows(to, false);
    args->dk_carried = make_carried_rows(to, true);
    args->dv_carried = make_carried_rows(to, true);
    if (args->bias_form != FDMA_BIAS_NONE) {
        args->bias_carried = make_carried_numbers(to, false, FDMA_FLOAT32);
        args->dbias_carried = make_carried_numbers(to, true, FDMA_FLOAT32);
    }
    if (args->bias_form != FDMA_BIAS_NONE) { /* else they are not read */
        args->dt_proj = make(to, false, to->dtype, 2, proj_shape);
        args->a = make(to, false, to->dtype, 1, proj_shape);
        args->dt_bias = maybe_dt_bias(to);
    }
    args->key_valid = maybe_valid(to);
    args->starts = maybe_starts(to);
    args->dq = make_queries(to, true);
    args->dk = make_key_rows(to, true);
    args->dv = make_key_rows(to, true);
    if (learns) {
        args->bias = maybe_per_key(to, false);
        args->ddt_proj = make(to, true, to->dtype, 2, proj_shape);
        args->da = make(to, true, to->dtype, 1, proj_shape);
        args->ddt_bias = maybe_ddt_bias(to, &args->dt_bias);
    }
}

static void make_attention_backward(call *to) {
    fdma_attention_backward_args *const args = &to->args.attention_backward;
    *args = (fdma_attention_backward_args){.size = sizeof *args, .exec = make_exec(&to->in)};
    args->causal = make_causal(to);
    args->deterministic = (int32_t)take_up_to(&to->in, 1);
    args->accumulate = (int32_t)take_up_to(&to->in, 1);
    args->bias_form = (fdma_bias_form)take_up_to(&to->in, seldom(&to->in) ? 3 : 2);
    args->scale = make_number(&to->in), args->softcap = make_number(&to->in);
    args->dropout = make_dropout(to), args->rng_state = maybe_rng_state(to);
    make_whole_tensors(to, args);
    const int64_t window = make_window(to);
    make_selection(to, false, window, args->causal ? FDMA_SCOPE_CAUSAL : FDMA_SCOPE_GLOBAL);
    if (!seldom(&to->in))
        args->selection = &to->selection;
    args->kv_used = maybe_used(to);
    to->work = 4 * elements(&args->q) * (1 + (double)args->k.shape[1]) +
               4 * elements(&args->v) * (double)args->v.shape[2];
}

static void make_merge(call *to) {
    fdma_merge_args *const args = &to->args.merge;
    *args = (fdma_merge_args){.size = sizeof *args, .exec = make_exec(&to->in)};
    args->out_a = make_queries(to, false);
    args->lse_a = make_lse(to, false);
    args->out_b = make_queries(to, false);
    args->lse_b = make_lse(to, false);
    args->out = make_queries(to, true);
    args->lse = maybe_lse(to);
    to->work = elements(&args->out);
}

static void make_merge_backward(call *to) {
    fdma_merge_backward_args *const args = &to->args.merge_backward;
    *args = (fdma_merge_backward_args){.size = sizeof *args, .exec = make_exec(&to->in)};
    args->dout = make_queries(to, false);
    args->dlse = maybe_per_row(to, false);
    args->out_a = make_queries(to, false);
    args->lse_a = make_lse(to, false);
    args->out_b = make_queries(to, false);
    args->lse_b = make_lse(to, false);
    args->dout_a = make_queries(to, true);
    args->dlse_a = make_lse(to, true);
    args->dout_b = make_queries(to, true);
    args->dlse_b = make_lse(to, true);
    to->work = elements(&args->dout);
}

static void make_probabilities(call *to) {
    const int64_t keys = (int64_t)((uint64_t)to->rows + (uint64_t)to->kv_len);
    const int64_t shape[] = {to->batch, to->q_heads, to->q_len, keys};
    fdma_probabilities_args *const args = &to->args.probabilities;
    *args = (fdma_probabilities_args){.size = sizeof *args, .exec = make_exec(&to->in)};
    args->causal = make_causal(to);
    args->scale = make_number(&to->in), args->softcap = make_number(&to->in);
    args->dropout = make_dropout(to), args->rng_state = maybe_rng_state(to);
    args->reserved = make_reserved(&to->in);
    args->q = make_queries(to, false);
    args->k = make_keys(to);
    args->bias = maybe_per_key(to, false);
    args->key_valid = maybe_valid_keys(to);
    args->starts = maybe_starts(to);
    args->k_carried = make_carried_rows(to, false);
    if (args->bias.rank > 0)
        args->bias_carried = make_carried_numbers(to, false, FDMA_FLOAT32);
    args->lse = make_lse(to, false);
    args->probability = make(to, true, FDMA_FLOAT32, 4, shape);
    if (take_up_to(&to->in, 1)) {
        make_selection(to, false, make_window(to),
                       args->causal ? FDMA_SCOPE_CAUSAL : FDMA_SCOPE_GLOBAL);
        args->selection = &to->selection;
    }
    args->kv_used = maybe_used(to);
    give_pairs(to, &args->attn_mask, &args->attn_bias, NULL);
    to->work = elements(&args->q) * (1 + (double)args->k.shape[1]);
}

static void make_rotary_table(call *to) {
    fdma_rotary_table_args *const args = &to->args.rotary_table;
    *args = (fdma_rotary_table_args){.size = sizeof *args, .exec = make_exec(&to->in)};
    args->rotary = make_rotary(to, true, to->q_len);
    const int64_t pairs = args->rotary.shape[1] / 2;
    args->inv_freq =
        make_optional(to, false, seldom(&to->in) ? to->dtype : FDMA_FLOAT64, 1, &pairs);
    args->positions = make_optional(to, false, FDMA_INT32, 1, &args->rotary.shape[0]);
    args->base = seldom(&to->in) ? make_number(&to->in) : 10000;
    args->factor = seldom(&to->in) ? make_number(&to->in) : 0;
    if (args->positions.rank == 0 || seldom(&to->in))
        args->first = seldom(&to->in) ? strange_number(&to->in) : take(&to->in);
    to->work = 8 * elements(&args->rotary);
}

/* Options that the two rotations have. */
typedef struct rotation_options {
    int64_t rows, first, offset, nope_heads, k_nope_heads;
    double eps;
    bool has_k;
} rotation_options;

static rotation_options make_rotation(call *to) {
    rotation_options options = {.first = take_up_to(&to->in, 9)};
    options.rows = take_up_to(&to->in, 20);
    if (!seldom(&to->in)) // else the table may be too small
        options.rows = (int64_t)((uint64_t)options.rows + (uint64_t)to->q_len);
    options.offset = options.first;
    if (seldom(&to->in))
        options.first = strange_number(&to->in);
    if (seldom(&to->in))
        options.offset = strange_number(&to->in);
    options.nope_heads = seldom(&to->in) ? strange_number(&to->in) : take_up_to(&to->in, 1);
    options.k_nope_heads = seldom(&to->in) ? strange_number(&to->in) : 0;
    options.eps = seldom(&to->in) ? make_number(&to->in) : 0.125;
    options.has_k = take_up_to(&to->in, 1) != 0;
    return options;
}

/* Sets what fdma_rotate_args and fdma_rotate_backward_args have in common. */
#define SET_ROTATION(to, args, options)                                                            \
    do {                                                                                           \
        (args)->eps = (args)->weight.rank > 0 || seldom(&(to)->in) ? (options).eps : 0;            \
        (args)->first = (options).first;                                                           \
        (args)->offset = (args)->positions.rank == 0 || seldom(&(to)->in) ? (options).offset : 0;  \
        (args)->nope_heads = (options).nope_heads;                                                 \
        (args)->k_nope_heads = (options).k_nope_heads;                                             \
        (args)->interleaved = (int32_t)take_up_to(&(to)->in, 1);                                   \
        (args)->reserved = make_reserved(&(to)->in);                                               \
    } while (0)

static void make_rotate(call *to) {
    fdma_rotate_args *const args = &to->args.rotate;
    *args = (fdma_rotate_args){.size = sizeof *args, .exec = make_exec(&to->in)};
    const rotation_options options = make_rotation(to);
    args->x = make_queries(to, false);
    args->weight = maybe_norm_weight(to);
    args->rotary = make_rotary(to, false, options.rows);
    args->positions = maybe_positions(to, options.first, options.rows);
    args->starts = maybe_starts(to);
    args->out = make_queries(to, true);
    if (options.has_k || seldom(&to->in))
        args->k = make_rotated_keys(to, false);
    if (options.has_k || seldom(&to->in))
        args->k_out = make_rotated_keys(to, true);
    if ((options.has_k && args->weight.rank > 0) || seldom(&to->in))
        args->k_weight = maybe_norm_weight(to);
    SET_ROTATION(to, args, options);
    to->work = 8 * (elements(&args->x) + elements(&args->k));
}

static void make_rotate_backward(call *to) {
    fdma_rotate_backward_args *const args = &to->args.rotate_backward;
    *args = (fdma_rotate_backward_args){.size = sizeof *args, .exec = make_exec(&to->in)};
    const rotation_options options = make_rotation(to);
    args->dout = make_queries(to, false);
    args->weight = maybe_norm_weight(to);
    if (args->weight.rank > 0 || seldom(&to->in))
        args->x = make_queries(to, false);
    args->rotary = make_rotary(to, false, options.rows);
    args->positions = maybe_positions(to, options.first, options.rows);
    args->starts = maybe_starts(to);
    args->dx = make_queries(to, true);
    if (args->weight.rank > 0 || seldom(&to->in))
        args->dweight = make_optional(to, true, FDMA_FLOAT32, 1, &to->head_dim);
    if (options.has_k || seldom(&to->in))
        args->dk_out = make_rotated_keys(to, false);
    if (options.has_k || seldom(&to->in))
        args->dk = make_rotated_keys(to, true);
    if ((options.has_k && args->weight.rank > 0) || seldom(&to->in)) {
        args->k = make_rotated_keys(to, false);
        args->k_weight = maybe_norm_weight(to);
        args->dk_weight = make_optional(to, true, FDMA_FLOAT32, 1, &to->head_dim);
    }
    SET_ROTATION(to, args, options);
    to->work = 16 * (elements(&args->dout) + elements(&args->dk_out));
}

DEFINE_CALL(score)
DEFINE_CALL(select)
DEFINE_CALL(forward)
DEFINE_CALL(attention)
DEFINE_CALL(decode)
DEFINE_CALL(prefill)
DEFINE_CALL(cache_store)
DEFINE_CALL(cache_copy)
DEFINE_CALL(backward)
DEFINE_CALL(score_backward)
DEFINE_CALL(attention_backward)
DEFINE_CALL(merge)
DEFINE_CALL(merge_backward)
DEFINE_CALL(probabilities)
DEFINE_CALL(rotary_table)
DEFINE_CALL(rotate)
DEFINE_CALL(rotate_backward)

#define OPERATION(name) {CALL_OF(name), make_##name}

static const struct operation {
    library_call to;
    void (*make)(call *);
} operations[] = {
    OPERATION(score),
    OPERATION(select),
    OPERATION(forward),
    OPERATION(attention),
    OPERATION(backward),
    OPERATION(score_backward),
    OPERATION(attention_backward),
    OPERATION(merge),
    OPERATION(merge_backward),
    OPERATION(decode),
    OPERATION(prefill),
    OPERATION(cache_store),
    OPERATION(cache_copy),
    OPERATION(probabilities),
    OPERATION(rotary_table),
    OPERATION(rotate),
    OPERATION(rotate_backward),
};
enum { operation_count = sizeof operations / sizeof *operations };

/* FDMA_CUDA_ERROR: the library has device kernels, and this machine has no driver. */
static void check_refusal(fdma_status status) {
    MUST(status == FDMA_INVALID_ARGUMENT || status == FDMA_UNSUPPORTED ||
         status == FDMA_WORKSPACE_TOO_SMALL || status == FDMA_CUDA_ERROR);
    MUST(fdma_last_error()[0] != '\0' && strchr(fdma_last_error(), '\n') == NULL);
}

/* Runs the call with a workspace of `bytes`, which is `asked` or less. */
static void run(call *c, const struct operation *operation, void *args, size_t asked,
                size_t bytes) {
    fdma_exec *const exec = exec_of(&operation->to, args);
    const size_t shift = bytes % 64; /* any alignment will do */
    uint8_t *const workspace = malloc(shift + bytes);
    MUST(workspace != NULL || bytes == 0);
    exec->workspace = workspace + shift;
    exec->workspace_size = bytes;
    for (size_t i = 0; i < c->count; i++) {
        block *const b = &c->blocks[i];
        MUST((b->before = malloc(b->size)) != NULL);
        memcpy(b->before, b->bytes, b->size);
    }
    const fdma_selection selection = c->selection;
    char message[512];
    snprintf(message, sizeof message, "%s", fdma_last_error());
    const fdma_status status = operation->to.run(args);
    if (status != FDMA_OK)
        check_refusal(status);
    MUST(status != FDMA_OK || strncmp(message, fdma_last_error(), sizeof message - 1) == 0);
    /* The query does not read the numbers in starts and kv_used, so the call may need less. */
    const bool enough = bytes >= asked || c->packed || c->cut;
    MUST(status != FDMA_OK || (enough && !c->unbacked));
    MUST(status != FDMA_WORKSPACE_TOO_SMALL || bytes < asked);
    for (size_t i = 0; i < c->count; i++) {
        const block *const b = &c->blocks[i];
        const bool writable = status == FDMA_OK && (b->output || c->shared);
        MUST(writable || memcmp(b->before, b->bytes, b->size) == 0);
        free(b->before);
    }
    MUST(status == FDMA_OK || memcmp(&selection, &c->selection, sizeof selection) == 0);
    free(workspace);
}

static void try_call(call *c, const struct operation *operation) {
    source *const in = &c->in;
    operation->make(c);
    /* The struct states its own size and lies in a block of that size, with zeros after the known
     * fields. */
    const bool honest = !seldom(in);
    const size_t size = honest ? operation->to.size : (size_t)strange_number(in);
    const size_t bytes = size < sizeof(size_t) ? sizeof(size_t) : size;
    uint8_t *const args = calloc(1, bytes < max_struct ? bytes : max_struct);
    MUST(args != NULL);
    c->args.size = size;
    memcpy(args, &c->args, bytes < operation->to.size ? bytes : operation->to.size);
    if (size < operation->to.size) /* the struct may end before the tensors without memory */
        c->unbacked = false;

    size_t asked = SIZE_MAX;
    const fdma_status status = operation->to.workspace(args, &asked);
    if (status != FDMA_OK) {
        check_refusal(status);
        MUST(asked == SIZE_MAX);
        if (size >= operation->to.size)
            run(c, operation, args, asked, 0);
    } else if (asked > max_workspace) {
        run(c, operation, args, asked, 0);
    } else if (c->unbacked || c->work < max_work) {
        const size_t less = asked > 0 && seldom(in) ? 1 + take(in) % asked : 0;
        run(c, operation, args, asked, asked - less);
    }
    free(args);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count) {
    static const fdma_dtype dtypes[] = {FDMA_FLOAT32, FDMA_FLOAT16, FDMA_BFLOAT16, FDMA_FLOAT64};
    call c = {.in = {bytes, count}};
    const struct operation *const operation = &operations[take(&c.in) % operation_count];
    c.dtype = dtypes[take(&c.in) % 4];
    c.batch = (1 + take(&c.in)) % 3;
    c.kv_heads = 1 + take_up_to(&c.in, 2);
    c.q_heads = c.kv_heads * (1 + take_up_to(&c.in, 3));
    c.head_dim = 8 * (1 + take_up_to(&c.in, 3));
    c.kv_len = take_up_to(&c.in, seldom(&c.in) ? 140 : 20);
    c.q_len = seldom(&c.in) ? take_up_to(&c.in, 70) : take_up_to(&c.in, c.kv_len);
    c.packed = take_up_to(&c.in, 3) == 0;
    if (c.packed) {
        c.batch = 1;
        c.q_len = c.kv_len;
    }
    c.rows = !c.packed && take_up_to(&c.in, 3) == 0 ? 1 + take_up_to(&c.in, 23) : 0;
    int64_t *const sizes[] = {&c.batch, &c.q_len, &c.kv_len, &c.q_heads, &c.kv_heads, &c.head_dim};
    if (seldom(&c.in))
        for (int bent = 0; bent < 2; bent++)
            *sizes[take(&c.in) % 6] = strange_number(&c.in);
    try_call(&c, operation);
    for (size_t i = 0; i < c.count; i++)
        free(c.blocks[i].bytes);
    return 0;
}
