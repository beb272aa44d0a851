/* Threads. No other file of the CPU backend starts one or waits for one. */
#pragma once

#include "fdma.h"

#include <stdint.h>

/* Runs task `index` on thread number `thread`, whose scratch memory it may use. */
typedef void (*parallel_task)(const void *context, int64_t index, int32_t thread);

/* Between these two calls pthread_cancel() does not end this thread. The second takes the result of
 * the first. */
int fdma_defer_cancellation(void);
void fdma_allow_cancellation(int before);

/* CPUs that this process may run on, at most as many as the quota of its cgroup allows. */
int32_t fdma_usable_cpus(void);

/* The number of threads for `tasks` tasks if exec.threads is `asked`. 0 asks for OMP_NUM_THREADS
 * if the environment sets it, else for fdma_usable_cpus(). */
int32_t fdma_thread_count(int32_t asked, int64_t tasks);

/* The same for tasks that take about `microseconds` in total on one thread. Returns no more threads
 * than are worth waking. */
int32_t fdma_worthwhile_threads(int32_t asked, int64_t tasks, int64_t microseconds);

/* Runs tasks 0 to count - 1, handed out in that order, on at most `threads` threads, including the
 * caller: threads of `own`, which may be NULL, or of the pool. Tasks round to nearest, without
 * floating-point traps and with subnormal numbers, in any modes of the caller. */
void fdma_parallel_for(const fdma_parallel *own, int32_t threads, int64_t count, parallel_task task,
                       const void *context);

/* The quota of a cgroup, by which Linux limits the CPU time of a container. */

/* CPUs that the quotas of this process's cgroup and its ancestors allow, rounded up; INT32_MAX
 * without a quota. membership: as /proc/self/cgroup; mount: as /sys/fs/cgroup. */
int32_t fdma_quota_cpus(const char *membership, const char *mount);
