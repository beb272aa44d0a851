/* A pool of threads that all calls share. They sleep while there is nothing to do.
 *
 * A call posts a job and works on it at once; workers that wake up in time join it. A counter hands
 * out the tasks, so a call waits only for tasks that have begun, and never for a worker that has
 * not woken up yet. */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE // sched_getaffinity(), O_CLOEXEC
#endif
#include "cpu/parallel.h"

#include "core/integers.h"
#include "cpu/simd/modes.h"
#include "cpu/threads.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__linux__)
#include <fcntl.h>
#endif

int32_t fdma_usable_cpus(void) {
    int32_t quota = INT32_MAX;
#if defined(__linux__)
    quota = fdma_quota_cpus("/proc/self/cgroup", "/sys/fs/cgroup");
#endif
    return (int32_t)min(count_processors(), quota);
}

#if defined(FDMA_HAVE_THREADS)

#include <stdatomic.h>

enum {
    most_threads = 1024,
    spin_ns = 50000, // how long a thread spins before it sleeps
};

int fdma_defer_cancellation(void) { return defer_cancellation(); }

void fdma_allow_cancellation(int before) { allow_cancellation(before); }

/* One call of fdma_parallel_for(). */
typedef struct parallel_job {
    parallel_task task;
    const void *context;
    int64_t count;
    _Atomic int64_t next;       // the next task to hand out
    _Atomic int32_t working;    // workers that have joined and not left
    int32_t threads;            // threads that may join, including the caller
    _Atomic int32_t joined;     // threads that have joined, also those that left; the caller counts
    struct parallel_job *later; // the next job of the pool
} parallel_job;

typedef struct thread_pool {
    thread_mutex mutex;      // protects what is not atomic, here and in jobs
    thread_condition posted; // a job was posted
    thread_condition left;   // a worker left a job
    parallel_job *jobs;      // in the order in which they were posted
    _Atomic uint32_t posts;
    int32_t wanted;   // workers that all jobs together could use
    int32_t workers;  // threads of the pool
    int32_t idle;     // workers without a job
    int32_t sleeping; // idle workers that sleep
} thread_pool;

static thread_pool pool;

/* Pauses for some cycles. Returns true before `end`. */
static bool spin_before(int64_t end) {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
    return now_ns() < end;
}

static parallel_job *find_job(void) {
    parallel_job *job = pool.jobs;
    while (job != NULL && (job->joined == job->threads || job->next >= job->count))
        job = job->later;
    return job;
}

static void run_tasks(parallel_job *job, int32_t thread) {
    const uint32_t modes = keep_subnormals();
    int64_t index;
    while ((index = atomic_fetch_add(&job->next, 1)) < job->count)
        job->task(job->context, index, thread);
    restore_modes(modes);
}

/* Called with the mutex locked, and returns with it locked, like wait_for_post(). */
static void join_job(parallel_job *job) {
    const int32_t thread = job->joined++;
    job->working++;
    pool.idle--;
    unlock_mutex(&pool.mutex);
    run_tasks(job, thread);
    lock_mutex(&pool.mutex);
    pool.idle++;
    job->working--; // from here on the job may be gone, because its caller may return
    wake_all(&pool.left);
}

static void wait_for_post(int64_t spin_end) {
    const uint32_t posts = pool.posts;
    unlock_mutex(&pool.mutex);
    while (pool.posts == posts && spin_before(spin_end))
        continue;
    lock_mutex(&pool.mutex);
    if (pool.posts != posts)
        return;
    pool.sleeping++;
    wait_locked(&pool.posted, &pool.mutex);
    pool.sleeping--;
}

THREAD_FUNCTION work(void *unused) {
    int64_t spin_end = 0; // a worker spins only after work of its own, not whenever a job is posted
    (void)unused;
    lock_mutex(&pool.mutex);
    for (;;) {
        parallel_job *const job = find_job();
        if (job == NULL) {
            wait_for_post(spin_end);
            continue;
        }
        join_job(job);
        spin_end = now_ns() + spin_ns;
    }
    return 0;
}

/* If the system refuses a thread, the existing ones do the work. */
static void add_workers(void) {
    while (pool.workers < min(pool.wanted, most_threads - 1) && start_thread(work)) {
        pool.workers++;
        pool.idle++;
    }
}

/* For a new process, and for a child after fork(), which has none of its parent's threads. */
static void empty_pool(void) {
    pool = (thread_pool){
        .mutex = THREAD_MUTEX_INIT,
        .posted = THREAD_CONDITION_INIT,
        .left = THREAD_CONDITION_INIT,
    };
}

static thread_once started = THREAD_ONCE_INIT;
static int32_t default_threads;

static void start_pool(void) {
    const int before = fdma_defer_cancellation();           // reading files may be cancelled
    const char *const variable = getenv("OMP_NUM_THREADS"); // strtol() reads the first of a list
    const long wanted = variable != NULL ? strtol(variable, NULL, 10) : 0;
    default_threads = (int32_t)min(wanted > 0 ? wanted : fdma_usable_cpus(), most_threads);
    empty_pool();
    prepare_process(empty_pool);
    fdma_allow_cancellation(before);
}

