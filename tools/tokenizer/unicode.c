/* See tokenizer/unicode.h. */
#include "tokenizer/unicode.h"

#include "tokenizer/class_table.h"

int32_t read_utf8(const char *bytes, size_t left, size_t *length) {
    const uint8_t first = (uint8_t)bytes[0];
    *length = 1;
    if (first < 0x80)
        return first;
    if (first < 0xc2 || first > 0xf4)
        return UTF8_INVALID;
    const size_t count = first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
    int32_t point = first & (0x7f >> count);
    /* the second byte has a smaller range where the first one alone would allow longer forms than
     * needed, surrogates, or numbers above 0x10ffff */
    uint8_t least = first == 0xe0 ? 0xa0 : first == 0xf0 ? 0x90 : 0x80;
    uint8_t most = first == 0xed ? 0x9f : first == 0xf4 ? 0x8f : 0xbf;
    for (; *length < count; *length += 1, least = 0x80, most = 0xbf) {
        if (*length == left)
            return UTF8_TRUNCATED;
        const uint8_t next = (uint8_t)bytes[*length];
        if (next < least || next > most)
            return UTF8_INVALID;
        point = point << 6 | (next & 0x3f);
    }
    return point;
}

size_t write_utf8(int32_t point, char bytes[MOST_UTF8]) {
    static const uint8_t leads[] = {0, 0, 0xc0, 0xe0, 0xf0};
    const size_t count = point < 0x80 ? 1 : point < 0x800 ? 2 : point < 0x10000 ? 3 : 4;
    for (size_t n = count - 1; n > 0; n--, point >>= 6)
        bytes[n] = (char)(0x80 | (point & 0x3f));
    bytes[0] = (char)(leads[count] | point);
    return count;
}

uint32_t look_up(const uint32_t *runs, size_t count, int32_t point) {
    size_t low = 0, high = count; // runs[low - 1] begins at or before the character
    while (low < high) {
        const size_t middle = (low + high) / 2;
        if ((int32_t)(runs[middle] >> 8) <= point)
            low = middle + 1;
        else
            high = middle;
    }
    return low > 0 ? runs[low - 1] & 0xff : 0;
}

uint32_t class_of(int32_t point) {
    return 1u << look_up(class_runs, sizeof class_runs / sizeof class_runs[0], point);
}

bool is_space(int32_t point) {
    return (point >= 9 && point <= 13) || point == ' ' || point == 0x85 || point == 0xa0 ||
           point == 0x1680 || (point >= 0x2000 && point <= 0x200a) || point == 0x2028 ||
           point == 0x2029 || point == 0x202f || point == 0x205f || point == 0x3000;
}
