/* fdma.h - Flash Dynamic Mask Attention: attention of each query over its `window` best keys.
 *
 * This header is the manual. docs/c.md has a decode loop, README.md a first program,
 * examples/train_step.c a layer that trains, docs/algorithm.md the mathematics. To generate text,
 * read these three: "Making a call" below, fdma_cache and fdma_decode(). To attend or to train:
 * "Making a call", fdma_attention() and fdma_attention_backward().
 *
 * Index
 *
 *   This comment     Purpose, Making a call, Common to all operations, Names, Positions, Padding,
 *                    Packed sequences, Preallocated keys, Masks, Streams, Dropout, Devices,
 *                    Threads, Traps
 *   Status, Tensors  fdma_status, fdma_last_error(), fdma_tensor, fdma_tensor_4d(), fdma_exec,
 *                    fdma_parallel
 *   Attention        fdma_attention(), all steps in one call: what most programs want. The steps:
 *                      fdma_score()    value states -> score and bias of each key
 *                      fdma_select()   scores -> a selection: which queries keep each key
 *                      fdma_forward()  q, k, v and a selection -> out, lse; without one: dense
 *                    fdma_mask_lists(), fdma_probabilities()
 *   Decoding         fdma_cache, fdma_cache_store(), fdma_cache_copy(), fdma_decode(),
 *                    fdma_prefill(), fdma_cache_save(), fdma_cache_restore()
 *   Gradients        fdma_attention_backward() and, of the steps, fdma_backward() and others
 *   Partial results  fdma_merge(), which joins attention over two disjoint sets of keys
 *   Rotary embedding fdma_rotary_table(), fdma_rotate(), fdma_rotate_backward(): of q and k, with
 *                    a norm before it if wanted
 *   Then             Workspace, Kernels and devices
 *
 * Purpose. Dense causal attention costs O(q_len * kv_len). Here each key has a score, computed
 * from its value state with learned weights and independent of the query, and a query attends only
 * to the `window` keys of highest score that it can see: O(q_len * window) time, linear memory, no
 * mask of size q_len * kv_len. It may also keep the `recent` newest keys whatever their scores, and
 * the first keys of the sequence, `sinks`; and it may leave out keys whose scores are more than
 * `gap` below the best. Scores may also enter the logits as a bias, through which their weights
 * learn. Call the single steps to reuse a selection, or with a score or bias of your own.
 *
 * Making a call
 *
 *   Fill the operation's argument struct and pass its address. `size` is the size of the struct
 *   that the program was compiled with, so that later versions can append fields. Start from {0}: a
 *   field left zero has its default, and a tensor left zero is absent. Fields named `reserved` must
 *   be zero, in tensors, tables and caches too.
 *
 *     fdma_attention_args args = {.size = sizeof args, .window = 2048, .causal = 1};
 *     args.q = fdma_tensor_4d(q, FDMA_BFLOAT16, batch, q_len, q_heads, head_dim);
 *     args.k = fdma_tensor_4d(k, FDMA_BFLOAT16, batch, kv_len, kv_heads, head_dim);
 *     args.v = fdma_tensor_4d(v, FDMA_BFLOAT16, batch, kv_len, kv_heads, head_dim);
 *     args.dt_proj = fdma_tensor_2d(dt_proj, FDMA_BFLOAT16, kv_heads, kv_heads * head_dim);
 *     args.a = fdma_tensor_1d(a, FDMA_FLOAT32, kv_heads);
 *     args.out = fdma_tensor_4d(out, FDMA_BFLOAT16, batch, q_len, q_heads, head_dim);
 *
 *     size_t bytes;
 *     if (fdma_attention_workspace(&args, &bytes) != FDMA_OK)
 *         die(fdma_last_error());
 *     args.exec.workspace = malloc(bytes);
 *     args.exec.workspace_size = bytes;
 *     if (fdma_attention(&args) != FDMA_OK)
 *         die(fdma_last_error());
 *
 * Common to all operations. The comment on an operation adds only what is specific to it.
 *
 *   Shapes     beside each field of the argument struct. All q, k, v and out of a call (out_a
 *              and out_b too) and their gradients share one dtype: float32, float16 or bfloat16.
 *              head_dim is a multiple of 8 from 8 to 256, q_heads a positive multiple of kv_heads,
 *              and kv_len at most INT32_MAX.
 *   Units      scale multiplies <q, k>; logits, lse, bias and dbias are in nats; strides count
 *              elements.
 *   Ownership  The caller owns every buffer. A call allocates nothing, keeps no pointer, and writes
 *              nothing before all arguments are checked. On the CPU it has finished when it
 *              returns. On a device it does not wait: its tensors and workspace must stay until
 *              the call's work on `stream` is done.
 *   Workspace  is scratch memory that the caller lends to a call: at least as many bytes as
 *              fdma_<operation>_workspace() says, for a given window linear in q_len and
 *              kv_len; currently none for fdma_merge() and its gradients. It may have any alignment
 *              and contents. It must not overlap a tensor of the call, nor the workspace of a call
 *              that may run at the same time.
 *   Edge       NaN and infinity inside tensors are values, not errors. An output may not share
 *              elements with any other tensor: only fdma_rotate() and its gradient work in place.
 *   Errors     Every operation returns an fdma_status. If it is not FDMA_OK, fdma_last_error() has
 *              one line: the argument, its value and what is wanted, or why no kernel takes it.
 *
 * Names. batch, q_len, kv_len, q_heads, kv_heads, head_dim, window; indices b batch, i query, j
 * key, h query head, g = h / (q_heads / kv_heads) kv head, d channel.
 *
 * Positions. Query i is at position p(i) = i + kv_len - q_len: the last query is aligned with the
 * last key. To decode one token, pass q_len = 1 and all keys so far, its own included. Causal: key
 * j is visible to query i if j <= p(i), so a query at a negative position sees nothing. Not causal:
 * every valid key is visible to every query.
 *
 * Padding. A sequence of a batch may have fewer keys than kv_len. key_valid [batch, kv_len] uint8
 * is 0 for its padding, which may be at any position: those keys are never read and never kept.
 * kv_len counts them, so padding on the left keeps the last query aligned with the last key.
 * Queries have no mask: ignore the rows of out that belong to padding.
 *
 *     uint8_t valid[2][6] = {{0, 0, 1, 1, 1, 1}, {1, 1, 1, 1, 1, 1}}; // sequences of 4 and 6 keys
 *     args.key_valid = fdma_tensor_2d(valid, FDMA_UINT8, 2, 6);
 *
 * Packed sequences. Sequences of different lengths can also stand one after the other, without
 * padding: batch is 1, kv_len = q_len is their total length, and starts [sequences + 1] int32 has
 * the first position of each and, last, the end of all. A query sees keys of its own sequence only,
 * and a sequence ranks its own keys: it gets the results that it has by itself. Give the same
 * starts to every call on these tensors. Positions from the last start on belong to no sequence:
 * their queries keep no key, and their keys are never read.
 *
 *     int32_t starts[] = {0, 4, 10}; // sequences of 4 and 6 keys
 *     args.starts = fdma_tensor_1d(starts, FDMA_INT32, 3);
 *
 * On a device results may differ by rounding, and wrong starts are not refused but clamped.
 *
 * Preallocated keys. Tensors of keys may have room for more keys than there are. kv_used [batch]
 * int32 says how many exist: sequence b gets the results that it has by itself with k, v, bias,
 * score, key_valid and the selection cut to their first kv_used[b] keys. Its query i stands at
 * position i + kv_used[b] - q_len, and a key that is kept to the end has expiry kv_used[b]. The
 * other keys are never read: their gradients are 0, their expiry is their own index and their slot
 * -1, and they have the scores of padding. Under a causal mask a query at a negative position is
 * an empty row. A selection that was made with kv_used is used with the same kv_used. Packed
 * sequences and streams have none. Numbers below 0 or above kv_len are refused; on a device, where
 * the host does not read them, they are clamped, and a replayed CUDA graph may find other ones.
 *
 *     int32_t used[2] = {900, 37}; // keys so far, in tensors that have room for kv_len
 *     args.kv_used = fdma_tensor_1d(used, FDMA_INT32, 2);
 *
 * Masks. attn_mask [batch, q_heads, q_len, kv_len] uint8 is 0 where a query does not attend to a
 * key, and attn_bias, of the same axes, is added to the logits. A mask may also have float16 or
 * bfloat16 numbers: a query attends to the keys whose number is above 0. Devices read these as
 * they are; on the CPU the reference alone takes numbers. Each axis of either may have length 1
 * instead: it is broadcast, and nothing is expanded. The axis of heads may also have kv_heads
 * entries, which the query heads of a kv head share. They combine with everything else: a query
 * attends to the keys that attn_mask and all other rules let it keep. With packed sequences they
 * are indexed by positions in the packed tensors; with carried keys there are none. A number of
 * attn_bias for a key that the query does not keep has no effect, even if it is NaN. A mask is
 * read once for all query heads that share it, and a tile of queries works on the keys that some of
 * them keep. So a mask that keeps few keys costs little more than attention to these, and its own
 * reading, only where neighbouring queries keep the same ones; else as much as one of most keys.
 *
 *     // [1, 1, q_len, kv_len]: shared by all sequences and heads
 *     args.attn_mask = fdma_tensor_4d(mask, FDMA_UINT8, 1, 1, q_len, kv_len);
 *
 * Streams. A long sequence can come in pieces, as a prompt does that is prefilled a few thousand
 * tokens at a time. Of the keys of earlier pieces, later queries can keep only those that the last
 * query so far has kept. These are the carried keys: at most rows = window + recent for each kv
 * head, each in the row that its slot numbers. A call on the next piece takes their scores and
 * positions as a table (fdma_table), and their k, v and bias as k_carried, v_carried and
 * bias_carried. It gives the same selection as the whole sequence, bit for bit, and its results up
 * to rounding, wherever the sequence is cut. Carried keys stand before the keys of the piece: key j
 * is row j of k_carried if j < rows, else row j - rows of k. expiry, slot and kv_len count both,
 * and expiry is a number of this kind, not a position of the stream; q, k, v, score, bias and
 * key_valid have the piece alone. After the call the keys of the piece that are still kept go to
 * their rows. table_out numbers them by their positions in the stream, padding counted. For each b
 * and g, where `seen` positions had passed before the call:
 *
 *     for (int64_t row = 0; row < rows; row++)
 *         if (position[row] >= seen)
 *             copy_key(k_carried, row, k, position[row] - seen); // v and bias alike
 *
 * Then table_out is the table_in of the next call: two tables take turns. A first call has no
 * table_in and no carried keys, or an empty table: all positions -1, seen 0. Every call of a stream
 * has the same window, recent, sinks and bias_form, causal masking, causal scope, no starts, and at
 * most as many queries as the piece has keys.
 *
 * The table of fdma_select() may also have another number of rows: keys that several calls or
 * devices have left, in any order, with all that the last query before the piece keeps. Then slots
 * are not rows, and there is no table_out. A carried key that no query keeps has an expiry <= rows.
 *
 * Dropout. In training some of the probabilities may be dropped: each becomes 0 with probability
 * `dropout`, and the others are divided by 1 - dropout. lse is without dropout. `dropout` is
 * rounded to a multiple of 2^-16. Which probabilities are dropped is a function of seed, offset,
 * the entry of the batch, the query head and the positions of query and key; docs/algorithm.md
 * defines it. It is the same in forward, backward and fdma_probabilities(), in every kernel and on
 * every device, and a call on the last queries alone drops what it drops with all of them. So give
 * each call of forward, in every layer and step, a seed or an offset of its own, and its backward
 * call the same ones. rng_state [2] int64 has seed and offset in memory, on a device in its memory,
 * where a replayed CUDA graph may find other ones. Positions of packed sequences count from the
 * first of them. Calls with carried keys have no dropout.
 *
 * Devices. exec.device is FDMA_CPU or FDMA_CUDA(n), a device of compute capability 8.0 or later.
 * All tensors and the workspace are then memory of that device. A call checks this unless
 * exec.trusted is set. The argument structs are read during the call and stay on the host. The call
 * puts its work on `stream` and returns without reading anything back, so a CUDA graph can capture
 * it. On a device q, k, v, out and their gradients are float16 or bfloat16: convert float32 tensors
 * first. Only fdma_merge(), fdma_rotate() and their gradients take float32 there. To attend on a
 * device, a selection whose window + recent is smaller than kv_len needs its slots.
 *
 * Threads. Calls on different buffers may run at the same time. Calls on the CPU share a pool of
 * threads that sleep between calls; a child process after fork() gets a pool of its own. A call may
 * use threads of the caller instead: exec.parallel. Results are bit-equal for every number and kind
 * of threads, and a sequence's result does not depend on the others of its batch. Sums may differ
 * in their last bits between kernels, and so between machines. A thread can be cancelled in a call.
 * dlclose() leaves the library in memory.
 *
 * Traps
 *
 *   - FDMA_BIAS_EXP is the default. Its bias exp(z) overflows float32 to infinity above z = 88.7,
 *     and rows that keep such a key are NaN: keep `a` small, or use FDMA_BIAS_LINEAR.
 *   - The default scope of fdma_select() is causal, because it does not know `causal`. Pass
 *     FDMA_SCOPE_GLOBAL for attention that is not causal.
 *   - A selection holds only for the number of keys that it was made for. When a key is appended,
 *     select again.
 *
 * Source: arXiv:2508.02124, Trainable Dynamic Mask Sparse Attention; arXiv:2205.14135.
 */
