/* Fuzzes the reader of safetensors headers. If it accepts a file, the tensors lie inside the file;
 * if it refuses one, a line says why. */
#include "fuzz.h"

#include "common/safetensors.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

static void must(bool condition) {
    if (!condition)
        abort();
}

static volatile uint8_t sink; /* volatile: the reads are not optimised away */

static void check_entry(const safetensors *file, const safetensors_entry *entry) {
    must(entry->name != NULL && entry->dtype != NULL && entry->dtype[0] != '\0');
    must(entry->begin <= file->count && entry->bytes <= file->count - entry->begin);
    if (entry->bytes > 0) {
        sink = file->bytes[entry->begin];
        sink = file->bytes[entry->begin + entry->bytes - 1];
    }
    must(entry->rank >= 0);
    for (int64_t axis = 0; axis < entry->rank && axis < SAFETENSORS_RANK; axis++)
        must(entry->shape[axis] >= 0);
    must(safetensors_find(file, entry->name) == entry); /* names are distinct */
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count) {
    safetensors file = {0};
    char message[SAFETENSORS_MESSAGE] = "";
    if (safetensors_parse(bytes, count, &file, message, sizeof message) != 0) {
        must(memchr(message, '\0', sizeof message) != NULL);
        must(message[0] != '\0' && strchr(message, '\n') == NULL);
        return 0;
    }
    must(file.bytes == bytes && file.count == count);
    for (size_t i = 0; i < file.entry_count; i++) {
        check_entry(&file, &file.entries[i]);
        must(i == 0 || file.entries[i - 1].begin <= file.entries[i].begin);
    }
    safetensors_free(&file);
    return 0;
}
