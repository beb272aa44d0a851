/* Threads for the pool in parallel.c: POSIX threads, or threads of Windows. No other file of the
 * CPU backend uses them. */
#pragma once

#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE // sched_getaffinity()
#endif

#include <stdbool.h>
#include <stdint.h>

#if defined(_WIN32)

#define WIN32_LEAN_AND_MEAN
#define NOMINMAX
#include <windows.h>

typedef SRWLOCK thread_mutex;
typedef CONDITION_VARIABLE thread_condition;
typedef INIT_ONCE thread_once;

#define THREAD_MUTEX_INIT SRWLOCK_INIT
#define THREAD_CONDITION_INIT CONDITION_VARIABLE_INIT
#define THREAD_ONCE_INIT INIT_ONCE_STATIC_INIT

static inline void lock_mutex(thread_mutex *mutex) { AcquireSRWLockExclusive(mutex); }
static inline void unlock_mutex(thread_mutex *mutex) { ReleaseSRWLockExclusive(mutex); }
static inline void wake_one(thread_condition *condition) { WakeConditionVariable(condition); }
static inline void wake_all(thread_condition *condition) { WakeAllConditionVariable(condition); }

static inline void wait_locked(thread_condition *condition, thread_mutex *mutex) {
    SleepConditionVariableSRW(condition, mutex, INFINITE, 0);
}

static inline BOOL CALLBACK call_function(PINIT_ONCE once, void *function, void **unused) {
    (void)once, (void)unused;
    (*(void (**)(void))function)();
    return TRUE;
}

static inline void run_once(thread_once *once, void (*function)(void)) {
    InitOnceExecuteOnce(once, call_function, &function, NULL);
}

static inline int64_t now_ns(void) {
    LARGE_INTEGER ticks, frequency;
    QueryPerformanceCounter(&ticks);
    QueryPerformanceFrequency(&frequency);
    const int64_t seconds = ticks.QuadPart / frequency.QuadPart;
    return seconds * 1000000000 +
           ticks.QuadPart % frequency.QuadPart * 1000000000 / frequency.QuadPart;
}

/* Starts a detached thread. Returns false if the system refuses. */
static inline bool start_thread(DWORD (*function)(void *)) {
    const HANDLE thread = CreateThread(NULL, 0, function, NULL, 0, NULL);
    return thread != NULL && CloseHandle(thread);
}

#define THREAD_FUNCTION static DWORD WINAPI

/* No thread is cancelled and no process forks. FreeLibrary() must not unmap the code in which
 * threads sleep. On other systems the linker's option nodelete sees to that. */
static inline int defer_cancellation(void) { return 0; }
static inline void allow_cancellation(int before) { (void)before; }
static inline void end_if_cancelled(void) {}

static inline void prepare_process(void (*in_child)(void)) {
    HMODULE module;
    GetModuleHandleExW(GET_MODULE_HANDLE_EX_FLAG_PIN | GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS,
                       (LPCWSTR)(uintptr_t)in_child, &module);
}

/* Processors that this process may run on; it may use all if it is in several groups of them. */
static inline int32_t count_processors(void) {
    DWORD_PTR usable = 0, present = 0;
    int32_t count = 0;
    if (!GetProcessAffinityMask(GetCurrentProcess(), &usable, &present) || usable == 0)
        return (int32_t)GetActiveProcessorCount(ALL_PROCESSOR_GROUPS);
    for (; usable != 0; usable &= usable - 1)
        count++;
    return count;
}
#else

#include <unistd.h>

#if defined(__linux__)
#include <sched.h>
#endif

static inline int32_t count_processors(void) {
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0)
        return (int32_t)CPU_COUNT(&set);
#endif
#if defined(_SC_NPROCESSORS_ONLN)
    return (int32_t)sysconf(_SC_NPROCESSORS_ONLN);
#else
    return 1;
#endif
}

#if defined(FDMA_HAVE_THREADS) // some systems without threads lack these headers

#include <pthread.h>
#include <signal.h>
#include <time.h>

typedef pthread_mutex_t thread_mutex;
typedef pthread_cond_t thread_condition;
typedef pthread_once_t thread_once;

#define THREAD_MUTEX_INIT PTHREAD_MUTEX_INITIALIZER
#define THREAD_CONDITION_INIT PTHREAD_COND_INITIALIZER
#define THREAD_ONCE_INIT PTHREAD_ONCE_INIT

static inline void lock_mutex(thread_mutex *mutex) { pthread_mutex_lock(mutex); }
static inline void unlock_mutex(thread_mutex *mutex) { pthread_mutex_unlock(mutex); }
static inline void wake_one(thread_condition *condition) { pthread_cond_signal(condition); }
static inline void wake_all(thread_condition *condition) { pthread_cond_broadcast(condition); }

static inline void wait_locked(thread_condition *condition, thread_mutex *mutex) {
    pthread_cond_wait(condition, mutex);
}

static inline void run_once(thread_once *once, void (*function)(void)) {
    pthread_once(once, function);
}

static inline int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

#define THREAD_FUNCTION static void *

/* Starts a detached thread, which handles no signals of the program. Returns false if the system
 * refuses. */
static inline bool start_thread(void *(*function)(void *)) {
    sigset_t all, old;
    pthread_t thread;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    const bool started = pthread_create(&thread, NULL, function, NULL) == 0;
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (started)
        pthread_detach(thread);
    return started;
}

static inline int defer_cancellation(void) {
    int before = PTHREAD_CANCEL_ENABLE;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
    return before;
}

static inline void allow_cancellation(int before) { pthread_setcancelstate(before, NULL); }
static inline void end_if_cancelled(void) { pthread_testcancel(); }

/* A child after fork() has none of its parent's threads. */
static inline void prepare_process(void (*in_child)(void)) { pthread_atfork(NULL, NULL, in_child); }

#endif
#endif
