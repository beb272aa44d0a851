/* Checks of tensors and sizes, driven by the list in signatures.c, of overlaps and of caches. */
#include "core/checks.h"

#include "core/cache.h"
#include "core/error.h"
#include "core/integers.h"
#include "core/rotary.h"
#include "core/signatures.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

/* ---- overlaps ---- */

/* Tests whether two tensors share elements. The test is exact for separate buffers and for
 * interleaved slices of one packed buffer (q, k, v of one projection). Elsewhere it may report an
 * overlap where there is none, but it never misses one. */

/* The range of bytes that a tensor touches. With a period above 0, `first` is taken modulo the
 * period, and an axis whose stride is a multiple of it adds nothing: the range stands for itself
 * and for its repetitions every `period` bytes. */
typedef struct byte_range {
    int64_t first;
    int64_t end;
} byte_range;

static byte_range range_modulo(const fdma_tensor *tensor, int64_t period) {
    const int64_t size = (int64_t)fdma_dtype_size(tensor->dtype);
    const int64_t address = (int64_t)(uintptr_t)tensor->data;
    const int64_t first = period ? address % period : address;
    int64_t reach = size;
    for (int axis = 0; axis < tensor->rank; axis++) {
        if (tensor->shape[axis] == 1)
            continue; // its stride is arbitrary
        const int64_t stride = tensor->stride[axis] * size;
        if (period == 0 || stride % period != 0)
            reach += (tensor->shape[axis] - 1) * stride;
    }
    return (byte_range){first, first + reach};
}

static bool are_apart(byte_range a, byte_range b) { return a.end <= b.first || b.end <= a.first; }

/* Both ranges repeat every `period` bytes: they are apart if they are apart in the same period and
 * in neighboring ones. */
static bool are_apart_modulo(const fdma_tensor *a, const fdma_tensor *b, int64_t period) {
    const byte_range range_a = range_modulo(a, period);
    const byte_range range_b = range_modulo(b, period);
    if (range_a.end - range_a.first > period || range_b.end - range_b.first > period)
        return false;
    // Shift each range back by one period, not forward: forward it might go past INT64_MAX.
    const byte_range last_a = {range_a.first - period, range_a.end - period};
    const byte_range last_b = {range_b.first - period, range_b.end - period};
    return are_apart(range_a, range_b) && are_apart(last_a, range_b) && are_apart(range_a, last_b);
}

static bool may_overlap(const fdma_tensor *a, const fdma_tensor *b) {
    if (is_empty(a) || is_empty(b) || are_apart(range_modulo(a, 0), range_modulo(b, 0)))
        return false;
    const int64_t size = (int64_t)fdma_dtype_size(a->dtype);
    for (int axis = 0; axis < a->rank; axis++)
        if (a->shape[axis] > 1 && a->stride[axis] > 0 &&
            are_apart_modulo(a, b, a->stride[axis] * size))
            return false;
    return true;
}

static fdma_tensor workspace_of(const fdma_exec *exec) {
    const int64_t most = INT64_MAX - (int64_t)(uintptr_t)exec->workspace;
    const bool fits = exec->workspace_size < (size_t)most;
    return fdma_tensor_1d(exec->workspace, FDMA_UINT8, fits ? (int64_t)exec->workspace_size : most);
}

fdma_status fdma_check_overlaps(const named_tensor *tensors, size_t count, const fdma_exec *exec) {
    const fdma_tensor workspace = workspace_of(exec);
    for (size_t i = 0; i < count; i++) {
        FDMA_REQUIRE(!may_overlap(tensors[i].tensor, &workspace), FDMA_INVALID_ARGUMENT,
                     "exec.workspace: shares memory with %s, want memory of its own",
                     tensors[i].name);
        for (size_t other = 0; other < count && tensors[i].output; other++) {
            const bool is_new_pair = other != i && !(tensors[other].output && other < i);
            FDMA_REQUIRE(!is_new_pair || !may_overlap(tensors[i].tensor, tensors[other].tensor),
                         FDMA_INVALID_ARGUMENT,
                         "%s: shares elements with %s, want memory of its own", tensors[i].name,
                         tensors[other].name);
        }
    }
    return FDMA_OK;
}

/* ---- caches ---- */

fdma_status fdma_check_cache(const fdma_cache *cache) {
    FDMA_REQUIRE(cache != NULL, FDMA_INVALID_ARGUMENT, "cache: is NULL, want a struct");
    FDMA_TRY(fdma_check_reserved("cache", cache->reserved, sizeof cache->reserved));
    FDMA_TRY(
        fdma_check_reserved("cache.table", cache->table.reserved, sizeof cache->table.reserved));
    FDMA_REQUIRE(cache->sequences >= 1 && cache->sequences <= INT32_MAX, FDMA_INVALID_ARGUMENT,
                 "cache: its sequences is %lld, want 1 to %d", (long long)cache->sequences,
                 INT32_MAX);
    FDMA_REQUIRE(cache->kv_heads >= 1 && cache->kv_heads <= INT32_MAX, FDMA_INVALID_ARGUMENT,
                 "cache: its kv_heads is %lld, want 1 to %d", (long long)cache->kv_heads,
                 INT32_MAX);
    FDMA_REQUIRE(cache->head_dim >= 8 && cache->head_dim <= 256 && cache->head_dim % 8 == 0,
                 FDMA_UNSUPPORTED,
                 "cache: its head_dim is %lld, supported: multiples of 8 from 8 to 256",
                 (long long)cache->head_dim);
    FDMA_REQUIRE(cache->window >= 1 && cache->window <= INT32_MAX / 2, FDMA_INVALID_ARGUMENT,
                 "cache: its window is %lld, want 1 to %d", (long long)cache->window,
                 INT32_MAX / 2);
    FDMA_REQUIRE(cache->recent >= 0 && cache->recent <= INT32_MAX / 2, FDMA_INVALID_ARGUMENT,
                 "cache: its recent is %lld, want 0 to %d", (long long)cache->recent,
                 INT32_MAX / 2);
    FDMA_REQUIRE(cache->sinks >= 0 && cache->sinks <= cache->window, FDMA_INVALID_ARGUMENT,
                 "cache: its sinks is %lld, want 0 to its window, %lld", (long long)cache->sinks,
                 (long long)cache->window);
    FDMA_REQUIRE(cache->dtype >= FDMA_FLOAT32 && cache->dtype <= FDMA_FLOAT64, FDMA_UNSUPPORTED,
                 "cache: its dtype is %s, supported: float32, float16, bfloat16, float64",
                 fdma_dtype_name(cache->dtype));
    FDMA_REQUIRE(cache->device >= 0, FDMA_INVALID_ARGUMENT,
                 "cache: its device is %d, want FDMA_CPU or FDMA_CUDA(n)", cache->device);
    return FDMA_OK;
}

