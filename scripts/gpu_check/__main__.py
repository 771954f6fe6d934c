"""Run the checks that this machine lacks, the most valuable ones first, and write the results after each number.

Every check runs in a process of its own, so that one that fails or hangs leaves the others alone. With --minutes, a check starts only
if it is expected to end in time; the next call continues. The exit status is 0 if no number of this call misses its threshold and no
check fails.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from gpu_check import STARTED, results
from gpu_check.checks import ONE_GPU, SEVERAL_GPUS
from gpu_check.results import CUT, DONE, FAILED, ROOT, Attempt, Results
from gpu_check.rows import Row, Rows, Setting

FILES = {False: ROOT / "docs" / "gpu_results.json", True: ROOT / "docs" / "several_gpus_results.json"}
"""Results of one GPU, and of several; each page is beside its file."""
CACHE = Path("~/.cache/rlinf/gpu_check").expanduser()
TIMES_ON_CPU = 4
"""How much longer a check may take on a CPU, which may be busy."""


def run_check(name: str, arguments: argparse.Namespace, left_s: float) -> Attempt:
    """Run a check in a process for at most ``left_s`` seconds; print and return what it measured."""
    limit_s = arguments.checks[name].limit_s * (1 if arguments.device == "cuda" else TIMES_ON_CPU)
    paths = ["--output", str(arguments.output.absolute()), "--cache", str(arguments.cache)]
    command = [sys.executable, "-m", "gpu_check", *sys.argv[1:], *paths, "--child", name]
    start, state, problem = time.monotonic(), DONE, ""
    with tempfile.TemporaryDirectory(prefix="rlinf-gpu-check-") as folder, tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True)
        try:
            if status := process.wait(min(limit_s, left_s)):
                state, problem = FAILED, f"ended with status {status}"
        except subprocess.TimeoutExpired:
            state, problem = (CUT, "") if left_s <= limit_s else (FAILED, f"took longer than {limit_s} s")
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if state == FAILED:
            log.seek(0)
            print(log.read().decode(errors="replace")[-3000:], file=sys.stderr, flush=True)
    attempt = arguments.results.close(name, state, time.monotonic() - start, problem)
    for row in attempt.measured_at(arguments.results.commit):
        verdict = {True: "holds", False: "MISSED", None: ""}[row.passed]
        print(f"{row.check} {row.what}: {row.value}  [{row.required}] {verdict}")
    print(f"{name}: {problem or state} after {attempt.seconds:.0f} s", flush=True)
    return attempt


def measure(name: str, arguments: argparse.Namespace) -> None:
    """Run a check in this process, in an empty working directory, and save each number at once."""
    threading.Thread(target=end_with_parent, args=(os.getppid(),), daemon=True).start()
    file, start = arguments.results, time.monotonic()
    measured = {row.what: row.value for attempt in file.attempts.values() for row in attempt.rows}

    def save(row: Row) -> None:
        file.add(row, time.monotonic() - start)

    setting = Setting(arguments.device, arguments.tiny, Path.cwd(), arguments.cache, arguments.gpus or 1, measured)
    arguments.checks[name].run(Rows(name, file.commit, save), setting)


def end_with_parent(parent: int) -> None:
    """Kill this process and those that it has started when its parent has been killed, so that the next call has the GPU."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)


