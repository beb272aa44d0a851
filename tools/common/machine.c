/* See common/machine.h. */
#define _POSIX_C_SOURCE 200809L

#include "common/machine.h"

#include "common/json.h"
#include "fdma.h"

#include <dirent.h>
#include <limits.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#if defined(__clang__)
#define COMPILER "clang " __clang_version__
#elif defined(__GNUC__)
#define COMPILER "gcc " __VERSION__
#else
#define COMPILER "unknown"
#endif

/* The directory of this program, or "" if it cannot be written in a shell's single quotes. */
static void find_directory(char *directory, size_t size) {
    const ssize_t length = readlink("/proc/self/exe", directory, size - 1);
    directory[length > 0 ? length : 0] = '\0';
    char *slash = strrchr(directory, '/');
    if (slash != NULL)
        *slash = '\0';
    if (strchr(directory, '\'') != NULL)
        directory[0] = '\0';
}

/* Asks git, if the program lies in a working tree that has this library's header. */
static void find_commit(char *commit, size_t size) {
    char directory[PATH_MAX];
    char line[3 * PATH_MAX];
    commit[0] = '\0';
    find_directory(directory, sizeof directory);
    if (directory[0] == '\0')
        return;
    snprintf(line, sizeof line,
             "exec 2>/dev/null; cd '%s' && git ls-files --error-unmatch :/include/fdma.h >&2 &&"
             " git describe --always --dirty --abbrev=12 --exclude '*'",
             directory);
    FILE *git = popen(line, "r");
    if (git == NULL)
        return;
    if (fgets(commit, (int)size, git) == NULL)
        commit[0] = '\0';
    pclose(git);
    commit[strcspn(commit, "\n")] = '\0';
}

void find_machine(machine_info *machine, int32_t device) {
    fdma_device_info info = {.size = sizeof info};
    *machine = (machine_info){.name = "unknown", .device = device};
    if (fdma_describe_device(device, &info) == FDMA_OK) {
        memcpy(machine->name, info.name, sizeof machine->name);
        machine->cores = info.cores;
    }
    snprintf(machine->compiler, sizeof machine->compiler, "%.60s", COMPILER);
    machine->compiler[strcspn(machine->compiler, "(")] = '\0'; // clang appends where it comes from
    const size_t used = strlen(machine->compiler);
    if (used > 0 && machine->compiler[used - 1] == ' ')
        machine->compiler[used - 1] = '\0';
    const time_t now = time(NULL);
    struct tm utc;
    if (gmtime_r(&now, &utc) != NULL)
        strftime(machine->date, sizeof machine->date, "%Y-%m-%dT%H:%M:%SZ", &utc);
    find_commit(machine->commit, sizeof machine->commit);
}

void print_machine(const machine_info *machine, int threads) {
    printf("%s, %d %s", machine->name, machine->cores,
           machine->device > 0 ? "multiprocessors" : "cores");
    if (machine->device == 0)
        printf("; %d %s", threads, threads == 1 ? "thread" : "threads");
    printf("; %s; %s", machine->compiler, machine->date);
    if (machine->commit[0] != '\0')
        printf("; commit %s", machine->commit);
    printf("\n\n");
}

void write_machine_json(FILE *stream, const machine_info *machine) {
    fputs("{\"machine\": ", stream);
    json_string(stream, machine->name);
    fprintf(stream, ", \"cores\": %d, \"device\": \"%s\", \"compiler\": ", machine->cores,
            machine->device > 0 ? "cuda" : "cpu");
    json_string(stream, machine->compiler);
    fputs(", \"date\": ", stream);
    json_string(stream, machine->date);
    fputs(", \"commit\": ", stream);
    json_string(stream, machine->commit[0] != '\0' ? machine->commit : NULL);
    fputs("}\n", stream);
}

int64_t count_threads(void) {
    DIR *tasks = opendir("/proc/self/task");
    int64_t count = 0;
    if (tasks == NULL)
        return 0;
    for (const struct dirent *one = readdir(tasks); one != NULL; one = readdir(tasks))
        count += one->d_name[0] != '.';
    closedir(tasks);
    return count;
}
