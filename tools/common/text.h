/* Text from outside (paths, arguments, names in files) on its way to a terminal or into JSON.
 * Control characters could steer the terminal, and bytes that are not UTF-8 make invalid JSON. */
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

/*! read_character() - the character at the beginning of a text that is not empty, and its bytes.
 *  Returns its code point, or -1 for a byte that does not begin a UTF-8 sequence. */
int32_t read_character(const char *text, size_t *length);

/*! print_text() - the text in one line: control characters and invalid bytes as \xNN. */
void print_text(FILE *stream, const char *text);

/*! print_error() - a formatted line on stderr, through print_text(). */
__attribute__((format(printf, 1, 2))) void print_error(const char *format, ...);
