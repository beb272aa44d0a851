/* test_errors.c - bad arguments: the status, what the message names, and that nothing is written.
 *
 * Each line of a table takes arguments that are right, makes one of them wrong and says what the
 * call must answer, from the call itself, its workspace query and its kernel query alike. */
#include "errors.h"

/* ---- score ---- */

static fdma_score_args right_score(void) {
    uint64_t state = 1;
    fdma_score_args args = {
        .size = sizeof args,
        .v = new_tensor(FDMA_FLOAT32, 2, 10, 2, 16),
        .dt_proj = new_tensor(FDMA_FLOAT32, 2, 32, -1, -1),
        .a = new_tensor(FDMA_FLOAT32, 2, -1, -1, -1),
        .score = new_output(FDMA_FLOAT32, 2, 2, 10, -1),
        .bias = new_output(FDMA_FLOAT32, 2, 2, 10, -1),
    };
    fill_random(args.v, &state, 1);
    exec_alloc(&args.exec, 1 << 20);
    return args;
}

static void score_size(fdma_score_args *x) { x->size = 0; }
static void score_v_absent(fdma_score_args *x) { x->v = (fdma_tensor){0}; }
static void score_v_null(fdma_score_args *x) { x->v.data = NULL; }
static void score_v_rank(fdma_score_args *x) { x->v.rank = 3; }
static void score_proj_shape(fdma_score_args *x) { x->dt_proj.shape[1] = 31; }
static void score_proj_heads(fdma_score_args *x) { x->dt_proj.shape[0] = 1; }
static void score_a_shape(fdma_score_args *x) { x->a.shape[0] = 3; }
static void score_a_null(fdma_score_args *x) { x->a.data = NULL; }
static void score_score_shape(fdma_score_args *x) { x->score.shape[2] = 9; }
static void score_score_dtype(fdma_score_args *x) { x->score.dtype = FDMA_FLOAT16; }
static void score_bias_unwanted(fdma_score_args *x) { x->bias_form = FDMA_BIAS_NONE; }
static void score_form(fdma_score_args *x) { x->bias_form = (fdma_bias_form)7; }
static void score_head_dim(fdma_score_args *x) {
    x->v.shape[3] = 12;
    x->dt_proj.shape[1] = 24;
}
static void score_proj_dtype(fdma_score_args *x) { x->dt_proj.dtype = FDMA_FLOAT16; }
static void score_v_dtype(fdma_score_args *x) { x->v.dtype = FDMA_INT32; }
static void score_valid_dtype(fdma_score_args *x) {
    x->key_valid = new_tensor(FDMA_INT32, 2, 10, -1, -1);
}
static void score_v_negative(fdma_score_args *x) { x->v.shape[1] = -10; }
static void score_a_odd(fdma_score_args *x) { x->a.data = (char *)x->a.data + 1; }
static void score_reserved(fdma_score_args *x) { x->exec.reserved[1] = 5; }
static void score_threads(fdma_score_args *x) { x->exec.threads = -1; }
static void score_overlap(fdma_score_args *x) { x->bias.data = x->score.data; }

