/* test_parallel.c - the threads of CPU calls, and the number of CPUs that a cgroup's quota allows,
 * by files that the test writes. */
#define _GNU_SOURCE /* sched_setaffinity */

#include "test.h"

#include "cpu/parallel.h"

#include <fenv.h>
#include <float.h>
#include <ftw.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { most_tasks = 1000, most_workers = 8 };

typedef struct tally {
    _Atomic int done[most_tasks];     /* how often each task ran */
    _Atomic int busy[most_workers];   /* 1 while a thread number is in use */
    _Atomic int clashes, wrong_modes; /* tasks that found an error */
    int64_t work;                     /* of a task, in rounds of a loop */
} tally;

static void work_for(int64_t rounds) {
    volatile int64_t sink = 0;
    for (int64_t n = 0; n < rounds; n++)
        sink = sink + n;
}

/* True if it rounds to nearest and keeps subnormal numbers; the division traps if traps are on. */
static int has_default_modes(void) {
    const volatile float one = 1, little = 0x1p-30F, least = FLT_MIN, zero = 0;
    return one + little == 1 && one - little == 1 && least / 2 > 0 && one / zero == INFINITY;
}

static void count_task(const void *context, int64_t index, int32_t thread) {
    tally *const t = (tally *)(uintptr_t)context;
    t->clashes += atomic_exchange(&t->busy[thread], 1);
    t->wrong_modes += !has_default_modes();
    work_for(t->work);
    t->done[index]++;
    atomic_store(&t->busy[thread], 0);
}

/* True if each of `count` tasks ran once, and no two at a time with one thread number. */
static int is_done_once(int32_t threads, int64_t count, int64_t work) {
    tally t = {.work = work};
    fdma_parallel_for(NULL, threads, count, count_task, &t);
    int right = t.clashes == 0 && t.wrong_modes == 0;
    for (int64_t n = 0; n < most_tasks; n++)
        right &= t.done[n] == (n < count);
    return right;
}

static void tasks_are_done_once(void) {
    static const int64_t counts[] = {0, 1, 2, 3, 17, most_tasks};
    for (int32_t threads = 1; threads <= most_workers; threads++) {
        for (int c = 0; c < TEST_COUNT(counts); c++) {
            test_context("%d threads, %lld tasks", threads, (long long)counts[c]);
            for (int round = 0; round < 20; round++)
                CHECK(is_done_once(threads, counts[c], round * 100));
        }
    }
}

/* Some threads leave while others join; at some of the calls the pool is asleep. */
static void *call_again_and_again(void *unused) {
    const struct timespec pause = {.tv_nsec = 200000};
    intptr_t right = 1;
    (void)unused;
    for (int round = 0; round < 100; round++) {
        right &= is_done_once(1 + round % most_workers, round % 40, round * 10);
        if (round % 10 == 0)
            nanosleep(&pause, NULL);
    }
    return (void *)right;
}

static void several_callers_at_once(void) {
    enum { callers = 6 };
    pthread_t threads[callers];
    for (int n = 0; n < callers; n++)
        CHECK(pthread_create(&threads[n], NULL, call_again_and_again, NULL) == 0);
    for (int n = 0; n < callers; n++) {
        void *right = NULL;
        CHECK(pthread_join(threads[n], &right) == 0 && right != NULL);
    }
}

/* The two tasks of a call that is cancelled while it waits for its worker. */
typedef struct cancelled_call {
    pthread_t caller;
    _Atomic int begun, done; /* tasks */
} cancelled_call;

/* The caller's own task ends at once. The worker's task ends after the caller has begun to wait. */
static void cancel_task(const void *context, int64_t index, int32_t thread) {
    const struct timespec pause = {.tv_nsec = 20000000};
    cancelled_call *const c = (cancelled_call *)(uintptr_t)context;
    (void)index;
    c->begun++;
    while (c->begun < 2)
        sched_yield();
    if (thread == 0)
        pthread_cancel(c->caller);
    else
        nanosleep(&pause, NULL);
    c->done++;
}

static void *call_and_be_cancelled(void *context) {
    cancelled_call *const c = context;
    c->caller = pthread_self();
    fdma_parallel_for(NULL, 2, 2, cancel_task, c);
    return NULL;
}

/* The address sanitizer mistakes frames that a cancelled thread has not left for use after
 * scope. */
#if defined(__SANITIZE_ADDRESS__)
enum { may_cancel = 0 };
#else
enum { may_cancel = 1 };
#endif

