"""``trainer.on_collapse``: a run whose evaluations collapse ends, or goes back to its best checkpoint with half the learning rate."""

import itertools
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from run_results import QUIET, REACH, differing_weights, give_success, run_config, untimed_metrics, weights_of

from rlinf.commands.train import train
from rlinf.config.schema import RunConfig
from rlinf.errors import ConfigError
from rlinf.preflight.validation import validate
from rlinf.training import evaluator, rl_trainer
from rlinf.training.collapse import RolledBack

RATE = 1e-3
HALVED = (f"trainer.learning_rate={RATE / 2}", "trainer.value_learning_rate=5e-4")
SMALL = [
    *REACH, *QUIET, "env.max_episode_steps=4", "rollout.num_envs=8", "rollout.num_chunks=4", "trainer.minibatch_size=16",
    "model.micro_batch_size=16", "trainer.max_steps=4", "trainer.eval_every=1", f"trainer.learning_rate={RATE}", "trainer.max_keep=-1",
    "trainer.save_every=1", "evaluation.num_episodes=20", "evaluation.num_envs=20", "evaluation.probe=false",
    "algorithm.critic_warmup_steps=0",
]  # fmt: skip


PLUGIN = """
from dataclasses import replace
from rlinf.evaluation.evaluator import evaluate_policy
from rlinf.training import evaluator, rl_trainer

given = iter({rates})


def evaluated(*args, **kwargs):
    result, rate = evaluate_policy(*args, **kwargs), next(given)
    successes = round(rate * len(result.results))
    result.results = [replace(one, success=number < successes) for number, one in enumerate(result.results)]
    return result


evaluator.evaluate_policy = evaluated
"""


def config_of(folder: Path, *overrides: str) -> RunConfig:
    return run_config(folder, *SMALL, *overrides)


@pytest.fixture
def succeed(monkeypatch):
    """``give_success`` of this test."""
    return partial(give_success, monkeypatch)


def state_of(folder: Path, name: str) -> dict:
    return json.loads((folder / "checkpoints" / name / "state.json").read_text())["loop_state"]


def rates_of(folder: Path) -> list[float]:
    return [line["train/learning_rate"] for line in untimed_metrics(folder) if "train/learning_rate" in line]


def assert_equal_weights(one: Path, other: Path, name: str) -> None:
    assert not differing_weights(weights_of(one, name), weights_of(other, name))


@pytest.fixture
def on_ranks(tmp_path, monkeypatch):
    """As ``succeed``, on ranks in processes of their own; returns the override that takes the rates there."""
    monkeypatch.setattr(
        evaluator, "evaluate_policy", evaluator.evaluate_policy
    )  # what the plugin does here ends with the test
    numbers = itertools.count()

    def give(*rates: float) -> str:
        path = tmp_path / f"rates_{next(numbers)}.py"
        path.write_text(PLUGIN.format(rates=rates))
        return f"plugins=[{path}]"

    return give


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_goes_back_to_its_best_checkpoint_with_half_the_rate_as_if_it_were_typed(
    tmp_path, on_ranks, capfd, ranks
):
    own, typed, processes = tmp_path / "own", tmp_path / "typed", f"cluster.num_processes={ranks}"
    rates = on_ranks(0.25, 1.0, 0.0, 0.0, 0.9, 0.95, 0.95)
    train(config_of(own, "trainer.on_collapse=rollback", processes, rates))
    text = capfd.readouterr().err
    assert (
        "collapsed, from 100.0% (20/20) to 0.0% (0/20); rolling back to rl_000001, with a learning rate of 0.0005"
        in text
    )
    assert state_of(own, "rl_000004")["rollbacks"] == 1 and rates_of(own) == [RATE, *[RATE / 2] * 3]
    assert json.loads((own / "summary.json").read_text())["rollbacks"] == 1
    assert (own / "checkpoints" / "superseded_1" / "rl_000002").is_dir(), "what collapsed is kept"
    train(config_of(typed, processes, on_ranks(0.25, 1.0, 0.0, 0.0, 0.0)))
    control = weights_of(typed, "rl_000004")
    first, rates = typed / "checkpoints" / "rl_000001", on_ranks(0.9, 0.95, 0.95)
    train(config_of(typed, f"resume={first}", *HALVED, processes, rates))
    assert_equal_weights(own, typed, "rl_000004")
    assert untimed_metrics(own) == untimed_metrics(typed)
    weights = weights_of(own, "rl_000004")
    assert any(not torch.equal(weights[name], control[name]) for name in weights), (
        "without going back it ends elsewhere"
    )