#ifndef FDMA_H
#define FDMA_H

#include <stddef.h>
#include <stdint.h>

#define FDMA_VERSION_MAJOR 0
#define FDMA_VERSION_MINOR 2
#define FDMA_VERSION_PATCH 0

#if !defined(_WIN32)
#define FDMA_API __attribute__((visibility("default")))
#elif defined(FDMA_BUILDS_LIBRARY)
#define FDMA_API __declspec(dllexport)
#else
#define FDMA_API /* one header for the DLL and the static library */
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Status */

typedef enum fdma_status {
    FDMA_OK = 0,
    FDMA_INVALID_ARGUMENT = 1,    /* the arguments contradict each other or this header: shapes,
                                     strides, sizes, options; tensors that overlap */
    FDMA_UNSUPPORTED = 2,         /* no kernel of this machine does it: a dtype, a head_dim, a name
                                     in exec.kernel that is unknown or unusable here */
    FDMA_WORKSPACE_TOO_SMALL = 3, /* the message says how many bytes are wanted */
    FDMA_CUDA_ERROR = 4           /* the message has the driver's words; the CPU still works */
} fdma_status;

/*! fdma_last_error() - why this thread's last failing call failed: one line, never NULL.
 *  Calls that succeed leave it as it was: look at the status first.
 *  Ownership  valid until this thread's next failing call; do not free; "" before the first */
FDMA_API const char *fdma_last_error(void);

/*! fdma_status_name() - a status as text, for example "FDMA_INVALID_ARGUMENT". Never NULL. */
FDMA_API const char *fdma_status_name(fdma_status status);

/*! fdma_version() - the library's version, "major.minor.patch". The FDMA_VERSION macros tell
 *  the version of the header that the program was compiled with. */
FDMA_API const char *fdma_version(void);

/* Tensors */

typedef enum fdma_dtype {
    FDMA_FLOAT32 = 1,  /* q, k and v have it on the CPU only */
    FDMA_FLOAT16 = 2,  /* IEEE binary16, stored as uint16_t */
    FDMA_BFLOAT16 = 3, /* the upper half of a float32, stored as uint16_t */
    FDMA_FLOAT64 = 4,  /* the kernel "reference" only */
    FDMA_INT32 = 5,
    FDMA_UINT8 = 6,
    FDMA_INT64 = 7 /* rng_state only */
} fdma_dtype;

/*! fdma_tensor - a borrowed view of an array of rank 1 to 4.
 *  The element at [x0, x1, ...] is data[x0 * stride[0] + x1 * stride[1] + ...]. Rank 0 means
 *  absent. A slice of a larger array, such as q, k and v of one packed projection, is a view with
 *  larger strides: nothing needs to be copied.
 *  Edge    the last stride is 1, the others are >= 0 (0 repeats an input along an axis; an output's
 *          elements must be distinct); strides of axes of length 1 do not matter; alignment to one
 *          element is enough, though a GPU is faster if rows start at multiples of 16 bytes; data
 *          may be NULL if there are no elements */
typedef struct fdma_tensor {
    void *data;
    int64_t shape[4];
    int64_t stride[4]; /* in elements */
    fdma_dtype dtype;
    int32_t rank;
    int32_t reserved[4];
} fdma_tensor;

/*! fdma_dense_tensor() - a view of a contiguous array, last axis fastest.
 *  Shapes     shape[0] to shape[rank - 1]
 *  Errors     none; a wrong rank or shape is found by the call that is given the tensor */
FDMA_API fdma_tensor fdma_dense_tensor(void *data, fdma_dtype dtype, int32_t rank,
                                       const int64_t *shape);

/*! fdma_tensor_1d() to fdma_tensor_4d() - fdma_dense_tensor() with the shape as arguments:
 *  fdma_tensor_4d(q, FDMA_BFLOAT16, batch, q_len, q_heads, head_dim). */
FDMA_API fdma_tensor fdma_tensor_1d(void *data, fdma_dtype dtype, int64_t n0);
FDMA_API fdma_tensor fdma_tensor_2d(void *data, fdma_dtype dtype, int64_t n0, int64_t n1);
FDMA_API fdma_tensor fdma_tensor_3d(void *data, fdma_dtype dtype, int64_t n0, int64_t n1,
                                    int64_t n2);
FDMA_API fdma_tensor fdma_tensor_4d(void *data, fdma_dtype dtype, int64_t n0, int64_t n1,
                                    int64_t n2, int64_t n3);

/* Values of fdma_exec.device. */
#define FDMA_CPU 0
#define FDMA_CUDA(n) ((n) + 1)

/* Part of a call on the CPU. A caller's pool gives it the context that came with it. */
typedef void (*fdma_task)(void *task_context, int64_t index);

/* Runs task(task_context, index) for each index from 0 to count - 1, and returns when all of them
 * have returned. They may run on any threads, in any order, at the same time or in turn. */
typedef void (*fdma_run_tasks)(void *context, int64_t count, fdma_task task, void *task_context);

/*! fdma_parallel - a caller's own threads, in place of the library's pool.
 *  Use it in a program that has a pool of threads: a call then starts no thread and wakes none.
 *  The library calls `run` from the thread of the call, a few times in a large call and never in a
 *  small one, and never from within a task. `count` is at most exec.threads. All work of a call of
 *  `run` is done even if one task does it all, or none is run. So `run` may run the tasks in turn,
 *  and may leave out tasks for which it has no threads.
 *  Edge       results are bit-equal to those with the pool. `run` may itself call the library, with
 *             other buffers. It must return, not throw or longjmp(). A task must not be run after
 *             `run` has returned. pthread_cancel() does not end the calling thread in `run` */
typedef struct fdma_parallel {
    size_t size;        /* sizeof(fdma_parallel) */
    fdma_run_tasks run; /* not NULL */
    void *context;      /* the first argument of `run` */
} fdma_parallel;

/*! fdma_exec - zeros are good defaults, but most calls need workspace. */
typedef struct fdma_exec {
    void *workspace;       /* scratch memory, any alignment; see the fdma_*_workspace functions */
    size_t workspace_size; /* bytes */
    void *stream;          /* device only: a cudaStream_t; NULL is the default stream */
    const char *kernel;    /* NULL: the fastest kernel that supports the call. Otherwise a name, or
                              the beginning of one up to a '/': "cpu", "cpu/avx2". It forces kernels
                              whose names begin with it. If an operation has none, kernels run whose
                              name is a beginning of it, so that one name serves a fused call */
    int32_t device;        /* FDMA_CPU or FDMA_CUDA(n): where all tensors are */
    int32_t threads; /* CPU only: at most this many; 0: OMP_NUM_THREADS as the first call finds it,
                        else the CPUs that affinity and the cgroup's quota let this process use */
    int32_t trusted; /* device only. Nonzero: the caller guarantees that `device` is the current
                              device of this thread, and that all tensors and the workspace are
                              memory that this device can access. The call then skips these checks,
                              which saves host time. If the guarantee is false, this call and later
                              ones may fail, fault, or write to other memory */
    int32_t reserved;
    const fdma_parallel *parallel; /* CPU only: the caller's own threads; NULL: the library's */
} fdma_exec;

/* Attention */

typedef enum fdma_bias_form {
    FDMA_BIAS_EXP = 0,    /* bias = exp(z), as in the paper and in the Doge models */
    FDMA_BIAS_LINEAR = 1, /* bias = z */
    FDMA_BIAS_NONE = 2    /* no bias: scores only rank keys: dt_proj, a, dt_bias have no gradient */
} fdma_bias_form;

typedef struct fdma_score_args {
    size_t size;              /* sizeof(fdma_score_args) */
    fdma_tensor v;            /* [batch, kv_len, kv_heads, head_dim] */
    fdma_tensor dt_proj;      /* [kv_heads, kv_heads * head_dim] */
    fdma_tensor a;            /* [kv_heads] */
    fdma_tensor dt_bias;      /* optional [kv_heads]; absent: 0 */
    fdma_tensor key_valid;    /* optional [batch, kv_len] uint8: 0 for padding */
    fdma_tensor score;        /* output, optional [batch, kv_heads, kv_len] float32 */
    fdma_tensor bias;         /* output, optional [batch, kv_heads, kv_len] float32 */
    fdma_bias_form bias_form; /* FDMA_BIAS_NONE: `bias` must be absent */
    int32_t reserved;
    fdma_exec exec;
    fdma_tensor kv_used; /* optional [batch] int32: how many keys of each sequence exist */
} fdma_score_args;

