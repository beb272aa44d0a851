/* See tokenizer/pattern.h. An expression becomes steps of a backtracking matcher. Only single
 * characters are repeated, so the depth of recursion is bounded by the number of steps. */
#include "tokenizer/pattern.h"

#include "common/arrays.h"
#include "tokenizer/unicode.h"

#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_STEPS = 500, MOST_ITEMS = 2000, MOST_DEPTH = 100, MOST_REPEATS = 100000 };

/* Characters: a range, or some classes, or spaces. */
typedef struct item {
    int32_t first, last;
    uint32_t classes; /* unless 0 */
    bool spaces, is_negated;
} item;

typedef enum step_kind {
    STEP_CHARACTERS, /* `least` to `most` characters of a set, as many as possible */
    STEP_SPLIT,      /* goes on with the next step, and if that fails `jump` steps further */
    STEP_JUMP,       /* goes on `jump` steps further */
    STEP_LOOK,       /* what follows up to STEP_END matches here, or not if `is_negated` */
    STEP_END,
} step_kind;

typedef struct step {
    step_kind kind;
    int jump;             /* of STEP_LOOK: to behind its STEP_END */
    int items, items_end; /* of the set */
    int64_t least, most;
    bool is_negated, is_possessive; /* possessive: gives back no character */
} step;

struct pattern {
    step steps[MOST_STEPS];
    item items[MOST_ITEMS];
    int step_count, item_count;
};

/* ---- compiling ---- */

typedef struct parser {
    pattern *to;
    const char *begin, *at;
    const char *wrong; /* what is not read; NULL so far */
    bool ignores_case;
    int depth;
} parser;

static void refuse(parser *it, const char *what) {
    if (it->wrong == NULL)
        it->wrong = what;
}

static bool take(parser *it, const char *text) {
    const size_t length = strlen(text);
    if (it->wrong != NULL || strncmp(it->at, text, length) != 0)
        return false;
    it->at += length;
    return true;
}

static step *add_step(parser *it, step_kind kind) {
    if (it->to->step_count == MOST_STEPS) {
        refuse(it, "so long an expression");
        it->to->step_count = 0; // nothing of it will run
    }
    step *const made = &it->to->steps[it->to->step_count++];
    *made = (step){.kind = kind, .least = 1, .most = 1};
    return made;
}

static void add_item(parser *it, item one) {
    if (it->to->item_count == MOST_ITEMS) {
        refuse(it, "so long an expression");
        it->to->item_count = 0;
    }
    it->to->items[it->to->item_count++] = one;
}

/* A character, and the others that are the same in (?i: ). */
static void add_character(parser *it, int32_t point) {
    const bool is_letter = (point >= 'a' && point <= 'z') || (point >= 'A' && point <= 'Z');
    add_item(it, (item){.first = point, .last = point});
    if (!it->ignores_case)
        return;
    if (point >= 0x80)
        refuse(it, "characters outside of ASCII in (?i: )");
    if (is_letter)
        add_item(it, (item){.first = point ^ 0x20, .last = point ^ 0x20});
    const int32_t folded = (point | 0x20) == 's' ? 0x17f : 0x212a; // long s, and the Kelvin sign
    if ((point | 0x20) == 's' || (point | 0x20) == 'k')
        add_item(it, (item){.first = folded, .last = folded});
}

/* \p{Name}, from the name on */
static void add_property(parser *it, bool is_negated) {
    static const struct {
        const char *name;
        uint32_t classes;
    } known[] = {
        {"L", CLASS_L},   {"Lu", CLASS_LU}, {"Ll", CLASS_LL}, {"Lt", CLASS_LT}, {"Lm", CLASS_LM},
        {"Lo", CLASS_LO}, {"M", CLASS_M},   {"N", CLASS_N},   {"Nd", CLASS_ND}, {"Nl", CLASS_NL},
        {"No", CLASS_NO}, {"P", CLASS_P},   {"S", CLASS_S},
    };
    if (!take(it, "{"))
        refuse(it, "\\p without {");
    if (take(it, "^"))
        is_negated = !is_negated;
    const size_t length = strcspn(it->at, "}");
    for (size_t n = 0; n < sizeof known / sizeof known[0]; n++)
        if (it->at[length] == '}' && strlen(known[n].name) == length &&
            strncmp(known[n].name, it->at, length) == 0) {
            it->at += length + 1;
            add_item(it, (item){.classes = known[n].classes, .is_negated = is_negated});
            return;
        }
    refuse(it, "a class in \\p{ } besides L, Lu, Ll, Lt, Lm, Lo, M, N, Nd, Nl, No, P and S");
}

