"""Run the checks one after the other, and write the table again after each of them.

Every check runs in a process of its own, so that one that fails or hangs leaves the others alone. The exit status is 0 if no number
misses its threshold and no check fails.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import asdict
from pathlib import Path

import torch

from gpu_check.checks import ONE_GPU, SEVERAL_GPUS, Check
from gpu_check.rows import Row, Setting

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = {False: DOCS / "gpu_results.md", True: DOCS / "several_gpus_results.md"}
"""Pages of one GPU, and of several."""
TIMES_ON_CPU = 4
"""How much longer a check may take on a CPU, which may be busy."""
MEANING = Path(__file__).with_name("meaning.md")
"""The part of each page that explains its rows."""


def run_check(name: str, check: Check, arguments: argparse.Namespace, folder: Path) -> tuple[list[Row], str]:
    """Run one check in a process; return its rows, and what it printed if it failed."""
    answer, own = folder / f"{name}.json", folder / name
    limit_s = check.limit_s * (1 if arguments.device == "cuda" else TIMES_ON_CPU)
    own.mkdir()
    words = ["--device", arguments.device, "--child", name, "--output", str(answer)]
    words += ["--tiny"] * arguments.tiny + (["--gpus", str(arguments.gpus)] if arguments.gpus else [])
    command = [sys.executable, "-m", "gpu_check", *words]
    log = folder / f"{name}.txt"
    with open(log, "wb") as file:
        process = subprocess.Popen(command, cwd=own, stdout=file, stderr=file, start_new_session=True)
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if status == 0:
        return [Row(**row) for row in json.loads(answer.read_text())], ""
    ended = f"took longer than {limit_s} s" if status is None else f"ended with status {status}"
    return [Row(name, check.run.__doc__.splitlines()[0], ended, "a result", False)], log.read_text()[-3000:]


def table(rows: list[Row], arguments: argparse.Namespace, seconds: float) -> str:
    """Return the page."""
    machine = torch.cuda.get_device_name() if arguments.device == "cuda" else f"CPU ({platform.machine()})"
    size = "tiny models: this shows that the checks run, not what a GPU does" if arguments.tiny else "full size"
    flags = f"{f' --gpus {arguments.gpus}' if arguments.gpus else ''}{' --device cpu' * (arguments.device == 'cpu')}"
    words = {True: "yes", False: "**no**", None: ""}
    origin = (
        f"Written by `bash scripts/gpu_check.sh{flags}{' --tiny' * arguments.tiny}`, from random weights: {machine}, torch "
        f"{torch.__version__}, {size}, {seconds / 60:.1f} minutes."
    )
    times = ", ".join(f"{name} {check.expected_s} ({check.limit_s})" for name, check in arguments.checks.items())
    limits = f"Seconds on one H200 by estimate, and after which a check is ended: {times}."
    lines = [
        "# What several GPUs show" if arguments.gpus else "# What a GPU shows",
        "",
        *([] if arguments.device == "cuda" else ["**Not yet run on a GPU.**", ""]),
        *(f"{textwrap.fill(each, 120, break_long_words=False, break_on_hyphens=False)}\n" for each in (origin, limits)),
        "| check | what | measured | required | holds |",
        "|---|---|---|---|---|",
        *(f"| {row.check} | {row.what} | {row.value} | {row.required} | {words[row.passed]} |" for row in rows),
        "",
        MEANING.read_text().rstrip(),
    ]
    return "\n".join(lines) + "\n"


def write(path: Path, text: str) -> None:
    """Write a file under a temporary name, and rename it."""
    partial = path.with_name(f".{path.name}.tmp")
    partial.write_text(text)
    os.replace(partial, path)


def read_arguments() -> argparse.Namespace:
    """Read the command line, and reject what cannot run here."""
    parser = argparse.ArgumentParser(
        prog="gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="tiny models")
    parser.add_argument(
        "--gpus", type=int, metavar="2..8", help="the checks for so many GPUs of this machine, M1 to M5"
    )
    parser.add_argument("--only", nargs="+", metavar="G")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.checks = SEVERAL_GPUS if arguments.gpus else ONE_GPU
    unknown = [name for name in (arguments.only or []) if name not in arguments.checks]
    if unknown:
        parser.error(f"--only {unknown[0]}: expected any of {', '.join(arguments.checks)}")
    if arguments.gpus is not None and not 2 <= arguments.gpus <= 8:
        parser.error(f"--gpus {arguments.gpus}: expected 2 to 8. Without --gpus, the checks of one GPU run")
    if arguments.device == "cuda" and torch.cuda.device_count() < (arguments.gpus or 1):
        parser.error(f"--device is cuda, but torch sees {torch.cuda.device_count()} GPUs. Add --device cpu --tiny")
    if arguments.device == "cpu" and not arguments.tiny:
        parser.error("--device cpu needs --tiny: at full size the checks would take days")
    return arguments


def main() -> int:
    arguments = read_arguments()
    checks, here = arguments.checks, Path.cwd()
    if arguments.child:
        setting = Setting(arguments.device, arguments.tiny, here, here.parent / "openvla", arguments.gpus or 1)
        rows = checks[arguments.child].run(setting)
        write(arguments.output, json.dumps([asdict(row) for row in rows]))
        return 0
    # Part of the checks, or a CPU, would replace what a GPU has shown.
    is_whole = arguments.device == "cuda" and not arguments.only
    page = arguments.output or (PAGES[bool(arguments.gpus)] if is_whole else None)
    names = [name for name in checks if name in (arguments.only or checks)]
    if "G0" not in names and any(checks[name].needs_model for name in names):
        names.insert(0, "G0")
    start, rows = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="rlinf-gpu-check-") as folder:
        for name in names:
            found, log = run_check(name, checks[name], arguments, Path(folder))
            rows += found
            for row in found:
                verdict = {True: "holds", False: "MISSED", None: ""}[row.passed]
                print(f"{row.check} {row.what}: {row.value}  [{row.required}] {verdict}", flush=True)
            if log:
                print(log, file=sys.stderr, flush=True)
            if page is not None:
                write(page, table(rows, arguments, time.monotonic() - start))
    return int(any(row.passed is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
