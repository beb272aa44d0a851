/* The text that a model reads and writes: tokens, with a tokenizer if they are words. */
#pragma once

#include "tokenizer/tokenizer.h"

#include <stdbool.h>

typedef struct text {
    tokenizer *by;     /* NULL: tokens are numbers */
    token_list tokens; /* the prompt's first */
    int64_t prompt;    /* number of these */
} text;

/*! read_ids() - "1,20,300".
 *  read_words() - `count` bytes, by the tokenizer.json of a folder.
 *  Both return false after an error, with one line in `message`; free_text() afterwards. */
bool read_ids(text *it, const char *ids, int64_t vocab_size, char *message, size_t message_size);
bool read_words(text *it, const char *folder, const char *words, size_t count, int64_t vocab_size,
                char *message, size_t message_size);
void free_text(text *it);

/*! written_words() - what the tokens after the prompt say, with a zero behind it, for free(). */
char *written_words(const text *it, size_t *count);
