"""Ranks that differ: one has no row of a minibatch, starts with other weights, or holds the numbers that are not finite."""

import json
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from run_results import REACH, gap, run_config

from rlinf.commands import train as train_module
from rlinf.commands.train import build
from rlinf.distributed.config import DeadlinesConfig
from rlinf.distributed.deadlines import deadline
from rlinf.distributed.launch import launch
from rlinf.distributed.parallel import full_tensor
from rlinf.distributed.process_group import rank, world_size
from rlinf.errors import ConfigError, NonFiniteError
from rlinf.models.embodiment.mlp_action_model import MLPForRLActionPrediction

SMALL = [
    *REACH, "env.max_episode_steps=6", "rollout.num_envs=8", "rollout.num_chunks=6", "trainer.minibatch_size=16",
    "trainer.adam_eps=1e-3", "tracking.tensorboard=false", "tracking.progress=false", "evaluation.probe=false", "cluster.num_threads=1",
]  # fmt: skip
GRPO = ["algorithm=grpo", "rollout.group_size=2", "rollout.auto_reset=false"]


def built(folder: Path, *overrides: str):
    folder.mkdir(exist_ok=True)
    if "trainer.sharding=fsdp2" in overrides:
        MLPForRLActionPrediction.fsdp_wrap_modules = ("Linear",)
    return build(run_config(folder, *SMALL, f"cluster.num_processes={world_size()}", *overrides))


def on_two_ranks(function, argument) -> None:
    deadlines = asdict(DeadlinesConfig(update=60, rollout=60))
    launch(function, argument, 2, "cpu", deadlines=deadlines)


def weights(run) -> dict[str, torch.Tensor]:
    return {name: full_tensor(p.detach()).clone() for name, p in run.parts.worker.model.named_parameters()}


def train_with_equal_last_groups(argument: tuple[Path, str, float]) -> None:
    """Take one iteration in which the second half of the envs, those of rank 1 of 2, has few rows and no return that differs.

    The gradient of the loss is multiplied by a factor; if that is 0, every rank must reject it.
    """
    folder, sharding, factor = argument
    name = f"run {sharding} {factor} {world_size()}"
    run = built(folder / name, *GRPO, f"trainer.sharding={sharding}", "model.val_micro_batch_size=5")
    algorithm, first = run.rl.algorithm, run.rl.collector.env_groups.start
    compute, score, loss_of, rows = algorithm.compute_advantages, run.rl._score, algorithm.loss, []

    def score_fewer(batch):
        envs = torch.arange(batch.loss_mask.shape[1]) + 2 * first
        batch.loss_mask[1:, envs >= 4] = False  # fewer passes through the model than on rank 0
        score(batch)

    def scaled(*arguments):
        output = loss_of(*arguments)
        return replace(output, loss=factor * output.loss)

    def equal_returns(batch):
        num_envs = batch.action_rewards.shape[1]
        envs = torch.arange(num_envs) + 2 * first
        batch.action_rewards += 0.1 * envs[:, None]  # no other group has equal returns
        batch.action_rewards[:, envs >= 4] = 0
        metrics = compute(batch)
        rows.append(int(batch.loss_mask.sum()))
        return metrics

    algorithm.compute_advantages, run.rl._score, algorithm.loss = equal_returns, score_fewer, scaled
    before = weights(run)
    run.rl.sync.push(0)
    rejected = nullcontext() if factor else pytest.raises(ConfigError, match="No gradient reaches the policy")
    with deadline("update"), rejected:
        loss = run.rl.iteration(0)["train/loss"]
    run.close()
    if not factor:
        return
    found = {"rows": rows, "loss": loss, "before": before, "after": weights(run)}
    torch.save(found, folder / f"{sharding} {rank()} of {world_size()}")


@pytest.mark.parametrize("sharding", ["replicate", "fsdp2"])
def test_a_rank_without_a_row_of_any_minibatch_takes_the_steps_of_one_process(tmp_path, sharding):
    train_with_equal_last_groups((tmp_path, "replicate", 1.0))
    on_two_ranks(train_with_equal_last_groups, (tmp_path, sharding, 1.0))
    one = torch.load(tmp_path / "replicate 0 of 1")
    ranks = [torch.load(tmp_path / f"{sharding} {r} of 2") for r in (0, 1)]
    assert ranks[0]["rows"] == one["rows"] and one["rows"][0] > 0 and ranks[1]["rows"] == [0]
    assert max(gap(one["after"][name], tensor) for name, tensor in one["before"].items()) > 1e-4  # it has learnt
    for found in ranks:
        assert found["loss"] == pytest.approx(one["loss"], abs=1e-5)
        for name, tensor in found["after"].items():
            assert gap(tensor, one["after"][name]) < 1e-5, name


def test_a_loss_without_a_gradient_is_refused_by_a_rank_that_has_no_row_too(tmp_path):
    on_two_ranks(train_with_equal_last_groups, (tmp_path, "replicate", 0.0))


def play_the_last_group_again(folder: Path) -> None:
    """Take one iteration in which the first episodes of the last group, on rank 1 of 2, teach nothing."""
    run = built(folder / f"run {world_size()}", *GRPO, "algorithm.max_resamples=2")
    run.rl.algorithm.uninformative_envs = lambda batch: batch.group_ids[0] == 3
    run.rl.sync.push(0)
    with deadline("rollout"):
        metrics = run.rl.iteration(0)
    run.close()
    (folder / f"{rank()} of {world_size()}.json").write_text(json.dumps(metrics))


