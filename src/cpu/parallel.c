/* The only code that knows of OpenMP. */
#include "cpu/parallel.h"

#ifdef _OPENMP
#include <omp.h>
#endif

int32_t fdma_thread_count(int32_t asked, int64_t tasks) {
#ifdef _OPENMP
    const int64_t wanted = asked > 0 ? asked : omp_get_max_threads();
#else
    const int64_t wanted = 1;
    (void)asked;
#endif
    const int64_t useful = tasks < 1 ? 1 : tasks;
    return (int32_t)(wanted < useful ? wanted : useful);
}

int32_t fdma_worthwhile_threads(int32_t asked, int64_t tasks, int64_t microseconds) {
    enum { least_share = 100 }; // microseconds: waking a thread and waiting for it take up to 10
    const int64_t most = 1 + microseconds / least_share;
    return fdma_thread_count(asked, tasks < most ? tasks : most);
}

void fdma_parallel_for(int32_t threads, int64_t count, parallel_task task, const void *context) {
#ifdef _OPENMP
    if (threads > 1) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
        for (int64_t index = 0; index < count; index++)
            task(context, index, omp_get_thread_num());
        return;
    }
#endif
    (void)threads;
    for (int64_t index = 0; index < count; index++)
        task(context, index, 0);
}
