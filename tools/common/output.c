/* Write to a temporary name, sync, rename: see output.h. */
#define _XOPEN_SOURCE 700

#include "common/output.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static void forget(output_file *output) {
    free(output->path);
    free(output->temporary);
    *output = (output_file){0};
}

/* mkstemp() makes files that only their owner reads; an output gets what open() would give. */
static FILE *open_temporary(char *name) {
    const int descriptor = mkstemp(name);
    if (descriptor < 0)
        return NULL;
    const mode_t mask = umask(0);
    umask(mask);
    FILE *stream = fchmod(descriptor, 0666 & ~mask) == 0 ? fdopen(descriptor, "wb") : NULL;
    if (!stream) {
        const int reason = errno;
        close(descriptor);
        unlink(name);
        errno = reason;
    }
    return stream;
}

int open_output(const char *path, output_file *output) {
    static const char suffix[] = ".XXXXXX";
    struct stat status;
    const int exists = stat(path, &status) == 0;
    *output = (output_file){.path = exists ? realpath(path, NULL) : strdup(path)};
    if (!output->path)
        return -1;
    if (exists && !S_ISREG(status.st_mode)) {
        output->stream = fopen(path, "wb");
    } else {
        const size_t length = strlen(output->path);
        output->temporary = malloc(length + sizeof suffix);
        if (output->temporary) {
            memcpy(output->temporary, output->path, length);
            memcpy(output->temporary + length, suffix, sizeof suffix);
            output->stream = open_temporary(output->temporary);
        }
    }
    if (output->stream)
        return 0;
    const int reason = errno;
    forget(output);
    errno = reason;
    return -1;
}

/* A rename is lasting once its directory is on the disk; not every file system can say so. */
static void sync_directory(const char *path) {
    const char *slash = strrchr(path, '/');
    char *directory = slash ? strndup(path, (size_t)(slash - path) + 1) : strdup(".");
    const int descriptor = directory ? open(directory, O_RDONLY) : -1;
    if (descriptor >= 0) {
        fsync(descriptor);
        close(descriptor);
    }
    free(directory);
}

int commit_output(output_file *output) {
    int failed = fflush(output->stream) != 0 || ferror(output->stream);
    if (!failed && output->temporary)
        failed = fsync(fileno(output->stream)) != 0;
    if (failed) {
        abandon_output(output);
        return -1;
    }
    failed = fclose(output->stream) != 0;
    output->stream = NULL;
    if (!failed && output->temporary)
        failed = rename(output->temporary, output->path) != 0;
    if (failed) {
        abandon_output(output);
        return -1;
    }
    if (output->temporary)
        sync_directory(output->path);
    forget(output);
    return 0;
}

void abandon_output(output_file *output) {
    const int reason = errno;
    if (output->stream)
        fclose(output->stream);
    if (output->temporary)
        unlink(output->temporary);
    forget(output);
    errno = reason;
}