static fdma_status check_int_tensor(const char *name, const fdma_tensor *tensor, int32_t rank,
                                    const int64_t *shape) {
    FDMA_TRY(fdma_check_form(name, tensor, rank, takes_int32));
    for (int axis = 0; axis < rank; axis++)
        FDMA_REQUIRE(tensor->shape[axis] == shape[axis], FDMA_INVALID_ARGUMENT,
                     "%s: axis %d has %s, want %lld", name, axis,
                     fdma_count_text(tensor->shape[axis], "element").text, (long long)shape[axis]);
    return fdma_check_layout(name, tensor, true, true);
}

fdma_status fdma_check_cache_positions(const fdma_cache *cache) {
    const int64_t shape[] = {cache->sequences, cache->kv_heads, rows_of_cache(cache)};
    FDMA_TRY(fdma_check_cache(cache));
    FDMA_TRY(check_int_tensor("cache.table.position", &cache->table.position, 3, shape));
    return check_int_tensor("cache.table.seen", &cache->table.seen, 1, shape);
}

/* The caller's scores, the cache's scores and the bias have one dtype. With given scores weights
 * would have no effect. */
static fdma_status check_score(const fdma_problem *problem) {
    const bool given = is_present(&problem->score);
    const fdma_dtype dtype = problem->cache.table.score.dtype;
    FDMA_REQUIRE(problem->cache.bias.dtype == dtype, FDMA_INVALID_ARGUMENT,
                 "cache.bias: dtype is %s, want that of cache.table.score, %s",
                 fdma_dtype_name(problem->cache.bias.dtype), fdma_dtype_name(dtype));
    FDMA_REQUIRE(!given || problem->score.dtype == dtype, FDMA_INVALID_ARGUMENT,
                 "score: dtype is %s, want that of cache.table.score, %s",
                 fdma_dtype_name(problem->score.dtype), fdma_dtype_name(dtype));
    const struct {
        const char *name;
        const fdma_tensor *tensor;
    } weights[] = {
        {"dt_proj", &problem->dt_proj}, {"a", &problem->a}, {"dt_bias", &problem->dt_bias}};
    for (size_t n = 0; n < sizeof weights / sizeof weights[0]; n++)
        FDMA_REQUIRE(!given || !is_present(weights[n].tensor), FDMA_INVALID_ARGUMENT,
                     "%s: is given, want none with score", weights[n].name);
    return FDMA_OK;
}

static fdma_status check_rule(const char *rule, int64_t of_selection, int64_t of_cache) {
    FDMA_REQUIRE(of_selection == of_cache, FDMA_INVALID_ARGUMENT,
                 "selection: its %s is %lld, want that of the cache, %lld", rule,
                 (long long)of_selection, (long long)of_cache);
    return FDMA_OK;
}

/* Checks that the selection of a call was made for the rules of its cache. */
static fdma_status check_cache_rules(const fdma_problem *problem) {
    const fdma_cache *const cache = &problem->cache;
    FDMA_REQUIRE(problem->scope == FDMA_SCOPE_CAUSAL, FDMA_INVALID_ARGUMENT,
                 "selection: its scope is global, want causal for a cache");
    FDMA_REQUIRE(problem->gap == 0, FDMA_INVALID_ARGUMENT,
                 "selection: its gap is %g, want 0 for a cache", problem->gap);
    FDMA_TRY(check_rule("window", problem->window, cache->window));
    FDMA_TRY(check_rule("recent", problem->recent, cache->recent));
    return check_rule("sinks", problem->sinks, cache->sinks);
}

static fdma_status check_decode(const fdma_problem *problem) {
    FDMA_REQUIRE(problem->new_len <= most_new_tokens, FDMA_INVALID_ARGUMENT,
                 "k: axis 1 has %s, want at most %d tokens",
                 fdma_count_text(problem->new_len, "element").text, most_new_tokens);
    FDMA_REQUIRE(problem->q_len <= problem->new_len, FDMA_INVALID_ARGUMENT,
                 "q_len: is %lld, want at most the new tokens, %lld", (long long)problem->q_len,
                 (long long)problem->new_len);
    return FDMA_OK;
}

static fdma_status check_prefill(const fdma_problem *problem) {
    const int64_t requests = problem->prefill.count;
    FDMA_REQUIRE(problem->q_len == problem->new_len, FDMA_INVALID_ARGUMENT,
                 "q_len: is %lld, want the tokens of k, %lld", (long long)problem->q_len,
                 (long long)problem->new_len);
    FDMA_REQUIRE(requests >= 0 && requests <= INT32_MAX, FDMA_INVALID_ARGUMENT,
                 "requests: is %lld, want 0 to %d", (long long)requests, INT32_MAX);
    return FDMA_OK;
}

static fdma_status check_store(const fdma_problem *problem) {
    const int64_t starts = problem->starts.shape[0], most = problem->cache.sequences + 1;
    if (!is_present(&problem->starts))
        return FDMA_OK;
    FDMA_REQUIRE(problem->carried_len == 0, FDMA_INVALID_ARGUMENT,
                 "starts: is given, want none with carried keys in the selection");
    FDMA_REQUIRE(is_present(&problem->index) || starts <= most, FDMA_INVALID_ARGUMENT,
                 "starts: axis 0 has %s, want at most %lld without index",
                 fdma_count_text(starts, "element").text, (long long)most);
    return FDMA_OK;
}

