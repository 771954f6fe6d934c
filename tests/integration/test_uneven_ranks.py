"""Ranks that differ: one has no row of a minibatch, begins with other weights, or holds the numbers that are not finite."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from run_results import gap, run_config

from rlinf.commands.train import build
from rlinf.distributed.launch import launch
from rlinf.distributed.parallel import full_tensor
from rlinf.distributed.process_group import rank, world_size
from rlinf.models.embodiment.mlp_action_model import MLPForRLActionPrediction

SMALL = [
    "model=mlp", "env=tabletop", "env.tasks=[reach]", "env.cameras=[]", "env.max_episode_steps=6", "rollout.num_envs=8",
    "rollout.num_chunks=6", "trainer.minibatch_size=16", "trainer.adam_eps=1e-3", "tracking.tensorboard=false",
    "tracking.progress=false", "evaluation.probe=false", "cluster.num_threads=1",
]  # fmt: skip
GRPO = ["algorithm=grpo", "rollout.group_size=2", "rollout.auto_reset=false"]


def built(folder: Path, *overrides: str):
    folder.mkdir(exist_ok=True)
    if "trainer.sharding=fsdp2" in overrides:
        MLPForRLActionPrediction.fsdp_wrap_modules = ("Linear",)
    return build(run_config(folder, *SMALL, f"cluster.num_processes={world_size()}", *overrides))


def weights(run) -> dict[str, torch.Tensor]:
    return {name: full_tensor(p.detach()).clone() for name, p in run.session.worker.model.named_parameters()}


def train_with_equal_last_groups(argument: tuple[Path, str]) -> None:
    """Take one iteration in which the second half of the envs, those of rank 1 of 2, has no return that differs."""
    folder, sharding = argument
    run = built(folder / f"run {sharding} {world_size()}", *GRPO, f"trainer.sharding={sharding}")
    algorithm, first = run.rl.algorithm, run.rl.collector.blocks.start
    compute, rows = algorithm.compute_advantages, []

    def equal_returns(batch):
        num_envs = batch.action_rewards.shape[1]
        envs = torch.arange(num_envs) + 2 * first
        batch.action_rewards += 0.1 * envs[:, None]  # no other group has equal returns
        batch.action_rewards[:, envs >= 4] = 0
        metrics = compute(batch)
        rows.append(int(batch.loss_mask.sum()))
        return metrics

    algorithm.compute_advantages = equal_returns
    before = weights(run)
    run.rl.sync.push(0)
    loss = run.rl.iteration(0)["train/loss"]
    found = {"rows": rows, "loss": loss, "before": before, "after": weights(run)}
    run.rl.collector.close()
    run.session.close()
    torch.save(found, folder / f"{sharding} {rank()} of {world_size()}")


@pytest.mark.parametrize("sharding", ["replicate", "fsdp2"])
def test_a_rank_without_a_row_of_any_minibatch_takes_the_steps_of_one_process(tmp_path, sharding):
    train_with_equal_last_groups((tmp_path, "replicate"))
    launch(train_with_equal_last_groups, (tmp_path, sharding), 2, "cpu")
    one = torch.load(tmp_path / "replicate 0 of 1")
    ranks = [torch.load(tmp_path / f"{sharding} {r} of 2") for r in (0, 1)]
    assert ranks[0]["rows"] == one["rows"] and one["rows"][0] > 0 and ranks[1]["rows"] == [0]
    assert max(gap(one["after"][name], tensor) for name, tensor in one["before"].items()) > 1e-4  # it has learnt
    for found in ranks:
        assert found["loss"] == pytest.approx(one["loss"], abs=1e-5)
        for name, tensor in found["after"].items():
            assert gap(tensor, one["after"][name]) < 1e-5, name
