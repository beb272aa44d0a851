"""Code that programs share, here, in benchmarks/ and in research/, so that whoever starts one knows
what it does.

    if __name__ == "__main__":
        program.begin(parse)

    import torch

begin() answers --help and wrong options before the imports that take seconds. From then on, a line
every ten seconds on stderr names the current work, Ctrl-C ends the program with status 130, and a
package that is not installed is named, all without a traceback. FDMA_PROGRESS_SECONDS sets another
time; at 0 there is a line whenever doing() is called.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Callable

INSTALL = {  # how to get a module that is not there, if not by its own name
    "flash_dmattn": "pip install . in the folder above this one, or set PYTHONPATH=python",
    "pynvml": "pip install nvidia-ml-py",
}
SECONDS = float(os.environ.get("FDMA_PROGRESS_SECONDS", "10"))
IS_FIRST = os.environ.get("RANK", "0") == "0"  # of the ranks that torchrun starts

name = Path(sys.argv[0]).name
started = time.monotonic()
now_doing = "imports PyTorch"
is_running = False


def say(words: str) -> None:
    print(f"{name}: {words}", file=sys.stderr, flush=True)


def explain(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """In place of a traceback; other errors have one."""
    if isinstance(error, KeyboardInterrupt):
        say("stopped")
        raise SystemExit(130)
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        package = error.name.partition(".")[0]
        say(f"needs {package}: {INSTALL.get(package, f'pip install {package}')}")
        raise SystemExit(2)
    sys.__excepthook__(kind, error, trace)


def beat() -> None:
    while True:
        time.sleep(SECONDS)
        if is_running:
            say(f"{time.monotonic() - started:.0f} s: {now_doing}")


def begin(parse: Callable[[], Any]) -> None:
    """The first call of a program: `parse` reads the arguments, and ends the program if they are
    wrong."""
    global is_running
    sys.excepthook = explain
    is_running = IS_FIRST
    if SECONDS > 0 and is_running:
        threading.Thread(target=beat, daemon=True).start()
    parse()


def doing(words: str) -> None:
    """Sets the words for the current work, such as "step 20 of 100, loss 2.1"."""
    global now_doing
    now_doing = words
    if SECONDS == 0 and is_running:
        say(words)


def belongs_to(user: str) -> None:
    """Ends a module that is no program, if it is started as one."""
    say(f"is a module of {user}, and no program")
    raise SystemExit(2)


def default_device() -> str:
    import torch  # which a wrong option does not wait for

    return "cuda" if torch.cuda.is_available() else "cpu"


def quiet() -> None:
    """Say no more, because there is a bar on a terminal, or all is done."""
    global is_running
    is_running = False