/* Checks k alone: the pools of k and v have the same sizes. */
static fdma_status check_pages(const fdma_problem *problem) {
    const fdma_tensor *const table = &problem->cache.page_table;
    const int64_t rows = rows_of_cache(&problem->cache), page_len = problem->page_len;
    FDMA_REQUIRE(page_len >= 1 && (page_len & (page_len - 1)) == 0, FDMA_INVALID_ARGUMENT,
                 "cache.k: axis 1 has %lld elements, want a power of 2 with page_table",
                 (long long)page_len);
    FDMA_REQUIRE(problem->cache.bias.shape[2] == rows, FDMA_INVALID_ARGUMENT,
                 "cache.bias: axis 2 has %s, want window + recent, %lld",
                 fdma_count_text(problem->cache.bias.shape[2], "element").text, (long long)rows);
    FDMA_REQUIRE(table->shape[1] >= divide_up(rows, page_len), FDMA_INVALID_ARGUMENT,
                 "cache.page_table: axis 1 has %s, want %lld or more pages of %s",
                 fdma_count_text(table->shape[1], "element").text,
                 (long long)divide_up(rows, page_len), fdma_count_text(page_len, "row").text);
    return FDMA_OK;
}

static fdma_status check_rows(const fdma_cache *cache) {
    FDMA_REQUIRE(cache->k.shape[1] == rows_of_cache(cache), FDMA_INVALID_ARGUMENT,
                 "cache.k: axis 1 has %s, want window + recent, %lld",
                 fdma_count_text(cache->k.shape[1], "element").text,
                 (long long)rows_of_cache(cache));
    return FDMA_OK;
}

static fdma_status check_cache_sizes(const fdma_problem *problem) {
    const fdma_cache *const cache = &problem->cache;
    const bool copies = problem->operation == operation_cache_copy;
    const bool stores = problem->operation == operation_cache_store;
    FDMA_TRY(check_score(problem));
    FDMA_REQUIRE(problem->exec.device == cache->device, FDMA_INVALID_ARGUMENT,
                 "cache: its device is %s, want exec.device, %s",
                 fdma_device_text(cache->device).text, fdma_device_text(problem->exec.device).text);
    FDMA_REQUIRE(problem->dtype == cache->dtype, FDMA_INVALID_ARGUMENT,
                 "cache: its dtype is %s, want that of cache.k, %s", fdma_dtype_name(cache->dtype),
                 fdma_dtype_name(problem->dtype));
    FDMA_REQUIRE(problem->kv_heads == cache->kv_heads, FDMA_INVALID_ARGUMENT,
                 "cache: its kv_heads is %lld, want %lld", (long long)cache->kv_heads,
                 (long long)problem->kv_heads);
    FDMA_REQUIRE(problem->head_dim == cache->head_dim, FDMA_INVALID_ARGUMENT,
                 "cache: its head_dim is %lld, want %lld", (long long)cache->head_dim,
                 (long long)problem->head_dim);
    FDMA_TRY(has_pages(cache) ? check_pages(problem) : check_rows(cache));
    if (problem->operation == operation_decode)
        FDMA_TRY(check_decode(problem));
    if (problem->operation == operation_prefill)
        FDMA_TRY(check_prefill(problem));
    FDMA_REQUIRE(copies || is_present(&problem->index) || problem->batch <= cache->sequences,
                 FDMA_INVALID_ARGUMENT,
                 "batch: is %lld, want at most the sequences of the cache, %lld, without index",
                 (long long)problem->batch, (long long)cache->sequences);
    FDMA_REQUIRE(!copies || problem->batch <= cache->sequences, FDMA_INVALID_ARGUMENT,
                 "to: axis 0 has %s, want at most the sequences of the cache, %lld",
                 fdma_count_text(problem->batch, "element").text, (long long)cache->sequences);
    return stores ? check_store(problem) : FDMA_OK;
}

static fdma_status check_number(const char *name, int64_t b, int64_t number, int64_t least,
                                int64_t most) {
    FDMA_REQUIRE(number >= least && number <= most, FDMA_INVALID_ARGUMENT,
                 "%s: element %lld is %lld, want %lld to %lld", name, (long long)b,
                 (long long)number, (long long)least, (long long)most);
    return FDMA_OK;
}

/* Checks that `tokens` more can be counted. */
static fdma_status check_cache_seen(const fdma_cache *cache, int64_t sequence, int64_t tokens) {
    return check_number("cache.table.seen", sequence,
                        ((const int32_t *)cache->table.seen.data)[sequence], 0, INT32_MAX - tokens);
}

static fdma_status check_decode_lists(const fdma_problem *problem) {
    const fdma_cache *const cache = &problem->cache;
    for (int64_t b = 0; b < problem->batch; b++) {
        const int64_t sequence = number_of_stream(&problem->index, b, b);
        const int64_t tokens = number_of_stream(&problem->n_tokens, b, problem->new_len);
        const int64_t commit = number_of_stream(&problem->commit, b, tokens);
        FDMA_TRY(check_number("index", b, sequence, -1, cache->sequences - 1));
        FDMA_TRY(check_number("n_tokens", b, tokens, 0, problem->new_len));
        FDMA_TRY(check_number("commit", b, commit, 0, tokens));
        if (sequence >= 0)
            FDMA_TRY(check_cache_seen(cache, sequence, tokens));
    }
    return FDMA_OK;
}

static fdma_status check_store_lists(const fdma_problem *problem) {
    const fdma_cache *const cache = &problem->cache;
    for (int64_t n = 0; n < count_prompts(problem); n++) {
        const int64_t sequence = number_of_stream(&problem->index, n, n);
        FDMA_TRY(check_number("index", n, sequence, -1, cache->sequences - 1));
        if (sequence >= 0 && problem->carried_len > 0)
            FDMA_TRY(check_cache_seen(cache, sequence, problem->new_len));
    }
    return FDMA_OK;
}