def test_a_run_that_went_back_and_is_resumed_goes_on_bit_for_bit(tmp_path, succeed):
    succeed(0.25, 1.0, 0.0, 0.0, 0.9, 0.95, 0.95)
    train(config_of(tmp_path, "trainer.on_collapse=rollback"))
    whole, lines = weights_of(tmp_path, "rl_000004"), untimed_metrics(tmp_path)
    succeed(0.95, 0.95)
    train(config_of(tmp_path, "trainer.on_collapse=rollback", f"resume={tmp_path / 'checkpoints' / 'rl_000002'}"))
    again = weights_of(tmp_path, "rl_000004")
    assert all(torch.equal(whole[name], again[name]) for name in whole) and rates_of(tmp_path)[-1] == RATE / 2
    assert untimed_metrics(tmp_path) == lines


def test_a_run_may_go_back_to_the_clone_with_which_rl_began(tmp_path, succeed):
    succeed(1.0, 0.0, 0.0, 1.0, 0.9, 0.9, 0.9, 0.9)
    cloning = ["sft.max_steps=2", "sft.num_demonstrations=4", "sft.batch_size=8"]
    train(config_of(tmp_path, "trainer.on_collapse=rollback", *cloning))
    assert rates_of(tmp_path) == [RATE / 2] * 4 and state_of(tmp_path, "rl_000004")["rollbacks"] == 1


def killed(*_):
    raise KeyboardInterrupt


def test_a_run_that_is_killed_after_it_went_back_has_not_forgotten_it(tmp_path, succeed, monkeypatch, capsys):
    succeed(0.25, 1.0, 0.0, 0.0)
    words = ["trainer.on_collapse=rollback", "trainer.max_steps=9"]
    with monkeypatch.context() as context, pytest.raises(KeyboardInterrupt):
        make = rl_trainer.make_trainer
        context.setattr(
            "rlinf.commands.train.make_trainer",
            lambda parts, *rest: killed() if parts.loop.resumed_from else make(parts, *rest),
        )
        train(config_of(tmp_path, *words))
    assert (tmp_path / "checkpoints" / "superseded_1").is_dir(), (
        "it went back, and was killed before its next checkpoint"
    )
    best = tmp_path / "checkpoints" / "rl_000001"
    for _ in range(2):
        with monkeypatch.context() as context, pytest.raises(KeyboardInterrupt):
            succeed(0.0, 0.0)
            context.setattr(RolledBack, "__init__", killed)  # before later checkpoints are set aside
            train(config_of(tmp_path, *words, f"resume={tmp_path}"))
        assert json.loads((best / "rollbacks.json").read_text()) == {"rollbacks": 2, "learning_rate": RATE}, "once"
    rates = succeed(*[0.0, 0.0] * 2, 0.0)
    train(config_of(tmp_path, *words, f"resume={best}"))
    assert list(rates) == [] and rates_of(tmp_path) == [RATE, RATE / 8, RATE / 8], "three times at most"
    assert "RL learning rate: 0.0005 = 0.001 / 2^1" in capsys.readouterr().out
    succeed(1.0, 1.0)
    train(config_of(tmp_path, "trainer.max_steps=2", f"resume={best}", "trainer.learning_rate=3e-4"))
    assert rates_of(tmp_path) == [RATE, 3e-4] and state_of(tmp_path, "rl_000002")["rollbacks"] == 0, "newly typed"
    assert "RL learning rate" not in capsys.readouterr().out


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_without_cloning_goes_back_to_the_policy_with_which_it_began(tmp_path, on_ranks, ranks):
    own, typed, processes = tmp_path / "own", tmp_path / "typed", f"cluster.num_processes={ranks}"
    rates = on_ranks(1.0, 0.0, 0.0, 1.0, 0.9, 0.9, 0.9)
    train(config_of(own, "trainer.on_collapse=rollback", "trainer.max_keep=1", "trainer.max_steps=3", processes, rates))
    assert rates_of(own) == [RATE / 2] * 3 and state_of(own, "rl_000003")["rollbacks"] == 1
    assert json.loads((own / "summary.json").read_text())["best_checkpoint"]["name"] == "rl_000000"
    few = ["trainer.max_steps=3", *HALVED, processes]
    train(config_of(typed, *few, on_ranks(1.0, 0.9, 0.9, 0.9)))
    assert_equal_weights(own, typed, "rl_000003")
    assert untimed_metrics(own) == untimed_metrics(typed)
    assert not (typed / "checkpoints" / "rl_000000").exists(), "a control: it is kept for nobody else"


