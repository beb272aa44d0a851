/* Regular expressions of pre-tokenizers, in UTF-8: a subset of Oniguruma's syntax.
 *
 *     a|b  (ab)  (?:ab)  (?i:ab)  (?=ab)  (?!ab)  (ab)?  a? a* a+ a{2} a{2,} a{2,3}  a?+ a*+ a++
 *     [a-z]  [^a-z]  .  \s \S \d \D \r \n \t  \p{L} \P{Lu}  and any escaped punctuation
 *
 * The first alternative that matches is taken, as with backtracking. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

typedef struct pattern pattern;

/*! compile_pattern() - for free_pattern().
 *  Returns NULL with one line in `message` that says which part of the syntax is not read */
pattern *compile_pattern(const char *expression, char *message, size_t message_size);
void free_pattern(pattern *it);

/*! find_match() - the first match at or after *begin in `count` bytes of valid UTF-8 that is not
 *  empty: *begin and *end. Returns false if there is none. */
bool find_match(const pattern *it, const char *text, size_t count, size_t *begin, size_t *end);
