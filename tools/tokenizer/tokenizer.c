/* See tokenizer/tokenizer.h. A text passes these steps, as in `tokenizers`: added tokens are taken
 * out of it, what is left is normalized, added tokens of the normalized text are taken out, each
 * piece is split by the expressions of the pre-tokenizer, and what they give becomes tokens. */
#include "tokenizer/tokenizer.h"

#include "common/arrays.h"
#include "common/json_tree.h"
#include "tokenizer/compose.h"
#include "tokenizer/pattern.h"
#include "tokenizer/unicode.h"

#include <cjson/cJSON.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_SPLITS = 8, MOST_AROUND = 16, NAME_SIZE = 64 };

static const char byte_level_expression[] =
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";
static const char replacement[] = "\xef\xbf\xbd"; // U+FFFD

typedef struct added_token {
    char *text; /* as it stands in a text; normalized if is_normalized */
    char *name; /* as the file has it */
    size_t length;
    int32_t id;
    bool is_special, is_normalized, takes_left, takes_right; /* spaces beside it */
} added_token;

struct tokenizer {
    bpe *model;
    added_token *added;
    int added_count;
    bool composes; /* the normalizer is NFC */
    pattern *splits[MOST_SPLITS];
    int split_count;
    bool has_byte_level, byte_level_splits; /* by its own expression, the last of `splits` */
    bool adds_space;                        /* before each piece that byte level gets */
    int32_t before[MOST_AROUND], after[MOST_AROUND]; /* by the post-processor */
    int before_count, after_count;
    int32_t end;
};

typedef struct reader {
    tokenizer *it;
    message_line message;
} reader;

static const char *text_of(const cJSON *tree, const char *name) {
    const cJSON *const found = find_json(tree, name);
    return cJSON_IsString(found) ? found->valuestring : "no text";
}

static bool has_type(const cJSON *tree, const char *type) {
    return strcmp(text_of(tree, "type"), type) == 0;
}

static bool is_true(const cJSON *tree, const char *name) {
    return cJSON_IsTrue(find_json(tree, name));
}

/* ---- reading ---- */

static bool add_split(const reader *from, const char *expression) {
    char reason[NAME_SIZE * 2];
    tokenizer *const it = from->it;
    if (it->split_count == MOST_SPLITS)
        return refuse(from->message, "'pre_tokenizer': want at most %d splits", MOST_SPLITS);
    it->splits[it->split_count] = compile_pattern(expression, reason, sizeof reason);
    if (it->splits[it->split_count] == NULL)
        return refuse(from->message, "'pre_tokenizer': '%.200s': %s", expression, reason);
    it->split_count++;
    return true;
}

static bool read_split(const reader *from, const cJSON *split) {
    const cJSON *const pattern_of = find_json(split, "pattern");
    const cJSON *const expression = find_json(pattern_of, "Regex");
    if (!cJSON_IsString(expression))
        return refuse(from->message, "'pre_tokenizer': Split: want a 'pattern' with 'Regex'");
    const char *const behavior = text_of(split, "behavior");
    if (strcmp(behavior, "Isolated") != 0 || is_true(split, "invert"))
        return refuse(from->message,
                      "'pre_tokenizer': Split: is %.32s, inverted %d, want Isolated, not inverted",
                      behavior, is_true(split, "invert"));
    return add_split(from, expression->valuestring);
}

static bool read_pre_tokenizer(const reader *from, const cJSON *rule) {
    tokenizer *const it = from->it;
    if (it->has_byte_level)
        return refuse(from->message, "'pre_tokenizer': want ByteLevel as the last one");
    if (has_type(rule, "Sequence")) {
        const cJSON *one, *const list = find_json(rule, "pretokenizers");
        cJSON_ArrayForEach(one, list) {
            if (has_type(one, "Sequence"))
                return refuse(from->message, "'pre_tokenizer': want no Sequence in a Sequence");
            if (!read_pre_tokenizer(from, one))
                return false;
        }
        return true;
    }
    if (has_type(rule, "Split"))
        return read_split(from, rule);
    if (has_type(rule, "Digits"))
        return add_split(from, is_true(rule, "individual_digits") ? "\\p{N}" : "\\p{N}+");
    if (!has_type(rule, "ByteLevel"))
        return refuse(from->message,
                      "'pre_tokenizer': is %.64s, want ByteLevel, Split, Digits or Sequence",
                      text_of(rule, "type"));
    it->has_byte_level = true;
    it->adds_space = is_true(rule, "add_prefix_space");
    const cJSON *const splits = find_json(rule, "use_regex"); // true where it is absent
    it->byte_level_splits = splits == NULL || cJSON_IsTrue(splits);
    return !it->byte_level_splits || add_split(from, byte_level_expression);
}