/* A cancelled thread ends, but not while a worker has its job or while it holds the pool's lock. */
static void cancellation_waits_for_workers(void) {
    const pid_t child = fork();
    if (child == 0) {
        cancelled_call call = {0};
        pthread_t thread;
        void *result = NULL;
        alarm(60);
        if (!may_cancel || fdma_thread_count(2, 2) < 2)
            _exit(0);
        if (pthread_create(&thread, NULL, call_and_be_cancelled, &call) != 0 ||
            pthread_join(thread, &result) != 0)
            _exit(1);
        const int ended = result == PTHREAD_CANCELED && call.done == 2;
        _exit(ended && is_done_once(most_workers, 100, 1000) ? 0 : 1);
    }
    int status = -1;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* Threads of the parent do not exist in the child; its first call starts new ones. */
static void children_have_threads(void) {
    CHECK(is_done_once(most_workers, 100, 1000));
    const pid_t child = fork();
    if (child == 0) {
        alarm(60);
        _exit(is_done_once(most_workers, 100, 1000) && is_done_once(2, 3, 0) ? 0 : 1);
    }
    int status = -1;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(is_done_once(most_workers, 100, 1000));
}

static void modes_are_the_tasks_own(void) {
    for (int32_t threads = 1; threads <= 4; threads++) {
        fesetround(FE_UPWARD);
#if defined(__GLIBC__)
        feenableexcept(FE_DIVBYZERO | FE_INVALID);
        const int traps = fegetexcept(); /* 0 if the CPU has no traps */
#endif
        const int right = is_done_once(threads, 64, 1000), rounding = fegetround();
        const volatile float one = 1, little = 0x1p-30F;
        const volatile float sum = one + little; /* volatile: computed here and not later */
#if defined(__GLIBC__)
        CHECK_INT(fedisableexcept(FE_ALL_EXCEPT), traps);
#endif
        fesetround(FE_TONEAREST);
        CHECK(right && rounding == FE_UPWARD && sum > 1);
    }
}

#if defined(__linux__)
static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static int compare(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median_of_calls(int32_t threads) {
    enum { calls = 101 };
    double seconds[calls];
    for (int n = 0; n < calls; n++) {
        const double start = now();
        CHECK(is_done_once(threads, 10, 50000));
        seconds[n] = now() - start;
    }
    qsort(seconds, calls, sizeof *seconds, compare);
    return seconds[calls / 2];
}

/* Threads that cannot run cost almost nothing: several threads on one CPU take hardly longer than
 * one. Threads that spin while they wait, as OpenMP's do, take 20 times as long. */
static void waiting_leaves_the_cpu_alone(void) {
    cpu_set_t before, one;
    CPU_ZERO(&one);
    CHECK(sched_getaffinity(0, sizeof before, &before) == 0);
    CPU_SET((size_t)sched_getcpu(), &one);
    CHECK(sched_setaffinity(0, sizeof one, &one) == 0);
    const pid_t child = fork(); /* its threads are created on that CPU */
    if (child == 0) {
        const double alone = median_of_calls(1), together = median_of_calls(4);
        printf("    one thread %.0f us, four %.0f us\n", 1e6 * alone, 1e6 * together);
        fflush(stdout);
        _exit(together < 4 * alone ? 0 : 1);
    }
    int status = -1;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(sched_setaffinity(0, sizeof before, &before) == 0);
}
#else
static void waiting_leaves_the_cpu_alone(void) { puts("skipped: no sched_setaffinity()"); }
#endif

/* In a new process, because the default is determined once. */
static int32_t default_of_child(const char *variable) {
    const pid_t child = fork();
    if (child == 0) {
        if (variable != NULL)
            setenv("OMP_NUM_THREADS", variable, 1);
        else
            unsetenv("OMP_NUM_THREADS");
        _exit(fdma_thread_count(0, 100));
    }
    int status = -1;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status));
    return WEXITSTATUS(status);
}

/* Runs first, before this process determines its default. */
static void default_follows_the_environment(void) {
    const int32_t cpus = fdma_usable_cpus() < 100 ? fdma_usable_cpus() : 100;
    const int has_threads = default_of_child("2") == 2;
    CHECK_INT(default_of_child(NULL), has_threads ? cpus : 1);
    CHECK_INT(default_of_child("3"), has_threads ? 3 : 1);
    CHECK_INT(default_of_child("5,2"), has_threads ? 5 : 1);
    CHECK_INT(default_of_child("0"), has_threads ? cpus : 1);
    CHECK_INT(default_of_child("many"), has_threads ? cpus : 1);
}

static void counts_follow_what_was_asked(void) {
    const int has_threads = fdma_thread_count(2, 2) == 2;
    CHECK_INT(fdma_thread_count(7, 5), has_threads ? 5 : 1);
    CHECK_INT(fdma_thread_count(7, 0), 1);
    CHECK_INT(fdma_thread_count(INT32_MAX, INT64_MAX), has_threads ? 1024 : 1);
    CHECK_INT(fdma_worthwhile_threads(7, 100, 125), has_threads ? 3 : 1);
    CHECK_INT(fdma_worthwhile_threads(7, 100, 0), 1);
}

/* ---- the quota of a cgroup ---- */

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
    TEST(default_follows_the_environment),
    TEST(counts_follow_what_was_asked),
    TEST(tasks_are_done_once),
    TEST(several_callers_at_once),
    TEST(children_have_threads),
    TEST(cancellation_waits_for_workers),
    TEST(modes_are_the_tasks_own),
    TEST(waiting_leaves_the_cpu_alone),
    TEST(version_2),
    TEST(the_least_of_a_path_counts),
    TEST(version_1),
    TEST(files_may_be_missing),
};

int main(void) { return test_run(tests, TEST_COUNT(tests)); }
