"""Demonstrations as a replay buffer of their own. The frozen policy is asked about them once; what it says is kept on disk."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlinf.data.stored import StoredDemonstrations
from rlinf.envs.config import EnvConfig
from rlinf.errors import ConfigError
from rlinf.files import naming
from rlinf.models.embodiment.headed import HeadedPolicy
from rlinf.offpolicy.replay import ReplayBuffer

logger = logging.getLogger("rlinf")

Answers = tuple[dict[str, Tensor], int]
"""What the frozen policy says of rows: ``features [K, F]``, ``chunks [K, N, C, D]``; and about how many rows it was asked."""


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

    With ``env.reward_mode=sparse``, success alone is rewarded, whatever rewards are stored. An episode ends at its first
    success where the env does so. A dataset that does not tell successes counts those whose last reward is above 0.

    Args:
        dataset: Opened with ``outcomes``.
        env: Settings of the env.
        which: ``algorithm.offline_episodes``.
    """
    outcomes, found = dataset.outcomes, []
    for last in np.unique(dataset.last_rows):
        first = int(np.searchsorted(dataset.last_rows, last))
        rows = slice(first, int(last) + 1)
        success = np.zeros(rows.stop - first, dtype=bool)
        if which == "assumed":
            success[-1] = True
        elif outcomes.success is not None:
            success |= outcomes.success[rows]
        else:
            success[-1] = outcomes.rewards[last] > 0
        if which == "successes" and not success.any():
            continue
        rewards = np.zeros(len(success), np.float32) if env.reward_mode == "sparse" else outcomes.rewards[rows].copy()
        if success.any() and env.reward_mode == "sparse":
            rewards[success.argmax()] = env.success_bonus
        terminated = bool(outcomes.terminated[last])
        if success.any() and env.terminate_on_success:
            rewards, terminated = rewards[: success.argmax() + 1], True
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
    """Demonstrations from which a share of each batch is drawn.

    Attributes:
        replay: Their transitions, in a buffer that never changes.
        episodes: What they are.
        num_asked: Observations about which the frozen policy was asked; 0: its answers were on disk.
        out_of_reach: Share of the actions that the head cannot give. They are stored as they are, so the critics learn of them.
        digest: Of what is stored, without what the frozen policy says.
    """

    replay: ReplayBuffer
    episodes: list[Episode]
    num_asked: int
    out_of_reach: float
    digest: str

    @property
    def success_rate(self) -> float:
        """Share of the episodes that succeeded."""
        return float(np.mean([episode.success for episode in self.episodes]))

    def __str__(self) -> str:
        asked = (
            f"the frozen policy was asked about {self.num_asked} observations" if self.num_asked else "answers on disk"
        )
        return (
            f"{len(self.episodes)} demonstrations, {self.success_rate:.1%} successes, {self.replay.num_transitions} transitions; "
            f"{self.out_of_reach:.1%} of their actions are beyond the reach of the head; {asked}"
        )


def offline_data(
    dataset: StoredDemonstrations,
    policy: HeadedPolicy,
    env: EnvConfig,
    *,
    which: str,
    conditions: Mapping[str, Any],
    batch_size: int,
    autocast: Callable[[], AbstractContextManager],
    seed: int,
    once: Callable[[Callable[[], Answers]], Answers] = lambda ask: ask(),
) -> OfflineData:
    """Fill a buffer with demonstrations.

    Args:
        dataset: Opened with ``outcomes``.
        policy: Says features and chunks, and in which units actions are stored.
        env: Settings of the env.
        which: ``algorithm.offline_episodes``.
        conditions: What else decides on the answers of the frozen policy, besides its weights and the rows.
        batch_size: Observations about which it is asked at once.
        autocast: Makes the context in which it computes.
        seed: Of the draws from the buffer, and of the sampled candidates.
        once: Calls a function on one rank and returns its result on all.

    Raises:
        ConfigError: No transition is left.
    """
    chunk_len, head = policy.action_chunks_len, policy.head
    episodes = episodes_of(dataset, env, which)
    slots = slots_of(episodes, chunk_len)
    num_slots = len(slots.rows)
    if not num_slots:
        raise ConfigError(
            f"{dataset.info.folder} has no transition under algorithm.offline_episodes={which}; required: one or more. "
            "Set algorithm.offline_episodes=all, or algorithm.offline_dataset=<another folder>"
        )
    answers, num_asked = once(lambda: _answers(dataset, slots.rows, policy, conditions, batch_size, autocast, seed))
    num_executed = slots.executed.sum(1)
    offsets = np.minimum(np.arange(chunk_len), np.maximum(num_executed, 1)[:, None] - 1)  # the last action is repeated
    chunks = torch.from_numpy(dataset.outcomes.executed[slots.rows[:, None] + offsets])
    held = {
        "features": answers["features"],
        "base": policy.normalize(answers["chunks"].to(policy.device)).cpu(),
        "actions": policy.normalize(chunks.unsqueeze(1).to(policy.device))[:, 0].cpu(),
        "rewards": torch.from_numpy(slots.rewards),
        "executed": torch.from_numpy(slots.executed),
        "has_action": torch.from_numpy(num_executed > 0),
        "terminated": torch.from_numpy(slots.terminated),
    }
    replay = ReplayBuffer(
        max(2, num_slots), 1, feature_dim=head.feature_dim, num_candidates=head.num_candidates,
        num_numbers=head.num_numbers, chunk_len=chunk_len, seed=seed,
    )  # fmt: skip
    for name, tensor in replay.tensors.items():
        tensor[:num_slots, 0] = held[name]
    replay.counts[0] = num_slots
    digest = hashlib.sha256(slots.rows.tobytes())
    for name in ("actions", "rewards", "executed", "terminated"):
        digest.update(held[name].contiguous().numpy())
    done = held["has_action"]
    beyond = _out_of_reach(policy, held["base"][done], held["actions"][done])
    return OfflineData(replay, episodes, num_asked, beyond, digest.hexdigest())