static bool read_normalizer(const reader *from, const cJSON *rule) {
    if (rule == NULL)
        return true;
    if (has_type(rule, "Sequence")) {
        const cJSON *one, *const list = find_json(rule, "normalizers");
        cJSON_ArrayForEach(one, list) {
            if (has_type(one, "Sequence") || !read_normalizer(from, one))
                return refuse(from->message, "'normalizer': want null, NFC, or a Sequence of NFC");
        }
        return true;
    }
    if (!has_type(rule, "NFC"))
        return refuse(from->message, "'normalizer': is %.64s, want null or NFC",
                      text_of(rule, "type"));
    from->it->composes = true;
    return true;
}

static bool read_added(const reader *from, const cJSON *list) {
    tokenizer *const it = from->it;
    const cJSON *token;
    it->added = allocate((size_t)cJSON_GetArraySize(list) * sizeof *it->added);
    cJSON_ArrayForEach(token, list) {
        const cJSON *const name = find_json(token, "content"), *const id = find_json(token, "id");
        if (!cJSON_IsString(name) || !is_json_integer(id, 0, INT32_MAX - 1))
            return refuse(from->message, "'added_tokens': entry %d: want 'content' and 'id'",
                          it->added_count);
        if (is_true(token, "single_word"))
            return refuse(from->message,
                          "'added_tokens': '%.64s': 'single_word' is true, want false",
                          name->valuestring);
        added_token *const made = &it->added[it->added_count++];
        *made = (added_token){
            .id = id->valueint,
            .is_special = is_true(token, "special"),
            .is_normalized = is_true(token, "normalized"),
            .takes_left = is_true(token, "lstrip"),
            .takes_right = is_true(token, "rstrip"),
        };
        made->length = strlen(name->valuestring);
        made->name = allocate(made->length + 1);
        memcpy(made->name, name->valuestring, made->length);
        made->text =
            made->is_normalized ? compose(made->name, made->length, &made->length) : made->name;
        it->end = made->id >= it->end ? made->id + 1 : it->end;
    }
    return true;
}

/* The ids of a special token of a template, to before or after the text. */
static bool read_special(const reader *from, const cJSON *post, const cJSON *special,
                         bool is_after) {
    tokenizer *const it = from->it;
    const cJSON *const known = find_json(find_json(post, "special_tokens"), text_of(special, "id"));
    const cJSON *id, *const ids = find_json(known, "ids");
    if (!cJSON_IsArray(ids))
        return refuse(from->message,
                      "'post_processor': '%.64s': want its 'ids' in 'special_tokens'",
                      text_of(special, "id"));
    cJSON_ArrayForEach(id, ids) {
        int *const count = is_after ? &it->after_count : &it->before_count;
        if (!is_json_integer(id, 0, INT32_MAX - 1) || *count == MOST_AROUND)
            return refuse(from->message, "'post_processor': want up to %d ids on each side",
                          MOST_AROUND);
        (is_after ? it->after : it->before)[(*count)++] = id->valueint;
        it->end = id->valueint >= it->end ? id->valueint + 1 : it->end;
    }
    return true;
}

static bool read_template(const reader *from, const cJSON *post) {
    bool is_after = false;
    const cJSON *one, *const list = find_json(post, "single");
    cJSON_ArrayForEach(one, list) {
        const cJSON *const special = find_json(one, "SpecialToken");
        if (special == NULL)
            is_after = true;
        else if (!read_special(from, post, special, is_after))
            return false;
    }
    return is_after || refuse(from->message, "'post_processor': 'single' has no Sequence");
}

static bool read_post_processor(const reader *from, const cJSON *post) {
    if (post == NULL || has_type(post, "ByteLevel")) // which changes offsets alone
        return true;
    if (has_type(post, "TemplateProcessing"))
        return read_template(from, post);
    if (!has_type(post, "Sequence"))
        return refuse(from->message,
                      "'post_processor': is %.64s, want null, ByteLevel, TemplateProcessing or "
                      "Sequence",
                      text_of(post, "type"));
    const cJSON *one, *const list = find_json(post, "processors");
    cJSON_ArrayForEach(one, list) {
        if (has_type(one, "Sequence"))
            return refuse(from->message, "'post_processor': want no Sequence in a Sequence");
        if (!read_post_processor(from, one))
            return false;
    }
    return true;
}

