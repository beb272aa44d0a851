/* JSON files as trees of cJSON. */
#pragma once

#include <stddef.h>

/*! read_json() - the tree of a file that has one JSON object, for cJSON_Delete().
 *  Returns NULL with one line in `message` for a file that cannot be read or is not JSON */
struct cJSON *read_json(const char *path, char *message, size_t message_size);

/*! read_file() - all bytes of a file, and a zero behind them, for free().
 *  Returns NULL with one line in `message` for a file that cannot be read, or is too large */
char *read_file(const char *path, size_t *count, char *message, size_t message_size);

/*! find_json() - the entry of an object; NULL if it is absent or null. */
const struct cJSON *find_json(const struct cJSON *tree, const char *name);
