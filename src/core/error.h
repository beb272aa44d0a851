/* The status of a call and the one line that explains it. */
#ifndef FDMA_CORE_ERROR_H
#define FDMA_CORE_ERROR_H

#include "fdma.h"

/* Writes this thread's message and returns `status`. */
__attribute__((format(printf, 2, 3))) fdma_status fdma_fail(fdma_status status, const char *format,
                                                            ...);

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

#endif
