/* Judges kernels of fdma_cache_store() and fdma_cache_copy(): the kernel and the reference each
 * write to a cache of their own, and both must be equal. In every other case the kernel's cache has
 * pages, also in decode; the reference's never has. */
#pragma once

#include "check/run.h"
#include "check/tolerance.h"

/*! check_has_cache() - whether prompts like the case can be stored in a cache. */
bool check_has_cache(const check_case *test);

/*! check_in_pages() - a copy of a cache whose rows are in pages, if the case has pages; else the
 *  cache itself. */
fdma_cache check_in_pages(const check_problem *problem, const fdma_cache *cache);

/*! check_judge_cache() - runs the kernel; `error` belongs to its worst output. */
fdma_status check_judge_cache(const check_problem *problem, check_operation_id id,
                              const char *kernel, check_error *error);
