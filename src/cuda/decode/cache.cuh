/* The plan of fdma_decode(): its streams and keys. On 9.0 a call has two of these three kernels.
 * The kernels of fdma_score() precede them if place_tokens() cannot compute the scores.
 *
 *   place_tokens()    scores of the new tokens; which row each takes, and so which keys each sees
 *   attend_cluster()  attends, merges, and writes the committed tokens to the cache; each pair
 *                     (b, g) has a cluster of thread blocks
 *   attend_heads()    the same for many pairs (b, g), which thread blocks take in turn
 *
 * Elsewhere, and for few pairs with more rows than a cluster holds, it has three, after the kernels
 * of fdma_score():
 *
 *   evict_keys()      which row each new token takes
 *   attend_cache()    partial results over splits of the rows, and over the new tokens
 *   finish_decode()   merges them, and writes the committed tokens to the cache
 *
 * Only the last kernel of a call writes to the cache. Keys and positions count new tokens: token m
 * is at position m, and the rows of the cache are before all of them. */
#pragma once

extern "C" {
#include "core/cache.h"
}

#include "cuda/mma/attention.cuh"
#include "cuda/mma/tile.cuh"
#include "cuda/score/score.cuh"

/* ---- pages ---- */

/* The rows of a sequence in k and v of a cache: in the sequence's own memory or, with a page table,
 * in pages. The host does not read the table, and it may hold any number: one that no page has is a
 * missing page. */

struct page_view {
    const int32_t *number; // of the pages of sequence 0; NULL: no page table
    int64_t sequence;      // distance between the numbers of two sequences
    uint32_t count;        // pages of a pool
    int32_t shift;         // a page has 1 << shift rows
};

/* Indices on the first two axes of k and v. `first` is -1 if the page is missing. */
struct row_indices {
    int32_t first, row;
};

__device__ static row_indices no_row_indices() { return {-1, 0}; }

static inline page_view pages_of(const fdma_cache *cache) {
    const int32_t most_shift = 31; // a page of this size holds all rows
    page_view pages = {};
    if (!has_pages(cache))
        return pages;
    pages.number = (const int32_t *)cache->page_table.data;
    pages.sequence = cache->page_table.stride[0];
    pages.count = (uint32_t)min(cache->k.shape[0], (int64_t)1 << 31);
    while (pages.shift < most_shift && (int64_t)1 << pages.shift < cache->k.shape[1])
        pages.shift++;
    return pages;
}

__device__ static int32_t page_of(const page_view &pages, int32_t sequence, int32_t row) {
    const int32_t page = pages.number[sequence * pages.sequence + (row >> pages.shift)];
    return (uint32_t)page < pages.count ? page : -1;
}

__device__ static int32_t row_of_page(const page_view &pages, int32_t row) {
    return row & (int32_t)((1u << pages.shift) - 1);
}

__device__ static row_indices indices_of(const page_view &pages, int32_t sequence, int32_t row) {
    if (pages.number == NULL)
        return {sequence, row};
    return {page_of(pages, sequence, row), row_of_page(pages, row)};
}

/* Starts copying k or v of a warp's key block to shared memory; rows of missing pages become zeros.
 * Lane n has the indices of row n. `source` points to page 0, and pages are `page_bytes` apart. */
template <typename config>
__device__ static void copy_rows_of_pages(char *to, const row_source &source, int64_t page_bytes,
                                          const row_indices &own) {
    constexpr int copiers = row_layout<config::head_dim>::copiers;
    const row_source from = source; // a copy in registers, otherwise each cp.async would read it
                                    // again
#pragma unroll
    for (int n = 0; n < config::keys; n += warp_lanes / copiers) {
        const int row = n + threadIdx.x % warp_lanes / copiers;
        const row_indices at = {__shfl_sync(~0u, own.first, row), __shfl_sync(~0u, own.row, row)};
        const bool there = at.first >= 0;
        const char *const page = from.data + (there ? at.first * page_bytes : 0);
        copy_row<config::head_dim>(to, row, page + at.row * from.stride, from.vecs, there,
                                   from.aligned);
    }
}

/* Starts copying k or v of a warp's key block: rows that are as wide as those in shared memory,
 * aligned to 16 bytes, and all there. This takes a third of the instructions of copy_row(). */
