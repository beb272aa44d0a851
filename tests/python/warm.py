"""Runs Python programs in forks of one process that has imported PyTorch and the package, because
the import takes seconds. With FDMA_FULL=1 each program has a new process."""

from __future__ import annotations

import atexit
import functools
import json
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# ---- In the process of the tests ----


@functools.lru_cache(maxsize=None)
def start() -> subprocess.Popen[str]:
    """The process that forks. It ends when its standard input does."""
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    server = subprocess.Popen([sys.executable, __file__], env=variables, text=True, **pipes)
    atexit.register(server.communicate)
    return server


def python(program: str | Path, *arguments: str | Path, cwd: Path | None = None) -> Any:
    """As programs.python() for the file of a program."""
    import programs
    from samples import FULL

    if FULL:
        return programs.python(program, *arguments, cwd=cwd)
    words, server = [str(program), *map(str, arguments)], start()
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("stdout", "stderr")]
        job = {"words": words, "cwd": str(cwd or Path.cwd()), "outputs": list(map(str, outputs))}
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.flush()
        status = int(server.stdout.readline())
        return subprocess.CompletedProcess(words, status, *(one.read_text() for one in outputs))


# ---- In its own process ----


def run(words: list[str]) -> int:
    """The exit status of a program, as Python gives it."""
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).parent))
    try:
        try:
            runpy.run_path(words[0], run_name="__main__")
        except Exception:
            sys.excepthook(*sys.exc_info())
            return 1
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    return 0


def main() -> None:
    from flash_dmattn import attention  # noqa: F401 (imports all of the package, and PyTorch)

    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            os.chdir(job["cwd"])
            for descriptor, path in zip((1, 2), job["outputs"]):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
            status = run(job["words"])
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(status)
        _, status = os.waitpid(child, 0)
        print(os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status), flush=True)


if __name__ == "__main__":
    main()
