/* Writing JSON values. */
#pragma once

#include "fdma.h"

#include <stdbool.h>
#include <stdio.h>

/*! json_string() - the text in quotes, escaped; null for NULL. Each byte that is not UTF-8 becomes
 *  U+FFFD, because JSON cannot hold it. */
void json_string(FILE *stream, const char *text);

/*! json_text() - the same of `count` bytes, with a zero behind them; there may be zeros in them. */
void json_text(FILE *stream, const char *text, size_t count);

/*! json_number() - six digits; null for NaN and infinities, which JSON does not have. */
void json_number(FILE *stream, double number);

void json_bool(FILE *stream, bool value);

/*! json_shape() - the tensor's shape as an array. */
void json_shape(FILE *stream, const fdma_tensor *tensor);
