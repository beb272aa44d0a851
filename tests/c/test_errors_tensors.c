/* test_errors_tensors.c - every possible mistake in a tensor, made in every tensor of every
 * operation, with all optional tensors and with none. See right_call.h. */
#include "right_call.h"

/* ---- the list of tensors ---- */

/* The entry of each tensor in fdma.h: > output, ? optional; its axes; and its dtype: s the dtype of
 * q, k and v; w that dtype or float32; f float32; i int32; u uint8; m that, float16 or bfloat16;
 * d the dtype of dt_proj; a the dtype of a; b the dtype of dt_bias. */
/* The tensors of a table, of the carried keys or of their gradients, of a cache. */
#define TABLE(role, name, r, dtype)                                                                \
    " " role name ".score?:bg" r ":" dtype " " role name ".position?:bg" r ":i " role name         \
    ".seen?:b:i"
#define CARRIED(role, d)                                                                           \
    " " role d "k_carried?:brgd:s " role d "v_carried?:brgd:s " role d "bias_carried?:bgr:f"

#define PAIRS " attn_mask?:BHIJ:m attn_bias?:BHIJ:w"

#define CACHE(r)                                                                                   \
    " >cache.k:p" r "gd:s >cache.v:p" r "gd:s >cache.bias:pg" r ":f >cache.table.score:pg" r       \
    ":f >cache.table.position:pg" r ":i >cache.table.seen:p:i cache.page_table?:px:i"

