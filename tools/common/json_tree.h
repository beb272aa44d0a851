/* JSON files as trees of cJSON, and what is wrong with them. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct message_line {
    char *text;
    size_t size; /* room in bytes */
} message_line;

/*! refuse() - writes the line, cut to its size. Returns false, for the caller to return. */
__attribute__((format(printf, 2, 3))) bool refuse(message_line to, const char *format, ...);

/*! read_json() - the tree of a file that has one JSON object, for cJSON_Delete().
 *  Returns NULL with one line in `message` for a file that cannot be read or is not JSON */
struct cJSON *read_json(const char *path, char *message, size_t message_size);

/*! read_file() - all bytes of a file, and a zero behind them, for free().
 *  Returns NULL with one line in `message` for a file that cannot be read, or is too large */
char *read_file(const char *path, size_t *count, char *message, size_t message_size);

/*! find_json() - the entry of an object; NULL if it is absent or null. */
const struct cJSON *find_json(const struct cJSON *tree, const char *name);

/*! is_json_integer() - true for an integer from `least` to `most`, also if it is written as 7.0. */
bool is_json_integer(const struct cJSON *value, int64_t least, int64_t most);
