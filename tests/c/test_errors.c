/* test_errors.c - bad arguments of every operation: sizes, options, selections, exec, workspace,
 * the structs themselves, and the numbers of kv_used and starts. test_errors_tensors.c makes single
 * bad tensors. */
#include "problem.h"
#include "right_call.h"

/* ---- sizes that all tensors agree on ---- */

/* Sets this axis in every tensor that has it. Returns false if there is none. */
static bool set_size(call *x, char letter, int64_t size) {
    // no call has carried keys; an index has the axis e
    const char broadcast = strchr("bhij", letter) != NULL ? (char)(letter - 'a' + 'A') : letter;
    const char other = letter == 'j' ? 'n' : letter == 'b' ? 'e' : letter;
    const char letters[] = {letter, other, broadcast, 0};
    const tensor_table table = fdma_tensors[x->operation];
    bool found = false;
    if (x->operation == operation_cache_copy && letter == 'b')
        return false; // at most the sequences of the cache: test_cache.c
    for (size_t t = 0; t < table.count; t++) {
        const char *const axis = strpbrk(table.entries[t].dims, letters);
        if (axis != NULL) {
            call_tensor(x, &table.entries[t])->shape[axis - table.entries[t].dims] = size;
            found = true;
        }
    }
    return found;
}

static void sizes_are_checked(void) {
    static const struct {
        char letter;
        bool selecting; /* only where queries attend to keys */
        int64_t size;
        expectation want;
    } cases[] = {
        {'d', false, 0, {FDMA_UNSUPPORTED, {"head_dim", "0", "256"}, 0}},
        {'d', false, 12, {FDMA_UNSUPPORTED, {"head_dim", "12", "256"}, 0}},
        {'d', false, 20, {FDMA_UNSUPPORTED, {"head_dim", "20", "256"}, 0}},
        {'d', false, 264, {FDMA_UNSUPPORTED, {"head_dim", "264", "256"}, 0}},
        {'h', true, 0, {FDMA_INVALID_ARGUMENT, {"q_heads", "0", "2"}, 0}},
        {'h', true, 3, {FDMA_INVALID_ARGUMENT, {"q_heads", "3", "2"}, 0}},
        {'h', true, 5, {FDMA_INVALID_ARGUMENT, {"q_heads", "5", "2"}, 0}},
        {'g', false, 0, {FDMA_INVALID_ARGUMENT, {"kv_heads", "0", "1"}, 0}},
        {'g', false, INT64_C(1) << 31, {FDMA_INVALID_ARGUMENT, {"kv_heads", "2147483648"}, 0}},
        {'i', true, 11, {FDMA_INVALID_ARGUMENT, {"q_len", "11", "10"}, 0}},
        {'j', false, INT64_C(1) << 31, {FDMA_INVALID_ARGUMENT, {"2147483648", "2147483647"}, 0}},
        {'b', false, INT64_C(1) << 46, {FDMA_INVALID_ARGUMENT, {"int64"}, 0}},
        {'b', false, INT64_C(1) << 62, {FDMA_INVALID_ARGUMENT, {"int64"}, 0}},
    };
    for (int i = 0; i < operation_count * TEST_COUNT(cases); i++) {
        const int c = i % TEST_COUNT(cases), operation = i / TEST_COUNT(cases);
        call *const x = right_call((fdma_operation)operation, true);
        if (operation == operation_decode) // without it a batch is at most as large as the cache
            x->args.decode.index = fdma_tensor_1d(right.memory, FDMA_INT32, right.sizes.batch);
        if (operation == operation_cache_store)
            x->args.cache_store.index = fdma_tensor_1d(right.memory, FDMA_INT32, right.sizes.batch);
        test_context("%s: %c = %lld", operations[operation].name, cases[c].letter,
                     (long long)cases[c].size);
        if (set_size(x, cases[c].letter, cases[c].size) &&
            (!cases[c].selecting || operations[operation].selection != 0)) {
            check_rejected(x, &cases[c].want);
        }
    }
}

/* ---- single fields ---- */

/* A line for each case: a change of an operation's arguments, the status, and words of the
 * message. */
