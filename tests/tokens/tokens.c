/* Encodes texts, and decodes them again, for tests/python/test_tokenizer.py.
 *
 *     tokens TOKENIZER.json FILE
 *
 * FILE has texts, each with a zero behind it. For each one this prints its tokens with commas
 * between them, a newline, what they are decoded to, and a zero. Exit status 2, with a line on
 * standard error, for a tokenizer that is refused. */
#include "commands.h"
#include "common/json_tree.h"
#include "common/text.h"
#include "tokenizer/tokenizer.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void print_decoded(const token_text *words) { fwrite(words->text, 1, words->count, stdout); }

static void show(const tokenizer *it, const char *text) {
    token_list tokens = {0};
    token_text words = {.by = it};
    encode_text(it, text, strlen(text), &tokens);
    for (int64_t n = 0; n < tokens.count; n++)
        printf("%s%" PRId32, n > 0 ? "," : "", tokens.ids[n]);
    printf("\n");
    for (int64_t n = 0; n < tokens.count; n++) {
        decode_token(&words, tokens.ids[n]);
        print_decoded(&words);
    }
    decode_end(&words);
    print_decoded(&words);
    putchar('\0');
    free_token_text(&words);
    free(tokens.ids);
}

int main(int argc, char **argv) {
    char message[1024] = "want two arguments";
    size_t count = 0;
    char *const texts = argc == 3 ? read_file(argv[2], &count, message, sizeof message) : NULL;
    tokenizer *const it = texts != NULL ? read_tokenizer(argv[1], message, sizeof message) : NULL;
    if (it == NULL)
        print_error("tokens: %s", message);
    else
        for (size_t at = 0; at < count; at += strlen(texts + at) + 1)
            show(it, texts + at);
    const int code = it != NULL ? EXIT_DONE : EXIT_USAGE;
    free_tokenizer(it);
    free(texts);
    return code;
}
