/* An emulator of a CUDA device on the CPU, for tests of the kernels of src/cuda where there is no
 * GPU.
 *
 * The sources of the kernels are compiled as C++, with cuda_runtime.h of this folder in place of
 * the compiler's own words, and cuda/device/ptx*.cuh of this folder in place of the wrappers of PTX
 * instructions. Everything else is the code that nvcc compiles. The functions of the CUDA runtime
 * are in runtime.cpp: memory of the device is memory of the host, a stream runs a kernel when it is
 * launched.
 *
 * A thread block runs on one thread of the operating system. Its CUDA threads are coroutines there,
 * and a thread runs until it waits for others: at a collective of its warp, at a barrier of its
 * block, or in a loop that polls. Shared memory is thread_local. Blocks run at the same time on as
 * many threads as the machine has cores, and as a cluster has blocks.
 *
 * Copies of cp.async are done as late as they may be: when their thread waits for them. A block in
 * which nothing happens for a minute ends the program with a message, as do collectives of a warp
 * that do not match. */
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

/* What a CUtensorMap of rank 4 holds here: 16-bit elements, in boxes of `box_rows` rows of 64. */
struct emulated_map {
    const char *data;
    uint64_t shape[4], strides[3]; // strides in bytes, of all axes but the first one
    uint64_t box_rows;
};

struct emulated_thread_state {
    uint3 index;
    uint32_t lane;
    emulated_warp *warp;
    void *stack_pointer;
    const uint64_t *waits_for; // until it is no longer `seen`; NULL: the thread can run
    uint64_t seen;
    bool finished, polls;
    uint32_t group;         // of cp.async, that is not yet committed
    uint64_t cluster_phase; // that it arrived in
    struct copy_queue *copies;
};

/* Of the thread that runs. */
extern thread_local uint3 threadIdx, blockIdx;
extern thread_local dim3 blockDim, gridDim;
extern thread_local uint32_t emulated_rank; // of its block in the cluster
extern thread_local emulated_thread_state *emulated_thread;

[[noreturn]] void emulated_fail(const char *what);

/* Lets other threads run: for loops that wait for what another thread writes. */
void emulated_poll();

/* Waits for the other lanes of `mask`. The last one runs `operation` on what each lane passed; NULL
 * stands for a lane that is not in the mask, or that has ended. */
void emulated_collective(uint32_t mask, void *mine,
                         void (*operation)(void *const *lanes, uint32_t mask));

struct emulated_vote {
    bool any;
};

/* Arrives at a named barrier, and waits there for `threads` threads; 0: all of the block. */
emulated_vote emulated_barrier(uint32_t barrier, uint32_t threads, bool waits, bool predicate);

/* Copies by cp.async. */
void emulated_copy_later(void *to, const void *from, uint32_t bytes, uint32_t zeros);
void emulated_commit();
void emulated_finish_copies(uint32_t pending);

/* Addresses of shared memory, in 32 bits. */
uint32_t emulated_shared_address(const void *pointer);
void *emulated_shared_pointer(uint32_t address);
uint32_t emulated_map_rank(uint32_t address, uint32_t rank);

void emulated_cluster_arrive();
void emulated_cluster_wait();

/* Without a name of C++, so that a test can count launches. */
extern "C" cudaError_t emulated_launch(const cudaLaunchConfig_t *config,
                                       const std::function<void()> *kernel);
