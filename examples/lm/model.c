/* See model.h. */
#include "model.h"

#include "common/arrays.h"
#include "common/safetensors.h"

#include <cjson/cJSON.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NAME_SIZE = 96 };
enum { MOST_LAYERS = 1000, MOST_WIDTH = MOST_COLUMNS / EXPANSION };

typedef struct reader {
    safetensors file;
    const cJSON *metadata;
    bool *used;             /* for each entry of the file: whether it was read */
    int64_t window, recent; /* of layers without NoPE heads */
    model *it;
    char *message;
    size_t message_size;
} reader;

__attribute__((format(printf, 2, 3))) static bool refuse(reader *from, const char *format, ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(from->message, from->message_size, format, values);
    va_end(values);
    return false;
}

/* ---- metadata ---- */

static bool has_text(const reader *from, const char *name) {
    return cJSON_GetObjectItemCaseSensitive(from->metadata, name) != NULL;
}

static const char *find_text(reader *from, const char *name) {
    const cJSON *const found = cJSON_GetObjectItemCaseSensitive(from->metadata, name);
    if (found == NULL)
        refuse(from, "metadata '%s': is missing", name);
    return found == NULL ? NULL : found->valuestring;
}

/* Reads a number that takes all of the `length` bytes. Returns false for other text, and for a
 * number that is not from `least` to `most`. */
static bool parse_integer(const char *text, size_t length, int64_t least, int64_t most,
                          int64_t *value) {
    char *end;
    const long long number = strtoll(text, &end, 10);
    *value = number;
    return length > 0 && end == text + length && number >= least && number <= most;
}

static bool read_integer(reader *from, const char *name, int64_t least, int64_t most,
                         int64_t *value) {
    const char *const text = find_text(from, name);
    if (text == NULL)
        return false;
    if (!parse_integer(text, strlen(text), least, most, value))
        return refuse(from,
                      "metadata '%s': is '%.32s', want an integer from %" PRId64 " to %" PRId64,
                      name, text, least, most);
    return true;
}

static bool read_number(reader *from, const char *name, double *value) {
    const char *const text = find_text(from, name);
    if (text == NULL)
        return false;
    char *end;
    *value = strtod(text, &end);
    if (end == text || *end != '\0' || !(*value > 0) || !isfinite(*value))
        return refuse(from, "metadata '%s': is '%.32s', want a number above 0", name, text);
    return true;
}

static bool read_rules(reader *from) {
    static const char *const forms[] = {"exp", "linear", "none"}; // fdma_bias_form
    model *const it = from->it;
    const char *const form = find_text(from, "bias_form"), *const window =
                                                               find_text(from, "window");
    if (form == NULL || window == NULL)
        return false;
    int n = 0;
    while (n < 3 && strcmp(forms[n], form) != 0)
        n++;
    if (n == 3)
        return refuse(from, "metadata 'bias_form': is '%.32s', want exp, linear or none", form);
    it->bias_form = (fdma_bias_form)n;
    if (strcmp(window, "all") == 0) {
        from->window = FDMA_WINDOW_ALL;
        if (it->bias_form != FDMA_BIAS_NONE)
            return refuse(from, "metadata 'bias_form': is '%s', want none for window 'all'", form);
        return true;
    }
    return read_integer(from, "window", 1, INT32_MAX / 2, &from->window) &&
           read_integer(from, "recent", 0, INT32_MAX / 2, &from->recent) &&
           read_integer(from, "sinks", 0, from->window, &it->sinks);
}

/* Without this entry the queries and keys are not normalized. */
static bool read_qk_norm(reader *from) {
    int64_t value = 0;
    if (has_text(from, "qk_norm") && !read_integer(from, "qk_norm", 0, 1, &value))
        return false;
    from->it->qk_norm = value == 1;
    return true;
}