def test_a_run_goes_back_three_times_and_then_ends(tmp_path, succeed, capfd):
    rates = succeed(0.25, 1.0, *[0.0, 0.0] * 4, 0.0)
    train(config_of(tmp_path, "trainer.on_collapse=rollback", "trainer.max_steps=9"))
    assert list(rates) == [] and state_of(tmp_path, "rl_000003")["rollbacks"] == 3
    assert "the run ends, and the best checkpoint is rl_000001" in capfd.readouterr().err
    assert rates_of(tmp_path) == [RATE, RATE / 8, RATE / 8]


def test_a_run_that_is_to_stop_ends_with_its_best_checkpoint_named(tmp_path, succeed, capfd):
    succeed(0.25, 1.0, 0.0, 0.0, 0.0)
    train(config_of(tmp_path, "trainer.on_collapse=stop", "trainer.max_steps=9"))
    said = capfd.readouterr()
    assert "from 100.0% (20/20) to 0.0% (0/20); the run ends, and the best checkpoint is rl_000001" in said.err
    assert "best checkpoint: rl_000001" in said.out and rates_of(tmp_path) == [RATE] * 3
    report = (tmp_path / "report.html").read_text()
    assert "certainly did not rise" in report and "it was 100.0% (20/20)" in report


@pytest.mark.parametrize(
    "rates", [(0.25, 1.0, 0.0, 0.8, 0.0), (0.25, 0.3, 0.25, 0.2, 0.0)], ids=["one bad evaluation", "noise"]
)
def test_control_what_is_no_collapse_changes_nothing(tmp_path, succeed, rates):
    succeed(*rates)
    train(config_of(tmp_path, "trainer.on_collapse=stop"))
    assert rates_of(tmp_path) == [RATE] * 4


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["trainer.on_collapse=stop", "trainer.eval_every=0"], "trainer.eval_every=1"),
        (["trainer.on_collapse=rollback", "cluster.num_env_workers=1"], "trainer.on_collapse=stop"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, words, fix):
    with pytest.raises(ConfigError, match=fix):
        validate(config_of(tmp_path, *words))


def test_a_head_ends_and_does_not_go_back(tmp_path):
    words = [word for word in SMALL if not word.startswith(("trainer.", "algorithm."))]
    config = run_config(tmp_path, *words, "algorithm=sac", "trainer.eval_every=1", "trainer.on_collapse=rollback")
    with pytest.raises(ConfigError, match="trainer.on_collapse=stop"):
        validate(config)
