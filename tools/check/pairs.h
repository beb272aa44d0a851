/* The tensors of a case with an element for each pair of a query and a key. */
#pragma once

#include "check/problem.h"

/*! check_make_pairs() - fills attn_mask and attn_bias. Cases whose names begin with "mask" take
 *  theirs from a table. A third of the other cases have each; their seeds choose them and the axes
 *  that are broadcast. Where the mask excludes a pair, the bias is NaN if no other pair has the
 *  same element. */
void check_make_pairs(check_problem *problem);
