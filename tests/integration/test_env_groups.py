"""The number of ranks changes no number of a rollout: its advantages and minibatches on 1, 2 and 4 ranks (runs: test_ranks_equal_one.py)."""

import re
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
import torch
from rollout_batches import select_envs
from run_results import QUIET, run_config

from rlinf.algorithms import ALGORITHMS
from rlinf.algorithms.base import LossCounts
from rlinf.commands.train import build
from rlinf.distributed.launch import launch
from rlinf.distributed.process_group import rank, rank_range, world_size
from rlinf.errors import ConfigError, ParityError
from rlinf.optim.reference import Reference
from rlinf.preflight.derived import parity_gate
from rlinf.training import train_worker
from rlinf.training.rl_trainer import check_equal_on_ranks, rollout_metrics
from rlinf.training.train_worker import MinibatchPlan

SMALL = [
    *QUIET, "env.tasks=[reach]", "env.max_episode_steps=6", "rollout.num_envs=8", "rollout.num_chunks=6", "trainer.minibatch_size=16",
    "model.micro_batch_size=4", "trainer.max_steps=3", "trainer.eval_every=0", "sft.max_steps=0", "evaluation.num_episodes=2",
    "evaluation.num_envs=4", "evaluation.probe=false", "trainer.adam_eps=1e-3",
]  # fmt: skip
RUNS = {
    "quickstart": ["experiment=quickstart", "algorithm.critic_warmup_steps=1"],
    "quickstart_grpo": ["experiment=quickstart_grpo", "rollout.group_size=2", "algorithm.update_epochs=2"],
    "pi0_tiny": ["experiment=tabletop_pi0_tiny", "algorithm.critic_warmup_steps=0"],
    "rloo": ["experiment=quickstart_rloo", "rollout.group_size=2", "algorithm.normalize_advantages=true"],
    "reinforce_pp": ["model=mlp", "env.cameras=[]", "algorithm=reinforce_pp", "algorithm.kl_coef=0.1", "rollout.auto_reset=false"],
}  # fmt: skip
FAULTS = ("a mean of each rank", "env groups numbered on each rank")


def config_of(folder: Path, name: str, *more: str):
    return run_config(folder, *RUNS[name], *SMALL, *more)


def planted(fault: str | None) -> ExitStack:
    """Return the context in which a fault is there."""
    stack = ExitStack()
    if fault == FAULTS[0]:
        stack.enter_context(mock.patch("rlinf.algorithms.advantages.sum_env_groups", lambda own: own.cumsum(0)[-1]))
    elif fault == FAULTS[1]:
        first = rank_range(4, rank(), world_size()).start
        derive = train_worker.derive_seed
        local = lambda seed, number, env_group: derive(seed, number, env_group - first)  # noqa: E731
        stack.enter_context(mock.patch.object(train_worker, "derive_seed", local))
    return stack