/* The text behind a backslash. Returns a character, or -1 where a class was added. */
static int32_t read_escape(parser *it) {
    const char letter = *it->at;
    if (letter == '\0') {
        refuse(it, "a backslash at the end");
        return -1;
    }
    it->at++;
    switch (letter) {
    case 's':
    case 'S':
        add_item(it, (item){.spaces = true, .is_negated = letter == 'S'});
        return -1;
    case 'd':
    case 'D':
        add_item(it, (item){.classes = CLASS_ND, .is_negated = letter == 'D'});
        return -1;
    case 'p':
    case 'P':
        add_property(it, letter == 'P');
        return -1;
    case 'r':
        return '\r';
    case 'n':
        return '\n';
    case 't':
        return '\t';
    default:
        if ((letter >= '0' && letter <= '9') || (letter >= 'a' && letter <= 'z') ||
            (letter >= 'A' && letter <= 'Z'))
            refuse(it, "an escape besides \\s, \\d, \\p, \\r, \\n and \\t");
        return (unsigned char)letter;
    }
}

static int32_t read_point(parser *it) {
    size_t length = 0;
    const int32_t point = *it->at != '\0' ? read_utf8(it->at, strlen(it->at), &length) : -1;
    if (point < 0)
        refuse(it, "sets without an end, and bytes that are not UTF-8");
    it->at += length;
    return point;
}

/* [...], from behind the [ on */
static void parse_set(parser *it, step *to) {
    to->is_negated = take(it, "^");
    bool is_first = true;
    while (it->wrong == NULL && (*it->at != ']' || is_first)) {
        is_first = false;
        if (*it->at == '\0' || *it->at == '[' || strncmp(it->at, "&&", 2) == 0) {
            refuse(it, "sets in sets, and sets without an end");
            return;
        }
        const int32_t first = take(it, "\\") ? read_escape(it) : read_point(it);
        if (first < 0)
            continue;
        int32_t last = first;
        if (it->at[0] == '-' && it->at[1] != ']') {
            it->at++;
            last = take(it, "\\") ? read_escape(it) : read_point(it);
        }
        if (last == first)
            add_character(it, first);
        else if (last < first || it->ignores_case)
            refuse(it, "ranges that end before they begin, or in (?i: )");
        else
            add_item(it, (item){.first = first, .last = last});
    }
    take(it, "]");
}

/* {2}, {2,} or {2,3}, from behind the { on */
static void parse_counts(parser *it, step *to) {
    char *end;
    to->least = strtol(it->at, &end, 10);
    const bool has_least = end > it->at;
    to->most = to->least;
    it->at = end;
    if (take(it, ",")) {
        to->most = strtol(it->at, &end, 10);
        if (end == it->at)
            to->most = INT64_MAX;
        it->at = end;
    }
    if (!has_least || to->least < 0 || to->least > MOST_REPEATS || to->most < to->least ||
        !take(it, "}"))
        refuse(it, "counts in { } besides {2}, {2,} and {2,3}");
    if (*it->at == '+')
        refuse(it, "+ behind { }");
}

static void parse_repeats(parser *it, step *to) {
    if (take(it, "{")) {
        parse_counts(it, to);
    } else if (take(it, "?")) {
        to->least = 0;
    } else if (take(it, "*")) {
        to->least = 0;
        to->most = INT64_MAX;
    } else if (take(it, "+")) {
        to->most = INT64_MAX;
    } else {
        return;
    }
    to->is_possessive = take(it, "+");
    if (it->wrong == NULL && *it->at != '\0' && strchr("?*+{", *it->at) != NULL)
        refuse(it, "lazy or repeated repeats");
}

static void parse_alternatives(parser *it);

/* (...), from behind the ( on */
static void parse_group(parser *it) {
    pattern *const to = it->to;
    const int first = to->step_count;
    const bool ignores_case = it->ignores_case, is_negated = strncmp(it->at, "?!", 2) == 0;
    const bool looks = take(it, "?=") || take(it, "?!");
    if (looks)
        add_step(it, STEP_LOOK)->is_negated = is_negated;
    else if (take(it, "?i:"))
        it->ignores_case = true;
    else if (!take(it, "?:") && *it->at == '?')
        refuse(it, "groups besides ( ), (?: ), (?i: ), (?= ) and (?! )");
    if (++it->depth > MOST_DEPTH)
        refuse(it, "groups so deep");
    if (it->wrong == NULL)
        parse_alternatives(it);
    it->depth--;
    it->ignores_case = ignores_case;
    if (!take(it, ")"))
        refuse(it, "groups without an end");
    if (looks) {
        add_step(it, STEP_END);
        to->steps[first].jump = to->step_count - first;
    } else if (take(it, "?")) {
        add_step(it, STEP_SPLIT);
        memmove(to->steps + first + 1, to->steps + first,
                (size_t)(to->step_count - 1 - first) * sizeof(step));
        to->steps[first] = (step){.kind = STEP_SPLIT, .jump = to->step_count - first};
    }
    if (it->wrong == NULL && *it->at != '\0' && strchr("?*+{", *it->at) != NULL)
        refuse(it, "groups with a repeat besides ?");
}

