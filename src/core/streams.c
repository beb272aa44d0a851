/* The keys of a table, sorted by position, followed by the keys of the call, form a sequence.
 * Selecting from this sequence gives the selection of the stream: a key that is not in the table
 * was evicted and does not compete any more. So a kernel that does not take tables selects from a
 * copy of the scores in this order, in which each (b, g) is a sequence of its own. Its slots become
 * rows of the table.
 *
 * Empty rows stand first, as keys that are not valid, so that the keys of the call keep their
 * indices. */
#include "core/streams.h"

#include "core/adapter.h"
#include "core/element.h"
#include "core/integers.h"

#include <math.h>
#include <string.h>

typedef struct stream_scratch {
    uint8_t *score;        /* [heads, kv_len] of the problem's dtype, in the order of positions */
    uint8_t *valid;        /* [heads, kv_len] */
    int32_t *expiry;       /* [heads, kv_len] */
    int32_t *slot;         /* [heads, kv_len] */
    int32_t *row;          /* [heads, rows]: the row of each carried key */
    int64_t *keys, *spare; /* [rows] each: of the head that is sorted */
} stream_scratch;

static stream_scratch take_scratch(fdma_arena *arena, const fdma_problem *stream) {
    const size_t heads = (size_t)(stream->batch * stream->kv_heads);
    const size_t rows = (size_t)stream->carried_len, keys = heads * (size_t)stream->kv_len;
    stream_scratch scratch;
    scratch.score = fdma_arena_take(arena, keys * fdma_dtype_size(stream->dtype));
    scratch.valid = fdma_arena_take(arena, keys);
    scratch.expiry = fdma_arena_take(arena, keys * sizeof *scratch.expiry);
    scratch.slot = fdma_arena_take(arena, keys * sizeof *scratch.slot);
    scratch.row = fdma_arena_take(arena, heads * rows * sizeof *scratch.row);
    scratch.keys = fdma_arena_take(arena, rows * sizeof *scratch.keys);
    scratch.spare = fdma_arena_take(arena, rows * sizeof *scratch.spare);
    return scratch;
}

static fdma_problem sequence_of(const fdma_problem *stream, const stream_scratch *scratch) {
    const int64_t heads = stream->batch * stream->kv_heads, len = stream->kv_len;
    fdma_problem one = *stream;
    one.table_in = one.table_out = (fdma_table){0};
    one.batch = heads;
    one.kv_heads = 1;
    one.new_len = len;
    one.carried_len = 0;
    one.score = fdma_tensor_3d(scratch->score, stream->dtype, heads, 1, len);
    one.key_valid = fdma_tensor_2d(scratch->valid, FDMA_UINT8, heads, len);
    one.expiry = fdma_tensor_3d(scratch->expiry, FDMA_INT32, heads, 1, len);
    one.slot = fdma_tensor_3d(scratch->slot, FDMA_INT32, heads, 1, len);
    return one;
}

/* Merge sort. Returns the buffer that holds the sorted numbers. */
static int64_t *sort_numbers(int64_t *numbers, int64_t *spare, int64_t count) {
    for (int64_t run = 1; run < count; run *= 2) {
        for (int64_t first = 0; first < count; first += 2 * run) {
            const int64_t middle = min(first + run, count), end = min(first + 2 * run, count);
            int64_t left = first, right = middle;
            for (int64_t n = first; n < end; n++) {
                const bool from_left =
                    left < middle && (right == end || numbers[left] <= numbers[right]);
                spare[n] = from_left ? numbers[left++] : numbers[right++];
            }
        }
        int64_t *const sorted = spare;
        spare = numbers;
        numbers = sorted;
    }
    return numbers;
}

