"""Functions that run in an interpreter with a GPU that is not there. The one interpreter of a test process serves all calls."""

from __future__ import annotations

import functools
import importlib
import json
import os
import subprocess
import sys
import traceback
from typing import Any

import pytest

from tests.fake_gpu.gpu import ROOT, environment, why_not


def call(function: str, **arguments: Any) -> Any:
    """Return ``function(**arguments)``, named as ``module:name``; arguments and result are JSON. Skip where it cannot run."""
    child = _child()
    if isinstance(child, str):
        pytest.skip(f"no run on a GPU that is not there: {child}")
    print(json.dumps({"function": function, "arguments": arguments}), file=child.stdin, flush=True)
    answer = json.loads(child.stdout.readline() or '{"error": "the interpreter has ended"}')
    assert "error" not in answer, answer["error"]
    return answer["result"]


@functools.cache
def _child() -> subprocess.Popen | str:
    if (reason := why_not()) is not None:
        return reason
    return subprocess.Popen(
        [sys.executable, "-m", "tests.fake_gpu.child"],
        cwd=ROOT, env=environment() | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def _serve() -> None:
    """Answer the calls on standard input until it ends."""
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        request = json.loads(line)
        module, _, name = request["function"].partition(":")
        try:
            answer = {"result": getattr(importlib.import_module(module), name)(**request["arguments"])}
        except Exception:  # noqa: BLE001 - the caller raises it
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
