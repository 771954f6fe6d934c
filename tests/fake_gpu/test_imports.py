"""Importing the commands asks CUDA nothing: the first question shows a process all GPUs, whatever it is told afterwards."""

import json
import subprocess
import sys

import pytest

from tests.fake_gpu.gpu import ROOT

SPY = """
import importlib, json, sys, traceback
import torch

asked = []

def watch(owner, name):
    answer = getattr(owner, name)
    def spy(*args, **kwargs):
        if name != "current_accelerator" or args or kwargs:  # by itself it says how torch was built, and asks no driver
            places = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_stack()[:-1]]
            asked.append([name, [place for place in places if "importlib" not in place][-1]])
        return answer(*args, **kwargs)
    setattr(owner, name, spy)

for name in ("_lazy_init", "is_available", "device_count", "current_device", "set_device", "get_device_properties",
             "get_device_capability", "get_device_name", "mem_get_info", "is_bf16_supported", "synchronize"):
    watch(torch.cuda, name)
for name in ("is_available", "device_count", "current_accelerator", "current_device_index"):
    watch(torch.accelerator, name)
for module in sys.argv[1:]:
    importlib.import_module(module)
print(json.dumps(asked))
"""
PROGRAMS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for folder in ("commands", "recipes", "cluster", "cli", "rollout")
    for path in (ROOT / "rlinf" / folder).glob("*.py")
    if path.stem != "__init__"
)
"""The modules that a rank, a rollout worker or a worker of a rollout unpickles its function from."""


def questions(modules, folder):
    """Return each question to CUDA with the place that asks it, while a new process imports some modules."""
    environment = {
        "PYTHONPATH": f"{ROOT}:{folder}",
        "PATH": "/usr/bin:/bin",
        "HOME": str(folder),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", SPY, *modules]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_no_import_asks_cuda_a_question(tmp_path):
    assert {"rlinf.commands.train", "rlinf.recipes.launch_worker", "rlinf.cluster.rollout_worker"} <= set(PROGRAMS)
    assert questions(["rlinf", *PROGRAMS], tmp_path) == []


@pytest.mark.parametrize("question", ["torch.cuda.is_available()", "torch.accelerator.current_accelerator(True)"])
def test_an_import_that_asks_is_seen(tmp_path, question):
    (tmp_path / "plugin.py").write_text(f"import torch\n{question}\n")
    asked = questions(["plugin"], tmp_path)
    assert [question.split(".")[2].partition("(")[0], f"{tmp_path / 'plugin.py'}:2"] in asked
