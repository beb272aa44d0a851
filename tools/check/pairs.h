/* The tensors of a case that have a number for each pair of a query and a key. */
#pragma once

#include "check/problem.h"

/*! check_make_pairs() - fills attn_mask and attn_bias. The cases whose names begin with "mask" have
 *  those of a table. Of the others a third have each, chosen by their seeds, as are the axes that
 *  are broadcast. Where the mask excludes a pair, the bias is NaN if no other pair has the same
 *  element. */
void check_make_pairs(check_problem *problem);
