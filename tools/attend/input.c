/* The inputs of `fdma attend`, from a safetensors file. */
#include "attend/attend.h"
#include "commands.h"
#include "common/arrays.h"
#include "common/nearest.h"
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

enum { MESSAGE = 1024 };

/* The file that is read, and the options and messages of reading. */
typedef struct input_file {
    const attend_options *options;
    safetensors file;
    attend_inputs *inputs;
    char message[MESSAGE];
} input_file;

const char *attend_name(attend_tensor tensor) {
    static const char *const names[attend_tensor_count] = {"q", "k", "v", "score", "dt_proj", "a"};
    return names[tensor];
}

static const char *name_in_file(const input_file *input, attend_tensor which) {
    const char *given = input->options->names[which];
    return given != NULL ? given : attend_name(which);
}

static bool is_there(const input_file *input, attend_tensor which) {
    return safetensors_find(&input->file, name_in_file(input, which)) != NULL;
}

/* Reports an absent tensor; `instead` names alternatives. The message ends with the names in the
 * file, or the first of them. */
static int refuse_absent(input_file *input, const char *name, const char *instead) {
    enum { MOST_NAMES = 12 };
    const safetensors *file = &input->file;
    nearest_name nearest = {.typed = name};
    size_t used = (size_t)snprintf(input->message, MESSAGE, "no tensor '%.200s'%s", name, instead);
    for (size_t e = 0; e < file->entry_count; e++)
        offer_name(&nearest, file->entries[e].name, false);
    if (nearest.name != NULL)
        used += (size_t)snprintf(input->message + used, MESSAGE - used, ", did you mean '%s'?",
                                 nearest.name);
    used += (size_t)snprintf(input->message + used, MESSAGE - used, " (the file has%s",
                             file->entry_count > 0 ? "" : " none");
    for (size_t e = 0; e < file->entry_count && e < MOST_NAMES; e++)
        used += (size_t)snprintf(input->message + used, MESSAGE - used, "%s %.40s",
                                 e > 0 ? "," : "", file->entries[e].name);
    if (file->entry_count > MOST_NAMES)
        used += (size_t)snprintf(input->message + used, MESSAGE - used, " and %zu more",
                                 file->entry_count - MOST_NAMES);
    snprintf(input->message + used, MESSAGE - used, "; --list prints them)");
    return -1;
}

static fdma_dtype dtype_of(const safetensors_entry *entry) {
    for (size_t d = 0; d < sizeof file_dtypes / sizeof file_dtypes[0]; d++)
        if (strcmp(file_dtypes[d].name, entry->dtype) == 0)
            return file_dtypes[d].dtype;
    return 0;
}

static const char *dtype_text(const safetensors_entry *entry) {
    for (size_t d = 0; d < sizeof file_dtypes / sizeof file_dtypes[0]; d++)
        if (strcmp(file_dtypes[d].name, entry->dtype) == 0)
            return file_dtypes[d].name;
    return NULL;
}

static int check_entry(input_file *input, const safetensors_entry *entry, int64_t rank) {
    if (dtype_of(entry) == 0)
        return snprintf(input->message, MESSAGE,
                        "tensor '%s': dtype is %s, want F16, BF16, F32 or F64", entry->name,
                        entry->dtype);
    if (entry->rank != rank)
        return snprintf(input->message, MESSAGE, "tensor '%s': rank is %" PRId64 ", want %" PRId64,
                        entry->name, entry->rank, rank);
    if (entry->bytes == 0)
        return snprintf(input->message, MESSAGE, "tensor '%s': has no elements, want at least one",
                        entry->name);
    return 0;
}

static void replace_array(fdma_tensor *tensor, fdma_tensor other) {
    free(tensor->data);
    *tensor = other;
}

/* Copies a tensor out of the file, where it need not be aligned, and converts it to `dtype`.
 * Returns 0; on an error another number, with a message and without a `tensor`. */
static int read_tensor(input_file *input, attend_tensor which, int64_t rank, fdma_dtype dtype,
                       fdma_tensor *tensor) {
    const char *name = name_in_file(input, which);
    const safetensors_entry *entry = safetensors_find(&input->file, name);
    if (entry == NULL)
        return refuse_absent(input, name, "");
    if (check_entry(input, entry, rank) != 0)
        return -1;
    *tensor = allocate_array(dtype_of(entry), (int32_t)rank, entry->shape);
    memcpy(tensor->data, input->file.bytes + entry->begin, entry->bytes);
    input->inputs->dtypes[which] = dtype_text(entry);
    input->inputs->nans[which] = count_nans(tensor);
    if (dtype != tensor->dtype)
        replace_array(tensor, convert_array(tensor, dtype));
    if (rank == 4 && input->options->layout == LAYOUT_BHLD)
        replace_array(tensor, swap_axes(tensor));
    return 0;
}

/* Only the reference takes float64: such files run in float32. */
static fdma_dtype dtype_to_run(const input_file *input) {
    const safetensors_entry *q = safetensors_find(&input->file, name_in_file(input, ATTEND_Q));
    if (input->options->dtype >= 0)
        return (fdma_dtype)(input->options->dtype + FDMA_FLOAT32);
    if (q != NULL && strcmp(q->dtype, "F16") == 0)
        return FDMA_FLOAT16;
    return q != NULL && strcmp(q->dtype, "BF16") == 0 ? FDMA_BFLOAT16 : FDMA_FLOAT32;
}