def test_a_group_of_one_rank_is_played_again_and_counted_on_all(tmp_path):
    """Ten episodes of six steps: two in each of four groups, and the last group again."""
    play_the_last_group_again(tmp_path)
    on_two_ranks(play_the_last_group_again, tmp_path)
    one, *ranks = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("0 of 1", "0 of 2", "1 of 2"))
    assert one["rollout/num_episodes"] == 10 and one["rollout/env_steps_total"] == 60
    names = [name for name in one if name.split("/")[0] in ("rollout", "train")]
    for found in ranks:
        assert {name: found[name] for name in names} == pytest.approx({name: one[name] for name in names}, abs=1e-5)


def begin_apart(folder: Path) -> None:
    """Build runs whose ranks draw their weights under other seeds, and whose fingerprint on rank 0 moves torch's generator."""
    generators, own = [], train_module.policy_for

    def fingerprint(_env):
        torch.manual_seed(7)
        return {}

    def policy(*arguments, **settings):
        generators.append(torch.get_rng_state())
        torch.manual_seed(rank())
        return own(*arguments, **settings)

    cases = {"replicate": "replicate", "fsdp2": "fsdp2", "control": "replicate"}
    cases = {"one": "replicate"} if world_size() == 1 else cases
    found = {}
    with mock.patch.multiple(train_module, policy_for=policy, take_fingerprint=fingerprint):
        for case, sharding in cases.items():
            if case == "control":
                train_module.take_weights_of_rank_0 = lambda model: None  # in a process of this launch only
            run = built(folder / f"{case} {world_size()}", "evaluation.probe=true", f"trainer.sharding={sharding}")
            found[case] = weights(run)
            run.close()
    torch.save((found, generators), folder / f"started {rank()} of {world_size()}")


def test_all_ranks_begin_with_the_weights_of_rank_0(tmp_path):
    begin_apart(tmp_path)
    on_two_ranks(begin_apart, tmp_path)
    expected = torch.load(tmp_path / "started 0 of 1")[0]["one"]
    (first, its_states), (second, other_states) = (torch.load(tmp_path / f"started {r} of 2") for r in (0, 1))
    assert all(torch.equal(*states) for states in zip(its_states, other_states, strict=True))
    for case in ("replicate", "fsdp2"):
        for found in (first[case], second[case]):
            assert all(torch.equal(found[name], tensor) for name, tensor in expected.items()), case
    assert any(not torch.equal(second["control"][name], tensor) for name, tensor in expected.items())


def clone_until_the_limit(folder: Path) -> None:
    """Clone with a clock that counts 600 s for each step of rank 0, and 400 s for each of rank 1."""
    limit = ["sft.max_steps=1", "sft.time_limit_s=1000", "sft.num_demonstrations=2", "sft.batch_size=4"]
    run = built(folder / f"run {world_size()}", *limit)
    update, state = run.parts.worker.sft_update, run.loop.state

    def timed(*arguments):
        state.train_wall_s += 400 if rank() else 600
        return update(*arguments)

    run.parts.worker.sft_update = timed
    run.loop.fit(run.cloning)
    run.close()
    (folder / f"steps {rank()} of {world_size()}").write_text(str(state.sft_step))


def test_ranks_clone_until_the_time_of_all_is_over(tmp_path):
    """Rank 0 is beyond 1000 s after two steps, rank 1 after three: both take three, and a single process two."""
    clone_until_the_limit(tmp_path)
    on_two_ranks(clone_until_the_limit, tmp_path)
    steps = {path.name: path.read_text() for path in tmp_path.glob("steps *")}
    assert steps == {"steps 0 of 1": "2", "steps 0 of 2": "3", "steps 1 of 2": "3"}


def spoil_rank_1(folder: Path) -> None:
    short = ["evaluation.num_episodes=2", "evaluation.num_envs=4", "evaluation.num_videos_per_task=0"]
    run = built(folder, *GRPO, *short, "trainer.max_steps=1", "sft.max_steps=0", "trainer.minibatch_size=48")
    compute = run.rl.algorithm.compute_advantages

    def spoilt(batch):
        batch.action_rewards += 0.1 * torch.arange(batch.action_rewards.shape[1])[:, None]  # no group of equal returns
        metrics = compute(batch)
        if rank() == 1:
            batch.advantages.fill_(float("nan"))
        return metrics

    run.rl.algorithm.compute_advantages = spoilt
    run.execute()


def test_the_batch_of_the_rank_that_holds_nan_is_kept(tmp_path):
    with pytest.raises(NonFiniteError, match=r"The batch itself contains non-finite values \(advantages\)") as caught:
        on_two_ranks(spoil_rank_1, tmp_path)
    assert "Report of the batch" in str(caught.value)
    report = json.loads((tmp_path / "failed_batch" / "report.json").read_text())
    assert report["rank"] == 1 and report["tensors"]["advantages"]["num_not_finite"] > 0
    assert torch.load(tmp_path / "failed_batch" / "tensors.pt")["advantages"].isnan().all()
