"""Evaluate a folder of transformers by tasks of lm-eval that need no network, and write results.

    python -m flash_dmattn.lm_eval FOLDER --to RESULTS.json

The folder is what save_pretrained() of a model and of its tokenizer wrote: Doge, a hybrid of
flash_dmattn.transformers, or another causal language model whose attention flash_dmattn computes.
Without --tasks it runs RULER's six tasks that generate their text; with --text FILE also the five
whose needles are in that text, and text_loss, the loss on it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

# transformers and datasets read these when they are imported. Nothing here loads from a hub.
for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE"):
    os.environ[name] = "1"
os.environ.setdefault("LMEVAL_LOG_LEVEL", "ERROR")


def parse(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m flash_dmattn.lm_eval",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("folder", help="of the model and its tokenizer")
    add("--to", required=True, metavar="FILE", help="the results, JSON")
    add("--tasks", nargs="+", metavar="TASK", help="names; an unknown one lists all")
    add("--lengths", nargs="+", type=int, default=[4096], metavar="TOKENS",
        help="of samples of RULER's tasks (4096)")  # fmt: skip
    add("--samples", type=int, default=100, help="of each task and length (100)")
    add("--text", metavar="FILE", help="a text in UTF-8")
    add("--batch", type=int, default=1, help="samples in a call (1)")
    add("--dtype", help="of the weights (the folder's; bfloat16 on a CUDA device)")
    add("--device", help="cpu or cuda (cuda where there is one)")
    options = parser.parse_args(words)
    for name in ("samples", "batch"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}: is {getattr(options, name)}, want 1 or more")
    if min(options.lengths) < 256:
        parser.error(f"--lengths: has {min(options.lengths)}, want 256 or more")
    return options


def evaluate(options: argparse.Namespace) -> dict[str, Any]:
    """The results of the tasks."""
    import torch

    from .._arguments import check_device
    from . import register

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device(device)
    register()
    import lm_eval

    from . import tasks
    from .model import DynamicMaskLM

    known = [*tasks.GENERATED, *tasks.IN_TEXT, tasks.LOSS]
    names = options.tasks or (known if options.text else tasks.GENERATED)
    for one in names:
        if one not in known:
            raise ValueError(f"tasks: has {one!r}, want some of {' '.join(known)}")
        if options.text is None and one not in tasks.GENERATED:
            raise ValueError(f"text: is not given, want a file for {one}")
    text = tasks.read_text(options.text)
    dtype = options.dtype or ("bfloat16" if device.startswith("cuda") else "auto")
    lengths = sorted({*options.lengths})
    model = DynamicMaskLM(
        options.folder,
        device=device,
        dtype=dtype,
        batch_size=options.batch,
        max_length=lengths[-1] + max(tasks.ANSWERS.values()),
    )
    chosen = tasks.make_tasks(names, model.tokenizer, lengths, options.samples, text)
    found: Any = lm_eval.simple_evaluate(model=model, tasks=chosen, log_samples=False)
    versions = {one: version(one) for one in ("lm_eval", "transformers", "torch")}
    settings = {one: value for one, value in vars(options).items() if one != "to"}
    settings.update(lengths=lengths, device=device, dtype=dtype, tasks=names)
    return {"settings": settings, "versions": versions, "results": found["results"]}


def main(words: list[str] | None = None) -> int:
    options = parse(words)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # of lm-eval's tasks
            found = evaluate(options)
        Path(options.to).write_text(json.dumps(found, indent=2, default=str) + "\n")
    except (ImportError, OSError, ValueError, NotImplementedError) as error:
        print(f"flash_dmattn.lm_eval: {error}", file=sys.stderr)
        return 1
    for name, numbers in found["results"].items():
        values = {k.split(",")[0]: v for k, v in numbers.items() if isinstance(v, float)}
        kept = {k: v for k, v in values.items() if not k.endswith("_stderr")}
        print(name, *(f"{key} {value:.4g}" for key, value in kept.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
