/* The file of a tuning: the library's version and the CPU that it was made for, then a line for
 * each entry. */
#include "core/error.h"
#include "core/operations.h"
#include "cpu/cpu.h"
#include "tune/tune.h"

#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- an entry as a line ---- */

/* The entries of a tuning as lines of text. A line is accepted only if it is, to the last
 * character, the text that its entry is written as. */

/* A number of an entry, and its range. */
typedef struct line_number {
    const char *name;
    size_t offset; /* in tuning_entry */
    int64_t least, most, step;
    bool is_power; /* a power of 2 */
} line_number;

#define CLASS_NUMBER(NAME, ...) {#NAME, offsetof(tuning_entry, calls.NAME), __VA_ARGS__}
#define CHOICE_NUMBER(NAME, MOST) {#NAME, offsetof(tuning_entry, choice.NAME), 0, MOST, 1, false}

enum { class_numbers = 5, choice_numbers = 3, all_numbers = class_numbers + choice_numbers };

static const line_number numbers[all_numbers] = {
    CLASS_NUMBER(causal, 0, 1, 1, false),
    CLASS_NUMBER(head_dim, 8, 256, 8, false),
    CLASS_NUMBER(rows, 1, INT64_C(1) << 36, 1, true),
    CLASS_NUMBER(keys, 1, INT64_C(1) << 31, 1, true),
    CLASS_NUMBER(kept, 1, INT64_C(1) << 31, 1, true),
    CHOICE_NUMBER(tile_rows, 1 << 16),
    CHOICE_NUMBER(split_keys, 1 << 30),
    CHOICE_NUMBER(thread_work, 1000000),
};

static int64_t *number_at(tuning_entry *entry, const line_number *number) {
    return (int64_t *)(void *)((char *)entry + number->offset);
}

static void append_numbers(tuning_entry *entry, int first, int count) {
    for (int n = first; n < first + count; n++) {
        const size_t used = strlen(entry->line);
        snprintf(entry->line + used, sizeof entry->line - used, " %s=%lld", numbers[n].name,
                 (long long)*number_at(entry, &numbers[n]));
    }
}

void fdma_write_line(tuning_entry *entry) {
    const tuning_class *const calls = &entry->calls;
    const char *const kernel = entry->choice.kernel;
    snprintf(entry->line, sizeof entry->line, "%s %s", fdma_operation_name(calls->operation),
             fdma_dtype_name(calls->dtype));
    append_numbers(entry, 0, class_numbers);
    const size_t used = strlen(entry->line);
    snprintf(entry->line + used, sizeof entry->line - used, " kernel=%s",
             kernel[0] != '\0' ? kernel : "rules");
    append_numbers(entry, class_numbers, choice_numbers);
}

fdma_status fdma_new_tuning(int32_t room, fdma_tuning **tuning) {
    const size_t bytes = sizeof **tuning + (size_t)room * sizeof *(*tuning)->entries;
    *tuning = calloc(1, bytes);
    FDMA_REQUIRE(*tuning != NULL, FDMA_INVALID_ARGUMENT,
                 "tuning: needs %zu bytes of memory, want so much to be free", bytes);
    return FDMA_OK;
}

bool fdma_has_choice(const tuning_choice *choice) {
    return choice->kernel[0] != '\0' || choice->tile_rows > 0 || choice->split_keys > 0 ||
           choice->thread_work > 0;
}

static bool is_in_range(const line_number *number, int64_t value) {
    return value >= number->least && value <= number->most && value % number->step == 0 &&
           (!number->is_power || (value & (value - 1)) == 0);
}

static fdma_status check_numbers(const char *path, int at, tuning_entry *entry) {
    for (int n = 0; n < all_numbers; n++) {
        const line_number *const number = &numbers[n];
        const int64_t value = *number_at(entry, number);
        FDMA_REQUIRE(is_in_range(number, value), FDMA_INVALID_ARGUMENT,
                     "%s: line %d: %s is %lld, want %s from %lld to %lld", fdma_quote(path).text,
                     at, number->name, (long long)value,
                     number->is_power    ? "a power of 2"
                     : number->step == 8 ? "a multiple of 8"
                                         : "a number",
                     (long long)number->least, (long long)number->most);
    }
    FDMA_REQUIRE(entry->calls.kept <= entry->calls.keys, FDMA_INVALID_ARGUMENT,
                 "%s: line %d: kept is %lld, want at most keys, %lld", fdma_quote(path).text, at,
                 (long long)entry->calls.kept, (long long)entry->calls.keys);
    FDMA_REQUIRE(fdma_has_choice(&entry->choice), FDMA_INVALID_ARGUMENT,
                 "%s: line %d: has no choice, want a kernel or a number above 0 behind it",
                 fdma_quote(path).text, at);
    return FDMA_OK;
}