def read_arguments() -> argparse.Namespace:
    """Read the command line, and reject what cannot run here."""
    parser = argparse.ArgumentParser(
        prog="gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=math.inf, metavar="N", help="stop in time, without a loss")
    parser.add_argument("--list", action="store_true", help="print the checks to run in their order, and run none")
    parser.add_argument("--page", action="store_true", help="write the page again, and run nothing")
    parser.add_argument(
        "--wheels", action="store_true", help="print the packages that a GPU machine needs besides torch"
    )
    parser.add_argument("--since", metavar="COMMIT", help="measure again what was measured before this commit")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="tiny models")
    parser.add_argument(
        "--gpus", type=int, metavar="2..8", help="the checks for so many GPUs of this machine, M1 to M5"
    )
    parser.add_argument("--only", nargs="+", metavar="CHECK", help="run these, even if they are done")
    parser.add_argument("--cache", type=Path, default=CACHE, help=f"folder of the drawn models (32 GB; {CACHE})")
    parser.add_argument("--output", type=Path, help="file of the results; its page is written beside it")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.checks = SEVERAL_GPUS if arguments.gpus else ONE_GPU
    unknown = [name for name in (arguments.only or []) if name not in arguments.checks]
    if unknown:
        parser.error(f"--only {unknown[0]}: expected any of {', '.join(arguments.checks)}")
    if arguments.gpus is not None and not 2 <= arguments.gpus <= 8:
        parser.error(f"--gpus {arguments.gpus}: expected 2 to 8. Without --gpus, the checks of one GPU run")
    arguments.cache, arguments.output = arguments.cache.absolute(), arguments.output or FILES[bool(arguments.gpus)]
    arguments.results = Results(arguments.output, machine_name(arguments), results.current_commit())
    if arguments.list or arguments.page or arguments.wheels:
        return arguments
    if missing := results.missing_packages():
        parser.error(f"{', '.join(missing)} not installed. --wheels prints all packages, on a machine that has them")
    if arguments.device == "cuda" and torch.cuda.device_count() < (arguments.gpus or 1):
        parser.error(f"--device is cuda, but torch sees {torch.cuda.device_count()} GPUs. Add --device cpu --tiny")
    if arguments.device == "cpu" and not arguments.tiny:
        parser.error("--device cpu needs --tiny: at full size the checks would take days")
    if arguments.device == "cpu" and arguments.output in FILES.values():
        parser.error("--device cpu would add to the results of GPUs. Add --output /tmp/gpu_results.json")
    return arguments


def machine_name(arguments: argparse.Namespace) -> str:
    """Return the name under which results are kept."""
    name = f"CPU ({platform.machine()}), not a GPU"
    if arguments.device == "cuda":
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "a GPU without results"
    return f"{f'{arguments.gpus} x ' if arguments.gpus else ''}{name}{', tiny models' * arguments.tiny}"


def choose(names: Sequence[str], arguments: argparse.Namespace, left_s: float, may_draw: bool) -> str | None:
    """Return the first check that is expected to end in time; before one that needs the drawn OpenVLA, G0 may draw it."""
    model = Setting(arguments.device, arguments.tiny, Path(), arguments.cache).model
    for name in names:
        draws = may_draw and arguments.checks[name].needs_model and not model.is_dir()
        if seconds_of(name, arguments) + (seconds_of("G0", arguments) if draws else 0) <= left_s:
            return "G0" if draws else name
    return None


def seconds_of(name: str, arguments: argparse.Namespace) -> float:
    """Return the seconds that a check is expected to take."""
    return results.seconds_needed(arguments.checks[name], arguments.results.attempts.get(name))


def main() -> int:
    arguments = read_arguments()
    if arguments.wheels:
        print(*results.wheels(), sep="\n")
        return 0
    if arguments.child:
        measure(arguments.child, arguments)
        return 0
    file, checks = arguments.results, arguments.checks
    names = arguments.only or results.lacking(
        checks, file.attempts, file.commit, lambda commit: results.is_since(commit, arguments.since)
    )
    if arguments.list:
        print_list(names, arguments)
        return 0
    title = "What several GPUs show" if arguments.gpus else "What a GPU shows"
    results.write_page(file, title, checks)
    if arguments.page:
        return 0
    end, has_failed, may_draw = STARTED + 60 * arguments.minutes, False, True
    while (name := choose(names, arguments, end - time.monotonic(), may_draw)) is not None:
        attempt = run_check(name, arguments, end - time.monotonic())
        names, may_draw = [other for other in names if other != name], may_draw and name != "G0"
        has_failed |= attempt.state == FAILED
        has_failed |= any(row.passed is False for row in attempt.measured_at(file.commit))
        results.write_page(file, title, checks)
    if names:
        print(f"not run in this call: {', '.join(names)}")
    return int(has_failed)


def print_list(names: Sequence[str], arguments: argparse.Namespace) -> None:
    """Print the checks to run, in order and with seconds, and then the remaining ones."""
    left_s, attempts = 60 * arguments.minutes, arguments.results.attempts
    print(f"{arguments.results.machine}:")
    for name in names:
        is_later = (seconds := seconds_of(name, arguments)) > left_s
        left_s -= 0 if is_later else seconds
        print(f"{name:12} {seconds:4.0f} s{'  later' * is_later}")
    for name, check in arguments.checks.items():
        if name not in names:
            attempt = attempts.get(name)
            print(f"{name:12} {attempt.problem or attempt.state if attempt else f'needs {check.package}'}")


if __name__ == "__main__":
    sys.exit(main())
