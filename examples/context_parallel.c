/* Context parallel attention in plain C: the CUDA devices of one process compute one sequence
 * together, with NCCL between them, and are checked against fdma_attention() on all of it. Forward
 * only.
 *
 * Each device is a rank and has some consecutive tokens, a piece of the sequence. From earlier
 * ranks it needs only the keys that the last query before its own keeps: at most window + recent
 * for each kv head, for a sequence of any length. So a rank goes on from there as a stream does
 * (fdma.h, "Streams"), but without waiting for the ranks before it:
 *
 *   1. Each rank scores its own keys and selects among them by the rules of the sequence. The keys
 *      that are kept to the end are its candidates: later ranks keep no others. (Its first `sinks`
 *      valid keys are sinks here. They take as many rows of the window as the sinks of the sequence
 *      do there, so no key is lost that the sequence keeps.)
 *   2. The ranks gather the candidates of all: scores, positions, keys and values.
 *   3. Each rank selects among the candidates of the ranks before it. The candidates that are kept
 *      to the end are its carried keys: fdma_attention() goes on from their scores and positions,
 *      and its queries also attend to their keys and values.
 *
 * The selection among candidates runs on the host, to which their scores and positions are copied:
 * there they are easily sorted, and fdma_select() gives the same bits on every device. Rows of keys
 * and values stay on the devices.
 *
 * Without CUDA and NCCL, the ranks run in a loop on the CPU: to try it, and to test it.
 *
 *     cc -std=c11 -O2 -Iinclude examples/context_parallel.c -Lbuild -lfdma \
 *        -Wl,-rpath,$PWD/build -lm -o context_parallel
 *     ./context_parallel --cpu 3 1000
 *
 * With them, the ranks are all CUDA devices, two or more, unless --cpu is given:
 *
 *     cc -std=c11 -O2 -Iinclude -DFDMA_HAVE_NCCL=1 -I/usr/local/cuda/include \
 *        examples/context_parallel.c -Lbuild -lfdma -Wl,-rpath,$PWD/build \
 *        -L/usr/local/cuda/lib64 -lcudart -lnccl -lm -o context_parallel
 *     ./context_parallel
 *
 * Exit status: 0; 1 where the ranks and the whole sequence disagree, or a call fails; 2 bad
 * usage. */
#include "fdma.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef FDMA_HAVE_NCCL
#include <cuda_runtime_api.h>
#include <nccl.h>
#endif

/* ---- ranks of one process: CUDA devices with NCCL between them, or a loop on the CPU ---- */

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

/* ---- the sequence, and a check of a rank against attention over the whole of it ---- */

enum { q_heads = 8, kv_heads = 2, head_dim = 64, vocabulary = 512 };
enum { q_width = q_heads * head_dim, kv_width = kv_heads * head_dim };
enum { window = 96, recent = 32, sinks = 4, rows = window + recent }; /* rows: of a table */

/* The whole sequence, on the host. */
typedef struct sequence {
    int64_t len;
    uint16_t *q, *k, *v; /* [len, heads, head_dim], the upper halves of float32 */
    float *dt_proj, *a;  /* [kv_heads, kv_width], [kv_heads] */
} sequence;

/* Repeatable numbers in [-1, 1): the high bits of a linear congruential generator. */
static float next_random(void) {
    static uint64_t state = 1;
    state = state * 6364136223846793005U + 1442695040888963407U;
    return (float)(state >> 40) * 0x1p-23F - 1;
}

static float *random_floats(size_t count, float size) {
    float *const data = allocate(count, sizeof *data);
    for (size_t n = 0; n < count; n++)
        data[n] = size * next_random();
    return data;
}

static uint16_t *random_bfloat16(size_t count) {
    uint16_t *const data = allocate(count, sizeof *data);
    for (size_t n = 0; n < count; n++) {
        const float x = next_random();
        uint32_t bits;
        memcpy(&bits, &x, sizeof bits);
        data[n] = (uint16_t)(bits >> 16);
    }
    return data;
}

