/* See common/text.h. */
#include "common/text.h"

#include <stdarg.h>
#include <stdbool.h>
#include <stdlib.h>

/* Source: RFC 3629, UTF-8 */
int32_t read_character(const char *text, size_t *length) {
    static const struct {
        uint8_t mask, lead;
        int32_t smallest; /* a smaller code point has a shorter sequence */
    } forms[] = {{0x80, 0x00, 0}, {0xe0, 0xc0, 0x80}, {0xf0, 0xe0, 0x800}, {0xf8, 0xf0, 0x10000}};
    const uint8_t *bytes = (const uint8_t *)text;
    for (size_t extra = 0; extra < sizeof forms / sizeof forms[0]; extra++) {
        if ((bytes[0] & forms[extra].mask) != forms[extra].lead)
            continue;
        int32_t point = bytes[0] & ~forms[extra].mask;
        *length = 1;
        while (*length <= extra && (bytes[*length] & 0xc0) == 0x80)
            point = point << 6 | (bytes[(*length)++] & 0x3f);
        const bool is_surrogate = point >= 0xd800 && point <= 0xdfff;
        if (*length == extra + 1 && point >= forms[extra].smallest && point <= 0x10ffff &&
            !is_surrogate)
            return point;
        break;
    }
    *length = 1;
    return -1;
}

static void print_character(FILE *stream, const char *at, size_t length, int32_t point) {
    const bool is_control = point < ' ' || (point >= 0x7f && point <= 0x9f);
    if (!is_control) {
        fwrite(at, 1, length, stream);
        return;
    }
    for (size_t b = 0; b < length; b++)
        fprintf(stream, "\\x%02x", (unsigned char)at[b]);
}

void print_text(FILE *stream, const char *text) {
    size_t length;
    for (const char *at = text; *at != '\0'; at += length) {
        const int32_t point = read_character(at, &length);
        print_character(stream, at, length, point);
    }
}

void print_error(const char *format, ...) {
    char line[4096] = "", *text = line;
    va_list values, again;
    va_start(values, format);
    va_copy(again, values);
    const int length = vsnprintf(line, sizeof line, format, values);
    if (length >= (int)sizeof line && (text = malloc((size_t)length + 1)) != NULL)
        vsnprintf(text, (size_t)length + 1, format, again);
    va_end(again);
    va_end(values);
    print_text(stderr, text != NULL ? text : line); // out of memory: the line is cut
    fputc('\n', stderr);
    if (text != line)
        free(text);
}
