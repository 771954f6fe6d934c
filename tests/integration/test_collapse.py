"""``trainer.on_collapse``: a run whose evaluations collapse ends, or goes back to its best checkpoint with half the learning rate."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from run_results import run_config, untimed_metrics, weights_of

from rlinf.commands.train import train
from rlinf.config.schema import RunConfig
from rlinf.errors import ConfigError
from rlinf.preflight.validation import validate
from rlinf.training import evaluator

RATE = 1e-3
SMALL = [
    "model=mlp", "env=tabletop", "env.tasks=[reach]", "env.cameras=[]", "env.max_episode_steps=4", "rollout.num_envs=8",
    "rollout.num_chunks=4", "trainer.minibatch_size=16", "model.micro_batch_size=16", "trainer.max_steps=4", "trainer.eval_every=1",
    f"trainer.learning_rate={RATE}", "trainer.max_keep=-1", "trainer.save_every=1", "evaluation.num_episodes=20",
    "evaluation.num_envs=20", "evaluation.num_videos_per_task=0", "evaluation.probe=false", "tracking.tensorboard=false",
    "tracking.progress=false", "cluster.num_threads=1", "algorithm.critic_warmup_steps=0",
]  # fmt: skip


def config_of(folder: Path, *overrides: str) -> RunConfig:
    return run_config(folder, *SMALL, *overrides)


@pytest.fixture
def succeed(monkeypatch):
    """Let the evaluations of the next runs succeed at these rates, one after the other, and count those that are left."""
    evaluate = evaluator.evaluate_policy

    def give(*rates: float):
        given = iter(rates)

        def evaluated(*args, **kwargs):
            result, rate = evaluate(*args, **kwargs), next(given)
            successes = round(rate * len(result.results))
            result.results = [replace(one, success=number < successes) for number, one in enumerate(result.results)]
            return result

        monkeypatch.setattr(evaluator, "evaluate_policy", evaluated)
        return given

    return give


def state_of(folder: Path, name: str) -> dict:
    return json.loads((folder / "checkpoints" / name / "state.json").read_text())["loop_state"]


def rates_of(folder: Path) -> list[float]:
    return [line["train/learning_rate"] for line in untimed_metrics(folder) if "train/learning_rate" in line]


def assert_equal_weights(one: Path, other: Path, name: str) -> None:
    left, right = weights_of(one, name), weights_of(other, name)
    assert left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_goes_back_to_its_best_checkpoint_with_half_the_rate_as_if_it_were_typed(tmp_path, succeed, capfd, ranks):
    processes = f"cluster.num_processes={ranks}"
    rates = succeed(0.25, 1.0, 0.0, 0.0, 0.9, 0.95, 0.95)
    train(config_of(tmp_path / "own", "trainer.on_collapse=rollback", processes))
    if ranks == 1:  # each rank has its own iterator
        assert list(rates) == []
    text = capfd.readouterr().err
    assert (
        "collapsed, from 100.0% (20/20) to 0.0% (0/20); the run goes back to rl_000001, with a learning rate of 0.0005"
        in text
    )
    assert state_of(tmp_path / "own", "rl_000004")["rollbacks"] == 1 and rates_of(tmp_path / "own") == [
        RATE,
        *[RATE / 2] * 3,
    ]
    assert json.loads((tmp_path / "own" / "summary.json").read_text())["rollbacks"] == 1
    assert (tmp_path / "own" / "checkpoints" / "superseded_1" / "rl_000002").is_dir(), "what collapsed is kept"
    succeed(0.25, 1.0, 0.0, 0.0, 0.0)
    train(config_of(tmp_path / "typed", processes))
    control = weights_of(tmp_path / "typed", "rl_000004")
    succeed(0.9, 0.95, 0.95)
    first = tmp_path / "typed" / "checkpoints" / "rl_000001"
    train(config_of(tmp_path / "typed", f"resume={first}", f"trainer.learning_rate={RATE / 2}", processes))
    assert_equal_weights(tmp_path / "own", tmp_path / "typed", "rl_000004")
    assert untimed_metrics(tmp_path / "own") == untimed_metrics(tmp_path / "typed")
    own = weights_of(tmp_path / "own", "rl_000004")
    assert any(not torch.equal(own[name], control[name]) for name in own), "without going back it ends elsewhere"


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
    assert "The policy succeeded in 100.0% (20/20)" in (tmp_path / "report.html").read_text()


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
        (["trainer.on_collapse=rollback", "cluster.env_nodes=1"], "trainer.on_collapse=stop"),
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
