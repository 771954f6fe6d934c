"""The numbers of benchmarks/golden.py: interquartile means, intervals, and the verdict; and whose settings the other library gets."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

PATH = Path(__file__).parents[2] / "benchmarks" / "golden.py"


@pytest.fixture(scope="module")
def golden():
    spec = importlib.util.spec_from_file_location("golden", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules["golden"] = module
    spec.loader.exec_module(module)
    return module


def row(task: str, library: str, seed: int, before: float, after: float) -> dict:
    curve = [[0, before], [10, (before + after) / 2], [20, after]]
    return {
        "task": task,
        "algorithm": "sac",
        "library": library,
        "seed": seed,
        "steps": 20,
        "curve": curve,
        "wall_s": 1.0,
        "cpu_s": 1.0,
    }


def test_interquartile_mean_and_interval_by_hand(golden):
    assert golden.interquartile_mean(np.array([100.0, 2, 3, 4, -50, 5, 1, 6])) == pytest.approx((2 + 3 + 4 + 5) / 4)
    assert golden.interquartile_mean(np.array([1.0, 2, 6])) == 3  # too few to leave any out
    assert golden.with_interval([[5.0], [7.0]]) == (6.0, 6.0, 6.0)  # each task keeps its fraction of every sample
    mean, low, high = golden.with_interval([[0.0, 1.0] * 8])
    assert mean == 0.5 and 0.0 <= low < 0.5 < high <= 1.0


def test_the_verdict_counts_from_the_return_before_training(golden):
    rows = [row("hopper", "ours", 0, 10, 110), row("hopper", "sb3", 0, 10, 60)]
    assert golden.verdict(rows)["ratio"] == 2.0
    rows += [row("pendulum", "ours", 0, -1200, -200), row("pendulum", "sb3", 0, -1200, -200)]
    assert golden.verdict(rows)["ours"] == 1.5  # negative returns count alike
    assert golden.verdict(rows[:1])["ratio"] is None and golden.area(rows[0]) == 85
    assert golden.table(rows).count("\n") == 5


@pytest.mark.parametrize(("task", "algorithm"), [("pendulum", "sac"), ("pendulum", "td3"), ("pendulum", "ppo")])
def test_the_other_library_takes_our_settings(golden, task, algorithm):
    sb3 = pytest.importorskip("stable_baselines3", reason="needs stable-baselines3, which the extra dev installs")
    config = golden.configured(golden.overrides_of(task, algorithm, 3, 5000))
    settings = golden.SETTINGS[algorithm](config)
    model = getattr(sb3, algorithm.upper())("MlpPolicy", "Pendulum-v1", seed=config.seed, device="cpu", **settings)
    assert model.gamma == config.algorithm.gamma and model.batch_size in (
        getattr(config.algorithm, "batch_size", None),
        config.trainer.minibatch_size,
    )
    widths = {each.shape[0] for name, each in model.policy.named_parameters() if name.endswith(".0.weight")}
    assert widths == {getattr(config.algorithm, "actor", None).hidden_size if algorithm != "ppo" else 64}