def use(argument: tuple[Path, tuple[tuple[str, str | None], ...]]) -> None:
    """Use the recorded rollouts on this rank, and save what the ranks must agree on."""
    folder, cases = argument
    for name, fault in cases:
        config, whole = torch.load(folder / f"{name}.pt", weights_only=False)
        rollout, num_envs = config.rollout, config.rollout.num_envs // world_size()
        envs = range(rank() * num_envs, (rank() + 1) * num_envs)
        batch = select_envs(whole, torch.tensor(envs))
        batch.episodes = [(env, result) for env, result in batch.episodes if env in envs]
        with planted(fault):
            algorithm = ALGORITHMS.get(config.algorithm.name)(config.algorithm)
            metrics = parity_gate(config).check(batch, 0) | rollout_metrics(batch) | algorithm.compute_advantages(batch)
            env_groups = rank_range(rollout.num_envs // rollout.group_size, rank(), world_size())
            plan = MinibatchPlan(batch.loss_mask, env_groups, config.trainer.minibatch_size, seed=5)
            epochs = [list(plan.epoch(epoch)) for epoch in range(2)]
        flat, rows = batch.flatten(), [each.rows for epoch in epochs for each in epoch]
        counts = [LossCounts.of(flat.select(index), config.algorithm).over_ranks() for index in rows]
        found = {
            "tensors": {key: getattr(batch, key) for key in ("advantages", "returns", "loss_mask")},
            "minibatches": [
                [(row // num_envs, row % num_envs + envs.start) for row in index.tolist()] for index in rows
            ],
            "most": [each.max_rows for epoch in epochs for each in epoch],
            "counts": counts,
            "metrics": metrics,
        }
        torch.save(found, folder / f"{name} {fault} {rank()} of {world_size()}")


def joined(folder: Path, name: str, ranks: int, fault: str | None = None):
    """Return tensors of all ranks, (call, env) of the rows of each minibatch, and counts and metrics of each rank."""
    parts = [torch.load(folder / f"{name} {fault} {r} of {ranks}", weights_only=False) for r in range(ranks)]
    tensors = {key: torch.cat([part["tensors"][key] for part in parts], 1) for key in parts[0]["tensors"]}
    rows = [sum(shares, []) for shares in zip(*(part["minibatches"] for part in parts), strict=True)]
    most = [max(map(len, shares)) for shares in zip(*(part["minibatches"] for part in parts), strict=True)]
    assert all(part["most"] == most for part in parts)
    return tensors, rows, [part["counts"] for part in parts], [part["metrics"] for part in parts]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    """Each experiment's rollout of one process, scored, and what is made of it on 1, 2 and 4 ranks."""
    folder = tmp_path_factory.mktemp("recorded")
    for name in RUNS:
        config = config_of(folder / name, name)
        run = build(config)
        run.rl.reference = Reference(run.parts.worker.model)
        run.rl.rollouts.submit(0, 0)
        batch = run.rl.rollouts.collect(0)
        run.rl._score(batch)
        run.close()
        batch.loss_mask[3:, 1] = False  # one env has fewer rows than the others
        batch.truncated[2, 1] = True
        if batch.rollout_values is None:
            batch.action_rewards += 0.1 * torch.arange(8.0)[:, None]  # no group of equal returns
        torch.save((config, batch), folder / f"{name}.pt")
    plain = tuple((name, None) for name in RUNS)
    use((folder, plain))
    faults = (("quickstart", FAULTS[0]), ("rloo", FAULTS[0]), ("quickstart_grpo", FAULTS[1]))
    for ranks in (2, 4):
        launch(use, (folder, plain + (faults if ranks == 2 else ())), ranks, "cpu")
    return folder


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", RUNS)
def test_advantages_and_minibatches_of_one_rollout_have_the_same_bits_on_any_number_of_ranks(recorded, name, ranks):
    tensors, rows, (counts,), (metrics,) = joined(recorded, name, 1)
    assert tensors["advantages"].unique().numel() > 2 and metrics["rollout/num_episodes"] == 8
    first, second = sum(rows[:3], []), sum(rows[3:], [])
    assert first != second and sorted(first) == sorted(second) and max(map(len, rows)) <= 16
    other, other_rows, other_counts, other_metrics = joined(recorded, name, ranks)
    for key, tensor in tensors.items():
        assert torch.equal(other[key], tensor), key
    assert other_rows == rows
    assert other_counts == [counts] * ranks
    assert all(each == other_metrics[0] for each in other_metrics)
    assert other_metrics[0] == pytest.approx(metrics, rel=1e-12, abs=1e-12)  # vectors and single numbers have other exp


@pytest.mark.parametrize("name", ["quickstart", "rloo"])
def test_control_a_normalisation_of_each_rank_is_seen(recorded, name):
    tensors, rows, _, _ = joined(recorded, name, 1)
    other, other_rows, _, _ = joined(recorded, name, 2, FAULTS[0])
    assert not torch.equal(other["advantages"], tensors["advantages"]) and other_rows == rows


def test_control_blocks_that_each_rank_numbers_from_0_are_seen(recorded):
    tensors, rows, _, _ = joined(recorded, "quickstart_grpo", 1)
    other, other_rows, _, _ = joined(recorded, "quickstart_grpo", 2, FAULTS[1])
    assert torch.equal(other["advantages"], tensors["advantages"]) and other_rows != rows


def rejections(argument: Path) -> None:
    """A gap on the last rank, and a metric of each rank's own: note the error of this rank."""
    config, whole = torch.load(argument / "quickstart.pt", weights_only=False)
    batch = select_envs(whole, torch.arange(4) + 4 * rank())
    if rank() == 1:
        batch.old_logprobs[2, 1] += 0.5
        batch.old_logprobs[0, 3] += 0.25
    else:
        batch.old_logprobs[0, 0] += 0.375
    errors = []
    for rejected in (
        lambda: parity_gate(config).check(batch, 0),
        lambda: check_equal_on_ranks({"train/baseline": 2.0 + rank(), "train/other": 1.0}),
        lambda: check_equal_on_ranks({"train/mean": 1.0} | ({"train/extra": 0.0} if rank() else {"train/first": 0.0})),
        lambda: check_equal_on_ranks({"train/nan": float("nan") if rank() else 0.0}),
    ):
        try:
            rejected()
        except (ParityError, ConfigError) as error:
            errors.append(f"{type(error).__name__}: {error}")
    check_equal_on_ranks({"train/baseline": 2.0, "train/nan": float("nan")})  # control: the same everywhere
    (argument / f"rejected {rank()}").write_text("\n".join(errors))


def test_all_ranks_refuse_the_worst_sample_of_all_and_metrics_of_their_own(recorded):
    launch(rejections, recorded, 2, "cpu")
    first, second = ((recorded / f"rejected {r}").read_text() for r in (0, 1))
    assert first == second and len(first.splitlines()) == 4
    assert re.search(r"ParityError.*differ by 0\.5 at step 0.*policy call 2 of env 5, EpisodeSpec", first)
    assert re.search(r"ConfigError: train/baseline is 2\.0 on one rank, but 3\.0 on a second one.*masked_mean", first)
    assert "train/extra is missing on one rank, but 0.0 on a second one" in first
    assert "train/nan is 0.0 on one rank, but nan on a second one" in first
