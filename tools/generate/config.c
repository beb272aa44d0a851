/* See generate/config.h. */
#include "generate/config.h"

#include "common/json_tree.h"

#include <cjson/cJSON.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { MOST_LAYERS = 1000, MOST_SIZE = 1 << 20 };

typedef struct reader {
    const cJSON *tree;
    message_line message;
} reader;

/* The entry, which may be null; NULL if it is absent. */
static const cJSON *find_entry(const cJSON *tree, const char *name) {
    return cJSON_GetObjectItemCaseSensitive(tree, name);
}

/* An absent entry leaves *value as it is. */
static bool read_count(const reader *from, const char *name, int64_t least, int64_t most,
                       int64_t *value) {
    const cJSON *const found = find_entry(from->tree, name);
    if (found != NULL) {
        if (!is_json_integer(found, least, most))
            return refuse(from->message, "'%s': want an integer from %" PRId64 " to %" PRId64, name,
                          least, most);
        *value = (int64_t)found->valuedouble;
    }
    if (*value < least)
        return refuse(from->message,
                      "'%s': is missing, want an integer from %" PRId64 " to %" PRId64, name, least,
                      most);
    return true;
}

static bool read_number(const reader *from, const cJSON *found, const char *name, double *value) {
    if (found == NULL)
        return true;
    if (!cJSON_IsNumber(found) || !(found->valuedouble > 0) || !isfinite(found->valuedouble))
        return refuse(from->message, "'%s': want a number above 0", name);
    *value = found->valuedouble;
    return true;
}

static bool read_flag(const reader *from, const char *name, bool *value) {
    const cJSON *const found = find_entry(from->tree, name);
    if (found == NULL)
        return true;
    if (!cJSON_IsBool(found))
        return refuse(from->message, "'%s': want true or false", name);
    *value = cJSON_IsTrue(found);
    return true;
}

static bool check_text(const reader *from, const char *name, const char *want) {
    const cJSON *const found = find_json(from->tree, name);
    const char *const text = cJSON_IsString(found) ? found->valuestring : "no text";
    if (strcmp(text, want) != 0)
        return refuse(from->message, "'%s': is %.64s, want %s", name, text, want);
    return true;
}

/* Whatever would change the model, and is not computed here. */
static bool check_kind(const reader *from) {
    bool has_experts = false;
    if (!check_text(from, "model_type", "doge") || !read_flag(from, "is_moe", &has_experts))
        return false;
    if (has_experts)
        return refuse(from->message,
                      "'is_moe': is true, want false: models with experts are not read");
    if (find_json(from->tree, "sliding_window") != NULL)
        return refuse(from->message, "'sliding_window': want null: models that slide are not read");
    return find_entry(from->tree, "hidden_act") == NULL || check_text(from, "hidden_act", "silu");
}

/* transformers 5 has one object, and earlier versions rope_theta and rope_scaling. */
static bool read_rotary(const reader *from, config *it) {
    const cJSON *const scaling = find_json(from->tree, "rope_scaling");
    const cJSON *rules = find_json(from->tree, "rope_parameters");
    if (rules != NULL && scaling != NULL)
        return refuse(from->message,
                      "'rope_scaling': stands beside 'rope_parameters', want one of them");
    if (rules == NULL)
        rules = scaling;
    if (rules != NULL && !cJSON_IsObject(rules))
        return refuse(from->message,
                      "'rope_parameters' or 'rope_scaling': is no object, want an object");
    const cJSON *kind = find_entry(rules, "rope_type");
    if (kind == NULL)
        kind = find_entry(rules, "type");
    static const char *const kinds[] = {"default", "linear", "dynamic"}; // rotary_rule
    const char *const name = kind == NULL           ? kinds[0]
                             : cJSON_IsString(kind) ? kind->valuestring
                                                    : "no text";
    int n = 0;
    while (n < 3 && strcmp(kinds[n], name) != 0)
        n++;
    if (n == 3)
        return refuse(from->message, "'rope_type': is %.64s, want default, linear or dynamic",
                      name);
    it->rotary_rule = (rotary_rule)n;
    if (n != 0 && find_json(rules, "factor") == NULL)
        return refuse(from->message, "'factor': is missing, want it with rope_type %s", name);
    it->rotary_base = 10000;
    it->rotary_factor = 1;
    return read_number(from, find_json(from->tree, "rope_theta"), "rope_theta", &it->rotary_base) &&
           read_number(from, find_entry(rules, "rope_theta"), "rope_theta", &it->rotary_base) &&
           read_number(from, find_json(rules, "factor"), "factor", &it->rotary_factor);
}

