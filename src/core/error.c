/* The thread-local message that fdma_last_error() returns, and the version that messages name. */
#include "core/error.h"

#include <stdarg.h>
#include <stdio.h>

#define TEXT_OF(number) #number
#define VERSION_OF(major, minor, patch) TEXT_OF(major) "." TEXT_OF(minor) "." TEXT_OF(patch)

static _Thread_local char message[512];

const char *fdma_version(void) {
    return VERSION_OF(FDMA_VERSION_MAJOR, FDMA_VERSION_MINOR, FDMA_VERSION_PATCH);
}

fdma_status fdma_fail(fdma_status status, const char *format, ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(message, sizeof message, format, values);
    va_end(values);
    return status;
}

quoted_text fdma_quote(const char *given) {
    enum { longest = 64 };
    quoted_text quoted;
    char *end = quoted.text;
    for (int i = 0; given[i] != '\0'; i++) {
        const unsigned char c = (unsigned char)given[i];
        if (i == longest) {
            end += sprintf(end, "...");
            break;
        }
        end += sprintf(end, c >= ' ' && c <= '~' && c != '\\' ? "%c" : "\\x%02x", c);
    }
    *end = '\0';
    return quoted;
}

device_text fdma_device_text(int32_t device) {
    device_text result = {"the CPU"};
    if (device != FDMA_CPU)
        snprintf(result.text, sizeof result.text, "FDMA_CUDA(%d)", device - FDMA_CUDA(0));
    return result;
}

count_text fdma_count_text(int64_t count, const char *noun) {
    count_text result;
    snprintf(result.text, sizeof result.text, "%lld %s%s", (long long)count, noun,
             count == 1 ? "" : "s");
    return result;
}

const char *fdma_last_error(void) { return message; }

const char *fdma_status_name(fdma_status status) {
    static const char *const names[] = {
        "FDMA_OK",         "FDMA_INVALID_ARGUMENT", "FDMA_UNSUPPORTED", "FDMA_WORKSPACE_TOO_SMALL",
        "FDMA_CUDA_ERROR",
    };
    const size_t count = sizeof names / sizeof names[0];
    return (size_t)status < count ? names[status] : "unknown status";
}
