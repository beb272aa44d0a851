/* See common/json.h. */
#include "common/json.h"

#include "common/text.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

void json_string(FILE *stream, const char *text) {
    if (text == NULL)
        fputs("null", stream);
    else
        json_text(stream, text, strlen(text));
}

void json_text(FILE *stream, const char *text, size_t count) {
    fputc('"', stream);
    size_t length;
    for (const char *at = text; at < text + count; at += length) {
        const int32_t point = read_character(at, &length);
        if (point == '"' || point == '\\')
            fprintf(stream, "\\%c", *at);
        else if (point < ' ' || (point >= 0x7f && point <= 0x9f)) // controls, and -1
            fprintf(stream, "\\u%04x", point < 0 ? 0xfffdU : (unsigned)point);
        else
            fwrite(at, 1, length, stream);
    }
    fputc('"', stream);
}

void json_number(FILE *stream, double number) {
    if (isfinite(number))
        fprintf(stream, "%.6g", number);
    else
        fputs("null", stream);
}

void json_bool(FILE *stream, bool value) { fputs(value ? "true" : "false", stream); }

void json_shape(FILE *stream, const fdma_tensor *tensor) {
    for (int axis = 0; axis < tensor->rank; axis++)
        fprintf(stream, "%s%" PRId64, axis > 0 ? ", " : "[", tensor->shape[axis]);
    fputc(']', stream);
}
