/* The composed normal form of texts, NFC. */
#pragma once

#include <stddef.h>

/*! compose() - a text in the composed normal form, NFC, with a zero behind it, for free(). `text`
 *  is valid UTF-8. */
char *compose(const char *text, size_t count, size_t *composed_count);
