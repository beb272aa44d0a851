/* test_quota.c - the number of CPUs that a cgroup's quota allows, by files that the test writes. */
#define _POSIX_C_SOURCE 200809L /* mkdtemp(), nftw() */
#define _XOPEN_SOURCE 700

#include "test.h"

#include "cpu/parallel.h"

#include <ftw.h>
#include <sys/stat.h>

static char root[64]; /* replaces the root folder of /proc/self/cgroup and /sys/fs/cgroup */

static void write_file(const char *name, const char *text) {
    char path[256];
    snprintf(path, sizeof path, "%s/%s", root, name);
    for (char *slash = strchr(path + strlen(root) + 1, '/'); slash != NULL;
         slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        mkdir(path, 0700);
        *slash = '/';
    }
    FILE *const file = fopen(path, "w");
    if (CHECK(file != NULL)) {
        fputs(text, file);
        fclose(file);
    }
}

static int remove_one(const char *path, const struct stat *status, int kind, struct FTW *where) {
    (void)status, (void)kind, (void)where;
    return remove(path);
}

static void begin(void) {
    snprintf(root, sizeof root, "/tmp/fdma_quota.XXXXXX");
    CHECK(mkdtemp(root) != NULL);
}

static void end(void) { CHECK_INT(nftw(root, remove_one, 8, FTW_DEPTH | FTW_PHYS), 0); }

static int32_t quota_cpus(void) {
    char membership[128], mount[128];
    snprintf(membership, sizeof membership, "%s/membership", root);
    snprintf(mount, sizeof mount, "%s/mount", root);
    return fdma_quota_cpus(membership, mount);
}

/* cpu.max is "QUOTA PERIOD" in microseconds. */
static void version_2(void) {
    static const struct {
        const char *text;
        int32_t cpus;
    } cases[] = {
        {"max 100000\n", INT32_MAX},
        {"200000 100000\n", 2},
        {"150000 100000\n", 2},
        {"1000 100000\n", 1},
        {"800001 100000\n", 9},
        {"50000 5000\n", 10},
        {"", INT32_MAX},
        {"100000\n", INT32_MAX},
        {"0 100000\n", INT32_MAX},
        {"many few\n", INT32_MAX},
        {"-1 5\n", INT32_MAX},
        {"9223372036854775807 1", INT32_MAX},
    };
    begin();
    write_file("membership", "0::/box\n");
    for (int n = 0; n < TEST_COUNT(cases); n++) {
        test_context("cpu.max %s", cases[n].text);
        write_file("mount/box/cpu.max", cases[n].text);
        CHECK_INT(quota_cpus(), cases[n].cpus);
    }
    end();
}

/* The smallest quota of a cgroup and its parents counts. */
static void the_least_of_a_path_counts(void) {
    begin();
    write_file("membership", "0::/a/b/c\n");
    write_file("mount/a/b/c/cpu.max", "700000 100000\n");
    CHECK_INT(quota_cpus(), 7);
    write_file("mount/a/cpu.max", "300000 100000\n");
    CHECK_INT(quota_cpus(), 3);
    write_file("mount/cpu.max", "200000 100000\n"); /* a container's own cgroup is its mount */
    CHECK_INT(quota_cpus(), 2);
    write_file("mount/other/cpu.max", "100000 100000\n");
    CHECK_INT(quota_cpus(), 2);
    write_file("membership", "0::/not/in/the/mount\n");
    CHECK_INT(quota_cpus(), 2);
    write_file("membership", "0::/\n");
    CHECK_INT(quota_cpus(), 2);
    end();
}

/* In version 1 the hierarchy with the controller cpu counts; -1 means no quota. */
static void version_1(void) {
    begin();
    write_file("membership", "9:cpuset:/set\n4:cpuacct,cpu:/box\n1:name=systemd:/\n0::/\n");
    write_file("mount/cpu/box/cpu.cfs_quota_us", "-1\n");
    write_file("mount/cpu/box/cpu.cfs_period_us", "100000\n");
    CHECK_INT(quota_cpus(), INT32_MAX);
    write_file("mount/cpu/box/cpu.cfs_quota_us", "250000\n");
    CHECK_INT(quota_cpus(), 3);
    write_file("mount/cpu/set/cpu.cfs_quota_us", "100000\n"); /* of another hierarchy's path */
    write_file("mount/cpu/set/cpu.cfs_period_us", "100000\n");
    CHECK_INT(quota_cpus(), 3);
    write_file("mount/cpu/cpu.cfs_quota_us", "50000\n");
    write_file("mount/cpu/cpu.cfs_period_us", "100000\n");
    CHECK_INT(quota_cpus(), 1);
    end();
}

static void files_may_be_missing(void) {
    begin();
    CHECK_INT(quota_cpus(), INT32_MAX);
    write_file("membership", "");
    CHECK_INT(quota_cpus(), INT32_MAX);
    write_file("membership", "0::/box");
    CHECK_INT(quota_cpus(), INT32_MAX);
    write_file("membership", "no colon\n:\n::\n0::\n0:cpu:\n");
    CHECK_INT(quota_cpus(), INT32_MAX);
    end();
}

static const test_entry tests[] = {
    TEST(version_2),
    TEST(the_least_of_a_path_counts),
    TEST(version_1),
    TEST(files_may_be_missing),
};

int main(void) { return test_run(tests, TEST_COUNT(tests)); }
