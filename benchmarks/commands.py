"""The names, the help and the arguments of the benchmarks. PyTorch is not imported here, so that
--help and wrong options do not wait for it."""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path
from typing import Callable, NamedTuple, NoReturn

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))  # for program.py

DTYPE_NAMES = ("float32", "bfloat16", "float16")
RAW = argparse.RawDescriptionHelpFormatter


class Disagreement(Exception):
    """Two outputs differ by more than rounding explains."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


# ---- values ----


def whole_number(text: str) -> int:
    # from 2**24 on, integers are not exact as float32 scores
    if not text.isdecimal() or not 1 <= int(text) < 2**24:
        raise argparse.ArgumentTypeError(f"is {text!r}, want a number from 1 to 16777215")
    return int(text)


def whole_numbers(text: str) -> list[int]:
    return [whole_number(word) for word in text.split(",")]


def number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"is {text!r}, want a number above 0")
    return value


def output(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"is {text!r}, want a file in a folder that exists")
    return path


def picture(text: str) -> Path:
    path = output(text)
    if path.suffix not in (".svg", ".png"):
        raise argparse.ArgumentTypeError(f"is {text!r}, want a name that ends in .svg or .png")
    return path


def existing(text: str) -> Path:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"is {text!r}, want a file that exists")
    return Path(text)


def folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"is {text!r}, want a folder that exists")
    return Path(text)


# ---- arguments that several benchmarks have ----

DEVICES = {"choices": ("cuda", "cpu"), "help": "default: cuda where there is one"}


def add_folder(parser: Parser) -> None:
    """--out, --device and --quick."""
    parser.add_argument("--out", type=folder, required=True, metavar="FOLDER")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="few rounds")


def add_divided(parser: Parser) -> None:
    add_folder(parser)
    parser.add_argument("--divide", type=int, default=1, help="divide all lengths by this number")


def add_default_device(parser: Parser) -> None:
    parser.add_argument("--device", **DEVICES)
    parser.add_argument("--dtype", choices=DTYPE_NAMES, help="of query, key, value and mask")


# ---- decode, doge, host_time, options, streams: --out FOLDER ----

DECODE = """
A pass calls each peer once for each of many caches. Together they are larger than the processor's
cache, so that none is read from it. On a device a pass is one CUDA graph.
Cases: decode/bf16/bBATCH/hQ_HEADSgKV_HEADS/dHEAD_DIM/nTOKENS/wWINDOW[rRECENT], where
TOKENS have passed.
/draftsN: N new tokens, which do not enter the cache; otherwise one, which does.
/float32: dt_proj is float32; otherwise it is bfloat16.
Peers:
  fdma   flash_dmattn.decode(), the scores of the new tokens included
  read   the sum of the numbers in the cache's key and value
  sdpa   scaled_dot_product_attention() of one query over 131072 keys, for batch 1
Columns:
  us             median of the rounds, for each call
  of read        the time of read over fdma's
  times as fast  the peer's time over fdma's
"""

DOGE = """
It needs transformers, and compares the hidden states of both in float32. On the CPU it has two
threads.
Cases: KIND/DTYPE/LAYERS/nTOKENS/wWINDOW, of a model with 8 heads on 4, head_dim 128, random weights
  forward      the hidden states of all tokens
  training     the same and the gradients of all weights
  generate     generate(), for one of 64 greedy tokens after TOKENS tokens that are in the cache
Peers:
  fdma         attn_implementation "dynamic_mask". It generates with a DogeCache; on a CUDA device
               that is static, so that transformers compiles the model for single tokens
  sdpa         attn_implementation "sdpa". It generates with a DynamicCache, but on a CUDA device
               with a StaticCache, for which transformers compiles the model, too
  linear       in forward: the linear layers of the model alone
  fdma-eager   on a CUDA device: not compiled, with a DogeCache that is not static
  sdpa-eager   on a CUDA device: not compiled, with a DynamicCache
Columns: ms, with the host's time; times, the median of the rounds' ratios to fdma; GiB, the most
memory above the weights (on a CUDA device, but not of generate).
"""

Q_HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16  # of host_time
KEYS, HOST_WINDOW = 8, 4
HOST_TIME = f"""
The tensors are so small that the host's time dominates. In each round every peer of a case makes a
few calls, so few that a device's queue does not fill up, and the device is idle when they begin.
All: batch 1, {Q_HEADS} query heads, {KV_HEADS} kv heads, head_dim {HEAD_DIM}, {KEYS} keys, causal
Cases:
  no-gradients  flash_dma_attention() of inputs that require no gradient, window {HOST_WINDOW}
  recording     the same of inputs that do
  backward      torch.autograd.grad() of such a call
  dense         attention() without a selection and without gradients
  decode        DynamicMaskCache.attend() of one token
  operator      the operator that graphs of torch.compile call for a recorded flash_dma_attention()
  operator-backward  its gradient's
