/* See tokenizer/bpe.h. Source: Sennrich, Haddow, Birch: Neural machine translation of rare words
 * with subword units */
#include "tokenizer/bpe.h"

#include "commands.h"
#include "common/arrays.h"
#include "common/json_tree.h"
#include "tokenizer/unicode.h"

#include <cjson/cJSON.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BYTES = 256, MOST_TOKENS = 1 << 26 };

typedef struct merge {
    int32_t left, right, made; /* left is NO_TOKEN where the table is empty */
    int32_t rank;              /* lower ones go first */
} merge;

struct bpe {
    char *letters;         /* the spellings, one after the other, each with a zero */
    const char **spelling; /* [ids]; NULL where there is no such token */
    int32_t end;
    int32_t *names; /* [name_room]: a hash table of ids by spelling, NO_TOKEN where it is empty */
    merge *merges;  /* [merge_room]: a hash table by left and right */
    size_t name_room, merge_room;
    int32_t byte[BYTES]; /* the token of a byte alone */
    bool takes_whole;    /* ignore_merges: a piece that is a token is not divided */
};

void add_token(token_list *to, int32_t id) {
    if (to->count == to->room) {
        to->room = to->room > 0 ? 2 * to->room : 256;
        int32_t *const ids = allocate((size_t)to->room * sizeof *ids);
        if (to->count > 0)
            memcpy(ids, to->ids, (size_t)to->count * sizeof *ids);
        free(to->ids);
        to->ids = ids;
    }
    to->ids[to->count++] = id;
}

/* ---- spellings ---- */

/* Printable bytes are spelled as the characters of Latin-1, and the others, in their order, as
 * those from U+0100 on. Source: the encoder of GPT-2 */
static bool is_printable(int32_t byte) {
    return (byte >= '!' && byte <= '~') || (byte >= 0xa1 && byte != 0xad && byte <= 0xff);
}

static int32_t character_of(int32_t byte) {
    if (is_printable(byte))
        return byte;
    if (byte <= ' ')
        return 0x100 + byte;
    return byte == 0xad ? 0x143 : 0x121 + (byte - 0x7f);
}

/* The byte, or -1. */
static int32_t byte_of(int32_t character) {
    if (character < 0x100)
        return is_printable(character) ? character : -1;
    if (character <= 0x120)
        return character - 0x100;
    return character == 0x143 ? 0xad : character <= 0x142 ? character - 0x121 + 0x7f : -1;
}

size_t spelling_bytes(const char *spelling, char *bytes) {
    const size_t count = strlen(spelling);
    size_t made = 0;
    for (size_t at = 0, length; at < count; at += length) {
        const int32_t byte = byte_of(read_utf8(spelling + at, count - at, &length));
        if (byte < 0) {
            for (size_t n = 0; n < count; n++)
                bytes[n] = spelling[n];
            return count;
        }
        bytes[made++] = (char)byte;
    }
    return made;
}

/* ---- hash tables: the first free place from the hash on ---- */

static size_t room_for(size_t count) {
    size_t room = 16;
    while (room < 2 * count)
        room *= 2;
    return room;
}

/* Source: Fowler, Noll, Vo: FNV-1a */
static size_t hash_name(const char *name, size_t length) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t n = 0; n < length; n++)
        hash = (hash ^ (uint8_t)name[n]) * 0x100000001b3u;
    return (size_t)(hash ^ hash >> 32);
}

/* The place of a spelling, or the free one where it belongs. */
static int32_t *find_name(const bpe *it, const char *name, size_t length) {
    for (size_t at = hash_name(name, length);; at++) {
        int32_t *const id = &it->names[at & (it->name_room - 1)];
        if (*id == NO_TOKEN ||
            (strncmp(it->spelling[*id], name, length) == 0 && it->spelling[*id][length] == '\0'))
            return id;
    }
}

static merge *find_merge(const bpe *it, int32_t left, int32_t right) {
    const uint64_t both = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    for (size_t at = (size_t)(both * 0x9e3779b97f4a7c15u >> 32);; at++) {
        merge *const one = &it->merges[at & (it->merge_room - 1)];
        if (one->left == NO_TOKEN || (one->left == left && one->right == right))
            return one;
    }
}

/* ---- reading ---- */

