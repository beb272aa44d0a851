/* The rows of a sequence in k and v of a cache: in the sequence's own memory or, with a page table,
 * in pages. The host does not read the table, and it may hold any number: one that no page has is a
 * missing page. */
#pragma once

#include "cuda/mma/tile.cuh"

extern "C" {
#include "core/cache.h"
}

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

/* The page of a row of the cache; -1 if it is missing. */
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