/*! fdma_score() - the score and the bias of each key, from the value states of all kv heads.
 *  Use it to rank keys with learned weights. A key's score never changes as the sequence grows, so
 *  a decoder scores each key once, when it arrives. fdma_select() takes scores from anywhere.
 *  Formula    dt[b,j,g] = dt_bias[g] +
 *                         sum over g', d of v[b,j,g',d] * dt_proj[g, g' * head_dim + d]
 *             score[b,g,j] = z = a[g] * softplus(dt[b,j,g])
 *             bias[b,g,j] = exp(z) or z
 *             softplus(x) = max(x, 0) + log1p(exp(-|x|))
 *  Shapes     dt_proj, a and dt_bias each have the dtype of v or are float32
 *  Edge       exp(z) may overflow to infinity; a key that is not valid is not read: its z is -inf
 *  Source     arXiv:2508.02124, section 3 */
FDMA_API fdma_status fdma_score(const fdma_score_args *args);

typedef enum fdma_scope {
    FDMA_SCOPE_DEFAULT = 0, /* fdma_attention(): causal scope if `causal`, else global scope;
                               fdma_select(): causal scope */
    FDMA_SCOPE_CAUSAL = 1,  /* each query ranks the keys up to its own position */
    FDMA_SCOPE_GLOBAL = 2   /* one ranking of all valid keys, shared by all queries */
} fdma_scope;

#define FDMA_WINDOW_ALL INT64_MAX /* a window that keeps every key */

/*! fdma_selection - which queries keep which keys: made by fdma_select(), used by fdma_forward().
 *  It is the whole dynamic mask in one number per key. As the position grows a key may be evicted
 *  by better ones, and it never returns; `expiry` is the first position at which it is gone. The
 *  query at position p keeps key j if j <= p and p < expiry[b,g,j]. expiry = kv_len: kept to the
 *  end; expiry = j: never kept. (Global scope without causal masking: kept if expiry > j.) Of
 *  packed sequences each has its own end in place of kv_len, and slots of its own.
 *  Kept keys have slots, numbers below window + recent: a key that enters a full set takes over the
 *  slot of the key that leaves it, so the keys that a query keeps have distinct slots. A key that
 *  is never kept has slot -1. With a gap keys have the slots of the selection without it: the slot
 *  of a key that leaves because of the gap is empty until the next key takes it.
 *  The caller sets size and the tensors; fdma_select() fills in the rest.
 *  Shapes     expiry, slot [batch, kv_heads, kv_len] int32
 *  Edge       window + recent may say less than what is kept, as after a change of window. On the
 *             CPU fdma_forward() is right all the same, and the other calls are right or refuse the
 *             selection. On a device, if a query keeps a key whose slot is window + recent or more,
 *             its rows of out, lse and dq become NaN. Other rows of that kv head may become NaN,
 *             and its dk, dv and dbias are meaningless; fdma_cache_store() leaves the key out. Any
 *             other contradiction, such as two keys of one slot that are kept at once, gives wrong
 *             numbers where slots are read: on a device and in fdma_cache_store(). No contradiction
 *             leads to an access out of bounds */
typedef struct fdma_selection {
    size_t size; /* sizeof(fdma_selection) */
    fdma_tensor expiry;
    fdma_tensor slot;              /* optional on the CPU, except for fdma_cache_store() */
    int64_t window, recent, sinks; /* what the selection was made for */
    int64_t kv_len;
    fdma_scope scope; /* FDMA_SCOPE_CAUSAL or FDMA_SCOPE_GLOBAL */
    int32_t reserved;
    double gap; /* what the selection was made for; 0: none */
} fdma_selection;

/*! fdma_table - the scores and positions of a stream's carried keys; see "Streams", above.
 *  fdma_select() writes it for the next call, which reads it. Its size does not depend on how many
 *  positions have passed. The caller points its tensors at memory, which needs no initial values.
 *  Edge       a table changed by hand gives wrong selections, never an access out of bounds */
typedef struct fdma_table {
    fdma_tensor score;    /* [batch, kv_heads, rows] float32 */
    fdma_tensor position; /* [batch, kv_heads, rows] int32: in the stream; -1: the row is empty */
    fdma_tensor seen;     /* [batch] int32: positions of the stream that have passed */
    int32_t reserved[8];
} fdma_table;

typedef struct fdma_select_args {
    size_t size;               /* sizeof(fdma_select_args) */
    fdma_tensor score;         /* [batch, kv_heads, kv_len] float32 */
    fdma_tensor key_valid;     /* optional [batch, kv_len] uint8: 0 for padding */
    fdma_tensor starts;        /* optional [sequences + 1] int32: packed sequences */
    fdma_table table_in;       /* optional: the keys that earlier calls of the stream have left */
    fdma_table table_out;      /* output, optional: those that this call leaves; needs slots */
    fdma_selection *selection; /* output */
    int64_t window;            /* keys that a query keeps, 1 or more; FDMA_WINDOW_ALL: all keys */
    int64_t recent;            /* keys that it keeps beside these because they are the newest */
    int64_t sinks;             /* first keys of a sequence that outrank all others: 0 to window */
    fdma_scope scope;
    int32_t reserved;
    fdma_exec exec;
    fdma_tensor kv_used; /* optional [batch] int32: how many keys of each sequence exist */
    double gap; /* above 0: keys leave when their score is more than this below the best; 0: off */
} fdma_select_args;

/*! fdma_select() - the `window` keys of highest score among those that each query can see.
 *  Use it to keep a selection for several calls of fdma_forward(), or to see what is kept. A
 *  language model needs the tokens just before a query, which need not be among the best by score:
 *  give it some `recent` keys. To keep 2048 keys per query, for example, ask for window 1792 and
 *  recent 256. docs/performance.md says what that costs.
 *  Formula    order: higher score first; of equal scores the more recent key (larger j) first; NaN
 *             below everything; -0 and 0 are equal. Keys that are not valid do not count in the
 *             window and are never kept. recent: a query keeps the `recent` newest valid keys that
 *             it can see, and of the older ones the `window` best. sinks: the first `sinks` valid
 *             keys rank above all others, whatever their scores. gap: of the keys that the rules
 *             above let it keep, a query keeps key j only if j is a sink, or among the `recent`
 *             newest, or score[j] >= best - gap, where best is the highest score of all valid keys
 *             up to the query's position, in float64 and with NaN as -inf.
 *  Workspace  O(batch * kv_heads * kv_len)
 *  Edge       exact: bit-equal on every backend for given scores; fewer than window + recent
 *             visible keys: all of them; global scope: slots number the kept keys in ascending j
 *  Errors     FDMA_INVALID_ARGUMENT also for sinks above window, a table without slots, both tables
 *             unless they have window + recent rows, a gap that is negative, infinite or NaN, a gap
 *             above 0 with a table or a selection whose size says that it has no field for it, and,
 *             with global scope, which has no order of keys, a table, or recent or gap above 0
 *  Source     arXiv:2508.02124, section 3 */
FDMA_API fdma_status fdma_select(const fdma_select_args *args);

typedef struct fdma_forward_args {
    size_t size;                     /* sizeof(fdma_forward_args) */
    fdma_tensor q;                   /* [batch, q_len, q_heads, head_dim] */
    fdma_tensor k, v;                /* [batch, kv_len, kv_heads, head_dim] */
    fdma_tensor bias;                /* optional [batch, kv_heads, kv_len] float32 */
    fdma_tensor key_valid;           /* optional [batch, kv_len] uint8: 0 for padding */
    fdma_tensor starts;              /* optional [sequences + 1] int32: packed sequences */
    fdma_tensor k_carried;           /* optional [batch, rows, kv_heads, head_dim] */
    fdma_tensor v_carried;           /* shaped as k_carried, and given with it */
    fdma_tensor bias_carried;        /* [batch, kv_heads, rows] float32: given if bias is */
    fdma_tensor out;                 /* output [batch, q_len, q_heads, head_dim] */
    fdma_tensor lse;                 /* output, optional [batch, q_heads, q_len] float32 */
    const fdma_selection *selection; /* NULL: dense, every visible key */
    double scale;                    /* multiplies <q, k>; 0: 1 / sqrt(head_dim) */
    double softcap;                  /* c > 0: x = scale * <q, k> becomes c * tanh(x / c); 0: off */
    int32_t causal; /* nonzero: a query sees only keys at positions up to its own */
    int32_t reserved;
    fdma_exec exec;
    fdma_tensor kv_used;    /* optional [batch] int32: how many keys of each sequence exist */
    fdma_tensor sink_logit; /* optional [q_heads] float32: one more term in the sum of each row */
    double dropout;         /* each probability becomes 0 with this probability; below 1; 0: off */
    uint64_t seed, offset;  /* which ones do is a function of these; see "Dropout", above */
    fdma_tensor rng_state;  /* optional [2] int64: seed and offset in memory, in place of these */
    fdma_tensor attn_mask;  /* optional [batch or 1, q_heads or kv_heads or 1, q_len or 1, kv_len or
                               1] uint8: 0 where the query does not attend to the key; or of 16-bit
                               numbers: above 0 where it does, see "Masks", above */
    fdma_tensor attn_bias;  /* optional, axes as of attn_mask, q's dtype or float32: added to s */
    fdma_tensor mask_lists; /* optional [bytes] uint8: fdma_mask_lists()'s, for this attn_mask */
} fdma_forward_args;

/*! fdma_forward() - attention of each query over its kept keys, or over all visible ones.
 *  Use it with a selection that you keep or make yourself, or without one as plain (dense)
 *  attention with grouped heads, bias, softcap and padding. Ask for lse to train or to merge.
 *  Formula    s[i,j] = softcap(scale * <q[b,i,h], k[b,j,g]>) + bias[b,g,j] + attn_bias[b,h,i,j],
 *             over kept keys only: with attn_mask, the keys of the other rules where it is not 0
 *             lse[b,h,i] = log(exp(sink_logit[h]) + sum_j exp(s[i,j])), without the first term if
 *                          sink_logit is absent
 *             out[b,i,h] = sum_j m[i,j] exp(s[i,j] - lse[b,h,i]) v[b,j,g], where m[i,j] is 1 or,
 *                          with dropout, 0 or 1 / (1 - dropout)
 *  Workspace  O(threads * tile + batch * kv_heads * kv_len), on a device O(batch * kv_heads *
 *             (kv_len + (window + recent) * q_len / 128)), with attn_mask, more than 16 queries and
 *             no mask_lists 5/32 q_len * kv_len bytes for each head of it; for a few queries also
 *             some rows of out
 *  Edge       a softcap below 1e-30 counts as 1e-30, which makes all capped products 0 in float32;
 *             a query that keeps no key (or whose kept logits are all -inf): out = 0, lse = -inf
 *             or, with a sink_logit, this; a kept logit or a sink_logit that is NaN or +inf: that
 *             row's out and lse are NaN; a sink_logit of -inf is as none; a logit beyond 2e38, a
 *             sum of <q, k> beyond 3e38, and on a device a bias or attn_bias beyond 3e38 * scale
 *             may count as infinite; keys that are not valid or never kept are never read; a row
 *             may be NaN because of NaN or infinity in v of a key that only others of its tile
 *             keep; sums may overflow, although out would be finite, if |v| * kept keys * w exceeds
 *             the largest float32: w, the most that a weight can be, is 2^11 on the CPU, 2^15 on
 *             compute capability 9.0 and 2^8 on other devices
 *  Errors     FDMA_INVALID_ARGUMENT also for a scale or softcap that is negative, infinite or NaN,
 *             a scale beyond float32, a dropout below 0 or that rounds to 1, dropout, attn_mask or
 *             attn_bias with carried keys, a selection made for another kv_len or scope, key_valid
 *             with carried keys (the selection excludes keys that are not valid; fdma_attention(),
 *             which selects, takes it)
 *  Source     arXiv:2205.14135; arXiv:2508.02124 */
