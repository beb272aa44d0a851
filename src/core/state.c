/* A sequence of a cache as bytes: what fdma_cache_save() writes and fdma_cache_restore() reads.
 *
 * A header, and then for each kv head position, score, bias, k and v of its first `rows` rows, each
 * of them as long as a multiple of 8 bytes. Rows without a key hold zeros and position -1. */
#include "core/cache.h"
#include "core/checks.h"
#include "core/element.h"
#include "core/error.h"
#include "core/integers.h"
#include "core/operations.h"

#include <string.h>

enum { state_version = 1, word_bytes = 8 };

static const char state_magic[8] = "FDMAseq";

/* Little-endian, and without gaps. */
typedef struct state_header {
    char magic[8];
    uint32_t version;
    int32_t dtype;     /* of k and v, an fdma_dtype */
    uint64_t bytes;    /* of the whole state */
    uint64_t checksum; /* of all bytes after this field */
    int64_t kv_heads, head_dim, window, recent, sinks;
    int64_t seen, rows;
    int64_t score_dtype; /* of score and bias */
} state_header;

enum { checked_from = offsetof(state_header, kv_heads) };

/* Against damage, not against intent. Each step is a bijection of the sum, so a change within one
 * word always changes the result. Multiplier: FNV-1a's, 64 bits. */
static uint64_t checksum_of(const uint8_t *data, size_t bytes) {
    uint64_t sum = UINT64_C(0xcbf29ce484222325);
    for (size_t at = 0; at < bytes; at += word_bytes) {
        uint64_t word;
        memcpy(&word, data + at, word_bytes);
        sum ^= word;
        sum = (sum << 29 | sum >> 35) * UINT64_C(0x100000001b3);
    }
    return sum;
}

static size_t padded(size_t bytes) { return (size_t)round_up((int64_t)bytes, word_bytes); }

static size_t bytes_for(const fdma_cache *cache, int64_t rows) {
    const size_t count = (size_t)rows;
    const size_t numbers = padded(count * fdma_dtype_size(cache->table.score.dtype));
    const size_t keys = count * (size_t)cache->head_dim * fdma_dtype_size(cache->dtype);
    const size_t head = padded(count * sizeof(int32_t)) + 2 * numbers + 2 * padded(keys);
    return sizeof(state_header) + (size_t)cache->kv_heads * head;
}

/* Checks a cache as a call of fdma_cache_copy() does. */
static fdma_status check_sequence(const fdma_cache *cache, int64_t sequence) {
    int32_t from, to;
    fdma_problem problem;
    FDMA_TRY(fdma_check_cache(cache));
    FDMA_REQUIRE(cache->device == FDMA_CPU, FDMA_UNSUPPORTED,
                 "cache: its device is %s, supported: the CPU. Copy the sequence's tensors to it",
                 fdma_device_text(cache->device).text);
    FDMA_REQUIRE(sequence >= 0 && sequence < cache->sequences, FDMA_INVALID_ARGUMENT,
                 "sequence: is %lld, want 0 to %lld", (long long)sequence,
                 (long long)cache->sequences - 1);
    from = to = (int32_t)sequence;
    const fdma_cache_copy_args copy = {.size = sizeof copy,
                                       .cache = *cache,
                                       .from = fdma_tensor_1d(&from, FDMA_INT32, 1),
                                       .to = fdma_tensor_1d(&to, FDMA_INT32, 1)};
    return fdma_check_call(operation_cache_copy, &copy, check_all, &problem);
}

static fdma_status check_position(const char *name, cache_row at, int64_t position, int64_t seen) {
    FDMA_REQUIRE(position >= -1 && position < seen, FDMA_INVALID_ARGUMENT,
                 "%s: row %lld of kv head %lld has position %lld, want -1 to %lld", name,
                 (long long)at.row, (long long)at.g, (long long)position, (long long)seen - 1);
    return FDMA_OK;
}

static fdma_status check_page(const fdma_cache *cache, cache_row at) {
    FDMA_REQUIRE(indices_of_row(cache, at.sequence, at.row).first >= 0, FDMA_INVALID_ARGUMENT,
                 "cache.page_table: the page of row %lld of sequence %lld is missing, want a page "
                 "for each row with a key",
                 (long long)at.row, (long long)at.sequence);
    return FDMA_OK;
}

static int64_t page_at(const fdma_cache *cache, int64_t sequence, int64_t column) {
    return indices_of_row(cache, sequence, column * cache->k.shape[1]).first;
}

/* Checks that the first rows of a sequence have pages of their own. Each pass looks at the pages
 * from `first` on that `seen` has a bit for. */