static const struct {
    const char *name;
    void (*spoil)(fdma_score_args *);
    expectation want;
} score_cases[] = {
    {"size 0", score_size, {FDMA_INVALID_ARGUMENT, {"size"}, 0}},
    {"no v", score_v_absent, {FDMA_INVALID_ARGUMENT, {"v"}, 0}},
    {"v NULL", score_v_null, {FDMA_INVALID_ARGUMENT, {"v"}, 1}},
    {"v of rank 3", score_v_rank, {FDMA_INVALID_ARGUMENT, {"v", "3", "4"}, 0}},
    {"dt_proj too narrow", score_proj_shape, {FDMA_INVALID_ARGUMENT, {"dt_proj", "31", "32"}, 0}},
    {"dt_proj of one head", score_proj_heads, {FDMA_INVALID_ARGUMENT, {"dt_proj", "1", "2"}, 0}},
    {"a too long", score_a_shape, {FDMA_INVALID_ARGUMENT, {"a", "3", "2"}, 0}},
    {"a NULL", score_a_null, {FDMA_INVALID_ARGUMENT, {"a"}, 1}},
    {"score too short", score_score_shape, {FDMA_INVALID_ARGUMENT, {"score", "9", "10"}, 0}},
    {"score in float16", score_score_dtype, {FDMA_UNSUPPORTED, {"score"}, 0}},
    {"bias without form", score_bias_unwanted, {FDMA_INVALID_ARGUMENT, {"bias"}, 0}},
    {"bias_form 7", score_form, {FDMA_INVALID_ARGUMENT, {"bias_form", "7"}, 0}},
    {"head_dim 12", score_head_dim, {FDMA_UNSUPPORTED, {"head_dim", "12", "8"}, 0}},
    {"dt_proj in float16", score_proj_dtype, {FDMA_UNSUPPORTED, {"dt_proj"}, 0}},
    {"v in int32", score_v_dtype, {FDMA_UNSUPPORTED, {"v"}, 0}},
    {"key_valid in int32", score_valid_dtype, {FDMA_UNSUPPORTED, {"key_valid"}, 0}},
    {"negative length", score_v_negative, {FDMA_INVALID_ARGUMENT, {"v", "-10"}, 0}},
    {"a off its alignment", score_a_odd, {FDMA_INVALID_ARGUMENT, {"a"}, 1}},
    {"reserved", score_reserved, {FDMA_INVALID_ARGUMENT, {"reserved"}, 0}},
    {"-1 threads", score_threads, {FDMA_INVALID_ARGUMENT, {"threads", "-1"}, 0}},
    {"score is bias", score_overlap, {FDMA_INVALID_ARGUMENT, {"score", "bias"}, 1}},
};

static void score_rejects(void) {
    for (int i = 0; i < TEST_COUNT(score_cases); i++) {
        const expectation *want = &score_cases[i].want;
        test_context("score: %s", score_cases[i].name);
        fdma_score_args args = right_score();
        CHECK_OK(fdma_score(&args));
        const call_outputs to = {{args.score, args.bias}, 2};
        fill_outputs(&to);
        score_cases[i].spoil(&args);
        query_answers found = unanswered;
        check_status(fdma_score(&args), want);
        check_query(fdma_score_workspace(&args, &found.bytes), want);
        check_query(fdma_score_kernel(&args, &found.name), want);
        check_answers(&found, want);
        check_outputs(&to);
        test_free_all();
    }
}

/* ---- select ---- */

static fdma_select_args right_select(fdma_selection *selection) {
    *selection = (fdma_selection){.size = sizeof *selection,
                                  .expiry = new_output(FDMA_INT32, 2, 2, 10, -1),
                                  .slot = new_output(FDMA_INT32, 2, 2, 10, -1)};
    fdma_select_args args = {.size = sizeof args,
                             .score = new_tensor(FDMA_FLOAT32, 2, 2, 10, -1),
                             .selection = selection,
                             .window = 4};
    exec_alloc(&args.exec, 1 << 20);
    return args;
}

