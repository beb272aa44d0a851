/* Checks of tensors and sizes, driven by the list in signatures.c. */
#include "core/checks.h"

#include "core/cache.h"
#include "core/error.h"
#include "core/integers.h"
#include "core/overlap.h"
#include "core/signatures.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

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
           (is_learned && problem->operation == operation_decode && is_present(&problem->score));
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
    case 't':
        return count_tiles(problem);
    case 'w':
        return problem->list.shape[3]; // any length: check_sizes() sets its minimum
    case 's':
        return problem->starts.shape[0]; // any length but 0, see check_packed()
    case 'z':
        return problem->slots;
    case 'x':
        return problem->cache.page_table.shape[1]; // any length: check_pages() sets its minimum
    case 'y':
        return problem->mask_lists.shape[0]; // any length: the backend says how many it needs
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
                 "kv_len: is %lld keys beside %lld carried ones, want at most %d altogether",
                 (long long)problem->new_len, (long long)problem->carried_len, INT32_MAX);
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
                     "%s: axis %d has %lld elements, want %lld, as attn_bias has", entry->name,
                     axis, (long long)length, (long long)problem->attn_bias.shape[axis]);
    if (entry->dims[axis] == 'H')
        FDMA_REQUIRE(length == want || length == problem->kv_heads || length == 1,
                     FDMA_INVALID_ARGUMENT, "%s: axis %d has %lld elements, want %lld, %lld or 1",
                     entry->name, axis, (long long)length, (long long)want,
                     (long long)problem->kv_heads);
    FDMA_REQUIRE(entry->dims[axis] == 'H' || length == want || length == 1, FDMA_INVALID_ARGUMENT,
                 "%s: axis %d has %lld elements, want %lld or 1", entry->name, axis,
                 (long long)length, (long long)want);
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
                     "%s: axis %d has %lld elements, want %lld", entry->name, axis,
                     (long long)tensor->shape[axis], (long long)want);
    }
    return FDMA_OK;
}

/* Most keys that a tile lists: the keys kept at its first position, and those that arrive later. */
static int64_t most_listed(const fdma_problem *problem) {
    const int64_t len = problem->kv_len;
    return min(min(problem->slots, len) + min(problem->tile_len - 1, len), len);
}

static fdma_status check_packed(const fdma_problem *problem) {
    const bool has_queries =
        is_attending(problem->operation) || problem->operation == operation_lists;
    FDMA_REQUIRE(problem->starts.shape[0] > 0, FDMA_INVALID_ARGUMENT,
                 "starts: axis 0 has 0 elements, want 1 or more");
    FDMA_REQUIRE(problem->batch == 1, FDMA_INVALID_ARGUMENT, "batch: is %lld, want 1 with starts",
                 (long long)problem->batch);
    FDMA_REQUIRE(!has_queries || problem->q_len == problem->kv_len, FDMA_INVALID_ARGUMENT,
                 "q_len: is %lld, want kv_len, %lld, with starts", (long long)problem->q_len,
                 (long long)problem->kv_len);
    FDMA_REQUIRE(problem->operation != operation_lists || problem->causal, FDMA_INVALID_ARGUMENT,
                 "causal: is 0, want nonzero with starts");
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

/* Checks that a call has both tensors or neither. */
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

/* Checks one table of a call: all its tensors are given, or none. */
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
        FDMA_REQUIRE(!given || !is_present(&problem->table_out.score) ||
                         problem->carried_len == problem->slots,
                     FDMA_INVALID_ARGUMENT,
                     "table_in.score: axis 2 has %lld elements, want %lld with table_out",
                     (long long)problem->carried_len, (long long)problem->slots);
        return FDMA_OK;
    }
    if (problem->operation != operation_attention)
        return FDMA_OK;
    FDMA_TRY(check_pair("k_carried", &problem->k_carried, "table_in", given));
    FDMA_REQUIRE(!given || problem->carried_len == problem->slots, FDMA_INVALID_ARGUMENT,
                 "k_carried: axis 1 has %lld elements, want %lld", (long long)problem->carried_len,
                 (long long)problem->slots);
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
        FDMA_TRY(fdma_check_cache_sizes(problem));
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
    const int64_t width = problem->list.shape[3];
    FDMA_REQUIRE(problem->operation != operation_lists || width >= most_listed(problem),
                 FDMA_INVALID_ARGUMENT, "list: axis 3 has %lld elements, want %lld or more",
                 (long long)width, (long long)most_listed(problem));
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
        tensors[count++] = (named_tensor){entry->name, tensor, is_output(entry)};
    }
    return depth == check_all ? fdma_check_overlaps(tensors, count, &problem->exec) : FDMA_OK;
}

fdma_status fdma_settle_problem(fdma_problem *problem, check_depth depth) {
    const tensor_table table = fdma_tensors[problem->operation];
    const bool decodes = problem->operation == operation_decode;
    const bool cached = has_cache(problem->operation);
    unsigned settled = cached ? bit_of('p') : 0; // one bit per letter; `p` comes from the cache
    if (cached)
        FDMA_TRY(fdma_check_cache(&problem->cache));
    if (problem->operation == operation_cache_store)
        FDMA_TRY(fdma_check_cache_rules(problem));
    FDMA_REQUIRE(!decodes || is_present(&problem->score) || is_present(&problem->dt_proj),
                 FDMA_INVALID_ARGUMENT,
                 "dt_proj: is absent, want a tensor of rank 2, or else a score");
    for (size_t t = 0; t < table.count; t++)
        FDMA_TRY(settle_tensor(problem, &table.entries[t], &settled));
    FDMA_TRY(settle_keys(problem, &settled));
    FDMA_TRY(check_sizes(problem));
    if (is_attending(problem->operation)) {
        problem->group = problem->q_heads / problem->kv_heads;
        if (problem->scale == 0)
            problem->scale = 1 / sqrt((double)problem->head_dim);
    }
    FDMA_TRY(check_memory(problem, depth));
    if (depth == check_all && cached && problem->exec.device == FDMA_CPU)
        FDMA_TRY(fdma_check_cache_lists(problem));
    if (depth == check_all && is_present(&problem->table_in.seen) &&
        problem->exec.device == FDMA_CPU)
        FDMA_TRY(check_seen(problem));
    if (depth == check_all && is_present(&problem->kv_used) && problem->exec.device == FDMA_CPU)
        FDMA_TRY(check_used_keys(problem));
    if (depth == check_all && is_present(&problem->rng_state) && problem->exec.device == FDMA_CPU)
        read_rng_state(problem);
    return depth == check_all && is_present(&problem->starts) ? check_starts(problem) : FDMA_OK;
}

/* Number of keys of sequence b that exist. */
static int64_t key_count(const fdma_problem *problem, int64_t b) {
    const fdma_tensor *const used = &problem->kv_used;
    return is_present(used) ? ((const int32_t *)used->data)[b * used->stride[0]] : problem->kv_len;
}

fdma_status fdma_check_slots(const fdma_problem *problem) {
    const fdma_tensor *const slot = &problem->slot;
    const bool lists = problem->operation == operation_lists;
    if (problem->exec.device != FDMA_CPU || (!lists && problem->operation != operation_cache_store))
        return FDMA_OK;
    if (is_empty(slot)) // with any number of heads
        return FDMA_OK;
    for (int64_t head = 0; head < problem->batch * problem->kv_heads; head++) {
        const int64_t b = head / problem->kv_heads, g = head % problem->kv_heads;
        const int64_t first = b * slot->stride[0] + g * slot->stride[1];
        int32_t most = -1;
        for (int64_t j = 0; j < key_count(problem, b); j++) {
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