static fdma_status check_pages(const fdma_cache *cache, int64_t sequence, int64_t rows) {
    const int64_t page_len = cache->k.shape[1];
    const int64_t columns = has_pages(cache) ? divide_up(rows, page_len) : 0;
    enum { PAGES_SEEN = 1 << 15 };
    for (int64_t first = 0, next; first < INT64_MAX; first = next) {
        uint64_t seen[PAGES_SEEN / 64] = {0};
        next = INT64_MAX;
        for (int64_t column = 0; column < columns; column++) {
            const int64_t page = page_at(cache, sequence, column), bit = page - first;
            if (bit >= PAGES_SEEN)
                next = min(next, page);
            if (bit < 0 || bit >= PAGES_SEEN) // also a missing page
                continue;
            const uint64_t mark = UINT64_C(1) << bit % 64;
            int64_t before = seen[bit / 64] & mark ? 0 : column;
            while (before < column && page_at(cache, sequence, before) != page)
                before++;
            FDMA_REQUIRE(before == column, FDMA_INVALID_ARGUMENT,
                         "cache.page_table: rows %lld and %lld of sequence %lld have one page, "
                         "%lld, want a page for each",
                         (long long)(before * page_len), (long long)(column * page_len),
                         (long long)sequence, (long long)page);
            seen[bit / 64] |= mark;
        }
    }
    return FDMA_OK;
}

/* Checks that a state is in memory of its own. */
static fdma_status check_apart(const fdma_cache *cache, const void *state, size_t bytes) {
    const fdma_tensor memory = fdma_tensor_1d((void *)(uintptr_t)state, FDMA_UINT8, (int64_t)bytes);
    const named_tensor tensors[] = {
        {"cache.k", &cache->k, true},
        {"cache.v", &cache->v, true},
        {"cache.bias", &cache->bias, true},
        {"cache.table.score", &cache->table.score, true},
        {"cache.table.position", &cache->table.position, true},
        {"cache.table.seen", &cache->table.seen, true},
        {"cache.page_table", &cache->page_table, true},
        {"state", &memory, false},
    };
    const size_t count = sizeof tensors / sizeof tensors[0];
    for (size_t n = 0; n + 1 < count; n++) {
        const named_tensor pair[] = {tensors[n], tensors[count - 1]};
        if (is_present(pair[0].tensor))
            FDMA_TRY(fdma_check_overlaps(pair, 2, &(fdma_exec){0}));
    }
    return FDMA_OK;
}

static int32_t seen_of(const fdma_cache *cache, int64_t sequence) {
    return ((const int32_t *)cache->table.seen.data)[sequence];
}

/* Checks a sequence that is to be saved, and counts its rows up to the last one with a key. */
static fdma_status count_rows(const fdma_cache *cache, int64_t sequence, int64_t *rows) {
    const int32_t seen = seen_of(cache, sequence);
    FDMA_REQUIRE(seen >= 0, FDMA_INVALID_ARGUMENT,
                 "cache.table.seen: element %lld is %d, want 0 or more", (long long)sequence, seen);
    *rows = 0;
    for (int64_t g = 0; g < cache->kv_heads; g++)
        for (int64_t row = 0; row < rows_of_cache(cache); row++) {
            const cache_row at = {sequence, g, row};
            const int32_t position = *int_at(&cache->table.position, sequence, g, row);
            FDMA_TRY(check_position("cache.table.position", at, position, seen));
            if (position < 0)
                continue;
            FDMA_TRY(check_page(cache, at));
            *rows = max(*rows, row + 1);
        }
    return check_pages(cache, sequence, *rows);
}

/* ---- moving a row between a cache and a state ---- */

/* Where the parts of the rows of one kv head are in a state. */
typedef struct state_head {
    uint8_t *position, *score, *bias, *k, *v;
} state_head;

/* `state` is written to by save_row() alone. */
static state_head head_of(const fdma_cache *cache, const uint8_t *state, int64_t rows, int64_t g) {
    const size_t count = (size_t)rows;
    const size_t numbers = padded(count * fdma_dtype_size(cache->table.score.dtype));
    const size_t keys = padded(count * (size_t)cache->head_dim * fdma_dtype_size(cache->dtype));
    const size_t head_bytes = padded(count * sizeof(int32_t)) + 2 * numbers + 2 * keys;
    state_head head;
    head.position = (uint8_t *)(uintptr_t)state + sizeof(state_header) + (size_t)g * head_bytes;
    head.score = head.position + padded(count * sizeof(int32_t));
    head.bias = head.score + numbers;
    head.k = head.bias + numbers;
    head.v = head.k + keys;
    return head;
}

static uint8_t *element_at(const fdma_tensor *tensor, int64_t x0, int64_t x1, int64_t x2) {
    const int64_t offset = offset_of(tensor, x0, x1, x2);
    return (uint8_t *)tensor->data + (size_t)offset * fdma_dtype_size(tensor->dtype);
}

