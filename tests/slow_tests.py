"""Two tiers of tests: a test is slow by the seconds that a run of all tests has recorded, not by hand."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

RECORD = Path(__file__).with_name("slow.txt")
"""Seconds and test, one a line, slowest first; without the parameters of a test."""
LEAST_S = 0.3
"""A test that takes less, with all of its parameters, is fast."""
LEAST_FILE_S = 40
"""All tests of a file that takes as long are slow: whichever of them runs first pays for the fixtures that they share."""
FAST = "not slow"


def choose(config: pytest.Config) -> None:
    """Run the fast tests only, unless the command names a file, test, word or marker: a slow test that is named runs."""
    option = config.option
    if config.args_source == config.ArgsSource.TESTPATHS and not (option.keyword or option.markexpr):
        option.markexpr = FAST


def recorded() -> dict[str, float]:
    """Return the seconds of the tests in the record."""
    lines = RECORD.read_text(encoding="utf-8").splitlines() if RECORD.exists() else []
    return {test: float(seconds) for seconds, test in (line.split(maxsplit=1) for line in lines)}


def file_of(test: str) -> str:
    """Return the file of a test id."""
    return test.partition("::")[0]


def seconds_of_files() -> Counter[str]:
    """Return the seconds that the record has for each file."""
    of_file = Counter[str]()
    for test, seconds in recorded().items():
        of_file[file_of(test)] += seconds
    return of_file


def mark(items: list[pytest.Item]) -> None:
    """Give the marker ``slow`` to the tests of the record; a test that is new is fast until the next record."""
    slow, of_file = recorded(), seconds_of_files()
    for item in items:
        test = item.nodeid.partition("[")[0]
        if test in slow or of_file[file_of(test)] >= LEAST_FILE_S:
            item.add_marker("slow")


def order(items: list[pytest.Item]) -> None:
    """Put files that take long first: test processes that take a file each then end at about the same time."""
    of_file = seconds_of_files()
    items.sort(key=lambda item: -of_file[file_of(item.nodeid)])


class Recorder:
    """A plugin that writes the record at the end of a run; a test that did not run keeps its former line."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid.partition("[")[0]] += report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        found = {test: seconds for test, seconds in (recorded() | self.seconds).items() if seconds >= LEAST_S}
        slowest_first = sorted(found.items(), key=lambda pair: (-pair[1], pair[0]))
        partial = RECORD.with_suffix(".tmp")
        partial.write_text("".join(f"{seconds:.1f} {test}\n" for test, seconds in slowest_first), encoding="utf-8")
        os.replace(partial, RECORD)
        fast_s = sum(seconds for seconds in self.seconds.values() if seconds < LEAST_S)
        terminalreporter.write_line(
            f"{RECORD.name}: {len(found)} slow tests take {sum(found.values()):.0f} s, the {FAST} ones {fast_s:.0f} s"
        )