static float float_of(uint16_t x) {
    const uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* A key has the value state of its token. So many scores are equal, and positions decide which of
 * these keys a query keeps. */
static sequence new_sequence(int64_t len) {
    const size_t count = (size_t)len;
    const sequence made = {.len = len,
                           .q = random_bfloat16(count * q_width),
                           .k = random_bfloat16(count * kv_width),
                           .v = allocate(count * kv_width, sizeof(uint16_t)),
                           .dt_proj = random_floats((size_t)kv_heads * kv_width, 0.3F),
                           .a = random_floats(kv_heads, 1)};
    uint16_t *const values = random_bfloat16((size_t)vocabulary * kv_width);
    for (size_t j = 0; j < count; j++) {
        const size_t token = (size_t)((next_random() + 1) / 2 * vocabulary);
        memcpy(made.v + j * kv_width, values + token * kv_width, kv_width * sizeof *values);
    }
    free(values);
    return made;
}

static void free_sequence(const sequence *it) {
    void *const all[] = {it->q, it->k, it->v, it->dt_proj, it->a};
    for (size_t n = 0; n < sizeof all / sizeof all[0]; n++)
        free(all[n]);
}

/* Results for consecutive tokens, copied to the host. */
typedef struct results {
    int64_t offset, len; /* the first token, and how many there are */
    int32_t *expiry;     /* [kv_heads, rows + len], of the whole sequence [kv_heads, len] */
    int32_t *carried;    /* [kv_heads, rows]: positions of the carried keys, -1: none */
    float *lse;          /* [q_heads, len] */
    uint16_t *out;       /* [len, q_heads, head_dim] bfloat16 */
} results;

/* The number of keys of the sequence so far on which a selection differs from the selection of the
 * whole. */
static int64_t count_differences(const results *found, const results *whole) {
    const int64_t begin = found->offset, end = begin + found->len, keys = rows + found->len;
    int32_t *const until = allocate((size_t)end, sizeof *until); // the expiry, as a position
    int64_t differences = 0;
    for (int64_t g = 0; g < kv_heads; g++) {
        for (int64_t j = 0; j < end; j++)
            until[j] = -1; // evicted before the first of the tokens
        for (int64_t key = 0; key < keys; key++) {
            const int64_t j = key < rows ? found->carried[g * rows + key] : begin + key - rows;
            if (j >= end)
                differences++;
            else if (j >= 0)
                until[j] = (int32_t)(found->expiry[g * keys + key] - rows + begin);
        }
        for (int64_t j = 0; j < end; j++) {
            const int64_t expiry = whole->expiry[g * whole->len + j];
            differences += until[j] != (expiry < begin ? -1 : expiry < end ? expiry : end);
        }
    }
    free(until);
    return differences;
}

/* The larger of `most` and |x - y|; NaN if either is. */
static double raise_to(double most, float x, float y) {
    const double off = fabs((double)x - (double)y);
    return isnan(most) || off <= most ? most : off;
}

static bool is_right(int r, const results *found, const results *whole) {
    // |v| <= 1. Each of the two may round weights to bfloat16, and rounds out: by 2^-9 at most.
    const double most_out = 4 * 0x1p-9;
    // Sums of lse are in float32. One key more or less changes it by about 1 / rows.
    const double most_lse = 1e-4;
    const int64_t begin = found->offset, len = found->len;
    const int64_t differences = count_differences(found, whole);
    double out = 0, lse = 0;
    for (int64_t n = 0; n < len * q_width; n++)
        out = raise_to(out, float_of(found->out[n]), float_of(whole->out[begin * q_width + n]));
    for (int64_t h = 0; h < q_heads; h++)
        for (int64_t i = 0; i < len; i++)
            lse = raise_to(lse, found->lse[h * len + i], whole->lse[h * whole->len + begin + i]);
    printf("rank %2d, tokens %7lld to %7lld: %lld keys differ, lse by %.1e, out by %.1e\n", r,
           (long long)begin, (long long)(begin + len - 1), (long long)differences, lse, out);
    return differences == 0 && lse <= most_lse && out <= most_out;
}

/* ---- pieces ---- */

enum { default_tokens = 16384 };

/* Consecutive tokens of the sequence, in the memory of a rank. */
typedef struct piece {
    rank *on;
    int64_t offset, len; /* the first token, and how many there are */
    void *q, *k, *v, *dt_proj, *a;
    void *out;                      /* [len, q_heads, head_dim] bfloat16 */
    float *lse;                     /* [q_heads, len] */
    float *score;                   /* [kv_heads, len] */
    int32_t *expiry, *slot;         /* [kv_heads, rows + len] */
    fdma_cache candidates, carried; /* at most `rows` keys for each kv head */
    float *all_score;               /* [kv_heads, ranks * rows]: the candidates of all ranks */
    int32_t *all_position;          /* the same shape: as the rank numbers its tokens; -1: none */
    void *all_k, *all_v;            /* [kv_heads, ranks * rows, head_dim] */
    int32_t *all_expiry, *all_slot; /* [kv_heads, ranks * rows]: which of them are carried keys */
} piece;

/* ---- tensors ---- */

static piece new_piece(rank *on, const sequence *of, int64_t offset, int64_t len) {
    const rank host = cpu_rank();
    return (piece){
        .on = on,
        .offset = offset,
        .len = len,
        .q = take_copy(on, &host, of->q + offset * q_width, len * q_width, sizeof *of->q),
        .k = take_copy(on, &host, of->k + offset * kv_width, len * kv_width, sizeof *of->k),
        .v = take_copy(on, &host, of->v + offset * kv_width, len * kv_width, sizeof *of->v),
        .dt_proj = take_copy(on, &host, of->dt_proj, (int64_t)kv_heads * kv_width, sizeof(float)),
        .a = take_copy(on, &host, of->a, kv_heads, sizeof(float)),
        .out = take(on, len * q_width, sizeof(uint16_t)),
        .lse = take(on, q_heads * len, sizeof(float)),
        .score = take(on, kv_heads * len, sizeof(float)),
        .expiry = take(on, kv_heads * (rows + len), sizeof(int32_t)),
        .slot = take(on, kv_heads * (rows + len), sizeof(int32_t)),
    };
}

static fdma_cache new_cache(rank *on) {
    fdma_cache cache = {.sequences = 1, .kv_heads = kv_heads, .head_dim = head_dim};
    size_t bytes;
    cache.window = window, cache.recent = recent, cache.sinks = sinks;
    cache.dtype = FDMA_BFLOAT16, cache.device = on->device;
    demand(fdma_cache_bytes(&cache, &bytes));
    demand(fdma_cache_init(&cache, take(on, (int64_t)bytes, 1)));
    return cache;
}

/* Adds the memory that a piece needs beside its own tokens; `all` is ranks * rows. */
static void add_candidates(piece *to, int64_t all) {
    rank *const on = to->on;
    to->candidates = new_cache(on);
    to->carried = new_cache(on);
    to->all_score = take(on, kv_heads * all, sizeof(float));
    to->all_position = take(on, kv_heads * all, sizeof(int32_t));
    to->all_k = take(on, all * kv_width, sizeof(uint16_t));
    to->all_v = take(on, all * kv_width, sizeof(uint16_t));
    to->all_expiry = take(on, kv_heads * all, sizeof(int32_t));
    to->all_slot = take(on, kv_heads * all, sizeof(int32_t));
}

static fdma_tensor heads_of(void *data, int64_t len, int64_t heads) {
    return fdma_tensor_4d(data, FDMA_BFLOAT16, 1, len, heads, head_dim);
}

/* As in a cache: the rows of a kv head are neighbours. */
static fdma_tensor rows_of(void *data, int64_t len) {
    fdma_tensor made = heads_of(data, len, kv_heads);
    made.stride[1] = head_dim;
    made.stride[2] = len * head_dim;
    return made;
}

static fdma_tensor floats_of(float *data, int64_t heads, int64_t len) {
    return fdma_tensor_3d(data, FDMA_FLOAT32, 1, heads, len);
}

static fdma_selection selection_of(int32_t *expiry, int32_t *slot, int64_t heads, int64_t len) {
    return (fdma_selection){.size = sizeof(fdma_selection),
                            .expiry = fdma_tensor_3d(expiry, FDMA_INT32, 1, heads, len),
                            .slot = fdma_tensor_3d(slot, FDMA_INT32, 1, heads, len)};
}

/* ---- calls ---- */

static void score_keys(const piece *of) {
    fdma_score_args args = {
        .size = sizeof args,
        .v = heads_of(of->v, of->len, kv_heads),
        .dt_proj = fdma_tensor_2d(of->dt_proj, FDMA_FLOAT32, kv_heads, kv_width),
        .a = fdma_tensor_1d(of->a, FDMA_FLOAT32, kv_heads),
        .score = floats_of(of->score, kv_heads, of->len),
        .exec = exec_of(of->on),
    };
    size_t bytes;
    demand(fdma_score_workspace(&args, &bytes));
    lend_workspace(of->on, &args.exec, bytes);
    demand(fdma_score(&args));
}

static void select_keys(rank *on, fdma_tensor score, fdma_selection *selection) {
    fdma_select_args args = {
        .size = sizeof args,
        .score = score,
        .selection = selection,
        .window = window,
        .recent = recent,
        .sinks = sinks,
        .exec = exec_of(on),
    };
    size_t bytes;
    demand(fdma_select_workspace(&args, &bytes));
    lend_workspace(on, &args.exec, bytes);
    demand(fdma_select(&args));
}

/* Copies the keys that a selection keeps to the end to the rows of their slots. */
static void store_kept_keys(rank *on, const fdma_cache *to, fdma_tensor k, fdma_tensor v,
                            fdma_tensor score, const fdma_selection *selection) {
    fdma_cache_store_args args = {
        .size = sizeof args,
        .cache = *to,
        .k = k,
        .v = v,
        .score = score,
        .selection = selection,
        .exec = exec_of(on),
    };
    size_t bytes;
    demand(fdma_cache_store_workspace(&args, &bytes));
    lend_workspace(on, &args.exec, bytes);
    demand(fdma_cache_store(&args));
}

/* Attention of a piece with the carried keys `before`; NULL: none. */
static void attend(const piece *of, const fdma_cache *before, fdma_selection *selection) {
    fdma_attention_args args = {
        .size = sizeof args,
        .q = heads_of(of->q, of->len, q_heads),
        .k = heads_of(of->k, of->len, kv_heads),
        .v = heads_of(of->v, of->len, kv_heads),
        .dt_proj = fdma_tensor_2d(of->dt_proj, FDMA_FLOAT32, kv_heads, kv_width),
        .a = fdma_tensor_1d(of->a, FDMA_FLOAT32, kv_heads),
        .out = heads_of(of->out, of->len, q_heads),
        .lse = floats_of(of->lse, q_heads, of->len),
        .selection = selection,
        .window = window,
        .recent = recent,
        .sinks = sinks,
        .causal = 1,
        .exec = exec_of(of->on),
    };
    size_t bytes;
    if (before != NULL) {
        args.table_in = before->table;
        args.k_carried = before->k, args.v_carried = before->v, args.bias_carried = before->bias;
    }
    demand(fdma_attention_workspace(&args, &bytes));
    lend_workspace(of->on, &args.exec, bytes);
    demand(fdma_attention(&args));
}

/* ---- the three steps ---- */

static void find_candidates(const piece *of) {
    fdma_selection selection = selection_of(of->expiry, of->slot, kv_heads, of->len);
    const fdma_tensor score = floats_of(of->score, kv_heads, of->len);
    score_keys(of);
    select_keys(of->on, score, &selection);
    store_kept_keys(of->on, &of->candidates, heads_of(of->k, of->len, kv_heads),
                    heads_of(of->v, of->len, kv_heads), score, &selection);
}

static void gather_candidates(int ranks, const piece *pieces) {
    enum { tensors = 4, gathers = kv_heads * tensors, row_size = head_dim * sizeof(uint16_t) };
    transfer *const transfers = allocate((size_t)(gathers * ranks), sizeof *transfers);
    for (int r = 0; r < ranks; r++) {
        const piece *const of = &pieces[r];
        const fdma_cache *const own = &of->candidates;
        const struct {
            const char *own;
            char *all;
            size_t size; // bytes of one candidate
        } each[tensors] = {{own->table.score.data, (char *)of->all_score, sizeof(float)},
                           {own->table.position.data, (char *)of->all_position, sizeof(int32_t)},
                           {own->k.data, of->all_k, row_size},
                           {own->v.data, of->all_v, row_size}};
        for (int n = 0; n < gathers; n++) {
            const int tensor = n % tensors, g = n / tensors;
            const size_t bytes = rows * each[tensor].size, head = (size_t)g * bytes;
            transfers[n * ranks + r] = (transfer){.of = of->on,
                                                  .own = each[tensor].own + head,
                                                  .all = each[tensor].all + (size_t)ranks * head,
                                                  .bytes = bytes};
        }
    }
    all_gather(ranks, gathers, transfers);
    free(transfers);
}

typedef struct candidate {
    int32_t position; /* in the sequence */
    int64_t index;    /* among the candidates of all ranks */
} candidate;

static int compare_positions(const void *a, const void *b) {
    const int32_t x = ((const candidate *)a)->position, y = ((const candidate *)b)->position;
    return (x > y) - (x < y);
}

/* Lists the candidates of the first `ranks` ranks, of one kv head, in the order of positions. */
static int64_t list_candidates(int ranks, const piece *pieces, const int32_t *positions,
                               candidate *list) {
    int64_t count = 0;
    for (int64_t n = 0; n < (int64_t)ranks * rows; n++)
        if (positions[n] >= 0) { // a rank of few tokens has fewer
            const int64_t position = pieces[n / rows].offset + positions[n];
            list[count++] = (candidate){(int32_t)position, n};
        }
    qsort(list, (size_t)count, sizeof *list, compare_positions);
    return count;
}

/* For one kv head, on the host: selects the carried keys of rank r among the candidates of the
 * ranks before it. slot [ranks * rows] is the slot of each candidate, -1 if it is not carried;
 * carried [rows] is the position of each carried key, -1 if the row is empty. */
static void select_candidates(int ranks, const piece *pieces, int r, const float *score,
                              const int32_t *position, int32_t *slot, int32_t *carried) {
    const int64_t all = (int64_t)ranks * rows;
    rank host = cpu_rank();
    candidate *const list = take(&host, all, sizeof *list);
    float *const sorted_score = take(&host, all, sizeof *sorted_score);
    int32_t *const sorted_expiry = take(&host, all, sizeof *sorted_expiry);
    int32_t *const sorted_slot = take(&host, all, sizeof *sorted_slot);
    const int64_t count = list_candidates(r, pieces, position, list);
    for (int64_t n = 0; n < count; n++)
        sorted_score[n] = score[list[n].index];
    fdma_selection selection = selection_of(sorted_expiry, sorted_slot, 1, count);
    select_keys(&host, floats_of(sorted_score, 1, count), &selection);
    for (int64_t n = 0; n < all; n++)
        slot[n] = -1;
    for (int64_t row = 0; row < rows; row++)
        carried[row] = -1;
    for (int64_t n = 0; n < count; n++)
        if (sorted_expiry[n] == count) { // kept to the end
            slot[list[n].index] = sorted_slot[n];
            carried[sorted_slot[n]] = list[n].position;
        }
    close_ranks(1, &host);
}

/* Finds the carried keys of rank r and copies them to their rows. A cache has rows for them, and
 * fdma_cache_store() copies the keys of a selection, which the host writes here. */
static void find_carried_keys(int ranks, const piece *pieces, int r) {
    const piece *const of = &pieces[r];
    const fdma_table *const table = &of->carried.table;
    const int64_t all = (int64_t)ranks * rows, count = kv_heads * all;
    const int32_t seen = (int32_t)of->offset;
    rank host = cpu_rank();
    float *const score = take_copy(&host, of->on, of->all_score, count, sizeof *score);
    int32_t *const position = take_copy(&host, of->on, of->all_position, count, sizeof *position);
    int32_t *const expiry = take(&host, count, sizeof *expiry);
    int32_t *const slot = take(&host, count, sizeof *slot);
    int32_t *const carried = take(&host, kv_heads * rows, sizeof *carried);
    for (int64_t g = 0; g < kv_heads; g++)
        select_candidates(ranks, pieces, r, score + g * all, position + g * all, slot + g * all,
                          carried + g * rows);
    for (int64_t n = 0; n < count; n++) // kept to the end, or never
        expiry[n] = (int32_t)(slot[n] >= 0 ? all : n % all);
    copy(of->on, of->all_expiry, expiry, count, sizeof *expiry);
    copy(of->on, of->all_slot, slot, count, sizeof *slot);
    fdma_selection selection = selection_of(of->all_expiry, of->all_slot, kv_heads, all);
    selection.window = window, selection.recent = recent, selection.sinks = sinks;
    selection.kv_len = all, selection.scope = FDMA_SCOPE_CAUSAL;
    store_kept_keys(of->on, &of->carried, rows_of(of->all_k, all), rows_of(of->all_v, all),
                    floats_of(of->all_score, kv_heads, all), &selection);
    // The call took the candidates for a prompt. In the sequence they have other positions.
    copy(of->on, table->position.data, carried, kv_heads * rows, sizeof *carried);
    copy(of->on, table->seen.data, &seen, 1, sizeof seen);
    close_ranks(1, &host);
}

static void attend_ranks(int ranks, const piece *pieces) {
    for (int r = 0; r < ranks; r++)
        find_candidates(&pieces[r]);
    gather_candidates(ranks, pieces);
    for (int r = 0; r < ranks; r++) {
        const piece *const of = &pieces[r];
        fdma_selection selection = selection_of(of->expiry, of->slot, kv_heads, rows + of->len);
        find_carried_keys(ranks, pieces, r);
        attend(of, &of->carried, &selection);
    }
}

/* ---- the check ---- */

static results copy_results(rank *host, const piece *of) {
    const rank *const on = of->on;
    const void *const carried = of->carried.table.position.data; // NULL for the whole sequence
    const int64_t len = of->len, keys = kv_heads * (rows + len);
    return (results){
        .offset = of->offset,
        .len = len,
        .expiry = take_copy(host, on, of->expiry, keys, sizeof(int32_t)),
        .carried = carried ? take_copy(host, on, carried, kv_heads * rows, sizeof(int32_t)) : NULL,
        .lse = take_copy(host, on, of->lse, q_heads * len, sizeof(float)),
        .out = take_copy(host, on, of->out, q_width * len, sizeof(uint16_t)),
    };
}

/* The whole sequence is computed on the first of the ranks. */
static bool are_right(int ranks, const piece *pieces, const sequence *of) {
    const piece all = new_piece(pieces[0].on, of, 0, of->len);
    fdma_selection selection = selection_of(all.expiry, all.slot, kv_heads, of->len);
    attend(&all, NULL, &selection);
    rank host = cpu_rank();
    const results whole = copy_results(&host, &all);
    bool right = true;
    for (int r = 0; r < ranks; r++) {
        rank memory = cpu_rank();
        const results found = copy_results(&memory, &pieces[r]);
        right = is_right(r, &found, &whole) && right;
        close_ranks(1, &memory);
    }
    close_ranks(1, &host);
    return right;
}

static void show_bytes(int ranks, int64_t total) {
    const double key = 2 * kv_width * sizeof(uint16_t); // and value
    const double candidates = rows * (key + kv_heads * (sizeof(float) + sizeof(int32_t)));
    printf("received by each rank: %.1f kB, for any number of tokens; all keys and values of the "
           "others: %.1f kB\n",
           1e-3 * candidates * (ranks - 1), 1e-3 * key * (double)total * (ranks - 1) / ranks);
}

int main(int argc, char **argv) {
    const bool on_cpu = argc > 2 && strcmp(argv[1], "--cpu") == 0;
    const int first = on_cpu ? 3 : 1;
    const bool help = argc == 2 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0);
    if (help || argc > first + 1 || (!on_cpu && argc > 1 && argv[1][0] == '-')) {
        fprintf(help ? stdout : stderr, "usage: context_parallel [--cpu RANKS] [TOKENS]\n");
        return help ? 0 : 2;
    }
    const int64_t total = argc > first ? strtoll(argv[first], NULL, 10) : default_tokens;
    rank *const on = allocate(most_ranks, sizeof *on);
    const int64_t ranks = on_cpu ? open_host(atoi(argv[2]), on) : open_devices(on);
    const int64_t lengths = ranks * (ranks + 1) / 2;
    if (total < lengths || total > INT32_MAX)
        fail("TOKENS", "want ranks * (ranks + 1) / 2 or more, below 2^31");
    piece *const pieces = allocate((size_t)ranks, sizeof *pieces);
    const sequence whole = new_sequence(total);
    for (int64_t r = 0; r < ranks; r++) { // pieces of different lengths: about 1 : 2 : 3 ...
        const int64_t begin = total * (r * (r + 1) / 2) / lengths;
        const int64_t end = total * ((r + 1) * (r + 2) / 2) / lengths;
        pieces[r] = new_piece(&on[r], &whole, begin, end - begin);
        add_candidates(&pieces[r], ranks * rows);
    }
    attend_ranks((int)ranks, pieces);
    const bool right = are_right((int)ranks, pieces, &whole);
    show_bytes((int)ranks, total);
    close_ranks((int)ranks, on);
    free_sequence(&whole);
    free(pieces);
    free(on);
    return right ? 0 : 1;
}