Peers:
  fdma          these calls
  sdpa          scaled_dot_product_attention() with as many kv heads as query heads: in decode, of
                one query over {HOST_WINDOW} keys
Columns: us, the median of the rounds for each call; times, the median of the rounds' ratios to
fdma; of sdpa, the same of fdma's times over sdpa's, which have goals on a CUDA device.
"""

MODEL_PARTS = ["decoding", "training"]
MODEL_MODES = ["eager", "compiled", "captured", "graphs"]
MODEL_LAYOUTS = {"h8g4d128": (8, 4, 128), "h16g4d64": (16, 4, 64)}
MODEL_SECONDS = 5.0
MODEL_STEP = """
All models have random weights, pre-norm layers of width 1024 with RMSNorm and SwiGLU, and 32000
tokens. A layout is hQ_HEADSgKV_HEADS/dHEAD_DIM. Peers have the same code for all but attention.
Cases:
  training   training/bBATCH/LAYOUT/nLENGTH/wWINDOWrRECENT/MODE: a step of a model of 12 layers: the
             loss, its gradients and AdamW, in bfloat16 by autocast over float32 weights. A query
             keeps WINDOW keys by score and the RECENT newest. The logits are made in pieces of the
             sequence. A time includes the host's; steps of less than 16384 tokens are timed in
             groups. MODE:
    eager      as it is
    compiled   each layer and the loss in torch.compile()
    captured   the same, where a CUDA graph replays the whole step, the optimizer included
    graphs     the model in torch.compile() with mode="reduce-overhead"
  decoding   decoding/bBATCH/LAYOUT/nCONTEXT/wWINDOWrRECENT: a step of a layer for one token of each
             sequence, the CONTEXT-th one, with bfloat16 weights: projections, rotary embedding, the
             update of the cache, attention and the output projection. A pass has a step of each of
             several layers. On a CUDA device these are larger together than the device's cache,
             and a pass is one CUDA graph
Peers:
  fdma          DynamicMaskAttention, in decoding with its cache
  fdma-float32  decoding: the same with float32 weights of the scores
  dense         a plain layer with attention to all keys: the fastest of SDPA's back ends, with
                groups of heads or a kv head for each query head, and of the versions of flash-attn
                that are installed. In decoding SDPA over a cache that has room for CONTEXT keys and
                is full, so that there is no mask
  sliding       DynamicMaskAttention, of all of whose heads each query keeps the WINDOW + RECENT
                newest keys
  sliding-flash-attn   flash-attn with a sliding window of as many keys, if it is installed
A short probe of each case finds the fastest attention, and the fastest rotary embedding for plain
layers: plain, PyTorch's operations on angles that all layers share; package, as in
DynamicMaskAttention; or operator, one call of the package on a table that all layers share.
Before layers are timed they are compared with a plain evaluation in float64: outputs, gradients,
and a decoding step against the whole sequence.
Columns, and fields of the result, which is FOLDER/model-step-DEVICE.json:
  ms            of a step, the median of the rounds; us is in decoding rows, too
  tokens/s      of all sequences
  GiB           on a CUDA device the most memory that tensors of the peer took in its first steps,
                weights and the optimizer's state among them
  bytes         cache_bytes: of one layer's cache
  as fast       times_dense: the time of dense over the peer's, the median of the rounds' ratios;
                times_spread: the spread of these
  attention, rotary   what the probe has found
