/* config.json of a Doge model, as transformers writes it. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { MOST_ENDS = 16 };

typedef enum rotary_rule { ROTARY_DEFAULT, ROTARY_LINEAR, ROTARY_DYNAMIC } rotary_rule;

typedef struct config {
    int64_t vocab_size, hidden_size, intermediate_size, layers;
    int64_t q_heads, kv_heads, head_dim;
    int64_t window;         /* keep_window_size */
    int64_t trained_length; /* max_position_embeddings */
    double norm_eps;
    double rotary_base, rotary_factor; /* the factor is not read with ROTARY_DEFAULT */
    rotary_rule rotary_rule;
    bool attention_bias, mlp_bias, is_tied;
    int64_t ends[MOST_ENDS]; /* eos_token_id: tokens that end a text */
    int end_count;
} config;

/*! read_config() - reads and checks a config.json.
 *  Returns 0; or -1 with one line in `message`, which names the entry that is wrong */
int read_config(const char *path, config *it, char *message, size_t message_size);
