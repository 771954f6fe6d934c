"""What each command loads: a rejection, a help text or a list of names needs neither torch nor a simulator."""

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
SMALL_RUN = "train experiment=tabletop_ppo_mlp trainer.max_steps=1 rollout.num_envs=8 trainer.minibatch_size=128 evaluation.num_episodes=4"
RUN = """
import contextlib, io, json, sys
from rlinf.cli import main
for words in sys.argv[2:]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        status = main(json.loads(words))
    print(json.dumps([status, said.getvalue(), [name for name in json.loads(sys.argv[1]) if name in sys.modules]]))
"""


@pytest.mark.parametrize(
    ("commands", "loaded"),
    [
        ({"--help": 0, "train --help": 0, "launch --help": 0, "diagnose --help": 0, "robot --help": 0, "serve --help": 0,
          "--complete|rlinf train experiment=": 0, "--complete|rlinf serve ke": 0}, []),
        ({"models": 0, "train experiment=quickstrat": 2, "train experiment=quickstart trainer.max_step=3": 2,
          "train experiment=tabletop_ppo_mlp --cfg job": 0, "evaluate checkpoint=no_such_folder": 2, "audit checkpoint=no_such_folder": 2,
          "serve checkpoint=no_such_folder": 2, "export checkpoint=no_such_folder output=no_such_output": 2}, ["hydra"]),
        ({SMALL_RUN: 0}, ["torch", "mujoco", "gymnasium", "numpy", "hydra"]),
    ],
    ids=["help", "rejections", "a run"],
)  # fmt: skip
def test_a_command_loads_only_what_it_needs(commands, loaded, tmp_path, monkeypatch):
    """The commands of a case run one after the other in a process of their own; the last case is the control."""
    monkeypatch.setenv("PYTHONPATH", str(manifest.Path(rlinf.__file__).parents[1]))
    monkeypatch.chdir(tmp_path)
    words = [json.dumps(each.split("|" if "|" in each else None)) for each in commands]
    command = [sys.executable, "-c", RUN, json.dumps(HEAVY), *words]
    printed = subprocess.check_output(command, text=True, timeout=280).splitlines()
    for line, (each, status) in zip(printed, commands.items(), strict=True):
        found, said, packages = json.loads(line)
        assert (found, packages) == (status, loaded), (each, said)
        assert bool(said) == (status == 2 or each == SMALL_RUN), said


def test_a_configuration_that_loads_alone_is_the_one_of_its_class_also_of_one_that_replaces_a_built_in_one():
    for registry in (ENVS, ALGORITHMS):
        assert registry._configs
        for name in registry._configs:
            assert registry.config_class(name) is registry.get(name).config_class
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
    assert f"rlinf {version} is a different project" in sentence and "pip uninstall -y rlinf" in sentence
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
