"""The `fdma` command: usage, exit status, messages, and the files that it writes."""

from __future__ import annotations

import json
import os
import pty
import re
import resource
import signal
import subprocess
import time
from pathlib import Path
from typing import Callable

import pytest
from safetensors import numpy as files
from samples import combinations
from tool import EXAMPLE, TOOL, attend_json, make_inputs, refusal, run_tool

COMMANDS = ["attend", "check", "bench", "info", "man", "completion"]


@pytest.mark.parametrize(
    ("command", "flag"), combinations([[], *([one] for one in COMMANDS)], ["-h", "--help"])
)
def test_help(command: list[str], flag: str) -> None:
    done = run_tool(*command, flag)
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.startswith(f"usage: fdma {'COMMAND' if not command else command[0]}")
    if not command:
        assert all(f"\n  {one} " in done.stdout for one in COMMANDS)


@pytest.mark.parametrize("word", ["--version", "version"])
def test_version(word: str) -> None:
    done = run_tool(word)
    assert done.returncode == 0 and done.stderr == ""
    assert re.fullmatch(r"fdma \d+\.\d+\.\d+\n", done.stdout)


def test_no_command() -> None:
    done = run_tool()
    assert done.returncode == 2
    assert "usage: fdma COMMAND" in done.stderr


# Arguments of `fdma`, and words of the line that refuses them.
REFUSED = {
    "atend": "no command 'atend'; did you mean 'attend'?",
    "nonsense": "no command 'nonsense'; see fdma --help",
    "attend --tread 2": "--tread",
    "check --tread 2": "--tread",
    "bench --tread 2": "--tread",
    "info --tread 2": "--tread",
    "attend f --windov 64": "did you mean --window?",
    "attend --window 4": "FILE.safetensors is missing",
    "attend f": "--window N is missing",
    "attend f --window": "--window wants a value",
    "attend f --window -1": "--window is '-1'",
    "attend f --window 0": "--window is '0', want a whole number, 1 or more",
    "attend f --window 4x": "--window is '4x'",
    "attend f --window 99999999999999999999": "--window is '9999",
    "attend f --window 4 --scale nan": "--scale is 'nan'",
    "attend f --window 4 --scale 0": "--scale is '0', want a finite number above 0",
    "attend f --window 4 --softcap -2": "--softcap is '-2'",
    "attend f --window 4 --bias cubic": "--bias is 'cubic'",
    "attend f --window 4 --dtype f64": "--dtype is 'f64'",
    "attend f --window 4 --causal=1": "--causal takes no value",
    "attend f --window 4 g": "'g' is one argument too many",
    "attend f --window 4 --scope causal": "--scope is 'causal', want --causal with it",
    "attend f --window 4": "f: cannot be opened: No such file",
    "attend EXAMPLE --window 4 --kernel nonsense": "nonsense",
    "attend f --window \x1b": "\\x1b",
    "\x1b[31m": "\\x1b",
    "check no-such-case": "no case matches 'no-such-case'; fdma check --list prints",
    "check paddin/lft": "no case matches 'paddin/lft'; did you mean 'padding/left'?",
    "check padding --kernel cup/scalar": "'cup/scalar'; did you mean 'cpu/scalar",
    "bench selct/iid": "no case matches 'selct/iid'; did you mean 'select/iid/",
    "bench --kernel refrence": "--kernel is 'refrence'; did you mean 'reference'?",
    "bench --kernel nonsense": "--kernel is 'nonsense', want a kernel that fdma info lists",
    "attend f --window 4 --kernel cpu/skalar": "did you mean 'cpu/scalar",
    "attend - --window 4": "standard input cannot be read, want a file",
    "attend f --window 4 --score s --a b": "--score excludes --dt-proj and --a",
    "attend f --window 4 --layout bhdl": "--layout is 'bhdl', want one of blhd, bhld",
    "check padding --kernel cpu/av": "--kernel is 'cpu/av'",
    "check --device x": "want cpu, cuda or a number",
    "check --device 99": "--device is '99'",
    "bench no-such-case": "no case matches 'no-such-case'",
    "bench --threads 0": "--threads is 0",
    "bench --all --kernel cpu": "exclude each other",
    "bench select/falling more": "'more' is one argument too many",
    "bench --device x": "want cpu, cuda or a number",
    "bench --device 99": "--device is '99'",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_bad_usage(arguments: str, tmp_path: Path) -> None:
    words = [str(EXAMPLE) if word == "EXAMPLE" else word for word in arguments.split(" ")]
    assert REFUSED[arguments] in refusal(*words, cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_info_names_kernels_and_choices() -> None:
    """The kernel that would run comes first, and is marked in the list of all kernels."""
    done = run_tool("info")
    assert done.returncode == 0
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[2] == "runs on cpu forward one query (decode) backward".split()
    chosen = {dtype: kernels for dtype, *kernels in lines[3:7]}
    assert set(chosen) == {"f32", "f16", "bf16", "f64"}
    assert all(kernel.startswith("cpu/") for kernel in chosen["f32"])
    assert chosen["f64"] == ["reference"] * 3
    for operation in ("score", "select"):
        assert ["cpu/scalar", operation, "yes"] in lines
        assert ["reference", operation, "yes"] in lines
    for operation, columns in (("forward", [0, 1]), ("backward", [2])):
        rows = [line for line in lines if line[1:3] == [operation, "yes"]]
        assert {row[0] for row in rows} >= {chosen["f32"][column] for column in columns}
        for row in rows:
            marked = [d for d, kernels in chosen.items() if row[0] in [kernels[c] for c in columns]]
            assert row[3:] == marked


def test_output_replaces_and_leaves_no_temporary(example: Path, tmp_path: Path) -> None:
    out_path = tmp_path / "out.safetensors"
    out_path.write_bytes(b"old")
    link = tmp_path / "link.safetensors"
    link.symlink_to(out_path)
    attend_json(example, "--window", "4", "--out", link)
    assert link.is_symlink()
    assert set(files.load_file(out_path)) == {"out", "lse"}
    assert len(list(tmp_path.iterdir())) == 3
    ordinary = tmp_path / "ordinary"
    ordinary.touch()
    assert out_path.stat().st_mode == ordinary.stat().st_mode


def test_output_to_a_pipe(example: Path) -> None:
    """The pipe gets only the tensors; the report goes to stderr."""
    done = subprocess.run(
        [TOOL, "attend", example, "--window", "4", "--json", "--out", "/dev/stdout"],
        capture_output=True,
        check=True,
    )
    assert set(files.load(done.stdout)) == {"out", "lse"}
    assert json.loads(done.stderr)["out"] == "/dev/stdout"


def test_output_to_a_fifo(example: Path, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with subprocess.Popen(["cat", fifo], stdout=subprocess.PIPE) as reader:
        attend_json(example, "--window", "4", "--out", fifo)
        assert set(files.load(reader.communicate(timeout=60)[0])) == {"out", "lse"}
    assert fifo.is_fifo()


def test_output_through_a_dangling_link(example: Path, tmp_path: Path) -> None:
    """The file at the end of the links is created; the links stay."""
    folder, middle, link = tmp_path / "folder", tmp_path / "middle", tmp_path / "link"
    folder.mkdir()
    middle.symlink_to("folder/out.safetensors")
    link.symlink_to(middle)
    attend_json(example, "--window", "4", "--out", link)
    assert link.is_symlink() and middle.is_symlink()
    assert set(files.load_file(folder / "out.safetensors")) == {"out", "lse"}


def test_output_through_a_circle_of_links(example: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.symlink_to(two)
    two.symlink_to(one)
    line = refusal("attend", example, "--window", "4", "--out", one, code=1)
    assert "cannot be written: Too many levels of symbolic links" in line
    assert one.is_symlink() and two.is_symlink()


HOSTILE = os.fsdecode(b"\xff\x1b[31m\xc2\x9b\xe2\x82\xac.safetensors")  # not UTF-8, escapes, a euro


def test_hostile_path_in_messages(tmp_path: Path) -> None:
    line = refusal("attend", tmp_path / HOSTILE, "--window", "4")
    assert "\\xff\\x1b[31m\\xc2\\x9b€.safetensors: cannot be opened" in line


def test_hostile_path_in_reports(tmp_path: Path) -> None:
    path, out = tmp_path / HOSTILE, tmp_path / "out" / HOSTILE
    out.parent.mkdir()
    files.save_file(make_inputs(), path)
    report = attend_json(path, "--window", "4", "--out", out)  # decodes: it is UTF-8
    shown = "\ufffd\x1b[31m\x9b€.safetensors"
    assert (report["file"], report["out"]) == (f"{tmp_path}/{shown}", f"{tmp_path}/out/{shown}")
    done = run_tool("attend", path, "--window", "4", "--out", out)
    assert done.stdout.count("\\xff\\x1b[31m\\xc2\\x9b€.safetensors\n") == 2
    assert "\x1b" not in done.stdout


def run_on_terminal(*arguments: str) -> tuple[str, str]:
    """Run `fdma` with stderr on a terminal; return stdout and the terminal's text."""
    terminal, end = pty.openpty()
    done = subprocess.run([TOOL, *arguments], stdout=subprocess.PIPE, stderr=end, text=True)
    os.close(end)
    received = b""
    try:
        while block := os.read(terminal, 65536):
            received += block
    except OSError:  # the other end is closed
        pass
    os.close(terminal)
    assert done.returncode == 0
    return done.stdout, received.decode()


def test_check_shows_progress_on_a_terminal() -> None:
    arguments = ("check", "padding/left", "--kernel", "reference")
    stdout, progress = run_on_terminal(*arguments)
    quiet = run_tool(*arguments)
    seconds = r" in +[\d.]+ s;"
    assert quiet.stderr == ""
    assert re.sub(seconds, "", quiet.stdout) == re.sub(seconds, "", stdout)
    assert len(re.findall(r"\r\d+ of \d+  padding/left\S* (f32|f16|bf16) ", progress)) >= 3
    assert "\n" not in progress
    assert progress.endswith(f"\r{' ' * 79}\r")


def test_check_reports_every_kernel() -> None:
    kernels = [
        line.split()[:2] for line in run_tool("info").stdout.split("available")[1].split("\n")[1:-1]
    ]
    _, report = run_tool("check", "padding/left").stdout.split("\n\n")
    reported = [line.split()[:2] for line in report.splitlines()]
    assert [kernel for kernel in kernels if not kernel[0].startswith("cuda/")] == reported[:-1]


def heed_signals() -> None:
    """A shell's background jobs ignore these signals; heed them."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def start(*arguments: str | Path) -> subprocess.Popen[str]:
    command = [TOOL, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=heed_signals)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_check_reports_as_it_goes(number: signal.Signals) -> None:
    """It also reports into a pipe, and a signal ends it with the results so far."""
    with start("check", "padding", "--kernel", "cpu/scalar") as check:
        first = check.stdout.readline()
        check.send_signal(number)
        rest = check.stdout.read()
        assert check.wait(timeout=60) == -number
    family = re.fullmatch(
        r"(\S+) +(\d+) cases in +[\d.]+ s; so far (\d+) passed, 0 failed\n", first
    )
    assert family is not None and int(family[3]) > int(family[2])
    assert "stopped: not all cases were checked\n" in rest
    assert re.search(r"^cpu/scalar +score +\d+ cases", rest, re.M)
    total = re.search(r"(\d+) passed, 0 failed\n$", rest)
    assert total is not None and int(total[1]) >= int(family[3])


def test_check_says_that_all_cases_take_long() -> None:
    with start("check") as check:
        line = check.stdout.readline()
        check.kill()
    assert "minutes" in line and "FILTER, --one-dtype and --kernel" in line


@pytest.mark.parametrize(("command", "some"), [("check", "padding/left"), ("bench", "select/nan")])
def test_names_of_cases(command: str, some: str) -> None:
    names = run_tool(command, "--list").stdout.splitlines()
    assert len(names) == len(set(names)) > 20 and all("/" in name for name in names)
    chosen = run_tool(command, some, "--list").stdout.splitlines()
    assert chosen == [name for name in names if some in name] != []


def test_info_as_json() -> None:
    found = json.loads(run_tool("info", "--json").stdout)
    lines = [line.split() for line in run_tool("info").stdout.splitlines()]
    assert f"fdma {found['fdma']}\n" == run_tool("--version").stdout
    listed = {(one["name"], one["operation"]) for one in found["kernels"]}
    assert {("cpu/scalar", "select"), ("reference", "forward")} <= listed
    for one in found["kernels"]:
        (line,) = (x for x in lines if x[:2] == [one["name"], one["operation"]])
        assert line[2] == ("yes" if one["missing"] is None else "no:")
    cpu = found["devices"][0]
    assert cpu["cores"] >= 1 and lines[3] == [
        *("f32", cpu["forward"]["f32"], cpu["decode"]["f32"], cpu["backward"]["f32"])
    ]


def test_check_takes_each_case_in_one_dtype() -> None:
    """Dtypes alternate, so that each dtype has some case."""
    counted = {}
    for option in ((), ("--one-dtype",)):
        arguments = ("check", "padding/", "--kernel", "reference", *option)
        printed = run_on_terminal(*arguments)
        cases = re.search(r"reference +score +(\d+) cases", printed[0])
        dtypes = set(re.findall(r"(f32|f16|bf16)", printed[1]))
        assert cases is not None and dtypes == {"f32", "f16", "bf16"}
        counted[option] = int(cases[1])
    assert counted[()] == 3 * counted[("--one-dtype",)] > 0


@pytest.mark.parametrize("old", [b"old", None])
def test_full_disk_keeps_the_old_output(example: Path, tmp_path: Path, old: bytes | None) -> None:
    out_path = tmp_path / "out.safetensors"
    if old:
        out_path.write_bytes(old)
    before = sorted(tmp_path.iterdir())
    limit = 4096  # the largest file, in bytes; out needs more

    def limit_file_size() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    line = refusal(
        *("attend", example, "--window", "4", "--json", "--out", out_path),
        code=1,
        preexec_fn=limit_file_size,
    )
    assert "cannot be written: File too large" in line
    assert sorted(tmp_path.iterdir()) == before
    if old:
        assert out_path.read_bytes() == old


def test_unwritable_outputs(example: Path, tmp_path: Path) -> None:
    common = ("attend", example, "--window", "4", "--out")
    assert "No space left" in refusal(*common, "/dev/full", code=1)
    assert "No such file" in refusal(*common, tmp_path / "nowhere" / "out", code=1)
    assert "cannot be written" in refusal(*common, tmp_path, code=1)
    assert "--out is '', want the name of a file" in refusal(*common, "")
    assert "FILE.safetensors is '', want a name" in refusal("attend", "", "--window", "4")
    assert "--json is '', want the name of a file" in refusal("bench", "--json", "")
    later = ("--decode", "3")  # is refused after attention, as it needs --causal
    assert "No such file" in refusal(*common, tmp_path / "nowhere" / "out", *later, code=1)


def test_unwritable_standard_output() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([TOOL, "info"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert "standard output cannot be written" in done.stderr


def bench_lines(tmp_path: Path, *arguments: str) -> list[dict[str, object]]:
    path = tmp_path / "bench.json"
    done = run_tool("bench", *arguments, "--json", path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # progress is for terminals
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_bench_forward(tmp_path: Path) -> None:
    machine, row = bench_lines(tmp_path, "forward/dense/f32/d128/n1024")
    assert list(machine) == ["machine", "cores", "device", "compiler", "date", "commit"]
    assert machine["cores"] >= 1
    assert list(row) == [
        *("case", "kernel", "threads", "ms", "spread"),
        *("useful_gflops", "of_peak", "ns_per_key"),
    ]
    assert row["case"] == "forward/dense/f32/d128/n1024"
    assert row["threads"] == 1 and row["ns_per_key"] is None
    flops = 4 * 128 * sum(i + 1 for i in range(1024))
    assert row["useful_gflops"] * row["ms"] * 1e6 == pytest.approx(flops, rel=1e-4)
    assert row["of_peak"] > 0


@pytest.mark.parametrize(
    ("name", "options", "keys"),
    [
        ("select/falling/n131072/w2048", ["--all"], 131072),
        ("backward/dense/f32/d64/n4096", [], None),
        ("score_backward/f32/d128/n16384/h8g8", [], None),
    ],
)
def test_bench(tmp_path: Path, name: str, options: list[str], keys: int | None) -> None:
    _, *rows = bench_lines(tmp_path, name, *options)
    kernels = [row["kernel"] for row in rows]
    assert "reference" not in kernels
    assert ("cpu/scalar" in kernels) == ("--all" in options)
    for row in rows:
        assert row["case"] == name and row["ms"] > 0
        if keys is not None:
            assert row["useful_gflops"] is None and row["of_peak"] is None
            assert row["ns_per_key"] * keys == pytest.approx(row["ms"] * 1e6, rel=1e-4)


def test_bench_of_an_unknown_kernel_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    done = run_tool("bench", "select/falling", "--kernel", "nonsense", "--json", path)
    assert done.returncode == 2 and "nonsense" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_interrupted_bench_keeps_its_rows(tmp_path: Path, number: signal.Signals) -> None:
    """The file replaces the old one with its first row, and is valid from then on."""
    path = tmp_path / "bench.json"
    path.write_text("old")
    with start("bench", "score/", "--json", path) as bench:
        printed = [bench.stdout.readline() for _ in range(4)]  # the fourth is the first case
        wait_for(lambda: path.read_text() != "old")
        bench.send_signal(number)
        assert bench.wait(timeout=60) == -number
    machine, *rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert machine["cores"] >= 1 and rows[0]["case"] == printed[3].split()[0]
    assert list(tmp_path.iterdir()) == [path]


def test_bench_that_is_stopped_early_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text("old")
    with start("bench", "forward/dense/f32/d128/n8192", "--json", path) as bench:
        wait_for(lambda: len(list(tmp_path.iterdir())) == 2)
        bench.send_signal(signal.SIGTERM)
        assert bench.wait(timeout=60) == -signal.SIGTERM
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_text() == "old"
