/* fence.h - memory between two guard pages: an access outside it raises SIGSEGV.
 *
 * A program that includes this file defines _GNU_SOURCE before its first #include, for mmap(). */
#pragma once

#include "fixture.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

/* Where the memory lies in its pages. The rest of the pages holds guard bytes. */
typedef enum fence_edge {
    FENCE_START, /* its first byte follows the lower guard page */
    FENCE_OFF,   /* one element further: aligned to its element only */
    FENCE_END,   /* its last byte precedes the upper guard page */
    fence_edges,
} fence_edge;

typedef struct fence {
    unsigned char *room; /* the pages between the guard pages */
    size_t room_size;
    unsigned char *data;
    size_t size;
} fence;

enum { fence_limit = 32 };

static struct {
    fence fence[fence_limit];
    int count;
    struct sigaction before; /* the handler of SIGSEGV: a sanitizer's, or none */
} fence_state;

static inline size_t fence_page(void) { return (size_t)sysconf(_SC_PAGESIZE); }

static inline fence fence_new(size_t size, size_t element, fence_edge edge) {
    const size_t page = fence_page(), room_size = (size + element + page - 1) / page * page;
    unsigned char *const pages = mmap(NULL, room_size + 2 * page, PROT_READ | PROT_WRITE,
                                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED || fence_state.count == fence_limit ||
        mprotect(pages, page, PROT_NONE) != 0 ||
        mprotect(pages + page + room_size, page, PROT_NONE) != 0) {
        printf("no memory between guard pages\n");
        exit(1);
    }
    unsigned char *const room = pages + page;
    const size_t before = edge == FENCE_END ? room_size - size : edge == FENCE_OFF ? element : 0;
    memset(room, test_guard_byte, room_size);
    const fence made = {room, room_size, room + before, size};
    fence_state.fence[fence_state.count++] = made;
    return made;
}

static inline int fence_has_guards(const unsigned char *from, const unsigned char *end) {
    while (from < end && *from == test_guard_byte)
        from++;
    return from == end;
}

static inline int fence_intact(fence x) {
    return fence_has_guards(x.room, x.data) &&
           fence_has_guards(x.data + x.size, x.room + x.room_size);
}

static inline void fence_free_all(void) {
    for (int i = 0; i < fence_state.count; i++) {
        const fence x = fence_state.fence[i];
        CHECK(fence_intact(x));
        munmap(x.room - fence_page(), x.room_size + 2 * fence_page());
    }
    fence_state.count = 0;
}

/* A copy of a contiguous tensor that may be written to. An absent tensor stays absent. */
static inline fdma_tensor fence_output(fdma_tensor like, fence_edge edge) {
    if (like.rank > 0) {
        const fence made = fence_new(bytes_of(like), dtype_size(like.dtype), edge);
        memcpy(made.data, like.data, made.size);
        like.data = made.data;
    }
    return like;
}

/* A copy that may only be read. */
static inline fdma_tensor fence_input(fdma_tensor like, fence_edge edge) {
    like = fence_output(like, edge);
    if (like.rank > 0) {
        const fence made = fence_state.fence[fence_state.count - 1];
        mprotect(made.room, made.room_size, PROT_READ);
    }
    return like;
}

/* Gives a call exactly `bytes` of workspace. */
static inline void fence_workspace(fdma_exec *exec, size_t bytes, fence_edge edge) {
    exec->workspace = fence_new(bytes, 1, edge).data;
    exec->workspace_size = bytes;
}

/* Names the case. The access then faults again, and the previous handler runs. */
static inline void fence_report(int number) {
    static const char words[] = "a byte outside was accessed by ";
    const ssize_t wrote = write(STDERR_FILENO, words, sizeof words - 1) +
                          write(STDERR_FILENO, test_state.context, strlen(test_state.context)) +
                          write(STDERR_FILENO, "\n", 1);
    (void)wrote;
    sigaction(number, &fence_state.before, NULL);
}

static inline void fence_watch(void) {
    const struct sigaction report = {.sa_handler = fence_report};
    sigaction(SIGSEGV, &report, &fence_state.before);
}

/* True if a child process that runs this dies of SIGSEGV. */
static inline int fence_kills(void (*run)(void *), void *context) {
    int status = 0;
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        const struct rlimit no_core = {0, 0};
        setrlimit(RLIMIT_CORE, &no_core);
        signal(SIGSEGV, SIG_DFL);
        run(context);
        _exit(0);
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    return WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV;
}