/* Sorts the rows of one (b, g) by position, empty ones first. */
static void sort_rows(const fdma_problem *stream, int64_t b, int64_t g,
                      const stream_scratch *scratch, int32_t *row) {
    const fdma_tensor *const tensor = &stream->table_in.position;
    const int32_t *const position = (const int32_t *)tensor->data + offset_of(tensor, b, g, 0);
    for (int64_t n = 0; n < stream->carried_len; n++)
        scratch->keys[n] = max(position[n], -1) * ((int64_t)1 << 32) + n;
    const int64_t *const sorted = sort_numbers(scratch->keys, scratch->spare, stream->carried_len);
    for (int64_t n = 0; n < stream->carried_len; n++)
        row[n] = (int32_t)(sorted[n] & INT32_MAX);
}

static void fill_sequence(const fdma_problem *stream, int64_t b, int64_t g, const int32_t *row,
                          fdma_problem *one) {
    const fdma_table *const table = &stream->table_in;
    const size_t size = fdma_dtype_size(stream->dtype);
    const int64_t rows = stream->carried_len, head = b * stream->kv_heads + g;
    uint8_t *const score = (uint8_t *)one->score.data + (size_t)(head * stream->kv_len) * size;
    uint8_t *const valid = (uint8_t *)one->key_valid.data + head * stream->kv_len;
    for (int64_t n = 0; n < rows; n++) {
        const int64_t from = offset_of(&table->score, b, g, row[n]);
        const int64_t position = offset_of(&table->position, b, g, row[n]);
        memcpy(score + (size_t)n * size, (const uint8_t *)table->score.data + (size_t)from * size,
               size);
        valid[n] = ((const int32_t *)table->position.data)[position] >= 0;
    }
    if (stream->new_len > 0) // otherwise the score may have no memory
        memcpy(score + (size_t)rows * size,
               (const uint8_t *)stream->score.data +
                   (size_t)offset_of(&stream->score, b, g, 0) * size,
               (size_t)stream->new_len * size);
    for (int64_t j = 0; j < stream->new_len; j++)
        valid[rows + j] = is_valid_key(stream, b, j);
}

/* Row of a slot. The first slots belong to the valid carried keys, which keep their rows; each
 * later slot takes the next empty row. */
static int32_t row_of_slot(const int32_t *row, int64_t rows, int64_t empty, int32_t slot) {
    return slot < rows - empty ? row[empty + slot] : row[slot - (rows - empty)];
}

/* Writes the selection of one (b, g) from the selection of its sequence. Slots become rows of the
 * table if the table has a row for each slot. Some carried keys may be evicted by others before the
 * keys of the call. */
static void write_selection(const fdma_problem *stream, int64_t b, int64_t g, const int32_t *row,
                            const fdma_problem *one) {
    const int64_t rows = stream->carried_len;
    const int64_t first = (b * stream->kv_heads + g) * stream->kv_len;
    const uint8_t *const valid = (const uint8_t *)one->key_valid.data + first;
    const int32_t *const expiry = (const int32_t *)one->expiry.data + first;
    const int32_t *const slot = (const int32_t *)one->slot.data + first;
    int32_t *const to = (int32_t *)stream->expiry.data + offset_of(&stream->expiry, b, g, 0);
    int32_t *const to_slot = (int32_t *)stream->slot.data + offset_of(&stream->slot, b, g, 0);
    const bool slots_are_rows = rows == stream->slots;
    int64_t empty = 0;
    for (int64_t n = 0; n < rows; n++) {
        const bool is_kept = valid[n] && expiry[n] >= rows;
        to[row[n]] = is_kept ? expiry[n] : row[n];
        to_slot[row[n]] = !is_kept ? -1 : slots_are_rows ? row[n] : slot[n];
        empty += !valid[n];
    }
    memcpy(to + rows, expiry + rows, (size_t)stream->new_len * sizeof *to);
    for (int64_t j = rows; j < stream->kv_len; j++)
        to_slot[j] =
            slot[j] < 0 || !slots_are_rows ? slot[j] : row_of_slot(row, rows, empty, slot[j]);
}