static bool read_rules(const reader *from, const cJSON *tree) {
    tokenizer *const it = from->it;
    it->model = read_bpe(find_json(tree, "model"), from->message.text, from->message.size);
    if (it->model == NULL)
        return false;
    it->end = vocabulary_end(it->model);
    if (find_json(tree, "truncation") != NULL)
        return refuse(from->message, "'truncation': want null: texts are not cut");
    if (find_json(tree, "padding") != NULL)
        return refuse(from->message, "'padding': want null: texts are not padded");
    const cJSON *const decoder = find_json(tree, "decoder");
    const cJSON *const pre_tokenizer = find_json(tree, "pre_tokenizer");
    if (!has_type(decoder, "ByteLevel"))
        return refuse(from->message, "'decoder': is %.64s, want ByteLevel",
                      text_of(decoder, "type"));
    if (!read_normalizer(from, find_json(tree, "normalizer")) ||
        !read_pre_tokenizer(from, pre_tokenizer))
        return false;
    if (!it->has_byte_level)
        return refuse(from->message, "'pre_tokenizer': want ByteLevel as the last one");
    return read_added(from, find_json(tree, "added_tokens")) &&
           read_post_processor(from, find_json(tree, "post_processor"));
}

tokenizer *read_tokenizer(const char *path, char *message, size_t message_size) {
    cJSON *const tree = read_json(path, message, message_size);
    if (tree == NULL)
        return NULL;
    const reader from = {allocate(sizeof(tokenizer)), {message, message_size}};
    const bool is_read = read_rules(&from, tree);
    cJSON_Delete(tree);
    if (is_read)
        return from.it;
    free_tokenizer(from.it);
    return NULL;
}

void free_tokenizer(tokenizer *it) {
    if (it == NULL)
        return;
    for (int n = 0; n < it->added_count; n++) {
        if (it->added[n].text != it->added[n].name)
            free(it->added[n].text);
        free(it->added[n].name);
    }
    for (int n = 0; n < it->split_count; n++)
        free_pattern(it->splits[n]);
    if (it->model != NULL)
        free_bpe(it->model);
    free(it->added);
    free(it);
}

int32_t tokens_end(const tokenizer *it) { return it->end; }

/* ---- encoding ---- */

/* Splits a piece by the expressions from `stage` on, and encodes the parts. */
static void split_piece(const tokenizer *it, int stage, const char *text, size_t count,
                        token_list *to) {
    const int byte_level = it->split_count - (it->byte_level_splits ? 1 : 0);
    char *spaced = NULL;
    if (stage == byte_level && it->adds_space && text[0] != ' ') {
        spaced = allocate(count + 1);
        spaced[0] = ' ';
        memcpy(spaced + 1, text, count);
        text = spaced;
        count++;
    }
    if (stage == it->split_count) {
        encode_piece(it->model, text, count, to);
    } else {
        size_t done = 0, begin = 0, end = 0;
        for (; find_match(it->splits[stage], text, count, &begin, &end); done = begin = end) {
            if (begin > done)
                split_piece(it, stage + 1, text + done, begin - done, to);
            split_piece(it, stage + 1, text + begin, end - begin, to);
        }
        if (done < count)
            split_piece(it, stage + 1, text + done, count - done, to);
    }
    free(spaced);
}

/* The longest added token at the beginning of a text, or NULL. */
static const added_token *find_added(const tokenizer *it, bool is_normalized, const char *text,
                                     size_t count) {
    const added_token *found = NULL;
    for (int n = 0; n < it->added_count; n++) {
        const added_token *const one = &it->added[n];
        if (one->is_normalized == is_normalized && one->length > 0 && one->length <= count &&
            one->text[0] == text[0] && memcmp(one->text, text, one->length) == 0 &&
            (found == NULL || one->length > found->length))
            found = one;
    }
    return found;
}

static size_t spaces_before(const char *text, size_t least, size_t at) {
    while (at > least) {
        size_t before = at - 1, length;
        while (before > least && (text[before] & 0xc0) == 0x80)
            before--;
        if (!is_space(read_utf8(text + before, at - before, &length)))
            break;
        at = before;
    }
    return at;
}

static size_t spaces_after(const char *text, size_t count, size_t at) {
    for (size_t length; at < count; at += length)
        if (!is_space(read_utf8(text + at, count - at, &length)))
            break;
    return at;
}