FDMA_API fdma_status fdma_forward(const fdma_forward_args *args);

/*! fdma_mask_lists() - the keys that queries keep by an attn_mask, for several calls.
 *  Use it where forward and backward, or the layers of a model, have the same mask: on a device
 *  each call would read all of it, which may take longer than attention to the keys that it keeps.
 *  Ask fdma_mask_lists_size() for the bytes, call fdma_mask_lists() with the arguments of forward,
 *  and set mask_lists in every call that has the same attn_mask, key_valid, starts,
 *  kv_used, selection and causal, and q and k of the same shape. Only mask_lists is written.
 *  Shapes     mask_lists [fdma_mask_lists_size()], whose address is a multiple of 16; on a device
 *             5/32 q_len * kv_len bytes for each head of the mask, and as many for each sequence
 *             and kv head that the mask, the selection, key_valid or kv_used tell apart. On the CPU
 *             the size is 0, and the call only checks its arguments: kernels read the mask itself
 *  Workspace  fdma_forward_workspace()
 *  Edge       calls with mask_lists still need attn_mask, which some gradients read. Lists that
 *             were changed by hand or made for other arguments give wrong results, never an access
 *             out of bounds
 *  Errors     as fdma_forward(); FDMA_INVALID_ARGUMENT also for no attn_mask or too few bytes
 *  Source     docs/algorithm.md, masks */
FDMA_API fdma_status fdma_mask_lists(const fdma_forward_args *args);
FDMA_API fdma_status fdma_mask_lists_size(const fdma_forward_args *args, size_t *bytes);

typedef struct fdma_probabilities_args {
    size_t size;                     /* sizeof(fdma_probabilities_args) */
    fdma_tensor q;                   /* [batch, q_len, q_heads, head_dim] */
    fdma_tensor k;                   /* [batch, kv_len, kv_heads, head_dim] */
    fdma_tensor bias;                /* optional [batch, kv_heads, kv_len] float32 */
    fdma_tensor key_valid;           /* optional [batch, kv_len] uint8: 0 for padding */
    fdma_tensor starts;              /* optional [sequences + 1] int32: packed sequences */
    fdma_tensor kv_used;             /* optional [batch] int32: how many keys exist */
    fdma_tensor k_carried;           /* optional [batch, rows, kv_heads, head_dim] */
    fdma_tensor bias_carried;        /* [batch, kv_heads, rows] float32: given if bias is */
    fdma_tensor lse;                 /* fdma_forward()'s: [batch, q_heads, q_len] float32 */
    fdma_tensor probability;         /* output [batch, q_heads, q_len, kv_len] float32; its kv_len
                                        counts carried keys, which come first, too */
    const fdma_selection *selection; /* the one that forward was given; NULL: dense */
    double scale, softcap;           /* as in fdma_forward_args */
    int32_t causal;
    int32_t reserved;
    fdma_exec exec;
    double dropout; /* as in fdma_forward_args, and the two below */
    uint64_t seed, offset;
    fdma_tensor rng_state;
    fdma_tensor attn_mask, attn_bias; /* as in fdma_forward_args */
} fdma_probabilities_args;

/*! fdma_probabilities() - the probability that each query gives to each key.
 *  Use it to debug and to draw pictures, after fdma_forward() or fdma_attention(). Every field that
 *  these also have must be what it was then. It computes and writes q_len * kv_len numbers, and
 *  nothing about it is tuned: to attend, use the calls above.
 *  Formula    probability[b,h,i,j] = m[i,j] exp(s[i,j] - lse[b,h,i]), with the s and m of
 *             fdma_forward(), for the keys that query i keeps, and 0 for all others
 *  Workspace  none; on a device O(batch * kv_heads * kv_len)
 *  Edge       without dropout a row sums to 1 up to rounding, or to less if forward had a
 *             sink_logit; an empty one (lse = -inf) is all 0; where lse is NaN, kept keys have NaN
 *             and the others 0; with an lse that is not forward's, such as a merged one, rows sum
 *             to what these keys have of the whole; only keys that are valid and kept are read
 *  Errors     as fdma_forward()
 *  Source     docs/algorithm.md, backward */
FDMA_API fdma_status fdma_probabilities(const fdma_probabilities_args *args);

typedef struct fdma_attention_args {
    size_t size;               /* sizeof(fdma_attention_args) */
    fdma_tensor q;             /* [batch, q_len, q_heads, head_dim] */
    fdma_tensor k, v;          /* [batch, kv_len, kv_heads, head_dim] */
    fdma_tensor dt_proj;       /* [kv_heads, kv_heads * head_dim] */
    fdma_tensor a;             /* [kv_heads] */
    fdma_tensor dt_bias;       /* optional [kv_heads]; absent: 0 */
    fdma_tensor key_valid;     /* optional [batch, kv_len] uint8: 0 for padding */
    fdma_tensor starts;        /* optional [sequences + 1] int32: packed sequences */
    fdma_table table_in;       /* optional, as in fdma_select_args; given with k_carried */
    fdma_table table_out;      /* output, optional, as in fdma_select_args; needs no selection */
    fdma_tensor k_carried;     /* optional, as in fdma_forward_args */
    fdma_tensor v_carried;     /* as in fdma_forward_args */
    fdma_tensor bias_carried;  /* as in fdma_forward_args; absent with FDMA_BIAS_NONE */
    fdma_tensor out;           /* output [batch, q_len, q_heads, head_dim] */
    fdma_tensor lse;           /* output, optional [batch, q_heads, q_len] float32 */
    fdma_tensor score;         /* output, optional [batch, kv_heads, kv_len] float32 */
    fdma_tensor bias;          /* output, optional [batch, kv_heads, kv_len] float32 */
    fdma_selection *selection; /* output, optional; its expiry is needed, its slot optional */
    int64_t window;            /* keys that a query keeps, 1 or more; FDMA_WINDOW_ALL: all keys */
    int64_t recent, sinks;     /* as in fdma_select_args */
    fdma_scope scope;          /* FDMA_SCOPE_CAUSAL only if `causal` is set */
    fdma_bias_form bias_form;
    double scale, softcap; /* as in fdma_forward_args */
    int32_t causal;
    int32_t reserved;
    fdma_exec exec;
    fdma_tensor kv_used;    /* optional [batch] int32: how many keys of each sequence exist */
    fdma_tensor sink_logit; /* optional [q_heads] float32, as in fdma_forward_args */
    double dropout;         /* as in fdma_forward_args, and the two below */
    uint64_t seed, offset;
    fdma_tensor rng_state;
    double gap; /* as in fdma_select_args */
} fdma_attention_args;

/*! fdma_attention() - score, select and attend in one call.
 *  Use it unless you want to keep or replace a step. "Making a call", above, is an example. To
 *  train, ask also for what fdma_attention_backward() reads: lse, the selection and, to save
 *  computing it again, the bias:
 *
 *      fdma_selection selection = {.size = sizeof selection};
 *      selection.expiry = fdma_tensor_3d(expiry, FDMA_INT32, batch, kv_heads, kv_len);
 *      selection.slot = fdma_tensor_3d(slot, FDMA_INT32, batch, kv_heads, kv_len);
 *      args.selection = &selection;
 *      args.lse = fdma_tensor_3d(lse, FDMA_FLOAT32, batch, q_heads, q_len);
 *      args.bias = fdma_tensor_3d(bias, FDMA_FLOAT32, batch, kv_heads, kv_len);
 *
 *  Formula    fdma_score(), then fdma_select(), then fdma_forward(), with the same fields
 *  Workspace  holds the outputs that are not asked for and what the largest step needs
 *  Edge       as the three calls. Scores differ between kernels in their last bits, and keys whose
 *             scores nearly tie may then be ranked differently: `score` tells what was ranked
 *  Source     arXiv:2508.02124 */
FDMA_API fdma_status fdma_attention(const fdma_attention_args *args);

/* Decoding */

/*! fdma_cache - the carried keys of many streams, each in a sequence of the cache: what a server
 *  keeps of the tokens so far. Its size does not depend on how many these are.
 *  The caller sets the sizes, the rules and the dtype. fdma_cache_bytes() says how much memory the
 *  tensors take, and fdma_cache_init() places them in it; or the caller sets them, in memory and
 *  with strides of its own. All state is in the tensors: a copy of the struct is the same cache.
 *  fdma_prefill() takes prompts of any length into it, fdma_decode() goes on from there.
 *  fdma_cache_copy() copies sequences and changes their order. fdma_cache_store() puts the keys
 *  that a call of fdma_attention() keeps into their rows.
 *
 *  Pages      With a page_table, k and v are pools, [pages, page_len, kv_heads, head_dim], where
 *             page_len is a power of 2: row r of sequence s is row r % page_len of the page with
 *             the number page_table[s][r / page_len]. So a short sequence takes the pages that it
 *             fills. Rows fill in the order 0, 1, ...: once n tokens have entered a sequence, at
 *             most its first min(n, rows) rows have keys, and later tokens overwrite any of these.
 *             The caller owns the pools and the page table. Calls write to the pools, never to the
 *             table. Before a call the caller sets the page numbers of all rows that its tokens may
 *             fill.
 *             A number that no page has, such as -1, is a missing page. Its keys count in the
 *             selection, but no query attends to them. A key that would enter it is lost: the row
 *             is empty then, and the next token takes it. So with one token a call a cache whose
 *             page 0 is missing stays empty. If a sink is lost, the sinks are the first keys of
 *             those that are left
 *             Sequences may share a page while no call writes to it. A full page is safe as long
 *             as `seen` + the new tokens of each of these sequences is at most rows. After that
 *             their tokens overwrite it, and the other sequences read wrong keys */
typedef struct fdma_cache {
    fdma_tensor k, v; /* [sequences, rows, kv_heads, head_dim] of `dtype`; rows = window + recent;
                         pools with page_table */
    fdma_tensor bias; /* [sequences, kv_heads, rows] float32; there, but not read, with
                         FDMA_BIAS_NONE */
    fdma_table table; /* of `sequences` streams */
    int64_t sequences, kv_heads, head_dim;
    int64_t window, recent, sinks; /* as in fdma_select_args, in causal scope */
    fdma_dtype dtype;
    int32_t device;         /* FDMA_CPU or FDMA_CUDA(n), as exec.device of its calls */
    fdma_tensor page_table; /* optional [sequences, n] int32, where n * page_len >= rows */
    int32_t reserved[24];
} fdma_cache;

