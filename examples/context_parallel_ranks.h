/* The ranks of examples/context_parallel.c, all in one process: their memory, and all-gather. They
 * are its CUDA devices, between which NCCL moves the data, or a loop on the CPU, which needs
 * neither CUDA nor NCCL. A failure ends the program. */
#ifndef CONTEXT_PARALLEL_RANKS_H
#define CONTEXT_PARALLEL_RANKS_H

#include "fdma.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef FDMA_HAVE_NCCL
#include <cuda_runtime_api.h>
#include <nccl.h>
#endif

enum { most_ranks = 64, most_owned = 64 };

typedef struct backend backend;

typedef struct rank {
    const backend *backend;
    int32_t device;      /* as in fdma_exec */
    void *stream, *comm; /* the device's cudaStream_t and ncclComm_t */
    void *workspace;     /* workspace of the calls on `stream`, which run one after the other */
    size_t workspace_size;
    void *owned[most_owned]; /* the memory that close_ranks() releases */
    int owned_count;
} rank;

/* The data that a rank sends to all, and the memory for the data of all ranks, in their order. */
typedef struct transfer {
    const rank *of;
    const void *own;
    void *all;
    size_t bytes; /* bytes of `own` */
} transfer;

struct backend {
    void *(*allocate)(const rank *of, size_t bytes);
    void (*release)(const rank *of, void *data);
    void (*copy)(const rank *of, void *to, const void *from, size_t bytes);
    void (*all_gather)(int ranks, int count, const transfer *transfers);
    void (*close)(const rank *of);
};

static _Noreturn void fail(const char *what, const char *why) {
    fprintf(stderr, "context_parallel: %s: %s\n", what, why);
    exit(1);
}

static void demand(fdma_status status) {
    if (status != FDMA_OK)
        fail(fdma_status_name(status), fdma_last_error());
}

/* ---- the CPU ---- */

static void *allocate(size_t count, size_t size) {
    void *const data = calloc(count + 1, size);
    if (data == NULL)
        fail("host", "out of memory");
    return data;
}

static void *allocate_host(const rank *of, size_t bytes) {
    (void)of;
    return allocate(bytes, 1);
}

static void release_host(const rank *of, void *data) {
    (void)of;
    free(data);
}

static void copy_host(const rank *of, void *to, const void *from, size_t bytes) {
    (void)of;
    memcpy(to, from, bytes);
}

static void gather_host(int ranks, int count, const transfer *transfers) {
    for (int n = 0; n < count * ranks; n++)
        for (int r = 0; r < ranks; r++) {
            const transfer *const from = &transfers[n / ranks * ranks + r];
            memcpy((char *)transfers[n].all + (size_t)r * from->bytes, from->own, from->bytes);
        }
}

static void close_host(const rank *of) { (void)of; }

static const backend cpu_backend = {allocate_host, release_host, copy_host, gather_host,
                                    close_host};

static rank cpu_rank(void) { return (rank){.backend = &cpu_backend, .device = FDMA_CPU}; }

/* Makes `count` ranks on the CPU. */
static int open_host(int count, rank *ranks) {
    if (count < 1 || count > most_ranks)
        fail("--cpu", "want 1 to 64 ranks");
    for (int r = 0; r < count; r++)
        ranks[r] = cpu_rank();
    return count;
}

/* ---- CUDA devices and NCCL ---- */

#ifdef FDMA_HAVE_NCCL
static void demand_cuda(cudaError_t error) {
    if (error != cudaSuccess)
        fail("CUDA", cudaGetErrorString(error));
}

static void demand_nccl(ncclResult_t result) {
    if (result != ncclSuccess)
        fail("NCCL", ncclGetErrorString(result));
}

static void *allocate_device(const rank *of, size_t bytes) {
    void *data;
    demand_cuda(cudaSetDevice(of->device - FDMA_CUDA(0)));
    demand_cuda(cudaMalloc(&data, bytes + 1)); // 0 bytes would give NULL
    return data;
}

static void release_device(const rank *of, void *data) {
    demand_cuda(cudaStreamSynchronize(of->stream)); // its calls may still use the memory
    demand_cuda(cudaFree(data));
}