static const char *const documented[operation_count] = {
    [operation_score] = " v:bjgd:s dt_proj:gc:w a:g:w dt_bias?:g:w key_valid?:bj:u kv_used?:b:i "
                        ">score?:bgj:f >bias?:bgj:f",
    [operation_select] = " score:bgn:f key_valid?:bn:u starts?:s:i kv_used?:b:i" TABLE(
        "", "table_in", "r", "s") " >expiry:bgj:i >slot?:bgj:i" TABLE(">", "table_out", "z", "s"),
    [operation_forward] =
        " q:bihd:s k:bngd:s v:bngd:s bias?:bgn:f key_valid?:bn:u starts?:s:i kv_used?:b:i"
        " sink_logit?:h:f rng_state?:2:l" CARRIED("", "") PAIRS
    " mask_lists?:y:u expiry:bgj:i slot?:bgj:i >out:bihd:s >lse?:bhi:f",
    [operation_backward] =
        " q:bihd:s k:bngd:s v:bngd:s bias?:bgn:f key_valid?:bn:u starts?:s:i kv_used?:b:i"
        " sink_logit?:h:f rng_state?:2:l" CARRIED("", "") PAIRS
    " mask_lists?:y:u expiry:bgj:i slot?:bgj:i out:bihd:s lse:bhi:f dout:bihd:s dlse?:bhi:f "
    ">dq:bihd:s"
    " >dk:bngd:s >dv:bngd:s >dbias?:bgn:f >dsink_logit?:h:f"
    " >dattn_bias?:BHIJ:p" CARRIED(">", "d"),
    [operation_score_backward] =
        " v:bjgd:s dt_proj:gc:w a:g:w dt_bias?:g:w key_valid?:bj:u kv_used?:b:i dbias:bgj:f"
        " >dv?:bjgd:s >ddt_proj:gc:d >da:g:a >ddt_bias?:g:b",
    [operation_merge] = " out_a:bihd:s lse_a:bhi:f out_b:bihd:s lse_b:bhi:f >out:bihd:s"
                        " >lse?:bhi:f",
    [operation_merge_backward] = " out_a:bihd:s lse_a:bhi:f out_b:bihd:s lse_b:bhi:f"
                                 " dout:bihd:s dlse?:bhi:f >dout_a:bihd:s >dlse_a:bhi:f"
                                 " >dout_b:bihd:s >dlse_b:bhi:f",
    [operation_decode] =
        " q:bihd:s k:bngd:s v:bngd:s dt_proj:gc:w a:g:w dt_bias?:g:w score?:bgn:f index?:b:i "
        "n_tokens?:b:i"
        " commit?:b:i sink_logit?:h:f" CACHE("r") " >out:bihd:s >lse?:bhi:f",
    [operation_cache_store] =
        " k:bngd:s v:bngd:s score:bgn:f starts?:s:i index?:e:i expiry:bgj:i slot:bgj:i" CACHE("z"),
    [operation_cache_copy] = CACHE("r") " from:b:i to:b:i",
    [operation_probabilities] =
        " q:bihd:s k:bngd:s bias?:bgn:f key_valid?:bn:u starts?:s:i kv_used?:b:i rng_state?:2:l"
        " k_carried?:brgd:s bias_carried?:bgr:f" PAIRS
        " expiry:bgj:i slot?:bgj:i lse:bhi:f >probability:bhij:f",
    [operation_rotary_table] = " >rotary:tw:f inv_freq?:v:f positions?:t:i",
    [operation_rotate] =
        " x:bihd:s weight?:d:w rotary:tw:f positions?:Bi:i starts?:s:i >out:bihd:s k?:bigd:s"
        " k_weight?:d:w >k_out?:bigd:s",
    [operation_rotate_backward] =
        " dout:bihd:s x?:bihd:s weight?:d:w rotary:tw:f positions?:Bi:i starts?:s:i >dx:bihd:s"
        " >dweight?:d:f dk_out?:bigd:s k?:bigd:s k_weight?:d:w >dk?:bigd:s >dk_weight?:d:f",
    [operation_attention] =
        " q:bihd:s k:bngd:s v:bngd:s dt_proj:gc:w a:g:w dt_bias?:g:w key_valid?:bn:u "
        "starts?:s:i kv_used?:b:i sink_logit?:h:f rng_state?:2:l" TABLE("", "table_in", "z", "f")
            CARRIED("", "") " >out:bihd:s >lse?:bhi:f >score?:bgn:f"
                            " >bias?:bgn:f >expiry:bgj:i >slot?:bgj:i" TABLE(">", "table_out", "z",
                                                                             "f"),
    [operation_attention_backward] =
        " q:bihd:s k:bngd:s v:bngd:s dt_proj:gc:w a:g:w dt_bias?:g:w bias?:bgn:f key_valid?:bn:u "
        "starts?:s:i kv_used?:b:i sink_logit?:h:f rng_state?:2:l" CARRIED(
            "", "") " expiry:bgj:i slot?:bgj:i out:bihd:s lse:bhi:f dout:bihd:s dlse?:bhi:f"
                    " >dq:bihd:s >dk:bngd:s >dv:bngd:s >ddt_proj:gc:d >da:g:a >ddt_bias?:g:b"
                    " >dsink_logit?:h:f" CARRIED(">", "d"),
    [operation_prefill] = " q:ihd:s k:ngd:s v:ngd:s dt_proj:gc:w a:g:w dt_bias?:g:w score?:gn:f"
                          " sink_logit?:h:f" CACHE("r") " >out:ihd:s >lse?:hi:f",
};

/* Without this check the cases below would follow a mistake in the list. */
static void list_is_as_documented(void) {
    static const char dtypes[] = {
        [dtypes_same] = 's',  [dtypes_weight] = 'w',     [dtypes_wide] = 'f',
        [dtypes_int32] = 'i', [dtypes_uint8] = 'u',      [dtypes_as_dt_proj] = 'd',
        [dtypes_as_a] = 'a',  [dtypes_as_dt_bias] = 'b', [dtypes_as_attn_bias] = 'p',
        [dtypes_int64] = 'l', [dtypes_mask] = 'm',
    };
    for (int operation = 0; operation < operation_count; operation++) {
        const tensor_table table = fdma_tensors[operation];
        char text[832] = "";
        for (size_t t = 0; t < table.count; t++) {
            const tensor_entry *const entry = &table.entries[t];
            const size_t used = strlen(text);
            snprintf(text + used, sizeof text - used, " %s%s%s:%s:%c", is_output(entry) ? ">" : "",
                     entry->name, is_optional(entry) ? "?" : "", entry->dims,
                     dtypes[entry->dtypes]);
        }
        test_context("%s has%s", operations[operation].name, text);
        CHECK(strcmp(text, documented[operation]) == 0);
    }
}

