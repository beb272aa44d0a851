/* errors.h - what a call with bad arguments must answer. */
#pragma once

#include "fixture.h"

typedef struct expectation {
    fdma_status status;
    const char *words[3]; /* in the message, each as a word of its own */
    int data_only;        /* queries do not look at data and workspace: they return FDMA_OK */
} expectation;

static inline void check_status(fdma_status status, const expectation *want) {
    if (CHECK_INT(status, want->status)) {
        for (int i = 0; i < 3 && want->words[i] != NULL; i++)
            CHECK_WORD(fdma_last_error(), want->words[i]);
        CHECK(strchr(fdma_last_error(), '\n') == NULL);
    }
}

static inline void check_query(fdma_status status, const expectation *want) {
    if (want->data_only)
        CHECK_INT(status, FDMA_OK);
    else
        check_status(status, want);
}
