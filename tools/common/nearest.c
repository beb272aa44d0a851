/* See common/nearest.h. */
#include "common/nearest.h"

#include "common/text.h"

#include <string.h>

enum { NAME_MAX_LENGTH = 127, NEAR_MISS = 3 };

/* Levenshtein distance from `typed` to the name, or with `inside` to any part of it. */
static size_t edit_distance(const char *typed, const char *name, bool inside) {
    size_t distance[NAME_MAX_LENGTH + 1]; // from typed[0 .. t] to the text that ends before name[i]
    const size_t length = strlen(name);
    for (size_t i = 0; i <= length; i++)
        distance[i] = inside ? 0 : i;
    for (size_t t = 1; typed[t - 1] != '\0'; t++) {
        size_t diagonal = distance[0];
        distance[0] = t;
        for (size_t i = 1; i <= length; i++) {
            const size_t replaced = diagonal + (typed[t - 1] != name[i - 1]);
            diagonal = distance[i];
            distance[i] = distance[i - 1] < distance[i] ? distance[i - 1] + 1 : distance[i] + 1;
            if (replaced < distance[i])
                distance[i] = replaced;
        }
    }
    size_t least = distance[length];
    for (size_t i = 0; inside && i < length; i++)
        least = distance[i] < least ? distance[i] : least;
    return least;
}

void offer_name(nearest_name *nearest, const char *name, bool inside) {
    if (strlen(name) > NAME_MAX_LENGTH)
        return;
    const size_t distance = edit_distance(nearest->typed, name, inside);
    if (distance >= NEAR_MISS || 3 * distance > strlen(nearest->typed) ||
        (nearest->name != NULL && distance >= nearest->distance))
        return;
    nearest->name = name;
    nearest->distance = distance;
}

void print_unknown(const char *what, const char *typed, const char *near, const char *hint) {
    if (near != NULL)
        print_error("%s '%s'; did you mean '%s'?", what, typed, near);
    else
        print_error("%s '%s'; %s", what, typed, hint);
}
