"""Training while processes play the next rollouts: the numbers of a run that does one thing after the other, with older weights."""

import copy
import json
import signal
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from run_results import QUIET, REACH, check_staleness, note_trained, run_config, untimed_metrics, weights_of

import rlinf.rollout.process_collector as process_collector
from rlinf.commands.train import build
from rlinf.errors import ParityError, RLinfError
from rlinf.training.stop_signal import StopRequested

SMALL = [
    *REACH, *QUIET, "env.max_episode_steps=6", "rollout.num_envs=8", "rollout.num_chunks=6", "rollout.group_size=2",
    "rollout.pipeline_stages=1", "trainer.minibatch_size=16", "trainer.max_steps=5", "trainer.learning_rate=1e-3",
    "trainer.adam_eps=1e-3", "evaluation.num_episodes=2", "evaluation.num_envs=2", "evaluation.probe=false",
]  # fmt: skip
PPO = ["algorithm.critic_warmup_steps=0"]
GRPO = ["algorithm=grpo", "algorithm.max_resamples=2", "algorithm.kl_coef=0.01", "rollout.auto_reset=false"]


def ahead(staleness: int, *more: str) -> list[str]:
    processes = ["rollout.pipeline_stages=null", "rollout.worker_processes=1", f"cluster.max_staleness={staleness}"]
    return [*SMALL, *processes, *more, *["algorithm.tis_cap=2.0"] * (staleness > 0)]


def finish(run) -> dict[str, torch.Tensor]:
    """Run, with GRPO so that the second group must be played again; return the weights at the end."""

    def second_group(batch):
        return batch.group_ids[0] == 1  # groups of another attempt have other ids

    if run.parts.config.algorithm.name == "grpo":
        run.rl.algorithm.uninformative_envs = second_group
    run.execute()
    return {name: tensor.clone() for name, tensor in run.parts.worker.model.state_dict().items()}


def lines_of(folder) -> list[dict]:
    """The metrics of the iterations."""
    return [line for line in untimed_metrics(folder) if "train/loss" in line]


def delayed(folder, staleness: int, *more: str) -> dict[str, torch.Tensor]:
    """Train as an asynchronous run does, but play each rollout in this process when it is taken, with a copy of the policy."""
    run, copies = build(run_config(folder, *SMALL, *more, "algorithm.tis_cap=2.0")), {}
    run.parts.config.cluster.max_staleness = staleness

    def submit(model, step, *arguments):
        policy = copies.setdefault(step, copy.deepcopy(model).eval())
        return partial(run.rl.collector.collect, policy, step, *arguments)

    run.rl.collector.submit = submit
    return finish(run)


@pytest.mark.parametrize(("staleness", "more"), [(1, PPO), (2, PPO), (2, GRPO)])
def test_the_numbers_are_those_of_one_thing_after_the_other_with_older_weights(tmp_path, staleness, more):
    """With dynamic sampling and a KL penalty, too; bit for bit. Every rollout is trained on, once."""
    taken, run = [], build(run_config(tmp_path / "ahead", *ahead(staleness, *more)))
    take = run.rl.collector.result
    run.rl.collector.result = lambda pending: (taken.append(pending), take(pending))[1]
    weights = finish(run)
    expected = delayed(tmp_path / "delayed", staleness, *more)
    assert weights.keys() == expected.keys() and all(torch.equal(weights[name], expected[name]) for name in weights)
    lines = lines_of(tmp_path / "ahead")
    assert lines == lines_of(tmp_path / "delayed")
    assert [line["rollout/staleness_iterations"] for line in lines] == [min(step, staleness) for step in range(5)]
    assert [pending for pending in taken if pending[1] == 0] == [(step, 0) for step in range(5)]
    assert any(pending[1] for pending in taken) == (more is GRPO), "groups were played again"
    assert max(line["rollout/importance_ratio_max"] for line in lines) > 1.01, "control: the weights were older"
    if staleness == 2:
        other = delayed(tmp_path / "other", 0, *more)
        assert not all(torch.equal(weights[name], other[name]) for name in weights), "control"


