"""The code of docs/python.md runs from top to bottom and gives what the page says."""

import re
from pathlib import Path

import numpy as np
import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "python.md"


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """The names that the page defines, and what it prints."""
    import contextlib
    import io
    import os

    before, printed = Path.cwd(), io.StringIO()
    os.chdir(tmp_path_factory.mktemp("notebook"))
    scope: dict = {"__name__": "notebook"}
    try:
        with contextlib.redirect_stdout(printed):
            for number, block in enumerate(blocks()):
                exec(compile(block, f"{PAGE.name}, block {number}", "exec", dont_inherit=True), scope)
        yield scope, printed.getvalue()
    finally:
        os.chdir(before)


def test_what_the_page_says_of_shapes_and_errors_is_so(session):
    scope, printed = session
    assert scope["actions"].shape == (1, 1, 2) and scope["actions"].dtype == np.float32
    assert "state has the shape [5]; required with one instruction: [31]\n" in printed
    assert (said := re.search(r"print\(error\)  # (.*)", PAGE.read_text())) and said[1] in printed


def test_the_loop_plays_every_row_to_its_end(session):
    scope, _ = session
    assert scope["done"].all() and np.isfinite(scope["returns"]).all()


def test_evaluations_of_the_page_are_those_of_the_run(session):
    scope, printed = session
    assert scope["before"].episodes == 20 == scope["nothing"].episodes
    assert "b - a = " in printed and "95 % interval" in printed
    assert Path(scope["run"], "eval", "after_rl", "result.json").is_file()
    assert [run.name for run in scope["runs"]] == ["0", "1"]


def test_the_network_that_transformers_loads_has_the_weights_of_the_policy(session):
    import torch

    scope, _ = session
    wanted = scope["policy"].model.state_dict()
    found = scope["model"].state_dict()
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
