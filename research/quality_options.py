"""The command line of quality.py."""

from __future__ import annotations

import argparse
from pathlib import Path

import quality_held_out
import quality_model
import torch

# peak learning rates
RATES = {"huge": 7e-4, "large": 1e-3, "small": 1.5e-3, "mini": 1.7e-3, "tiny": 2e-3}
# usual settings of NoPE heads; with this A their bias hardly changes attention
NOPE = {"nope_rotary_dim": 0, "nope_a": 0.005, "nope_rate": 0.03}
# usual settings of scores that learn from targets
TARGETS = {"target_start": 0, "target_every": 4, "target_rate": 1.0}
OF_NOPE = (
    "nope_layers",
    "nope_keys",
    "nope_recent",
    "select_start",
    "nope_a_rate",
    *NOPE,
)  # options that need NoPE heads
# settings that a resumed run must repeat
SAME_TRAINING = (
    "optimizer",
    "hidden_rate",
    "select_start",
    "score_targets",
    *TARGETS,
    "target_recent",
)
BEGINNING = ("start", "start_step", "new_scores")  # settings that a resumed run keeps


def add_scores(parser: argparse.ArgumentParser) -> None:
    """Options for the choice of heads with scores, and for their learning."""
    add = parser.add_argument
    add("--sliding-heads", type=int, default=0, help="kv heads of a layer without scores (0)")
    add("--score-layers", type=int, help="scores in the last of every so many layers (all)")
    add("--nope-heads", type=int, default=0, help="NoPE kv heads of a layer (0)")
    add("--nope-layers", type=int, nargs="+", help="layers that have them, from 0 (all)")
    add("--nope-keys", type=int, help="keys of a query in all heads of these layers (--keys)")
    add("--nope-recent", type=int, help="of which the newest ones (--recent)")
    add("--select-start", type=int, help="these layers keep all keys before this step (0)")
    add("--nope-rotary-dim", type=int, help="channels of them that are rotated (0)")
    add("--nope-a", type=float, help="their A before training (0.005)")
    add("--nope-rate", type=float, help="multiplies the learning rate of their scores (0.03)")
    add("--nope-a-rate", type=float, help="multiplies that of their A, 0: it stays (--nope-rate)")
    add("--bias-form", choices=("exp", "linear", "none"), default="exp")
    add("--initial-a", type=float, default=0.0, help="A before training, where it is learned (0)")
    add("--dt-std", type=float, default=quality_model.STD, help="of dt_proj's weights (0.02)")
    add("--score-rate", type=float, default=1.0, help="multiplies the rate of dt_proj and A (1)")
    which = (
        "heads whose scores learn which keys get attention: NoPE heads, or all with scores (none)"
    )
    add("--score-targets", choices=("nope", "all"), help=which)
    add("--target-start", type=int, help="the step from which these scores learn (0)")
    every = "these scores learn in one of so many steps, from all pairs of one sequence (4)"
    add("--target-every", type=int, help=every)
    add("--target-rate", type=float, help="multiplies the learning rate of these scores (1)")
    beyond = "these scores learn from queries that are further from a key than this (the newest)"
    add("--target-recent", type=int, help=beyond)


