/* The threads, barriers and collectives of the emulated device: emulator.h. */
#include "emulator.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <thread>
#include <time.h>
#include <vector>

#ifndef __x86_64__
#error "the emulator switches stacks in assembly of x86-64"
#endif

enum {
    dynamic_bytes = 227 * 1024, // of shared memory
    // not a multiple of the page size, or the frames of all threads share a set of the cache
    stack_bytes = 96 * 1024 + 17 * 64,
    most_threads = 1024, // of a block
    named_barriers = 16,
    patience = 60, // seconds without progress before the program ends
};

/* The kernels' sources use several names for dynamic shared memory. */
thread_local __attribute__((aligned(1024))) char bytes[dynamic_bytes];
extern thread_local char dynamic_shared[] __attribute__((alias("bytes")));
extern thread_local char memory[] __attribute__((alias("bytes")));
extern thread_local char table[] __attribute__((alias("bytes")));

thread_local emulated_thread_state *emulated_thread;
thread_local uint3 threadIdx, blockIdx;
thread_local dim3 blockDim, gridDim;
thread_local uint32_t emulated_rank;

struct copy_queue {
    std::vector<emulated_copy> copies;
};

struct rendezvous { // of lanes of a warp
    uint32_t mask, arrived;
    uint64_t done; // how often all lanes met
    void *lanes[32];
    void (*operation)(void *const *lanes, uint32_t mask);
};

struct emulated_warp {
    uint32_t live; // lanes that have not ended
    std::vector<rendezvous *> meetings;
};

struct named_barrier {
    uint32_t arrived, wanted;
    uint64_t done;
    bool any[2]; // of the predicates, in this round and the last
};

struct cluster_state {
    std::mutex lock;
    uint32_t threads, arrived, ended;
    std::atomic<uint64_t> phase{0};
    std::vector<char *> shared; // of each block
};

/* State of an OS thread for the blocks that it runs. */
struct block_runner {
    char *stacks = NULL;
    void *stack_pointer = NULL;
    emulated_thread_state threads[most_threads];
    emulated_warp warps[most_threads / 32];
    copy_queue copies[most_threads];
    named_barrier barriers[named_barriers];
    uint32_t live = 0;
    cluster_state *cluster = NULL;
    const std::function<void()> *kernel = NULL;
};

static thread_local block_runner *runner;

[[noreturn]] void emulated_fail(const char *what) {
    fprintf(stderr, "the emulated device: %s (block %u %u %u, thread %u %u)\n", what, blockIdx.x,
            blockIdx.y, blockIdx.z, threadIdx.x, threadIdx.y);
    abort();
}

/* ---- coroutines ---- */

/* Saves the callee-saved registers and the stack pointer in *from, and continues at `to`. */
extern "C" void emulated_switch(void **from, void *to);
__asm__(".text\n"
        ".globl emulated_switch\n"
        ".hidden emulated_switch\n"
        ".type emulated_switch, @function\n"
        "emulated_switch:\n"
        "pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
        "movq %rsp, (%rdi)\n"
        "movq %rsi, %rsp\n"
        "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n"
        "ret\n"
        ".size emulated_switch, .-emulated_switch\n");

static void leave_thread() {
    emulated_switch(&emulated_thread->stack_pointer, runner->stack_pointer);
}

static void resume(emulated_thread_state *thread) {
    emulated_thread = thread;
    threadIdx = thread->index;
    thread->polls = false;
    emulated_switch(&runner->stack_pointer, thread->stack_pointer);
    emulated_thread = NULL;
}

static void wait_for(const uint64_t *counter, uint64_t seen) {
    emulated_thread->waits_for = counter;
    emulated_thread->seen = seen;
    leave_thread();
    emulated_thread->waits_for = NULL;
}

void emulated_poll() {
    emulated_thread->polls = true;
    leave_thread();
}

/* ---- collectives and barriers ---- */

static void complete(rendezvous *meeting) {
    meeting->operation(meeting->lanes, meeting->mask);
    meeting->arrived = 0;
    meeting->done++;
    memset(meeting->lanes, 0, sizeof meeting->lanes);
}

