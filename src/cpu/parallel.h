/* Threads. Everything else on the CPU is free of them. */
#ifndef FDMA_CPU_PARALLEL_H
#define FDMA_CPU_PARALLEL_H

#include <stdint.h>

/* Does task `index` with the scratch memory of `thread`. */
typedef void (*parallel_task)(const void *context, int64_t index, int32_t thread);

/* How many threads a call uses that asked for `asked` (0: OpenMP's own number) and has `tasks`. */
int32_t fdma_thread_count(int32_t asked, int64_t tasks);

/* The same for tasks that take about `microseconds` on one thread: no more threads than are worth
 * waking. */
int32_t fdma_worthwhile_threads(int32_t asked, int64_t tasks, int64_t microseconds);

/* Runs tasks 0 to count - 1, handed out in that order, on at most `threads` threads. */
void fdma_parallel_for(int32_t threads, int64_t count, parallel_task task, const void *context);

#endif