/* Checks that no sequence occurs twice. Goes over ranges of 32768 sequences with one bit each,
 * because a call allocates nothing. */
static fdma_status check_distinct(const char *name, const int32_t *numbers, int64_t count,
                                  int64_t sequences) {
    enum { range_len = 1 << 15 };
    uint8_t found[range_len / 8];
    for (int64_t first = 0; first < sequences; first += range_len) {
        memset(found, 0, sizeof found);
        for (int64_t n = 0; n < count; n++) {
            const int64_t at = numbers[n] - first;
            if (at < 0 || at >= range_len)
                continue;
            FDMA_REQUIRE((found[at / 8] >> at % 8 & 1) == 0, FDMA_INVALID_ARGUMENT,
                         "%s: element %lld is %d, want a number that it has only once", name,
                         (long long)n, numbers[n]);
            found[at / 8] |= (uint8_t)(1 << at % 8);
        }
    }
    return FDMA_OK;
}

static fdma_status check_copy_lists(const fdma_problem *problem) {
    const int64_t last = problem->cache.sequences - 1;
    for (int64_t n = 0; n < problem->batch; n++) {
        FDMA_TRY(check_number("from", n, ((const int32_t *)problem->from.data)[n], -1, last));
        FDMA_TRY(check_number("to", n, ((const int32_t *)problem->to.data)[n], 0, last));
    }
    return check_distinct("to", problem->to.data, problem->batch, problem->cache.sequences);
}

/* Checks the lists of requests, which the host reads also for a device, and on the CPU `seen` of
 * their sequences. */
static fdma_status check_requests(const fdma_problem *problem) {
    const prefill_requests *const requests = &problem->prefill;
    const fdma_cache *const cache = &problem->cache;
    FDMA_REQUIRE(requests->starts != NULL, FDMA_INVALID_ARGUMENT,
                 "starts: is NULL, want %s in memory of the host",
                 fdma_count_text(requests->count + 1, "number").text);
    FDMA_REQUIRE(requests->index != NULL || requests->count <= cache->sequences,
                 FDMA_INVALID_ARGUMENT,
                 "requests: is %lld, want at most the sequences of the cache, %lld, without index",
                 (long long)requests->count, (long long)cache->sequences);
    FDMA_TRY(check_number("starts", 0, requests->starts[0], 0, 0));
    for (int64_t n = 0; n < requests->count; n++) {
        const int64_t first = requests->starts[n], end = requests->starts[n + 1];
        const int64_t sequence = requests->index != NULL ? requests->index[n] : n;
        FDMA_TRY(check_number("starts", n + 1, end, first, problem->new_len));
        FDMA_TRY(check_number("index", n, sequence, -1, cache->sequences - 1));
        if (sequence >= 0 && cache->device == FDMA_CPU)
            FDMA_TRY(check_cache_seen(cache, sequence, end - first));
    }
    return requests->index == NULL
               ? FDMA_OK
               : check_distinct("index", requests->index, requests->count, cache->sequences);
}

/* Checks the values in the call's int32 lists, and `seen` of the sequences that they name. */
static fdma_status check_cache_lists(const fdma_problem *problem) {
    if (problem->operation == operation_decode)
        return check_decode_lists(problem);
    return problem->operation == operation_cache_store ? check_store_lists(problem)
                                                       : check_copy_lists(problem);
}

/* ---- tensors and sizes ---- */

static bool is_output(const tensor_entry *entry) {
    return entry->role == role_output || entry->role == role_optional_output;
}

static bool may_be_absent(const fdma_problem *problem, const tensor_entry *entry) {
    const bool is_learned = entry->dtypes == dtypes_weight || entry->dtypes == dtypes_as_dt_proj ||
                            entry->dtypes == dtypes_as_a; // the score's weights, their gradients
    return entry->role == role_optional || entry->role == role_optional_output ||
           (entry->in_selection && !problem->selected) ||
           (is_learned && problem->operation == operation_attention_backward &&
            problem->bias_form == FDMA_BIAS_NONE) ||
           (is_learned && attends_to_cache(problem->operation) && is_present(&problem->score));
}

static unsigned dtypes_of(const fdma_problem *problem, tensor_dtypes dtypes) {
    switch (dtypes) {
    case dtypes_same:
        return problem->dtype == 0 ? takes_floats : 1u << problem->dtype;
    case dtypes_weight:
        return 1u << problem->dtype | takes_float32;
    case dtypes_wide:
        return takes_wide_floats;
    case dtypes_int32:
        return takes_int32;
    case dtypes_uint8:
        return takes_uint8;
    case dtypes_mask:
        return takes_uint8 | takes_float16 | takes_bfloat16;
    case dtypes_int64:
        return takes_int64;
    case dtypes_as_dt_proj:
        return 1u << problem->dt_proj.dtype;
    case dtypes_as_a:
        return 1u << problem->a.dtype;
    case dtypes_as_attn_bias:
        return 1u << problem->attn_bias.dtype | takes_wide_floats;
    default:
        return 1u << problem->dt_bias.dtype;
    }
}

/* The field of the problem that holds the size of a letter of tensor_entry.dims; NULL if the size
 * is derived: see derived_length(). */
static int64_t *size_of(fdma_problem *problem, char dim) {
    static const size_t offsets['z' + 1] = {
        ['b'] = offsetof(fdma_problem, batch),
        ['i'] = offsetof(fdma_problem, q_len),
        ['j'] = offsetof(fdma_problem, kv_len),
        ['h'] = offsetof(fdma_problem, q_heads),
        ['g'] = offsetof(fdma_problem, kv_heads),
        ['d'] = offsetof(fdma_problem, head_dim),
        ['n'] = offsetof(fdma_problem, new_len),
        ['r'] = offsetof(fdma_problem, carried_len),
        ['p'] = offsetof(fdma_problem, cache.sequences),
        ['m'] = offsetof(fdma_problem, pages),
        ['l'] = offsetof(fdma_problem, page_len),
    };
    const size_t offset = offsets[(int)dim];
    return offset != 0 ? (int64_t *)((char *)problem + offset) : NULL;
}

