"""`benchmarks/scaling_model.py --runs` on folders that `rlinf train` has written."""

import json
import runpy
import sys
from pathlib import Path

import pytest
from run_results import QUIET, REACH, metrics_of, run_config

from rlinf.commands.train import train

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from scaling_model import measured

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "scaling_model.py"
TINY = [
    *REACH, *QUIET, "env.max_episode_steps=3", "rollout.num_chunks=3", "trainer.minibatch_size=12", "model.micro_batch_size=12",
    "trainer.max_steps=2", "sft.max_steps=0", "evaluation.num_episodes=1", "evaluation.num_envs=1", "evaluation.probe=false",
]  # fmt: skip


def run_script(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, words)])
    runpy.run_path(str(SCRIPT), run_name="__main__")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two runs of one process, and one in which two processes play."""
    made = {"half": ["rollout.num_envs=4"], "whole": ["rollout.num_envs=8"]}
    made["processes"] = ["rollout.num_envs=8", "rollout.worker_processes=2"]
    parent = tmp_path_factory.mktemp("runs")
    for name, overrides in made.items():
        train(run_config(parent / name, *TINY, *overrides))
    return {name: parent / name for name in made}


def test_runs_of_one_process_give_the_model_and_the_others_are_compared_with_it(folders, monkeypatch, capsys):
    run_script(monkeypatch, "--runs", *folders.values())
    lines = capsys.readouterr().out.splitlines()
    compared = {found["run"]: found for found in map(json.loads, lines[:3])}
    assert [(found["ranks"], found["workers"]) for found in compared.values()] == [(1, 1), (1, 1), (1, 2)]
    for name, folder in folders.items():
        seconds = sum(measured(metrics_of(folder)).values())
        assert compared[name]["measured_s"] == pytest.approx(seconds, abs=1e-3)
        assert compared[name]["error"] == pytest.approx(compared[name]["predicted_s"] / seconds - 1, abs=0.05)
    assert lines[-1].split()[:2] == ["1024", "async"]


def test_without_a_run_of_one_process_there_is_no_model(folders, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run_script(monkeypatch, "--runs", folders["processes"])
    assert "no run of one process that trains and rolls out" in capsys.readouterr().err