/* Copies one row of a head, to a state or from it. */
static void move_row(const fdma_cache *cache, const state_head *head, cache_row at, bool saves) {
    const size_t number = fdma_dtype_size(cache->table.score.dtype), row = (size_t)at.row;
    const size_t key = (size_t)cache->head_dim * fdma_dtype_size(cache->dtype);
    const key_indices in_cache = indices_of_row(cache, at.sequence, at.row);
    const struct {
        uint8_t *in_state, *in_cache;
        size_t bytes;
    } parts[] = {
        {head->position, element_at(&cache->table.position, at.sequence, at.g, at.row),
         sizeof(int32_t)},
        {head->score, element_at(&cache->table.score, at.sequence, at.g, at.row), number},
        {head->bias, element_at(&cache->bias, at.sequence, at.g, at.row), number},
        {head->k, element_at(&cache->k, in_cache.first, in_cache.row, at.g), key},
        {head->v, element_at(&cache->v, in_cache.first, in_cache.row, at.g), key},
    };
    for (size_t n = 0; n < sizeof parts / sizeof *parts; n++) {
        uint8_t *const in_state = parts[n].in_state + row * parts[n].bytes;
        memcpy(saves ? in_state : parts[n].in_cache, saves ? parts[n].in_cache : in_state,
               parts[n].bytes);
    }
}

static int32_t position_in(const state_head *head, int64_t row) {
    int32_t position;
    memcpy(&position, head->position + (size_t)row * sizeof position, sizeof position);
    return position;
}

/* ---- saving ---- */

fdma_status fdma_cache_state_bytes(const fdma_cache *cache, int64_t sequence, size_t *bytes) {
    int64_t rows;
    FDMA_TRY(check_sequence(cache, sequence));
    FDMA_REQUIRE(bytes != NULL, FDMA_INVALID_ARGUMENT,
                 "bytes: is NULL, want the address of a size_t");
    FDMA_TRY(count_rows(cache, sequence, &rows));
    *bytes = bytes_for(cache, rows);
    return FDMA_OK;
}

fdma_status fdma_cache_save(const fdma_cache *cache, int64_t sequence, void *state, size_t bytes) {
    int64_t rows;
    FDMA_TRY(check_sequence(cache, sequence));
    FDMA_TRY(count_rows(cache, sequence, &rows));
    const size_t want = bytes_for(cache, rows);
    FDMA_REQUIRE(state != NULL, FDMA_INVALID_ARGUMENT, "state: is NULL, want %zu bytes", want);
    FDMA_REQUIRE(bytes >= want, FDMA_INVALID_ARGUMENT, "bytes: is %zu, want %zu or more", bytes,
                 want);
    FDMA_TRY(check_apart(cache, state, want));
    uint8_t *const to = state;
    state_header header = {.version = state_version,
                           .dtype = (int32_t)cache->dtype,
                           .bytes = want,
                           .kv_heads = cache->kv_heads,
                           .head_dim = cache->head_dim,
                           .window = cache->window,
                           .recent = cache->recent,
                           .sinks = cache->sinks,
                           .seen = seen_of(cache, sequence),
                           .rows = rows,
                           .score_dtype = (int64_t)cache->table.score.dtype};
    memcpy(header.magic, state_magic, sizeof header.magic);
    memset(to, 0, want);
    memcpy(to, &header, sizeof header);
    for (int64_t g = 0; g < cache->kv_heads; g++) {
        const state_head head = head_of(cache, to, rows, g);
        memset(head.position, 0xff, (size_t)rows * sizeof(int32_t));
        for (int64_t row = 0; row < rows; row++)
            if (*int_at(&cache->table.position, sequence, g, row) >= 0)
                move_row(cache, &head, (cache_row){sequence, g, row}, true);
    }
    header.checksum = checksum_of(to + checked_from, want - checked_from);
    memcpy(to, &header, sizeof header);
    return FDMA_OK;
}

/* ---- restoring ---- */

static fdma_status check_field(const char *name, int64_t of_state, int64_t of_cache) {
    FDMA_REQUIRE(of_state == of_cache, FDMA_INVALID_ARGUMENT,
                 "state: its %s is %lld, want the cache's, %lld", name, (long long)of_state,
                 (long long)of_cache);
    return FDMA_OK;
}

static fdma_status check_dtype(const char *name, int64_t of_state, fdma_dtype of_cache) {
    FDMA_REQUIRE(of_state == (int64_t)of_cache, FDMA_INVALID_ARGUMENT,
                 "state: its %s is %s, want the cache's, %s", name,
                 fdma_dtype_name((fdma_dtype)of_state), fdma_dtype_name(of_cache));
    return FDMA_OK;
}

