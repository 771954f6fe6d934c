"""What tests of the command line share."""

from __future__ import annotations

import pytest


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty present folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def started(monkeypatch):
    """The configurations with which training and cloning would have started."""
    import rlinf.commands.train as run

    calls = []
    for name in ("train", "sft"):
        monkeypatch.setattr(run, name, lambda config, name=name: (run.announce(config), calls.append((name, config))))
    return calls
