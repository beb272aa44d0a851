/* See generate/threads.h. Threads spin for a short time before they sleep, because products follow
 * each other within microseconds. */
#define _POSIX_C_SOURCE 200809L

#include "generate/threads.h"

#include "common/arrays.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>

enum { SPINS = 4000 };

typedef struct member {
    crew *of;
    int index;
    pthread_t thread;
} member;

struct crew {
    int count;
    atomic_uint round; /* grows by 1 with each task */
    atomic_int left;   /* threads that have not done the task of this round */
    atomic_bool ends;
    crew_task task;
    void *of;
    pthread_mutex_t lock;
    pthread_cond_t begins;
    member *members;
};

static void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static void await_round(crew *it, unsigned seen) {
    for (int n = 0; n < SPINS; n++) {
        if (atomic_load_explicit(&it->round, memory_order_acquire) != seen)
            return;
        pause_briefly();
    }
    pthread_mutex_lock(&it->lock);
    while (atomic_load(&it->round) == seen)
        pthread_cond_wait(&it->begins, &it->lock);
    pthread_mutex_unlock(&it->lock);
}

static void *work(void *argument) {
    const member *const self = argument;
    crew *const it = self->of;
    for (unsigned seen = 0;; seen++) {
        await_round(it, seen);
        if (atomic_load(&it->ends))
            return NULL;
        it->task(it->of, self->index, it->count);
        atomic_fetch_sub_explicit(&it->left, 1, memory_order_release);
    }
}

static void begin_round(crew *it) {
    pthread_mutex_lock(&it->lock);
    atomic_fetch_add_explicit(&it->round, 1, memory_order_release);
    pthread_cond_broadcast(&it->begins);
    pthread_mutex_unlock(&it->lock);
}

crew *new_crew(int count) {
    crew *const it = allocate(sizeof *it);
    it->count = 1;
    it->members = allocate((size_t)count * sizeof *it->members);
    pthread_mutex_init(&it->lock, NULL);
    pthread_cond_init(&it->begins, NULL);
    for (int n = 1; n < count; n++) { // as many as the system gives
        it->members[n] = (member){.of = it, .index = n};
        if (pthread_create(&it->members[n].thread, NULL, work, &it->members[n]) != 0)
            break;
        it->count++;
    }
    return it;
}

void free_crew(crew *it) {
    atomic_store(&it->ends, true);
    begin_round(it);
    for (int n = 1; n < it->count; n++)
        pthread_join(it->members[n].thread, NULL);
    pthread_cond_destroy(&it->begins);
    pthread_mutex_destroy(&it->lock);
    free(it->members);
    free(it);
}

int crew_size(const crew *it) { return it->count; }

void run_crew(crew *it, crew_task task, void *of) {
    if (it->count > 1) {
        it->task = task;
        it->of = of;
        atomic_store(&it->left, it->count - 1);
        begin_round(it);
    }
    task(of, 0, it->count);
    for (int n = 0; atomic_load_explicit(&it->left, memory_order_acquire) > 0; n++)
        if (n < SPINS)
            pause_briefly();
        else
            sched_yield();
}

typedef struct task_list {
    fdma_task task;
    void *context;
    int64_t count;
} task_list;

static void run_some(void *of, int index, int count) {
    const task_list *const list = of;
    for (int64_t n = index; n < list->count; n += count)
        list->task(list->context, n);
}

void run_tasks(void *threads, int64_t count, fdma_task task, void *task_context) {
    run_crew(threads, run_some, &(task_list){task, task_context, count});
}
