"""Which tests are slow, and which commands leave them out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import slow_tests


@pytest.mark.parametrize(
    ("source", "keyword", "marks", "chosen"),
    [("TESTPATHS", "", "", "not slow"), ("ARGS", "", "", ""), ("TESTPATHS", "ppo", "", ""),
     ("TESTPATHS", "", "slow or not slow", "slow or not slow")],
)  # fmt: skip
def test_only_a_run_that_names_nothing_leaves_slow_tests_out(source, keyword, marks, chosen):
    sources = pytest.Config.ArgsSource
    option = SimpleNamespace(keyword=keyword, markexpr=marks)
    slow_tests.choose(SimpleNamespace(option=option, args_source=sources[source], ArgsSource=sources))
    assert option.markexpr == chosen


def test_a_record_keeps_what_did_not_run_and_counts_all_parameters(tmp_path, monkeypatch):
    monkeypatch.setattr(slow_tests, "RECORD", tmp_path / "slow.txt")
    slow_tests.RECORD.write_text("9.0 test_a.py::test_that_did_not_run\n8.0 test_a.py::test_that_was_slow\n")
    recorder, lines = slow_tests.Recorder(), []
    for test, seconds in (("slow[1]", 0.2), ("slow[2]", 0.2), ("fast", 0.1), ("that_was_slow", 0.1)):
        recorder.pytest_runtest_logreport(SimpleNamespace(nodeid=f"test_a.py::test_{test}", duration=seconds))
    recorder.pytest_terminal_summary(SimpleNamespace(write_line=lines.append))
    assert slow_tests.RECORD.read_text() == "9.0 test_a.py::test_that_did_not_run\n0.4 test_a.py::test_slow\n"
    assert lines == ["slow.txt: 2 slow tests take 9 s, the not slow ones 0 s"]
    marked = []
    for name in ("slow[1]", "fast"):
        item = SimpleNamespace(nodeid=f"test_a.py::test_{name}", add_marker=lambda mark, name=name: marked.append(name))
        slow_tests.mark([item])
    assert marked == ["slow[1]"]