def _out_of_reach(policy: HeadedPolicy, base: Tensor, actions: Tensor) -> float:
    """Return the share of actions ``[K, A]`` of which a number lies beyond what the head makes of the greedy chunk."""
    base, ones = base.to(policy.device), torch.ones_like(actions).to(policy.device)
    low, high = policy.head.compose(base, -ones).cpu(), policy.head.compose(base, ones).cpu()
    return float(((actions < low - 1e-6) | (actions > high + 1e-6)).any(1).float().mean())


def _answers(
    dataset: StoredDemonstrations,
    rows: np.ndarray,
    policy: HeadedPolicy,
    conditions: Mapping[str, Any],
    batch_size: int,
    autocast: Callable[[], AbstractContextManager],
    seed: int,
) -> Answers:
    """Return features and chunks of rows, from disk if they are there, and about how many rows the policy was asked."""
    about = {
        "base": policy.base_sha256,
        "dataset": dataset.digest(),
        "rows": hashlib.sha256(rows.tobytes()).hexdigest(),
        "columns": list(dataset.frames),
        "has_state": dataset.state is not None,
        "features": policy.base.feature_kind,
        "candidates": policy.head.num_candidates,
        "chunk": policy.action_chunks_len,
        "seed": seed if policy.head.num_candidates > 1 else None,
        "conditions": conditions,
    }
    key = hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()
    path = cache_folder() / f"{key}.safetensors"
    if path.is_file():
        try:
            return load_file(path), 0
        except (OSError, SafetensorError) as error:
            logger.warning("%s cannot be read (%s), so the frozen policy is asked again", path, error)
    answers = _ask(dataset, rows, policy, batch_size, autocast, seed)
    try:
        _save(answers, path)
    except OSError as error:
        logger.warning("the answers of the frozen policy cannot be kept, so the next run asks again: %s", error)
    return answers, len(rows)


def _save(answers: Mapping[str, Tensor], path: Path) -> None:
    """Write a file under a temporary name, and rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.stem}.{os.getpid()}.tmp")
    try:
        with naming(path):
            save_file(dict(answers), partial)
            os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _ask(
    dataset: StoredDemonstrations,
    rows: np.ndarray,
    policy: HeadedPolicy,
    batch_size: int,
    autocast: Callable[[], AbstractContextManager],
    seed: int,
) -> dict[str, Tensor]:
    generator, features, chunks = torch.Generator().manual_seed(seed), [], []
    for start in range(0, len(rows), batch_size):
        observation, _ = dataset.rows(rows[start : start + batch_size])
        uniforms = torch.rand(len(observation), policy.num_candidate_numbers, generator=generator)
        uniforms = uniforms.clamp_min_(torch.finfo(torch.float32).tiny).to(policy.device)
        with autocast():
            found = policy.propose_to_head(policy.preprocess(observation), uniforms)
        features.append(found.features.cpu())
        chunks.append(found.chunks.cpu())
    return {"features": torch.cat(features), "chunks": torch.cat(chunks)}


def cache_folder() -> Path:
    """Return where answers of frozen policies are kept: ``$XDG_CACHE_HOME/rlinf/proposals``, by default in ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlinf" / "proposals"