/*! fdma_cache_bytes() - the bytes of memory that the tensors of a cache of these sizes take. With a
 *  page_table this excludes k, v and page_table, which the caller allocates.
 *  Errors     FDMA_INVALID_ARGUMENT for sizes below 1 or above the limits, and wrong rules */
FDMA_API fdma_status fdma_cache_bytes(const fdma_cache *cache, size_t *bytes);

/*! fdma_cache_init() - places the tensors in `memory`, of the bytes that fdma_cache_bytes() says,
 *  and empties all sequences. Any alignment will do. On a device it waits for this to be done. With
 *  a page_table, k, v and page_table stay as the caller has set them, before or after the call.
 *  Errors     as fdma_cache_bytes() */
FDMA_API fdma_status fdma_cache_init(fdma_cache *cache, void *memory);

/*! fdma_cache_drop() - empties a sequence of a cache, so that a new stream can begin there. On a
 *  device no call on the cache may be under way. Its pages are free then: no call reads them.
 *  Errors     as fdma_cache_bytes(); FDMA_INVALID_ARGUMENT also for a sequence that the cache does
 *             not have, and for a table of other sizes */
FDMA_API fdma_status fdma_cache_drop(const fdma_cache *cache, int64_t sequence);

/*! fdma_cache_save(), fdma_cache_restore() - a sequence of a cache as bytes, and back into a cache
 *  of another process or machine. fdma_cache_state_bytes() says how many bytes it takes now.
 *  Use them to put a request aside and go on later: a restored sequence decodes with the bits that
 *  it would have had. The bytes have a version, the sizes, rules and dtype of the cache, and a
 *  checksum. They hold the rows that have keys, so that a short sequence is short.
 *
 *      size_t bytes;
 *      fdma_cache_state_bytes(&cache, 3, &bytes);
 *      void *state = malloc(bytes);
 *      fdma_cache_save(&cache, 3, state, bytes);
 *      fdma_cache_restore(&other, 0, state, bytes);
 *
 *  Shapes     the other cache has the same kv_heads, head_dim, window, recent, sinks and dtype. The
 *             number of its sequences, its strides and its pages may be others
 *  Ownership  state is memory of the host with any alignment, none of it the cache's; bytes beyond
 *             the state are ignored
 *  Edge       caches are on the CPU. Of a cache on a device copy the tensors, or views of one
 *             sequence, to the host, and describe them there by an fdma_cache with the same
 *             strides; to restore, copy them back. No call on the cache may be under way. With a
 *             page_table the pages of all rows with keys must be there, each page once. bias_form
 *             is not saved: it must be the same in every call on both caches
 *  Errors     FDMA_INVALID_ARGUMENT for a sequence that the cache does not have, tensors as in
 *             fdma_cache_copy(), a state that is truncated, damaged or of another cache, too few
 *             bytes, a state within the cache, and missing or equal pages; FDMA_UNSUPPORTED for
 *             another version or a device. A restore that is refused has changed nothing */
FDMA_API fdma_status fdma_cache_state_bytes(const fdma_cache *cache, int64_t sequence,
                                            size_t *bytes);
FDMA_API fdma_status fdma_cache_save(const fdma_cache *cache, int64_t sequence, void *state,
                                     size_t bytes);
FDMA_API fdma_status fdma_cache_restore(const fdma_cache *cache, int64_t sequence,
                                        const void *state, size_t bytes);

typedef struct fdma_cache_store_args {
    size_t size;        /* sizeof(fdma_cache_store_args) */
    fdma_cache cache;   /* written; of a prompt that goes on, also read */
    fdma_tensor index;  /* optional [batch] int32, of packed prompts [sequences]: the sequence
                                 of the cache for each; -1: skip it; absent: 0, 1, ... */
    fdma_tensor k, v;   /* [batch, new_len, kv_heads, head_dim]: the keys of the prefill */
    fdma_tensor score;  /* [batch, kv_heads, new_len] float32: what the selection ranked */
    fdma_tensor starts; /* optional [sequences + 1] int32: packed prompts */
    const fdma_selection *selection; /* of the prefill, with slots, in causal scope and with the
                                        cache's window, recent and sinks */
    fdma_bias_form bias_form;        /* the same in every call on a cache */
    int32_t reserved;
    fdma_exec exec;
} fdma_cache_store_args;

/*! fdma_cache_store() - the keys of a prefill that are kept to its end go to their rows of a cache.
 *  Use it after fdma_attention(), or fdma_select() and fdma_forward(), on a prompt. Ask these for
 *  the score and for the selection with its slots. Then fdma_decode() goes on as if the cache had
 *  seen the prompt token by token. A prompt is stored in one of two ways:
 *
 *  - The selection is of the prompt alone, its kv_len is new_len. The prompt replaces what the
 *    sequence held, and `seen` becomes its length, padding counted. Such prompts may be packed.
 *  - The prompt comes in pieces, and the selection's kv_len is rows + new_len: the call on this
 *    piece had the cache's table as table_in, and the cache's k, v and bias as carried keys. They
 *    are [sequences, ...], so the batch of that call is all sequences of the cache, in order. To
 *    run it on some of them, pass views of their rows; if the cache has pages, pass copies. That
 *    call needs no table_out. Carried keys that are kept stay in their rows, new ones overwrite
 *    those that they have evicted, and `seen` grows by new_len.
 *
 *  Formula    key j of the call that has expiry[j] = the end of its sequence goes to row slot[j] of
 *             k, v, bias and table.score; bias as in fdma_score(); table.position = j, or seen + j
 *             for a further piece, where j counts the keys of the call alone. A row that no key
 *             has is empty: position -1, score -inf
 *  Workspace  currently none
 *  Edge       a selection changed by hand gives wrong rows, never an access out of bounds. Two
 *             entries of a batch with one index leave that sequence with wrong keys, and no other.
 *             Other sequences of the cache are neither read nor written
 *  Errors     FDMA_INVALID_ARGUMENT also for a selection that is not causal, lacks slots, has a gap
 *             or other rules than the cache, or another kv_len than the two above, or, on the CPU,
 *             a slot that the cache has no row for; starts with carried keys; an index beyond the
 *             cache; a stream longer than INT32_MAX tokens
 *  Source     docs/algorithm.md, streams */
FDMA_API fdma_status fdma_cache_store(const fdma_cache_store_args *args);

typedef struct fdma_cache_copy_args {
    size_t size;      /* sizeof(fdma_cache_copy_args) */
    fdma_cache cache; /* read and written */
    fdma_tensor from; /* [count] int32: the sequence that is copied; -1: an empty one */
    fdma_tensor to;   /* [count] int32: the sequence that becomes the copy; none occurs twice */
    int32_t reserved;
    fdma_exec exec;
} fdma_cache_copy_args;

/*! fdma_cache_copy() - sequences of a cache become copies of others, all at once.
 *  Use it to go on with several continuations of a prompt, or to reorder the beams of a search:
 *  with to = 0, 1, ... and from = the beam that each continues. Only rows that have a key are
 *  copied, so a short sequence is cheap; a sequence that is copied to itself costs nothing.
 *  Formula    sequence to[i] becomes what sequence from[i] was before the call
 *  Pages      rows of from[i] go to the pages of to[i]. Rows in a page that both have
 *             are not copied, and a row whose page one of them lacks becomes empty. To share a
 *             prefix, give to[i] its full pages, and a page of its own for the rows after these
 *  Workspace  O(threads * count)
 *  Edge       from[i] = -1 empties to[i], as fdma_cache_drop() does; sequences that `to` does not
 *             have stay as they are; rows without a key may keep numbers that the source lacks
 *  Errors     FDMA_INVALID_ARGUMENT also for a number in `from` or `to` that is no sequence of the
 *             cache, and for one that `to` has twice */
FDMA_API fdma_status fdma_cache_copy(const fdma_cache_copy_args *args);

typedef struct fdma_decode_args {
    size_t size;              /* sizeof(fdma_decode_args) */
    fdma_cache cache;         /* read, and written: the committed tokens enter it */
    fdma_tensor index;        /* optional [batch] int32: the sequence of each stream; -1: skip it;
                                 absent: 0, 1, ... */
    fdma_tensor q;            /* [batch, q_len, q_heads, head_dim] */
    fdma_tensor k, v;         /* [batch, new_len, kv_heads, head_dim]: the new tokens */
    fdma_tensor dt_proj, a;   /* as in fdma_score_args; or else `score` is given */
    fdma_tensor dt_bias;      /* optional, as in fdma_score_args */
    fdma_tensor score;        /* optional [batch, kv_heads, new_len] float32: of the new tokens */
    fdma_tensor n_tokens;     /* optional [batch] int32: the first n are tokens, the rest is not
                                 read; absent: new_len */
    fdma_tensor commit;       /* optional [batch] int32: the first n enter the cache; absent: all
                                 tokens */
    fdma_tensor out;          /* output [batch, q_len, q_heads, head_dim] */
    fdma_tensor lse;          /* output, optional [batch, q_heads, q_len] float32 */
    double scale, softcap;    /* as in fdma_forward_args */
    fdma_bias_form bias_form; /* the same in every call on a cache */
    int32_t batch_invariant;  /* nonzero: a stream has the same bits in a batch of any size; only
                                 on devices of compute capability 9.0 this may take time */
    fdma_exec exec;
    fdma_tensor sink_logit; /* optional [q_heads] float32, as in fdma_forward_args */
} fdma_decode_args;

/*! fdma_decode() - attention of new tokens over a cache and each other, which then enter the cache.
 *  Use it to generate: one token a call, or several, if only some of them turn out right
 *  (speculative decoding). Its time does not depend on how many tokens have passed.
 *  A query attends to what it would attend to in the whole sequence; query i stands beside token
 *  i + new_len - q_len. So q_len = 1 asks for token new_len - 1 alone: where n_tokens is below
 *  new_len in a stream, ask for all, q_len = new_len. With q_len = 0 tokens are only committed.
 *  The first `commit` tokens of each stream enter the cache; the others leave no trace. To decode
 *  speculatively, pass the accepted tokens of the last round, then the new drafts, and commit the
 *  accepted ones.
 *  Formula    fdma_score(), fdma_select() with the cache's table, fdma_forward() with its keys
 *  Workspace  O(threads * (rows + new_len) + batch * kv_heads * new_len), on a device O(batch *
 *             kv_heads * (rows + new_len)) and, of a large cache, some rows of out for each query
 *  Edge       a query beside no token (index -1, n_tokens): out = 0, lse = -inf. Two entries of a
 *             batch with one index leave that sequence with wrong keys, and no other
 *  Errors     FDMA_INVALID_ARGUMENT also for more than 64 new tokens, an index beyond the cache,
 *             n_tokens above new_len, commit above n_tokens, a stream longer than INT32_MAX tokens,
 *             neither a score nor dt_proj, a dt_proj, a or dt_bias beside a score
 *  Source     docs/algorithm.md, streams */
FDMA_API fdma_status fdma_decode(const fdma_decode_args *args);