static void select_size(fdma_select_args *x) { x->size = 8; }
static void select_null(fdma_select_args *x) { x->selection = NULL; }
static void select_selection_size(fdma_select_args *x) { x->selection->size = 0; }
static void select_window(fdma_select_args *x) { x->window = -3; }
static void select_window_zero(fdma_select_args *x) { x->window = 0; }
static void select_selection_reserved(fdma_select_args *x) { x->selection->reserved = 5; }
static void select_scope(fdma_select_args *x) { x->scope = (fdma_scope)9; }
static void select_score_absent(fdma_select_args *x) { x->score = (fdma_tensor){0}; }
static void select_score_null(fdma_select_args *x) { x->score.data = NULL; }
static void select_score_dtype(fdma_select_args *x) { x->score.dtype = FDMA_BFLOAT16; }
static void select_score_stride(fdma_select_args *x) { x->score.stride[2] = 2; }
static void select_score_negative(fdma_select_args *x) { x->score.stride[0] = -20; }
static void select_expiry_absent(fdma_select_args *x) { x->selection->expiry.rank = 0; }
static void select_expiry_null(fdma_select_args *x) { x->selection->expiry.data = NULL; }
static void select_expiry_shape(fdma_select_args *x) { x->selection->expiry.shape[0] = 1; }
static void select_expiry_dtype(fdma_select_args *x) { x->selection->expiry.dtype = FDMA_FLOAT32; }
static void select_slot_shape(fdma_select_args *x) { x->selection->slot.shape[2] = 11; }
static void select_slot_null(fdma_select_args *x) { x->selection->slot.data = NULL; }
static void select_valid_shape(fdma_select_args *x) {
    x->key_valid = new_tensor(FDMA_UINT8, 2, 9, -1, -1);
}
static void select_too_long(fdma_select_args *x) {
    x->score.shape[2] = (int64_t)INT32_MAX + 1;
    x->selection->expiry.shape[2] = x->selection->slot.shape[2] = x->score.shape[2];
}
static void select_reserved(fdma_select_args *x) { x->reserved = 1; }
static void select_overlap(fdma_select_args *x) {
    x->selection->slot.data = x->selection->expiry.data;
}
static void select_in_place(fdma_select_args *x) { x->selection->expiry.data = x->score.data; }
static void select_repeated_output(fdma_select_args *x) { x->selection->expiry.stride[0] = 0; }
static void select_threads(fdma_select_args *x) { x->exec.threads = -2; }

static const struct {
    const char *name;
    void (*spoil)(fdma_select_args *);
    expectation want;
} select_cases[] = {
    {"size 8", select_size, {FDMA_INVALID_ARGUMENT, {"size", "8"}, 0}},
    {"no selection", select_null, {FDMA_INVALID_ARGUMENT, {"selection"}, 0}},
    {"selection of size 0", select_selection_size, {FDMA_INVALID_ARGUMENT, {"size"}, 0}},
    {"negative window", select_window, {FDMA_INVALID_ARGUMENT, {"window", "-3"}, 0}},
    {"window 0",
     select_window_zero,
     {FDMA_INVALID_ARGUMENT, {"window", "is 0", "FDMA_WINDOW_ALL"}, 0}},
    {"reserved of selection",
     select_selection_reserved,
     {FDMA_INVALID_ARGUMENT, {"selection.reserved", "5"}, 0}},
    {"scope 9", select_scope, {FDMA_INVALID_ARGUMENT, {"scope", "9"}, 0}},
    {"no score", select_score_absent, {FDMA_INVALID_ARGUMENT, {"score"}, 0}},
    {"score NULL", select_score_null, {FDMA_INVALID_ARGUMENT, {"score"}, 1}},
    {"score in bfloat16", select_score_dtype, {FDMA_UNSUPPORTED, {"score"}, 0}},
    {"last stride 2", select_score_stride, {FDMA_INVALID_ARGUMENT, {"score", "2", "1"}, 0}},
    {"negative stride", select_score_negative, {FDMA_INVALID_ARGUMENT, {"score", "-20"}, 0}},
    {"no expiry", select_expiry_absent, {FDMA_INVALID_ARGUMENT, {"expiry"}, 0}},
    {"expiry NULL", select_expiry_null, {FDMA_INVALID_ARGUMENT, {"expiry"}, 1}},
    {"expiry of one batch", select_expiry_shape, {FDMA_INVALID_ARGUMENT, {"expiry", "1", "2"}, 0}},
    {"expiry in float32", select_expiry_dtype, {FDMA_UNSUPPORTED, {"expiry"}, 0}},
    {"slot too long", select_slot_shape, {FDMA_INVALID_ARGUMENT, {"slot", "11", "10"}, 0}},
    {"slot NULL", select_slot_null, {FDMA_INVALID_ARGUMENT, {"slot"}, 1}},
    {"key_valid too short",
     select_valid_shape,
     {FDMA_INVALID_ARGUMENT, {"key_valid", "9", "10"}, 0}},
    {"2^31 keys", select_too_long, {FDMA_INVALID_ARGUMENT, {"2147483648", "2147483647"}, 0}},
    {"reserved", select_reserved, {FDMA_INVALID_ARGUMENT, {"reserved"}, 0}},
    {"slot is expiry", select_overlap, {FDMA_INVALID_ARGUMENT, {"slot", "expiry"}, 1}},
    {"expiry is score", select_in_place, {FDMA_INVALID_ARGUMENT, {"expiry", "score"}, 1}},
    {"expiry repeats", select_repeated_output, {FDMA_INVALID_ARGUMENT, {"expiry"}, 0}},
    {"-2 threads", select_threads, {FDMA_INVALID_ARGUMENT, {"threads", "-2"}, 0}},
};