static bool read_vocabulary(bpe *it, const cJSON *vocabulary, char *message, size_t message_size) {
    size_t letters = 0, count = 0;
    const cJSON *token;
    cJSON_ArrayForEach(token, vocabulary) {
        if (!is_json_integer(token, 0, MOST_TOKENS - 1)) {
            snprintf(message, message_size, "'model.vocab': '%.64s': want an integer from 0 to %d",
                     token->string, MOST_TOKENS - 1);
            return false;
        }
        it->end = token->valueint >= it->end ? token->valueint + 1 : it->end;
        letters += strlen(token->string) + 1;
        count++;
    }
    it->letters = allocate(letters);
    it->spelling = allocate((size_t)it->end * sizeof *it->spelling);
    it->name_room = room_for(count);
    it->names = allocate(it->name_room * sizeof *it->names);
    memset(it->names, 0xff, it->name_room * sizeof *it->names); // NO_TOKEN
    char *to = it->letters;
    cJSON_ArrayForEach(token, vocabulary) {
        const size_t length = strlen(token->string);
        memcpy(to, token->string, length + 1);
        it->spelling[token->valueint] = to;
        *find_name(it, to, length) = token->valueint;
        to += length + 1;
    }
    for (int32_t byte = 0; byte < BYTES; byte++) {
        char name[MOST_UTF8];
        it->byte[byte] = *find_name(it, name, write_utf8(character_of(byte), name));
        if (it->byte[byte] == NO_TOKEN) {
            snprintf(message, message_size,
                     "'model.vocab': has no token for byte 0x%02x, want one for each byte",
                     (unsigned)byte);
            return false;
        }
    }
    return true;
}

/* "a b", or ["a", "b"] */
static bool read_merge(bpe *it, const cJSON *pair, int32_t rank) {
    const char *left = NULL, *right = NULL;
    size_t left_length = 0;
    if (cJSON_IsString(pair)) {
        left = pair->valuestring;
        left_length = strcspn(left, " ");
        right = left[left_length] != '\0' ? left + left_length + 1 : NULL;
    } else if (cJSON_IsArray(pair) && cJSON_GetArraySize(pair) == 2) {
        left = cJSON_GetArrayItem(pair, 0)->valuestring;
        right = cJSON_GetArrayItem(pair, 1)->valuestring;
        left_length = left != NULL ? strlen(left) : 0;
    }
    if (left == NULL || right == NULL)
        return false;
    const size_t right_length = strlen(right);
    const size_t both_length = left_length + right_length;
    char *const both = allocate(both_length + 1);
    snprintf(both, both_length + 1, "%.*s%s", (int)left_length, left, right);
    const merge made = {*find_name(it, left, left_length), *find_name(it, right, right_length),
                        *find_name(it, both, both_length), rank};
    free(both);
    if (made.left == NO_TOKEN || made.right == NO_TOKEN || made.made == NO_TOKEN)
        return false;
    *find_merge(it, made.left, made.right) = made;
    return true;
}

static bool read_merges(bpe *it, const cJSON *merges, char *message, size_t message_size) {
    it->merge_room = room_for((size_t)cJSON_GetArraySize(merges));
    it->merges = allocate(it->merge_room * sizeof *it->merges);
    for (size_t n = 0; n < it->merge_room; n++)
        it->merges[n].left = NO_TOKEN;
    int32_t rank = 0;
    const cJSON *pair;
    cJSON_ArrayForEach(pair, merges) {
        if (!read_merge(it, pair, rank)) {
            snprintf(message, message_size,
                     "'model.merges': entry %d: want two tokens of the vocabulary that together "
                     "are another",
                     (int)rank);
            return false;
        }
        rank++;
    }
    return true;
}

/* Whatever else would change the tokens. */
static bool check_model(const cJSON *model, char *message, size_t message_size) {
    static const char *const marks[] = {"continuing_subword_prefix", "end_of_word_suffix"};
    const cJSON *const type = find_json(model, "type");
    const char *const name = cJSON_IsString(type) ? type->valuestring : "no name";
    if (type != NULL && strcmp(name, "BPE") != 0) {
        snprintf(message, message_size, "'model.type': is %.64s, want BPE", name);
        return false;
    }
    for (int n = 0; n < 2; n++) {
        const cJSON *const mark = find_json(model, marks[n]);
        if (mark != NULL && (!cJSON_IsString(mark) || mark->valuestring[0] != '\0')) {
            snprintf(message, message_size, "'model.%s': want none", marks[n]);
            return false;
        }
    }
    if (find_json(model, "dropout") != NULL || cJSON_IsTrue(find_json(model, "byte_fallback"))) {
        snprintf(message, message_size, "'model': want no dropout and no byte_fallback");
        return false;
    }
    if (!cJSON_IsObject(find_json(model, "vocab")) || !cJSON_IsArray(find_json(model, "merges"))) {
        snprintf(message, message_size, "'model': want an object 'vocab' and an array 'merges'");
        return false;
    }
    return true;
}

