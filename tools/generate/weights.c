/* See generate/weights.h. */
#include "generate/weights.h"

#include "common/arrays.h"
#include "common/json_tree.h"

#include <cjson/cJSON.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PATH_SIZE = 4096, MOST_SHARDS = 1000 };

static const char whole_name[] = "model.safetensors";
static const char index_name[] = "model.safetensors.index.json";

static int open_shard(const char *folder, const char *name, weights *it, char *message,
                      size_t message_size) {
    char path[PATH_SIZE], reason[SAFETENSORS_MESSAGE];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    safetensors *const shard = &it->shards[it->shard_count];
    if (safetensors_open(path, shard, reason, sizeof reason) != 0) {
        snprintf(message, message_size, "%.100s: %s", name, reason);
        return -1;
    }
    it->shard_count++;
    return 0;
}

/* The distinct file names of an index, each without a folder. Returns their number, or -1. */
static int list_shards(const cJSON *tree, const char *names[MOST_SHARDS], char *message,
                       size_t message_size) {
    int count = 0;
    const cJSON *member, *const map = cJSON_GetObjectItemCaseSensitive(tree, "weight_map");
    cJSON_ArrayForEach(member, map) {
        const char *const name = cJSON_IsString(member) ? member->valuestring : "";
        int n = 0;
        while (n < count && strcmp(names[n], name) != 0)
            n++;
        if (n < count)
            continue;
        if (*name == '\0' || strchr(name, '/') != NULL || count == MOST_SHARDS) {
            snprintf(message, message_size, "%s: '%.64s': want one of up to %d names of files",
                     index_name, member->string, MOST_SHARDS);
            return -1;
        }
        names[count++] = name;
    }
    if (count == 0) {
        snprintf(message, message_size, "%s: 'weight_map': want the file of each tensor",
                 index_name);
        return -1;
    }
    return count;
}

static int open_index(const char *folder, const char *path, weights *it, char *message,
                      size_t message_size) {
    char reason[SAFETENSORS_MESSAGE];
    cJSON *const tree = read_json(path, reason, sizeof reason);
    if (tree == NULL) {
        snprintf(message, message_size, "%s: %s", index_name, reason);
        return -1;
    }
    const char *names[MOST_SHARDS];
    const int count = list_shards(tree, names, message, message_size);
    int status = count < 0 ? -1 : 0;
    if (status == 0)
        it->shards = allocate((size_t)count * sizeof *it->shards);
    for (int n = 0; n < count && status == 0; n++)
        status = open_shard(folder, names[n], it, message, message_size);
    cJSON_Delete(tree);
    return status;
}

int open_weights(const char *folder, weights *it, char *message, size_t message_size) {
    char path[PATH_SIZE];
    *it = (weights){0};
    snprintf(path, sizeof path, "%s/%s", folder, index_name);
    int status;
    if (access(path, F_OK) == 0) {
        status = open_index(folder, path, it, message, message_size);
    } else {
        it->shards = allocate(sizeof *it->shards);
        status = open_shard(folder, whole_name, it, message, message_size);
    }
    if (status != 0)
        close_weights(it);
    return status;
}

void close_weights(weights *it) {
    for (int n = 0; n < it->shard_count; n++)
        safetensors_close(&it->shards[n]);
    free(it->shards);
    *it = (weights){0};
}

const safetensors_entry *find_weights(const weights *it, const char *name, const uint8_t **bytes) {
    for (int n = 0; n < it->shard_count; n++) {
        const safetensors_entry *const entry = safetensors_find(&it->shards[n], name);
        if (entry != NULL) {
            *bytes = it->shards[n].bytes + entry->begin;
            return entry;
        }
    }
    return NULL;
}
