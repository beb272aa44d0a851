/* errors.h - what the tests of bad arguments share: what a call must answer, and how it is held to
 * that. */
#ifndef ERRORS_H
#define ERRORS_H

#include "fixture.h"

typedef struct expectation {
    fdma_status status;
    const char *words[3]; /* in the message, each a word of its own */
    int data_only;        /* the queries do not look at data: they say FDMA_OK */
} expectation;

static inline void check_status(fdma_status status, const expectation *want) {
    if (CHECK_INT(status, want->status)) {
        for (int i = 0; i < 3 && want->words[i] != NULL; i++) {
            CHECK_WORD(fdma_last_error(), want->words[i]);
        }
        CHECK(strchr(fdma_last_error(), '\n') == NULL);
    }
}

static inline void check_query(fdma_status status, const expectation *want) {
    if (want->data_only) {
        CHECK_INT(status, FDMA_OK);
    } else {
        check_status(status, want);
    }
}

/* Outputs are filled with this before a call that must not write them. */
static const unsigned char untouched_byte = 0x5a;

static inline void fill_untouched(fdma_tensor tensor) {
    memset(tensor.data, untouched_byte, bytes_of(tensor));
}

static inline void check_untouched(fdma_tensor tensor) {
    unsigned char *want = test_alloc(bytes_of(tensor));
    memset(want, untouched_byte, bytes_of(tensor));
    CHECK_BYTES(tensor.data, want, bytes_of(tensor));
}

enum { output_limit = 5 };

/* Outputs of a call, to be found untouched. */
typedef struct call_outputs {
    fdma_tensor tensor[output_limit];
    int count;
} call_outputs;

static inline void fill_outputs(const call_outputs *to) {
    for (int i = 0; i < to->count; i++) {
        fill_untouched(to->tensor[i]);
    }
}

static inline void check_outputs(const call_outputs *to) {
    for (int i = 0; i < to->count; i++) {
        check_untouched(to->tensor[i]);
    }
}

#endif /* ERRORS_H */