static int64_t derived_length(const fdma_problem *problem, char dim) {
    switch (dim) {
    case 'c':
        return problem->kv_heads * problem->head_dim;
    case 's':
        return problem->starts.shape[0]; // any length but 0, see check_packed()
    case 'z':
        return problem->slots;
    case 'x':
        return problem->cache.page_table.shape[1]; // any length: check_pages() sets its minimum
    case 'y':
        return problem->mask_lists.shape[0]; // any length: the backend says how many it needs
    case 't':
        return problem->rotary.shape[0]; // any length, see fdma_check_rotary(); so is w
    case 'w':
        return problem->rotary.shape[1];
    case 'v':
        return problem->rotary.shape[1] / 2;
    case 'e':
        return is_present(&problem->starts) ? max(problem->starts.shape[0] - 1, 0) : problem->batch;
    default:
        return dim - '0'; // a digit stands for itself
    }
}

static fdma_status check_size(char dim, int64_t size) {
    FDMA_REQUIRE(dim != 'g' || (size >= 1 && size <= INT32_MAX), FDMA_INVALID_ARGUMENT,
                 "kv_heads: is %lld, want 1 to %d", (long long)size, INT32_MAX);
    FDMA_REQUIRE(strchr("jnr", dim) == NULL || size <= INT32_MAX, FDMA_INVALID_ARGUMENT,
                 "kv_len: is %lld, want at most %d", (long long)size, INT32_MAX);
    FDMA_REQUIRE(dim != 'd' || (size >= 8 && size <= 256 && size % 8 == 0), FDMA_UNSUPPORTED,
                 "head_dim: is %lld, supported: multiples of 8 from 8 to 256", (long long)size);
    return FDMA_OK;
}

static unsigned bit_of(char dim) { return 1u << (dim - 'a'); }

/* True if the selection of fdma_cache_store() counts carried keys, which are the cache's rows. */
static bool stores_behind_rows(const fdma_problem *problem) {
    return problem->operation == operation_cache_store &&
           problem->expiry.shape[2] > problem->new_len;
}

static fdma_status settle_keys(fdma_problem *problem, unsigned *settled) {
    if (!(*settled & bit_of('n')))
        problem->new_len = problem->kv_len;
    if (!(*settled & bit_of('n')) || *settled & bit_of('j'))
        return FDMA_OK;
    if (stores_behind_rows(problem))
        problem->carried_len = problem->slots;
    const int64_t most = INT32_MAX - problem->new_len;
    FDMA_REQUIRE(problem->carried_len <= most, FDMA_INVALID_ARGUMENT,
                 "kv_len: is %s beside %lld carried ones, want at most %d altogether",
                 fdma_count_text(problem->new_len, "key").text, (long long)problem->carried_len,
                 INT32_MAX);
    problem->kv_len = problem->carried_len + problem->new_len;
    *settled |= bit_of('j');
    return FDMA_OK;
}

/* The letter of an axis. With a page table the first axes of k and v of a cache are pages and their
 * rows. */
static char dim_of(const fdma_problem *problem, const tensor_entry *entry, int axis) {
    const bool has_rows = entry->member == offsetof(fdma_problem, cache.k) ||
                          entry->member == offsetof(fdma_problem, cache.v);
    return has_rows && axis < 2 && has_pages(&problem->cache) ? "ml"[axis] : entry->dims[axis];
}

/* Checks an axis with one of the letters BHIJ, which may be broadcast. */
static fdma_status check_broadcast(const fdma_problem *problem, const tensor_entry *entry,
                                   int axis) {
    const int64_t length = tensor_at(problem, entry->member)->shape[axis];
    const int64_t full[] = {problem->batch, problem->q_heads, problem->q_len, problem->kv_len};
    const int64_t want = full[strchr("BHIJ", entry->dims[axis]) - "BHIJ"];
    if (entry->member == offsetof(fdma_problem, dattn_bias))
        FDMA_REQUIRE(length == problem->attn_bias.shape[axis], FDMA_INVALID_ARGUMENT,
                     "%s: axis %d has %s, want %lld, as attn_bias has", entry->name, axis,
                     fdma_count_text(length, "element").text,
                     (long long)problem->attn_bias.shape[axis]);
    if (entry->dims[axis] == 'H')
        FDMA_REQUIRE(length == want || length == problem->kv_heads || length == 1,
                     FDMA_INVALID_ARGUMENT, "%s: axis %d has %s, want %lld, %lld or 1", entry->name,
                     axis, fdma_count_text(length, "element").text, (long long)want,
                     (long long)problem->kv_heads);
    FDMA_REQUIRE(entry->dims[axis] == 'H' || length == want || length == 1, FDMA_INVALID_ARGUMENT,
                 "%s: axis %d has %s, want %lld or 1", entry->name, axis,
                 fdma_count_text(length, "element").text, (long long)want);
    return FDMA_OK;
}

/* Checks rank, dtype and shape of a tensor. The first tensor of a call settles the dtype of the
 * problem; for each axis, the first tensor that has it settles its length. */
static fdma_status settle_tensor(fdma_problem *problem, const tensor_entry *entry,
                                 unsigned *settled) {
    const fdma_tensor *const tensor = tensor_at(problem, entry->member);
    if (!is_present(tensor) && may_be_absent(problem, entry))
        return FDMA_OK;
    FDMA_TRY(fdma_check_form(entry->name, tensor, entry->rank, dtypes_of(problem, entry->dtypes)));
    if (problem->dtype == 0)
        problem->dtype = tensor->dtype;
    for (int axis = 0; axis < tensor->rank; axis++) {
        const char dim = dim_of(problem, entry, axis);
        int64_t *const size = size_of(problem, dim);
        if (dim == 'j' || dim == 'J')
            FDMA_TRY(settle_keys(problem, settled));
        if (may_broadcast(dim)) {
            FDMA_TRY(check_broadcast(problem, entry, axis));
            continue;
        }
        if (size != NULL && !(*settled & bit_of(dim))) {
            *settled |= bit_of(dim);
            *size = tensor->shape[axis];
            FDMA_TRY(check_size(dim, *size));
        }
        const int64_t want = size != NULL ? *size : derived_length(problem, dim);
        FDMA_REQUIRE(tensor->shape[axis] == want, FDMA_INVALID_ARGUMENT,
                     "%s: axis %d has %s, want %lld", entry->name, axis,
                     fdma_count_text(tensor->shape[axis], "element").text, (long long)want);
    }
    return FDMA_OK;
}