static fdma_status take_operation(const char *path, int at, const char *name, tuning_entry *entry) {
    static const fdma_operation tuned[] = {operation_forward, operation_backward};
    for (size_t n = 0; n < sizeof tuned / sizeof *tuned; n++)
        if (strcmp(name, fdma_operation_name(tuned[n])) == 0) {
            entry->calls.operation = tuned[n];
            return FDMA_OK;
        }
    return fdma_fail(FDMA_INVALID_ARGUMENT,
                     "%s: line %d: the operation is %s, want forward or backward",
                     fdma_quote(path).text, at, fdma_quote(name).text);
}

static fdma_status take_dtype(const char *path, int at, const char *name, tuning_entry *entry) {
    static const fdma_dtype tuned[] = {FDMA_FLOAT32, FDMA_FLOAT16, FDMA_BFLOAT16};
    for (size_t n = 0; n < sizeof tuned / sizeof *tuned; n++)
        if (strcmp(name, fdma_dtype_name(tuned[n])) == 0) {
            entry->calls.dtype = tuned[n];
            return FDMA_OK;
        }
    return fdma_fail(FDMA_INVALID_ARGUMENT,
                     "%s: line %d: the dtype is %s, want float32, float16 or bfloat16",
                     fdma_quote(path).text, at, fdma_quote(name).text);
}

static fdma_status take_kernel(const char *path, int at, const char *name, tuning_entry *entry) {
    static const kernel_backend *const backends[] = {&fdma_cpu_backend, NULL};
    const fdma_kernel *kernel;
    if (strcmp(name, "rules") == 0)
        return FDMA_OK;
    for (int32_t n = 0; (kernel = fdma_kernel_at(backends, n)) != NULL; n++)
        if (kernel->operation == entry->calls.operation && strcmp(kernel->name, name) == 0) {
            snprintf(entry->choice.kernel, sizeof entry->choice.kernel, "%s", name);
            return FDMA_OK;
        }
    return fdma_fail(FDMA_INVALID_ARGUMENT,
                     "%s: line %d: the kernel is %s, want rules, or a kernel of %s on the CPU",
                     fdma_quote(path).text, at, fdma_quote(name).text,
                     fdma_operation_name(entry->calls.operation));
}

fdma_status fdma_read_line(const char *path, int at, const char *line, tuning_entry *entry) {
    enum { words = 3 };
    char operation[16] = "", dtype[16] = "", kernel[tuning_name] = "";
    long long value[all_numbers] = {0};
    // widths of at most 12 digits: sscanf() is undefined for numbers that do not fit
    const int found = sscanf(line,
                             "%15s %15s causal=%12lld head_dim=%12lld rows=%12lld keys=%12lld "
                             "kept=%12lld kernel=%31s tile_rows=%12lld split_keys=%12lld "
                             "thread_work=%12lld",
                             operation, dtype, &value[0], &value[1], &value[2], &value[3],
                             &value[4], kernel, &value[5], &value[6], &value[7]);
    FDMA_REQUIRE(found == words + all_numbers, FDMA_INVALID_ARGUMENT,
                 "%s: line %d: is %s, want a line as fdma_tuning_save() writes it",
                 fdma_quote(path).text, at, fdma_quote(line).text);
    *entry = (tuning_entry){.line = ""};
    for (int n = 0; n < all_numbers; n++)
        *number_at(entry, &numbers[n]) = value[n];
    FDMA_TRY(take_operation(path, at, operation, entry));
    FDMA_TRY(take_dtype(path, at, dtype, entry));
    FDMA_TRY(take_kernel(path, at, kernel, entry));
    FDMA_TRY(check_numbers(path, at, entry));
    fdma_write_line(entry);
    FDMA_REQUIRE(strcmp(entry->line, line) == 0, FDMA_INVALID_ARGUMENT,
                 "%s: line %d: want it as fdma_tuning_save() writes it, %s", fdma_quote(path).text,
                 at, entry->line);
    return FDMA_OK;
}

enum { heading_lines = 3, longest_line = 512 };

/* The first lines of a file of this library and this CPU. */
typedef struct file_heading {
    char line[heading_lines][longest_line];
} file_heading;

static const char *const heading_names[heading_lines] = {"fdma-tuning ", "version ", "machine "};

static fdma_status find_heading(file_heading *heading) {
    fdma_device_info cpu = {.size = sizeof cpu};
    FDMA_TRY(fdma_describe_cpu(&cpu));
    snprintf(heading->line[0], longest_line, "%s1", heading_names[0]);
    snprintf(heading->line[1], longest_line, "%s%d.%d.%d", heading_names[1], FDMA_VERSION_MAJOR,
             FDMA_VERSION_MINOR, FDMA_VERSION_PATCH);
    snprintf(heading->line[2], longest_line, "%s%s; %s", heading_names[2], cpu.name, cpu.features);
    return FDMA_OK;
}

/* State while a file is read. */
typedef struct reading {
    const char *path;
    FILE *stream;
    int number; /* number of the line */
    char line[longest_line];
} reading;

