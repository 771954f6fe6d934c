"""Demonstrations as a replay buffer of their own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlinf.data.stored import StoredDemonstrations
from rlinf.envs.config import EnvConfig
from rlinf.errors import ConfigError
from rlinf.models.embodiment.actor_policy import ActorPolicy
from rlinf.offpolicy.proposals import Answers
from rlinf.offpolicy.replay import ReplayBuffer


@dataclass(frozen=True)
class Episode:
    """An episode of a dataset, as the env of the run would have counted it.

    Attributes:
        first: Its first row.
        rewards: float32 ``[T]``, of its env steps; rows after the end are left out.
        success: It reached the goal.
        terminated: It ended by its own rules. Otherwise it was cut, and what its last action led to is not in the dataset.
    """

    first: int
    rewards: np.ndarray
    success: bool
    terminated: bool


def episodes_of(dataset: StoredDemonstrations, env: EnvConfig, which: str = "all") -> list[Episode]:
    """Return the episodes of a dataset under the rules of an env.

    With ``env.reward_mode=sparse``, success alone is rewarded, whatever rewards are stored. Then nothing is paid after the first
    success, so an episode ends there, as where the env ends it. Without stored successes, an episode succeeded if its last reward
    is above 0.

    Args:
        dataset: Opened with ``outcomes``.
        which: ``algorithm.offline_episodes``.
    """
    outcomes, is_sparse, found = dataset.outcomes, env.reward_mode == "sparse", []
    for last in np.unique(dataset.last_rows):
        first = int(np.searchsorted(dataset.last_rows, last))
        rows = slice(first, int(last) + 1)
        if dataset.unreadable[rows].any():  # its transitions would have a gap
            continue
        success = np.zeros(rows.stop - first, dtype=bool)
        if which == "assume_success":
            success[-1] = True
        elif outcomes.success is not None:
            success |= outcomes.success[rows]
        else:
            success[-1] = outcomes.rewards[last] > 0
        if which == "successes" and not success.any():
            continue
        rewards = np.zeros(len(success), np.float32) if is_sparse else outcomes.rewards[rows]
        terminated = bool(outcomes.terminated[last])
        if success.any() and (is_sparse or env.terminate_on_success):
            rewards, terminated = rewards[: success.argmax() + 1], True
            if is_sparse:
                rewards[-1] = env.success_bonus
        found.append(Episode(first, rewards, bool(success.any()), terminated))
    return found


@dataclass(frozen=True)
class Slots:
    """What the slots of the buffer hold, ``K`` of them.

    Attributes:
        rows: int64 ``[K]``, whose observation it is.
        executed: bool ``[K, C]``; all false for the last observation of an episode that was cut.
        rewards: float32 ``[K, C]``, 0 where not executed.
        terminated: bool ``[K]``.
    """

    rows: np.ndarray
    executed: np.ndarray
    rewards: np.ndarray
    terminated: np.ndarray


def slots_of(episodes: Sequence[Episode], chunk_len: int) -> Slots:
    """Cut episodes into policy calls of ``chunk_len`` env steps, the last one shorter.

    What the last action of an episode that was cut led to is not known. So its last row executes nothing: the critic values it.
    """
    rows, executed, rewards, terminated = [], [], [], []
    for episode in episodes:
        num_steps = len(episode.rewards) - (not episode.terminated)
        for start in range(0, num_steps, chunk_len):
            length = min(chunk_len, num_steps - start)
            rows.append(episode.first + start)
            executed.append(np.arange(chunk_len) < length)
            rewards.append(np.pad(episode.rewards[start : start + length], (0, chunk_len - length)))
            terminated.append(episode.terminated and start + length == num_steps)
        if num_steps and not episode.terminated:
            rows.append(episode.first + num_steps)
            executed.append(np.zeros(chunk_len, dtype=bool))
            rewards.append(np.zeros(chunk_len, np.float32))
            terminated.append(False)
    return Slots(
        np.array(rows, np.int64),
        np.array(executed, dtype=bool).reshape(-1, chunk_len),
        np.array(rewards, np.float32).reshape(-1, chunk_len),
        np.array(terminated, dtype=bool),
    )


@dataclass
class OfflineData:
    """Demonstrations from which a fraction of each batch is drawn.

    Attributes:
        replay: Their transitions, in a buffer that never changes.
        episodes: What they are.
        num_asked: Observations about which the frozen policy was asked; 0: its answers were on disk.
        out_of_reach: Fraction of the actions that the actor cannot give. They are stored as they are, so the critics learn of them.
        digest: Of the stored rows, without the frozen policy's answers.
    """

    replay: ReplayBuffer
    episodes: list[Episode]
    num_asked: int
    out_of_reach: float
    digest: str

    @property
    def success_rate(self) -> float:
        """Fraction of the episodes that succeeded."""
        return float(np.mean([episode.success for episode in self.episodes]))

    def __str__(self) -> str:
        asked = (
            f"the frozen policy was asked about {self.num_asked} observations" if self.num_asked else "answers on disk"
        )
        return (
            f"{len(self.episodes)} demonstrations, {self.success_rate:.1%} successes, {self.replay.num_transitions} transitions; "
            f"{self.out_of_reach:.1%} of their actions are beyond the reach of the actor; {asked}"
        )


def offline_data(
    dataset: StoredDemonstrations,
    policy: ActorPolicy,
    env: EnvConfig,
    which: str,
    seed: int,
    ask: Callable[[np.ndarray], Answers],
) -> OfflineData:
    """Fill a buffer with demonstrations. Raise ConfigError if no transition is left.

    Args:
        dataset: Opened with ``outcomes``.
        policy: Says in which units actions are stored.
        which: ``algorithm.offline_episodes``.
        ask: Returns what the frozen policy says of rows, int64 ``[K]``.
    """
    chunk_len, actor = policy.action_chunks_len, policy.actor
    episodes = episodes_of(dataset, env, which)
    slots = slots_of(episodes, chunk_len)
    num_slots = len(slots.rows)
    if not num_slots:
        raise ConfigError(
            f"{dataset.info.folder} has no transition under algorithm.offline_episodes={which}; required: one or more. "
            "Set algorithm.offline_episodes=all, or algorithm.offline_dataset=<another folder>"
        )
    answers = ask(slots.rows)
    num_executed = slots.executed.sum(1)
    offsets = np.minimum(np.arange(chunk_len), np.maximum(num_executed, 1)[:, None] - 1)  # the last action is repeated
    chunks = torch.from_numpy(dataset.outcomes.executed[slots.rows[:, None] + offsets])
    held = {
        "features": answers.features,
        "base": policy.base_inputs(answers.chunks.to(policy.device)).cpu(),
        "actions": policy.normalize(chunks.unsqueeze(1).to(policy.device))[:, 0].cpu(),
        "rewards": torch.from_numpy(slots.rewards),
        "executed": torch.from_numpy(slots.executed),
        "has_action": torch.from_numpy(num_executed > 0),
        "terminated": torch.from_numpy(slots.terminated),
    }
    replay = ReplayBuffer(
        max(2, num_slots), 1, feature_dim=actor.feature_dim, num_candidates=actor.num_candidates,
        output_dim=actor.output_dim, base_dim=actor.base_dim, chunk_len=chunk_len, seed=seed,
        feature_dtype=answers.features.dtype,
    )  # fmt: skip
    for name, tensor in replay.tensors.items():
        tensor[:num_slots, 0] = held[name]
    replay.counts[0] = num_slots
    digest = hashlib.sha256(slots.rows.tobytes())
    for name in ("actions", "rewards", "executed", "terminated"):
        digest.update(held[name].contiguous().numpy().data)
    done = held["has_action"]
    beyond = _out_of_reach(policy, held["base"][done], held["actions"][done])
    return OfflineData(replay, episodes, answers.num_asked, beyond, digest.hexdigest())


def _out_of_reach(policy: ActorPolicy, base: Tensor, actions: Tensor) -> float:
    """Return the fraction of actions ``[K, A]`` that the actor makes of none of the chunks ``[K, N, A]`` of the frozen policy that it reads."""
    count, each = base.shape[1], base.flatten(0, 1).unsqueeze(1).to(policy.device)
    ones = torch.ones_like(each[:, 0])
    low, high = (policy.actor.compose(each, sign * ones).unflatten(0, (-1, count)).cpu() for sign in (-1, 1))
    wanted = actions.unsqueeze(1)
    is_within = ((wanted >= low - 1e-6) & (wanted <= high + 1e-6)).all(2)
    return float((~is_within.any(1)).float().mean())
