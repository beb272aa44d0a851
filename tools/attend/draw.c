/* See attend/draw.h. A character covers a rectangle of (query, key) pairs, and its shade shows the
 * kept fraction. */
#include "attend/draw.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

// without causal masking all lines are the same, and a few of them are enough
enum { COLUMNS = 72, CAUSAL_LINES = 20, ALIKE_LINES = 5, LABEL = 7 };

static const struct {
    double above; /* fraction of its pairs that are kept */
    const char *glyph, *ascii;
} shades[] = {{0.75, "█", "#"}, {0.5, "▓", "+"}, {0.25, "▒", "-"}, {0.0, "░", "."}};

enum { SHADES = sizeof shades / sizeof shades[0] };

/* True if the locale that the environment names, if any, has the glyphs. */
static bool is_utf8(void) {
    static const char *const variables[] = {"LC_ALL", "LC_CTYPE", "LANG"};
    for (size_t v = 0; v < sizeof variables / sizeof variables[0]; v++) {
        const char *locale = getenv(variables[v]);
        if (locale != NULL && locale[0] != '\0')
            return strstr(locale, "UTF") != NULL || strstr(locale, "utf") != NULL;
    }
    return true;
}

static const char *glyph_of(int shade) {
    return is_utf8() ? shades[shade].glyph : shades[shade].ascii;
}

int64_t live_queries(const fdma_selection *selection, int64_t j, int32_t expiry, int64_t q_len,
                     bool causal, int64_t first, int64_t count) {
    if (expiry <= j)
        return 0;
    if (!causal)
        return count;
    const int64_t offset = selection->kv_len - q_len; // position of query 0
    const int64_t begin = j > first + offset ? j : first + offset;
    const int64_t last = first + count + offset;
    const int64_t end = expiry < last ? expiry : last;
    return end > begin ? end - begin : 0;
}

static const char *shade_of(double fraction) {
    for (int s = 0; s < SHADES; s++)
        if (fraction > shades[s].above)
            return glyph_of(s);
    return " ";
}

static void draw_line(FILE *stream, const fdma_selection *selection, int64_t q_len, bool causal,
                      int64_t first, int64_t count) {
    const int32_t *expiry = selection->expiry.data;
    const int64_t kv_len = selection->kv_len;
    const int64_t columns = kv_len < COLUMNS ? kv_len : COLUMNS;
    fprintf(stream, "%*" PRId64 " ", LABEL - 1, first);
    for (int64_t c = 0; c < columns; c++) {
        const int64_t begin = c * kv_len / columns;
        const int64_t end = (c + 1) * kv_len / columns;
        int64_t kept = 0;
        for (int64_t j = begin; j < end; j++)
            kept += live_queries(selection, j, expiry[j], q_len, causal, first, count);
        fputs(shade_of((double)kept / ((double)(end - begin) * (double)count)), stream);
    }
    fputc('\n', stream);
}

static void draw_key_axis(FILE *stream, int64_t kv_len) {
    char last[24];
    const int64_t columns = kv_len < COLUMNS ? kv_len : COLUMNS;
    const int used = snprintf(last, sizeof last, "%" PRId64, kv_len - 1);
    if (columns > used + 1)
        fprintf(stream, "%*s%-*d%s\n", LABEL, "", (int)columns - used, 0, last);
}

void draw_selection(FILE *stream, const fdma_selection *selection, int64_t q_len, bool causal) {
    const int64_t kv_len = selection->kv_len;
    const int64_t most = causal ? CAUSAL_LINES : ALIKE_LINES;
    const int64_t lines = q_len < most ? q_len : most;
    const int64_t columns = kv_len < COLUMNS ? kv_len : COLUMNS;
    draw_key_axis(stream, kv_len);
    for (int64_t line = 0; line < lines; line++) {
        const int64_t first = line * q_len / lines;
        const int64_t end = (line + 1) * q_len / lines;
        draw_line(stream, selection, q_len, causal, first, end - first);
    }
    fprintf(stream, "%*sa character covers %.3g queries x %.3g keys\n", LABEL, "",
            (double)q_len / (double)lines, (double)kv_len / (double)columns);
    fprintf(stream, "%*s of which are kept: %s some %s > 1/4 %s > 1/2 %s > 3/4\n", LABEL - 1, "",
            glyph_of(3), glyph_of(2), glyph_of(1), glyph_of(0));
}
