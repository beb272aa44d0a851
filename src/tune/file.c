/* The file of a tuning: the library's version and the CPU that it was made for, then a line for
 * each entry. */
#include "core/error.h"
#include "cpu/cpu.h"
#include "tune/tune.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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