static void select_rejects(void) {
    for (int i = 0; i < TEST_COUNT(select_cases); i++) {
        const expectation *want = &select_cases[i].want;
        test_context("select: %s", select_cases[i].name);
        fdma_selection selection;
        fdma_select_args args = right_select(&selection);
        CHECK_OK(fdma_select(&args));
        const call_outputs to = {{selection.expiry, selection.slot}, 2};
        fill_outputs(&to);
        select_cases[i].spoil(&args);
        const fdma_selection before = selection;
        query_answers found = unanswered;
        check_status(fdma_select(&args), want);
        check_query(fdma_select_workspace(&args, &found.bytes), want);
        check_query(fdma_select_kernel(&args, &found.name), want);
        check_answers(&found, want);
        check_outputs(&to);
        CHECK_BYTES(&selection, &before, sizeof before);
        test_free_all();
    }
}

/* ---- lists ---- */

/* 7 queries in tiles of 3, window 4. */
static fdma_lists_args right_lists(fdma_selection *selection) {
    fdma_select_args select = right_select(selection);
    CHECK_OK(fdma_select(&select));
    fdma_lists_args args = {.size = sizeof args,
                            .selection = selection,
                            .list = new_output(FDMA_INT32, 2, 2, 3, 6),
                            .count = new_output(FDMA_INT32, 2, 2, 3, 2),
                            .q_len = 7,
                            .tile_len = 3,
                            .causal = 1};
    exec_alloc(&args.exec, 1 << 20);
    return args;
}

