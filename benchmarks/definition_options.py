"""Arguments of forward_equivalence.py, forward_performance.py and their like, without PyTorch."""

from __future__ import annotations

from arguments import Parser, bare_parser, output

DTYPE_NAMES = ("float32", "bfloat16", "float16")
QUICK_KEYS = 150  # --quick leaves longer cases out

MORE = """
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
    parser.epilog = MORE
    add = parser.add_argument
    add("--cases", default="", metavar="WORD", help="only cases that have WORD in their name")
    quick = f"only cases of at most {QUICK_KEYS} keys: a minute or two on the CPU"
    add("--quick", action="store_true", help=quick)
    add("--verbose", action="store_true", help="a line for each case and tensor")
    add("--json", type=output, metavar="FILE", help="also write every comparison, one a line")
    add("--no-progress", action="store_true", help="no progress bar on a terminal")
    return parser