static bool read_metadata(reader *from) {
    model *const it = from->it;
    if (!read_integer(from, "layers", 1, MOST_LAYERS, &it->layers) ||
        !read_integer(from, "width", 8, MOST_WIDTH, &it->width) ||
        !read_integer(from, "q_heads", 1, it->width, &it->q_heads) ||
        !read_integer(from, "kv_heads", 1, it->q_heads, &it->kv_heads) ||
        !read_integer(from, "head_dim", 8, 256, &it->head_dim) ||
        !read_number(from, "rotary_base", &it->rotary_base) ||
        !read_number(from, "norm_eps", &it->norm_eps) || !read_rules(from) || !read_qk_norm(from))
        return false;
    if (it->head_dim % 8 != 0)
        return refuse(from, "metadata 'head_dim': is %" PRId64 ", want a multiple of 8",
                      it->head_dim);
    if (it->q_heads * it->head_dim != it->width)
        return refuse(from, "metadata 'width': is %" PRId64 ", want q_heads * head_dim, %" PRId64,
                      it->width, it->q_heads * it->head_dim);
    if (it->q_heads % it->kv_heads != 0)
        return refuse(from,
                      "metadata 'kv_heads': is %" PRId64 ", want a divisor of q_heads, %" PRId64,
                      it->kv_heads, it->q_heads);
    return true;
}

/* A count for each layer, or none at all: then no layer has NoPE heads. */
static bool read_nope_heads(reader *from, const char *text) {
    model *const it = from->it;
    const char *rest = text + strspn(text, " ");
    int64_t counts = 0;
    for (; *rest != '\0'; rest += strspn(rest, " "), counts++) {
        const size_t length = strcspn(rest, " ");
        int64_t count;
        if (!parse_integer(rest, length, 0, it->kv_heads, &count))
            return refuse(from,
                          "metadata 'nope': count %" PRId64
                          " is '%.*s', want an integer from 0 to %" PRId64,
                          counts, (int)(length < 32 ? length : 32), rest, it->kv_heads);
        if (counts < it->layers)
            it->layer[counts].nope_heads = count;
        rest += length;
    }
    if (counts != 0 && counts != it->layers)
        return refuse(from,
                      "metadata 'nope': has %" PRId64 " count%s, want one for each layer, %" PRId64,
                      counts, counts == 1 ? "" : "s", it->layers);
    return true;
}

/* Counts and channels that the metadata does not have stay 0. */
static bool read_nope(reader *from) {
    model *const it = from->it;
    if (has_text(from, "nope") && !read_nope_heads(from, find_text(from, "nope")))
        return false;
    if (!has_text(from, "nope_rotary_dim"))
        return true;
    if (!read_integer(from, "nope_rotary_dim", 0, it->head_dim, &it->nope_rotary_dim))
        return false;
    if (it->nope_rotary_dim % 2 != 0)
        return refuse(from, "metadata 'nope_rotary_dim': is %" PRId64 ", want an even number",
                      it->nope_rotary_dim);
    return true;
}

/* An optional number of the layers that have NoPE heads, which a model that attends to all keys
 * does not have. */
static bool read_own(reader *from, const char *name, int64_t least, int64_t *value) {
    if (!has_text(from, name))
        return true;
    if (from->window == FDMA_WINDOW_ALL)
        return refuse(from, "metadata '%s': is '%.32s', want no entry for window 'all'", name,
                      find_text(from, name));
    return read_integer(from, name, least, INT32_MAX / 2, value);
}

/* The layers that have NoPE heads may have a window and a number of newest keys of their own. */
static bool read_windows(reader *from) {
    const model *const it = from->it;
    int64_t window = from->window, recent = from->recent;
    if (!read_own(from, "nope_window", it->sinks > 1 ? it->sinks : 1, &window) ||
        !read_own(from, "nope_recent", 0, &recent))
        return false;
    for (int64_t n = 0; n < it->layers; n++) {
        const bool has_own = it->layer[n].nope_heads > 0;
        it->layer[n].window = has_own ? window : from->window;
        it->layer[n].recent = has_own ? recent : from->recent;
    }
    return true;
}

/* ---- tensors ---- */