static fdma_selection *lists_selection(fdma_lists_args *x) {
    return (fdma_selection *)(uintptr_t)x->selection;
}
static void lists_size(fdma_lists_args *x) { x->size = sizeof *x - 1; }
static void lists_null(fdma_lists_args *x) { x->selection = NULL; }
static void lists_selection_size(fdma_lists_args *x) { lists_selection(x)->size = 0; }
static void lists_selection_reserved(fdma_lists_args *x) { lists_selection(x)->reserved = 2; }
static void lists_no_slot(fdma_lists_args *x) { lists_selection(x)->slot = (fdma_tensor){0}; }
static void lists_slot_null(fdma_lists_args *x) { lists_selection(x)->slot.data = NULL; }
static void lists_slot_shape(fdma_lists_args *x) { lists_selection(x)->slot.shape[2] = 9; }
static void lists_no_expiry(fdma_lists_args *x) { lists_selection(x)->expiry.rank = 0; }
static void lists_expiry_null(fdma_lists_args *x) { lists_selection(x)->expiry.data = NULL; }
static void lists_expiry_dtype(fdma_lists_args *x) {
    lists_selection(x)->expiry.dtype = FDMA_FLOAT32;
}
static void lists_other_length(fdma_lists_args *x) { lists_selection(x)->kv_len = 11; }
static void lists_negative_window(fdma_lists_args *x) { lists_selection(x)->window = -5; }
static void lists_scope(fdma_lists_args *x) { lists_selection(x)->scope = (fdma_scope)4; }
static void lists_not_causal(fdma_lists_args *x) { x->causal = 0; }
static void lists_negative_queries(fdma_lists_args *x) { x->q_len = -7; }
static void lists_many_queries(fdma_lists_args *x) {
    x->q_len = 11;
    x->tile_len = 4; /* 3 tiles again, of 7 keys at most */
    x->list = new_output(FDMA_INT32, 2, 2, 3, 7);
}
static void lists_endless_queries(fdma_lists_args *x) {
    lists_selection(x)->scope = FDMA_SCOPE_GLOBAL;
    x->q_len = INT64_MAX;
    x->tile_len = 1;
    x->list.shape[2] = x->count.shape[2] = INT64_MAX;
}
static void lists_tile_0(fdma_lists_args *x) { x->tile_len = 0; }
static void lists_wider_window(fdma_lists_args *x) { lists_selection(x)->window = 5; }
static void lists_narrow(fdma_lists_args *x) { x->list.shape[3] = 5; }
static void lists_narrow_for_all(fdma_lists_args *x) {
    x->q_len = x->tile_len = INT64_MAX;
    lists_selection(x)->scope = FDMA_SCOPE_GLOBAL;
    lists_selection(x)->window = INT64_MAX;
    x->list.shape[2] = x->count.shape[2] = 1;
    x->list.shape[3] = 9;
}
static void lists_tiles(fdma_lists_args *x) { x->list.shape[2] = 2; }
static void lists_list_dtype(fdma_lists_args *x) { x->list.dtype = FDMA_FLOAT32; }
static void lists_list_rank(fdma_lists_args *x) { x->list.rank = 3; }
static void lists_list_null(fdma_lists_args *x) { x->list.data = NULL; }
static void lists_list_odd(fdma_lists_args *x) { x->list.data = (char *)x->list.data + 2; }
static void lists_list_repeats(fdma_lists_args *x) { x->list.stride[1] = 0; }
static void lists_count_shape(fdma_lists_args *x) { x->count.shape[3] = 1; }
static void lists_count_tiles(fdma_lists_args *x) { x->count.shape[2] = 4; }
static void lists_count_absent(fdma_lists_args *x) { x->count = (fdma_tensor){0}; }
static void lists_count_null(fdma_lists_args *x) { x->count.data = NULL; }
static void lists_reserved(fdma_lists_args *x) { x->reserved = 8; }
static void lists_threads(fdma_lists_args *x) { x->exec.threads = -4; }
static void lists_kernel(fdma_lists_args *x) { x->exec.kernel = "cpu/fast"; }
static void lists_on_slot(fdma_lists_args *x) { x->list.data = lists_selection(x)->slot.data; }
static void lists_on_count(fdma_lists_args *x) { x->count.data = x->list.data; }
static void lists_small_workspace(fdma_lists_args *x) { x->exec.workspace_size = 5; }