template <typename config>
__device__ static void copy_whole_rows(char *to, const char *from, int64_t stride) {
    using layout = row_layout<config::head_dim>;
    constexpr int step = warp_lanes / layout::copiers; // rows that a warp copies at once
    static_assert(layout::period == 2 * step, "every second row of a lane is swizzled alike");
    const int row = threadIdx.x % warp_lanes / layout::copiers, vec = threadIdx.x % layout::copiers;
    const uint32_t shared = shared_address(to);
    const uint32_t even = shared + layout::offset(row, vec);
    const uint32_t odd = shared + layout::offset(row + step, vec);
    from += row * stride + vec * vec_bytes;
#pragma unroll
    for (int n = 0; n < config::keys; n += step, from += step * stride) {
        const uint32_t at = (n % layout::period == 0 ? even : odd) +
                            n / layout::period * layout::period * layout::row_bytes;
#pragma unroll
        for (int x = 0; x < layout::vecs; x += layout::copiers)
            cp_async_16(at + x * vec_bytes, from + x * vec_bytes, vec_bytes);
    }
}

/* Starts copying the first `count` rows of a warp's key block, at most all, from row `first` on.
 * takes_whole: registers allow copy_whole_rows(). */
template <typename config, bool takes_whole>
__device__ static void copy_block(char *to, const row_source &source, int32_t first,
                                  int32_t count) {
    using layout = row_layout<config::head_dim>;
    if (takes_whole && source.aligned && source.vecs == layout::vecs && count >= config::keys) {
        copy_whole_rows<config>(to, row_at(source, first), source.stride);
        return;
    }
#pragma unroll(takes_whole ? 1 : config::keys)
    for (int n = 0; n < config::keys; n += warp_lanes / layout::copiers) {
        const int row = n + threadIdx.x % warp_lanes / layout::copiers;
        const bool there = row < count;
        copy_row<config::head_dim>(to, row, row_at(source, there ? first + row : 0), source.vecs,
                                   there, source.aligned);
    }
}

/* ---- streams and tokens ---- */

/* A stream of a call, from index, n_tokens, commit and the cache's seen. Clamped, because they may
 * hold any number. */
struct decode_stream {
    int32_t sequence; // of the cache
    int32_t tokens;   // 0 also if the stream is skipped
    int32_t committed;
    int32_t seen; // tokens before the new ones
};

__device__ static int32_t token_position(const decode_stream &stream, int32_t token) {
    return min(stream.seen, INT32_MAX - most_new_tokens) + token;
}

/* The arrays in the workspace: an expiry for each token, from place_tokens(), or records of all
 * keys, from evict_keys(). */
enum decode_form { marks_tokens, marks_keys };

/* The cache and the tokens of a call. Members are views of the caller's tensors, or else in the
 * workspace. */
struct decode_plan {
    head_view k, v; // of the cache, or its pools
    page_view pages;
    number_view<float> bias, score;
    number_view<int32_t> position;
    number_view<float> new_score;
    int32_t *seen;
    const int32_t *index, *n_tokens, *commit; // NULL: absent
    int32_t sequences, batch, kv_heads;
    int32_t rows, new_len, q_len;
    int32_t sinks, recent;
    fdma_bias_form bias_form;
    decode_stream *streams; // [batch * kv_heads]
    int32_t *slot;          // [batch * kv_heads][new_len]: the row that a token takes, or -1
    int32_t *expiry;        // [batch * kv_heads][new_len], from place_tokens(): the token that
                            // evicts a token
    // from evict_keys(), for every row and then for every new token, as in a forward_plan:
    int64_t keys;        // rows + new_len
    key_record *records; // [batch * kv_heads][keys]; expiry: the token that evicts the key
    int32_t *list;       // [batch * kv_heads][keys]: the row, or the token; -1: no query sees it
    int64_t *row_keys;   // [batch * kv_heads][rows], if there are too many for shared memory
};

struct decode_task {
    forward_plan plan; // its keys are the new tokens
    decode_plan cached;
    score_params scores; // of fdma_score()'s kernels, if the scores are not given
};

__device__ static float bias_of(fdma_bias_form form, float score) {
    return form == FDMA_BIAS_NONE ? 0 : form == FDMA_BIAS_EXP ? expf(score) : score;
}

__device__ static int32_t clamp(int32_t n, int32_t least, int32_t most) {
    return min(max(n, least), most);
}