static rendezvous *meeting_of(emulated_warp *warp, uint32_t mask) {
    for (rendezvous *meeting : warp->meetings)
        if (meeting->mask == mask)
            return meeting;
    warp->meetings.push_back(new rendezvous{mask, 0, 0, {}, NULL});
    return warp->meetings.back();
}

void emulated_collective(uint32_t mask, void *mine,
                         void (*operation)(void *const *lanes, uint32_t mask)) {
    emulated_thread_state *const thread = emulated_thread;
    const uint32_t own = 1u << thread->lane;
    rendezvous *const meeting = meeting_of(thread->warp, mask);
    if ((mask & own) == 0)
        emulated_fail("a collective whose mask lacks the lane that calls it");
    if (meeting->arrived != 0 && meeting->operation != operation)
        emulated_fail("lanes of a warp meet in different collectives");
    static char nothing;
    meeting->operation = operation;
    meeting->lanes[thread->lane] = mine != NULL ? mine : &nothing;
    meeting->arrived |= own;
    if (meeting->arrived == (mask & thread->warp->live))
        complete(meeting);
    else
        wait_for(&meeting->done, meeting->done);
}

static void release(named_barrier *barrier) {
    barrier->any[1] = barrier->any[0];
    barrier->any[0] = false;
    barrier->arrived = 0;
    barrier->done++;
}

static uint32_t wanted_at(const named_barrier *barrier) {
    return barrier->wanted == 0 ? runner->live : barrier->wanted;
}

emulated_vote emulated_barrier(uint32_t number, uint32_t threads, bool waits, bool predicate) {
    named_barrier *const barrier = &runner->barriers[number];
    if (number >= named_barriers || threads % 32 != 0)
        emulated_fail("a barrier that does not exist");
    if (barrier->arrived > 0 && barrier->wanted != threads)
        emulated_fail("threads arrive at a barrier with different counts");
    barrier->wanted = threads;
    barrier->any[0] = barrier->any[0] || predicate;
    barrier->arrived++;
    if (barrier->arrived == wanted_at(barrier))
        release(barrier);
    else if (waits)
        wait_for(&barrier->done, barrier->done);
    return {barrier->any[1]};
}

/* ---- cp.async ---- */

void emulated_copy_later(void *to, const void *from, uint32_t count, uint32_t zeros) {
    emulated_thread->copies->copies.push_back({to, from, count, zeros, emulated_thread->group});
}

void emulated_commit() { emulated_thread->group++; }

void emulated_finish_copies(uint32_t pending) {
    std::vector<emulated_copy> &copies = emulated_thread->copies->copies;
    const uint32_t group = emulated_thread->group;
    size_t done = 0;
    // pending 0 also waits for uncommitted copies, as the arrival at an mbarrier requires
    for (; done < copies.size() && (pending == 0 || copies[done].group + pending < group); done++) {
        const emulated_copy &copy = copies[done];
        memcpy(copy.to, copy.from, copy.bytes);
        memset((char *)copy.to + copy.bytes, 0, copy.zeros);
    }
    copies.erase(copies.begin(), copies.begin() + (ptrdiff_t)done);
}

/* ---- shared memory ---- */

enum { rank_shift = 26, address_mask = (1 << rank_shift) - 1 };

/* An address is the offset from dynamic shared memory, which may be negative. The bits above hold 1
 * + the rank of another block of the cluster, or 0. */
uint32_t emulated_shared_address(const void *pointer) {
    const ptrdiff_t offset = (const char *)pointer - bytes;
    if (offset < -(1 << (rank_shift - 1)) || offset >= 1 << (rank_shift - 1))
        emulated_fail("an address that is not of shared memory");
    return (uint32_t)offset & address_mask;
}

void *emulated_shared_pointer(uint32_t address) {
    const uint32_t rank = address >> rank_shift;
    char *const base = rank == 0 ? bytes : runner->cluster->shared[rank - 1];
    return base + ((int32_t)(address << (32 - rank_shift)) >> (32 - rank_shift));
}

uint32_t emulated_map_rank(uint32_t address, uint32_t rank) {
    if (rank >= runner->cluster->shared.size())
        emulated_fail("a block that the cluster does not have");
    return (address & address_mask) | (rank + 1) << rank_shift;
}

