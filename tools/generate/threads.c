/* See generate/threads.h. Threads spin for a short time before they sleep, because products follow
 * each other within microseconds. They take the parts of a task one by one, so that a thread which
 * the system does not run for a while holds up one part at most. */
#define _POSIX_C_SOURCE 200809L

#include "generate/threads.h"

#include "common/arrays.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

enum { SPINS = 4000, PARTS = 4 /* of a task for each thread */ };

typedef struct member {
    crew *of;
    pthread_t thread;
} member;

struct crew {
    int count;
    atomic_uint_fast64_t next; /* a round << 32 | the next part of its task */
    atomic_int left;           /* parts that are not done */
    atomic_bool ends;
    crew_task task;
    void *of;
    int parts;
    pthread_mutex_t lock;
    pthread_cond_t begins;
    member *members;
};

static uint32_t round_of(uint64_t next) { return (uint32_t)(next >> 32); }

static void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

/* Returns the round that runs now, once it is another one than `seen`. */
static uint32_t await_round(crew *it, uint32_t seen) {
    uint32_t now;
    for (int n = 0; n < SPINS; n++) {
        now = round_of(atomic_load_explicit(&it->next, memory_order_acquire));
        if (now != seen)
            return now;
        pause_briefly();
    }
    pthread_mutex_lock(&it->lock);
    while ((now = round_of(atomic_load(&it->next))) == seen)
        pthread_cond_wait(&it->begins, &it->lock);
    pthread_mutex_unlock(&it->lock);
    return now;
}

/* Does parts of whichever task runs, as long as there are any. A round cannot end while one of its
 * parts is taken and not done, so the task stays what it is; before that, nothing of it is read. */
static void do_parts(crew *it) {
    for (;;) {
        const uint64_t taken = atomic_fetch_add_explicit(&it->next, 1, memory_order_acq_rel);
        const int part = (int)(uint32_t)taken;
        if (part >= it->parts)
            return;
        it->task(it->of, part, it->parts);
        atomic_fetch_sub_explicit(&it->left, 1, memory_order_release);
    }
}

static void *work(void *argument) {
    const member *const self = argument;
    crew *const it = self->of;
    uint32_t seen = 0;
    for (;;) {
        seen = await_round(it, seen);
        if (atomic_load(&it->ends))
            return NULL;
        do_parts(it);
    }
}

/* The next round, whose parts from `first` on are to be done. */
static void begin_round(crew *it, int first) {
    const uint64_t now = (uint64_t)round_of(atomic_load(&it->next)) + 1;
    pthread_mutex_lock(&it->lock);
    atomic_store_explicit(&it->next, now << 32 | (uint32_t)first, memory_order_release);
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
        it->members[n].of = it;
        if (pthread_create(&it->members[n].thread, NULL, work, &it->members[n]) != 0)
            break;
        it->count++;
    }
    it->parts = it->count > 1 ? it->count * PARTS : 1;
    return it;
}

void free_crew(crew *it) {
    atomic_store(&it->ends, true);
    begin_round(it, it->parts);
    for (int n = 1; n < it->count; n++)
        pthread_join(it->members[n].thread, NULL);
    pthread_cond_destroy(&it->begins);
    pthread_mutex_destroy(&it->lock);
    free(it->members);
    free(it);
}

int crew_size(const crew *it) { return it->count; }

void run_crew(crew *it, crew_task task, void *of) {
    if (it->count == 1) {
        task(of, 0, 1);
        return;
    }
    it->task = task;
    it->of = of;
    atomic_store(&it->left, it->parts);
    begin_round(it, 0);
    do_parts(it);
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

static void run_some(void *of, int part, int parts) {
    const task_list *const list = of;
    for (int64_t n = part; n < list->count; n += parts)
        list->task(list->context, n);
}

void run_tasks(void *threads, int64_t count, fdma_task task, void *task_context) {
    run_crew(threads, run_some, &(task_list){task, task_context, count});
}
