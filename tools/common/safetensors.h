/* Reading and writing safetensors files: 8 bytes of header length (little-endian), a header in
 * JSON, the bytes of the tensors. Files are not trusted: whatever is inconsistent is refused with
 * one line that says what is wrong and where.
 * Source: the format section of the safetensors library's documentation */
#pragma once

#include "fdma.h"

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

enum { SAFETENSORS_RANK = 8, SAFETENSORS_MESSAGE = 256 };

typedef struct safetensors_entry {
    const char *name;
    const char *dtype;               /* one of the format's names, such as "BF16" */
    int64_t shape[SAFETENSORS_RANK]; /* the first axes only, if rank is larger */
    int64_t rank;
    uint64_t begin; /* offset of the first byte in the file */
    uint64_t bytes;
} safetensors_entry;

typedef struct safetensors {
    const uint8_t *bytes; /* the whole file, borrowed */
    size_t count;
    safetensors_entry *entries; /* sorted by the offset of their bytes */
    size_t entry_count;
    struct cJSON *header; /* owns the names */
} safetensors;

/*! safetensors_parse() - reads the header of a file that is in memory.
 *  Every entry has a known dtype and bytes inside the file that fit its shape; entries neither
 *  overlap nor leave gaps; names are distinct. The tensors' bytes are not read.
 *  Ownership  borrows `bytes` until safetensors_free(); allocates the entries
 *  Returns 0; or -1 with one line in `message`, cut to message_size, and nothing to free */
int safetensors_parse(const uint8_t *bytes, size_t count, safetensors *file, char *message,
                      size_t message_size);

/*! safetensors_free() - frees what safetensors_parse() allocated. A zeroed struct is allowed. */
void safetensors_free(safetensors *file);

/*! safetensors_find() - the entry of that name, or NULL. */
const safetensors_entry *safetensors_find(const safetensors *file, const char *name);

/*! safetensors_open(), safetensors_close() - the same for a regular file on disk, which is mapped.
 *  Returns as safetensors_parse(). */
int safetensors_open(const char *path, safetensors *file, char *message, size_t message_size);
void safetensors_close(safetensors *file);

/*! safetensors_write() - writes `count` contiguous tensors of floating point or int32.
 *  Returns 0, or -1 with errno set if the stream fails */
int safetensors_write(FILE *stream, size_t count, const char *const *names,
                      const fdma_tensor *tensors);
