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

/* What the two queries of a call wrote: where they fail they leave alone what was there. */
typedef struct query_answers {
    size_t bytes;
    const char *name;
} query_answers;

static const query_answers unanswered = {99, "unanswered"};

static inline void check_answers(const query_answers *found, const expectation *want) {
    if (!want->data_only) {
        CHECK_INT(found->bytes, unanswered.bytes);
        CHECK(found->name == unanswered.name);
    }
}

/* Outputs are filled with this before a call that must not write them. */
static const unsigned char untouched_byte = 0x5a;

enum { output_limit = 5 };

/* Outputs of a call, to be found untouched. */
typedef struct call_outputs {
    fdma_tensor tensor[output_limit];
    int count;
} call_outputs;

static inline void fill_outputs(const call_outputs *to) {
    for (int i = 0; i < to->count; i++) {
        memset(to->tensor[i].data, untouched_byte, bytes_of(to->tensor[i]));
    }
}

static inline void check_outputs(const call_outputs *to) {
    for (int i = 0; i < to->count; i++) {
        const size_t bytes = bytes_of(to->tensor[i]);
        unsigned char *want = test_alloc(bytes);
        memset(want, untouched_byte, bytes);
        CHECK_BYTES(to->tensor[i].data, want, bytes);
    }
}

/* Of float32 scores [2, 2, 10] that all tie, for window 3: each query keeps the latest keys. */
static inline void make_selection(fdma_selection *selection) {
    *selection = (fdma_selection){.size = sizeof *selection,
                                  .expiry = new_tensor(FDMA_INT32, 2, 2, 10, -1),
                                  .slot = new_tensor(FDMA_INT32, 2, 2, 10, -1)};
    fdma_select_args args = {.size = sizeof args,
                             .score = new_tensor(FDMA_FLOAT32, 2, 2, 10, -1),
                             .selection = selection,
                             .window = 3};
    CHECK_OK(run_select(&args));
}

#endif /* ERRORS_H */