static bool check_shape(reader *from, const safetensors_entry *entry, int64_t rank,
                        const int64_t shape[2]) {
    if (entry->rank != rank)
        return refuse(from, "tensor '%s': rank is %" PRId64 ", want %" PRId64, entry->name,
                      entry->rank, rank);
    for (int axis = 0; axis < rank; axis++)
        if (entry->shape[axis] != shape[axis])
            return refuse(from, "tensor '%s': axis %d has %" PRId64 " element%s, want %" PRId64,
                          entry->name, axis, entry->shape[axis], entry->shape[axis] == 1 ? "" : "s",
                          shape[axis]);
    return true;
}

static const safetensors_entry *find_entry(reader *from, const char *name, int64_t rank,
                                           const int64_t shape[2]) {
    const safetensors_entry *const entry = safetensors_find(&from->file, name);
    if (entry == NULL) {
        refuse(from, "tensor '%s': is missing", name);
        return NULL;
    }
    from->used[entry - from->file.entries] = true;
    return check_shape(from, entry, rank, shape) ? entry : NULL;
}

/* The bytes of a tensor, in aligned memory. */
static void *copy_bytes(reader *from, const safetensors_entry *entry) {
    from->it->bytes += entry->bytes;
    return memcpy(allocate(entry->bytes), from->file.bytes + entry->begin, entry->bytes);
}

static bool read_scale(reader *from, const char *name, matrix *w) {
    char scale[NAME_SIZE];
    snprintf(scale, sizeof scale, "%s.scale", name);
    const safetensors_entry *const entry = find_entry(from, scale, 1, (int64_t[]){w->rows, 0});
    if (entry == NULL)
        return false;
    if (strcmp(entry->dtype, "F32") != 0)
        return refuse(from, "tensor '%s': dtype is %s, want F32", scale, entry->dtype);
    w->scale = copy_bytes(from, entry);
    return true;
}

/* A vector, of rank 1, is read as a matrix of one row. */
static bool read_tensor(reader *from, const char *name, int64_t rank, const int64_t shape[2],
                        matrix *w) {
    static const char *const dtypes[] = {"F32", "BF16", "I8"}; // matrix_kind
    const safetensors_entry *const entry = find_entry(from, name, rank, shape);
    if (entry == NULL)
        return false;
    const int kinds = rank == 2 ? 3 : 2;
    int kind = 0;
    while (kind < kinds && strcmp(dtypes[kind], entry->dtype) != 0)
        kind++;
    if (kind == kinds)
        return refuse(from, "tensor '%s': dtype is %s, want F32%s", name, entry->dtype,
                      rank == 2 ? ", BF16 or I8" : " or BF16");
    w->kind = (matrix_kind)kind;
    w->rows = rank == 2 ? shape[0] : 1;
    w->columns = shape[rank - 1];
    w->data = copy_bytes(from, entry);
    return w->kind != MATRIX_INT8 || read_scale(from, name, w);
}

static bool read_matrix(reader *from, const char *name, int64_t rows, int64_t columns, matrix *w) {
    return read_tensor(from, name, 2, (int64_t[]){rows, columns}, w);
}

static void free_matrix(matrix *w) {
    free(w->data);
    free(w->scale);
}

/* A tensor that is float32 in memory, whatever it is in the file. */
static bool read_floats(reader *from, const char *name, int64_t rank, const int64_t shape[2],
                        float **values) {
    matrix stored = {0};
    const bool found = read_tensor(from, name, rank, shape, &stored);
    if (found) {
        *values = allocate((size_t)(stored.rows * stored.columns) * sizeof **values);
        for (int64_t r = 0; r < stored.rows; r++)
            widen_row(&stored, r, *values + r * stored.columns);
    }
    free_matrix(&stored);
    return found;
}

