"""How much an actor changes, by hand, and what the report says of an actor."""

import re
from pathlib import Path

import pytest
import torch

from rlinf.evaluation.result import EvaluationResult
from rlinf.offpolicy.episodes import ResidualNorm
from rlinf.report.offpolicy import warmup_success
from rlinf.report.run_page import write_report
from rlinf.tracking import Tracker, TrackingConfig
from rlinf.types import EpisodeResult, EpisodeSpec


def spec(number: int, task: int = 0) -> EpisodeSpec:
    return EpisodeSpec("tabletop", task, number, 1)


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


def outcomes(num_successes: int, num_episodes: int = 100) -> EvaluationResult:
    return EvaluationResult([EpisodeResult(spec(i), "reach", i < num_successes, 0.0, 5) for i in range(num_episodes)])


def make_run(folder: Path, rates: list[int], noise: float = 0.5, actor: str = "residual") -> Path:
    """Write a run whose warm-up are the first two of its iterations of 512 env steps; ``rates``: successes after each."""
    outcomes(20).to_json(folder / "eval" / "before_rl" / "result.json")
    with Tracker(folder, TrackingConfig(tensorboard=False), {}) as tracker:
        for step, successes in enumerate(rates):
            steps = 512 * (step + 1)
            metrics = {
                "rollout/env_steps_total": steps, "rollout/base_policy_queries": steps + 40 * (step + 1),
                "rollout/success_rate": noise if step < 2 else 0.8, "rollout/num_episodes": 32,
                "train/q_initial": 0.5, "train/return_initial": 0.4,
            }  # fmt: skip
            tracker.log(step, metrics, "rl")
            result = outcomes(successes)
            tag = "after_rl" if step == len(rates) - 1 else f"step_{step:06d}"
            result.to_json(folder / "eval" / tag / "result.json")
            tracker.log(step, result.metrics() | {"rollout/env_steps_total": steps}, "rl")
    algorithm = f"{{name: sac, learning_starts: 1024, actor: {{name: {actor}, scale: 1.0}}}}"
    (folder / "config.yaml").write_text(f"algorithm: {algorithm}\n")
    return folder


def words_of(page: Path) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", page.read_text(encoding="utf-8")).split())


def test_the_report_says_when_rates_were_reached(tmp_path):
    page = write_report(make_run(tmp_path, [30, 55, 79, 81]))
    words = words_of(page)
    assert "50% 1,024 1,104 55.0% (55/100" in words and "80% 2,048 2,208 81.0% (81/100" in words
    assert "90% not within 2,048" in words
    assert "predicted by the critics" in words and "Critics against returns" in words
    assert "For truncated episodes, only the return so far is known" in words
    assert "without any learning, solved" not in words


@pytest.mark.parametrize(("noise", "is_said"), [(0.5, False), (0.75, True)])
def test_a_head_that_is_no_better_than_noise_is_said_so(tmp_path, noise, is_said):
    words = words_of(write_report(make_run(tmp_path, [30, 55, 79, 81], noise)))
    assert f"uniform noise: the warm-up (training episodes) {noise:.1%} ({round(64 * noise)}/64" in words
    assert ("The base policy with uniform noise, without learning, solved 75.0% (48/64)" in words) == is_said


def test_only_the_warm_up_counts_and_only_where_it_is_noise_around_the_frozen_policy():
    line = {"rollout/base_policy_queries": 1.0, "rollout/success_rate": 0.25, "rollout/num_episodes": 32.0}
    lines = [{"eval/success_rate": 0.9}, *({**line, "rollout/env_steps_total": steps} for steps in (512, 1024, 1536))]
    config = {"learning_starts": 1024, "actor": {"name": "residual"}}
    found = warmup_success(lines, config)
    assert found is not None and (found.successes, found.episodes) == (16, 64)
    assert warmup_success(lines, config | {"actor": {"name": "direct"}}) is None
    assert warmup_success(lines, config | {"learning_starts": 0}) is None and warmup_success(lines, {}) is None