/* Reads the next line, without its end; `more` is false after the last one. */
static fdma_status read_next(reading *file, bool *more) {
    *more = fgets(file->line, longest_line, file->stream) != NULL;
    FDMA_REQUIRE(!ferror(file->stream), FDMA_INVALID_ARGUMENT, "%s: cannot be read: %s",
                 fdma_quote(file->path).text, strerror(errno));
    if (!*more)
        return FDMA_OK;
    file->number++;
    char *const end = strchr(file->line, '\n');
    FDMA_REQUIRE(end != NULL, FDMA_INVALID_ARGUMENT,
                 "%s: line %d: has no end within %d bytes, want a file of fdma_tuning_save()",
                 fdma_quote(file->path).text, file->number, longest_line - 2);
    *end = '\0';
    return FDMA_OK;
}

static fdma_status read_heading(reading *file) {
    file_heading want;
    FDMA_TRY(find_heading(&want));
    for (int n = 0; n < heading_lines; n++) {
        bool more;
        FDMA_TRY(read_next(file, &more));
        const char *const line = more ? file->line : "";
        FDMA_REQUIRE(strncmp(line, heading_names[n], strlen(heading_names[n])) == 0,
                     FDMA_INVALID_ARGUMENT, "%s: line %d: is %s, want one that begins with %s",
                     fdma_quote(file->path).text, n + 1, fdma_quote(line).text, heading_names[n]);
        FDMA_REQUIRE(strcmp(line, want.line[n]) == 0, FDMA_INVALID_ARGUMENT,
                     "%s: line %d: is %s, want %s: measure again here, into a new file",
                     fdma_quote(file->path).text, n + 1, fdma_quote(line).text, want.line[n]);
    }
    return FDMA_OK;
}

static fdma_status read_entries(reading *file, fdma_tuning *tuning) {
    for (;;) {
        bool more;
        tuning_entry entry;
        FDMA_TRY(read_next(file, &more));
        if (!more)
            return FDMA_OK;
        FDMA_REQUIRE(tuning->count < most_entries, FDMA_INVALID_ARGUMENT,
                     "%s: line %d: is one too many, want at most %d entries",
                     fdma_quote(file->path).text, file->number, (int)most_entries);
        FDMA_TRY(fdma_read_line(file->path, file->number, file->line, &entry));
        FDMA_REQUIRE(fdma_find_entry(tuning, &entry.calls) == NULL, FDMA_INVALID_ARGUMENT,
                     "%s: line %d: is the second one of its class, want one",
                     fdma_quote(file->path).text, file->number);
        tuning->entries[tuning->count++] = entry;
    }
}

static fdma_status read_stream(reading *file, fdma_tuning *tuning) {
    FDMA_TRY(read_heading(file));
    return read_entries(file, tuning);
}

/* Frees the room for entries that a tuning does not have. */
static void trim(fdma_tuning **tuning) {
    const size_t count = (size_t)(*tuning)->count;
    fdma_tuning *const less = realloc(*tuning, sizeof **tuning + count * sizeof *less->entries);
    *tuning = less != NULL ? less : *tuning;
}

fdma_status fdma_read_tuning(const char *path, fdma_tuning **tuning) {
    reading file = {.path = path, .stream = fopen(path, "rb")};
    FDMA_REQUIRE(file.stream != NULL, FDMA_INVALID_ARGUMENT, "%s: cannot be opened: %s",
                 fdma_quote(path).text, strerror(errno));
    fdma_status status = fdma_new_tuning(most_entries, tuning);
    if (status == FDMA_OK) {
        status = read_stream(&file, *tuning);
        if (status != FDMA_OK)
            free(*tuning);
        else
            trim(tuning);
    }
    fclose(file.stream);
    return status;
}

static bool write_stream(FILE *stream, const file_heading *heading, const fdma_tuning *tuning) {
    for (int n = 0; n < heading_lines; n++)
        fprintf(stream, "%s\n", heading->line[n]);
    for (int32_t n = 0; n < tuning->count; n++)
        fprintf(stream, "%s\n", tuning->entries[n].line);
    return fflush(stream) == 0 && !ferror(stream);
}

/* Writes the text to another file, which then gets the name: a program that reads at the same time
 * sees the old file or the new one. */
fdma_status fdma_write_tuning(const char *path, const fdma_tuning *tuning) {
    char written[4096];
    file_heading heading;
    FDMA_TRY(find_heading(&heading));
    const int length = snprintf(written, sizeof written, "%s.%ld", path, (long)getpid());
    FDMA_REQUIRE(length > 0 && (size_t)length < sizeof written, FDMA_INVALID_ARGUMENT,
                 "path: has %zu bytes, want at most 4000", strlen(path));
    FILE *const stream = fopen(written, "wb");
    FDMA_REQUIRE(stream != NULL, FDMA_INVALID_ARGUMENT, "%s: cannot be written: %s",
                 fdma_quote(written).text, strerror(errno));
    bool done = write_stream(stream, &heading, tuning);
    int why = errno;
    done = fclose(stream) == 0 && done;
#if defined(_WIN32)
    remove(path); // rename() replaces no file there
#endif
    if (done && rename(written, path) == 0)
        return FDMA_OK;
    why = done ? errno : why;
    remove(written);
    return fdma_fail(FDMA_INVALID_ARGUMENT, "%s: cannot be written: %s", fdma_quote(path).text,
                     strerror(why));
}