#define REJECTS(name, statement, ...)                                                              \
    do {                                                                                           \
        call *const x = right_call(operation_##name, true);                                        \
        fdma_##name##_args *const args = &x->args.name;                                            \
        test_context("%s: %s", #name, #statement);                                                 \
        (void)args;                                                                                \
        statement;                                                                                 \
        check_rejected(x, &(const expectation){__VA_ARGS__});                                      \
    } while (0)
#define INVALID(...) FDMA_INVALID_ARGUMENT, {__VA_ARGS__}, 0

static void options_of_attention_are_checked(void) {
#define ATTENDING_REJECTS(statement, ...)                                                          \
    REJECTS(forward, statement, __VA_ARGS__);                                                      \
    REJECTS(backward, statement, __VA_ARGS__);                                                     \
    REJECTS(probabilities, statement, __VA_ARGS__);                                                \
    REJECTS(attention, statement, __VA_ARGS__);                                                    \
    REJECTS(attention_backward, statement, __VA_ARGS__)
    ATTENDING_REJECTS(args->scale = -0.5, INVALID("scale", "-0.5"));
    ATTENDING_REJECTS(args->scale = 1e39, INVALID("scale", "1e+39"));
    ATTENDING_REJECTS(args->scale = (double)NAN, INVALID("scale", "nan"));
    ATTENDING_REJECTS(args->scale = (double)INFINITY, INVALID("scale", "inf"));
    ATTENDING_REJECTS(args->softcap = -2, INVALID("softcap", "-2"));
    ATTENDING_REJECTS(args->softcap = (double)NAN, INVALID("softcap", "nan"));
    ATTENDING_REJECTS(args->softcap = (double)INFINITY, INVALID("softcap", "inf"));
    ATTENDING_REJECTS(args->dropout = -0.25, INVALID("dropout", "-0.25", "0 or more"));
    ATTENDING_REJECTS(args->dropout = 1, INVALID("dropout", "is 1", "less than"));
    ATTENDING_REJECTS(args->dropout = 1 - 0x1p-17, INVALID("dropout", "less than"));
    ATTENDING_REJECTS(args->dropout = (double)NAN, INVALID("dropout", "nan"));
    REJECTS(forward, args->reserved = 1, INVALID("reserved", "1"));
    REJECTS(backward, args->reserved = 1, INVALID("reserved", "1"));
    REJECTS(probabilities, args->reserved = 1, INVALID("reserved", "1"));
    REJECTS(attention, args->reserved = 2, INVALID("reserved", "2"));
    REJECTS(backward, args->attn_bias = (fdma_tensor){0}, INVALID("dattn_bias", "attn_bias"));
    REJECTS(backward, (args->attn_bias.shape[2] = 1), INVALID("dattn_bias", "7", "want 1"));
    REJECTS(backward, args->dattn_bias.dtype = FDMA_FLOAT16, FDMA_UNSUPPORTED,
            {"dattn_bias", "is float16", "float32"}, 0);
    REJECTS(backward, (args->dattn_bias.shape[1] = 2), INVALID("dattn_bias", "has 2", "want 4"));
    REJECTS(forward, (args->attn_mask.shape[1] = 3), INVALID("attn_mask", "has 3", "4, 2 or 1"));
    REJECTS(forward, (args->attn_bias.shape[3] = 0), INVALID("attn_bias", "has 0", "10 or 1"));
    REJECTS(forward, args->causal = 0, INVALID("selection", "scope", "causal"));
    REJECTS(backward, args->causal = 0, INVALID("selection", "scope", "causal"));
    REJECTS(probabilities, args->causal = 0, INVALID("selection", "scope", "causal"));
    REJECTS(attention_backward, args->causal = 0, INVALID("selection", "scope", "causal"));
    REJECTS(attention_backward, args->selection = NULL, INVALID("selection", "NULL"));
    REJECTS(attention, (args->scope = FDMA_SCOPE_CAUSAL, args->causal = 0),
            INVALID("scope", "FDMA_SCOPE_CAUSAL", "causal"));
    REJECTS(attention, args->scope = (fdma_scope)3, INVALID("scope", "3"));
    REJECTS(attention, args->window = -8, INVALID("window", "-8"));
    REJECTS(attention, args->window = 0, INVALID("window", "is 0", "FDMA_WINDOW_ALL"));
    REJECTS(attention, args->recent = -9, INVALID("recent", "-9", "0 or more"));
    REJECTS(attention, (args->recent = 4, args->causal = 0, args->scope = FDMA_SCOPE_DEFAULT),
            INVALID("recent", "is 4", "global"));
    REJECTS(attention, args->sinks = args->window + 1, INVALID("sinks", "0 to window"));
    REJECTS(attention, args->gap = -1, INVALID("gap", "is -1", "0 or more"));
    REJECTS(attention, args->gap = NAN, INVALID("gap", "nan", "finite"));
    REJECTS(attention, (args->gap = 2, args->scope = FDMA_SCOPE_GLOBAL),
            INVALID("gap", "is 2", "global"));
}

static void options_of_tables_are_checked(void) {
    static const fdma_tensor absent = {0};
    REJECTS(rotary_table, (args->base = 0, args->inv_freq = absent), INVALID("base", "is 0"));
    REJECTS(rotary_table, (args->base = 0.5, args->inv_freq = absent), INVALID("base", "is 0.5"));
    REJECTS(rotary_table, (args->base = NAN, args->inv_freq = absent), INVALID("base", "nan"));
    REJECTS(rotary_table, (args->base = (double)INFINITY, args->inv_freq = absent),
            INVALID("base", "inf", "finite"));
    REJECTS(rotary_table, args->factor = -1, INVALID("factor", "is -1", "0 or more"));
    REJECTS(rotary_table, args->factor = NAN, INVALID("factor", "nan"));
    REJECTS(rotary_table, args->first = -1, INVALID("first", "is -1", "0 to 2147483641"));
    REJECTS(rotary_table, (args->first = 3, args->positions = fdma_tensor_1d(NULL, FDMA_INT32, 7)),
            INVALID("first", "is 3", "0 with positions"));
    REJECTS(rotary_table, args->first = INT32_MAX, INVALID("first", "0 to 2147483641"));
#define OF_BASE(statement) (args->base = 1e6, args->inv_freq = absent, statement)
    REJECTS(rotary_table, OF_BASE(args->rotary.shape[1] = 258), INVALID("rotary", "258", "256"));
    REJECTS(rotary_table, OF_BASE(args->rotary.shape[1] = 17), INVALID("rotary", "17", "even"));
    REJECTS(rotary_table, OF_BASE(args->rotary.shape[1] = 0), INVALID("rotary", "has 0", "even"));
    REJECTS(rotary_table, (args->inv_freq.shape[0] = 9), INVALID("inv_freq", "has 9", "want 8"));
}

static void options_of_rotations_are_checked(void) {
    static const fdma_tensor absent = {0};
    options_of_tables_are_checked();
#define ROTATING_REJECTS(statement, ...)                                                           \
    REJECTS(rotate, statement, __VA_ARGS__);                                                       \
    REJECTS(rotate_backward, statement, __VA_ARGS__)
#define WITHOUT_POSITIONS(statement) (args->positions = absent, statement)
    ROTATING_REJECTS(args->eps = -1, INVALID("eps", "is -1", "0 or more"));
    ROTATING_REJECTS(args->eps = NAN, INVALID("eps", "nan", "finite"));
    ROTATING_REJECTS(args->nope_heads = -1, INVALID("nope_heads", "is -1", "0 to heads, 4"));
    ROTATING_REJECTS(args->nope_heads = 5, INVALID("nope_heads", "is 5", "0 to heads, 4"));
    ROTATING_REJECTS(args->reserved = 3, INVALID("reserved", "is 3"));
    ROTATING_REJECTS(args->first = -2, INVALID("first", "is -2", "0 to 2147483641"));
    ROTATING_REJECTS(args->first = INT64_MAX, INVALID("first", "0 to 2147483641"));
    ROTATING_REJECTS(args->offset = 1, INVALID("offset", "is 1", "want 0 with positions"));
    ROTATING_REJECTS(WITHOUT_POSITIONS(args->offset = -1), INVALID("offset", "-1", "0 to"));
    ROTATING_REJECTS(WITHOUT_POSITIONS(args->offset = INT64_MAX), INVALID("offset", "0 to"));
    ROTATING_REJECTS(WITHOUT_POSITIONS(args->first = 3), INVALID("offset", "is 0", "first, 3"));
    ROTATING_REJECTS(WITHOUT_POSITIONS(args->offset = 2),
                     INVALID("rotary", "has 7", "want 9 or more: the last position is 8"));
    ROTATING_REJECTS((args->rotary.shape[1] = 18), INVALID("rotary", "18", "head_dim, 16"));
    ROTATING_REJECTS((args->rotary.shape[1] = 3), INVALID("rotary", "3", "even"));
    ROTATING_REJECTS((args->rotary.shape[1] = 0), INVALID("rotary", "has 0", "even"));
    ROTATING_REJECTS((args->weight.shape[0] = 8), INVALID("weight", "has 8", "want 16"));
    ROTATING_REJECTS(args->starts = fdma_tensor_1d(NULL, FDMA_INT32, 2),
                     INVALID("starts", "none with positions"));
    ROTATING_REJECTS(WITHOUT_POSITIONS(args->starts = fdma_tensor_1d(NULL, FDMA_INT32, 2)),
                     INVALID("batch", "is 2", "want 1 with starts"));
    REJECTS(rotate, (args->weight = absent, args->eps = 1), INVALID("eps", "0 without weight"));
    REJECTS(rotate_backward, args->x = absent, INVALID("x", "absent", "weight"));
    REJECTS(rotate_backward, args->weight = absent, INVALID("dweight", "none without weight"));
    ROTATING_REJECTS(args->k_nope_heads = -1, INVALID("k_nope_heads", "is -1", "kv_heads, 2"));
    ROTATING_REJECTS(args->k_nope_heads = 3, INVALID("k_nope_heads", "is 3", "kv_heads, 2"));
    ROTATING_REJECTS((args->k_weight.shape[0] = 8), INVALID("k_weight", "has 8", "want 16"));
    REJECTS(rotate, args->k = absent, INVALID("k_out", "none without k"));
    REJECTS(rotate, args->k_out = absent, INVALID("k_out", "absent", "with k"));
    REJECTS(rotate, args->k_weight = absent, INVALID("k_weight", "absent", "with weight"));
    REJECTS(rotate, args->weight = absent, INVALID("k_weight", "none without weight"));
    REJECTS(rotate, args->k = args->k_out = absent, INVALID("k_weight", "none without k"));
    REJECTS(rotate_backward, args->dk_out = absent, INVALID("dk", "none without dk_out"));
    REJECTS(rotate_backward, args->dk = absent, INVALID("dk", "absent", "with dk_out"));
    REJECTS(rotate_backward, args->dk = args->dk_out = absent,
            INVALID("k_weight", "none without dk_out"));
    REJECTS(rotate_backward, args->k = absent, INVALID("k", "absent", "with k_weight"));
    REJECTS(rotate_backward, args->k_weight = absent, INVALID("k_weight", "absent", "weight"));
    REJECTS(rotate, args->positions.data = right.memory, FDMA_INVALID_ARGUMENT,
            {"positions", "[0, 0]", "0 to 6"}, 1);
    REJECTS(rotate, (args->out.data = (char *)args->x.data + 64), FDMA_INVALID_ARGUMENT,
            {"out", "x"}, 1);
}

static void options_of_scores_are_checked(void) {
    static const fdma_tensor absent = {0};
    REJECTS(score, args->bias_form = (fdma_bias_form)7, INVALID("bias_form", "7"));
    REJECTS(score_backward, args->bias_form = (fdma_bias_form)9, INVALID("bias_form", "9"));
    REJECTS(attention, args->bias_form = (fdma_bias_form)5, INVALID("bias_form", "5"));
    REJECTS(attention_backward, args->bias_form = (fdma_bias_form)5,
            INVALID("bias_form", "5", "fdma_bias_form"));
    REJECTS(score, args->bias_form = FDMA_BIAS_NONE, INVALID("bias", "FDMA_BIAS_NONE"));
    REJECTS(score_backward, args->bias_form = FDMA_BIAS_NONE, INVALID("bias_form"));
    REJECTS(attention, args->bias_form = FDMA_BIAS_NONE, INVALID("bias", "FDMA_BIAS_NONE"));
    REJECTS(attention_backward, (args->bias_form = FDMA_BIAS_NONE, args->bias = absent),
            INVALID("ddt_proj", "FDMA_BIAS_NONE"));
    REJECTS(attention_backward,
            (args->bias_form = FDMA_BIAS_NONE, args->ddt_proj = args->da = absent),
            INVALID("bias", "FDMA_BIAS_NONE"));
    REJECTS(attention_backward,
            (args->bias_form = FDMA_BIAS_NONE, args->bias = args->ddt_proj = args->da = absent),
            INVALID("ddt_bias", "FDMA_BIAS_NONE"));
    REJECTS(score_backward, args->dt_bias = absent, INVALID("ddt_bias", "without dt_bias"));
    REJECTS(attention_backward, args->dt_bias = absent, INVALID("ddt_bias", "without dt_bias"));
    const fdma_tensor weight = fdma_tensor_1d(right.memory, FDMA_FLOAT32, right.sizes.kv_heads);
    fdma_tensor matrix = weight;
    matrix.rank = 2, matrix.shape[1] = matrix.stride[0] = 32, matrix.stride[1] = 1;
    REJECTS(decode, args->dt_bias = weight, INVALID("dt_bias: is given", "with score"));
    REJECTS(decode, args->a = weight, INVALID("a: is given", "with score"));
    REJECTS(decode, args->dt_proj = matrix, INVALID("dt_proj: is given", "with score"));
    REJECTS(prefill, args->dt_bias = weight, INVALID("dt_bias: is given", "with score"));
    REJECTS(prefill, args->dt_proj = matrix, INVALID("dt_proj: is given", "with score"));
    REJECTS(prefill, args->bias_form = (fdma_bias_form)6, INVALID("bias_form", "6"));
    REJECTS(prefill, args->reserved = 6, INVALID("reserved", "6"));
    REJECTS(prefill, args->scale = -0.5, INVALID("scale", "-0.5"));
    REJECTS(prefill, args->softcap = (double)NAN, INVALID("softcap", "nan"));
    REJECTS(prefill, args->requests = -1, INVALID("requests", "-1", "0 to 2147483647"));
    REJECTS(prefill, args->requests = 4, FDMA_INVALID_ARGUMENT,
            {"requests", "is 4", "without index"},
            1); // a query may have no index yet
    REJECTS(prefill, args->score = args->dt_proj = absent, INVALID("dt_proj", "absent", "score"));
    REJECTS(cache_store, args->bias_form = (fdma_bias_form)7, INVALID("bias_form", "7"));
    REJECTS(cache_store, args->reserved = 3, INVALID("reserved", "3"));
    REJECTS(cache_copy, args->reserved = 4, INVALID("reserved", "4"));
    REJECTS(score, args->reserved = 5, INVALID("reserved", "5"));
    REJECTS(select, args->reserved = 1, INVALID("reserved", "1"));
    REJECTS(select, args->selection = NULL, INVALID("selection", "NULL"));
    REJECTS(select, args->window = -3, INVALID("window", "-3"));
    REJECTS(select, args->window = 0, INVALID("window", "is 0", "FDMA_WINDOW_ALL"));
    REJECTS(select, args->recent = -2, INVALID("recent", "-2", "0 or more"));
    REJECTS(select, (args->recent = 4, args->scope = FDMA_SCOPE_GLOBAL),
            INVALID("recent", "is 4", "global"));
    REJECTS(select, args->sinks = -1, INVALID("sinks", "-1"));
    REJECTS(select, args->sinks = args->window + 1, INVALID("sinks", "0 to window"));
    REJECTS(select, args->gap = -0.5, INVALID("gap", "-0.5", "0 or more"));
    REJECTS(select, args->gap = NAN, INVALID("gap", "nan", "finite"));
    REJECTS(select, args->gap = INFINITY, INVALID("gap", "inf", "finite"));
    REJECTS(select, (args->gap = 2, args->scope = FDMA_SCOPE_GLOBAL),
            INVALID("gap", "is 2", "global"));
    REJECTS(select, (args->gap = 2, x->selection.size = offsetof(fdma_selection, gap)),
            INVALID("selection", "size", "gap of 2"));
    REJECTS(select, args->scope = (fdma_scope)3, INVALID("scope", "3"));
    REJECTS(select, args->scope = (fdma_scope)9, INVALID("scope", "9"));
}

static void selections_are_checked(void) {
#define SELECTION_REJECTS(statement, ...)                                                          \
    REJECTS(forward, statement, __VA_ARGS__);                                                      \
    REJECTS(backward, statement, __VA_ARGS__);                                                     \
    REJECTS(attention_backward, statement, __VA_ARGS__)
    SELECTION_REJECTS(x->selection.kv_len = 11, INVALID("selection", "11", "10"));
    SELECTION_REJECTS(x->selection.kv_len = 9, INVALID("selection", "9", "10"));
    SELECTION_REJECTS(x->selection.window = 0, INVALID("selection", "window is 0"));
    SELECTION_REJECTS(x->selection.window = -5, INVALID("selection", "window is -5"));
    SELECTION_REJECTS(x->selection.recent = -5, INVALID("selection", "recent is -5"));
    SELECTION_REJECTS(x->selection.gap = -2, INVALID("selection", "gap is -2"));
    SELECTION_REJECTS(x->selection.gap = NAN, INVALID("selection", "gap is"));
    SELECTION_REJECTS(x->selection.scope = FDMA_SCOPE_DEFAULT, INVALID("selection", "scope is 0"));
    SELECTION_REJECTS(x->selection.scope = (fdma_scope)4, INVALID("selection", "scope is 4"));
    SELECTION_REJECTS(x->selection.reserved = 2, INVALID("selection.reserved", "2"));
    SELECTION_REJECTS(x->selection.size = 0, INVALID("selection", "size", "0"));
    SELECTION_REJECTS(x->selection.size = 1, INVALID("selection", "size", "1"));
    REJECTS(cache_store, x->selection.gap = 1.5, INVALID("selection", "gap is 1.5", "cache"));
    REJECTS(select, x->selection.reserved = 5, INVALID("selection.reserved", "5"));
    REJECTS(select, x->selection.size = 0, INVALID("selection", "size", "0"));
    REJECTS(attention, x->selection.reserved = 5, INVALID("selection.reserved", "5"));
    REJECTS(attention, x->selection.size = 0, INVALID("selection", "size", "0"));
}

static void exec_is_checked(void) {
    const fdma_parallel unsized = {.run = NULL}, later = {.size = 9000};
    const fdma_parallel idle = {.size = sizeof idle};
    for (int i = 0; i < operation_count; i++) {
        call *x;
#define EXEC_REJECTS(statement, ...)                                                               \
    x = right_call((fdma_operation)i, true);                                                       \
    test_context("%s: %s", operations[i].name, #statement);                                        \
    call_exec(x)->statement;                                                                       \
    check_rejected(x, &(const expectation){__VA_ARGS__})
        EXEC_REJECTS(threads = -1, INVALID("threads", "-1"));
        EXEC_REJECTS(threads = -4, INVALID("threads", "-4"));
        EXEC_REJECTS(threads = INT32_MIN, INVALID("threads", "-2147483648"));
        EXEC_REJECTS(device = -1, INVALID("device", "-1"));
        EXEC_REJECTS(device = -7, INVALID("device", "-7"));
        EXEC_REJECTS(reserved = 1, INVALID("exec.reserved", "1"));
        EXEC_REJECTS(reserved = -1, INVALID("exec.reserved", "-1"));
        EXEC_REJECTS(parallel = &unsized, INVALID("exec.parallel", "size is 0"));
        EXEC_REJECTS(parallel = &later, INVALID("exec.parallel", "size is 9000", "later"));
        EXEC_REJECTS(parallel = &idle, INVALID("exec.parallel", "run is NULL"));
        EXEC_REJECTS(kernel = "gpu", FDMA_UNSUPPORTED, {"kernel", "gpu"}, 0);
        EXEC_REJECTS(kernel = "cpu/sse9", FDMA_UNSUPPORTED, {"kernel", "cpu/sse9"}, 0);
        EXEC_REJECTS(workspace = NULL, FDMA_INVALID_ARGUMENT, {"workspace", "NULL"}, 1);
    }
}

/* ---- workspace ---- */

/* A workspace with one byte less than the call asks for is refused. The exact size suffices at any
 * address, and nothing around it is touched. A prefill may make do with less: test_prefill.c. */
static void check_workspace(call *x) {
    fdma_exec *const exec = call_exec(x);
    size_t bytes = 0;
    CHECK_OK(operations[x->operation].workspace(&x->args, &bytes));
    if (bytes > 0 && x->operation != operation_prefill) {
        const size_t less[] = {bytes - 1, 5};
        for (int i = 0; i < TEST_COUNT(less); i++) {
            const expectation want = {
                FDMA_WORKSPACE_TOO_SMALL,
                {"workspace_size", number((int64_t)less[i]), number((int64_t)bytes)},
                1};
            exec->workspace_size = less[i];
            check_rejected(x, &want);
        }
    }
    memset(right.memory, 0, right.bytes);
    exec->workspace_size = bytes;
    for (size_t shift = 0; shift < 70; shift += 23) {
        exec->workspace = (char *)test_alloc_guarded(bytes + shift) + shift;
        CHECK_OK(operations[x->operation].call(&x->args));
    }
}

static void calls_need_their_workspace(void) {
    for (int i = 0; i < 2 * operation_count; i++) {
        const fdma_operation operation = (fdma_operation)(i / 2);
        const bool fused = operation >= operation_attention;
        const char *const name = operations[operation].name;
        const kernel_list kernels = kernels_for(fused ? "forward" : name, call_dtype(operation));
        for (int kernel = 0; kernel < kernels.count; kernel++) {
            call *const x = right_call(operation, i % 2 == 0);
            test_context("%s by %s", name, kernels.name[kernel]);
            call_exec(x)->kernel = kernels.name[kernel];
            call_exec(x)->threads = 2;
            check_workspace(x);
        }
    }
}

/* ---- argument structs ---- */

static void sizes_of_structs_are_checked(void) {
    for (int i = 0; i < operation_count; i++) {
        const size_t least = operations[i].exec + sizeof(fdma_exec);
        const size_t wrong[] = {0, 4, 8, 12, least - 1};
        char struct_name[48];
        snprintf(struct_name, sizeof struct_name, "fdma_%s_args", operations[i].name);
        for (int s = 0; s < TEST_COUNT(wrong); s++) {
            call *const x = right_call((fdma_operation)i, true);
            const expectation want = {
                FDMA_INVALID_ARGUMENT, {struct_name, "size", number((int64_t)wrong[s])}, 0};
            test_context("%s of %zu bytes", struct_name, wrong[s]);
            x->args.size = wrong[s];
            check_rejected(x, &want);
        }
        call *const x = right_call((fdma_operation)i, true);
        const expectation later = {
            FDMA_INVALID_ARGUMENT, {"size is 100000", "later", fdma_version()}, 0};
        x->args.size = 100000;
        check_rejected(x, &later);
    }
}

/* Callers compiled before fields were appended are served without them. */
static void structs_may_be_shorter(void) {
    for (int i = 0; i < operation_count; i++) {
        call *const x = right_call((fdma_operation)i, true);
        const size_t least = operations[i].exec + sizeof(fdma_exec);
        test_context("%s", operations[i].name);
        memset(right.memory, 0, right.bytes);
        x->args.size = least;
        memset((char *)&x->args + least, 0xff, operations[i].args_size - least);
        CHECK_OK(operations[i].call(&x->args));
    }
}

/* Callers compiled with a later header are served if they leave the new fields at zero. */
static void structs_may_be_longer(void) {
    for (int i = 0; i < operation_count; i++) {
        call *const x = right_call((fdma_operation)i, true);
        const size_t size = operations[i].args_size + 16;
        size_t bytes = 99;
        char *const longer = test_alloc(size);
        test_context("%s", operations[i].name);
        memset(right.memory, 0, right.bytes);
        x->args.size = size;
        memcpy(longer, &x->args, operations[i].args_size);
        CHECK_OK(operations[i].call(longer));
        longer[size - 1] = 1;
        CHECK_INT(operations[i].call(longer), FDMA_UNSUPPORTED);
        CHECK_WORD(fdma_last_error(), number((int64_t)size));
        CHECK_WORD(fdma_last_error(), "compiled with a later fdma.h than this library");
        CHECK_WORD(fdma_last_error(), fdma_version());
        CHECK_INT(operations[i].workspace(longer, &bytes), FDMA_UNSUPPORTED);
        CHECK_INT(bytes, 99);
    }
}

static void null_arguments(void) {
    for (int i = 0; i < operation_count; i++) {
        size_t bytes = 99;
        const char *name = NULL;
        const call *const x = right_call((fdma_operation)i, true);
        test_context("%s", operations[i].name);
        CHECK_INT(operations[i].call(NULL), FDMA_INVALID_ARGUMENT);
        CHECK_INT(operations[i].workspace(NULL, &bytes), FDMA_INVALID_ARGUMENT);
        CHECK_INT(operations[i].kernel(NULL, &name), FDMA_INVALID_ARGUMENT);
        CHECK(bytes == 99 && name == NULL);
        CHECK_INT(operations[i].workspace(&x->args, NULL), FDMA_INVALID_ARGUMENT);
        CHECK_WORD(fdma_last_error(), "bytes");
        if (i < operation_attention) {
            CHECK_INT(operations[i].kernel(&x->args, NULL), FDMA_INVALID_ARGUMENT);
            CHECK_WORD(fdma_last_error(), "name");
        }
    }
}

/* ---- numbers of sequences ---- */

/* Lists that are refused: kv_used of two sequences of 9 keys, starts of 167 positions. */
static const struct {
    int32_t numbers[4];
    int64_t count;
    int rank;
    bool is_packed, has_data;
    fdma_dtype dtype;
    expectation want;
} wrong_lists[] = {
    {{9, 10}, 2, 1, false, true, FDMA_INT32, {FDMA_INVALID_ARGUMENT, {"kv_used", "1", "10"}, 1}},
    {{9, -1}, 2, 1, false, true, FDMA_INT32, {FDMA_INVALID_ARGUMENT, {"kv_used", "-1", "9"}, 1}},
    {{9, 4}, 3, 1, false, true, FDMA_INT32, {FDMA_INVALID_ARGUMENT, {"kv_used", "3", "2"}, 0}},
    {{9, 4}, 2, 2, false, true, FDMA_INT32, {FDMA_INVALID_ARGUMENT, {"kv_used", "rank", "1"}, 0}},
    {{9, 4},
     2,
     1,
     false,
     true,
     FDMA_FLOAT32,
     {FDMA_UNSUPPORTED, {"kv_used", "float32", "int32"}, 0}},
    {{9, 4}, 2, 1, false, false, FDMA_INT32, {FDMA_INVALID_ARGUMENT, {"kv_used", "NULL"}, 1}},
    {{0, 40, 30, 167},
     4,
     1,
     true,
     true,
     FDMA_INT32,
     {FDMA_INVALID_ARGUMENT, {"starts", "element 2 is 30, want 40"}, 1}},
    {{1, 167},
     2,
     1,
     true,
     true,
     FDMA_INT32,
     {FDMA_INVALID_ARGUMENT, {"starts", "element 0 is 1, want 0 to 0"}, 1}},
    {{0, 168},
     2,
     1,
     true,
     true,
     FDMA_INT32,
     {FDMA_INVALID_ARGUMENT, {"starts", "is 168, want 0 to 167"}, 1}},
    {{0, -1},
     2,
     1,
     true,
     true,
     FDMA_INT32,
     {FDMA_INVALID_ARGUMENT, {"starts", "is -1, want 0 to 167"}, 1}},
    {{0},
     0,
     1,
     true,
     true,
     FDMA_INT32,
     {FDMA_INVALID_ARGUMENT, {"starts", "0 elements, want 1 or more"}, 0}},
    {{0}, 4, 2, true, true, FDMA_INT32, {FDMA_INVALID_ARGUMENT, {"starts", "rank"}, 0}},
    {{0}, 3, 1, true, true, FDMA_FLOAT32, {FDMA_UNSUPPORTED, {"starts", "float32"}, 0}},
};

/* Checks a call of forward, and its workspace query. */
static void check_refused(const fdma_forward_args *wrong, const expectation *want) {
    fdma_forward_args args = *wrong;
    const fdma_tensor out = copy_tensor(args.out);
    size_t bytes = 0;
    check_query(fdma_forward_workspace(&args, &bytes), want);
    exec_alloc(&args.exec, 1 << 20);
    check_status(fdma_forward(&args), want);
    CHECK(same_tensor(args.out, out));
}

static void wrong_numbers_are_refused(void) {
    static const problem both[] = {SIZES(2, 3, 9, 1, 1, 8, 4, 1),
                                   SIZES(1, 167, 167, 2, 1, 8, 4, 1)};
    for (int n = 0; n < TEST_COUNT(wrong_lists); n++) {
        const problem x = new_problem(&both[wrong_lists[n].is_packed], FDMA_FLOAT32, 1);
        fdma_forward_args args = problem_args(&x, NULL);
        int32_t numbers[4];
        memcpy(numbers, wrong_lists[n].numbers, sizeof numbers);
        fdma_tensor list = fdma_tensor_1d(numbers, wrong_lists[n].dtype, wrong_lists[n].count);
        if (wrong_lists[n].rank == 2)
            list = fdma_tensor_2d(numbers, wrong_lists[n].dtype, wrong_lists[n].count, 1);
        if (!wrong_lists[n].has_data)
            list.data = NULL;
        test_context("list %d", n);
        *(wrong_lists[n].is_packed ? &args.starts : &args.kv_used) = list;
        check_refused(&args, &wrong_lists[n].want);
        test_free_all();
    }
}

/* kv_used excludes packed sequences, carried keys and tables. Packed sequences have one batch entry
 * and as many queries as keys. */
static void options_of_sequences_exclude_each_other(void) {
    static const problem one = SIZES(1, 9, 9, 1, 1, 8, 4, 1), two = SIZES(2, 9, 9, 1, 1, 8, -1, 1);
    static const int32_t used[] = {5}, starts[] = {0};
    const problem x = new_problem(&one, FDMA_FLOAT32, 1), pair = new_problem(&two, FDMA_FLOAT32, 1);
    fdma_forward_args args = problem_args(&x, NULL);
    args.kv_used = new_list(used, 1), args.starts = new_list(starts, 1);
    check_refused(&args, &(expectation){FDMA_INVALID_ARGUMENT, {"kv_used", "starts"}, 0});
    args = problem_args(&x, NULL);
    args.k_carried = args.v_carried = x.k;
    args.bias_carried = x.bias;
    args.selection = NULL;
    args.kv_used = new_list(used, 1);
    check_refused(&args, &(expectation){FDMA_INVALID_ARGUMENT, {"kv_used", "k_carried"}, 0});
    fdma_selection selection = selection_for(x.score);
    fdma_select_args select = select_args(&x, &selection, NULL);
    select.kv_used = new_list(used, 1);
    select.table_out = (fdma_table){.score = new_output(FDMA_FLOAT32, 1, 1, 4, -1),
                                    .position = new_output(FDMA_INT32, 1, 1, 4, -1),
                                    .seen = new_tensor(FDMA_INT32, 1, -1, -1, -1)};
    check_status(fdma_select(&select),
                 &(expectation){FDMA_INVALID_ARGUMENT, {"kv_used", "table_out"}, 0});
    args = problem_args(&x, NULL);
    args.starts = new_list(starts, 1);
    args.q = positions_of(args.q, 1, 0, 5), args.out = positions_of(args.out, 1, 0, 5);
    args.lse = (fdma_tensor){0};
    check_refused(&args, &(expectation){FDMA_INVALID_ARGUMENT, {"q_len: is 5, want kv_len, 9"}, 0});
    args = problem_args(&pair, NULL);
    args.starts = new_list(starts, 1);
    check_refused(&args, &(expectation){FDMA_INVALID_ARGUMENT, {"batch: is 2, want 1"}, 0});
}

/* ---- valid calls ---- */

/* With FDMA_BIAS_NONE nothing reads dt_proj, a and dt_bias, so they may hold anything. */
static void unread_weights_may_be_anything(void) {
    call *const x = right_call(operation_attention_backward, false);
    fdma_attention_backward_args *const args = &x->args.attention_backward;
    args->bias_form = FDMA_BIAS_NONE;
    args->ddt_proj = args->da = (fdma_tensor){0};
    args->dt_proj.data = args->dq.data;
    args->a.data = args->dk.data;
    CHECK_OK(fdma_attention_backward(args));
    args->dt_proj.rank = INT32_MAX;
    args->a.rank = -1;
    args->a.dtype = (fdma_dtype)99;
    args->dt_bias.rank = 7;
    CHECK_OK(fdma_attention_backward(args));
}

static void success_keeps_the_message(void) {
    const kernel_list kernels = kernels_of("forward");
    for (int kernel = 0; kernel <= kernels.count; kernel++) {
        fdma_forward_args *const args = &right_call(operation_forward, true)->args.forward;
        char message[512];
        args->scale = -3;
        CHECK_INT(fdma_forward(args), FDMA_INVALID_ARGUMENT);
        snprintf(message, sizeof message, "%s", fdma_last_error());
        args->scale = 3;
        args->exec.kernel = kernel < kernels.count ? kernels.name[kernel] : NULL;
        CHECK_OK(run_forward(args));
        CHECK_BYTES(fdma_last_error(), message, strlen(message) + 1);
    }
}

static const test_entry tests[] = {
    TEST(sizes_are_checked),
    TEST(options_of_attention_are_checked),
    TEST(options_of_rotations_are_checked),
    TEST(options_of_scores_are_checked),
    TEST(selections_are_checked),
    TEST(exec_is_checked),
    TEST(calls_need_their_workspace),
    TEST(sizes_of_structs_are_checked),
    TEST(structs_may_be_shorter),
    TEST(structs_may_be_longer),
    TEST(null_arguments),
    TEST(wrong_numbers_are_refused),
    TEST(options_of_sequences_exclude_each_other),
    TEST(unread_weights_may_be_anything),
    TEST(success_keeps_the_message),
};

int main(void) { return test_run(tests, TEST_COUNT(tests)); }