static fdma_status check_packed(const fdma_problem *problem) {
    FDMA_REQUIRE(problem->starts.shape[0] > 0, FDMA_INVALID_ARGUMENT,
                 "starts: axis 0 has 0 elements, want 1 or more");
    FDMA_REQUIRE(problem->batch == 1, FDMA_INVALID_ARGUMENT, "batch: is %lld, want 1 with starts",
                 (long long)problem->batch);
    FDMA_REQUIRE(!is_attending(problem->operation) || problem->q_len == problem->kv_len,
                 FDMA_INVALID_ARGUMENT, "q_len: is %lld, want kv_len, %lld, with starts",
                 (long long)problem->q_len, (long long)problem->kv_len);
    return FDMA_OK;
}

/* Checks what `starts` holds, unless it is memory of a device, which the host does not read:
 * kernels clamp it. */
static fdma_status check_starts(const fdma_problem *problem) {
    const int32_t *const starts = problem->starts.data;
    int64_t least = 0;
    if (problem->exec.device != FDMA_CPU)
        return FDMA_OK;
    for (int64_t n = 0; n < problem->starts.shape[0]; n++) {
        const int64_t most = n == 0 ? 0 : problem->kv_len;
        FDMA_REQUIRE(starts[n] >= least && starts[n] <= most, FDMA_INVALID_ARGUMENT,
                     "starts: element %lld is %d, want %lld to %lld", (long long)n, starts[n],
                     (long long)least, (long long)most);
        least = starts[n];
    }
    return FDMA_OK;
}

static bool has_gradients(fdma_operation operation) {
    return operation == operation_backward || operation == operation_attention_backward;
}

static fdma_status check_pair(const char *name, const fdma_tensor *tensor, const char *other_name,
                              bool has_other) {
    FDMA_REQUIRE(is_present(tensor) || !has_other, FDMA_INVALID_ARGUMENT,
                 "%s: is absent, want it with %s", name, other_name);
    FDMA_REQUIRE(!is_present(tensor) || has_other, FDMA_INVALID_ARGUMENT,
                 "%s: is given, want none without %s", name, other_name);
    return FDMA_OK;
}

/* True if the call uses a bias, computed or given. */
static bool has_bias(const fdma_problem *problem) {
    return is_fused(problem->operation) ? problem->bias_form != FDMA_BIAS_NONE
                                        : is_present(&problem->bias);
}

/* Checks that k_carried comes with every other tensor of the carried keys. */
static fdma_status check_carried_tensors(const fdma_problem *problem) {
    const bool carried = is_present(&problem->k_carried);
    const bool backward = has_gradients(problem->operation);
    const bool dbias =
        problem->operation == operation_backward ? is_present(&problem->dbias) : has_bias(problem);
    FDMA_TRY(check_pair("v_carried", &problem->v_carried, "k_carried",
                        carried && problem->operation != operation_probabilities));
    FDMA_TRY(check_pair("bias_carried", &problem->bias_carried, "k_carried and a bias",
                        carried && has_bias(problem)));
    FDMA_TRY(check_pair("dk_carried", &problem->dk_carried, "k_carried", carried && backward));
    FDMA_TRY(check_pair("dv_carried", &problem->dv_carried, "k_carried", carried && backward));
    return check_pair("dbias_carried", &problem->dbias_carried, "k_carried and dbias",
                      carried && backward && dbias);
}

static fdma_status check_carried(const fdma_problem *problem) {
    FDMA_TRY(check_carried_tensors(problem));
    if (!is_present(&problem->k_carried))
        return FDMA_OK;
    FDMA_REQUIRE(problem->causal, FDMA_INVALID_ARGUMENT,
                 "causal: is 0, want nonzero with k_carried");
    FDMA_REQUIRE(problem->q_len <= problem->new_len, FDMA_INVALID_ARGUMENT,
                 "q_len: is %lld, want at most the keys of the call, %lld, with k_carried",
                 (long long)problem->q_len, (long long)problem->new_len);
    FDMA_REQUIRE(!is_present(&problem->starts), FDMA_INVALID_ARGUMENT,
                 "starts: is given, want none with k_carried");
    FDMA_REQUIRE(!is_present(&problem->key_valid) || is_fused(problem->operation),
                 FDMA_INVALID_ARGUMENT,
                 "key_valid: is given, want none with k_carried: the selection excludes such keys");
    FDMA_REQUIRE(problem->dropout.threshold == 0, FDMA_INVALID_ARGUMENT,
                 "dropout: is given, want none with k_carried");
    FDMA_REQUIRE(!is_present(&problem->attn_mask), FDMA_INVALID_ARGUMENT,
                 "attn_mask: is given, want none with k_carried");
    FDMA_REQUIRE(!is_present(&problem->attn_bias), FDMA_INVALID_ARGUMENT,
                 "attn_bias: is given, want none with k_carried");
    return FDMA_OK;
}

static fdma_status check_table(const fdma_problem *problem, const fdma_table *table,
                               const char *const *names) {
    const bool given = is_present(&table->score);
    FDMA_TRY(check_pair(names[1], &table->position, names[0], given));
    FDMA_TRY(check_pair(names[2], &table->seen, names[0], given));
    if (!given)
        return FDMA_OK;
    FDMA_REQUIRE(problem->scope == FDMA_SCOPE_CAUSAL, FDMA_INVALID_ARGUMENT,
                 "%s: is given, want none with global scope", names[0]);
    FDMA_REQUIRE(!is_present(&problem->starts), FDMA_INVALID_ARGUMENT,
                 "starts: is given, want none with %s", names[0]);
    FDMA_REQUIRE(problem->operation != operation_select || is_present(&problem->slot),
                 FDMA_INVALID_ARGUMENT, "slot: is absent, want it with %s", names[0]);
    return FDMA_OK;
}

