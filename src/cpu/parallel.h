/* Threads. No other file of the CPU backend starts one or waits for one. */
#pragma once

#include <stdint.h>

/* Does task `index` on thread number `thread`, whose scratch memory it may use. */
typedef void (*parallel_task)(const void *context, int64_t index, int32_t thread);

/* Between these two calls pthread_cancel() does not end this thread. The first returns what the
 * second is given. */
int fdma_defer_cancellation(void);
void fdma_allow_cancellation(int before);

/* CPUs that this process may use: those that it may run on, and no more than the quota of its
 * cgroup allows. */
int32_t fdma_usable_cpus(void);

/* The number of threads for `tasks` tasks if exec.threads is `asked`. 0 asks for OMP_NUM_THREADS
 * if the environment sets it, else for fdma_usable_cpus(). */
int32_t fdma_thread_count(int32_t asked, int64_t tasks);

/* The same for tasks that take about `microseconds` altogether on one thread: no more threads than
 * are worth waking. */
int32_t fdma_worthwhile_threads(int32_t asked, int64_t tasks, int64_t microseconds);

/* The same where a thread is worth waking for `thread_work` microseconds; 0: as many as above. */
int32_t fdma_tuned_threads(int32_t asked, int64_t tasks, int64_t microseconds, int64_t thread_work);

/* Runs tasks 0 to count - 1, handed out in that order, on at most `threads` threads, of which the
 * caller is one. Tasks round to nearest, without floating-point traps and with subnormal numbers,
 * whatever the caller's modes are. */
void fdma_parallel_for(int32_t threads, int64_t count, parallel_task task, const void *context);
