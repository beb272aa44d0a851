/* How kernels of fdma_cache_store() and fdma_cache_copy() are judged: beside the reference, each
 * writes to a cache of its own, and then both must be equal. Every other case has the kernel's
 * cache in pages, of decode too; the reference's never is. */
#pragma once

#include "check/run.h"
#include "check/tolerance.h"

/*! check_has_cache() - whether prompts like the case can be stored in a cache. */
bool check_has_cache(const check_case *test);

/*! check_in_pages() - a copy of a cache whose rows lie in pages, if those of the case do; else the
 *  cache itself. */
fdma_cache check_in_pages(const check_problem *problem, const fdma_cache *cache);

/*! check_judge_cache() - runs the kernel; `error` is that of its worst output. */
fdma_status check_judge_cache(const check_problem *problem, check_operation_id id,
                              const char *kernel, check_error *error);