typedef struct fdma_prefill_args {
    size_t size;            /* sizeof(fdma_prefill_args) */
    fdma_cache cache;       /* read, and written: all tokens enter it */
    fdma_tensor q;          /* [tokens, q_heads, head_dim]: one request after the other */
    fdma_tensor k, v;       /* [tokens, kv_heads, head_dim] */
    fdma_tensor dt_proj, a; /* as in fdma_score_args; or else `score` is given */
    fdma_tensor dt_bias;    /* optional, as in fdma_score_args; with dt_proj */
    fdma_tensor score;      /* optional [kv_heads, tokens] float32 */
    fdma_tensor sink_logit; /* optional [q_heads] float32, as in fdma_forward_args */
    fdma_tensor out;        /* output [tokens, q_heads, head_dim] */
    fdma_tensor lse;        /* output, optional [q_heads, tokens] float32 */
    const int32_t *starts;  /* [requests + 1], always memory of the host: the first token of each
                               request and, last, the end of all */
    const int32_t *index;   /* optional [requests], always memory of the host: the sequence of the
                               cache for each; -1: skip it; NULL: 0, 1, ... */
    int64_t requests;
    double scale, softcap;    /* as in fdma_forward_args */
    fdma_bias_form bias_form; /* the same in every call on a cache */
    int32_t reserved;
    fdma_exec exec;
} fdma_prefill_args;

/*! fdma_prefill() - attention of the next tokens of many requests, any number of each, over a cache
 *  and each other, which then enter the cache.
 *  Use it in an engine whose steps mix prompts, pieces of long prompts and single tokens. A request
 *  begins where its sequence of the cache is empty, and goes on otherwise. Out and cache are what
 *  fdma_decode() token by token gives, out up to rounding, where no page is missing.
 *  Formula    fdma_score(), fdma_select() with the cache's table, fdma_forward() with its keys, and
 *             fdma_cache_store(), for each request
 *  Workspace  as fdma_attention() on all tokens with the rows of one sequence as carried keys, or
 *             as fdma_decode(); it serves any starts and index of as many requests.
 *             fdma_prefill_workspace() takes NULL for both, and refuses an exec.kernel that has no
 *             kernel for long requests
 *  Edge       a request may have no tokens; rows of out and lse of a skipped request, and from the
 *             last start on, are not written. With missing pages tokens see each other only within
 *             a call, on a device within 64 tokens of it. Requests of few tokens, up to 8 on the
 *             CPU and 64 on a device, run as in fdma_decode(): in one batch if they follow each
 *             other and have equally many tokens. With pages a device takes longer ones 64 tokens
 *             at a time, too. A CUDA graph keeps starts and index
 *  Errors     FDMA_INVALID_ARGUMENT also for starts that do not begin with 0, decrease or lead
 *             beyond the tokens, an index beyond the cache, a sequence that two requests have,
 *             without index more requests than sequences, a stream longer than INT32_MAX tokens,
 *             neither a score nor dt_proj, a dt_proj, a or dt_bias beside a score
 *  Source     docs/algorithm.md, streams */
FDMA_API fdma_status fdma_prefill(const fdma_prefill_args *args);

/* Gradients */

typedef struct fdma_backward_args {
    size_t size;           /* sizeof(fdma_backward_args) */
    fdma_tensor dout;      /* [batch, q_len, q_heads, head_dim]: the gradient of out */
    fdma_tensor dlse;      /* optional [batch, q_heads, q_len] float32: the gradient of lse */
    fdma_tensor out;       /* fdma_forward()'s, for the inputs below */
    fdma_tensor lse;       /* fdma_forward()'s: [batch, q_heads, q_len] float32 */
    fdma_tensor q;         /* [batch, q_len, q_heads, head_dim] */
    fdma_tensor k, v;      /* [batch, kv_len, kv_heads, head_dim] */
    fdma_tensor bias;      /* optional [batch, kv_heads, kv_len] float32 */
    fdma_tensor key_valid; /* optional [batch, kv_len] uint8: 0 for padding */
    fdma_tensor starts;    /* optional [sequences + 1] int32: packed sequences */
    fdma_tensor k_carried; /* as in fdma_forward_args, and the two below */
    fdma_tensor v_carried;
    fdma_tensor bias_carried;
    fdma_tensor dq, dk, dv;          /* outputs, shaped as q, k and v */
    fdma_tensor dbias;               /* output, optional [batch, kv_heads, kv_len] float32 */
    fdma_tensor dk_carried;          /* output, given with k_carried and shaped as it */
    fdma_tensor dv_carried;          /* output, given with v_carried and shaped as it */
    fdma_tensor dbias_carried;       /* output, shaped as bias_carried: with k_carried and dbias */
    const fdma_selection *selection; /* the one that forward was given; NULL: dense */
    double scale, softcap;           /* as in fdma_forward_args */
    int32_t causal;
    int32_t deterministic; /* nonzero: bit-equal from run to run; the CPU always is */
    int32_t accumulate;    /* nonzero: gradients are added to dq, dk, dv, dk_carried, dv_carried and
                              dsink_logit; dbias, dbias_carried, dattn_bias are overwritten */
    int32_t reserved;
    fdma_exec exec;
    fdma_tensor kv_used;     /* optional [batch] int32: how many keys of each sequence exist */
    fdma_tensor sink_logit;  /* as in fdma_forward_args; beside lse, dsink_logit depends on it */
    fdma_tensor dsink_logit; /* output, optional [q_heads] float32; not without sink_logit */
    double dropout;          /* as forward had it, and the two below */
    uint64_t seed, offset;
    fdma_tensor rng_state;
    fdma_tensor attn_mask, attn_bias; /* as in fdma_forward_args */
    fdma_tensor dattn_bias; /* output, optional, shaped as attn_bias; not without it. It has
                               attn_bias's dtype or float32 */
    fdma_tensor mask_lists; /* as in fdma_forward_args */
} fdma_backward_args;

/*! fdma_backward() - the gradients of fdma_forward() with respect to q, k, v, bias, sink_logit and
 *  attn_bias.
 *  Use it to train with fdma_forward(). Every field that forward also has must be what it was then.
 *  Formula    P[i,j] = exp(s[i,j] - lse[i]) over kept keys
 *             delta[i] = <dout[i], out[i]> - dlse[i]
 *             dv[j] = sum_i m[i,j] P[i,j] dout[i], with the m of fdma_forward()
 *             dS[i,j] = P[i,j] (m[i,j] <dout[i], v[j]> - delta[i])
 *             dbias[j] = sum_i dS[i,j];  dS' = dS softcap'(scale <q[i], k[j]>)
 *             dq[i] = scale sum_j dS'[i,j] k[j];  dk[j] = scale sum_i dS'[i,j] q[i]
 *             dsink_logit[h] = -sum_{b,i} exp(sink_logit[h] - lse[i]) delta[i]
 *             dattn_bias[b,h,i,j] = dS[i,j], summed over the axes that attn_bias has broadcast:
 *             each element is a float32 sum over all heads, queries, keys and sequences that share
 *             it, which is rounded once if dattn_bias has 16 bits. Where kernels cannot keep these
 *             sums in registers, as on the CPU, the workspace has 4 bytes for each element
 *             sums over i run over the queries, and over the heads that share the key
 *  Edge       an empty row passes no gradient to q, k, v and bias, with a sink_logit or without,
 *             even if its q or dout is NaN; beside a sink_logit its lse is that number, so its dlse
 *             counts in dsink_logit; keys that are not valid or never kept are never read, and
 *             their gradients are exactly 0; the choice of keys is not differentiable
 *  Errors     as fdma_forward(). On the CPU, FDMA_INVALID_ARGUMENT also for a selection that keeps
 *             more than window + recent keys at some position; short calls may have room for them.
 *             FDMA_INVALID_ARGUMENT for a dsink_logit without sink_logit, a dattn_bias without
 *             attn_bias or of another shape; FDMA_UNSUPPORTED for one of another dtype. On a
 *             device, FDMA_UNSUPPORTED for `deterministic` with a dattn_bias that has an axis
 *             shorter than its pairs: expand attn_bias
 *  Source     arXiv:2205.14135, algorithm 4; docs/algorithm.md, backward */
FDMA_API fdma_status fdma_backward(const fdma_backward_args *args);

typedef struct fdma_score_backward_args {
    size_t size;              /* sizeof(fdma_score_backward_args) */
    fdma_tensor dbias;        /* [batch, kv_heads, kv_len] float32: the gradient of bias */
    fdma_tensor v;            /* [batch, kv_len, kv_heads, head_dim] */
    fdma_tensor dt_proj;      /* [kv_heads, kv_heads * head_dim] */
    fdma_tensor a;            /* [kv_heads] */
    fdma_tensor dt_bias;      /* optional [kv_heads]; absent: 0 */
    fdma_tensor key_valid;    /* optional [batch, kv_len] uint8: 0 for padding */
    fdma_tensor dv;           /* output, optional, shaped as v: always added to what it holds */
    fdma_tensor ddt_proj, da; /* outputs, shaped as dt_proj and a, of their dtypes */
    fdma_tensor ddt_bias;     /* output, optional, as dt_bias, which must be given too */
    fdma_bias_form bias_form; /* not FDMA_BIAS_NONE, which has no gradient */
    int32_t accumulate;       /* nonzero: all gradients are added to what their tensors hold */
    fdma_exec exec;
    fdma_tensor kv_used; /* optional [batch] int32: how many keys of each sequence exist */
} fdma_score_backward_args;

/*! fdma_score_backward() - from dbias to the gradients in v, dt_proj, a and dt_bias.
 *  Use it after fdma_backward(), with the dbias that it wrote. v contributes to the loss twice, as
 *  a value and through its score, so dv is always added to what fdma_backward() has put there.
 *  Formula    dz = dbias * exp(z) or dbias;  da[g] = sum over b, j of dz softplus(dt)
 *             ddt[b,j,g] = dz a[g] / (1 + exp(-dt));  ddt_bias[g] = sum over b, j of ddt[b,j,g]
 *             ddt_proj[g, g' * head_dim + d] = sum over b, j of ddt[b,j,g] v[b,j,g',d]
 *             dv[b,j,g',d] += sum over g of ddt[b,j,g] dt_proj[g, g' * head_dim + d]
 *  Shapes     dtypes as in fdma_score()
 *  Edge       a key that is not valid, or whose dbias is exactly 0 for every kv head, contributes
 *             to no gradient, even if its v is NaN, and its dv is not written; sums are bit-equal
 *             from run to run
 *  Errors     FDMA_INVALID_ARGUMENT also for FDMA_BIAS_NONE, ddt_bias without dt_bias
 *  Source     docs/algorithm.md, backward */
FDMA_API fdma_status fdma_score_backward(const fdma_score_backward_args *args);

