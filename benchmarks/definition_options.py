"""Arguments of forward_equivalence.py, forward_performance.py and their like, without PyTorch."""

from __future__ import annotations

from arguments import Parser, bare_parser, folder, output, whole_number

DTYPE_NAMES = ("float32", "bfloat16", "float16")
QUICK_KEYS = 150  # --quick leaves longer cases out
WINDOW = 1024  # of calls that are timed
ORIGINAL_HEAD_DIMS = (128, 64)

EQUIVALENCE = """
Errors are differences from an evaluation in float64. The largest of a tensor may be twice that of
the worst of several plain evaluations in PyTorch, and one step of rounding of the largest number;
"of allowed" is the error divided by this. (Those of scores and lse may be four times that of the
worst one on a CUDA device, whose tensor cores truncate sums.) Plain evaluations are in the tensors'
dtype; those of scores, biases, probabilities and lse, which are float32 in every dtype, are in
float32. They add in different orders; one in float32 has a single accumulator for each sum.

Errors of kept keys, slots and zeros are numbers of keys, conflicts and elements: none is allowed.
Zeros are probabilities of keys that are not kept, out of empty rows, and gradients of keys that no
query keeps.

Each stage is evaluated from the package's own result of the stage before. A case that the device
has no kernel for is skipped, with a line.

Exit status: 0 equal but for rounding; 1 not, or nothing was compared, or the file could not be
written; 2 bad usage.
"""


def make_parser(program: str, document: str | None) -> Parser:
    parser = bare_parser(program, document)
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), help="default: cuda where there is one"
    )
    parser.add_argument("--dtype", choices=DTYPE_NAMES, help="of query, key, value and mask")
    return parser


def equivalence_parser(program: str, document: str | None) -> Parser:
    parser = make_parser(program, document)
    parser.epilog = EQUIVALENCE
    add = parser.add_argument
    add("--cases", default="", metavar="WORD", help="only cases that have WORD in their name")
    quick = f"only cases of at most {QUICK_KEYS} keys: a minute or two on the CPU"
    add("--quick", action="store_true", help=quick)
    add("--verbose", action="store_true", help="a line for each case and tensor")
    add("--json", type=output, metavar="FILE", help="also write every comparison, one a line")
    add("--no-progress", action="store_true", help="no progress bar on a terminal")
    return parser


PERFORMANCE = """
--original times the rows of the tables in the original's README (see benchmarks/original_tables.py
for where they are from), which have 2 query heads on 1 kv head, with head_dim 128 and 64. Columns:
fused, ms of flash_dma_attention(), which computes scores and selects keys; given, of
flash_dmattn_func() under a mask and a bias of every pair; masked, of SDPA under the same; dense, of
SDPA over all keys; how many times as fast as masked are fused and given, and as dense is fused; the
speed-up of the original over SDPA under a mask, and whether ours is at least that. Where it is not,
the line says how many times as fast as on the original's machine SDPA and our call are. Times are
between two synchronizations; those of a backward call leave the forward call out.

FOLDER gets forward-original-cuda.json, or a name with backward, performance or cpu; table.py reads
it. Exit status: 0 done; 1 wrong outputs, or a file that cannot be written; 2 bad usage.
"""


def performance_parser(program: str, document: str | None) -> Parser:
    parser = make_parser(program, document)
    parser.epilog = PERFORMANCE
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
    return parser