static void encode_part(const tokenizer *it, bool is_normalized, const char *text, size_t count,
                        token_list *to);

static void encode_rest(const tokenizer *it, bool is_normalized, const char *text, size_t count,
                        token_list *to) {
    if (count == 0)
        return;
    if (is_normalized) {
        split_piece(it, 0, text, count, to);
    } else if (!it->composes) {
        encode_part(it, true, text, count, to);
    } else {
        size_t composed_count;
        char *const composed = compose(text, count, &composed_count);
        encode_part(it, true, composed, composed_count, to);
        free(composed);
    }
}

/* Takes added tokens out, of a text before or after it was normalized. */
static void encode_part(const tokenizer *it, bool is_normalized, const char *text, size_t count,
                        token_list *to) {
    size_t done = 0;
    for (size_t at = 0; at < count;) {
        const added_token *const found = find_added(it, is_normalized, text + at, count - at);
        if (found == NULL) {
            at++;
            continue;
        }
        const size_t begin = found->takes_left ? spaces_before(text, done, at) : at;
        if (begin > done)
            encode_rest(it, is_normalized, text + done, begin - done, to);
        add_token(to, found->id);
        at += found->length;
        done = at = found->takes_right ? spaces_after(text, count, at) : at;
    }
    encode_rest(it, is_normalized, text + done, count - done, to);
}

/* A copy, in which U+FFFD stands for what is not UTF-8. */
static char *make_valid(const char *text, size_t count, size_t *valid_count) {
    enum { REPLACEMENT = sizeof replacement - 1 };
    char *const valid = allocate(count * REPLACEMENT + 1);
    *valid_count = 0;
    for (size_t at = 0, length; at < count; at += length) {
        const bool is_valid = read_utf8(text + at, count - at, &length) >= 0;
        const size_t made = is_valid ? length : REPLACEMENT;
        memcpy(valid + *valid_count, is_valid ? text + at : replacement, made);
        *valid_count += made;
    }
    return valid;
}

void encode_text(const tokenizer *it, const char *text, size_t count, token_list *to) {
    size_t valid_count;
    char *const valid = make_valid(text, count, &valid_count);
    for (int n = 0; n < it->before_count; n++)
        add_token(to, it->before[n]);
    encode_part(it, false, valid, valid_count, to);
    for (int n = 0; n < it->after_count; n++)
        add_token(to, it->after[n]);
    free(valid);
}

/* ---- decoding ---- */

static void append(token_text *to, const char *bytes, size_t count) {
    memcpy(to->text + to->count, bytes, count);
    to->count += count;
    to->text[to->count] = '\0';
}

/* Room for the text of `count` bytes and those that are held. */
static void make_room(token_text *to, size_t count) {
    const size_t room = (count + sizeof to->held) * (sizeof replacement - 1) + 1;
    if (room > to->room) {
        free(to->text);
        to->text = allocate(room);
        to->room = room;
    }
    to->count = 0;
    to->text[0] = '\0';
}

static const char *name_of(const tokenizer *it, int32_t id, bool *is_special) {
    for (int n = 0; n < it->added_count; n++)
        if (it->added[n].id == id) {
            *is_special = it->added[n].is_special;
            return it->added[n].name;
        }
    *is_special = false;
    return spelling_of(it->model, id);
}

void decode_token(token_text *to, int32_t id) {
    bool is_special;
    const char *const name = name_of(to->by, id, &is_special);
    const size_t most = name != NULL ? strlen(name) : 0;
    make_room(to, most);
    if (name == NULL || is_special)
        return;
    char *const bytes = allocate(sizeof to->held + most);
    memcpy(bytes, to->held, to->held_count);
    const size_t count = to->held_count + spelling_bytes(name, bytes + to->held_count);
    to->held_count = 0;
    for (size_t at = 0, length; at < count; at += length) {
        const int32_t point = read_utf8(bytes + at, count - at, &length);
        if (point >= 0) {
            append(to, bytes + at, length);
        } else if (point == UTF8_INVALID) {
            append(to, replacement, sizeof replacement - 1);
        } else {
            memcpy(to->held, bytes + at, length);
            to->held_count = length;
        }
    }
    free(bytes);
}

void decode_end(token_text *to) {
    make_room(to, 0);
    if (to->held_count > 0)
        append(to, replacement, sizeof replacement - 1);
    to->held_count = 0;
}

void free_token_text(token_text *to) { free(to->text); }
