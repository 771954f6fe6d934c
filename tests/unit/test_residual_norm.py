"""How much an actor changes, by hand, and what the report says of an actor."""

import pytest
import torch

from rlinf.offpolicy.episodes import ResidualNorm
from rlinf.report.run_page import write_report
from rlinf.tracking import Tracker, TrackingConfig


def test_sizes_are_those_by_hand():
    """Two envs, a chunk of two actions of two numbers, two policy calls; the first env ends an episode in between."""
    norms = ResidualNorm(["reach", "push"])
    assert norms.metrics() == {}
    norms.start_episode(0, 0)
    norms.start_episode(1, 1)
    base = torch.zeros(2, 4)
    norms.add(base, torch.tensor([[0.1, 0.0, 0.3, 0.0], [0.0, -0.4, 0.0, 0.4]]))
    norms.start_episode(0, 0)
    norms.add(base + 0.5, torch.tensor([[0.5] * 4, [0.5, 0.5, 0.5, 1.3]]))
    by_task = {"rollout/residual_norm/reach": 0.05, "rollout/residual_norm/push": 0.2}
    assert norms.metrics() == pytest.approx({"rollout/residual_norm": 0.125, **by_task})


def test_the_report_shows_the_critics_and_the_norm_by_task(tmp_path):
    with Tracker(tmp_path, TrackingConfig(tensorboard=False), {}) as tracker:
        for step in range(3):
            norms = {f"rollout/residual_norm/{task}": 0.1 * step for task in ("reach", "push")}
            metrics = {
                "rollout/env_steps_total": 512 * step,
                "rollout/base_policy_queries": 512,
                "train/q_initial": 0.5,
            }
            tracker.log(step, metrics | norms, "rl")
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert all(text in page for text in ("Critics against returns", "predicted by the critics", "reach", "push"))