static int check_score_shape(input_file *input) {
    const fdma_tensor *k = &input->inputs->k;
    const int64_t want[3] = {k->shape[0], k->shape[2], k->shape[1]};
    const int64_t *have = input->inputs->score.shape;
    if (memcmp(want, have, sizeof want) == 0)
        return 0;
    return snprintf(
        input->message, MESSAGE,
        "tensor '%s': shape is [%" PRId64 ", %" PRId64 ", %" PRId64
        "], want [batch, kv_heads, kv_len] of k, [%" PRId64 ", %" PRId64 ", %" PRId64 "]",
        name_in_file(input, ATTEND_SCORE), have[0], have[1], have[2], want[0], want[1], want[2]);
}

/* True if the tensors belong together when axis `len` of q, k and v has the positions, and axis 3 -
 * len the heads. */
static bool fits(const attend_inputs *inputs, int len) {
    const int64_t *q = inputs->q.shape, *k = inputs->k.shape;
    const int64_t heads = k[3 - len];
    const bool scored = inputs->score.rank > 0;
    return memcmp(k, inputs->v.shape, 4 * sizeof *k) == 0 && q[0] == k[0] && q[3] == k[3] &&
           q[3 - len] % heads == 0 &&
           (scored ? inputs->score.shape[1] == heads && inputs->score.shape[2] == k[len]
                   : inputs->dt_proj.shape[0] == heads && inputs->a.shape[0] == heads);
}

static int check_layout(input_file *input) {
    static const char *const axes[] = {"[batch, len, heads, head_dim]",
                                       "[batch, heads, len, head_dim]"};
    static const char *const words[] = {"blhd", "bhld"};
    const int layout = input->options->layout;
    if (fits(input->inputs, 1) || !fits(input->inputs, 2))
        return 0; // the calls report other mistakes
    const int64_t *q = input->inputs->q.shape, *k = input->inputs->k.shape;
    const int first = layout == LAYOUT_BLHD ? 1 : 2;
    return snprintf(input->message, MESSAGE,
                    "tensors '%s' [%" PRId64 ", %" PRId64 ", %" PRId64 ", %" PRId64
                    "] and '%s' [%" PRId64 ", %" PRId64 ", %" PRId64 ", %" PRId64
                    "]: want %s; they fit %s: give --layout %s",
                    name_in_file(input, ATTEND_Q), q[0], q[first], q[3 - first], q[3],
                    name_in_file(input, ATTEND_K), k[0], k[first], k[3 - first], k[3], axes[layout],
                    axes[1 - layout], words[1 - layout]);
}

static int read_scores(input_file *input) {
    attend_inputs *inputs = input->inputs;
    const char *const *names = input->options->names;
    const bool projected = is_there(input, ATTEND_DT_PROJ) && is_there(input, ATTEND_A);
    const bool wanted = names[ATTEND_DT_PROJ] != NULL || names[ATTEND_A] != NULL;
    if (names[ATTEND_SCORE] != NULL || (!wanted && is_there(input, ATTEND_SCORE))) {
        inputs->leaves_projection = projected;
        return read_tensor(input, ATTEND_SCORE, 3, FDMA_FLOAT32, &inputs->score);
    }
    if (!projected && !wanted)
        return refuse_absent(input, name_in_file(input, ATTEND_SCORE),
                             ", want it or both 'dt_proj' and 'a'");
    return read_tensor(input, ATTEND_DT_PROJ, 2, FDMA_FLOAT32, &inputs->dt_proj) != 0 ||
           read_tensor(input, ATTEND_A, 1, FDMA_FLOAT32, &inputs->a) != 0;
}

static int read_all(input_file *input) {
    const fdma_dtype dtype = dtype_to_run(input);
    attend_inputs *inputs = input->inputs;
    return read_tensor(input, ATTEND_Q, 4, dtype, &inputs->q) != 0 ||
           read_tensor(input, ATTEND_K, 4, dtype, &inputs->k) != 0 ||
           read_tensor(input, ATTEND_V, 4, dtype, &inputs->v) != 0 || read_scores(input) != 0 ||
           check_layout(input) != 0 || (inputs->score.rank > 0 && check_score_shape(input) != 0);
}

static int open_input(const attend_options *options, input_file *input) {
    if (strcmp(options->file, "-") == 0) {
        print_error("fdma attend: FILE is '-': standard input cannot be read, want a file");
        return EXIT_USAGE;
    }
    if (safetensors_open(options->file, &input->file, input->message, MESSAGE) == 0)
        return 0;
    print_error("fdma attend: %s: %s", options->file, input->message);
    return EXIT_USAGE;
}

int read_inputs(const attend_options *options, attend_inputs *inputs) {
    input_file input = {.options = options, .inputs = inputs};
    if (open_input(options, &input) != 0)
        return EXIT_USAGE;
    const bool failed = read_all(&input) != 0;
    if (failed)
        print_error("fdma attend: %s: %s", options->file, input.message);
    safetensors_close(&input.file);
    return failed ? EXIT_USAGE : 0;
}

int list_tensors(const attend_options *options) {
    input_file input = {.options = options};
    if (open_input(options, &input) != 0)
        return EXIT_USAGE;
    for (size_t e = 0; e < input.file.entry_count; e++) {
        const safetensors_entry *entry = &input.file.entries[e];
        print_text(stdout, entry->name);
        printf(" %s [", entry->dtype);
        for (int64_t axis = 0; axis < entry->rank && axis < SAFETENSORS_RANK; axis++)
            printf("%s%" PRId64, axis > 0 ? ", " : "", entry->shape[axis]);
        printf(entry->rank > SAFETENSORS_RANK ? ", ...]\n" : "]\n");
    }
    safetensors_close(&input.file);
    return 0;
}