A peer that fails or does not fit into memory has not_run, the reason. without: what the probe could
not run. Most of the time of all cases goes into compiling models. A run that is ended early, by
Ctrl-C or SIGTERM, writes the cases that are done. --quick takes a tiny model and few cases.
"""


def add_model_step(parser: Parser) -> None:
    add_folder(parser)
    add_items(parser, MODEL_PARTS)
    add = parser.add_argument
    modes = {"choices": MODEL_MODES, "nargs": "+", "metavar": "MODE"}
    add("--modes", **modes, help="of training; default: all, with --quick eager")
    layouts = {"choices": [*MODEL_LAYOUTS], "nargs": "+", "metavar": "LAYOUT"}
    names = ", ".join(MODEL_LAYOUTS)
    add("--layouts", **layouts, default=[*MODEL_LAYOUTS], help=f"default: all, {names}")
    numbers = {"type": whole_number, "nargs": "+", "metavar": "N"}
    lengths = "tokens of training; default: 1024 to 131072, doubling; if compiled 4096 16384 65536"
    add("--lengths", **numbers, help=lengths)
    add("--contexts", **numbers, help="of decoding; default: 512 to 131072, doubling")
    batches = "sequences; default: training 1 8, if compiled 1, decoding 1 8 64"
    add("--batches", **numbers, help=batches)
    window = "keys by score, and as many of the newest; default: 1024"
    add("--window", type=whole_number, metavar="N", help=window)
    seconds = "no more rounds of a case after these, default: %(default)g"
    add("--seconds", type=number, default=MODEL_SECONDS, metavar="S", help=seconds)


OPTIONS = """
The outputs of masked calls are compared with the selection that makes the mask.
Cases: OPTION[-training]/DTYPE/hQ_HEADSgKV_HEADS/dHEAD_DIM/nKEYS[/wWINDOW], all causal
  mask         attn_mask [1, 1 or kv_heads, N, N] of the WINDOW best keys of each query
  mask-bias    the same, and attn_bias [1, 1, N, N] of the query's dtype, whose gradient is wanted
  ones         attn_mask [1, 1, N, N] of ones
  keysP        attn_mask [1, 1, N, N]: all queries keep the same P % of the keys
  blocks       attn_mask [1, 1, N, N] of blocks of 128 x 128 pairs; 25 % of the blocks are kept
  dropout      dropout_p 0.1 over a selection
  sink         sink_logit over a selection
-training is forward and backward, the others forward alone.
Peers:
  fdma         with the option
  lists        with mask_lists that were made before (on a CUDA device)
  without      without it: dense where there is no window, else over a selection of the same keys
  flex         PyTorch's compiled flex_attention with a block mask that was made before
  sdpa         SDPA with the mask
Columns: ms; times, the median of the rounds' ratios to fdma.
"""

STREAMS = """
A call is timed by events on its stream, after a kernel that only waits, so that the host's time
does not count. The outputs and gradients of every peer are checked before it is timed.
Cases: KIND/bf16/hQ_HEADSgKV_HEADS/dHEAD_DIM/nTOKENS[/sSEQUENCES][/wWINDOW[rRECENT]][/pPIECE]
  packed           sequences of unequal lengths: score, selection and attention in one call
  packed-selected  attention over a selection that is given, without biases
  packed-dense     attention to all earlier keys of the sequence
  prefill          the keys of a prompt enter a cache in pieces of PIECE, without gradients
  recent           one sequence; each query keeps the RECENT newest keys beside the window
-forward is the call without gradients, -training forward and backward.
Peers:
  fdma             flash_dmattn
  one-sequence     flash_dmattn on one sequence of all tokens, with the same window
  whole            flash_dma_attention() on the whole prompt
  whole-cached     the whole prompt enters the cache at once
  window           flash_dmattn with a window of WINDOW + RECENT, without recent keys
  varlen           torch's varlen_attn(); varlen-expanded: with a kv head for each query head,
                   where it does not take groups
  flash-attn       flash_attn_varlen_func() of flash-attn
  nested-cudnn, nested-flash   SDPA of nested tensors by cuDNN, or by FlashAttention where there is
                   no varlen_attn(); a kv head for each query head, expanded before
  sdpa             SDPA of one sequence after the other, on the CPU
A peer of another library that does not run here is left out, with a line that says why.
Columns:
  ms             median of the rounds, for each call
  TFLOP/s        useful operations: 4 * head_dim * q_heads (training: 3.5 times that) for each pair
                 of a query and a key that it keeps
  of other       the time for each useful operation over the same of one-sequence, whole or
                 window; of packed-dense, over the same of the fastest peer of another library
  times as fast  the time of another library's peer over fdma's
of other and times as fast are medians of the rounds' ratios.
"""

# ---- the equivalence and performance of the definition ----

QUICK_KEYS = 150  # --quick leaves longer cases out
WINDOW = 1024  # of calls that are timed
ORIGINAL_HEAD_DIMS = (128, 64)

EQUIVALENCE = """
Errors are differences from an evaluation in float64. A tensor's largest error may be twice the
worst one of several plain evaluations in PyTorch, and one step of rounding of the largest number;
"of allowed" is the error divided by this. (Errors of scores and lse may be four times the worst one
on a CUDA device, whose tensor cores truncate sums.) Plain evaluations are in the tensors' dtype,
but for scores, biases, probabilities and lse, which are float32 in every dtype. They add in
different orders; one in float32 has a single accumulator for each sum.

Errors of kept keys, slots and zeros are numbers of keys, conflicts and elements: none is allowed.
Zeros are probabilities of keys that are not kept, out of empty rows, and gradients of keys that no
query keeps.

Each stage is evaluated from the package's own result of the stage before. A case that the device
has no kernel for is skipped, with a line.

