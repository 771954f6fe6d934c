"""Runs that several tests of a file compare."""

from __future__ import annotations

import pytest
from run_results import run_config

from rlinf.commands.train import train


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """``runs(name, *overrides)`` trains once and returns the run folder."""
    folders = {}

    def run(name, *overrides):
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name.replace(" ", "_"))
            train(run_config(folders[name], *overrides))
        return folders[name]

    return run
