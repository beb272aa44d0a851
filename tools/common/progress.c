/* See common/progress.h. */
#define _POSIX_C_SOURCE 200809L

#include "common/progress.h"

#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>

enum { line_width = 79 };

void show_progress(const char *format, ...) {
    char line[line_width + 1];
    if (isatty(STDERR_FILENO) == 0)
        return;
    va_list values;
    va_start(values, format);
    vsnprintf(line, sizeof line, format, values);
    va_end(values);
    fprintf(stderr, "\r%-*s", line_width, line);
}

void clear_progress(void) {
    if (isatty(STDERR_FILENO) != 0)
        fprintf(stderr, "\r%*s\r", line_width, "");
}
