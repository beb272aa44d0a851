/* The inputs of `fdma attend`, from a safetensors file. */
#include "attend/attend.h"
#include "commands.h"
#include "common/arrays.h"
#include "common/safetensors.h"
#include "common/text.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    const char *name;
    fdma_dtype dtype;
} file_dtypes[] = {
    {"F32", FDMA_FLOAT32},
    {"F16", FDMA_FLOAT16},
    {"BF16", FDMA_BFLOAT16},
    {"F64", FDMA_FLOAT64},
};

static int refuse(const char *path, const char *message) {
    print_error("fdma attend: %s: %s", path, message);
    return EXIT_USAGE;
}

/* Copies a tensor out of the file, where it need not be aligned, and converts it to `dtype`, or
 * keeps the file's if that is 0. Returns 0; or another number, with a message, and leaves `tensor`
 * absent. */
static int read_tensor(const safetensors *file, const char *name, int64_t rank, fdma_dtype dtype,
                       fdma_tensor *tensor, char *message) {
    const safetensors_entry *entry = safetensors_find(file, name);
    fdma_tensor stored = {0};
    if (entry == NULL)
        return snprintf(message, SAFETENSORS_MESSAGE, "no tensor '%s'", name);
    for (size_t d = 0; d < sizeof file_dtypes / sizeof file_dtypes[0]; d++)
        if (strcmp(file_dtypes[d].name, entry->dtype) == 0)
            stored.dtype = file_dtypes[d].dtype;
    if (stored.dtype == 0)
        return snprintf(message, SAFETENSORS_MESSAGE,
                        "tensor '%s': dtype is %s, want F16, BF16, F32 or F64", name, entry->dtype);
    if (entry->rank != rank)
        return snprintf(message, SAFETENSORS_MESSAGE,
                        "tensor '%s': rank is %" PRId64 ", want %" PRId64, name, entry->rank, rank);
    if (entry->bytes == 0)
        return snprintf(message, SAFETENSORS_MESSAGE,
                        "tensor '%s': has no elements, want at least one", name);
    stored = allocate_array(stored.dtype, (int32_t)rank, entry->shape);
    memcpy(stored.data, file->bytes + entry->begin, entry->bytes);
    *tensor = stored;
    if (dtype != 0 && dtype != stored.dtype) {
        *tensor = convert_array(&stored, dtype);
        free(stored.data);
    }
    return 0;
}

/* Only the reference takes float64: such files run in float32. */
static fdma_dtype dtype_to_run(const attend_options *options, const safetensors *file) {
    if (options->dtype >= 0)
        return (fdma_dtype)(options->dtype + FDMA_FLOAT32);
    const safetensors_entry *q = safetensors_find(file, "q");
    if (q != NULL && strcmp(q->dtype, "F16") == 0)
        return FDMA_FLOAT16;
    return q != NULL && strcmp(q->dtype, "BF16") == 0 ? FDMA_BFLOAT16 : FDMA_FLOAT32;
}

static int check_score_shape(const attend_inputs *inputs, char *message) {
    const int64_t want[3] = {inputs->k.shape[0], inputs->k.shape[2], inputs->k.shape[1]};
    const int64_t *have = inputs->score.shape;
    if (memcmp(want, have, sizeof want) == 0)
        return 0;
    return snprintf(message, SAFETENSORS_MESSAGE,
                    "tensor 'score': shape is [%" PRId64 ", %" PRId64 ", %" PRId64
                    "], want [batch, kv_heads, kv_len] of k, [%" PRId64 ", %" PRId64 ", %" PRId64
                    "]",
                    have[0], have[1], have[2], want[0], want[1], want[2]);
}

static int read_all(const attend_options *options, const safetensors *file, attend_inputs *inputs,
                    char *message) {
    const fdma_dtype dtype = dtype_to_run(options, file);
    const fdma_dtype single = FDMA_FLOAT32;
    if (read_tensor(file, "q", 4, dtype, &inputs->q, message) != 0 ||
        read_tensor(file, "k", 4, dtype, &inputs->k, message) != 0 ||
        read_tensor(file, "v", 4, dtype, &inputs->v, message) != 0)
        return -1;
    if (safetensors_find(file, "score") != NULL)
        return read_tensor(file, "score", 3, single, &inputs->score, message) != 0 ||
               check_score_shape(inputs, message) != 0;
    if (safetensors_find(file, "dt_proj") == NULL || safetensors_find(file, "a") == NULL)
        return snprintf(message, SAFETENSORS_MESSAGE,
                        "no tensor 'score', want it or both 'dt_proj' and 'a'");
    return read_tensor(file, "dt_proj", 2, single, &inputs->dt_proj, message) != 0 ||
           read_tensor(file, "a", 1, single, &inputs->a, message) != 0;
}

int read_inputs(const attend_options *options, attend_inputs *inputs) {
    char message[SAFETENSORS_MESSAGE];
    safetensors file;
    if (safetensors_open(options->file, &file, message, sizeof message) != 0)
        return refuse(options->file, message);
    const bool failed = read_all(options, &file, inputs, message) != 0;
    safetensors_close(&file);
    return failed ? refuse(options->file, message) : 0;
}