static bool add_end(const reader *from, const cJSON *end, config *it) {
    if (!cJSON_IsNumber(end) || it->end_count == MOST_ENDS)
        return refuse(from->message, "'eos_token_id': want a token, or up to %d", MOST_ENDS);
    if (!is_json_integer(end, 0, it->vocab_size - 1))
        return refuse(from->message, "'eos_token_id': is %.17g, want a token, 0 to %" PRId64,
                      end->valuedouble, it->vocab_size - 1);
    it->ends[it->end_count++] = (int64_t)end->valuedouble;
    return true;
}

static bool read_ends(const reader *from, config *it) {
    const cJSON *const ends = find_json(from->tree, "eos_token_id");
    if (!cJSON_IsArray(ends))
        return ends == NULL || add_end(from, ends, it);
    if (cJSON_GetArraySize(ends) == 0)
        return refuse(from->message,
                      "'eos_token_id': is an empty list, want null, a token, or up to %d",
                      MOST_ENDS);
    const cJSON *end;
    cJSON_ArrayForEach(end, ends) {
        if (!add_end(from, end, it))
            return false;
    }
    return true;
}

static bool read_heads(const reader *from, config *it) {
    if (!read_count(from, "num_attention_heads", 1, MOST_SIZE, &it->q_heads))
        return false;
    it->kv_heads = it->q_heads; // also for null
    if (find_json(from->tree, "num_key_value_heads") != NULL &&
        !read_count(from, "num_key_value_heads", 1, it->q_heads, &it->kv_heads))
        return false;
    it->head_dim = it->hidden_size / it->q_heads;
    if (!read_count(from, "head_dim", 8, 256, &it->head_dim))
        return false;
    if (it->q_heads % it->kv_heads != 0)
        return refuse(from->message,
                      "'num_key_value_heads': is %" PRId64
                      ", want a divisor of num_attention_heads, %" PRId64,
                      it->kv_heads, it->q_heads);
    if (it->head_dim > 256 || it->head_dim % 8 != 0)
        return refuse(from->message, "'head_dim': is %" PRId64 ", want a multiple of 8 up to 256",
                      it->head_dim);
    return true;
}

/* Of entries with one name transformers takes the last, and find_entry() the first. */
static bool check_names(const reader *from) {
    const cJSON *entry;
    cJSON_ArrayForEach(entry, from->tree) {
        if (find_entry(from->tree, entry->string) != entry)
            return refuse(from->message, "'%.64s': is there twice, want it once", entry->string);
    }
    return true;
}

/* Sizes that config.json does not have are the defaults of transformers' DogeConfig. */
static bool read_entries(const reader *from, config *it) {
    *it = (config){
        .vocab_size = 32768,
        .hidden_size = 1024,
        .intermediate_size = 2048,
        .layers = 32,
        .q_heads = 8,
        .window = 2048,
        .trained_length = 2048,
        .norm_eps = 1e-6,
    };
    return check_names(from) && check_kind(from) &&
           read_count(from, "vocab_size", 1, INT32_MAX / 2, &it->vocab_size) &&
           read_count(from, "hidden_size", 8, MOST_SIZE, &it->hidden_size) &&
           read_count(from, "intermediate_size", 1, MOST_SIZE, &it->intermediate_size) &&
           read_count(from, "num_hidden_layers", 1, MOST_LAYERS, &it->layers) &&
           read_heads(from, it) &&
           read_count(from, "keep_window_size", 1, INT32_MAX / 2, &it->window) &&
           read_count(from, "max_position_embeddings", 1, INT32_MAX, &it->trained_length) &&
           read_number(from, find_entry(from->tree, "rms_norm_eps"), "rms_norm_eps",
                       &it->norm_eps) &&
           read_flag(from, "attention_bias", &it->attention_bias) &&
           read_flag(from, "mlp_bias", &it->mlp_bias) &&
           read_flag(from, "tie_word_embeddings", &it->is_tied) && read_rotary(from, it) &&
           read_ends(from, it);
}

int read_config(const char *path, config *it, char *message, size_t message_size) {
    cJSON *const tree = read_json(path, message, message_size);
    if (tree == NULL)
        return -1;
    const reader from = {tree, {message, message_size}};
    const bool is_read = read_entries(&from, it);
    cJSON_Delete(tree);
    return is_read ? 0 : -1;
}
