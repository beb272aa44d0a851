/* See common/output.h: write under a temporary name, sync, rename. A file that is published early
 * is renamed first, and grows by whole lines. */
#define _XOPEN_SOURCE 700

#include "common/output.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* The file that a handler or exit() must remove; only changed while the signals are blocked. */
static const char *unfinished;

static const int deadly[] = {SIGINT, SIGTERM, SIGHUP};

enum { deadly_count = sizeof deadly / sizeof deadly[0] };

static void remove_unfinished(void) {
    if (unfinished != NULL)
        unlink(unfinished);
}

/* unlink(), signal() and raise() may be called from a handler. The signal ends the program as if
 * there were no handler, once this one has returned. */
static void die_without_traces(int number) {
    remove_unfinished();
    signal(number, SIG_DFL);
    raise(number);
}

static sigset_t block_deadly(void) {
    sigset_t blocked, before;
    sigemptyset(&blocked);
    for (int s = 0; s < deadly_count; s++)
        sigaddset(&blocked, deadly[s]);
    sigprocmask(SIG_BLOCK, &blocked, &before);
    return before;
}

static void set_unfinished(const char *name) {
    static bool handled;
    unfinished = name;
    if (handled)
        return;
    handled = true;
    atexit(remove_unfinished);
    for (int s = 0; s < deadly_count; s++) {
        struct sigaction action = {.sa_handler = SIG_DFL};
        sigaction(deadly[s], NULL, &action);
        if (action.sa_handler == SIG_IGN) // such as SIGHUP under nohup
            continue;
        action = (struct sigaction){.sa_handler = die_without_traces};
        sigemptyset(&action.sa_mask);
        sigaction(deadly[s], &action, NULL);
    }
}

static void forget(output_file *output) {
    const sigset_t before = block_deadly();
    set_unfinished(NULL);
    sigprocmask(SIG_SETMASK, &before, NULL);
    free(output->path);
    free(output->temporary);
    *output = (output_file){0};
}

/* mkstemp() lets only the owner read its file; an output gets the permissions open() would give. */
static FILE *open_temporary(char *name) {
    const sigset_t before = block_deadly();
    const int descriptor = mkstemp(name);
    if (descriptor >= 0)
        set_unfinished(name);
    sigprocmask(SIG_SETMASK, &before, NULL);
    if (descriptor < 0)
        return NULL;
    const mode_t mask = umask(0);
    umask(mask);
    FILE *stream = fchmod(descriptor, 0666 & ~mask) == 0 ? fdopen(descriptor, "wb") : NULL;
    if (stream == NULL) {
        const int reason = errno;
        close(descriptor);
        unlink(name);
        errno = reason;
    }
    return stream;
}

/* The path that `link` points to, or NULL with errno set. */
static char *link_target(const char *link) {
    char target[PATH_MAX];
    const ssize_t length = readlink(link, target, sizeof target);
    if (length < 0 || length == sizeof target) {
        errno = length < 0 ? errno : ENAMETOOLONG;
        return NULL;
    }
    const char *slash = strrchr(link, '/');
    const size_t prefix = slash != NULL && target[0] != '/' ? (size_t)(slash - link) + 1 : 0;
    char *path = malloc(prefix + (size_t)length + 1);
    if (path == NULL)
        return NULL;
    memcpy(path, link, prefix);
    memcpy(path + prefix, target, (size_t)length);
    path[prefix + (size_t)length] = '\0';
    return path;
}

/* Follows symbolic links. The last one may point to a file that does not exist yet. */
static char *resolve(const char *path) {
    enum { LINK_LIMIT = 40 };
    char *name = strdup(path);
    for (int links = 0; name != NULL; links++) {
        struct stat status;
        if (lstat(name, &status) != 0 || !S_ISLNK(status.st_mode))
            return name;
        char *target = links < LINK_LIMIT ? link_target(name) : NULL;
        if (links == LINK_LIMIT)
            errno = ELOOP;
        free(name);
        name = target;
    }
    return NULL;
}

static int open_beside(const char *path, output_file *output) {
    static const char suffix[] = ".XXXXXX";
    output->path = resolve(path);
    if (output->path == NULL)
        return -1;
    const size_t length = strlen(output->path);
    output->temporary = malloc(length + sizeof suffix);
    if (output->temporary == NULL)
        return -1;
    memcpy(output->temporary, output->path, length);
    memcpy(output->temporary + length, suffix, sizeof suffix);
    output->stream = open_temporary(output->temporary);
    return output->stream != NULL ? 0 : -1;
}

int open_output(const char *path, output_file *output) {
    struct stat status;
    *output = (output_file){0};
    if (stat(path, &status) == 0 && !S_ISREG(status.st_mode)) {
        output->stream = fopen(path, "wb"); // links such as /dev/stdout have no path of their own
        return output->stream != NULL ? 0 : -1;
    }
    if (open_beside(path, output) == 0)
        return 0;
    const int reason = errno;
    forget(output);
    errno = reason;
    return -1;
}

/* A rename lasts once its directory is on the disk. Not every file system can sync one: errors are
 * ignored. */
static void sync_directory(const char *path) {
    const char *slash = strrchr(path, '/');
    char *directory = slash != NULL ? strndup(path, (size_t)(slash - path) + 1) : strdup(".");
    const int descriptor = directory != NULL ? open(directory, O_RDONLY) : -1;
    if (descriptor >= 0) {
        fsync(descriptor);
        close(descriptor);
    }
    free(directory);
}

/* Renames the temporary file, which from then on is not removed. */
static int rename_temporary(output_file *output) {
    const sigset_t before = block_deadly();
    const bool failed = rename(output->temporary, output->path) != 0;
    const int reason = errno;
    if (!failed) {
        set_unfinished(NULL);
        free(output->temporary);
        output->temporary = NULL;
    }
    sigprocmask(SIG_SETMASK, &before, NULL);
    errno = reason;
    return failed ? -1 : 0;
}

int publish_output(output_file *output) {
    bool failed = fflush(output->stream) != 0 || ferror(output->stream) != 0;
    if (!failed && output->temporary != NULL)
        failed = rename_temporary(output) != 0;
    if (failed)
        abandon_output(output);
    return failed ? -1 : 0;
}

int commit_output(output_file *output) {
    bool failed = fflush(output->stream) != 0 || ferror(output->stream) != 0;
    if (!failed && output->path != NULL)
        failed = fsync(fileno(output->stream)) != 0;
    if (!failed) {
        failed = fclose(output->stream) != 0;
        output->stream = NULL;
    }
    if (!failed && output->temporary != NULL)
        failed = rename_temporary(output) != 0;
    if (failed) {
        abandon_output(output);
        return -1;
    }
    if (output->path != NULL)
        sync_directory(output->path);
    forget(output);
    return 0;
}

void abandon_output(output_file *output) {
    const int reason = errno;
    if (output->stream != NULL)
        fclose(output->stream);
    if (output->temporary != NULL)
        unlink(output->temporary);
    forget(output);
    errno = reason;
}

bool is_same_file(const char *path, const char *other) {
    struct stat one, two;
    return stat(path, &one) == 0 && stat(other, &two) == 0 && one.st_dev == two.st_dev &&
           one.st_ino == two.st_ino;
}

bool is_standard_output(const char *path) {
    struct stat named, standard;
    return stat(path, &named) == 0 && fstat(STDOUT_FILENO, &standard) == 0 &&
           !S_ISCHR(named.st_mode) && named.st_dev == standard.st_dev &&
           named.st_ino == standard.st_ino;
}