Exit status: 0 equal but for rounding; 1 not, or nothing was compared, or the file could not be
written; 2 bad usage.
"""
FORWARD_EQUIVALENCE = """
The definition is evaluated in PyTorch alone, stage by stage: score(), select(), attention() and
attention_probabilities(), then flash_dma_attention(), which does all of them, and
flash_dmattn_func(), which gets the kept keys as a numeric mask.
"""
BACKWARD_EQUIVALENCE = """
Gradients of out and lse: query, key, value, the bias of keys, the sink logits and the bias of
pairs. attention() takes a selection, flash_dmattn_func() a mask of the same keys.
"""
GRAD_EQUIVALENCE = """
query, key, value, dt_proj, a_coef, dt_bias and the sink logits have gradients. The gradients of the
weights, and one term of value's, go through the scores. The choice of keys has no gradient.
"""


def add_equivalence(parser: Parser) -> None:
    add_default_device(parser)
    add = parser.add_argument
    add("--cases", default="", metavar="WORD", help="only cases that have WORD in their name")
    quick = f"only cases of at most {QUICK_KEYS} keys: a minute or two on the CPU"
    add("--quick", action="store_true", help=quick)
    add("--verbose", action="store_true", help="a line for each case and tensor")
    add("--json", type=output, metavar="FILE", help="also write every comparison, one a line")
    add("--no-progress", action="store_true", help="no lines that say what is running")


PERFORMANCE = """
Peers: flash_dma_attention() with scores and selection, and without their bias; flash_dmattn_func()
and SDPA with a ready mask of the same keys; SDPA over all keys. times is the median of the ratios
to flash_dma_attention().

--original times the rows of the tables in the original's README (original_tables.json names the
commit), which have 2 query heads on 1 kv head, with head_dim 128 and 64. Columns:
fused, ms of flash_dma_attention(), which computes scores and selects keys; given, of
flash_dmattn_func() under a mask and a bias of every pair; masked, of SDPA under the same; dense, of
SDPA over all keys; how many times as fast as masked are fused and given, and as dense is fused; the
speed-up of the original over SDPA under a mask, and whether ours is at least that. Where it is not,
the line says how many times as fast as on the original's machine SDPA and our call are. Times are
between two synchronizations; for backward they leave the forward call out.

FOLDER gets forward-original-cuda.json, or a name with backward, performance or cpu.
"""


def add_performance(parser: Parser) -> None:
    add_default_device(parser)
    add = parser.add_argument
    add("--quick", action="store_true", help="few rounds")
    add("--out", type=folder, metavar="FOLDER", help="also write the rows to a file in it")
    add("--lengths", type=whole_number, nargs="+", metavar="N", help="numbers of keys")
    windows = {"type": whole_number, "nargs": "+", "metavar": "N"}
    add("--windows", "--window", **windows, help=f"keys that a query keeps (default: {WINDOW})")
    add("--q-len", type=whole_number, metavar="N", help="queries, the last ones (default: all)")
    add("--batch", type=whole_number, metavar="N", help="sequences (default: 1)")
    heads = {"type": whole_number, "nargs": 2, "metavar": ("Q", "KV")}
    add("--heads", **heads, help="query heads and kv heads (default: 8 2)")
    add("--head-dim", type=whole_number, nargs="+", metavar="N", help="channels (default: 64)")
    add("--original", action="store_true", help="the rows of the original's README")
    add("--divide", type=whole_number, metavar="N", help="divide the original's sizes by this")


# ---- suite ----

# Names of the items in suite_items.py.
SUITE_ITEMS = ["length", "density", "batch", "heads", "threshold"]
SUITE_ITEMS += ["selection", "kernels", "stages", "energy"]
SHORTEST, LONGEST, QUICK_LONGEST = 128, 131072, 4096
SECONDS, QUICK_SECONDS = 1.0, 0.15
LIMIT, QUICK_LIMIT = 20.0, 1.0

SUITE = f"""
    suite --out FILE.json
    suite --compare OLD.json --out NEW.json
    suite --compare OLD.json --json NEW.json

The second measures and then compares, the third only compares; `picture` draws FILE.json. In each
round a product of two matrices runs, too, whose rate is the machine's peak. Outputs are compared
with float64 before a call is timed; backward_equivalence compares gradients. The exit status is 1
for a call that has become slower, too, and 2 where there is nothing to compare.

Items; each has the settings ITEM/PASS/DTYPE/bBATCH/hQ_HEADSgKV_HEADS/dHEAD_DIM/nLENGTH/wWINDOW,
where PASS is forward, or training, which is forward and backward:
  length     128, 256, ... tokens up to --longest, with one window
  density    windows from 1/64 of the length to all of it
  batch      1 to 16 sequences
  heads      query and kv heads
  threshold  fdma, which selects and gathers keys whatever their number, and all-keys, which
             processes all keys densely: where `times` of all-keys is below 1, a call would win if
             it were processed densely from that density on
  selection  fdma selects exactly; approximate; recent: half of the kept keys are the newest ones;
             newest: all but one are
  kernels    attention over a given selection, by each family of kernels that runs on this device;
             fdma is by that which the library chooses
  stages     the stages one by one: score, select, forward over a given selection, and its
             backward; fdma is forward in one call
  energy     joules a token, from the counter of NVML; it needs the package nvidia-ml-py