typedef struct fdma_attention_backward_args {
    size_t size;           /* sizeof(fdma_attention_backward_args) */
    fdma_tensor dout;      /* [batch, q_len, q_heads, head_dim]: the gradient of out */
    fdma_tensor dlse;      /* optional [batch, q_heads, q_len] float32: the gradient of lse */
    fdma_tensor out;       /* fdma_attention()'s, for the inputs below */
    fdma_tensor lse;       /* fdma_attention()'s: [batch, q_heads, q_len] float32 */
    fdma_tensor q;         /* [batch, q_len, q_heads, head_dim] */
    fdma_tensor k, v;      /* [batch, kv_len, kv_heads, head_dim] */
    fdma_tensor dt_proj;   /* [kv_heads, kv_heads * head_dim] */
    fdma_tensor a;         /* [kv_heads] */
    fdma_tensor dt_bias;   /* optional [kv_heads]; absent: 0 */
    fdma_tensor bias;      /* optional: fdma_attention()'s; absent: computed again */
    fdma_tensor key_valid; /* optional [batch, kv_len] uint8: 0 for padding */
    fdma_tensor starts;    /* optional [sequences + 1] int32: packed sequences */
    fdma_tensor k_carried; /* as in fdma_attention_args, and the two below */
    fdma_tensor v_carried;
    fdma_tensor bias_carried;
    fdma_tensor dq, dk, dv;          /* outputs, shaped as q, k and v */
    fdma_tensor ddt_proj, da;        /* outputs, as dt_proj and a; absent with FDMA_BIAS_NONE */
    fdma_tensor ddt_bias;            /* as in fdma_score_backward_args; as ddt_proj and da */
    fdma_tensor dk_carried;          /* as in fdma_backward_args */
    fdma_tensor dv_carried;          /* as in fdma_backward_args */
    fdma_tensor dbias_carried;       /* output, as bias_carried: given with it */
    const fdma_selection *selection; /* fdma_attention()'s */
    double scale, softcap;           /* as in fdma_attention_args */
    fdma_bias_form bias_form;
    int32_t causal;
    int32_t deterministic; /* as in fdma_backward_args */
    int32_t accumulate;    /* nonzero: all gradients are added to what they hold */
    fdma_exec exec;
    fdma_tensor kv_used;     /* optional [batch] int32: how many keys of each sequence exist */
    fdma_tensor sink_logit;  /* as in fdma_backward_args */
    fdma_tensor dsink_logit; /* output, optional, as in fdma_backward_args */
    double dropout;          /* as in fdma_backward_args, and the two below */
    uint64_t seed, offset;
    fdma_tensor rng_state;
} fdma_attention_backward_args;

/*! fdma_attention_backward() - the gradients of fdma_attention() in one call.
 *  Use it to train. If `args` is the fdma_attention() call, with the outputs of the example
 *  there:
 *
 *      fdma_attention_backward_args back = {.size = sizeof back, .causal = args.causal};
 *      back.dout = fdma_tensor_4d(dout, FDMA_BFLOAT16, batch, q_len, q_heads, head_dim);
 *      back.out = args.out, back.lse = args.lse, back.bias = args.bias;
 *      back.q = args.q, back.k = args.k, back.v = args.v;
 *      back.dt_proj = args.dt_proj, back.a = args.a, back.selection = args.selection;
 *      back.dq = fdma_tensor_4d(dq, FDMA_BFLOAT16, batch, q_len, q_heads, head_dim);
 *      back.dk = fdma_tensor_4d(dk, FDMA_BFLOAT16, batch, kv_len, kv_heads, head_dim);
 *      back.dv = fdma_tensor_4d(dv, FDMA_BFLOAT16, batch, kv_len, kv_heads, head_dim);
 *      back.ddt_proj = fdma_tensor_2d(ddt_proj, FDMA_BFLOAT16, kv_heads, kv_heads * head_dim);
 *      back.da = fdma_tensor_1d(da, FDMA_FLOAT32, kv_heads);
 *
 *  then workspace and call as in "Making a call". Forward and backward can share a workspace.
 *
 *  Formula    fdma_score() for the bias, fdma_backward(), then fdma_score_backward(). Carried keys
 *             get the gradient of their bias: pass it on to the call that they were keys of
 *  Workspace  holds dbias and, if it is not given, the bias, and what the largest step needs
 *  Edge       as the three calls; with FDMA_BIAS_NONE dt_proj, a and dt_bias are ignored
 *  Errors     as the three calls; FDMA_INVALID_ARGUMENT also without a selection, and for
 *             FDMA_BIAS_NONE with bias, ddt_proj, da or ddt_bias
 *  Source     docs/algorithm.md, backward */
FDMA_API fdma_status fdma_attention_backward(const fdma_attention_backward_args *args);

/* Partial results */

typedef struct fdma_merge_args {
    size_t size;              /* sizeof(fdma_merge_args) */
    fdma_tensor out_a;        /* [batch, q_len, q_heads, head_dim]: attention over some keys */
    fdma_tensor lse_a;        /* [batch, q_heads, q_len] float32 */
    fdma_tensor out_b, lse_b; /* the same queries over other keys */
    fdma_tensor out;          /* output [batch, q_len, q_heads, head_dim]: over all of them */
    fdma_tensor lse;          /* output, optional [batch, q_heads, q_len] float32 */
    fdma_exec exec;
} fdma_merge_args;

/*! fdma_merge() - attention over two disjoint sets of keys, from attention over each of them.
 *  Use it if keys come in separate arrays: a prompt that sequences share and the keys of each, or
 *  shards of a sequence on several devices. For more than two sets, merge again.
 *  Formula    lse = log(exp(lse_a) + exp(lse_b))
 *             out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b
 *  Edge       lse_a = -inf: the partial result is empty and out_a is not read (b alike); both
 *             -inf: out = 0, lse = -inf; NaN in either lse makes the row NaN
 *  Source     arXiv:2205.14135, section 3.1 */
FDMA_API fdma_status fdma_merge(const fdma_merge_args *args);

typedef struct fdma_merge_backward_args {
    size_t size;      /* sizeof(fdma_merge_backward_args) */
    fdma_tensor dout; /* [batch, q_len, q_heads, head_dim]: the gradient of the merged out */
    fdma_tensor dlse; /* optional [batch, q_heads, q_len] float32: of the merged lse */
    fdma_tensor out_a, lse_a, out_b, lse_b;     /* as in fdma_merge_args */
    fdma_tensor dout_a, dlse_a, dout_b, dlse_b; /* outputs, shaped as those above */
    fdma_exec exec;
} fdma_merge_backward_args;

/*! fdma_merge_backward() - the gradients of fdma_merge() with respect to both partial results.
 *  Use it to train through fdma_merge(): give dout_a and dlse_a to the fdma_backward() of the first
 *  partial result as dout and dlse, and dout_b and dlse_b to the one of the second.
 *  Formula    w = exp(lse_a - lse);  dout_a = w dout
 *             dlse_a = w (dlse + <dout, out_a - out>); and the same for b
 *  Edge       the gradients of an empty partial result are 0
 *  Source     docs/algorithm.md, backward */
FDMA_API fdma_status fdma_merge_backward(const fdma_merge_backward_args *args);

/* Rotary embedding */

typedef struct fdma_rotary_table_args {
    size_t size;           /* sizeof(fdma_rotary_table_args) */
    fdma_tensor rotary;    /* output [rows, dim] float32: dim / 2 cosines, then dim / 2 sines */
    fdma_tensor inv_freq;  /* optional [dim / 2] float32 or float64: radians for each position; it
                             holds what scaling rules such as linear, NTK, llama3 or YaRN make of
                             the frequencies. Absent: base^(-2 d / dim) */
    fdma_tensor positions; /* optional [rows] int32: of each row, in place of first + n */
    double base;           /* used without inv_freq: 1 or more, for example 10000 */
    double factor;         /* multiplies cosines and sines, as YaRN and longrope do; 0: 1 */
    int64_t first;         /* the position of row 0; first + rows is at most 2^31 */
    fdma_exec exec;
} fdma_rotary_table_args;

/*! fdma_rotary_table() - the cosines and sines of the positions that fdma_rotate() rotates to.
 *  Use it once for a model and a device: all layers that share frequencies share a table. Use it
 *  with positions in every step whose positions only the device knows.
 *  Formula    rotary[n, d] = factor cos(p inv_freq[d])
 *             rotary[n, dim / 2 + d] = factor sin(p inv_freq[d]), for d < dim / 2, with
 *             p = first + n, or positions[n], which may be negative
 *  Shapes     dim is even, from 2 to 256
 *  Edge       angles are computed in more than double precision: for frequencies up to 16 radians
 *             each element is the true number, with the base's frequencies not rounded, to within
 *             one rounding of float32 or 1e-15, whichever is more, at any position
 *  Errors     FDMA_INVALID_ARGUMENT also for a base that is needed and is below 1 or not finite, a
 *             factor that is negative or not finite, positions of a range outside of 0 to
 *             2^31 - 1, and first with positions
 *  Source     arXiv:2104.09864, RoFormer; arXiv:2309.00071, YaRN */
FDMA_API fdma_status fdma_rotary_table(const fdma_rotary_table_args *args);

typedef struct fdma_rotate_args {
    size_t size;           /* sizeof(fdma_rotate_args) */
    fdma_tensor x;         /* [batch, len, heads, head_dim] */
    fdma_tensor weight;    /* optional [head_dim], x's dtype or float32: x is normalized first */
    fdma_tensor rotary;    /* [rows, dim] float32: fdma_rotary_table()'s */
    fdma_tensor positions; /* optional [batch or 1, len] int32 */
    fdma_tensor starts;    /* optional [sequences + 1] int32: packed sequences */
    fdma_tensor out;       /* output [batch, len, heads, head_dim]; it may be x itself */
    double eps;            /* 0 or more: added to the mean square; needs weight */
    int64_t first;         /* the position of rotary's row 0, as when the table was made */
    int64_t offset;        /* without positions: the position of each sequence's first row */
    int64_t nope_heads;    /* the last so many heads are normalized, but not rotated; 0: none */
    int32_t interleaved;   /* nonzero: pairs are channels 2 d and 2 d + 1, else d and d + dim / 2 */
    int32_t reserved;
    fdma_exec exec;
    fdma_tensor k;        /* optional [batch, len, kv_heads, head_dim]: rotated as x is */
    fdma_tensor k_weight; /* [head_dim], like weight: with k and weight only */
    fdma_tensor k_out;    /* output [batch, len, kv_heads, head_dim], with k; it may be k itself */
    int64_t k_nope_heads; /* nope_heads of k */
} fdma_rotate_args;

/*! fdma_rotate() - rotary embedding of q, of k or of both, after a root-mean-square norm if wanted.
 *  Use it on q and k before attention, and on the new tokens before fdma_decode(). One call with
 *  x = q and k gives the bits of two calls, and on a device it is one launch.
 *  Formula    y = x, or with weight x / sqrt(mean over d of x^2 + eps) * weight
 *             out[d] = y[d] c - y[d + dim / 2] s, out[d + dim / 2] = y[d + dim / 2] c + y[d] s
 *             for d < dim / 2, with c = rotary[p - first, d], s = rotary[p - first, dim / 2 + d]
 *             and p the row's position; interleaved: 2 d and 2 d + 1 in place of d and d + dim / 2;
 *             out = y in the channels from dim on, and in the last nope_heads heads
 *  Shapes     dim, the second axis of rotary, is even and at most head_dim; positions are
 *             positions[b, i], or else offset + i or, with starts, offset + i less the start of the
 *             row's sequence. Rows from the last start on have position offset
 *  Edge       out may have the data, shape and strides of x, and must not overlap it otherwise. A
 *             position outside of the table is refused if the host can see it. On a device the host
 *             reads neither positions nor starts: then the rotated channels of such a row become
 *             NaN, and wrong starts give wrong positions, but nothing outside the table is read. A
 *             row of zeros stays zero if eps is above 0, and is NaN if it is 0. Squares overflow in
 *             rows with |x| above 1e18
 *  Errors     FDMA_INVALID_ARGUMENT also for a dim that is odd or above head_dim, positions with
 *             starts or offset, an eps that is negative, not finite or without weight, an offset
 *             below first, a table that ends before the last position, nope_heads above heads, and
 *             k without k_out, or with only one of weight and k_weight
 *  Source     arXiv:2104.09864, RoFormer; arXiv:1910.07467, RMSNorm */
