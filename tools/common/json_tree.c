/* See common/json_tree.h. */
#include "common/json_tree.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_BYTES = 1 << 28 };

bool refuse(message_line to, const char *format, ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(to.text, to.size, format, values);
    va_end(values);
    return false;
}

/* All bytes of a stream, and a zero. Returns NULL if it cannot be read or has too many. */
static char *read_all(FILE *stream, size_t *count) {
    size_t room = 1 << 16;
    char *bytes = malloc(room);
    *count = 0;
    while (bytes != NULL) {
        *count += fread(bytes + *count, 1, room - *count - 1, stream);
        if (*count < room - 1)
            break;
        room *= 2;
        char *const grown = room <= MOST_BYTES ? realloc(bytes, room) : NULL;
        if (grown == NULL)
            free(bytes);
        bytes = grown;
    }
    if (bytes != NULL)
        bytes[*count] = '\0';
    return bytes;
}

char *read_file(const char *path, size_t *count, char *message, size_t message_size) {
    FILE *const stream = fopen(path, "rb");
    if (stream == NULL) {
        snprintf(message, message_size, "cannot be opened: %s", strerror(errno));
        return NULL;
    }
    char *bytes = read_all(stream, count);
    if (bytes == NULL || ferror(stream) != 0) {
        snprintf(message, message_size, "cannot be read, or has more than %d bytes", MOST_BYTES);
        free(bytes);
        bytes = NULL;
    }
    fclose(stream);
    return bytes;
}

cJSON *read_json(const char *path, char *message, size_t message_size) {
    size_t count = 0;
    char *const bytes = read_file(path, &count, message, message_size);
    if (bytes == NULL)
        return NULL;
    const char *end = bytes;
    cJSON *tree = cJSON_ParseWithLengthOpts(bytes, count, &end, false);
    const bool is_whole = strspn(end, " \t\r\n") == (size_t)(bytes + count - end);
    if (!cJSON_IsObject(tree) || !is_whole) {
        snprintf(message, message_size,
                 cJSON_IsObject(tree) ? "has more behind its JSON object, want nothing there"
                                      : "is no JSON object");
        cJSON_Delete(tree);
        tree = NULL;
    }
    free(bytes);
    return tree;
}

const cJSON *find_json(const cJSON *tree, const char *name) {
    const cJSON *const found = cJSON_GetObjectItemCaseSensitive(tree, name);
    return cJSON_IsNull(found) ? NULL : found;
}

bool is_json_integer(const cJSON *value, int64_t least, int64_t most) {
    return cJSON_IsNumber(value) && value->valuedouble >= (double)least &&
           value->valuedouble <= (double)most && value->valuedouble == floor(value->valuedouble);
}