static bool read_layer(reader *from, int n) {
    const model *const it = from->it;
    layer *const one = &it->layer[n];
    const int64_t width = it->width, kv_width = it->kv_heads * it->head_dim;
    const struct {
        const char *name;
        int64_t rows, columns;
        matrix *w;
    } matrices[] = {
        {"attention.q_proj.weight", width, width, &one->q_proj},
        {"attention.k_proj.weight", kv_width, width, &one->k_proj},
        {"attention.v_proj.weight", kv_width, width, &one->v_proj},
        {"attention.o_proj.weight", width, width, &one->o_proj},
        {"expand.weight", EXPANSION * width, width, &one->expand},
        {"contract.weight", width, EXPANSION * width, &one->contract},
    };
    const bool has_scores = one->window != FDMA_WINDOW_ALL;
    const struct {
        const char *name;
        bool is_wanted;
        int64_t rank, shape[2];
        float **values;
    } floats[] = {
        {"attention_norm.weight", true, 1, {width, 0}, &one->attention_norm},
        {"norm.weight", true, 1, {width, 0}, &one->norm},
        {"attention.q_norm.weight", it->qk_norm, 1, {it->head_dim, 0}, &one->q_norm},
        {"attention.k_norm.weight", it->qk_norm, 1, {it->head_dim, 0}, &one->k_norm},
        {"attention.A", has_scores, 1, {it->kv_heads, 0}, &one->a},
        {"attention.dt_proj.weight", has_scores, 2, {it->kv_heads, kv_width}, &one->dt_proj},
    };
    char name[NAME_SIZE];
    for (size_t m = 0; m < sizeof matrices / sizeof matrices[0]; m++) {
        snprintf(name, sizeof name, "blocks.%d.%s", n, matrices[m].name);
        if (!read_matrix(from, name, matrices[m].rows, matrices[m].columns, matrices[m].w))
            return false;
    }
    for (size_t f = 0; f < sizeof floats / sizeof floats[0]; f++) {
        snprintf(name, sizeof name, "blocks.%d.%s", n, floats[f].name);
        if (floats[f].is_wanted &&
            !read_floats(from, name, floats[f].rank, floats[f].shape, floats[f].values))
            return false;
    }
    if (!has_scores) {
        one->a = allocate((size_t)it->kv_heads * sizeof *one->a);
        one->dt_proj = allocate((size_t)(it->kv_heads * kv_width) * sizeof *one->dt_proj);
    }
    return true;
}

static bool read_all(reader *from) {
    model *const it = from->it;
    if (from->metadata == NULL)
        return refuse(from, "has no __metadata__, want that of a language model");
    if (!read_metadata(from))
        return false;
    it->layer = allocate((size_t)it->layers * sizeof *it->layer);
    if (!read_nope(from) || !read_windows(from) ||
        !read_matrix(from, "embedding.weight", BYTE_VALUES, it->width, &it->embedding) ||
        !read_matrix(from, "head.weight", BYTE_VALUES, it->width, &it->head) ||
        !read_floats(from, "norm.weight", 1, (int64_t[]){it->width, 0}, &it->norm))
        return false;
    for (int n = 0; n < it->layers; n++)
        if (!read_layer(from, n))
            return false;
    for (size_t e = 0; e < from->file.entry_count; e++)
        if (!from->used[e])
            return refuse(from, "tensor '%.64s': is none of this model's",
                          from->file.entries[e].name);
    return true;
}

int read_model(const char *path, model *it, char *message, size_t message_size) {
    reader from = {.it = it, .message = message, .message_size = message_size};
    *it = (model){0};
    if (safetensors_open(path, &from.file, message, message_size) != 0)
        return -1;
    from.metadata = cJSON_GetObjectItemCaseSensitive(from.file.header, "__metadata__");
    from.used = allocate(from.file.entry_count * sizeof *from.used);
    const bool is_read = read_all(&from);
    free(from.used);
    safetensors_close(&from.file);
    return is_read ? 0 : -1;
}

void free_model(model *it) {
    for (int64_t n = 0; it->layer != NULL && n < it->layers; n++) {
        layer *const one = &it->layer[n];
        matrix *const matrices[] = {&one->q_proj, &one->k_proj, &one->v_proj,
                                    &one->o_proj, &one->expand, &one->contract};
        float *const floats[] = {one->attention_norm, one->norm,    one->q_norm,
                                 one->k_norm,         one->dt_proj, one->a};
        for (size_t m = 0; m < sizeof matrices / sizeof matrices[0]; m++)
            free_matrix(matrices[m]);
        for (size_t f = 0; f < sizeof floats / sizeof floats[0]; f++)
            free(floats[f]);
    }
    free_matrix(&it->embedding);
    free_matrix(&it->head);
    free(it->norm);
    free(it->layer);
}
