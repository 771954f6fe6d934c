"""Metrics of an iteration's episodes: success, returns, the critics' calibration, and the size of residuals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rlinf.distributed.process_group import gather_objects
from rlinf.evaluation.result import actions_clipped
from rlinf.types import EpisodeResult

if TYPE_CHECKING:
    from rlinf.offpolicy.transitions import CallOutcome


class EpisodeStats:
    """Metrics of each env's first episode in an iteration."""

    # Later episodes that end within the iteration are mostly quick successes; including them would overestimate the success rate.

    def __init__(self, num_envs: int, gamma: float) -> None:
        self.gamma, self.results = gamma, list[EpisodeResult]()
        self.calibration = list[tuple[float, float]]()  # value of the first action, discounted return
        self._first = np.ones(num_envs, dtype=bool)  # whether the first episode is still running
        self.values: np.ndarray | None = None  # of the first actions
        self._returns, self._powers = np.zeros(num_envs), np.ones(num_envs)
        self.num_lost = 0
        self.largest_return = 0.0  # ``largest_value`` over all ended episodes
        self._rewards: list[list[float]] = [[] for _ in range(num_envs)]  # of the running episodes
        self._choices: list[Tensor] = []  # bool: whether an unmodified base-policy chunk was chosen

    def add_choices(self, chosen: Tensor, num_candidates: int) -> None:
        """Add the indices of the chosen options; the first ``num_candidates`` options are the base policy's chunks."""
        if num_candidates:
            self._choices.append(chosen < num_candidates)

    def add(self, outcome: CallOutcome) -> None:
        """Add the outcome of a policy call."""
        rewards, executed, ended, lost = outcome.rewards, outcome.executed, outcome.ended, outcome.lost
        for column in range(rewards.shape[1]):
            self._returns += self._powers * rewards[:, column]
            self._powers *= np.where(executed[:, column], self.gamma, 1.0)
        for row, done in enumerate(executed):
            self._rewards[row] += rewards[row, done].tolist()
        for row, is_truncated in zip(ended, outcome.truncated, strict=True):
            self.largest_return = max(self.largest_return, largest_value(self._rewards[row], self.gamma, is_truncated))
        for row in (*ended, *lost):
            self._rewards[row] = []
        self.num_lost += len(lost)
        self._first[lost] = False
        for row, episode in zip(ended, outcome.episodes, strict=True):
            if self._first[row]:
                self.results.append(episode)
                self.calibration.append((float(self.values[row]), float(self._returns[row])))
        self._first[ended] = False

    def metrics(self) -> dict[str, float]:
        """Return success, return and length, and the critic's values for the first actions."""
        metrics: dict[str, float] = {"rollout/num_episodes": len(self.results), "rollout/lost_episodes": self.num_lost}
        if self.results:
            rows = [(result.success, result.episode_return, result.num_env_steps) for result in self.results]
            names = ("rollout/success_rate", "rollout/return_mean", "rollout/episode_len")
            metrics |= dict(zip(names, np.mean(rows, axis=0).tolist(), strict=True))
            labels = [result.true_success for result in self.results if result.true_success is not None]
            metrics |= {"rollout/true_success_rate": float(np.mean(labels))} if labels else {}
            fraction, largest = actions_clipped(self.results)
            clipping = {"rollout/actions_clipped_fraction": fraction, "rollout/actions_max_abs": largest}
            metrics |= {name: value for name, value in clipping.items() if value is not None}
            predicted, observed = np.mean(self.calibration, axis=0).tolist()
            metrics |= {"train/q_initial": predicted, "train/return_initial": observed}
        if self._choices:
            metrics["rollout/base_action_fraction"] = torch.cat(self._choices).float().mean().item()
        return metrics


class ResidualNorm:
    """Mean absolute difference between the actor's and the base policy's greedy actions, normalised, over an iteration."""

    def __init__(self, task_names: Sequence[str]) -> None:
        self.task_names = task_names
        self._tasks: dict[int, str] = {}  # by env
        self._sums: dict[str, np.ndarray] = {}  # by task: number of policy calls, sum of their norms

    def start_episode(self, row: int, task_id: int) -> None:
        """Record that an env has started an episode of a task."""
        self._tasks[row] = self.task_names[task_id]

    def add(self, base: Tensor, actions: Tensor) -> None:
        """Add one policy call per env: the base policy's greedy chunks and the actor's ``actions``, both ``[B, C * D]``."""
        norms = (actions.float() - base.float()).abs().double().flatten(1).mean(1).tolist()
        for row, norm in enumerate(norms):
            task = self._tasks[row]
            self._sums[task] = self._sums.get(task, 0) + np.array([1, norm])

    def metrics(self) -> dict[str, float]:
        """Return the mean over all tasks and for each task, across all ranks (a collective call)."""
        sums: dict[str, np.ndarray] = {}
        for rank_sums in gather_objects(self._sums):
            for task, added in rank_sums.items():
                sums[task] = sums.get(task, 0) + added
        if not sums:
            return {}
        count, total = np.sum(list(sums.values()), axis=0)
        by_task = {f"rollout/residual_norm/{task}": float(norm / n) for task, (n, norm) in sorted(sums.items())}
        return {"rollout/residual_norm": float(total / count), **by_task}


def largest_value(rewards: Sequence[float], gamma: float, is_truncated: bool) -> float:
    """Return the maximum ``|sum g^k r_k|`` from any step of an episode to its end."""
    # Treat a truncated episode as if it were repeated forever, because the critics also predict the rewards after the truncation.
    total = sum(gamma**step * reward for step, reward in enumerate(rewards))
    weight = 1 - gamma ** len(rewards)
    value = 0.0 if not is_truncated or total == 0 else total / weight if weight > 0 else math.inf
    largest = abs(value)
    for reward in reversed(rewards):
        value = reward + gamma * value
        largest = max(largest, abs(value))
    return largest