FDMA_API fdma_status fdma_rotate(const fdma_rotate_args *args);

typedef struct fdma_rotate_backward_args {
    size_t size;        /* sizeof(fdma_rotate_backward_args) */
    fdma_tensor dout;   /* [batch, len, heads, head_dim]: the gradient of out */
    fdma_tensor x;      /* as in fdma_rotate_args, before the call; read only with weight */
    fdma_tensor weight; /* as in fdma_rotate_args, and the fields below */
    fdma_tensor rotary;
    fdma_tensor positions;
    fdma_tensor starts;
    fdma_tensor dx;      /* output, shaped as dout; it may be dout itself */
    fdma_tensor dweight; /* output, optional [head_dim] float32; needs weight */
    double eps;
    int64_t first, offset, nope_heads;
    int32_t interleaved;
    int32_t reserved;
    fdma_exec exec;
    fdma_tensor dk_out; /* optional [batch, len, kv_heads, head_dim]: the gradient of k_out */
    fdma_tensor k;      /* as in fdma_rotate_args, before the call; read only with k_weight */
    fdma_tensor k_weight;
    fdma_tensor dk;        /* output, shaped as dk_out, with it; it may be dk_out itself */
    fdma_tensor dk_weight; /* output, optional [head_dim] float32; needs k_weight */
    int64_t k_nope_heads;
} fdma_rotate_backward_args;

/*! fdma_rotate_backward() - the gradients of fdma_rotate() with respect to x and weight.
 *  Use it to train, with the tensors and options of the fdma_rotate() call.
 *  Formula    u = dout, rotated by the negative angle; without weight dx = u; else, with
 *             r = 1 / sqrt(mean over d of x^2 + eps),
 *             dx = r (weight u - x r^2 mean over d of x weight u)
 *             dweight[d] = sum over b, i, h of r x u
 *  Workspace  O(rows * head_dim / 512) for dweight, on a device at most 2 MB; else none
 *  Edge       dx may be dout as out may be x in fdma_rotate(). dweight is overwritten. Its sums
 *             have a fixed order: they are bit-equal from run to run, for every number of threads
 *  Errors     FDMA_INVALID_ARGUMENT also as fdma_rotate(), and for weight without x, dweight
 *             without weight, and the same of k
 *  Source     docs/algorithm.md, rotary embedding */
FDMA_API fdma_status fdma_rotate_backward(const fdma_rotate_backward_args *args);

/* Workspace */

/*! fdma_score_workspace() and the like - the bytes of workspace that a call with these arguments
 *  needs. Data and workspace may still be NULL: the answer serves every later call with the same
 *  shapes, strides, dtypes and options, exec.kernel, device and threads among them, wherever its
 *  data is. It is what the worst kv_used and starts need; a call may make do with less.
 *  Errors     as the call itself, but never FDMA_WORKSPACE_TOO_SMALL; on an error *bytes is not
 *             written */
FDMA_API fdma_status fdma_score_workspace(const fdma_score_args *args, size_t *bytes);
FDMA_API fdma_status fdma_select_workspace(const fdma_select_args *args, size_t *bytes);
FDMA_API fdma_status fdma_forward_workspace(const fdma_forward_args *args, size_t *bytes);
FDMA_API fdma_status fdma_probabilities_workspace(const fdma_probabilities_args *args,
                                                  size_t *bytes);
FDMA_API fdma_status fdma_attention_workspace(const fdma_attention_args *args, size_t *bytes);
FDMA_API fdma_status fdma_cache_store_workspace(const fdma_cache_store_args *args, size_t *bytes);
FDMA_API fdma_status fdma_cache_copy_workspace(const fdma_cache_copy_args *args, size_t *bytes);
FDMA_API fdma_status fdma_decode_workspace(const fdma_decode_args *args, size_t *bytes);
FDMA_API fdma_status fdma_prefill_workspace(const fdma_prefill_args *args, size_t *bytes);
FDMA_API fdma_status fdma_backward_workspace(const fdma_backward_args *args, size_t *bytes);
FDMA_API fdma_status fdma_score_backward_workspace(const fdma_score_backward_args *args,
                                                   size_t *bytes);
FDMA_API fdma_status fdma_attention_backward_workspace(const fdma_attention_backward_args *args,
                                                       size_t *bytes);
FDMA_API fdma_status fdma_merge_workspace(const fdma_merge_args *args, size_t *bytes);
FDMA_API fdma_status fdma_merge_backward_workspace(const fdma_merge_backward_args *args,
                                                   size_t *bytes);
FDMA_API fdma_status fdma_rotary_table_workspace(const fdma_rotary_table_args *args, size_t *bytes);
FDMA_API fdma_status fdma_rotate_workspace(const fdma_rotate_args *args, size_t *bytes);
FDMA_API fdma_status fdma_rotate_backward_workspace(const fdma_rotate_backward_args *args,
                                                    size_t *bytes);

/* Kernels and devices */

/*! fdma_kernel_count(), fdma_kernel_name() - how many kernels this library holds, usable on this
 *  machine or not, and the name of kernel `index`, such as "cpu/avx512"; NULL past the end. Kernels
 *  are listed in the order in which they are preferred. Several operations may share a name. */
FDMA_API int32_t fdma_kernel_count(void);
FDMA_API const char *fdma_kernel_name(int32_t index);

typedef struct fdma_kernel_info {
    size_t size;           /* sizeof(fdma_kernel_info), set by the caller */
    const char *name;      /* such as "cpu/avx512" */
    const char *operation; /* of fdma_<operation>(): "score", "merge_backward" and so on */
    const char *missing; /* NULL if it runs here; else what this machine lacks, such as "avx512f" */
} fdma_kernel_info;

/*! fdma_describe_kernel() - what kernel `index` does and whether it runs here.
 *  Ownership  the strings are constants
 *  Errors     FDMA_INVALID_ARGUMENT for an index out of range, a size not set */
FDMA_API fdma_status fdma_describe_kernel(int32_t index, fdma_kernel_info *info);

/*! fdma_score_kernel() and the like - the name, a constant, of the kernel that would run a call
 *  with these arguments. Data may be NULL, which counts as aligned: the choice may depend on the
 *  alignment of data. Errors are as for fdma_score_workspace(). */
FDMA_API fdma_status fdma_score_kernel(const fdma_score_args *args, const char **name);
FDMA_API fdma_status fdma_select_kernel(const fdma_select_args *args, const char **name);
FDMA_API fdma_status fdma_forward_kernel(const fdma_forward_args *args, const char **name);
FDMA_API fdma_status fdma_probabilities_kernel(const fdma_probabilities_args *args,
                                               const char **name);
FDMA_API fdma_status fdma_cache_store_kernel(const fdma_cache_store_args *args, const char **name);
FDMA_API fdma_status fdma_cache_copy_kernel(const fdma_cache_copy_args *args, const char **name);
FDMA_API fdma_status fdma_decode_kernel(const fdma_decode_args *args, const char **name);
FDMA_API fdma_status fdma_backward_kernel(const fdma_backward_args *args, const char **name);
FDMA_API fdma_status fdma_score_backward_kernel(const fdma_score_backward_args *args,
                                                const char **name);
FDMA_API fdma_status fdma_merge_kernel(const fdma_merge_args *args, const char **name);
FDMA_API fdma_status fdma_merge_backward_kernel(const fdma_merge_backward_args *args,
                                                const char **name);
FDMA_API fdma_status fdma_rotary_table_kernel(const fdma_rotary_table_args *args,
                                              const char **name);
FDMA_API fdma_status fdma_rotate_kernel(const fdma_rotate_args *args, const char **name);
FDMA_API fdma_status fdma_rotate_backward_kernel(const fdma_rotate_backward_args *args,
                                                 const char **name);

typedef struct fdma_attention_kernels {
    size_t size;       /* sizeof(fdma_attention_kernels), set by the caller */
    const char *score; /* the kernel of each step */
    const char *select;
    const char *forward;
} fdma_attention_kernels;

typedef struct fdma_attention_backward_kernels {
    size_t size;       /* sizeof(fdma_attention_backward_kernels), set by the caller */
    const char *score; /* NULL: the bias is given, or there is none */
    const char *backward;
    const char *score_backward; /* NULL: there is no bias */
} fdma_attention_backward_kernels;

typedef struct fdma_prefill_kernels {
    size_t size;        /* sizeof(fdma_prefill_kernels), set by the caller */
    const char *score;  /* NULL: it is given */
    const char *decode; /* requests of few tokens; NULL: there are no tokens */
    const char *select; /* longer ones, and below; NULL: there are none */
    const char *forward;
    const char *cache_store;
} fdma_prefill_kernels;

/*! fdma_attention_kernel(), fdma_prefill_kernel(), fdma_attention_backward_kernel() - which kernels
 *  would run the steps of a fused call, for the most tokens that a request can have; as
 *  fdma_score_kernel(). */
FDMA_API fdma_status fdma_attention_kernel(const fdma_attention_args *args,
                                           fdma_attention_kernels *names);
FDMA_API fdma_status fdma_prefill_kernel(const fdma_prefill_args *args,
                                         fdma_prefill_kernels *names);
FDMA_API fdma_status fdma_attention_backward_kernel(const fdma_attention_backward_args *args,
                                                    fdma_attention_backward_kernels *names);

/*! fdma_device_count() - how many devices there are: 1 for the CPU alone; else the CPU and
 *  FDMA_CUDA(0) to FDMA_CUDA(count - 2), of any compute capability. */
FDMA_API int32_t fdma_device_count(void);

typedef struct fdma_device_info {
    size_t size;        /* sizeof(fdma_device_info), set by the caller */
    char name[96];      /* such as "AMD EPYC 9R14" */
    char features[256]; /* that kernels need, space-separated, such as "avx2 fma f16c" */
    int32_t cores;      /* logical CPUs that this process may use, or multiprocessors */
    int32_t reserved;
} fdma_device_info;

/*! fdma_describe_device() - name, features and cores of a device, FDMA_CPU or FDMA_CUDA(n).
 *  Errors     FDMA_INVALID_ARGUMENT for a size not set, a device that is not there */
FDMA_API fdma_status fdma_describe_device(int32_t device, fdma_device_info *info);

#ifdef __cplusplus
}
#endif

#endif /* FDMA_H */