static void parse_one(parser *it) {
    if (take(it, "(")) {
        parse_group(it);
        return;
    }
    step *const to = add_step(it, STEP_CHARACTERS);
    to->items = it->to->item_count;
    if (*it->at != '\0' && strchr("?*+{^$", *it->at) != NULL) {
        refuse(it, "^, $, and repeats of nothing");
    } else if (take(it, "[")) {
        parse_set(it, to);
    } else if (take(it, ".")) {
        add_item(it, (item){.first = '\n', .last = '\n', .is_negated = true});
    } else {
        const int32_t point = take(it, "\\") ? read_escape(it) : read_point(it);
        if (point >= 0)
            add_character(it, point);
    }
    to->items_end = it->to->item_count;
    if (it->wrong == NULL)
        parse_repeats(it, to);
}

/* a|b: split to b, a, jump to the end, b */
static void parse_alternatives(parser *it) {
    pattern *const to = it->to;
    int jumps[MOST_STEPS], jump_count = 0;
    for (;;) {
        const int first = to->step_count;
        add_step(it, STEP_SPLIT);
        while (it->wrong == NULL && *it->at != '\0' && *it->at != '|' && *it->at != ')')
            parse_one(it);
        if (it->wrong != NULL)
            return;
        const bool is_last = !take(it, "|");
        if (is_last) { // the split has nothing to choose
            to->steps[first] = (step){.kind = STEP_JUMP, .jump = 1};
            break;
        }
        jumps[jump_count++] = to->step_count;
        add_step(it, STEP_JUMP);
        to->steps[first].jump = to->step_count - first;
    }
    for (int n = 0; n < jump_count; n++)
        to->steps[jumps[n]].jump = to->step_count - jumps[n];
}

/* ---- matching ---- */

typedef struct subject {
    const pattern *by;
    const char *text;
    size_t count;
} subject;

enum { NO_MATCH = -1 };

static bool has_character(const subject *it, const step *set, int32_t point) {
    for (int n = set->items; n < set->items_end; n++) {
        const item *const one = &it->by->items[n];
        bool is_in;
        if (one->spaces)
            is_in = is_space(point);
        else if (one->classes != 0)
            is_in = (class_of(point) & one->classes) != 0;
        else
            is_in = point >= one->first && point <= one->last;
        if (is_in != one->is_negated)
            return !set->is_negated;
    }
    return set->is_negated;
}

/* The end of a match of the steps from `from` on, at a byte of the text; or NO_MATCH. */
static int64_t run(const subject *it, const step *from, int64_t at) {
    for (;;) {
        int64_t begin = at, count = 0, end;
        switch (from->kind) {
        case STEP_END:
            return at;
        case STEP_JUMP:
            from += from->jump;
            continue;
        case STEP_SPLIT:
            end = run(it, from + 1, at);
            if (end != NO_MATCH)
                return end;
            from += from->jump;
            continue;
        case STEP_LOOK:
            if ((run(it, from + 1, at) == NO_MATCH) != from->is_negated)
                return NO_MATCH;
            from += from->jump;
            continue;
        case STEP_CHARACTERS:
            break;
        }
        for (size_t length; count < from->most && (size_t)at < it->count; at += (int64_t)length) {
            const int32_t point = read_utf8(it->text + at, it->count - (size_t)at, &length);
            if (!has_character(it, from, point))
                break;
            if (++count == from->least)
                begin = at + (int64_t)length;
        }
        if (count < from->least)
            return NO_MATCH;
        if (!from->is_possessive)
            for (; at > begin; at--)
                if (((size_t)at == it->count || (it->text[at] & 0xc0) != 0x80) &&
                    (end = run(it, from + 1, at)) != NO_MATCH)
                    return end;
        from++;
    }
}

pattern *compile_pattern(const char *expression, char *message, size_t message_size) {
    parser it = {.to = allocate(sizeof *it.to), .begin = expression, .at = expression};
    parse_alternatives(&it);
    if (*it.at == ')')
        refuse(&it, "an end of a group without its beginning");
    add_step(&it, STEP_END);
    if (it.wrong == NULL && run(&(subject){it.to, "", 0}, it.to->steps, 0) != NO_MATCH)
        refuse(&it, "expressions that match the empty text");
    if (it.wrong == NULL)
        return it.to;
    snprintf(message, message_size, "at byte %d: %s: not read", (int)(it.at - it.begin), it.wrong);
    free(it.to);
    return NULL;
}

void free_pattern(pattern *it) { free(it); }

bool find_match(const pattern *it, const char *text, size_t count, size_t *begin, size_t *end) {
    const subject in = {it, text, count};
    for (size_t length; *begin < count; *begin += length) {
        const int64_t found = run(&in, it->steps, (int64_t)*begin);
        if (found > (int64_t)*begin) {
            *end = (size_t)found;
            return true;
        }
        read_utf8(text + *begin, count - *begin, &length);
    }
    return false;
}
