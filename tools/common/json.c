/* See json.h. */
#include "common/json.h"

#include <inttypes.h>
#include <math.h>

void json_string(FILE *stream, const char *text) {
    if (!text) {
        fputs("null", stream);
        return;
    }
    fputc('"', stream);
    for (const unsigned char *c = (const unsigned char *)text; *c; c++) {
        if (*c == '"' || *c == '\\')
            fprintf(stream, "\\%c", *c);
        else if (*c < ' ')
            fprintf(stream, "\\u%04x", *c);
        else
            fputc(*c, stream);
    }
    fputc('"', stream);
}

void json_number(FILE *stream, double number) {
    if (isfinite(number))
        fprintf(stream, "%.6g", number);
    else
        fputs("null", stream);
}

void json_shape(FILE *stream, const fdma_tensor *tensor) {
    for (int axis = 0; axis < tensor->rank; axis++)
        fprintf(stream, "%s%" PRId64, axis ? ", " : "[", tensor->shape[axis]);
    fputc(']', stream);
}