/* The sequence of a stream; -1: skipped. */
__device__ static int32_t sequence_of(const decode_plan &plan, int32_t b) {
    const int32_t sequence = plan.index != NULL ? plan.index[b] : b;
    return sequence < plan.sequences ? max(sequence, -1) : -1;
}

/* The number of new tokens of a stream that is not skipped. */
__device__ static int32_t tokens_of(const decode_plan &plan, int32_t b) {
    return plan.n_tokens != NULL ? clamp(plan.n_tokens[b], 0, plan.new_len) : plan.new_len;
}

__device__ static decode_stream stream_of(const decode_plan &plan, int32_t b) {
    const int32_t sequence = sequence_of(plan, b), tokens = tokens_of(plan, b);
    if (sequence < 0 || tokens == 0)
        return {};
    const int32_t committed = plan.commit != NULL ? clamp(plan.commit[b], 0, tokens) : tokens;
    return {sequence, tokens, committed, max(plan.seen[sequence], 0)};
}

/* Threads of a thread block, or of a warp, that work together. */
struct thread_group {
    int rank, size;
};

__device__ static void copy_elements(const head_view &to, int32_t to_b, int32_t to_row,
                                     const head_view &from, int32_t b, int32_t row, int32_t g,
                                     int32_t head_dim, thread_group threads) {
    const uint16_t *const source = (const uint16_t *)rows_of(from, b, g) + row * from.row;
    uint16_t *const target = (uint16_t *)rows_of(to, to_b, g) + to_row * to.row;
    for (int d = threads.rank; d < head_dim; d += threads.size)
        target[d] = source[d];
}

/* Writes a token of (b, g) to a row of the cache, or empties the row if its page is missing. */
__device__ static void store_token(const forward_plan &plan, const decode_plan &cached,
                                   const decode_stream &stream, int32_t b, int32_t g, int32_t token,
                                   int32_t row, thread_group threads) {
    const int32_t sequence = stream.sequence;
    const row_indices to = indices_of(cached.pages, sequence, row);
    const bool is_lost = to.first < 0;
    if (!is_lost) {
        copy_elements(cached.k, to.first, to.row, plan.k, b, token, g, plan.head_dim, threads);
        copy_elements(cached.v, to.first, to.row, plan.v, b, token, g, plan.head_dim, threads);
    }
    if (threads.rank > 0)
        return;
    const float score = cached.new_score.at(b, g)[token];
    cached.score.at(sequence, g)[row] = is_lost ? -INFINITY : score;
    cached.position.at(sequence, g)[row] = is_lost ? -1 : token_position(stream, token);
    if (cached.bias_form != FDMA_BIAS_NONE && !is_lost)
        cached.bias.at(sequence, g)[row] = bias_of(cached.bias_form, score);
}

/* Writes out = 0 and lse = -inf for a query that has no token. */
template <typename element>
__device__ static void write_empty_row(const forward_plan &plan, const row_range &range,
                                       int32_t row, thread_group threads) {
    element *const to = (element *)plan.out.data + row_offset(plan.out, plan, range, row);
    for (int d = threads.rank; d < plan.head_dim; d += threads.size)
        to[d] = (element)0.0f;
    if (threads.rank == 0 && plan.lse.data != NULL)
        *lse_at(plan, range, row) = -INFINITY;
}

/* The reason why no kernel of head_dim up to `head_dim` takes a call, or NULL. */
const char *fdma_cuda_refuses_decode(const fdma_problem *problem, int64_t head_dim);

/* Lays out a call in the arena. Scores that are not given are in the workspace. */
decode_task fdma_cuda_plan_decode(const fdma_problem *problem, fdma_arena *arena, decode_form form);

fdma_status fdma_cuda_score_tokens(const fdma_problem *problem, const decode_task &task);

/* Fills in streams, records, list and slot. */
fdma_status fdma_cuda_evict(const fdma_problem *problem, const decode_plan &plan);

/* Shared memory for the scores and the positions of a (b, g). */
static inline size_t staged_bytes(const decode_plan &plan) {
    return (size_t)plan.rows * (sizeof(float) + sizeof(int32_t));
}

/* True if all rows can be copied 16 bytes at a time. */
static inline bool is_aligned(const decode_task &task) {
    return is_aligned(task.plan) && is_aligned(task.cached.k) && is_aligned(task.cached.v);
}
