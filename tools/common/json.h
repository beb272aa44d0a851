/* JSON on its way out. */
#ifndef FDMA_TOOLS_COMMON_JSON_H
#define FDMA_TOOLS_COMMON_JSON_H

#include "fdma.h"

#include <stdio.h>

/*! json_string() - the text in quotes, escaped; null for NULL. */
void json_string(FILE *stream, const char *text);

/*! json_number() - six digits; null for NaN and infinities, which JSON lacks. */
void json_number(FILE *stream, double number);

/*! json_shape() - the tensor's shape as an array. */
void json_shape(FILE *stream, const fdma_tensor *tensor);

#endif /* FDMA_TOOLS_COMMON_JSON_H */
