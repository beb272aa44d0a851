/* Byte-level tokenizers, as the tokenizer.json of a folder of the hub has them: text to tokens, and
 * back. Ids equal the ids of the library `tokenizers`. */
#pragma once

#include "tokenizer/bpe.h"

typedef struct tokenizer tokenizer;

/*! read_tokenizer() - reads a tokenizer.json.
 *  Returns NULL with one line in `message`, which names the entry that is wrong or not supported */
tokenizer *read_tokenizer(const char *path, char *message, size_t message_size);
void free_tokenizer(tokenizer *it);

/*! tokens_end() - one more than the largest id. */
int32_t tokens_end(const tokenizer *it);

/*! encode_text() - appends the tokens of a text, with those that the post-processor puts around it.
 *  Bytes that are not UTF-8 are read as U+FFFD. Special tokens in the text are tokens. */
void encode_text(const tokenizer *it, const char *text, size_t count, token_list *to);

/* The text of tokens that come one by one. */
typedef struct token_text {
    const tokenizer *by;
    char held[4]; /* the beginning of a character */
    size_t held_count;
    char *text;   /* what became whole with the newest token: valid UTF-8, with a zero behind it */
    size_t count; /* its bytes */
    size_t room;
} token_text;

/*! decode_token() - `text` is what this token adds; special tokens add nothing.
 *  decode_end() - `text` is U+FFFD if a character is not complete. */
void decode_token(token_text *to, int32_t id);
void decode_end(token_text *to);
void free_token_text(token_text *to);
