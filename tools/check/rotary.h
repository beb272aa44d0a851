/* The inputs of rotations: tables, positions, weight and options of a case. */
#pragma once

#include "check/problem.h"

/*! check_make_rotary() - fills them in; q and starts are known already, and q is what is rotated.
 *  Seeds choose the options. The table is the reference's. */
void check_make_rotary(check_problem *problem);
