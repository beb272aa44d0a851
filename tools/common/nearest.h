/* "Did you mean": the name that is nearest to what was typed. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

typedef struct nearest_name {
    const char *typed;
    const char *name; /* NULL: none is near */
    size_t distance;  /* of `name`, in characters that are added, left out or replaced */
} nearest_name;

/*! offer_name() - takes `name` if it is nearer than the one before. With `inside` the typed text
 *  may stand anywhere in it, as a filter does. Names of more than 127 characters are never near. */
void offer_name(nearest_name *nearest, const char *name, bool inside);

/*! print_unknown() - one line on stderr: `what` with the typed text in quotes, and the name that is
 *  near, or else `hint`. */
void print_unknown(const char *what, const char *typed, const char *near, const char *hint);