static void copy_device(const rank *of, void *to, const void *from, size_t bytes) {
    demand_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, of->stream));
    demand_cuda(cudaStreamSynchronize(of->stream));
}

/* One thread calls for all devices, so all calls form a group: outside of one, the first rank's
 * call may wait for the second rank's, which comes after it. */
static void gather_devices(int ranks, int count, const transfer *transfers) {
    demand_nccl(ncclGroupStart());
    for (int n = 0; n < count * ranks; n++) {
        const transfer *const one = &transfers[n];
        demand_nccl(ncclAllGather(one->own, one->all, one->bytes, ncclUint8, one->of->comm,
                                  one->of->stream));
    }
    demand_nccl(ncclGroupEnd());
}

static void close_device(const rank *of) {
    demand_nccl(ncclCommDestroy(of->comm));
    demand_cuda(cudaStreamDestroy(of->stream));
}

static const backend cuda_backend = {allocate_device, release_device, copy_device, gather_devices,
                                     close_device};

/* Makes a rank of each device. Returns their number. */
static int open_devices(rank *ranks) {
    ncclComm_t comms[most_ranks];
    int count = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess)
        fail("no CUDA device", cudaGetErrorString(error));
    if (count < 2)
        fail("one CUDA device", "want two or more, or --cpu RANKS");
    count = count < most_ranks ? count : most_ranks;
    demand_nccl(ncclCommInitAll(comms, count, NULL)); // devices 0 to count - 1
    for (int r = 0; r < count; r++) {
        cudaStream_t stream;
        demand_cuda(cudaSetDevice(r));
        demand_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        ranks[r] = (rank){
            .backend = &cuda_backend, .device = FDMA_CUDA(r), .stream = stream, .comm = comms[r]};
    }
    return count;
}
#else
static int open_devices(rank *ranks) {
    (void)ranks;
    fail("built without NCCL", "want --cpu RANKS");
}
#endif

/* ---- any rank ---- */

static void close_ranks(int count, rank *ranks) {
    for (int r = 0; r < count; r++) {
        rank *const one = &ranks[r];
        for (int n = 0; n < one->owned_count; n++)
            one->backend->release(one, one->owned[n]);
        if (one->workspace != NULL)
            one->backend->release(one, one->workspace);
        one->backend->close(one);
    }
}

/* Memory of the rank, until close_ranks(). */
static void *take(rank *of, int64_t count, size_t size) {
    if (of->owned_count == most_owned)
        fail("rank", "has too many tensors");
    void *const data = of->backend->allocate(of, (size_t)count * size);
    of->owned[of->owned_count++] = data;
    return data;
}

/* Copies between the memory of the rank and the host, once the earlier work of the rank is done. It
 * has finished when it returns. */
static void copy(const rank *of, void *to, const void *from, int64_t count, size_t size) {
    of->backend->copy(of, to, from, (size_t)count * size);
}

/* A copy in the memory of `to`; one of the two ranks is on the CPU. */
static void *take_copy(rank *to, const rank *of, const void *from, int64_t count, size_t size) {
    void *const data = take(to, count, size);
    copy(to->device == FDMA_CPU ? of : to, data, from, count, size);
    return data;
}

/* The transfers n * ranks to n * ranks + ranks - 1, one of each rank, are one all-gather; there are
 * `count` of them. On devices it does not wait. */
static void all_gather(int ranks, int count, const transfer *transfers) {
    transfers->of->backend->all_gather(ranks, count, transfers);
}

static fdma_exec exec_of(const rank *of) {
    return (fdma_exec){.device = of->device, .stream = of->stream};
}

static void lend_workspace(rank *to, fdma_exec *exec, size_t bytes) {
    if (bytes > to->workspace_size) {
        if (to->workspace != NULL)
            to->backend->release(to, to->workspace);
        to->workspace = to->backend->allocate(to, bytes);
        to->workspace_size = bytes;
    }
    exec->workspace = to->workspace;
    exec->workspace_size = to->workspace_size;
}

#endif /* CONTEXT_PARALLEL_RANKS_H */
