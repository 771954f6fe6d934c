"""What each command loads: a refusal, a help text or a list of names needs neither torch nor a simulator."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest

import rlinf
from rlinf import manifest
from rlinf.algorithms import ALGORITHMS
from rlinf.cli import doctor
from rlinf.envs import ENVS

HEAVY = ("torch", "transformers", "peft", "mujoco", "gymnasium", "ray", "vllm", "pyarrow", "numpy", "hydra")
SMALL_RUN = [
    "train",
    "experiment=tabletop_ppo_mlp",
    "trainer.max_steps=1",
    "rollout.num_envs=8",
    "trainer.minibatch_size=128",
    "evaluation.num_episodes=4",
]
RUN = """
import contextlib, io, json, sys
from rlinf.cli import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
    status = main(sys.argv[2:])
print(json.dumps([status, said.getvalue(), [name for name in json.loads(sys.argv[1]) if name in sys.modules]]))
"""


def run(*words):
    """Run a command in a process of its own; return its exit status, what it said on stderr, and the heavy packages it has loaded."""
    command = [sys.executable, "-c", RUN, json.dumps(HEAVY), *words]
    return json.loads(subprocess.check_output(command, text=True, timeout=280))


@pytest.mark.parametrize(
    ("words", "status", "loaded"),
    [
        (["--help"], 0, []),
        (["train", "--help"], 0, []),
        (["launch", "--help"], 0, []),
        (["diagnose", "--help"], 0, []),
        (["--complete", "rlinf train experiment="], 0, []),
        (["models"], 0, ["hydra"]),
        (["train", "experiment=quickstrat"], 2, ["hydra"]),
        (["train", "experiment=quickstart", "trainer.max_step=3"], 2, ["hydra"]),
        (["train", "experiment=tabletop_ppo_mlp", "--cfg", "job"], 0, ["hydra"]),
        (["evaluate", "checkpoint=no_such_folder"], 2, ["hydra"]),
        (["audit", "checkpoint=no_such_folder"], 2, ["hydra"]),
        (["serve", "checkpoint=no_such_folder"], 2, ["hydra"]),
        (["export", "checkpoint=no_such_folder", "output=no_such_output"], 2, ["hydra"]),
        (SMALL_RUN, 0, ["torch", "mujoco", "gymnasium", "numpy", "hydra"]),
    ],
)
def test_a_command_loads_only_what_it_needs(words, status, loaded, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(manifest.Path(rlinf.__file__).parents[1]))
    monkeypatch.chdir(tmp_path)
    found, said, packages = run(*words)
    assert (found, packages) == (status, loaded), said
    assert bool(said) == (status == 2 or words == SMALL_RUN), said


def test_a_run_loads_torch_and_this_test_sees_it():
    code = RUN.replace("main(sys.argv[2:])", "__import__('torch') and 0")
    found = json.loads(subprocess.check_output([sys.executable, "-c", code, json.dumps(HEAVY)], text=True))
    assert "torch" in found[2]


@pytest.mark.parametrize("registry", [ENVS, ALGORITHMS], ids=lambda registry: registry.kind)
def test_a_configuration_that_loads_alone_is_the_one_of_its_class(registry):
    assert registry._configs
    for name in registry._configs:
        assert registry.config_class(name) is registry.get(name).config_class


def test_a_class_that_replaces_a_built_in_one_brings_its_own_configuration():
    mine = SimpleNamespace(config_class=dict)
    before = ALGORITHMS.entries()["ppo"]
    ALGORITHMS.register("ppo", mine)
    try:
        assert ALGORITHMS.config_class("ppo") is dict
    finally:
        ALGORITHMS._entries["ppo"] = before


def installed(summary, version):
    return SimpleNamespace(metadata={"Summary": summary}, version=version)


@pytest.mark.parametrize("version", ["0.3.0", rlinf.__version__])
def test_another_project_of_the_name_is_noticed(version, monkeypatch):
    monkeypatch.setattr(manifest, "distribution", lambda name: installed("Somebody else's project", version))
    sentence = manifest.other_project()
    assert f"rlinf {version} is another project" in sentence and "pip uninstall -y rlinf" in sentence
    (finding,) = doctor.check_packages()
    assert (finding.status, finding.detail) == (doctor.NO, sentence)


def test_this_project_is_taken_for_itself_in_any_version(monkeypatch):
    summary = "Reinforcement learning of vision-language-action models in robot simulators"
    monkeypatch.setattr(manifest, "distribution", lambda name: installed(summary, "9.9.9"))
    assert manifest.other_project() is None

    def none(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(manifest, "distribution", none)
    assert manifest.other_project() is None


def test_dir_shows_what_the_package_offers():
    shown = {name for name in dir(rlinf) if not name.startswith("_")}
    assert set(rlinf.__all__) <= shown and not {"annotations", "TYPE_CHECKING", "lazy_attributes"} & shown