/* ---- mistakes that every tensor can have ---- */

/* Checks that the right call is refused after `entry` is replaced by the tensor `wrong`. */
static void check_tensor(const tensor_entry *entry, fdma_tensor wrong, const char *how,
                         const expectation *want) {
    call x;
    call_copy(&x, &right.call);
    *call_tensor(&x, entry) = wrong;
    test_context("%s: %s %s: %s", operations[x.operation].name, entry->name, how,
                 want->words[1] != NULL ? want->words[1] : "");
    check_rejected(&x, want);
}

static bool has_axis(fdma_operation operation, char letter) {
    const tensor_table table = fdma_tensors[operation];
    for (const tensor_entry *entry = table.entries; entry < table.entries + table.count; entry++)
        if (strchr(entry->dims, letter) != NULL)
            return true;
    return false;
}

/* True if the library takes a size of the call from this tensor, the first that has it. If its size
 * is wrong, the message names another tensor, or the size itself. The tensor that gives head_dim
 * gives the dtype too. */
static bool settles(const tensor_entry *entry, char letter) {
    const tensor_entry *first = fdma_tensors[right.call.operation].entries;
    if (strchr("bijhgdnrp", letter) == NULL || strchr(entry->dims, letter) == NULL ||
        (letter == 'j' && has_axis(right.call.operation, 'n'))) // j follows from n and r
        return false;
    while (strchr(first->dims, letter) == NULL)
        first++;
    return first == entry;
}

/* The expected answer if a tensor that settles a size has the size `wrong`. */
static expectation want_of_origin(char letter, int64_t wrong) {
    if (letter == 'd')
        return (expectation){FDMA_UNSUPPORTED, {"head_dim", number(wrong), "256"}, 0};
    return (expectation){
        FDMA_INVALID_ARGUMENT, {number(size_of_axis(&right.sizes, letter)), number(wrong)}, 0};
}

/* True if an axis may be broadcast with this length. A gradient has the shape of its tensor. */
static bool may_have_length(const tensor_entry *entry, char letter, int64_t length) {
    return may_broadcast(letter) && !is_output(entry) &&
           (length == 1 || (letter == 'H' && length == right.sizes.kv_heads));
}

static void check_axes(const tensor_entry *entry, fdma_tensor tensor, bool with_optional) {
    for (int axis = 0; axis < tensor.rank; axis++) {
        const char letter = entry->dims[axis];
        const int64_t size = tensor.shape[axis], wrong[] = {size - 1, size + 1, -1};
        for (int i = 0; i < TEST_COUNT(wrong); i++) {
            const bool origin = wrong[i] > 0 && settles(entry, letter);
            const expectation other = {
                FDMA_INVALID_ARGUMENT,
                {entry->name, number(wrong[i]), wrong[i] > 0 ? number(size) : NULL},
                0};
            const expectation want = origin ? want_of_origin(letter, wrong[i]) : other;
            tensor.shape[axis] = wrong[i];
            /* page tables may be wider, and test_rotate.c has the sizes of rotary tables; without
             * optional tensors nothing contradicts a settled size */
            if ((strchr("xtw", letter) == NULL || wrong[i] < 0) && (with_optional || !origin) &&
                !may_have_length(entry, letter, wrong[i]))
                check_tensor(entry, tensor, "has an axis of another size", &want);
        }
        tensor.shape[axis] = size;
    }
}

