"""Starting ranks."""

from __future__ import annotations

import socket

import pytest

from rlinf.distributed import process_group


def fail_on_the_second_rank(_argument) -> None:
    if process_group.rank() == 1:
        raise KeyError("what went wrong")
    process_group.any_rank(True)  # fails too, because the other rank is gone


def test_the_error_of_the_rank_that_failed_first_is_told():
    with pytest.raises(
        process_group.RankError, match="Rank 1 failed(?s:.*)fail_on_the_second_rank(?s:.*)what went wrong"
    ):
        process_group.launch(fail_on_the_second_rank, None, 2, "cpu")


class NotStarted(Exception):
    """Instead of processes."""


def test_nobody_else_can_take_the_port_of_ranks_that_are_still_starting(monkeypatch):
    taken = []

    def start_processes(_run, arguments, **_options):
        port = next(value for value in arguments if isinstance(value, int) and value > 1024)
        for number in (port, 0):  # 0, any free port, is the control
            with socket.socket() as other:
                try:
                    other.bind(("127.0.0.1", number))
                except OSError:
                    taken.append(number)
        assert taken == [port]
        raise NotStarted

    monkeypatch.setattr(process_group.mp, "start_processes", start_processes)
    with pytest.raises(NotStarted):
        process_group.launch(print, None, 2, "cpu")
