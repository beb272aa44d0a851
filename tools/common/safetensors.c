/* The reader of safetensors headers; see common/safetensors.h. cJSON turns the text into a tree. It
 * accepts more than the format does (deep nesting, repeated keys, fractions, text after the end);
 * this file checks for these. */
#include "common/safetensors.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

typedef struct message_buffer {
    char *text;
    size_t size;
} message_buffer;

__attribute__((format(printf, 2, 3))) static int refuse(message_buffer message, const char *format,
                                                        ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(message.text, message.size, format, values);
    va_end(values);
    for (char *c = message.text; message.size > 0 && *c != '\0'; c++)
        if ((unsigned char)*c < ' ' ||
            *c == '\x7f') // names come from the file: the message stays one line
            *c = '?';
    return -1;
}

#ifdef FDMA_HAVE_CJSON

#include <cjson/cJSON.h>

enum {
    PREFIX_BYTES = 8,
    HEADER_LIMIT = 100000000,
    VALUE_LIMIT = 4000000, // values of two bytes or more, for which cJSON allocates some 80
    DEPTH_LIMIT = 4,       // the format needs 3: file, tensor, shape
};

static const struct {
    const char *name;
    uint64_t bits;
} dtypes[] = {
    {"F64", 64},    {"F32", 32},    {"F16", 16},        {"BF16", 16},       {"I64", 64},
    {"I32", 32},    {"I16", 16},    {"I8", 8},          {"U64", 64},        {"U32", 32},
    {"U16", 16},    {"U8", 8},      {"BOOL", 8},        {"C64", 64},        {"F8_E5M2", 8},
    {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E5M2FNUZ", 8}, {"F8_E4M3FNUZ", 8}, {"F6_E2M3", 6},
    {"F6_E3M2", 6}, {"F4", 4},
};

static uint64_t read_little_endian(const uint8_t *bytes) {
    uint64_t value = 0;
    for (int b = PREFIX_BYTES - 1; b >= 0; b--)
        value = value << 8 | bytes[b];
    return value;
}

/* Checks the text for NUL characters in names, which the tree would no longer show, and for
 * anything that would make the tree large or deep. */
static int check_text(const char *text, size_t count, message_buffer message) {
    bool in_string = false;
    int depth = 0;
    size_t values = 0;
    for (size_t at = 0; at < count; at++) {
        const char c = text[at];
        if (c == '\0' || (in_string && count - at >= 6 && memcmp(text + at, "\\u0000", 6) == 0))
            return refuse(message, "header: NUL character at byte %zu", at + PREFIX_BYTES);
        if (in_string) {
            at += c == '\\';
            in_string = c != '"';
            continue;
        }
        in_string = c == '"';
        depth += (c == '{' || c == '[') - (c == '}' || c == ']');
        values += c == ',';
        if (depth > DEPTH_LIMIT)
            return refuse(message, "header: nested deeper than %d levels at byte %zu", DEPTH_LIMIT,
                          at + PREFIX_BYTES);
        if (values > VALUE_LIMIT)
            return refuse(message, "header: more than %d values", VALUE_LIMIT);
    }
    return 0;
}

static bool is_digit(char c) { return c >= '0' && c <= '9'; }

/* Checks that numbers are written as plain integers: the tree no longer shows 0.0, 128e1, -0 and
 * 00. `text` is JSON without NUL characters. */
static int check_numbers(const char *text, size_t count, message_buffer message) {
    bool in_string = false;
    for (size_t at = 0; at < count; at++) {
        const char c = text[at];
        if (in_string) {
            at += c == '\\';
            in_string = c != '"';
            continue;
        }
        in_string = c == '"';
        if (c != '-' && !is_digit(c))
            continue;
        size_t digits = at, end = at;
        while (digits < count && is_digit(text[digits]))
            digits++;
        for (end = digits; end < count && strchr("+-.Ee0123456789", text[end]) != NULL; end++)
            continue;
        if (digits < end || (c == '0' && digits > at + 1))
            return refuse(message, "header: number '%.*s' at byte %zu, want a plain integer",
                          (int)(end - at < 32 ? end - at : 32), text + at, at + PREFIX_BYTES);
        at = end - 1;
    }
    return 0;
}

/* JSON numbers are doubles, in which integers above 2^53 are not exact. */
static int read_size(const cJSON *number, uint64_t *size) {
    const double limit = 9007199254740992.0;
    if (!cJSON_IsNumber(number) || !(number->valuedouble >= 0 && number->valuedouble <= limit))
        return -1;
    *size = (uint64_t)number->valuedouble;
    return (double)*size == number->valuedouble ? 0 : -1;
}

static int read_shape(const cJSON *shape, safetensors_entry *entry, uint64_t *elements,
                      message_buffer message) {
    if (!cJSON_IsArray(shape))
        return refuse(message, "tensor '%.64s': shape is missing or not an array", entry->name);
    *elements = 1;
    bool empty = false;
    const cJSON *axis;
    cJSON_ArrayForEach(axis, shape) {
        uint64_t length;
        if (read_size(axis, &length) != 0)
            return refuse(message,
                          "tensor '%.64s': shape[%" PRId64 "] is not an integer from 0 to 2^53",
                          entry->name, entry->rank);
        empty = empty || length == 0;
        if (length > 0 && *elements > INT64_MAX / length)
            return refuse(message, "tensor '%.64s': shape has more than 2^63 elements",
                          entry->name);
        *elements *= length > 0 ? length : 1;
        if (entry->rank < SAFETENSORS_RANK)
            entry->shape[entry->rank] = (int64_t)length;
        entry->rank++;
    }
    if (empty)
        *elements = 0;
    return 0;
}

static int read_dtype(const cJSON *dtype, safetensors_entry *entry, uint64_t *bits,
                      message_buffer message) {
    if (!cJSON_IsString(dtype))
        return refuse(message, "tensor '%.64s': dtype is missing or not a string", entry->name);
    for (size_t d = 0; d < sizeof dtypes / sizeof dtypes[0]; d++) {
        if (strcmp(dtypes[d].name, dtype->valuestring) == 0) {
            entry->dtype = dtypes[d].name;
            *bits = dtypes[d].bits;
            return 0;
        }
    }
    return refuse(message, "tensor '%.64s': unknown dtype '%.32s'", entry->name,
                  dtype->valuestring);
}

static int read_offsets(const cJSON *offsets, uint64_t data_bytes, safetensors_entry *entry,
                        message_buffer message) {
    uint64_t end;
    if (!cJSON_IsArray(offsets) || cJSON_GetArraySize(offsets) != 2 ||
        read_size(offsets->child, &entry->begin) != 0 || read_size(offsets->child->next, &end) != 0)
        return refuse(message, "tensor '%.64s': data_offsets is not two integers from 0 to 2^53",
                      entry->name);
    if (entry->begin > end || end > data_bytes)
        return refuse(message,
                      "tensor '%.64s': data_offsets [%" PRIu64 ", %" PRIu64 "] are no range"
                      " of the file's %" PRIu64 " bytes of data",
                      entry->name, entry->begin, end, data_bytes);
    entry->bytes = end - entry->begin;
    return 0;
}

/* Finds the three fields of a tensor. Each occurs once, and there are no others. */
static int find_fields(const cJSON *tensor, const cJSON *fields[3], message_buffer message) {
    static const char *const names[3] = {"dtype", "shape", "data_offsets"};
    if (!cJSON_IsObject(tensor))
        return refuse(message, "tensor '%.64s': not an object", tensor->string);
    const cJSON *field;
    cJSON_ArrayForEach(field, tensor) {
        int f = 0;
        while (f < 3 && strcmp(names[f], field->string) != 0)
            f++;
        if (f == 3)
            return refuse(message, "tensor '%.64s': unknown field '%.32s'", tensor->string,
                          field->string);
        if (fields[f] != NULL)
            return refuse(message, "tensor '%.64s': %s occurs twice", tensor->string, names[f]);
        fields[f] = field;
    }
    return 0;
}

static int read_entry(const cJSON *tensor, uint64_t data_bytes, safetensors_entry *entry,
                      message_buffer message) {
    const cJSON *fields[3] = {NULL, NULL, NULL};
    uint64_t bits = 8;
    uint64_t elements = 0;
    entry->name = tensor->string;
    if (find_fields(tensor, fields, message) != 0 ||
        read_dtype(fields[0], entry, &bits, message) != 0 ||
        read_shape(fields[1], entry, &elements, message) != 0 ||
        read_offsets(fields[2], data_bytes, entry, message) != 0)
        return -1;
    if (elements > UINT64_MAX / bits || elements * bits % 8 != 0 ||
        elements * bits / 8 != entry->bytes)
        return refuse(message,
                      "tensor '%.64s': its data do not fit its shape: bytes: %" PRIu64
                      ", elements of %s: %" PRIu64,
                      entry->name, entry->bytes, entry->dtype, elements);
    return 0;
}

static int check_metadata(const cJSON *metadata, message_buffer message) {
    if (!cJSON_IsObject(metadata))
        return refuse(message, "__metadata__: not an object");
    const cJSON *text;
    cJSON_ArrayForEach(text, metadata) {
        if (!cJSON_IsString(text))
            return refuse(message, "__metadata__: the value of '%.64s' is not a string",
                          text->string);
    }
    return 0;
}

static int by_name(const void *left, const void *right) {
    const cJSON *const *a = left;
    const cJSON *const *b = right;
    return strcmp((*a)->string, (*b)->string);
}

/* Names are sorted before they are compared: a hostile header may have a million of them. */
static int check_names(const cJSON *tree, size_t count, message_buffer message) {
    const cJSON **sorted = malloc((count + 1) * sizeof(*sorted));
    if (sorted == NULL)
        return refuse(message, "header: not enough memory for %zu names", count);
    size_t filled = 0;
    const cJSON *member;
    cJSON_ArrayForEach(member, tree) sorted[filled++] = member;
    qsort(sorted, filled, sizeof(*sorted), by_name);
    int status = 0;
    for (size_t n = 1; n < filled && status == 0; n++)
        if (strcmp(sorted[n - 1]->string, sorted[n]->string) == 0)
            status = refuse(message, "header: '%.64s' occurs twice", sorted[n]->string);
    free(sorted);
    return status;
}

static int by_offset(const void *left, const void *right) {
    const safetensors_entry *a = left;
    const safetensors_entry *b = right;
    if (a->begin != b->begin)
        return a->begin < b->begin ? -1 : 1;
    return (a->bytes > b->bytes) - (a->bytes < b->bytes);
}

/* In a valid file every byte of data belongs to exactly one tensor. */
static int check_cover(const safetensors *file, uint64_t data_bytes, message_buffer message) {
    uint64_t covered = 0;
    for (size_t e = 0; e < file->entry_count; e++) {
        const safetensors_entry *entry = &file->entries[e];
        if (entry->begin < covered)
            return refuse(message,
                          "tensor '%.64s': overlaps '%.64s' at byte %" PRIu64 " of the data",
                          entry->name, file->entries[e - 1].name, entry->begin);
        if (entry->begin > covered)
            return refuse(message,
                          "tensor '%.64s': begins at byte %" PRIu64 " of the data, want %" PRIu64,
                          entry->name, entry->begin, covered);
        covered += entry->bytes;
    }
    if (covered != data_bytes)
        return refuse(
            message, "data: ends at byte %" PRIu64 ", want %" PRIu64 ", the end of the last tensor",
            data_bytes, covered);
    return 0;
}

static int read_tree(safetensors *file, uint64_t data_begin, message_buffer message) {
    const size_t members = (size_t)cJSON_GetArraySize(file->header);
    const uint64_t data_bytes = file->count - data_begin;
    if (check_names(file->header, members, message) != 0)
        return -1;
    file->entries = calloc(members + 1, sizeof(*file->entries));
    if (file->entries == NULL)
        return refuse(message, "header: not enough memory for %zu tensors", members);
    const cJSON *member;
    cJSON_ArrayForEach(member, file->header) {
        const bool is_metadata = strcmp(member->string, "__metadata__") == 0;
        safetensors_entry *entry = &file->entries[file->entry_count];
        if ((is_metadata ? check_metadata(member, message)
                         : read_entry(member, data_bytes, entry, message)) != 0)
            return -1;
        file->entry_count += !is_metadata;
    }
    qsort(file->entries, file->entry_count, sizeof(*file->entries), by_offset);
    if (check_cover(file, data_bytes, message) != 0)
        return -1;
    for (size_t e = 0; e < file->entry_count; e++)
        file->entries[e].begin += data_begin;
    return 0;
}

static int parse_text(const char *text, size_t length, safetensors *file, message_buffer message) {
    if (length == 0 || text[0] != '{')
        return refuse(message, "not a safetensors file: the header does not begin with '{'");
    if (check_text(text, length, message) != 0)
        return -1;
    const char *end = text;
    file->header = cJSON_ParseWithLengthOpts(text, length, &end, 0);
    if (file->header == NULL)
        return refuse(message, "not a safetensors file: the header is not JSON at byte %td",
                      end - text + PREFIX_BYTES);
    while (end < text + length && *end == ' ')
        end++;
    if (end != text + length)
        return refuse(message, "header: text after its end, at byte %td",
                      end - text + PREFIX_BYTES);
    return read_tree(file, PREFIX_BYTES + length, message) == 0
               ? check_numbers(text, length, message)
               : -1;
}

int safetensors_parse(const uint8_t *bytes, size_t count, safetensors *file, char *message,
                      size_t message_size) {
    const message_buffer line = {message, message_size};
    *file = (safetensors){.bytes = bytes, .count = count};
    if (count < PREFIX_BYTES)
        return refuse(line, "not a safetensors file: its size in bytes is %zu, which is too few",
                      count);
    const uint64_t length = read_little_endian(bytes);
    if (length > HEADER_LIMIT)
        return refuse(line,
                      "not a safetensors file: its header would have %" PRIu64
                      " bytes, more than the limit of %d",
                      length, HEADER_LIMIT);
    if (length > count - PREFIX_BYTES)
        return refuse(line,
                      "not a safetensors file, or a truncated one: its header would have %" PRIu64
                      " bytes, the file has %zu",
                      length, count);
    if (parse_text((const char *)bytes + PREFIX_BYTES, (size_t)length, file, line) != 0) {
        safetensors_free(file);
        return -1;
    }
    return 0;
}

void safetensors_free(safetensors *file) {
    cJSON_Delete(file->header);
    free(file->entries);
    *file = (safetensors){0};
}

#else

int safetensors_parse(const uint8_t *bytes, size_t count, safetensors *file, char *message,
                      size_t message_size) {
    (void)bytes;
    (void)count;
    *file = (safetensors){0};
    return refuse((message_buffer){message, message_size},
                  "cannot be read: fdma is built without cJSON (libcjson-dev)");
}

void safetensors_free(safetensors *file) { *file = (safetensors){0}; }

#endif

const safetensors_entry *safetensors_find(const safetensors *file, const char *name) {
    for (size_t e = 0; e < file->entry_count; e++)
        if (strcmp(file->entries[e].name, name) == 0)
            return &file->entries[e];
    return NULL;
}
