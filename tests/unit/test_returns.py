"""The return of an evaluation and its interval, cut actions, and results that were written before either was recorded."""

import json
from dataclasses import replace

import numpy as np
import pytest

import rlinf
from rlinf.envs import make_env
from rlinf.envs.tabletop.config import TabletopConfig
from rlinf.evaluation.result import EvaluationResult, Success
from rlinf.report.run_page import write_report
from rlinf.training.outcome import closing_table, summary_of
from rlinf.training.state import LoopState
from rlinf.types import EpisodeResult, EpisodeSpec

CONFIG = TabletopConfig(tasks=["reach"], max_episode_steps=4)


def result_of(returns, successes=0, **options) -> EvaluationResult:
    rows = [
        EpisodeResult(EpisodeSpec("x", 0, i, 0), "reach", i < successes, value, 4) for i, value in enumerate(returns)
    ]
    return EvaluationResult(rows, **options)


def test_the_interval_of_a_return_is_student_s_t_over_episodes():
    result = result_of([1.0, 2.0, 6.0], successes=1)
    # m = 3, s = sqrt((4 + 1 + 9) / 2) = 2.6458, t_2 = 4.30265: 3 +- 4.30265 * 2.6458 / sqrt(3)
    assert result.return_mean == 3.0 and result.return_interval == pytest.approx((-3.5724, 9.5724), abs=1e-3)
    assert result.summary()["return_interval"] == list(result.return_interval)
    alone = result_of([5.0])
    assert alone.summary()["return_interval"] is None and alone.total.return_text == "5"
    assert Success(1, 3) == result.total, "equal whatever its return"
    assert result.headline() == "1/3 = 33.3% (95 % 6.1% - 79.2%), return 3"
    assert len("eval step_000010: " + result_of([-0.00491823] * 200, successes=200).headline()) <= 80


def test_the_best_checkpoint_of_a_task_without_success_has_the_highest_return():
    evaluations = {
        f"step_{n:06d}": {**result_of([mean, mean], reports_success=False).summary(), "checkpoint": f"rl_{n:06d}"}
        for n, mean in enumerate([-9.0, -2.0, -5.0])
    }
    state = LoopState("rl", step=3, evaluations=evaluations)
    best = state.best_evaluation({f"rl_{n:06d}" for n in range(3)})
    assert best == "step_000001" and state.best_evaluation({"rl_000000"}) == "step_000000"
    begun = replace(
        state,
        start="runs/a",
        evaluations={"before_rl": {**evaluations["step_000001"], "checkpoint": "runs/a", "return_mean": -1.0}}
        | evaluations,
    )
    assert begun.best_evaluation({"rl_000001"}) == "before_rl" and begun.best_checkpoint({"rl_000001"}) == "runs/a"
    closed = replace(state, evaluations={**evaluations, "after_rl": evaluations[best]})
    table = closing_table(summary_of("x", 0, closed, best))
    assert "%" not in table.replace("95 %", "") and "best checkpoint: rl_000001 (return -2 " in table


def test_a_page_of_a_task_without_success_shows_returns_and_no_rate(tmp_path):
    for tag, mean in (("before_rl", -9.0), ("after_rl", -2.0)):
        result_of([mean, mean + 1], reports_success=False).to_json(tmp_path / "eval" / tag / "result.json")
    page = write_report(tmp_path).read_text()
    assert "Return after RL" in page and "-1.5" in page and "+7" in page and "Return per task" in page
    assert "0.0%" not in page and "Success after RL" not in page and "McNemar" not in page


def test_cut_actions_are_counted_reported_and_warned_of(tmp_path):
    env = make_env(CONFIG, 2, auto_reset=False)
    low, high = env.action_low, env.action_high
    assert (low == -1).all() and (high == 1).all()
    env.reset()
    actions = np.zeros((2, 4, env.action_dim), np.float32)
    actions[0, :, 0], actions[1, 3] = 50.0, -3.0
    actions[0, :, 1] = 1.0005  # rounding is no cut
    first, second = env.chunk_step(actions).episodes
    env.close()
    share = 1 / env.action_dim
    assert (first.actions_clipped_fraction, first.actions_max_abs) == (share, 50.0)
    assert (second.actions_clipped_fraction, second.actions_max_abs) == (0.25, 3.0)

    wild = rlinf.evaluate(lambda seen: np.full((len(seen), env.action_dim), 50.0), CONFIG, episodes=3)
    assert wild.actions_clipped_fraction == 1.0 and wild.actions_max_abs == 50.0
    (warning,) = wild.warnings
    assert "100.0% of the action values" in warning and "magnitude: 50" in warning and "normalisation" in warning
    path = wild.to_json(tmp_path / "result.json")
    assert json.loads(path.read_text())["actions_clipped_fraction"] == 1.0
    assert "100.0% (largest: 50)" in write_report(tmp_path).read_text()
    still = rlinf.evaluate(lambda seen: np.zeros((len(seen), env.action_dim)), CONFIG, episodes=3)
    assert still.actions_clipped_fraction == 0.0 and still.warnings == []
    audit = rlinf.audit(lambda seen: np.full((len(seen), env.action_dim), 50.0), CONFIG, episodes=3)
    assert len([warning for warning in audit.warnings if "were clipped" in warning]) == 1