/* Checks that the bytes are a whole state, as they were saved. */
static fdma_status check_bytes(const uint8_t *state, size_t bytes, state_header *header) {
    FDMA_REQUIRE(state != NULL, FDMA_INVALID_ARGUMENT, "state: is NULL, want a saved sequence");
    FDMA_REQUIRE(bytes >= sizeof *header, FDMA_INVALID_ARGUMENT,
                 "state: has %s, want a saved sequence, of at least %zu",
                 fdma_count_text((int64_t)bytes, "byte").text, sizeof *header);
    memcpy(header, state, sizeof *header);
    FDMA_REQUIRE(memcmp(header->magic, state_magic, sizeof header->magic) == 0,
                 FDMA_INVALID_ARGUMENT,
                 "state: does not begin as a saved sequence, want bytes of fdma_cache_save()");
    FDMA_REQUIRE(header->version == state_version, FDMA_UNSUPPORTED,
                 "state: its version is %u, supported: %d", header->version, state_version);
    FDMA_REQUIRE(header->bytes >= sizeof *header && header->bytes % word_bytes == 0,
                 FDMA_INVALID_ARGUMENT,
                 "state: says that it has %llu bytes, want %zu or more in "
                 "words of %d",
                 (unsigned long long)header->bytes, sizeof *header, word_bytes);
    FDMA_REQUIRE(bytes >= header->bytes, FDMA_INVALID_ARGUMENT,
                 "state: is truncated: has %s, want %llu",
                 fdma_count_text((int64_t)bytes, "byte").text, (unsigned long long)header->bytes);
    const uint64_t sum = checksum_of(state + checked_from, header->bytes - checked_from);
    FDMA_REQUIRE(sum == header->checksum, FDMA_INVALID_ARGUMENT,
                 "state: is damaged: its checksum is %016llx, want %016llx",
                 (unsigned long long)sum, (unsigned long long)header->checksum);
    return FDMA_OK;
}

static fdma_status check_header(const fdma_cache *cache, const state_header *header) {
    FDMA_TRY(check_dtype("dtype", header->dtype, cache->dtype));
    FDMA_TRY(check_dtype("score's dtype", header->score_dtype, cache->table.score.dtype));
    FDMA_TRY(check_field("kv_heads", header->kv_heads, cache->kv_heads));
    FDMA_TRY(check_field("head_dim", header->head_dim, cache->head_dim));
    FDMA_TRY(check_field("window", header->window, cache->window));
    FDMA_TRY(check_field("recent", header->recent, cache->recent));
    FDMA_TRY(check_field("sinks", header->sinks, cache->sinks));
    FDMA_REQUIRE(header->seen >= 0 && header->seen <= INT32_MAX, FDMA_INVALID_ARGUMENT,
                 "state: its seen is %lld, want 0 to %d", (long long)header->seen, INT32_MAX);
    FDMA_REQUIRE(header->rows >= 0 && header->rows <= rows_of_cache(cache), FDMA_INVALID_ARGUMENT,
                 "state: has %lld rows, want 0 to window + recent, %lld", (long long)header->rows,
                 (long long)rows_of_cache(cache));
    const size_t want = bytes_for(cache, header->rows);
    FDMA_REQUIRE(header->bytes == want, FDMA_INVALID_ARGUMENT,
                 "state: has %llu bytes, want %zu for %lld rows", (unsigned long long)header->bytes,
                 want, (long long)header->rows);
    return FDMA_OK;
}

static fdma_status check_rows(const fdma_cache *cache, int64_t sequence, const uint8_t *state,
                              const state_header *header) {
    for (int64_t g = 0; g < cache->kv_heads; g++) {
        const state_head head = head_of(cache, state, header->rows, g);
        for (int64_t row = 0; row < header->rows; row++) {
            const cache_row at = {sequence, g, row};
            const int32_t position = position_in(&head, row);
            FDMA_TRY(check_position("state", at, position, header->seen));
            if (position >= 0)
                FDMA_TRY(check_page(cache, at));
        }
    }
    return check_pages(cache, sequence, header->rows);
}

fdma_status fdma_cache_restore(const fdma_cache *cache, int64_t sequence, const void *state,
                               size_t bytes) {
    state_header header;
    FDMA_TRY(check_sequence(cache, sequence));
    FDMA_TRY(check_bytes(state, bytes, &header));
    FDMA_TRY(check_header(cache, &header));
    FDMA_TRY(check_rows(cache, sequence, state, &header));
    FDMA_TRY(check_apart(cache, state, header.bytes));
    for (int64_t g = 0; g < cache->kv_heads; g++) {
        const state_head head = head_of(cache, state, header.rows, g);
        for (int64_t row = 0; row < rows_of_cache(cache); row++) {
            const cache_row at = {sequence, g, row};
            if (row < header.rows && position_in(&head, row) >= 0)
                move_row(cache, &head, at, false);
            else
                fdma_empty_cache_row(&cache->table, at);
        }
    }
    ((int32_t *)cache->table.seen.data)[sequence] = (int32_t)header.seen;
    return FDMA_OK;
}
