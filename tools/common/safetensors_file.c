/* Safetensors files on disk: read through a read-only map, written to a stream. See
 * common/safetensors.h. */
#define _POSIX_C_SOURCE 200809L

#include "common/safetensors.h"

#include "common/arrays.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* Maps a whole regular file. Returns NULL with one line in `message`. */
static const uint8_t *map_file(int descriptor, size_t *count, char *message, size_t message_size) {
    struct stat status;
    if (fstat(descriptor, &status) != 0 || !S_ISREG(status.st_mode)) {
        snprintf(message, message_size, "not a regular file");
        return NULL;
    }
    if (status.st_size == 0) {
        snprintf(message, message_size, "the file is empty");
        return NULL;
    }
    *count = (size_t)status.st_size;
    void *bytes = mmap(NULL, *count, PROT_READ, MAP_PRIVATE, descriptor, 0);
    if (bytes != MAP_FAILED)
        return bytes;
    snprintf(message, message_size, "cannot be mapped: %s", strerror(errno));
    return NULL;
}

int safetensors_open(const char *path, safetensors *file, char *message, size_t message_size) {
    *file = (safetensors){0};
    const int descriptor = open(path, O_RDONLY | O_NONBLOCK); // opening a pipe must not block
    if (descriptor < 0) {
        snprintf(message, message_size, "cannot be opened: %s", strerror(errno));
        return -1;
    }
    size_t count = 0;
    const uint8_t *bytes = map_file(descriptor, &count, message, message_size);
    close(descriptor);
    if (bytes == NULL)
        return -1;
    if (safetensors_parse(bytes, count, file, message, message_size) != 0) {
        munmap((void *)(uintptr_t)bytes, count);
        return -1;
    }
    return 0;
}

void safetensors_close(safetensors *file) {
    void *bytes = (void *)(uintptr_t)file->bytes;
    const size_t count = file->count;
    safetensors_free(file);
    if (bytes != NULL)
        munmap(bytes, count);
}

static const char *file_dtype(fdma_dtype dtype) {
    switch (dtype) {
    case FDMA_FLOAT64:
        return "F64";
    case FDMA_FLOAT32:
        return "F32";
    case FDMA_FLOAT16:
        return "F16";
    case FDMA_BFLOAT16:
        return "BF16";
    case FDMA_INT32:
        return "I32";
    default:
        return "U8";
    }
}

static size_t tensor_bytes(const fdma_tensor *tensor) {
    return (size_t)element_count(tensor) * dtype_bytes(tensor->dtype);
}

/* Prints the header and returns its length; only counts if stream is NULL. */
static size_t print_header(FILE *stream, size_t count, const char *const *names,
                           const fdma_tensor *tensors) {
    char text[512];
    size_t length = 1;
    size_t offset = 0;
    if (stream != NULL)
        fputc('{', stream);
    for (size_t t = 0; t < count; t++) {
        const fdma_tensor *tensor = &tensors[t];
        int used = snprintf(text, sizeof text, "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[",
                            t > 0 ? "," : "", names[t], file_dtype(tensor->dtype));
        for (int axis = 0; axis < tensor->rank; axis++)
            used += snprintf(text + used, sizeof text - (size_t)used, "%s%" PRId64,
                             axis > 0 ? "," : "", tensor->shape[axis]);
        const size_t end = offset + tensor_bytes(tensor);
        used += snprintf(text + used, sizeof text - (size_t)used, "],\"data_offsets\":[%zu,%zu]}",
                         offset, end);
        if (stream != NULL)
            fputs(text, stream);
        length += (size_t)used;
        offset = end;
    }
    if (stream != NULL)
        fputc('}', stream);
    return length + 1;
}

int safetensors_write(FILE *stream, size_t count, const char *const *names,
                      const fdma_tensor *tensors) {
    const size_t length = print_header(NULL, count, names, tensors);
    const size_t padded = (length + 7) / 8 * 8; // so that the data is aligned
    for (int b = 0; b < 8; b++)
        fputc((int)(padded >> (8 * b) & 0xff), stream);
    print_header(stream, count, names, tensors);
    for (size_t space = length; space < padded; space++)
        fputc(' ', stream);
    for (size_t t = 0; t < count; t++)
        fwrite(tensors[t].data, 1, tensor_bytes(&tensors[t]), stream);
    return ferror(stream) != 0 || fflush(stream) != 0 ? -1 : 0;
}
