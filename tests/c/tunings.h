/* tunings.h - tunings for the C tests: entries for the class of a call, and files of them. */
#pragma once

#include "gradient.h"

#include "core/operations.h"
#include "tune/tune.h"

#include <unistd.h>

static inline tuning_class class_of_call(fdma_operation operation, const void *args) {
    fdma_problem checked;
    CHECK_OK(fdma_check_call(operation, args, check_shapes, &checked));
    return fdma_class_of(&checked);
}

static inline tuning_entry entry_of(tuning_class calls, tuning_choice choice) {
    tuning_entry entry = {.calls = calls, .choice = choice};
    fdma_write_line(&entry);
    return entry;
}

/* Makes this entry the only one of the process's tuning. */
static inline void tune_class(tuning_class calls, tuning_choice choice) {
    const tuning_entry entry = entry_of(calls, choice);
    CHECK_OK(fdma_tuning_load(NULL));
    CHECK_OK(fdma_put_entry(&entry));
}

/* The name of file `number` of this process, in the test's working folder. */
typedef struct file_name {
    char text[64];
} file_name;

static inline file_name test_file(int number) {
    file_name name;
    snprintf(name.text, sizeof name.text, "tuning-of-test-%ld-%d.txt", (long)getpid(), number);
    return name;
}

static inline void write_text(const char *path, const char *text, size_t count) {
    FILE *const stream = fopen(path, "wb");
    if (CHECK(stream != NULL)) {
        CHECK_INT(fwrite(text, 1, count, stream), count);
        CHECK(fclose(stream) == 0);
    }
}

enum { longest_text = 8192 };

/* Reads a file into text[longest_text], and returns its length. */
static inline size_t read_text(const char *path, char *text) {
    FILE *const stream = fopen(path, "rb");
    size_t count = 0;
    if (CHECK(stream != NULL)) {
        count = fread(text, 1, longest_text - 1, stream);
        fclose(stream);
    }
    text[count] = '\0';
    return count;
}
