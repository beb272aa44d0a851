/* An emulator of a CUDA device on the CPU. It tests the kernels of src/cuda without a GPU.
 *
 * The sources of the kernels are compiled as C++. cuda_runtime.h of this folder replaces the
 * compiler's own words, and cuda/device/ptx*.cuh of this folder replace the wrappers of PTX
 * instructions. Everything else is the code that nvcc compiles. runtime.cpp has the functions of
 * the CUDA runtime: device memory is host memory, and a stream runs a kernel when it is launched.
 *
 * A thread block runs on one OS thread. Its CUDA threads are coroutines there: each runs until it
 * waits for others, at a collective of its warp, at a barrier of its block, or in a loop that
 * polls. Shared memory is thread_local. Blocks run at the same time on as many OS threads as a
 * cluster has blocks or, without clusters, as the machine has cores.
 *
 * Copies of cp.async are done as late as possible: when their thread waits for them. If nothing
 * happens in a block for a minute, or collectives of a warp do not match, the program ends with a
 * message. */
#pragma once

#include <cuda_runtime_api.h>
#include <functional>
#include <stddef.h>
#include <stdint.h>

struct emulated_warp;

struct emulated_copy { // of cp.async
    void *to;
    const void *from;
    uint32_t bytes, zeros; // zeros: bytes after them that are cleared
    uint32_t group;
};

/* The emulated CUtensorMap of rank 4: 16-bit elements, in boxes of `box_rows` rows of 64. */
struct emulated_map {
    const char *data;
    uint64_t shape[4], strides[3]; // strides in bytes, of all axes except the first
    uint64_t box_rows;
};

struct emulated_thread_state {
    uint3 index;
    uint32_t lane;
    emulated_warp *warp;
    void *stack_pointer;
    const uint64_t *waits_for; // until its value differs from `seen`; NULL: the thread can run
    uint64_t seen;
    bool finished, polls;
    uint32_t group;         // of cp.async copies that are not yet committed
    uint64_t cluster_phase; // in which it arrived
    struct copy_queue *copies;
};

/* Of the running thread. */
extern thread_local uint3 threadIdx, blockIdx;
extern thread_local dim3 blockDim, gridDim;
extern thread_local uint32_t emulated_rank; // of its block in the cluster
extern thread_local emulated_thread_state *emulated_thread;

[[noreturn]] void emulated_fail(const char *what);

/* Lets other threads run. Loops that wait for another thread's write call it. */
void emulated_poll();

/* Waits for the other lanes of `mask`. The last one runs `operation` on the pointers that the lanes
 * passed; NULL stands for a lane that is not in the mask, or has ended. */
void emulated_collective(uint32_t mask, void *mine,
                         void (*operation)(void *const *lanes, uint32_t mask));

struct emulated_vote {
    bool any;
};

/* Arrives at a named barrier, and if `waits` waits there for `threads` threads; 0: the whole
 * block. */
emulated_vote emulated_barrier(uint32_t barrier, uint32_t threads, bool waits, bool predicate);

/* Copies of cp.async. */
void emulated_copy_later(void *to, const void *from, uint32_t bytes, uint32_t zeros);
void emulated_commit();
void emulated_finish_copies(uint32_t pending);

uint32_t emulated_shared_address(const void *pointer);
void *emulated_shared_pointer(uint32_t address);
uint32_t emulated_map_rank(uint32_t address, uint32_t rank);

void emulated_cluster_arrive();
void emulated_cluster_wait();

/* extern "C", so that a test can count launches. */
extern "C" cudaError_t emulated_launch(const cudaLaunchConfig_t *config,
                                       const std::function<void()> *kernel);