/* Decode and prefill need no weights if they are given the score. */
static bool may_be_absent(const tensor_entry *entry) {
    const bool scored =
        attends_to_cache(right.call.operation) && call_tensor_named(&right.call, "score")->rank > 0;
    return is_optional(entry) || (scored && entry->dtypes == dtypes_weight);
}

static void check_ranks(const tensor_entry *entry, fdma_tensor tensor) {
    const int32_t rank = tensor.rank, wrong[] = {0, -1, 5, rank - 1, rank + 1};
    for (int i = 0; i < TEST_COUNT(wrong); i++) {
        const char *const is = wrong[i] == 0 ? "is absent" : number(wrong[i]);
        const expectation want = {FDMA_INVALID_ARGUMENT, {entry->name, is, number(rank)}, 0};
        tensor.rank = wrong[i];
        if (wrong[i] != 0 || !may_be_absent(entry)) /* rank 0: absent */
            check_tensor(entry, tensor, "has another rank", &want);
    }
}

static bool may_have(const tensor_entry *entry, fdma_dtype own, fdma_dtype dtype) {
    const bool is_float = dtype <= FDMA_FLOAT64;
    switch (entry->dtypes) {
    case dtypes_same:
        return dtype == own || (is_float && settles(entry, 'd'));
    case dtypes_weight:
        return dtype == call_dtype(right.call.operation) || dtype == FDMA_FLOAT32;
    case dtypes_mask:
        return dtype == FDMA_UINT8 || dtype == FDMA_FLOAT16 || dtype == FDMA_BFLOAT16;
    case dtypes_wide:
        return dtype == FDMA_FLOAT32 || dtype == FDMA_FLOAT64;
    case dtypes_as_attn_bias:
        return dtype == FDMA_FLOAT32 || dtype == FDMA_FLOAT64 ||
               dtype == right.call.args.backward.attn_bias.dtype;
    default:
        return dtype == own;
    }
}

static void check_dtypes(const tensor_entry *entry, fdma_tensor tensor) {
    static const char *const names[] = {"unset",   "float32", "float16", "bfloat16",
                                        "float64", "int32",   "uint8",   "int64"};
    const expectation unknown = {FDMA_INVALID_ARGUMENT, {entry->name, "77"}, 0};
    const fdma_dtype own = tensor.dtype;
    for (int dtype = FDMA_FLOAT32; dtype <= FDMA_INT64; dtype++) {
        const expectation want = {FDMA_UNSUPPORTED, {entry->name, names[dtype]}, 0};
        tensor.dtype = (fdma_dtype)dtype;
        if (!may_have(entry, own, tensor.dtype))
            check_tensor(entry, tensor, "has another dtype", &want);
    }
    tensor.dtype = (fdma_dtype)77;
    check_tensor(entry, tensor, "has no known dtype", &unknown);
}

static void check_strides(const tensor_entry *entry, fdma_tensor tensor) {
    for (int axis = 0; axis < tensor.rank; axis++) {
        const bool last = axis == tensor.rank - 1;
        const int64_t stride = tensor.stride[axis], wrong[] = {-5, INT64_MAX, 2, 0};
        for (int i = 0; i < TEST_COUNT(wrong); i++) {
            const char *const word = last || i == 0 ? number(wrong[i])
                                     : i == 1       ? "int64"
                                                    : "distinct";
            const expectation want = {FDMA_INVALID_ARGUMENT, {entry->name, word}, 0};
            tensor.stride[axis] = wrong[i];
            if (last || i < 2 || (wrong[i] == 0 && is_output(entry)))
                check_tensor(entry, tensor, "has a wrong stride", &want);
        }
        tensor.stride[axis] = stride;
    }
}

static void check_data(const tensor_entry *entry, fdma_tensor tensor) {
    const expectation want_data = {FDMA_INVALID_ARGUMENT, {entry->name, "NULL"}, 1};
    const expectation want_alignment = {FDMA_INVALID_ARGUMENT, {entry->name, "aligned"}, 1};
    char *const data = tensor.data;
    tensor.data = NULL;
    check_tensor(entry, tensor, "has no data", &want_data);
    for (size_t byte = 1; byte < dtype_size(tensor.dtype); byte++) {
        tensor.data = data + byte;
        check_tensor(entry, tensor, "is off its alignment", &want_alignment);
    }
}

