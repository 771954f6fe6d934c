"""Rollout workers are killed at random moments of a run (``scripts/rollout_workers_kill.py``, which kills a hundred)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

import rollout_workers_kill

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="not installed: ray; extra 'ray'")
KILLS, ITERATIONS = 5, 3


def test_a_run_whose_players_are_killed_is_the_run_that_was_left_alone(tmp_path, monkeypatch):
    # A machine that is short of memory for other reasons is not this test's matter, nor is one that is busy.
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "0")
    monkeypatch.setenv("RAY_worker_register_timeout_seconds", "300")
    monkeypatch.setattr(rollout_workers_kill, "LEFT_S", 300.0)
    short = [
        "rollout.num_chunks=64",
        "env.max_episode_steps=64",
        "trainer.minibatch_size=64",
        "model.micro_batch_size=64",
    ]
    alone, disturbed = rollout_workers_kill.soak(tmp_path, KILLS, ITERATIONS, 0, [*short, "trainer.eval_every=2"])
    report = rollout_workers_kill.compare(alone, disturbed, KILLS, ITERATIONS)
    assert report["wrong"] == [] and report["kills"] == KILLS and report["blocks_trained"] == 8 * ITERATIONS
    # Controls: what was not killed, a rollout that was trained on twice, another metric, a process that is left.
    assert rollout_workers_kill.compare(alone, alone, KILLS, ITERATIONS)["wrong"] == ["number of kills"]
    trained = disturbed.folder / "trained.jsonl"
    lines = trained.read_text().splitlines(keepends=True)
    trained.write_text("".join([lines[0], *lines[:2]]))
    metrics = disturbed.folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"train/loss": ', '"train/loss": 1'))
    disturbed.left = ["a process"]
    wrong = rollout_workers_kill.compare(alone, disturbed, KILLS, ITERATIONS)["wrong"]
    assert wrong == ["blocks trained on", "rollouts", "metrics", "left"]
