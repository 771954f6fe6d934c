"""What each machine has measured (a JSON file), which checks it lacks, and the page that is generated from the file."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import textwrap
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import distributions, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from gpu_check.checks import Check
from gpu_check.rows import Row
from rlinf.files import write_text

ROOT = Path(__file__).resolve().parents[2]
MEANING = Path(__file__).with_name("meaning.md")
"""The part of each page that explains its rows."""
DONE, CUT, FAILED = "done", "cut", "failed"
"""How an attempt ended: completely; by the end of a call (or killed); by an error of its own (or after its limit)."""
PRESENT = ("torch", "transformers", "safetensors")
"""Packages that a GPU machine brings along."""


@dataclass
class Attempt:
    """The last attempt at a check on a machine."""

    state: str  # DONE, CUT or FAILED
    commit: str
    versions: str  # of torch and transformers
    seconds: float  # with the start of its process
    rows: list[Row]  # unless it is done, numbers of earlier attempts remain until they are measured again
    problem: str = ""  # how it failed

    def measured_at(self, commit: str) -> list[Row]:
        """Return the numbers of a commit."""
        return [row for row in self.rows if row.commit == commit]


class Results:
    """The file with the attempts of all machines. Every change replaces it by a complete new one, so it may be killed at any time."""

    def __init__(self, path: Path, machine: str, commit: str) -> None:
        self.path, self.machine, self.commit = path, machine, commit

    def read(self) -> dict[str, dict[str, Attempt]]:
        """Return the attempts by machine and check."""
        content = json.loads(self.path.read_text()) if self.path.is_file() else {}
        for attempts in content.values():
            for name, attempt in attempts.items():
                attempts[name] = Attempt(**attempt | {"rows": [Row(**row) for row in attempt["rows"]]})
        return content

    @property
    def attempts(self) -> dict[str, Attempt]:
        """Attempts on this machine by check."""
        return self.read().get(self.machine, {})

    def write(self, name: str, state: str, seconds: float, rows: list[Row], problem: str = "") -> Attempt:
        """Replace and return this machine's attempt at a check."""
        content, versions = self.read(), ", ".join(f"{package} {version(package)}" for package in PRESENT[:2])
        attempt = Attempt(state, self.commit, versions, seconds, rows, problem)
        content.setdefault(self.machine, {})[name] = attempt
        write_text(self.path, json.dumps(content, indent=1, default=asdict) + "\n")
        return attempt

    def add(self, row: Row, seconds: float) -> None:
        """Add a number of an attempt that is not yet done; a number with the same name is replaced."""
        before = self.attempts.get(row.check)
        rows = [other for other in (before.rows if before else []) if other.what != row.what]
        self.write(row.check, CUT, seconds, [*rows, row])

    def close(self, name: str, state: str, seconds: float, problem: str) -> Attempt:
        """Note how an attempt ended. If it is done, numbers of earlier commits are dropped."""
        before = self.attempts.get(name)
        rows = [] if before is None else before.measured_at(self.commit) if state == DONE else before.rows
        return self.write(name, state, seconds, rows, problem)


def git(*words: str) -> subprocess.CompletedProcess:
    """Run git in the repository."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)


def current_commit() -> str:
    """Return the commit of the code, with ``-dirty`` if its code differs; "unknown" without git."""
    has_changed = git("diff", "--quiet", "HEAD", "--", "rlinf", "scripts").returncode == 1
    return (git("rev-parse", "--short=12", "HEAD").stdout.strip() or "unknown") + "-dirty" * has_changed


def is_since(commit: str, first: str | None) -> bool:
    """Return whether a commit is ``first`` or later; None: all are."""
    return first is None or git("merge-base", "--is-ancestor", first, commit.removesuffix("-dirty")).returncode == 0


def lacking(
    checks: Mapping[str, Check], attempts: Mapping[str, Attempt], commit: str, is_recent: Callable[[str], bool]
) -> list[str]:
    """Return the checks to run, in order: those without a complete recent attempt, then those that failed at a different commit."""
    first, failed = [], []
    for name, check in checks.items():
        attempt = attempts.get(name)
        if check.package is not None and importlib.util.find_spec(check.package) is None:
            continue
        if attempt is None or attempt.state == CUT or (attempt.state == DONE and not is_recent(attempt.commit)):
            first.append(name)
        elif attempt.state == FAILED and attempt.commit != commit:
            failed.append(name)
    return first + failed


def seconds_needed(check: Check, attempt: Attempt | None) -> float:
    """Return the seconds that a check is expected to take: by estimate, as measured, or more than was too short."""
    if attempt is not None and attempt.state == DONE and attempt.seconds:  # 0: it was not recorded
        return 1.1 * attempt.seconds
    was_short = attempt is not None and attempt.state == CUT and not check.continues
    return max(check.expected_s, 1.5 * attempt.seconds if was_short else 0.0)


def write_page(results: Results, title: str, checks: Mapping[str, Check]) -> None:
    """Write the page with the numbers of all machines beside the results."""
    lines = [f"# {title}", "", "Generated by `scripts/gpu_check.sh`.", ""]
    for machine, attempts in results.read().items():
        origin = dict.fromkeys(f"{attempt.versions}, commit {attempt.commit}" for attempt in attempts.values())
        missing = [name for name in checks if name not in attempts or attempts[name].state != DONE]
        text = f"With {'; '.join(origin)}." + (f" Not complete: {', '.join(missing)}." if missing else "")
        text = textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)
        lines += [f"## {machine}", "", text, ""]
        lines += ["| check | what | measured | required | holds |", "|---|---|---|---|---|"]
        lines += [*_table(attempts, checks), ""]
    write_text(results.path.with_suffix(".md"), "\n".join([*lines, MEANING.read_text()]))


def _table(attempts: Mapping[str, Attempt], checks: Mapping[str, Check]) -> Iterator[str]:
    verdicts = {True: "yes", False: "**no**", None: ""}
    for name, attempt in sorted(attempts.items()):
        for row in attempt.rows:
            yield f"| {row.check} | {row.what} | {row.value} | {row.required} | {verdicts[row.passed]} |"
        if attempt.state == FAILED:
            what = checks[name].run.__doc__.splitlines()[0] if name in checks else ""
            yield f"| {name} | {what} | {attempt.problem} | a result | **no** |"


def needed_packages() -> list[str]:
    """Return the packages that pyproject.toml lists."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [canonicalize_name(Requirement(line).name) for line in project["dependencies"]]


def missing_packages() -> list[str]:
    """Return the packages that rlinf needs and that are not installed."""
    installed = {canonicalize_name(distribution.name) for distribution in distributions()}
    return [name for name in needed_packages() if name not in installed]


def wheels() -> list[str]:
    """Return ``name==version`` of the packages that rlinf needs beyond those that a GPU machine brings along."""
    return [f"{name}=={version(name)}" for name in sorted(_required(needed_packages()) - _required(PRESENT))]


def _required(names: Iterable[str]) -> set[str]:
    """Return packages with all packages that they require."""
    known, pending = set(), list(names)
    while pending:
        if (name := canonicalize_name(pending.pop())) not in known:
            known.add(name)
            lines = map(Requirement, requires(name) or [])
            pending += [line.name for line in lines if line.marker is None or line.marker.evaluate({"extra": ""})]
    return known