def parse(description: str, arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    add = parser.add_argument
    add("out", type=Path)
    add("--corpus", type=Path, required=True, help="folder of corpus.bin and held_out.bin")
    add("--form", choices=quality_model.FORMS, required=True)
    add("--size", choices=tuple(quality_model.SIZES), default="small")
    add("--name", help="of the files that are written (form-size-seed)")
    add("--steps", type=int)
    add("--seconds", type=float, help="without --steps: train for about so long")
    add("--schedule-steps", type=int, help="steps of the learning rate's schedule (--steps)")
    add("--batch", type=int, default=8, help="sequences in a step (8)")
    add("--length", type=int, default=8192, help="bytes of a sequence (8192)")
    add("--keys", type=int, default=512, help="keys that a query keeps in all (512)")
    add("--recent", type=int, default=64, help="of which the newest ones, in two forms (64)")
    add("--sinks", type=int, default=0)
    add_scores(parser)
    add("--qk-norm", action="store_true", help="normalize each head of queries and keys")
    add("--rotary-base", type=float, default=10000.0)
    muon = "muon: Muon for matrices between hidden states, AdamW for the rest (adamw)"
    add("--optimizer", choices=("adamw", "muon"), default="adamw", help=muon)
    add("--hidden-rate", type=float, default=1.0, help="multiplies the rate of these matrices (1)")
    add("--rate", type=float, help="peak learning rate (by size)")
    add("--warm-up", type=int, default=100, help="steps (100)")
    add("--decay", type=float, default=0.1, help="weight decay of matrices (0.1)")
    add("--clip", type=float, default=1.0, help="largest norm of a gradient (1)")
    add("--recall", type=float, default=0.1, help="fraction of sequences with episodes (0.1)")
    add("--recall-weight", type=float, default=0.2, help="of the loss of recalled bytes (0.2)")
    add("--episodes", choices=("pairs", "mixed"), default="pairs", help="kinds of needles (pairs)")
    add("--curriculum", type=int, default=600, help="steps until episodes are long (600)")
    add("--shortest-span", type=int, default=128, help="bytes of an episode, at least (128)")
    add("--seed", type=int, default=0, help="of weights and of data (0)")
    add("--start", type=Path, help="weights to begin with: a file of this program")
    add("--start-step", type=int, default=0, help="at which data and rate begin, with --start (0)")
    add("--new-scores", action="store_true", help="with --start: A and dt_proj begin anew")
    add("--weights", choices=("float32", "bfloat16", "int8"), default="bfloat16", help="as written")
    add("--compile", action="store_true", help="torch.compile the model")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--every", type=int, default=200, help="steps between evaluations (200)")
    add("--pieces", type=int, default=48, help="of held-out text (48)")
    add("--questions", type=int, default=256, help="of each number of pairs and distance (256)")
    quality_held_out.add_tasks(parser)
    add("--checkpoint-seconds", type=float, default=120.0)
    add("--resume", action="store_true", help="go on from OUT/NAME.pt, if it exists")
    add("--evaluate", action="store_true", help="only measure: OUT/NAME.pt, or else --start")
    options = parser.parse_args(arguments)
    options.name = options.name or f"{options.form}-{options.size}-{options.seed}"
    check(parser, options)
    options.rate = options.rate or RATES[options.size]
    for usual, is_used in ((NOPE, options.nope_heads > 0), (TARGETS, options.score_targets)):
        for name, value in usual.items():
            if is_used and getattr(options, name) is None:
                setattr(options, name, value)
    return options


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    for name in ("batch", "length", "keys", "every", "pieces", "questions", "warm_up"):
        if (value := getattr(options, name)) < 1:
            parser.error(f"{flag(name)}: is {value}, want 1 or more")
    if not 0 <= options.recent < options.keys:
        parser.error(f"--recent: is {options.recent}, want 0 to {options.keys - 1}, below --keys")
    check_sliding(parser, options)
    check_nope(parser, options)
    check_start(parser, options)
    check_targets(parser, options)
    if options.hidden_rate < 0:
        parser.error(f"--hidden-rate: is {options.hidden_rate:g}, want 0 or more")
    if not 64 <= options.shortest_span <= options.length:
        parser.error(f"--shortest-span: is {options.shortest_span}, want 64 to {options.length}")
    if not 0 <= options.recall <= 1:
        parser.error(f"--recall: is {options.recall}, want 0 to 1")
    if options.length < 256:
        parser.error(f"--length: is {options.length}, want 256 or more")
    is_saved = (options.out / f"{options.name}.pt").exists()
    if not options.evaluate and options.steps is None and options.seconds is None:
        if not (options.resume and is_saved):
            parser.error("give --steps or --seconds")
    if options.evaluate and not is_saved and options.start is None:
        parser.error("--evaluate: there is no checkpoint, want one, or --start")
    for name in ("corpus.bin", "held_out.bin"):
        if not (options.corpus / name).is_file():
            parser.error(f"--corpus: {options.corpus / name} is not a file")
        if (options.corpus / name).stat().st_size <= options.length:
            parser.error(f"--corpus: {name} is shorter than a sequence of {options.length} bytes")


def check_sliding(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    _, _, most = quality_model.SIZES[options.size]
    heads, layers = options.sliding_heads, options.score_layers
    if not 0 <= heads <= most:
        parser.error(f"--sliding-heads: is {heads}, want 0 to {most}, the kv heads")
    if layers is not None and layers < 1:
        parser.error(f"--score-layers: is {layers}, want 1 or more")
    if heads > 0 and layers is not None:
        parser.error("--sliding-heads: is given with --score-layers, want one of the two")
    has_kinds = heads > 0 or layers is not None
    if has_kinds and options.form in ("dense", "sliding"):
        parser.error(f"--form: is {options.form}, which has no scores, want another one")


def check_nope(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    layers, _, most = quality_model.SIZES[options.size]
    heads, dim = options.nope_heads, options.nope_rotary_dim or 0
    if not 0 <= heads <= most:
        parser.error(f"--nope-heads: is {heads}, want 0 to {most}, the kv heads")
    if heads == 0:
        for name in OF_NOPE:
            if getattr(options, name) is not None:
                parser.error(f"{flag(name)}: is given without --nope-heads")
    if not 0 <= dim <= quality_model.HEAD_DIM or dim % 2 != 0:
        parser.error(f"--nope-rotary-dim: is {dim}, want an even number up to the head_dim")
    for layer in options.nope_layers or ():
        if not 0 <= layer < layers:
            parser.error(f"--nope-layers: is {layer}, want 0 to {layers - 1}")
    if (keys := options.nope_keys) is not None:
        newest = options.recent if options.nope_recent is None else options.nope_recent
        least = max(1, options.sinks) + quality_model.newest_of(options.form, newest)
        if options.form == "dense":
            parser.error("--nope-keys: is given with --form dense, which keeps all keys")
        if keys < least:
            parser.error(f"--nope-keys: is {keys}, want {least} or more, for --recent and --sinks")
    if (newest := options.nope_recent) is not None:
        if options.nope_keys is None or not options.form.endswith("recent"):
            parser.error("--nope-recent: is given without --nope-keys and a form with newest keys")
        if newest < 0:
            parser.error(f"--nope-recent: is {newest}, want 0 or more")
    if (begin := options.select_start) is not None:
        if options.nope_keys is None:
            parser.error("--select-start: is given without --nope-keys")
        if options.steps is None and not options.resume:
            parser.error("--select-start: is given without --steps")
        if begin < 0 or (options.steps is not None and begin >= options.steps):
            parser.error(f"--select-start: is {begin}, want 0 or more, below --steps")
    for name in ("nope_rate", "nope_a_rate"):
        if not 0 <= (getattr(options, name) or 0) <= 1:
            parser.error(f"{flag(name)}: is {getattr(options, name)}, want 0 to 1")
    for name in ("nope_a", "nope_rate", "nope_a_rate"):
        if getattr(options, name) is not None and options.form not in quality_model.LEARNED:
            parser.error(f"{flag(name)}: is given with --form {options.form}, want learned scores")


def check_start(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if options.start is None:
        for name in ("start_step", "new_scores"):
            if getattr(options, name):
                parser.error(f"{flag(name)}: is given without --start")
    if options.start_step != 0:
        if options.steps is None:
            parser.error("--start-step: is given without --steps")
        last = min(options.steps, options.schedule_steps or options.steps)
        if not 0 <= options.start_step < last:
            parser.error(f"--start-step: is {options.start_step}, want 0 or more, below {last}")
    if options.new_scores and options.form in ("dense", "sliding"):
        parser.error(f"--new-scores: is given with --form {options.form}, which has no scores")


def check_targets(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    which, every, rate = options.score_targets, options.target_every, options.target_rate
    start = options.target_start
    recents = (options.target_recent, options.nope_recent, options.recent)
    recent = next(number for number in recents if number is not None)
    if which is None:
        for name in (*TARGETS, "target_recent"):
            if getattr(options, name) is not None:
                parser.error(f"{flag(name)}: is given without --score-targets")
        return
    if start is not None and start < 0:
        parser.error(f"--target-start: is {start}, want 0 or more")
    if every is not None and every < 1:
        parser.error(f"--target-every: is {every}, want 1 or more")
    if rate is not None and rate < 0:
        parser.error(f"--target-rate: is {rate:g}, want 0 or more")
    if options.form not in quality_model.LEARNED:
        parser.error(f"--score-targets: is given with --form {options.form}, want learned scores")
    layers, _, kv_heads = quality_model.SIZES[options.size]
    has_none = options.sliding_heads == kv_heads or (options.score_layers or 0) > layers
    if options.nope_heads == 0 and (which == "nope" or has_none):
        parser.error(f"--score-targets: is {which}, want heads that learn scores: --nope-heads")
    for name in ("nope_rate", "nope_a_rate"):
        if getattr(options, name) is not None:
            parser.error(f"{flag(name)}: is given with --score-targets, which has a --target-rate")
    if recent < 0:
        parser.error(f"--target-recent: is {recent}, want 0 or more")
    if options.length <= recent + options.sinks:
        flags = "--recent" if options.target_recent is None else "--target-recent"
        parser.error(f"--length: is {options.length}, want more than {flags} and --sinks")
    begins = options.start is None or options.new_scores
    nope_a = NOPE["nope_a"] if options.nope_a is None else options.nope_a
    used = [("nope_a", nope_a)] if options.nope_heads > 0 else []
    used += [("initial_a", options.initial_a)] if which == "all" else []
    for name, a in used:
        if begins and a <= 0:
            parser.error(f"{flag(name)}: is {a:g}, want above 0, as A is not trained with targets")
