/* See generate/text.h. */
#include "generate/text.h"

#include "common/arrays.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PATH_SIZE = 4096, REASON_SIZE = 512 };

bool read_ids(text *it, const char *ids, int64_t vocab_size, char *message, size_t message_size) {
    const char *at = ids;
    do {
        char *end;
        errno = 0;
        const long long id = strtoll(at, &end, 10);
        if (end == at || (*end != ',' && *end != '\0') || errno != 0 || id < 0 ||
            id >= vocab_size) {
            snprintf(message, message_size,
                     "--ids: token %" PRId64 " is '%.*s', want 0 to %" PRId64, it->tokens.count,
                     (int)strcspn(at, ","), at, vocab_size - 1);
            return false;
        }
        add_token(&it->tokens, (int32_t)id);
        at = end + 1;
    } while (at[-1] == ',');
    it->prompt = it->tokens.count;
    return true;
}

bool read_words(text *it, const char *folder, const char *words, size_t count, int64_t vocab_size,
                char *message, size_t message_size) {
    char path[PATH_SIZE], reason[REASON_SIZE];
    snprintf(path, sizeof path, "%s/tokenizer.json", folder);
    it->by = read_tokenizer(path, reason, sizeof reason);
    if (it->by == NULL) {
        snprintf(message, message_size, "%s: tokenizer.json: %s", folder, reason);
        return false;
    }
    encode_text(it->by, words, count, &it->tokens);
    it->prompt = it->tokens.count;
    if (it->prompt == 0) {
        snprintf(message, message_size, "the prompt is empty, want a text of one token or more");
        return false;
    }
    for (int64_t n = 0; n < it->prompt; n++)
        if (it->tokens.ids[n] >= vocab_size) {
            snprintf(message, message_size,
                     "%s: tokenizer.json: the prompt has token %" PRId32
                     ", want less than 'vocab_size' in config.json, %" PRId64,
                     folder, it->tokens.ids[n], vocab_size);
            return false;
        }
    return true;
}

void free_text(text *it) {
    free_tokenizer(it->by);
    free(it->tokens.ids);
}

char *written_words(const text *it, size_t *count) {
    token_text words = {.by = it->by};
    size_t room = 1;
    char *all = allocate(room);
    *count = 0;
    for (int64_t n = it->prompt; n <= it->tokens.count; n++) {
        if (n < it->tokens.count)
            decode_token(&words, it->tokens.ids[n]);
        else
            decode_end(&words);
        if (*count + words.count + 1 > room) {
            room = 2 * (*count + words.count + 1);
            char *const grown = allocate(room);
            memcpy(grown, all, *count);
            free(all);
            all = grown;
        }
        memcpy(all + *count, words.text, words.count);
        *count += words.count;
        all[*count] = '\0';
    }
    free_token_text(&words);
    return all;
}
