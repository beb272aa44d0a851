/* Characters: UTF-8, and their classes. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    UTF8_INVALID = -1,   /* no character */
    UTF8_TRUNCATED = -2, /* the beginning of one, which the bytes that follow may complete */
    MOST_UTF8 = 4,       /* bytes of a character */
};

/*! read_utf8() - the character at the beginning of `left` bytes, at least one, and its bytes.
 *  Returns UTF8_INVALID or UTF8_TRUNCATED for bytes that are none; *length is then the number of
 *  those that one U+FFFD replaces.
 *  Source  The Unicode Standard, section 3.9, "U+FFFD substitution of maximal subparts" */
int32_t read_utf8(const char *bytes, size_t left, size_t *length);

/*! write_utf8() - the bytes of a character. Returns their number. */
size_t write_utf8(int32_t point, char bytes[MOST_UTF8]);

/* Classes of characters as bits: general categories of Unicode. */
enum {
    CLASS_LU = 1 << 1,
    CLASS_LL = 1 << 2,
    CLASS_LT = 1 << 3,
    CLASS_LM = 1 << 4,
    CLASS_LO = 1 << 5,
    CLASS_M = 1 << 6,
    CLASS_ND = 1 << 7,
    CLASS_NL = 1 << 8,
    CLASS_NO = 1 << 9,
    CLASS_P = 1 << 10,
    CLASS_S = 1 << 11,
    CLASS_L = CLASS_LU | CLASS_LL | CLASS_LT | CLASS_LM | CLASS_LO,
    CLASS_N = CLASS_ND | CLASS_NL | CLASS_NO,
};

/*! class_of() - the bit of a character's class; 1 for all other categories. */
uint32_t class_of(int32_t point);
bool is_space(int32_t point);

/*! look_up() - the value of the run that a character is in; 0 before the first one. A run is the
 *  character that it begins with * 256 + its value. */
uint32_t look_up(const uint32_t *runs, size_t count, int32_t point);
