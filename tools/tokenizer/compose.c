/* See tokenizer/compose.h. Source: Unicode Standard Annex 15, Unicode Normalization Forms */
#include "tokenizer/compose.h"

#include "common/arrays.h"
#include "tokenizer/compose_tables.h"
#include "tokenizer/unicode.h"

#include <stdlib.h>

#define LENGTH(array) (sizeof(array) / sizeof((array)[0]))

enum { /* of Hangul syllables: a leading consonant, a vowel, and perhaps a trailing consonant */
       SYLLABLE = 0xac00,
       LEADING = 0x1100,
       VOWEL = 0x1161,
       TRAILING = 0x11a7, /* one before the first */
       LEADINGS = 19,
       VOWELS = 21,
       TRAILINGS = 28,
       SYLLABLES = LEADINGS * VOWELS * TRAILINGS,
       MOST_PARTS = 8, /* of a character: 4 are the most */
};

static uint32_t combining_class(int32_t point) {
    return look_up(combining_runs, LENGTH(combining_runs), point);
}

/* The three numbers of a character in the table, or NULL. */
static const int32_t *find_decomposition(int32_t point) {
    size_t low = 0, high = LENGTH(decompositions) / 3;
    while (low < high) {
        const size_t middle = (low + high) / 2;
        const int32_t *const one = decompositions + 3 * middle;
        if (abs(one[0]) == point)
            return one;
        if (abs(one[0]) < point)
            low = middle + 1;
        else
            high = middle;
    }
    return NULL;
}

/* The parts of a character, which have no parts themselves. Returns their number. */
static size_t decompose(int32_t point, int32_t parts[MOST_PARTS]) {
    const int32_t syllable = point - SYLLABLE;
    if (syllable >= 0 && syllable < SYLLABLES) {
        parts[0] = LEADING + syllable / (VOWELS * TRAILINGS);
        parts[1] = VOWEL + syllable / TRAILINGS % VOWELS;
        parts[2] = TRAILING + syllable % TRAILINGS;
        return parts[2] == TRAILING ? 2 : 3;
    }
    int32_t after[MOST_PARTS]; // second parts, which have no parts themselves
    size_t count = 0, behind = 0;
    for (const int32_t *one; (one = find_decomposition(point)) != NULL; point = one[1])
        if (one[2] != 0)
            after[behind++] = one[2];
    parts[count++] = point;
    while (behind > 0)
        parts[count++] = after[--behind];
    return count;
}

/* The character that two are composed to, or 0. */
static int32_t compose_pair(int32_t first, int32_t second) {
    if (first >= LEADING && first < LEADING + LEADINGS && second >= VOWEL &&
        second < VOWEL + VOWELS)
        return SYLLABLE + ((first - LEADING) * VOWELS + (second - VOWEL)) * TRAILINGS;
    if (first >= SYLLABLE && first < SYLLABLE + SYLLABLES && (first - SYLLABLE) % TRAILINGS == 0 &&
        second > TRAILING && second < TRAILING + TRAILINGS)
        return first + (second - TRAILING);
    if (class_of(second) != CLASS_M) // others have no second part that is no mark
        return 0;
    for (size_t n = 0; n < LENGTH(decompositions); n += 3)
        if (decompositions[n + 1] == first && decompositions[n + 2] == second &&
            decompositions[n] > 0)
            return decompositions[n];
    return 0;
}

/* Characters with a combining class go behind others of the same or a lower class; only starters,
 * whose class is 0, stay where they are. */
static void append_ordered(int32_t *points, size_t *count, int32_t point) {
    const uint32_t class = combining_class(point);
    size_t at = (*count)++;
    while (class > 0 && at > 0 && combining_class(points[at - 1]) > class) {
        points[at] = points[at - 1];
        at--;
    }
    points[at] = point;
}

/* Composes in place. Returns the number that is left. */
static size_t compose_points(int32_t *points, size_t count) {
    size_t left = 0, starter = 0;
    bool has_starter = false;
    uint32_t last = 0; // the class of the character before, unless it was composed
    for (size_t n = 0; n < count; n++) {
        const uint32_t class = combining_class(points[n]);
        const bool is_blocked = left > starter + 1 && last >= class;
        const int32_t composed =
            has_starter && !is_blocked ? compose_pair(points[starter], points[n]) : 0;
        if (composed != 0) {
            points[starter] = composed;
            continue;
        }
        if (class == 0) {
            starter = left;
            has_starter = true;
        }
        last = class;
        points[left++] = points[n];
    }
    return left;
}

char *compose(const char *text, size_t count, size_t *composed_count) {
    int32_t *const points = allocate((count + 1) * 2 * sizeof *points); // U+0390: 3 of 2 bytes
    size_t point_count = 0;
    for (size_t at = 0, length; at < count; at += length) {
        int32_t parts[MOST_PARTS];
        const int32_t point = read_utf8(text + at, count - at, &length);
        const size_t part_count = decompose(point, parts);
        for (size_t n = 0; n < part_count; n++)
            append_ordered(points, &point_count, parts[n]);
    }
    point_count = compose_points(points, point_count);
    char *const composed = allocate(point_count * MOST_UTF8 + 1);
    *composed_count = 0;
    for (size_t n = 0; n < point_count; n++)
        *composed_count += write_utf8(points[n], composed + *composed_count);
    free(points);
    return composed;
}