/* ---- clusters ---- */

static void check_cluster(cluster_state *cluster) {
    if (cluster->arrived > 0 && cluster->arrived + cluster->ended == cluster->threads) {
        cluster->arrived = 0;
        cluster->phase++;
    }
}

void emulated_cluster_arrive() {
    cluster_state *const cluster = runner->cluster;
    const std::lock_guard<std::mutex> guard(cluster->lock);
    emulated_thread->cluster_phase = cluster->phase;
    cluster->arrived++;
    check_cluster(cluster);
}

void emulated_cluster_wait() {
    while (runner->cluster->phase == emulated_thread->cluster_phase)
        emulated_poll();
}

/* ---- blocks ---- */

static void end_thread() {
    emulated_thread_state *const thread = emulated_thread;
    emulated_finish_copies(0);
    thread->finished = true;
    runner->live--;
    thread->warp->live &= ~(1u << thread->lane);
    for (rendezvous *meeting : thread->warp->meetings)
        if (meeting->arrived != 0 && meeting->arrived == (meeting->mask & thread->warp->live))
            complete(meeting);
    for (named_barrier &barrier : runner->barriers)
        if (barrier.arrived != 0 && barrier.arrived == wanted_at(&barrier))
            release(&barrier);
    const std::lock_guard<std::mutex> guard(runner->cluster->lock);
    runner->cluster->ended++;
    check_cluster(runner->cluster);
}

static void thread_main() {
    (*runner->kernel)();
    end_thread();
    leave_thread();
    abort();
}

static void prepare_thread(uint32_t n) {
    emulated_thread_state *const thread = &runner->threads[n];
    const dim3 shape = blockDim;
    *thread = {};
    thread->index = {n % shape.x, n / shape.x % shape.y, n / shape.x / shape.y};
    thread->lane = n % 32;
    thread->warp = &runner->warps[n / 32];
    thread->copies = &runner->copies[n];
    thread->warp->live |= 1u << thread->lane;
    void **const top = (void **)(runner->stacks + (size_t)stack_bytes * (n + 1)) - 2;
    top[0] = (void *)thread_main; // entered with the stack as after a call
    thread->stack_pointer = top - 6;
}