static const struct {
    const char *name;
    void (*spoil)(fdma_lists_args *);
    expectation want;
} lists_cases[] = {
    {"a byte short", lists_size, {FDMA_INVALID_ARGUMENT, {"fdma_lists_args", "size"}, 0}},
    {"no selection", lists_null, {FDMA_INVALID_ARGUMENT, {"selection", "NULL"}, 0}},
    {"selection of size 0", lists_selection_size, {FDMA_INVALID_ARGUMENT, {"size", "0"}, 0}},
    {"selection reserved", lists_selection_reserved, {FDMA_INVALID_ARGUMENT, {"reserved"}, 0}},
    {"no slot", lists_no_slot, {FDMA_INVALID_ARGUMENT, {"slot", "0", "3"}, 0}},
    {"slot NULL", lists_slot_null, {FDMA_INVALID_ARGUMENT, {"slot", "NULL"}, 1}},
    {"slot too short", lists_slot_shape, {FDMA_INVALID_ARGUMENT, {"slot", "9", "10"}, 0}},
    {"no expiry", lists_no_expiry, {FDMA_INVALID_ARGUMENT, {"expiry"}, 0}},
    {"expiry NULL", lists_expiry_null, {FDMA_INVALID_ARGUMENT, {"expiry", "NULL"}, 1}},
    {"expiry in float32", lists_expiry_dtype, {FDMA_UNSUPPORTED, {"expiry", "float32"}, 0}},
    {"made for 11 keys", lists_other_length, {FDMA_INVALID_ARGUMENT, {"kv_len", "11", "10"}, 0}},
    {"window -5", lists_negative_window, {FDMA_INVALID_ARGUMENT, {"window", "-5"}, 0}},
    {"scope 4", lists_scope, {FDMA_INVALID_ARGUMENT, {"scope", "4"}, 0}},
    {"not causal", lists_not_causal, {FDMA_INVALID_ARGUMENT, {"scope", "causal"}, 0}},
    {"-7 queries", lists_negative_queries, {FDMA_INVALID_ARGUMENT, {"q_len", "-7"}, 0}},
    {"11 queries", lists_many_queries, {FDMA_INVALID_ARGUMENT, {"q_len", "11", "10"}, 0}},
    {"2^63 tiles", lists_endless_queries, {FDMA_INVALID_ARGUMENT, {"list", "int64"}, 0}},
    {"tile_len 0", lists_tile_0, {FDMA_INVALID_ARGUMENT, {"tile_len", "0", "1"}, 0}},
    {"a larger window", lists_wider_window, {FDMA_INVALID_ARGUMENT, {"list", "6", "7"}, 0}},
    {"a narrow list", lists_narrow, {FDMA_INVALID_ARGUMENT, {"list", "5", "6"}, 0}},
    {"all keys", lists_narrow_for_all, {FDMA_INVALID_ARGUMENT, {"list", "9", "10"}, 0}},
    {"a tile too few", lists_tiles, {FDMA_INVALID_ARGUMENT, {"list", "2", "3"}, 0}},
    {"list in float32", lists_list_dtype, {FDMA_UNSUPPORTED, {"list", "float32"}, 0}},
    {"list of rank 3", lists_list_rank, {FDMA_INVALID_ARGUMENT, {"list", "3", "4"}, 0}},
    {"list NULL", lists_list_null, {FDMA_INVALID_ARGUMENT, {"list", "NULL"}, 1}},
    {"list not aligned", lists_list_odd, {FDMA_INVALID_ARGUMENT, {"list", "aligned"}, 1}},
    {"list repeats", lists_list_repeats, {FDMA_INVALID_ARGUMENT, {"list"}, 0}},
    {"one count", lists_count_shape, {FDMA_INVALID_ARGUMENT, {"count", "1", "2"}, 0}},
    {"counts of 4 tiles", lists_count_tiles, {FDMA_INVALID_ARGUMENT, {"count", "4", "3"}, 0}},
    {"no count", lists_count_absent, {FDMA_INVALID_ARGUMENT, {"count"}, 0}},
    {"count NULL", lists_count_null, {FDMA_INVALID_ARGUMENT, {"count", "NULL"}, 1}},
    {"reserved", lists_reserved, {FDMA_INVALID_ARGUMENT, {"reserved", "8"}, 0}},
    {"-4 threads", lists_threads, {FDMA_INVALID_ARGUMENT, {"threads", "-4"}, 0}},
    {"no such kernel", lists_kernel, {FDMA_UNSUPPORTED, {"kernel", "cpu/fast"}, 0}},
    {"list is slot", lists_on_slot, {FDMA_INVALID_ARGUMENT, {"list", "slot"}, 1}},
    {"count is list", lists_on_count, {FDMA_INVALID_ARGUMENT, {"list", "count"}, 1}},
    {"5 bytes", lists_small_workspace, {FDMA_WORKSPACE_TOO_SMALL, {"workspace_size", "5"}, 1}},
};