Peers: fdma is flash_dma_attention() with scores and selection; dense-NAME is SDPA over all keys by
one of its back ends (cudnn, flash, plain).
Columns, and fields of the lines of FILE.json:
  ms                 median of the rounds
  spread             (90th percentile - 10th percentile) / median
  tokens_per_second  of all sequences
  useful_gflops      useful operations a second; flop: operations of a call. A multiply-add is two,
                     of each query with the keys that it keeps, and of scores
  of_peak            useful_gflops over peak_gflops, the machine's: of PyTorch's product of two
                     matrices of this dtype (float16 on the CPU: of float32), which a CPU may
                     exceed, or --peak
  peak_bytes         the most memory that tensors took during a call, beside its inputs
  mean_bytes         on the CPU: the mean of that memory over the time of a call
  times              the time over the time of the setting's first peer
  times_dense        of fdma: how many times as fast it is as the fastest dense peer
  density            kept pairs of a query and a key over visible ones
Ratios are medians of the rounds' ratios. A line with not_run says why. On a CUDA device every call
is in a range (score, select, forward, backward, dense) that Nsight Systems shows:
  nsys profile --trace cuda,nvtx python benchmarks/suite.py --only stages
--compare prints a table of all lines that both files have. A line is slower if its time has grown
by more than --tolerance and the spreads of both, and so has its time as a multiple of the
matrices' product's, which tells a slower call from a slower machine.
--quick takes few rounds, few settings, and lengths up to {QUICK_LONGEST}, or half of others.
"""


def add_items(parser: Parser, names: list[str]) -> None:
    only = {"nargs": "+", "choices": names, "default": [*names], "metavar": "ITEM"}
    parser.add_argument("--only", **only, help="default: all")


def add_suite(parser: Parser) -> None:
    add = parser.add_argument
    add("--out", type=output, metavar="FILE", help="write a line of JSON for each figure")
    add("--device", **DEVICES)
    add("--dtype", choices=DTYPE_NAMES, help="default: bfloat16, on the CPU float32")
    add_items(parser, SUITE_ITEMS)
    add("--quick", action="store_true", help="few rounds and settings")
    add("--longest", type=whole_number, metavar="N", help="tokens; default: 131072")
    add("--divide", type=whole_number, default=1, metavar="N", help="divide all lengths by this")
    add("--threads", type=whole_number, metavar="N", help="of the CPU; default: PyTorch's")
    add("--seconds", type=number, help=f"of the rounds of a setting, default: {SECONDS:g}")
    add("--limit", type=number, help=f"leave out calls of more seconds, default: {LIMIT:g}")
    add("--peak", type=number, metavar="TFLOPS", help="the machine's, instead of measuring it")
    add("--compare", type=existing, metavar="OLD", help="a file of an earlier run")
    add("--json", type=existing, metavar="NEW", help="compare this file, and measure nothing")
    tolerance = "0.10: at most 10 %% slower, beside the spreads"
    add("--tolerance", type=number, default=0.10, metavar="T", help=tolerance)
    add("--no-progress", action="store_true", help="no lines that say what is running")


# ---- peers ----

PEERS = """
Both read the same tensors. On the CPU every case is causal, with batch 1, one head and
head_dim 128. Outputs are checked before a case is timed.
Cases: forward/dense (causal, all keys), forward/selected (the window best keys of each query) and
training/selected (forward and the gradients of q, k and v).
Peers:
  fdma         flash_dmattn; the time of a selected case includes its selection
  sdpa         scaled_dot_product_attention(is_causal=True): all keys, in selected cases too
  sdpa-masked  scaled_dot_product_attention under the boolean mask of the selection, built before
  mask         building that mask from flash_dmattn's selection; the time includes selecting
Columns:
  ms             median of the rounds
  GFLOP/s        useful operations: 4 * head_dim (training: 3.5 times that) for each pair of a
                 query and a key that it keeps; of all keys for sdpa
  times as fast  the peer's time over fdma's time in the same round, median of the rounds
With --device cuda (--threads, --lengths and --window do not apply) cases are
  attention  score, selection, lists and attention in one call, against dense attention
  selected   selection and attention, of given scores in several orders
  dense      all keys through the kernels of flash_dmattn
  select, score   one operation alone
  one-query  attention of one query: with a window as attention, without one as dense
  launch     the host's time for a call
  backward   the gradients of attention; training: forward and backward
  selected-backward, dense-backward   the gradients of selected and dense
