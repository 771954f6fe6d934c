"""Runs, and what tests compare of them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlinf.commands.train import train
from rlinf.config.compose import compose_config
from rlinf.config.schema import RunConfig, build_config
from rlinf.evaluation.evaluator import evaluate_policy
from rlinf.evaluation.result import EvaluationResult
from rlinf.preflight.validation import validate
from rlinf.training import evaluator
from rlinf.training.rl_trainer import RLTrainer

REACH = ["model=mlp", "env=tabletop", "env.tasks=[reach]", "env.cameras=[]"]
QUIET = [
    "evaluation.num_videos_per_task=0",
    "evaluation.num_fresh_episodes=0",
    "tracking.tensorboard=false",
    "tracking.progress=false",
    "cluster.num_threads=1",
]
SMALL_RUN = [
    *REACH, "env.max_episode_steps=8", "rollout.num_envs=8", "rollout.num_chunks=8", "trainer.minibatch_size=32",
    "model.micro_batch_size=32", "evaluation.num_episodes=8", "evaluation.num_envs=8", *QUIET,
]  # fmt: skip
"""A state policy that reaches for a block, in iterations of 64 policy calls."""


def run_config(folder: Path, *overrides: str) -> RunConfig:
    """Return the configuration of a run that writes into ``folder``."""
    config = build_config(compose_config(list(overrides)))
    config.output_dir = str(folder)
    return config


def clone(folder: Path, dataset: Path, *overrides: str) -> RunConfig:
    """Check and run the cloning of a dataset; return its configuration."""
    config = run_config(folder, f"sft.dataset={dataset}", *overrides)
    validate(config, "sft")
    train(config)
    return config


def give_success(monkeypatch: pytest.MonkeyPatch, *rates: float) -> Iterator[float]:
    """Let the evaluations of the next runs succeed at these rates, one after the other; return those that are left."""
    given = iter(rates)

    def evaluated(*args, **kwargs):
        result, rate = evaluate_policy(*args, **kwargs), next(given)
        successes = round(rate * len(result.results))
        result.results = [replace(one, success=number < successes) for number, one in enumerate(result.results)]
        return result

    monkeypatch.setattr(evaluator, "evaluate_policy", evaluated)
    return given


def differing_weights(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of the weights that differ in a bit, or that only one of two checkpoints has."""
    both = left.keys() & right.keys()
    return sorted((left.keys() ^ right.keys()) | {name for name in both if not torch.equal(left[name], right[name])})


def metrics_of(folder: Path) -> list[dict]:
    """Return the lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def untimed_metrics(folder: Path) -> list[dict]:
    """Return the lines without the metrics that differ between equal runs: times, throughput and memory."""
    left_out = ("time", "throughput", "memory")
    return [{key: value for key, value in line.items() if not key.startswith(left_out)} for line in metrics_of(folder)]


def weights_of(folder: Path, checkpoint: str) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint of a run."""
    return load_file(folder / "checkpoints" / checkpoint / "model" / "model.safetensors")


def check_equal_runs(folder: Path, other: Path, checkpoint: str, evaluations: Sequence[str], episodes: int) -> None:
    """Compare two runs bit for bit: metrics, the weights of a checkpoint, the results of evaluations."""
    lines, others = untimed_metrics(folder), untimed_metrics(other)
    assert len(lines) > 3 and lines == others
    assert not differing_weights(weights_of(folder, checkpoint), weights_of(other, checkpoint))
    for tag in evaluations:
        one, two = (EvaluationResult.from_json(each / "eval" / tag / "result.json") for each in (folder, other))
        assert len(one.results) == episodes and one.results == two.results


def result_content(folder: Path) -> dict:
    """Return a result file without its time; returns are rounded, because products of other rows may round otherwise."""
    found = json.loads((folder / "result.json").read_text())
    del found["wall_s"]
    for row in found["results"]:
        row["episode_return"] = round(row["episode_return"], 3)
    return found


def note_trained(monkeypatch) -> list[tuple[int, int, set[int], list[tuple[int, bytes]]]]:
    """Return a list that grows with each iteration of the runs of this process.

    Each entry has the iteration, the version of the trained weights, the versions of the weights that have played, and of each env
    its group and its log-probabilities.
    """
    score, found = RLTrainer._score, []

    def noted(self, batch):
        envs = [column.numpy().tobytes() for column in batch.rollout_logprobs.unbind(1)]
        state, versions = self.loop.state, set(batch.policy_version.flatten().tolist())
        found.append(
            (state.step, state.policy_version, versions, list(zip(batch.group_ids[0].tolist(), envs, strict=True)))
        )
        return score(self, batch)

    monkeypatch.setattr(RLTrainer, "_score", noted)
    return found


def check_staleness(trained: list[tuple[int, int, set[int], list[tuple[int, bytes]]]], staleness: int) -> None:
    """Check that the rollout of each iteration was trained on once, whole, with the weights of ``staleness`` iterations before."""
    steps, versions, played, envs = zip(*trained, strict=True)
    assert list(steps) == list(range(len(steps))) and len(set(versions)) == len(versions) > staleness + 1
    assert list(played) == [{versions[max(0, step - staleness)]} for step in steps]
    groups = [[group for group, _ in of_step] for of_step in envs]
    assert all(of_step == groups[0] for of_step in groups) and sorted(set(groups[0])) == list(
        range(len(set(groups[0])))
    )
    assert len({env for of_step in envs for env in of_step}) == len(groups) * len(groups[0]), (
        "a rollout was trained on twice"
    )


def gap(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference of two tensors of one shape."""
    assert actual.shape == expected.shape
    return (actual.double() - expected.double()).abs().max().item()