class Whole(NamedTuple):
    """A run without an interruption: its folder, its checkpoint of step 3, and what ``note_trained`` has noted of it."""

    folder: Path
    first: Path
    trained: list


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """``whole(staleness)`` trains once."""
    made = {}

    def run(staleness):
        if staleness not in made:
            folder = tmp_path_factory.mktemp("whole")
            overrides = ahead(staleness, *PPO, "trainer.save_every=3", "trainer.max_keep=-1")
            with pytest.MonkeyPatch.context() as patch:
                trained = note_trained(patch)
                finish(build(run_config(folder, *overrides)))
            made[staleness] = Whole(folder, folder / "checkpoints" / "rl_000003", trained)
        return made[staleness]

    return run


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_the_age_of_each_sample_is_the_limit_and_none_is_lost(whole, staleness):
    trained = whole(staleness).trained
    check_staleness(trained, staleness)
    with pytest.raises(AssertionError):
        check_staleness(trained, staleness + 1)
    with pytest.raises(AssertionError):
        check_staleness([*trained[:2], *trained[1:]], staleness)


def stopped_at_once(folder, *overrides):
    """Resume a run that is asked to stop before its first iteration; return its checkpoint."""
    run = build(run_config(folder, *overrides))
    run.loop.stop_signal.number = signal.SIGTERM
    with pytest.raises(StopRequested, match="after step 3"):
        run.execute()
    return folder / "checkpoints" / "rl_000003"


@pytest.mark.parametrize("staleness", [1, 2])
def test_a_resumed_run_plays_what_was_under_way_with_the_weights_of_then(tmp_path, whole, staleness):
    """Bit for bit as the run that was not interrupted; also if it was stopped right at its start and resumed again."""
    folder, first, _ = whole(staleness)
    state = json.loads((first / "state.json").read_text())["loop_state"]
    under_way = [(each["step"], each["issued_at"]) for each in state["rollouts_ahead"]]
    assert under_way == [(3, 2)] * (staleness == 1) + [(3, 1), (4, 2)] * (staleness == 2)
    second = stopped_at_once(tmp_path, *ahead(staleness, *PPO, f"resume={first}"))
    resumed = finish(build(run_config(tmp_path, *ahead(staleness, *PPO, f"resume={second}"))))
    weights = weights_of(folder, "rl_000005")
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)
    assert lines_of(folder)[3:] == lines_of(tmp_path)
    last = folder / "checkpoints" / "rl_000005"
    assert json.loads((last / "state.json").read_text())["loop_state"]["rollouts_ahead"] == []


def test_a_run_resumed_with_a_smaller_limit_plays_with_the_weights_of_the_checkpoint(tmp_path, whole):
    """No rollout may be as old as those under way are. A checkpoint that it saves does not have them."""
    folder, first, _ = whole(2)
    second = stopped_at_once(tmp_path, *ahead(1, *PPO, f"resume={first}"))
    other = finish(build(run_config(tmp_path, *ahead(2, *PPO, f"resume={second}"))))
    assert [line["rollout/staleness_iterations"] for line in lines_of(tmp_path)] == [0, 1]
    weights = weights_of(folder, "rl_000005")
    assert not all(torch.equal(weights[name], other[name]) for name in weights), "control: the weights of then matter"


def stale_weights(monkeypatch):
    """The processes continue with the weights that they had."""
    copy_tensors = process_collector._copy_tensors

    def copy_once(source, target):
        if not hasattr(target, "was_copied"):
            target.was_copied = True
            copy_tensors(source, target)

    monkeypatch.setattr(process_collector, "_copy_tensors", copy_once)


def wrong_number(monkeypatch):
    """One log-probability of each policy call is wrong from the second rollout on."""
    take = process_collector.ProcessCollector.result

    def wrong(self, pending):
        batch = take(self, pending)
        if pending[0]:
            batch.rollout_logprobs[..., 1] += 0.02
        return batch

    monkeypatch.setattr(process_collector.ProcessCollector, "result", wrong)


@pytest.mark.parametrize(("fault", "step"), [(stale_weights, 2), (wrong_number, 1)])
def test_the_parity_gate_finds_faults_in_rollouts_of_older_weights(tmp_path, monkeypatch, fault, step):
    """Though these differ from the trained weights by more (the control of the first test)."""
    fault(monkeypatch)
    with pytest.raises(ParityError, match=f"differ by .* at step {step}"):
        finish(build(run_config(tmp_path, *ahead(1, *PPO, "trainer.max_steps=3"))))


def test_a_rollout_of_another_version_is_refused(tmp_path):
    run = build(run_config(tmp_path, *ahead(1, *PPO)))
    submit = run.rl.collector.submit
    run.rl.collector.submit = lambda model, step, version, *more: submit(model, step, version + (step == 2), *more)
    with pytest.raises(RLinfError, match="rollout of step 2 used weights .*; expected weights"):
        finish(run)