/* Writes one row of table_out. Score -inf and position -1 make it empty. */
static void write_row(const fdma_problem *stream, int64_t b, int64_t g, int64_t row, double score,
                      int32_t position) {
    const fdma_table *const table = &stream->table_out;
    ((int32_t *)table->position.data)[offset_of(&table->position, b, g, row)] = position;
    fdma_store(&table->score, offset_of(&table->score, b, g, row), score);
}

/* Writes table_out of one (b, g): the keys that are kept to the end. */
static void write_table(const fdma_problem *stream, int64_t b, int64_t g) {
    const fdma_table *const in = &stream->table_in;
    const int64_t rows = stream->carried_len;
    const int64_t head = offset_of(&stream->expiry, b, g, 0), end = stream->kv_len;
    const int32_t *const expiry = (const int32_t *)stream->expiry.data + head;
    const int32_t *const slot =
        (const int32_t *)stream->slot.data + offset_of(&stream->slot, b, g, 0);
    const int32_t seen = is_present(&in->seen) ? ((const int32_t *)in->seen.data)[b] : 0;
    for (int64_t n = 0; n < stream->slots; n++)
        write_row(stream, b, g, n, -INFINITY, -1);
    for (int64_t j = 0; j < end; j++) {
        const int64_t own = j - rows; // among the keys of the call
        if (expiry[j] < end)
            continue;
        if (own < 0)
            write_row(stream, b, g, j, fdma_load(&in->score, offset_of(&in->score, b, g, j)),
                      ((const int32_t *)in->position.data)[offset_of(&in->position, b, g, j)]);
        else
            write_row(stream, b, g, slot[j],
                      fdma_load(&stream->score, offset_of(&stream->score, b, g, own)),
                      (int32_t)(seen + own));
    }
    ((int32_t *)stream->table_out.seen.data)[b] = (int32_t)(seen + stream->new_len);
}

static fdma_status select_carried(const adapted_kernel *inner, const fdma_problem *stream) {
    fdma_arena arena = fdma_arena_of(stream);
    const stream_scratch scratch = take_scratch(&arena, stream);
    fdma_problem one = sequence_of(stream, &scratch);
    const int64_t heads = one.batch, rows = stream->carried_len;
    fdma_set_aside(&one.exec, &arena);
    for (int64_t head = 0; head < heads; head++) {
        int32_t *const row = scratch.row + head * rows;
        const int64_t b = head / stream->kv_heads, g = head % stream->kv_heads;
        sort_rows(stream, b, g, &scratch, row);
        fill_sequence(stream, b, g, row, &one);
    }
    const fdma_status status = fdma_run_adapted(inner, &one);
    for (int64_t head = 0; head < heads && status == FDMA_OK; head++)
        write_selection(stream, head / stream->kv_heads, head % stream->kv_heads,
                        scratch.row + head * rows, &one);
    return status;
}

static bool applies(const fdma_kernel *kernel, const fdma_problem *problem) {
    (void)kernel;
    return has_table(problem);
}

static size_t workspace(const adapted_kernel *inner, const fdma_problem *stream,
                        check_depth depth) {
    if (!is_present(&stream->table_in.score))
        return fdma_adapted_workspace(inner, stream, depth);
    fdma_arena arena = {0};
    const stream_scratch scratch = take_scratch(&arena, stream);
    const fdma_problem one = sequence_of(stream, &scratch);
    return fdma_arena_size(&arena) + fdma_adapted_workspace(inner, &one, depth);
}

static fdma_status run(const adapted_kernel *inner, const fdma_problem *stream) {
    const bool carried = is_present(&stream->table_in.score);
    const fdma_status status =
        carried ? select_carried(inner, stream) : fdma_run_adapted(inner, stream);
    if (status != FDMA_OK || !is_present(&stream->table_out.score))
        return status;
    for (int64_t b = 0; b < stream->batch; b++)
        for (int64_t g = 0; g < stream->kv_heads; g++)
            write_table(stream, b, g);
    return FDMA_OK;
}

const kernel_adapter fdma_stream_adapter = {applies, workspace, run};