/* True for the output of a rotation, which may be its input. */
static bool may_be_in_place(const tensor_entry *output, const tensor_entry *input) {
    const fdma_operation operation = right.call.operation;
    static const char *const pairs[][2] = {{"out", "x"}, {"k_out", "k"}};
    static const char *const backward[][2] = {{"dx", "dout"}, {"dk", "dk_out"}};
    const char *const(*const named)[2] = operation == operation_rotate ? pairs : backward;
    for (int n = 0; n < 2 && is_rotating(operation); n++)
        if (strcmp(output->name, named[n][0]) == 0 && strcmp(input->name, named[n][1]) == 0)
            return true;
    return false;
}

/* An output may not share memory with any other tensor, and no tensor with the workspace. */
static void check_overlaps(const tensor_entry *entry, fdma_tensor tensor) {
    const tensor_table table = fdma_tensors[right.call.operation];
    const fdma_exec *const exec = call_exec(&right.call);
    for (const tensor_entry *other = table.entries; other < table.entries + table.count; other++) {
        const expectation want = {FDMA_INVALID_ARGUMENT, {entry->name, other->name}, 1};
        const fdma_tensor *const at = call_tensor(&right.call, other);
        tensor.data = at->data;
        if (is_output(entry) && other != entry && at->rank > 0 && !may_be_in_place(entry, other))
            check_tensor(entry, tensor, "lies on another tensor", &want);
    }
    const expectation want = {FDMA_INVALID_ARGUMENT, {"exec.workspace", entry->name}, 1};
    tensor.data = exec->workspace;
    check_tensor(entry, tensor, "lies where the workspace begins", &want);
    tensor.data = (char *)exec->workspace + (exec->workspace_size - 16) / 16 * 16;
    check_tensor(entry, tensor, "lies where the workspace ends", &want);
}

static void check_reserved(const tensor_entry *entry, fdma_tensor tensor) {
    const expectation want = {FDMA_INVALID_ARGUMENT, {entry->name, "reserved", "is not zero"}, 0};
    for (int n = 0; n < TEST_COUNT(tensor.reserved); n++) {
        tensor.reserved[n] = n - 5;
        check_tensor(entry, tensor, "has a reserved word", &want);
        tensor.reserved[n] = 0;
    }
}

static void check_tensor_of(const tensor_entry *entry, fdma_tensor tensor, bool with_optional) {
    check_ranks(entry, tensor);
    check_reserved(entry, tensor);
    check_axes(entry, tensor, with_optional);
    check_dtypes(entry, tensor);
    check_strides(entry, tensor);
    check_data(entry, tensor);
    check_overlaps(entry, tensor);
}

static void check_tensors(bool with_optional) {
    const tensor_table table = fdma_tensors[right.call.operation];
    for (size_t t = 0; t < table.count; t++) {
        const tensor_entry *const entry = &table.entries[t];
        const fdma_tensor tensor = *call_tensor(&right.call, entry);
        if (tensor.rank > 0)
            check_tensor_of(entry, tensor, with_optional);
    }
}

static void tensors_are_checked(void) {
    for (int i = 0; i < 2 * operation_count; i++) {
        const bool with_optional = i % 2 == 0;
        right_call((fdma_operation)(i / 2), with_optional);
        check_tensors(with_optional);
    }
}