static fdma_status check_tables(const fdma_problem *problem) {
    static const char *const in[] = {"table_in.score", "table_in.position", "table_in.seen"};
    static const char *const out[] = {"table_out.score", "table_out.position", "table_out.seen"};
    FDMA_TRY(check_table(problem, &problem->table_in, in));
    FDMA_TRY(check_table(problem, &problem->table_out, out));
    const bool given = is_present(&problem->table_in.score);
    if (problem->operation == operation_select) {
        FDMA_REQUIRE(
            !given || !is_present(&problem->table_out.score) ||
                problem->carried_len == problem->slots,
            FDMA_INVALID_ARGUMENT, "table_in.score: axis 2 has %s, want %lld with table_out",
            fdma_count_text(problem->carried_len, "element").text, (long long)problem->slots);
        return FDMA_OK;
    }
    if (problem->operation != operation_attention)
        return FDMA_OK;
    FDMA_TRY(check_pair("k_carried", &problem->k_carried, "table_in", given));
    FDMA_REQUIRE(!given || problem->carried_len == problem->slots, FDMA_INVALID_ARGUMENT,
                 "k_carried: axis 1 has %s, want %lld",
                 fdma_count_text(problem->carried_len, "element").text, (long long)problem->slots);
    return FDMA_OK;
}

/* Checks the positions that have passed in each stream: with the new ones they fit int32. */
static fdma_status check_seen(const fdma_problem *problem) {
    const int32_t *const seen = problem->table_in.seen.data;
    const int64_t most = INT32_MAX - problem->new_len;
    for (int64_t b = 0; b < problem->batch; b++)
        FDMA_REQUIRE(seen[b] >= 0 && seen[b] <= most, FDMA_INVALID_ARGUMENT,
                     "table_in.seen: element %lld is %d, want 0 to %lld", (long long)b, seen[b],
                     (long long)most);
    return FDMA_OK;
}

/* kv_used excludes packed sequences and pieces of a stream. */
static fdma_status check_used(const fdma_problem *problem) {
    const struct {
        const char *name;
        const fdma_tensor *tensor;
    } others[] = {
        {"starts", &problem->starts},
        {"table_in", &problem->table_in.score},
        {"table_out", &problem->table_out.score},
        {"k_carried", &problem->k_carried},
    };
    for (size_t n = 0; n < sizeof others / sizeof others[0]; n++)
        FDMA_REQUIRE(!is_present(others[n].tensor), FDMA_INVALID_ARGUMENT,
                     "kv_used: is given, want none with %s", others[n].name);
    return FDMA_OK;
}

/* Checks `kv_used`, which is in host memory. */
static fdma_status check_used_keys(const fdma_problem *problem) {
    const int32_t *const used = problem->kv_used.data;
    for (int64_t b = 0; b < problem->batch; b++)
        FDMA_REQUIRE(used[b] >= 0 && used[b] <= problem->kv_len, FDMA_INVALID_ARGUMENT,
                     "kv_used: element %lld is %d, want 0 to %lld", (long long)b, used[b],
                     (long long)problem->kv_len);
    return FDMA_OK;
}

/* For the CPU alone: on a device, kernels read rng_state. */
static void read_rng_state(fdma_problem *problem) {
    const int64_t *const state = problem->rng_state.data;
    problem->dropout.seed = (uint64_t)state[0];
    problem->dropout.offset = (uint64_t)state[1];
}

static fdma_status check_sizes(const fdma_problem *problem) {
    if (has_cache(problem->operation))
        FDMA_TRY(check_cache_sizes(problem));
    if (is_present(&problem->rotary))
        FDMA_TRY(fdma_check_rotary(problem));
    FDMA_TRY(check_carried(problem));
    FDMA_TRY(check_tables(problem));
    if (is_present(&problem->starts))
        FDMA_TRY(check_packed(problem));
    if (is_present(&problem->kv_used))
        FDMA_TRY(check_used(problem));
    FDMA_REQUIRE(!is_present(&problem->mask_lists) || is_present(&problem->attn_mask),
                 FDMA_INVALID_ARGUMENT, "mask_lists: is given, want none without attn_mask");
    FDMA_REQUIRE(!is_attending(problem->operation) ||
                     (problem->q_heads > 0 && problem->q_heads % problem->kv_heads == 0),
                 FDMA_INVALID_ARGUMENT,
                 "q_heads: is %lld, want a positive multiple of kv_heads, %lld",
                 (long long)problem->q_heads, (long long)problem->kv_heads);
    FDMA_REQUIRE(!problem->selected || problem->scope == FDMA_SCOPE_GLOBAL ||
                     problem->q_len <= problem->kv_len,
                 FDMA_INVALID_ARGUMENT,
                 "q_len: is %lld, want at most kv_len, %lld, with causal scope",
                 (long long)problem->q_len, (long long)problem->kv_len);
    return FDMA_OK;
}

/* The stride of an axis of length 0 or 1 is arbitrary. Sets it to 0; on the last axis only if that
 * axis may be broadcast. */
static void settle_strides(fdma_tensor *tensor, const tensor_entry *entry) {
    const int last = tensor->rank - 1;
    for (int axis = 0; axis < tensor->rank; axis++)
        if (tensor->shape[axis] <= 1 && (axis < last || may_broadcast(entry->dims[axis])))
            tensor->stride[axis] = 0;
}

/* The output of a rotation that may have the very elements of an input; NULL for other inputs. */
static const fdma_tensor *rotated_from(const fdma_problem *problem, const fdma_tensor *input) {
    if (problem->operation == operation_rotate)
        return input == &problem->x ? &problem->out : input == &problem->k ? &problem->k_out : NULL;
    if (problem->operation == operation_rotate_backward)
        return input == &problem->dout     ? &problem->dx
               : input == &problem->dk_out ? &problem->dk
                                           : NULL;
    return NULL;
}

