/* The kernels of every operation, at the compiled point. */
#pragma once

#include "cpu/isa/isa.h"

#include "cpu/backward/backward.h"
#include "cpu/cache/cache.h"
#include "cpu/decode/cached.h"
#include "cpu/decode/decode.h"
#include "cpu/forward/forward.h"
#include "cpu/merge/merge.h"
#include "cpu/probabilities/probabilities.h"
#include "cpu/rotate/rotate.h"
#include "cpu/score/score.h"
#include "cpu/score/score_backward.h"
#include "cpu/select/select.h"