static void prepare_block(const std::function<void()> &kernel) {
    const dim3 shape = blockDim;
    if (runner->stacks == NULL)
        runner->stacks =
            (char *)mmap(NULL, (size_t)stack_bytes * most_threads, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    runner->kernel = &kernel;
    runner->live = shape.x * shape.y * shape.z;
    for (emulated_warp &warp : runner->warps) {
        warp.live = 0;
        for (rendezvous *meeting : warp.meetings)
            delete meeting;
        warp.meetings.clear();
    }
    memset(runner->barriers, 0, sizeof runner->barriers);
    memset(bytes, 0xff, sizeof bytes); // NaN
    for (uint32_t n = 0; n < runner->live; n++)
        prepare_thread(n);
}

/* Runs each thread that can run once. Returns true if one did more than poll. */
static bool run_round(uint32_t threads) {
    bool progress = false;
    for (uint32_t n = 0; n < threads; n++) {
        emulated_thread_state *const thread = &runner->threads[n];
        if (thread->finished || (thread->waits_for != NULL && *thread->waits_for == thread->seen))
            continue;
        resume(thread);
        progress = progress || !thread->polls;
    }
    return progress;
}

static void run_block(const std::function<void()> &kernel) {
    prepare_block(kernel);
    const uint32_t threads = runner->live;
    time_t last = time(NULL);
    for (int idle = 0; runner->live > 0; idle++) {
        if (run_round(threads)) {
            last = time(NULL);
            idle = 0;
        } else if (idle < 20) {
            sched_yield();
        } else {
            const timespec pause = {0, 50 * 1000};
            nanosleep(&pause, NULL);
            if (time(NULL) - last > patience)
                emulated_fail("a block waits for ever");
        }
    }
}

/* ---- grids ---- */

struct grid_job {
    cudaLaunchConfig_t config;
    const std::function<void()> *kernel;
    uint32_t cluster_size, workers;
    uint64_t blocks;
    std::atomic<uint64_t> next{0};
    std::vector<cluster_state> clusters; // of the running ones, by worker or by number
};

static void run_block_number(grid_job *job, uint64_t number, cluster_state *cluster) {
    const dim3 grid = job->config.gridDim;
    blockIdx = {(unsigned)(number % grid.x), (unsigned)(number / grid.x % grid.y),
                (unsigned)(number / grid.x / grid.y)};
    blockDim = job->config.blockDim;
    gridDim = grid;
    emulated_rank = (uint32_t)(number % job->cluster_size);
    runner->cluster = cluster;
    run_block(*job->kernel);
}

/* A worker runs blocks in order or, if there are clusters, the blocks of one rank. */
static void work(grid_job *job, uint32_t worker) {
    if (runner == NULL)
        runner = new block_runner();
    if (job->cluster_size > 1) {
        for (uint64_t c = 0; c < job->blocks / job->cluster_size; c++) {
            cluster_state *const cluster = &job->clusters[c];
            {
                const std::lock_guard<std::mutex> guard(cluster->lock);
                cluster->shared[worker] = bytes;
            }
            run_block_number(job, c * job->cluster_size + worker, cluster);
        }
        return;
    }
    cluster_state alone;
    alone.shared.push_back(bytes);
    const dim3 shape = job->config.blockDim;
    for (uint64_t number; (number = job->next++) < job->blocks;) {
        alone.threads = shape.x * shape.y * shape.z;
        alone.arrived = alone.ended = 0;
        run_block_number(job, number, &alone);
    }
}

/* OS threads that run blocks. They live until the program ends, because they own shared memory and
 * stacks. */
class worker_pool {
  public:
    void run(grid_job *job) {
        std::unique_lock<std::mutex> guard(lock);
        while (threads.size() < job->workers) {
            const uint32_t number = (uint32_t)threads.size();
            threads.emplace_back([this, number, seen = round] { serve(number, seen); });
        }
        current = job;
        busy = (uint32_t)threads.size();
        round++;
        changed.notify_all();
        changed.wait(guard, [this] { return busy == 0; });
        current = NULL;
    }
    ~worker_pool() {
        {
            const std::lock_guard<std::mutex> guard(lock);
            stops = true;
        }
        changed.notify_all();
        for (std::thread &thread : threads)
            thread.join();
    }

  private:
    void serve(uint32_t number, uint64_t seen) {
        for (;;) {
            grid_job *job;
            {
                std::unique_lock<std::mutex> guard(lock);
                changed.wait(guard, [&] { return stops || round != seen; });
                if (stops)
                    return;
                seen = round;
                job = current;
            }
            if (number < job->workers)
                work(job, number);
            const std::lock_guard<std::mutex> guard(lock);
            if (--busy == 0)
                changed.notify_all();
        }
    }
    std::mutex lock;
    std::condition_variable changed;
    std::vector<std::thread> threads;
    grid_job *current = NULL;
    uint32_t busy = 0;
    uint64_t round = 0;
    bool stops = false;
};

void emulated_run_grid(const cudaLaunchConfig_t &config, const std::function<void()> &kernel) {
    static worker_pool pool;
    static std::mutex one_grid;
    const std::lock_guard<std::mutex> guard(one_grid);
    grid_job job;
    job.config = config;
    job.kernel = &kernel;
    job.cluster_size = 1;
    for (unsigned i = 0; i < config.numAttrs; i++)
        if (config.attrs[i].id == cudaLaunchAttributeClusterDimension)
            job.cluster_size = config.attrs[i].val.clusterDim.x;
    const dim3 grid = config.gridDim, shape = config.blockDim;
    job.blocks = (uint64_t)grid.x * grid.y * grid.z;
    job.workers =
        job.cluster_size > 1 ? job.cluster_size : std::max(2u, std::thread::hardware_concurrency());
    if (job.cluster_size > 1) {
        job.clusters = std::vector<cluster_state>(job.blocks / job.cluster_size);
        for (cluster_state &cluster : job.clusters) {
            cluster.threads = shape.x * shape.y * shape.z * job.cluster_size;
            cluster.arrived = cluster.ended = 0;
            cluster.shared.resize(job.cluster_size);
        }
    }
    pool.run(&job);
}
