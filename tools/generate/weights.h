/* The tensors of a folder: model.safetensors, or the shards that model.safetensors.index.json
 * names. */
#pragma once

#include "common/safetensors.h"

typedef struct weights {
    safetensors *shards;
    int shard_count;
} weights;

/*! open_weights() - maps the files of a folder.
 *  Returns 0; or -1 with one line in `message`, which names the file, and nothing to close */
int open_weights(const char *folder, weights *it, char *message, size_t message_size);
void close_weights(weights *it);

/*! find_weights() - the entry of that name, and its bytes; NULL if no shard has it. */
const safetensors_entry *find_weights(const weights *it, const char *name, const uint8_t **bytes);
