/* The status of a call and the one line that explains it. */
#pragma once

#include "fdma.h"

/* Writes this thread's message and returns `status`. */
__attribute__((format(printf, 2, 3))) fdma_status fdma_fail(fdma_status status, const char *format,
                                                            ...);

/* Text of the caller's, made safe for a message: at most 64 characters, with everything that is not
 * printable ASCII as \xNN, so that it can neither control a terminal nor be invalid UTF-8. */
typedef struct quoted_text {
    char text[4 * 64 + 4];
} quoted_text;

quoted_text fdma_quote(const char *given);

/* A value of exec.device as a reader would write it: "the CPU", "FDMA_CUDA(1)". */
typedef struct device_text {
    char text[24];
} device_text;

device_text fdma_device_text(int32_t device);

/* "1 element" or "2 elements". */
typedef struct count_text {
    char text[40];
} count_text;

count_text fdma_count_text(int64_t count, const char *noun);

#define FDMA_REQUIRE(condition, status, ...)                                                       \
    do {                                                                                           \
        if (!(condition))                                                                          \
            return fdma_fail(status, __VA_ARGS__);                                                 \
    } while (0)

#define FDMA_TRY(call)                                                                             \
    do {                                                                                           \
        const fdma_status try_status = (call);                                                     \
        if (try_status != FDMA_OK)                                                                 \
            return try_status;                                                                     \
    } while (0)