bpe *read_bpe(const cJSON *model, char *message, size_t message_size) {
    bpe *const it = allocate(sizeof *it);
    it->takes_whole = cJSON_IsTrue(find_json(model, "ignore_merges"));
    if (check_model(model, message, message_size) &&
        read_vocabulary(it, find_json(model, "vocab"), message, message_size) &&
        read_merges(it, find_json(model, "merges"), message, message_size))
        return it;
    free_bpe(it);
    return NULL;
}

void free_bpe(bpe *it) {
    free(it->letters);
    free(it->spelling);
    free(it->names);
    free(it->merges);
    free(it);
}

int32_t vocabulary_end(const bpe *it) { return it->end; }

const char *spelling_of(const bpe *it, int32_t id) {
    return id >= 0 && id < it->end ? it->spelling[id] : NULL;
}

/* ---- encoding ---- */

/* A part of a piece, which grows as it is merged with its neighbours; id is NO_TOKEN once it
 * belongs to the part before. */
typedef struct part {
    int32_t id;
    int64_t before, after; /* indices of neighbours; -1 at the ends */
} part;

/* Two neighbours that can be merged, unless one of them has changed since. */
typedef struct candidate {
    int32_t rank, made;
    int64_t left;
} candidate;

/* Candidates in a binary heap, the one to merge next first. */
typedef struct queue {
    candidate *items;
    size_t count;
} queue;

static bool goes_before(const candidate *a, const candidate *b) {
    return a->rank != b->rank ? a->rank < b->rank : a->left < b->left;
}

static void push(queue *to, candidate one) {
    size_t at = to->count++;
    for (size_t above; at > 0; at = above) {
        above = (at - 1) / 2;
        if (!goes_before(&one, &to->items[above]))
            break;
        to->items[at] = to->items[above];
    }
    to->items[at] = one;
}

static candidate pop(queue *from) {
    const candidate first = from->items[0], last = from->items[--from->count];
    size_t at = 0;
    for (size_t below; (below = 2 * at + 1) < from->count; at = below) {
        if (below + 1 < from->count && goes_before(&from->items[below + 1], &from->items[below]))
            below++;
        if (!goes_before(&from->items[below], &last))
            break;
        from->items[at] = from->items[below];
    }
    from->items[at] = last;
    return first;
}

static void offer(const bpe *it, const part *parts, int64_t left, queue *to) {
    const int64_t right = left >= 0 ? parts[left].after : -1;
    if (right < 0)
        return;
    const merge *const found = find_merge(it, parts[left].id, parts[right].id);
    if (found->left != NO_TOKEN)
        push(to, (candidate){found->rank, found->made, left});
}

static void merge_parts(const bpe *it, part *parts, queue *candidates) {
    while (candidates->count > 0) {
        const candidate next = pop(candidates);
        part *const left = &parts[next.left];
        if (left->id == NO_TOKEN || left->after < 0)
            continue;
        part *const right = &parts[left->after];
        const merge *const found = find_merge(it, left->id, right->id);
        if (found->left == NO_TOKEN || found->made != next.made)
            continue;
        left->id = next.made;
        right->id = NO_TOKEN;
        left->after = right->after;
        if (left->after >= 0)
            parts[left->after].before = next.left;
        offer(it, parts, left->before, candidates);
        offer(it, parts, next.left, candidates);
    }
}

static int32_t whole_token(const bpe *it, const char *bytes, size_t count) {
    char *const name = allocate(count * 2);
    size_t length = 0;
    for (size_t n = 0; n < count; n++)
        length += write_utf8(character_of((uint8_t)bytes[n]), name + length);
    const int32_t id = *find_name(it, name, length);
    free(name);
    return id;
}

void encode_piece(const bpe *it, const char *bytes, size_t count, token_list *to) {
    const int32_t whole = it->takes_whole ? whole_token(it, bytes, count) : NO_TOKEN;
    if (whole != NO_TOKEN) {
        add_token(to, whole);
        return;
    }
    part *const parts = allocate(count * sizeof *parts);
    queue candidates = {allocate(3 * count * sizeof(candidate)), 0}; // a merge makes up to 2
    for (size_t n = 0; n < count; n++)
        parts[n] = (part){it->byte[(uint8_t)bytes[n]], (int64_t)n - 1,
                          n + 1 < count ? (int64_t)n + 1 : -1};
    for (size_t n = 0; n + 1 < count; n++)
        offer(it, parts, (int64_t)n, &candidates);
    merge_parts(it, parts, &candidates);
    for (size_t n = 0; n < count; n++)
        if (parts[n].id != NO_TOKEN)
            add_token(to, parts[n].id);
    free(parts);
    free(candidates.items);
}
