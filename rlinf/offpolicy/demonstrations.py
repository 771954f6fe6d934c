"""Store demonstrations in a separate replay buffer."""

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
from rlinf.offpolicy.base_outputs import DatasetOutputs
from rlinf.offpolicy.replay import ReplayBuffer


@dataclass(frozen=True)
class Episode:
    """An episode of a dataset, interpreted with the rewards and termination rules of the run's env.

    Attributes:
        rewards: Reward of each env step, float32 ``[T]``; frames after the end of the episode are omitted.
        terminated: False if the episode is truncated, so that the outcome of its last action is not in the dataset.
    """

    first: int
    rewards: np.ndarray
    success: bool
    terminated: bool


def read_episodes(dataset: StoredDemonstrations, env: EnvConfig, which: str = "all") -> list[Episode]:
    """Return a dataset's episodes with an env's rewards and termination rules; ``which`` is ``algorithm.offline_episodes``."""
    outcomes, is_sparse, episodes = dataset.outcomes, env.reward_mode == "sparse", []
    for last in np.unique(dataset.last_rows):
        first = int(np.searchsorted(dataset.last_rows, last))
        rows = slice(first, int(last) + 1)
        if dataset.unreadable[rows].any():  # its transitions would have a gap
            continue
        # If no successes are stored, an episode is considered successful if its last reward is positive.
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
        # A sparse reward is given only once, so the episode ends at the first success even if the recording continues.
        if success.any() and (is_sparse or env.terminate_on_success):
            rewards, terminated = rewards[: success.argmax() + 1], True
            if is_sparse:
                rewards[-1] = env.success_bonus
        episodes.append(Episode(first, rewards, bool(success.any()), terminated))
    return episodes


@dataclass(frozen=True)
class ReplaySlots:
    """Content of ``K`` buffer slots.

    Attributes:
        rows: Frame index of each observation, int64 ``[K]``.
        executed: Actions that were executed, bool ``[K, C]``; all false for the last observation of a truncated episode.
        rewards: float32 ``[K, C]``, 0 for actions that were not executed.
        terminated: bool ``[K]``.
    """

    rows: np.ndarray
    executed: np.ndarray
    rewards: np.ndarray
    terminated: np.ndarray


def replay_slots(episodes: Sequence[Episode], chunk_len: int) -> ReplaySlots:
    """Split episodes into policy calls of ``chunk_len`` env steps; the last one may be shorter."""
    rows, executed, rewards, terminated = [], [], [], []
    for episode in episodes:
        # The outcome of a truncated episode's last action is unknown, so the last frame has no action; the critic estimates its value.
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
    return ReplaySlots(
        np.array(rows, np.int64),
        np.array(executed, dtype=bool).reshape(-1, chunk_len),
        np.array(rewards, np.float32).reshape(-1, chunk_len),
        np.array(terminated, dtype=bool),
    )


@dataclass
class OfflineData:
    """Demonstrations from which a fraction of each batch is sampled.

    Attributes:
        replay: The demonstrations' transitions, in a buffer that never changes.
        num_queries: Number of frames for which the base policy was queried; 0 if the outputs are from the cache.
        out_of_reach: Fraction of the actions that the actor cannot output; they are stored unchanged for the critics.
        digest: Digest of the stored transitions, excluding the base policy's outputs.
    """

    replay: ReplayBuffer
    episodes: list[Episode]
    num_queries: int
    out_of_reach: float
    digest: str

    @property
    def success_rate(self) -> float:
        """Fraction of episodes that succeeded."""
        return float(np.mean([episode.success for episode in self.episodes]))

    def __str__(self) -> str:
        source = f"computed for {self.num_queries} observations" if self.num_queries else "cached on disk"
        return (
            f"{len(self.episodes)} demonstrations, {self.success_rate:.1%} successes, {self.replay.num_transitions} transitions; "
            f"{self.out_of_reach:.1%} of their actions are out of reach of the actor; outputs of the frozen policy: {source}"
        )


def offline_data(
    dataset: StoredDemonstrations,
    policy: ActorPolicy,
    env: EnvConfig,
    which: str,
    seed: int,
    query: Callable[[np.ndarray], DatasetOutputs],
) -> OfflineData:
    """Fill a buffer with demonstrations; raise ConfigError if they contain no transitions.

    Args:
        dataset: Dataset opened with ``outcomes``.
        which: Value of ``algorithm.offline_episodes``.
        query: Returns the base policy's outputs for frames, int64 ``[K]``.
    """
    chunk_len, actor = policy.action_chunks_len, policy.actor
    episodes = read_episodes(dataset, env, which)
    slots = replay_slots(episodes, chunk_len)
    num_slots = len(slots.rows)
    if not num_slots:
        raise ConfigError(
            f"{dataset.info.folder} has no transitions with algorithm.offline_episodes={which}; expected at least one. "
            "Set algorithm.offline_episodes=all, or algorithm.offline_dataset=<other folder>"
        )
    outputs = query(slots.rows)
    num_executed = slots.executed.sum(1)
    offsets = np.minimum(np.arange(chunk_len), np.maximum(num_executed, 1)[:, None] - 1)  # the last action is repeated
    chunks = torch.from_numpy(dataset.outcomes.executed[slots.rows[:, None] + offsets])
    stored = {
        "features": outputs.features,
        "base": policy.base_inputs(outputs.chunks.to(policy.device)).cpu(),
        "actions": policy.normalize(chunks.unsqueeze(1).to(policy.device))[:, 0].cpu(),
        "rewards": torch.from_numpy(slots.rewards),
        "executed": torch.from_numpy(slots.executed),
        "has_action": torch.from_numpy(num_executed > 0),
        "terminated": torch.from_numpy(slots.terminated),
    }
    replay = ReplayBuffer(
        max(2, num_slots), 1, feature_dim=actor.feature_dim, num_candidates=actor.num_candidates,
        output_dim=actor.output_dim, base_dim=actor.base_dim, chunk_len=chunk_len, seed=seed,
        feature_dtype=outputs.features.dtype,
    )  # fmt: skip
    for name, tensor in replay.tensors.items():
        tensor[:num_slots, 0] = stored[name]
    replay.counts[0] = num_slots
    digest = hashlib.sha256(slots.rows.tobytes())
    for name in ("actions", "rewards", "executed", "terminated"):
        digest.update(stored[name].contiguous().numpy().data)
    has_action = stored["has_action"]
    out_of_reach = _out_of_reach(policy, stored["base"][has_action], stored["actions"][has_action])
    return OfflineData(replay, episodes, outputs.num_queries, out_of_reach, digest.hexdigest())


def _out_of_reach(policy: ActorPolicy, base: Tensor, actions: Tensor) -> float:
    """Return the fraction of actions ``[K, A]`` that the actor cannot produce from any of the base chunks ``[K, N, A]``."""
    count, candidates = base.shape[1], base.flatten(0, 1).unsqueeze(1).to(policy.device)
    ones = torch.ones_like(candidates[:, 0])
    low, high = (policy.actor.compose(candidates, sign * ones).unflatten(0, (-1, count)).cpu() for sign in (-1, 1))
    wanted = actions.unsqueeze(1)
    is_within = ((wanted >= low - 1e-6) & (wanted <= high + 1e-6)).all(2)
    return float((~is_within.any(1)).float().mean())
