/* Byte-level byte pair encoding: a vocabulary whose tokens are spelled in 256 characters, one for
 * each byte, and the order in which neighbours are merged. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { NO_TOKEN = -1 };

/* Tokens, in the order of a text. */
typedef struct token_list {
    int32_t *ids;
    int64_t count, room;
} token_list;

void add_token(token_list *to, int32_t id);

typedef struct bpe bpe;
struct cJSON;

/*! read_bpe() - the 'model' of a tokenizer.json.
 *  Returns NULL with one line in `message`, which names the entry that is wrong */
bpe *read_bpe(const struct cJSON *model, char *message, size_t message_size);
void free_bpe(bpe *it);

/*! vocabulary_end() - one more than the largest id. */
int32_t vocabulary_end(const bpe *it);

/*! encode_piece() - appends the tokens of some bytes, which none of them crosses. */
void encode_piece(const bpe *it, const char *bytes, size_t count, token_list *to);

/*! spelling_of() - the token as the vocabulary spells it; NULL if it has none of that id. */
const char *spelling_of(const bpe *it, int32_t id);

/*! spelling_bytes() - the bytes that a spelling stands for; if it has other characters, its own
 *  bytes. `bytes` has room for strlen(spelling). Returns their number. */
size_t spelling_bytes(const char *spelling, char *bytes);