and peers
  fdma       flash_dmattn; the time includes scores and selection unless they are given.
             fdma-rising, ...: with scores in that order
  fdma-deterministic   gradients that are bit-equal from run to run
  fdma-sm80  attention by the kernels for any device of compute capability 8.0 or later
  cudnn, flash   SDPA over all keys, by the back ends of cuDNN and of FlashAttention
  flash4     flash_attn_func() of the package flash-attn-4 over all keys, if it is installed: in
             attention, dense and their gradients. A case in which it fails is measured without it,
             after a line that says why
  masked, mask   SDPA under the boolean mask of the selection; building that mask
  read       a plain read of the case's keys: half the time of a copy
  graph      the same call in a CUDA graph
A case without bBATCH in its name has batch 1.
With --device cuda --sliding, attention and backward are compared with attention of other libraries
to as many keys, each where its package is installed: fdma, cudnn, and the peers
  cudnn-window, flash-window   the last keys, by cuDNN (nvidia-cudnn-frontend) and by PyTorch's
             FlashAttention-2
  flash2-window, flash3-window, flash4-window   the same by FlashAttention's packages
  cudnn-blocks   random blocks of 128 keys for each 128 queries, given, without a causal mask, by
             nvidia-cudnn-frontend; gradients for as many kv heads as query heads
  msa        blocks of 128 keys for each query, selected by proxy heads, by flash-msa
Columns: of dense is useful FLOP/s relative to cuDNN's (fdma-sm80: to FlashAttention's), of flash4
relative to flash4's; of read is the time of a plain read over the case's; of iid is the time over
the time with random scores, of fast over the time with gradients in any order, and of shorter over
the time for a quarter of the length; times cudnn is the time of cudnn over the row's peer's,
and as fast is the time of the row's peer over fdma's.
FILTER is a substring of cases' names or, if it has * or ?, a pattern for whole names.
"""


def add_peers(parser: Parser) -> None:
    add = parser.add_argument
    add("filter", nargs="?", metavar="FILTER", help="which cases (default: all)")
    add("--device", default="cpu", help="where to run: cpu or cuda (default: cpu)")
    add("--json", type=output, metavar="FILE", help="also write the figures, one object per line")
    add("--picture", type=picture, metavar="FILE", help="draw time against length (.svg, .png)")
    add("--threads", type=whole_number, nargs="+", metavar="N", help="default: 1 2")
    add("--lengths", type=whole_numbers, metavar="N,...", help="default: 1024 to 16384, doubling")
    add("--window", type=whole_number, default=2048, metavar="N", help="default: %(default)s")
    add("--rounds", type=whole_number, metavar="N", help="exactly N rounds per case")
    add("--quick", action="store_true", help="few rounds, lengths up to 4096 (cuda: 32768)")
    add("--sliding", metavar="PEERS", help="these peers, with commas between them, or all")


# ---- ranks ----

RANKS_ITEMS = ["weak", "strong", "bytes", "communication", "memory", "host", "ring", "longest"]
RANKS_NUMBERS = {  # the defaults of options
    "q-heads": 32,
    "kv-heads": 8,
    "head-dim": 128,
    "window": 2048,
    "keys": 65536,
    "total": 1 << 20,
    "ring-keys": 1 << 18,
    "dense-keys": 32768,
    "longest": 1 << 22,
    "rounds": 9,
    "calls": 3,
    "timeout": 300,
}

RANKS = """
It runs under torchrun, on one CUDA device for each rank, or with --device cpu and small sizes on
CPUs:

    torchrun --nproc-per-node 8 benchmarks/ranks.py FOLDER

FOLDER gets ranks.json, which `picture` draws; it is written anew after every item. A time covers
forward and backward of one layer on the slowest rank, by events on its stream between calls that
all ranks begin together. Ranks of a team make the same rounds. Results are checked before they are
timed.
Items; each has one or more lines of ranks.json:
  weak           --keys tokens on each of 1, 2, 4, ... ranks. efficiency: the time of one device
                 alone with as many tokens, by flash_dma_attention(), over the team's; in both the
                 slowest rank counts. work: pairs of a query and a kept key of the rank that has
                 most, over the pairs of one device alone, whose first queries see fewer keys
  strong         --total tokens over 2, 4, ... ranks. efficiency: the time of one device over the
                 number of ranks, over the time of the team. ideal_from says whether one device was
                 measured, before the teams, with all tokens, or with --keys tokens and multiplied
  bytes          what each rank receives from others and sends to others, counted in the collective
                 operations of a call, for two lengths; table_bytes: of window + recent keys
  communication  exchange_ms: the collective operations of a call alone, with the same tensors.
                 of_time: the fraction of the call's time that goes if they are replaced by copies
                 of what they returned
  memory         the peak of a call over the peak of one device alone with the same tokens, beside
                 a rank's own tensors
  host           milliseconds until forward returns to the host, if the ranks compare their
                 arguments, and if `lengths` is given
  ring           ring_attention(), dense, of --ring-keys tokens over all ranks, and cuDNN's SDPA of
                 --dense-keys on one device, multiplied by the pairs and divided by the ranks
  longest        --longest tokens over all ranks: time and memory