static void post_job(parallel_job *job) {
    run_once(&started, start_pool);
    lock_mutex(&pool.mutex);
    parallel_job **last = &pool.jobs;
    while (*last != NULL)
        last = &(*last)->later;
    *last = job;
    pool.posts++;
    pool.wanted += job->threads - 1;
    add_workers();
    const int32_t sleeping = pool.sleeping, awake = pool.idle - sleeping;
    const int64_t wake = min(job->threads - 1 - awake, sleeping);
    unlock_mutex(&pool.mutex);
    if (wake == sleeping)
        wake_all(&pool.posted);
    for (int64_t n = 0; n < wake && wake < sleeping; n++)
        wake_one(&pool.posted);
}

/* Withdraws a job. Returns when no worker uses it any more. */
static void close_job(parallel_job *job) {
    lock_mutex(&pool.mutex);
    parallel_job **at = &pool.jobs;
    while (*at != job)
        at = &(*at)->later;
    *at = job->later;
    pool.wanted -= job->threads - 1;
    unlock_mutex(&pool.mutex);
    const int64_t spin_end = now_ns() + spin_ns;
    while (job->working > 0 && spin_before(spin_end))
        continue;
    if (job->working == 0)
        return;
    lock_mutex(&pool.mutex);
    while (job->working > 0)
        wait_locked(&pool.left, &pool.mutex);
    unlock_mutex(&pool.mutex);
}

int32_t fdma_thread_count(int32_t asked, int64_t tasks) {
    run_once(&started, start_pool);
    const int64_t wanted = min(asked > 0 ? asked : default_threads, most_threads);
    return (int32_t)min(wanted, max(tasks, 1));
}

/* The job is on this thread's stack, so that a cancelled thread ends only when no worker uses
 * it. */
static void run_together(int32_t threads, int64_t count, parallel_task task, const void *context) {
    parallel_job job = {
        .task = task, .context = context, .count = count, .threads = threads, .joined = 1};
    const int before = fdma_defer_cancellation();
    post_job(&job);
    run_tasks(&job, 0);
    close_job(&job);
    fdma_allow_cancellation(before);
    end_if_cancelled();
}

/* Does work of a job until there is none, on any thread. Each run has a thread number of its own,
 * whatever index the caller's pool gives it, because scratch memory depends on it. */
static void run_own_task(void *context, int64_t index) {
    parallel_job *const job = context;
    const int32_t thread = job->joined++;
    (void)index;
    if (thread < job->threads)
        run_tasks(job, thread);
}

/* What the caller's pool leaves undone this thread does. */
static void run_on_own_threads(const fdma_parallel *own, int32_t threads, int64_t count,
                               parallel_task task, const void *context) {
    parallel_job job = {.task = task, .context = context, .count = count, .threads = threads};
    const int before = fdma_defer_cancellation();
    own->run(own->context, threads, run_own_task, &job);
    run_own_task(&job, 0);
    fdma_allow_cancellation(before);
    end_if_cancelled();
}

#else

int fdma_defer_cancellation(void) { return 0; }

void fdma_allow_cancellation(int before) { (void)before; }

int32_t fdma_thread_count(int32_t asked, int64_t tasks) {
    (void)asked, (void)tasks;
    return 1;
}

#endif

int32_t fdma_worthwhile_threads(int32_t asked, int64_t tasks, int64_t microseconds) {
    enum { least_microseconds = 50 }; // work per thread: waking it and waiting take up to 10
    return fdma_thread_count(asked, min(tasks, 1 + microseconds / least_microseconds));
}

void fdma_parallel_for(const fdma_parallel *own, int32_t threads, int64_t count, parallel_task task,
                       const void *context) {
#if defined(FDMA_HAVE_THREADS)
    const int32_t used = (int32_t)min(threads, count);
    if (used > 1 && own != NULL)
        run_on_own_threads(own, used, count, task, context);
    else if (used > 1)
        run_together(used, count, task, context);
    if (used > 1)
        return;
#endif
    (void)own, (void)threads;
    const uint32_t modes = keep_subnormals();
    for (int64_t index = 0; index < count; index++)
        task(context, index, 0);
    restore_modes(modes);
}

#if defined(__linux__)

/* ---- the quota of a cgroup ---- */

/* Reads the quotas of cgroups of version 2, cpu.max, and 1, cpu.cfs_quota_us and cpu.cfs_period_us.
 *
 * Without a namespace of its own a container is told a path that its mount does not have: there the
 * mount itself is the container's cgroup. So files that are missing count as no quota.
 *
 * Source: Linux, Documentation/admin-guide/cgroup-v2.rst and scheduler/sched-bwc.rst. */

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

#endif