/* Dropout depends on positions, which carried keys do not have. */
static void check_no_dropout(call *x) {
    const expectation want = {FDMA_INVALID_ARGUMENT, {"dropout", "k_carried"}, 0};
    double *const dropout =
        x->operation == operation_forward              ? &x->args.forward.dropout
        : x->operation == operation_backward           ? &x->args.backward.dropout
        : x->operation == operation_attention          ? &x->args.attention.dropout
        : x->operation == operation_attention_backward ? &x->args.attention_backward.dropout
        : x->operation == operation_probabilities      ? &x->args.probabilities.dropout
                                                       : NULL;
    if (dropout == NULL)
        return;
    test_context("%s with carried keys and dropout", operations[x->operation].name);
    *dropout = 0.5;
    check_rejected(x, &want);
}

static void tensors_of_streams_are_checked(void) {
    for (int operation = 0; operation < operation_count; operation++) {
        if (!has_axis((fdma_operation)operation, 'n'))
            continue;
        call *const x = right_call_with((fdma_operation)operation, true, 4, 0);
        check_tensors(true);
        check_no_dropout(x);
    }
}

/* With a page table k and v of a cache have other axes; test_cache_pages.c tests their mistakes. */
static void page_tables_are_checked(void) {
    for (int operation = 0; operation < operation_count; operation++) {
        const tensor_table table = fdma_tensors[operation];
        for (size_t t = 0; t < table.count; t++) {
            if (strchr(table.entries[t].dims, 'x') == NULL)
                continue;
            call *const x = right_call_with((fdma_operation)operation, true, 0, 2);
            check_tensor_of(&table.entries[t], *call_tensor(x, &table.entries[t]), true);
        }
    }
}

static void check_words(call *x, int32_t *words, size_t bytes, const char *name) {
    const expectation want = {FDMA_INVALID_ARGUMENT, {name, "is not zero"}, 0};
    for (size_t n = 0; n < bytes / sizeof *words; n++) {
        test_context("%s: %s, word %zu", operations[x->operation].name, name, n);
        words[n] = 1;
        check_rejected(x, &want);
        words[n] = 0;
    }
}

/* If there is a table, its reserved words must be valid. */
static void check_table_words(call *x, fdma_table *table, const char *name) {
    check_words(x, table->reserved, sizeof table->reserved, name);
}

static void check_cache_words(call *x, fdma_cache *cache) {
    size_t bytes = 0;
    check_words(x, cache->reserved, sizeof cache->reserved, "cache.reserved");
    check_table_words(x, &cache->table, "cache.table.reserved");
    cache->reserved[2] = 7;
    CHECK_INT(fdma_cache_bytes(cache, &bytes), FDMA_INVALID_ARGUMENT);
    CHECK_WORD(fdma_last_error(), "cache.reserved: is not zero, want 0: a struct begins as {0}");
    CHECK_INT(fdma_cache_init(cache, right.memory), FDMA_INVALID_ARGUMENT);
    CHECK_INT(fdma_cache_drop(cache, 0), FDMA_INVALID_ARGUMENT);
    CHECK(is_untouched());
}

static void reserved_words_are_checked(void) {
    call *x = right_call_with(operation_select, true, 4, 0);
    check_table_words(x, &x->args.select.table_in, "table_in.reserved");
    check_table_words(x, &x->args.select.table_out, "table_out.reserved");
    x = right_call_with(operation_attention, true, 4, 0);
    check_table_words(x, &x->args.attention.table_in, "table_in.reserved");
    check_table_words(x, &x->args.attention.table_out, "table_out.reserved");
    x = right_call(operation_decode, true);
    check_cache_words(x, &x->args.decode.cache);
    x = right_call(operation_prefill, true);
    check_cache_words(x, &x->args.prefill.cache);
    x = right_call(operation_cache_store, true);
    check_cache_words(x, &x->args.cache_store.cache);
    x = right_call(operation_cache_copy, true);
    check_cache_words(x, &x->args.cache_copy.cache);
}

static const test_entry tests[] = {
    TEST(list_is_as_documented),   TEST(reserved_words_are_checked),
    TEST(tensors_are_checked),     TEST(tensors_of_streams_are_checked),
    TEST(page_tables_are_checked),
};

int main(void) { return test_run(tests, TEST_COUNT(tests)); }