static void lists_rejects(void) {
    for (int i = 0; i < TEST_COUNT(lists_cases); i++) {
        const expectation *want = &lists_cases[i].want;
        test_context("lists: %s", lists_cases[i].name);
        fdma_selection selection;
        fdma_lists_args args = right_lists(&selection);
        CHECK_OK(fdma_lists(&args));
        const fdma_selection right = selection;
        const fdma_tensor inputs[] = {copy_tensor(right.expiry), copy_tensor(right.slot)};
        const call_outputs to = {{args.list, args.count}, 2};
        fill_outputs(&to);
        lists_cases[i].spoil(&args);
        query_answers found = unanswered;
        check_status(fdma_lists(&args), want);
        check_query(fdma_lists_workspace(&args, &found.bytes), want);
        check_query(fdma_lists_kernel(&args, &found.name), want);
        check_answers(&found, want);
        check_outputs(&to);
        CHECK(same_tensor(right.expiry, inputs[0]) && same_tensor(right.slot, inputs[1]));
        test_free_all();
    }
}

/* ---- structs of other sizes ---- */

typedef struct longer_args {
    fdma_select_args args;
    uint8_t later[16]; /* fields of a later version */
} longer_args;

/* A caller compiled with a later header is served while it leaves the new fields at zero. */
static void later_structs(void) {
    fdma_selection selection;
    longer_args longer = {.args = right_select(&selection)};
    longer.args.size = sizeof longer;
    CHECK_OK(fdma_select(&longer.args));
    longer.later[15] = 1;
    size_t bytes = 99;
    CHECK_INT(fdma_select(&longer.args), FDMA_UNSUPPORTED);
    CHECK_INT(fdma_select_workspace(&longer.args, &bytes), FDMA_UNSUPPORTED);
    CHECK_INT(bytes, 99);
    longer.args.size = sizeof longer.args - 1;
    CHECK_INT(fdma_select(&longer.args), FDMA_INVALID_ARGUMENT);
    CHECK_WORD(fdma_last_error(), "size");
}

static void null_arguments(void) {
    size_t bytes = 99;
    const char *name = NULL;
    CHECK_INT(fdma_score(NULL), FDMA_INVALID_ARGUMENT);
    CHECK_INT(fdma_select(NULL), FDMA_INVALID_ARGUMENT);
    CHECK_INT(fdma_lists(NULL), FDMA_INVALID_ARGUMENT);
    CHECK_INT(fdma_forward(NULL), FDMA_INVALID_ARGUMENT);
    CHECK_INT(fdma_attention(NULL), FDMA_INVALID_ARGUMENT);
    CHECK_INT(fdma_score_workspace(NULL, &bytes), FDMA_INVALID_ARGUMENT);
    CHECK_INT(fdma_select_workspace(NULL, &bytes), FDMA_INVALID_ARGUMENT);
    CHECK_INT(fdma_lists_workspace(NULL, &bytes), FDMA_INVALID_ARGUMENT);
    CHECK_INT(fdma_forward_workspace(NULL, &bytes), FDMA_INVALID_ARGUMENT);
    CHECK_INT(fdma_attention_workspace(NULL, &bytes), FDMA_INVALID_ARGUMENT);
    CHECK_INT(fdma_score_kernel(NULL, &name), FDMA_INVALID_ARGUMENT);
    CHECK_INT(fdma_select_kernel(NULL, &name), FDMA_INVALID_ARGUMENT);
    CHECK_INT(fdma_lists_kernel(NULL, &name), FDMA_INVALID_ARGUMENT);
    CHECK_INT(fdma_forward_kernel(NULL, &name), FDMA_INVALID_ARGUMENT);
    CHECK_INT(bytes, 99);
    const fdma_score_args args = right_score();
    CHECK_INT(fdma_score_workspace(&args, NULL), FDMA_INVALID_ARGUMENT);
    CHECK_INT(fdma_score_kernel(&args, NULL), FDMA_INVALID_ARGUMENT);
    CHECK(strlen(fdma_last_error()) > 0);
}

static const test_entry tests[] = {
    TEST(score_rejects), TEST(select_rejects), TEST(lists_rejects),
    TEST(later_structs), TEST(null_arguments),
};

int main(void) { return test_run(tests, TEST_COUNT(tests)); }