A line with not_run says why. Times are medians of the rounds in milliseconds, and ratios are
medians of the rounds' ratios.
"""


def add_ranks(parser: Parser) -> None:
    add = parser.add_argument
    add("out", type=folder, metavar="FOLDER")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add_items(parser, RANKS_ITEMS)
    add("--dtype", choices=("bf16", "fp16"), default="bf16")
    shown = {"metavar": "N", "help": "default: %(default)s"}
    for name, value in RANKS_NUMBERS.items():
        add(f"--{name}", type=whole_number, default=value, **shown)
    add("--recent", type=int, default=0, **shown)
    seconds = "no more rounds of a comparison after these, default: %(default)s"
    add("--seconds", type=float, default=20.0, help=seconds)


def check_ranks(parser: Parser, args: argparse.Namespace) -> None:
    if "RANK" not in os.environ:
        parser.error(
            "is not a rank, want it started by torchrun: "
            "torchrun --nproc-per-node 2 benchmarks/ranks.py FOLDER"
        )


# ---- compare, table, picture ----

COMPARE = """
Each round runs all cases with one command and then with the other, and the next round in the other
order, so that a lasting change of the machine's load affects both. A case's ratio is the least time
of the new build over the least time of the old one; the median of the rounds' ratios is printed
beside it. The exit status is 1 if a case's two ratios both exceed 1 + tolerance, or if the two
commands do not time the same cases. --rename A=B reads A in the old build's case names as B, for
renamed cases: forward/row=forward/decode.
"""


def add_compare(parser: Parser) -> None:
    add = parser.add_argument
    add("old", help="the fdma command of the build to compare with")
    add("new", help="the fdma command of the build to judge")
    add("filter", nargs="?", default="*", help="cases, as for fdma bench")
    add("--rounds", type=int, default=3)
    add("--tolerance", type=float, default=0.03, help="0.03: at most 3 %% slower")
    add("--rename", default="=", help="A=B: read A in the old names of cases as B")
    for name in ("device", "threads", "kernel"):
        add(f"--{name}", help="passed on to fdma bench")
    add("--json", type=Path, help="also write the figures to this file")


def check_compare(parser: Parser, args: argparse.Namespace) -> None:
    if args.rounds < 1:
        parser.error(f"--rounds is {args.rounds}, want 1 or more")
    if "=" not in args.rename:
        parser.error(f"--rename is {args.rename}, want A=B")


TABLE = """
    table FILE [FILE ...]          print every case of each file
    table --update DOCUMENT ...    write the tables of documents anew
    table --check DOCUMENT ...     exit 1 if a document's tables are not current

FILE is the output of `fdma bench --json`, or a result of a benchmark here.

A document has a table between `<!-- table NAME -->` and `<!-- end of table -->`. Its contents are
specified in benchmarks/tables.txt:

    table NAME FILE
    title: LABEL of the first column
    column: FIELD | LABEL
    row: CASE [FIELD=VALUE ...] | LABEL

FILE is in benchmarks/results. FIELD is one below, or tflops. PEER.FIELD is from the peer's line;
FILE:FIELD and FILE:PEER.FIELD are from another file. Machines, dates and commits are written below
the table.

Fields: ms, per call; spread, relative to ms; useful_gflops; of_peak, the rate over the rate of a
loop of multiply-adds that ran in alternation; of_read, the time of a plain read over the case's;
ns_per_key, of selection; of_dense and of_flash4, useful FLOP/s relative to dense attention by cuDNN
and by FlashAttention-4; of_iid, of_fast and of_shorter, the time over the time with random scores,
with gradients in any order, and for a quarter of the length; of_other, the time of a useful
operation over its time in the case's other call, see streams; of_sdpa, the time over SDPA's; ratio
and times, how many times as fast as the peer flash_dmattn is; times_cudnn, in flash_dmattn's lines,
how many times as fast as cuDNN it is; goal and met, see peers.
"""


def add_table(parser: Parser) -> None:
    update = "write the tables of documents anew"
    parser.add_argument("--update", action="store_true", help=update)
    parser.add_argument("--check", action="store_true", help="exit 1 if they are not current")
    parser.add_argument("files", nargs="+", type=Path)


PICTURE = """
FILE.json is of peers, suite, ranks or model_step.
peers  milliseconds against length, one panel for each dtype. For a CUDA device there is one panel,
       and a second picture, FILE-cases.svg, of the useful FLOP/s of each case relative to dense
       attention; a mark is the least that the case must reach
