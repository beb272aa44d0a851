/* Reads the quotas of cgroups of version 2, cpu.max, and 1, cpu.cfs_quota_us and cpu.cfs_period_us.
 *
 * Without a namespace of its own a container is told a path that its mount does not have: there the
 * mount itself is the container's cgroup. So files that are missing count as no quota.
 *
 * Source: Linux, Documentation/admin-guide/cgroup-v2.rst and scheduler/sched-bwc.rst. */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE // O_CLOEXEC
#endif
#include "cpu/quota.h"

#include "core/integers.h"

#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { path_bytes = 2048, text_bytes = 4096 };

/* Reads the beginning of a file; "" if it cannot be read. Without stdio, which allocates. */
static void read_text(const char *path, char *text, size_t bytes) {
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    const ssize_t size = file >= 0 ? read(file, text, bytes - 1) : 0;
    text[size > 0 ? size : 0] = '\0';
    if (file >= 0)
        close(file);
}

/* The first two integers of a file of a cgroup; 0 if they are missing, as in "max 100000". */
static void read_numbers(const char *folder, const char *name, int64_t numbers[2]) {
    char path[path_bytes], text[64];
    char *at = text;
    const int length = snprintf(path, sizeof path, "%s/%s", folder, name);
    text[0] = '\0';
    if (length < path_bytes)
        read_text(path, text, sizeof text);
    for (int n = 0; n < 2; n++)
        numbers[n] = strtoll(at, &at, 10);
}

static int32_t cpus_of_group(const char *folder) {
    int64_t quota[2], period[2];
    read_numbers(folder, "cpu.max", quota);
    if (quota[0] <= 0 || quota[1] <= 0) {
        read_numbers(folder, "cpu.cfs_quota_us", quota);
        read_numbers(folder, "cpu.cfs_period_us", period);
        quota[1] = period[0];
    }
    if (quota[0] <= 0 || quota[1] <= 0) // version 1 has a quota of -1 for none
        return INT32_MAX;
    return (int32_t)min(quota[0] / quota[1] + (quota[0] % quota[1] > 0), INT32_MAX);
}

/* The least quota of a cgroup and its ancestors; `path` begins with '/'. */
static int32_t cpus_of_path(const char *mount, const char *version, const char *path) {
    char folder[path_bytes];
    const size_t root = strlen(mount) + strlen(version);
    const int length = snprintf(folder, sizeof folder, "%s%s%s", mount, version, path);
    int64_t least = INT32_MAX;
    char *end = length < path_bytes ? folder + length : NULL;
    while (end != NULL) {
        *end = '\0';
        least = min(least, cpus_of_group(folder));
        end = strrchr(folder + root, '/');
    }
    return (int32_t)least;
}

/* True if a list such as "cpu,cpuacct" has the word "cpu". */
static bool has_cpu(const char *controllers) {
    for (const char *at = controllers; (at = strstr(at, "cpu")) != NULL; at++)
        if ((at == controllers || at[-1] == ',') && (at[3] == '\0' || at[3] == ','))
            return true;
    return false;
}

int32_t fdma_quota_cpus(const char *membership, const char *mount) {
    char text[text_bytes], *next = text;
    int64_t least = INT32_MAX;
    read_text(membership, text, sizeof text);
    while (next != NULL && *next != '\0') { // lines such as "4:cpu,cpuacct:/path" and "0::/path"
        char *const line = next;
        next = strchr(line, '\n');
        if (next != NULL)
            *next++ = '\0';
        char *const controllers = strchr(line, ':');
        char *const path = controllers != NULL ? strchr(controllers + 1, ':') : NULL;
        if (path == NULL)
            continue;
        *path = '\0';
        if (controllers + 1 == path)
            least = min(least, cpus_of_path(mount, "", path + 1));
        else if (has_cpu(controllers + 1))
            least = min(least, cpus_of_path(mount, "/cpu", path + 1));
    }
    return (int32_t)least;
}
