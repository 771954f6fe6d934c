"""Which tests are slow: by the seconds that a run of all tests has recorded, not by hand."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

RECORD = Path(__file__).with_name("slow.txt")
"""Seconds and test, one a line, slowest first; without the parameters of a test."""
LEAST_S = 0.3
"""A test that takes less, with all of its parameters, is fast."""


def mark(items: list[pytest.Item]) -> None:
    """Give the marker ``slow`` to the tests of the record; a test that is new is fast until the next record."""
    lines = RECORD.read_text(encoding="utf-8").splitlines() if RECORD.exists() else []
    slow = {line.split(maxsplit=1)[1] for line in lines}
    for item in items:
        if item.nodeid.partition("[")[0] in slow:
            item.add_marker("slow")


class Recorder:
    """A plugin that writes the record at the end of a run; of tests that did not run, the former line stays."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid.partition("[")[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        lines = RECORD.read_text(encoding="utf-8").splitlines() if RECORD.exists() else []
        former = {test: float(seconds) for seconds, test in (line.split(maxsplit=1) for line in lines)}
        found = {test: seconds for test, seconds in (former | self.seconds).items() if seconds >= LEAST_S}
        text = "".join(
            f"{seconds:.1f} {test}\n" for test, seconds in sorted(found.items(), key=lambda pair: (-pair[1], pair[0]))
        )
        partial = RECORD.with_suffix(".tmp")
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, RECORD)