suite  left: the speed of a call over dense attention's, against length. Middle: the memory of a
       call in addition to its inputs, against length. Right: tokens a second against sparsity, the
       fraction of visible keys that are not kept. Dense attention is SDPA by its fastest back end
ranks  left: weak scaling, with the same number of tokens on each rank for any number of ranks.
       Right: strong scaling, with one sequence over all ranks. Efficiency 1 means that a team is as
       fast as its devices would be alone
model_step  left: milliseconds of a training step against length, in eager mode. Right: microseconds
       of a decoding step against the number of keys. Both have batch 1, and the first layout of the
       file
"""


def add_picture(parser: Parser) -> None:
    parser.add_argument("json", type=Path, help="a file that one of them wrote")
    parser.add_argument("--out", type=Path, required=True)


# ---- all of them ----


class Command(NamedTuple):
    about: str  # the first line of --help
    module: str
    add: Callable[[Parser], None]  # the arguments
    more: str  # the rest of --help
    check: Callable[[Parser, argparse.Namespace], None] = lambda parser, args: None


def timed(training: bool) -> Command:
    call = "forward and a backward call" if training else "forward call"
    about = f"Time a {call} of dynamic mask attention, beside SDPA, for several lengths."
    return Command(about, "performance", add_performance, PERFORMANCE)


def equal(about: str, more: str) -> Command:
    about = f"Compare {about} with their definition, in float64."
    return Command(about, "equivalence", add_equivalence, more + EQUIVALENCE)


COMMANDS = {
    "peers": Command(
        "Compare flash_dmattn with PyTorch's scaled_dot_product_attention (SDPA) in one process.",
        "peers", add_peers, PEERS,
    ),
    "suite": Command(
        "Measure attention with dynamic masks and dense: growth, density, ablations, energy.",
        "suite", add_suite, SUITE,
    ),
    "decode": Command(
        "Time a decoding step over a cache, beside a plain read of the cache and dense attention.",
        "decode", add_folder, DECODE,
    ),
    "streams": Command(
        "Time packed sequences, a prefill in pieces and recent keys, beside other ways of them.",
        "streams", add_folder, STREAMS,
    ),
    "options": Command(
        "Time attention with a mask, a bias, dropout or sink logits, beside calls without them.",
        "options", add_divided, OPTIONS,
    ),
    "host_time": Command(
        "Time what the host does in a call of PyTorch, beside SDPA.",
        "host_time", add_folder, HOST_TIME,
    ),
    "model_step": Command(
        "Time a training step of a language model and a decoding step, beside dense attention.",
        "model_step", add_model_step, MODEL_STEP,
    ),
    "doge": Command(
        "Time Doge, a model of transformers, with its attention here, beside transformers' own.",
        "doge", add_divided, DOGE,
    ),
    "ranks": Command(
        "Time attention over a sequence that many ranks hold, and count what they exchange.",
        "ranks", add_ranks, RANKS, check_ranks,
    ),
    "forward_performance": timed(False),
    "backward_performance": timed(True),
    "forward_equivalence": equal(
        "scores, kept keys, out, lse and probabilities", FORWARD_EQUIVALENCE
    ),
    "backward_equivalence": equal(
        "the gradients of attention() and flash_dmattn_func()", BACKWARD_EQUIVALENCE
    ),
    "grad_equivalence": equal(
        "the gradients of score() and flash_dma_attention()", GRAD_EQUIVALENCE
    ),
    "compare": Command(
        "Time two builds of the `fdma` command against each other, in alternation.",
        "compare", add_compare, COMPARE, check_compare,
    ),
    "table": Command("Make Markdown tables of results.", "table", add_table, TABLE),
    "picture": Command("Draw results.", "picture", add_picture, PICTURE),
}  # fmt: skip


def make_parser(name: str, prog: str | None = None) -> Parser:
    """The help shows a line about the command, its arguments, and the rest of its text."""
    command = COMMANDS[name]
    parser = Parser(
        prog=prog or f"{name}.py",
        description=command.about,
        epilog=command.more.strip(),
        formatter_class=RAW,
        allow_abbrev=False,
    )
    command.add(parser)
    return parser


def parse(parser: Parser, name: str, arguments: list[str] | None) -> argparse.Namespace:
    args = parser.parse_args(arguments)
    COMMANDS[name].check(parser, args)
    return argparse.Namespace(**vars(args), name=name, parser=parser)