/* True if the output of a rotation has the very elements of its input. */
static bool is_worked_in_place(const fdma_problem *problem, const fdma_tensor *from) {
    const fdma_tensor *const to = rotated_from(problem, from);
    if (to == NULL || to->data != from->data)
        return false;
    for (int axis = 0; axis < from->rank; axis++)
        if (from->shape[axis] > 1 && to->stride[axis] != from->stride[axis])
            return false;
    return true; // dtypes and shapes are equal
}

static fdma_status check_memory(fdma_problem *problem, check_depth depth) {
    const tensor_table table = fdma_tensors[problem->operation];
    named_tensor tensors[most_tensors] = {0};
    size_t count = 0;
    for (size_t t = 0; t < table.count; t++) {
        const tensor_entry *const entry = &table.entries[t];
        fdma_tensor *const tensor = problem_tensor(problem, entry);
        if (!is_present(tensor))
            continue;
        FDMA_TRY(fdma_check_layout(entry->name, tensor, is_output(entry), depth == check_all));
        settle_strides(tensor, entry);
        if (!is_output(entry) && is_worked_in_place(problem, tensor))
            continue; // the output, which has the same elements, stands for both
        tensors[count++] = (named_tensor){entry->name, tensor, is_output(entry)};
    }
    const prefill_requests *const requests = &problem->prefill;
    const fdma_tensor starts =
        fdma_tensor_1d((void *)requests->starts, FDMA_INT32, requests->count + 1);
    const fdma_tensor index = fdma_tensor_1d((void *)requests->index, FDMA_INT32, requests->count);
    if (requests->starts != NULL)
        tensors[count++] = (named_tensor){"starts", &starts, false};
    if (requests->index != NULL)
        tensors[count++] = (named_tensor){"index", &index, false};
    return depth == check_all ? fdma_check_overlaps(tensors, count, &problem->exec) : FDMA_OK;
}

fdma_status fdma_settle_problem(fdma_problem *problem, check_depth depth) {
    const tensor_table table = fdma_tensors[problem->operation];
    const bool scores = attends_to_cache(problem->operation);
    const bool cached = has_cache(problem->operation);
    unsigned settled = cached ? bit_of('p') : 0; // one bit per letter; `p` comes from the cache
    if (cached)
        FDMA_TRY(fdma_check_cache(&problem->cache));
    if (problem->operation == operation_cache_store)
        FDMA_TRY(check_cache_rules(problem));
    FDMA_REQUIRE(!scores || is_present(&problem->score) || is_present(&problem->dt_proj),
                 FDMA_INVALID_ARGUMENT,
                 "dt_proj: is absent, want a tensor of rank 2, or else a score");
    for (size_t t = 0; t < table.count; t++)
        FDMA_TRY(settle_tensor(problem, &table.entries[t], &settled));
    FDMA_TRY(settle_keys(problem, &settled));
    if (is_rotating(problem->operation))
        problem->kv_len = problem->q_len; // starts divides these rows
    FDMA_TRY(check_sizes(problem));
    if (is_attending(problem->operation)) {
        problem->group = problem->q_heads / problem->kv_heads;
        if (problem->scale == 0)
            problem->scale = 1 / sqrt((double)problem->head_dim);
    }
    FDMA_TRY(check_memory(problem, depth));
    if (depth == check_all && problem->operation == operation_prefill)
        FDMA_TRY(check_requests(problem));
    else if (depth == check_all && cached && problem->exec.device == FDMA_CPU)
        FDMA_TRY(check_cache_lists(problem));
    if (depth == check_all && is_present(&problem->table_in.seen) &&
        problem->exec.device == FDMA_CPU)
        FDMA_TRY(check_seen(problem));
    if (depth == check_all && is_present(&problem->kv_used) && problem->exec.device == FDMA_CPU)
        FDMA_TRY(check_used_keys(problem));
    if (depth == check_all && is_present(&problem->rng_state) && problem->exec.device == FDMA_CPU)
        read_rng_state(problem);
    if (depth == check_all && is_present(&problem->starts))
        FDMA_TRY(check_starts(problem));
    return is_rotating(problem->operation) ? fdma_check_positions(problem, depth) : FDMA_OK;
}

fdma_status fdma_check_slots(const fdma_problem *problem) {
    const fdma_tensor *const slot = &problem->slot;
    if (problem->exec.device != FDMA_CPU || problem->operation != operation_cache_store)
        return FDMA_OK;
    if (is_empty(slot)) // with any number of heads
        return FDMA_OK;
    for (int64_t head = 0; head < problem->batch * problem->kv_heads; head++) {
        const int64_t b = head / problem->kv_heads, g = head % problem->kv_heads;
        const int64_t first = b * slot->stride[0] + g * slot->stride[1];
        int32_t most = -1;
        for (int64_t j = 0; j < problem->kv_len; j++) {
            const int32_t own = ((const int32_t *)slot->data)[first + j];
            most = own > most ? own : most;
        }
        FDMA_REQUIRE(most < problem->slots, FDMA_INVALID_ARGUMENT,
                     "selection: has slot %d, want slots below window + recent, %lld, as it says",
                     most, (long long)problem->slots);
    }
    return FDMA_OK;
}

static bool is_of_all_cuts(const tensor_entry *entry) {
    return entry->member == offsetof(fdma_problem, dsink_logit) ||
           entry->member == offsetof(fdma_problem, dattn_bias);
}

static bool has_work(const fdma_problem *problem, bool is_cut) {
    const tensor_table table = fdma_tensors[problem->operation];
    for (const tensor_entry *entry = table.entries; entry < table.entries + table.count; entry++) {
        const fdma_tensor *const tensor = tensor_at(problem, entry->member);
        if (is_output(entry) && is_present(tensor) && !is_empty(tensor) &&
            !(is_cut && is_of_all_cuts(entry)))
            return true;
    }
    return false;
}

bool fdma_has_work(const fdma_problem *problem) { return has_work(problem, false); }

bool fdma_cut_has_work(const fdma_problem *cut) { return has_work(cut, true); }
