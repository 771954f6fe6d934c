"""Replay buffer of an off-policy run, its batches of transitions, and the memory that it needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlinf.algorithms.offpolicy_config import OffPolicyConfig
from rlinf.config.schema import RunConfig
from rlinf.data.formats import describe_dataset
from rlinf.distributed.process_group import resolve_device
from rlinf.distributed.start import started_here
from rlinf.errors import CheckpointError, ConfigError, reject
from rlinf.memory import main_memory_bytes
from rlinf.models.actors.kinds import ACTORS

LARGEST_FRACTION = 0.8
"""Maximum fraction of main memory that the replay buffer and a policy on the CPU may use."""


@dataclass
class Batch:
    """A batch of transitions.

    Attributes:
        features, base, actions: ``[B, F]``, ``[B, N, A]``, ``[B, A]``; actions are normalised.
        returns: Discounted sum of rewards over the executed env steps, ``[B]``.
        discounts: Weight of the next observation's value, ``[B]``; 0 if the episode terminated.
    """

    features: Tensor
    base: Tensor
    actions: Tensor
    returns: Tensor
    discounts: Tensor
    next_features: Tensor
    next_base: Tensor

    @staticmethod
    def concatenate(parts: Sequence[Batch]) -> Batch:
        """Concatenate batches along ``B``."""
        return Batch(*(torch.cat(column) for column in zip(*(vars(part).values() for part in parts), strict=True)))


class ReplayBuffer:
    """One ring buffer of observations per env, in temporal order.

    Each observation is stored once; its successor is in the same env's next slot. A slot has no action if it contains the last
    observation of a truncated episode, if the simulator was lost after it, or if it is the newest slot.

    Args:
        capacity: Number of observations over all envs; each env has ``capacity // num_envs`` slots.
        feature_dim, num_candidates, output_dim, chunk_len: ``F``, ``N``, ``A`` and ``C``.
        base_dim: Dimension of a base-policy chunk; None means ``output_dim``.
    """

    def __init__(
        self,
        capacity: int,
        num_envs: int,
        *,
        feature_dim: int,
        num_candidates: int,
        output_dim: int,
        chunk_len: int,
        seed: int,
        base_dim: int | None = None,
        feature_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.num_slots, self.num_envs = capacity // num_envs, num_envs
        if self.num_slots < 2:
            raise ConfigError(
                f"algorithm.replay_capacity={capacity} for rollout.num_envs={num_envs}; expected at least 2 observations per env. "
                f"Set algorithm.replay_capacity={1000 * num_envs}"
            )
        shape = (self.num_slots, num_envs)
        self.features = torch.zeros(*shape, feature_dim, dtype=feature_dtype)
        self.base = torch.zeros(*shape, num_candidates, output_dim if base_dim is None else base_dim)
        self.actions = torch.zeros(*shape, output_dim)
        self.rewards = torch.zeros(*shape, chunk_len)
        self.executed = torch.zeros(*shape, chunk_len, dtype=torch.bool)
        self.has_action = torch.zeros(shape, dtype=torch.bool)
        self.terminated = torch.zeros(shape, dtype=torch.bool)
        self.counts = torch.zeros(num_envs, dtype=torch.int64)
        self.generator = torch.Generator().manual_seed(seed)
        # Keep a sorted list of transitions and update it only for changed slots, because scanning a large buffer per batch would be slow.
        self._known, self._num_known = torch.empty(self.num_slots * num_envs, dtype=torch.int64), 0
        self._changed: tuple[int, int] | None = (0, self.num_slots - 1)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The stored tensors, ``[slots, envs, ...]`` each."""
        names = ("features", "base", "actions", "rewards", "executed", "has_action", "terminated")
        return {name: getattr(self, name) for name in names}

    @property
    def num_bytes(self) -> int:
        """Size of the buffer in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def num_transitions(self) -> int:
        """Number of transitions that can be sampled."""
        return len(self.transitions())

    def observe(self, envs: Tensor, features: Tensor, base: Tensor) -> None:
        """Store the next observation of each env (int64 ``[K]``): ``features [K, F]`` and ``base [K, N, A]``."""
        slots = self.counts[envs] % self.num_slots
        self._note(slots, (self.counts[envs] - 1) % self.num_slots)
        self.features[slots, envs], self.base[slots, envs] = features.cpu(), base.cpu()
        self.has_action[slots, envs] = False
        self.terminated[slots, envs] = False
        self.counts[envs] += 1

    def act(self, envs: Tensor, actions: Tensor, rewards: Tensor, executed: Tensor, terminated: Tensor) -> None:
        """Store actions ``[K, A]`` and their outcome with the newest observation of each env (int64 ``[K]``).

        Args:
            rewards, executed: ``[K, C]``; executed actions precede those that were not executed.
            terminated: bool ``[K]``; false at a time limit.
        """
        slots = (self.counts[envs] - 1) % self.num_slots
        self._note(slots)
        self.actions[slots, envs], self.rewards[slots, envs] = actions.cpu(), rewards
        self.executed[slots, envs], self.terminated[slots, envs] = executed, terminated
        self.has_action[slots, envs] = True

    def _note(self, *groups: Tensor) -> None:
        """Extend the range of changed slots."""
        for slots in groups:
            if len(slots):
                first, last = int(slots.min()), int(slots.max())
                known = self._changed
                self._changed = (first, last) if known is None else (min(first, known[0]), max(last, known[1]))

    def transitions(self) -> Tensor:
        """Return the slots that have an action with a known outcome, as ascending int64 indices ``slot * num_envs + env``."""
        if self._changed is not None:
            first, last = self._changed
            slots, newest = slice(first, last + 1), torch.where(self.counts > 0, (self.counts - 1) % self.num_slots, -1)
            is_newest = torch.arange(first, last + 1)[:, None] == newest
            fresh = (self.has_action[slots] & (self.terminated[slots] | ~is_newest)).flatten().nonzero().flatten()
            fresh += first * self.num_envs
            ends = torch.tensor([first * self.num_envs, (last + 1) * self.num_envs])
            before, after = torch.searchsorted(self._known[: self._num_known], ends).tolist()
            total = before + len(fresh) + self._num_known - after
            if after < self._num_known and total != self._num_known:
                self._known[before + len(fresh) : total] = self._known[after : self._num_known].clone()
            self._known[before : before + len(fresh)] = fresh
            self._num_known, self._changed = total, None
        return self._known[: self._num_known]

    def sample(self, size: int, gamma: float, n_step: int = 1) -> Batch:
        """Sample transitions uniformly with replacement; raise ConfigError if the buffer is empty."""
        known = self.transitions()
        if not len(known):
            raise ConfigError("The replay buffer has no transitions yet. Set algorithm.learning_starts=1024")
        drawn = known[torch.randint(len(known), (size,), generator=self.generator)]
        return self.batch(drawn, gamma, n_step)

    def batch(self, transitions: Tensor, gamma: float, n_step: int = 1) -> Batch:
        """Return transitions over ``n_step`` policy calls, or fewer if the episode ends; ``gamma`` is the discount per env step."""
        slots, envs = transitions // self.num_envs, transitions % self.num_envs
        newest = (self.counts - 1) % self.num_slots
        here, returns = slots, torch.zeros(len(slots))
        discounts, going = torch.ones(len(slots)), torch.ones(len(slots), dtype=torch.bool)
        for _ in range(n_step):
            rows = here * self.num_envs + envs
            executed = gather_rows(self.executed, rows) & going[:, None]
            powers = gamma ** torch.arange(executed.shape[1], dtype=torch.float32)
            returns += discounts * (gather_rows(self.rewards, rows) * powers * executed).sum(1)
            discounts = discounts * gamma ** executed.sum(1).float()
            discounts[going & gather_rows(self.terminated, rows)] = 0.0
            following = (here + 1) % self.num_slots
            here = torch.where(going & (discounts > 0), following, here)
            known = self.has_action[here, envs] & (self.terminated[here, envs] | (here != newest[envs]))
            going = going & (discounts > 0) & known
            if not going.any():
                break
        rows = here * self.num_envs + envs
        return Batch(
            gather_rows(self.features, transitions), gather_rows(self.base, transitions), gather_rows(self.actions, transitions),
            returns, discounts, gather_rows(self.features, rows), gather_rows(self.base, rows),
        )  # fmt: skip

    def state_dict(self) -> dict[str, Tensor]:
        """Return the written slots, the counters and the generator."""
        filled = min(int(self.counts.max()), self.num_slots)
        return {name: tensor[:filled] for name, tensor in self.tensors.items()} | {
            "counts": self.counts, "num_slots": torch.tensor(self.num_slots), "generator": self.generator.get_state()
        }  # fmt: skip

    def take_over(self, state: dict[str, Tensor]) -> None:
        """Append the newest observations from a ``state_dict`` of any size; env ``e`` of the dict is appended to env ``e % num_envs``."""
        self._check_shapes(state)
        num_slots, num_envs = int(state["num_slots"]), len(state["counts"])
        for env in range(num_envs):
            count, here = int(state["counts"][env]), env % self.num_envs
            source = torch.arange(max(0, count - min(num_slots, self.num_slots)), count) % num_slots
            if not len(source):
                continue
            slots = (self.counts[here] + torch.arange(len(source))) % self.num_slots
            for name, tensor in self.tensors.items():
                tensor[slots, here] = state[name][source, env]
            # The next observation in this buffer will be from a different episode, so drop an action whose outcome is unknown.
            self.has_action[slots[-1], here] &= self.terminated[slots[-1], here]
            self.counts[here] += len(source)
        self._changed = (0, self.num_slots - 1)

    def tensor_for(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor for reading a ``state_dict`` tensor into: a view of the buffer if the shape fits."""
        tensor = self.tensors.get(name)
        fits = tensor is not None and (tensor.dtype, tensor.shape[1:]) == (dtype, tuple(shape[1:]))
        return tensor[: shape[0]] if fits and shape[0] <= self.num_slots else torch.empty(shape, dtype=dtype)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore a ``state_dict``; raise CheckpointError if its sizes differ."""
        num_slots, num_envs = int(state["num_slots"]), len(state["counts"])
        if (num_slots, num_envs) != (self.num_slots, self.num_envs):
            raise CheckpointError(
                f"The replay buffer of the checkpoint has {num_slots} observations for each of {num_envs} envs, but this run has "
                f"{self.num_slots} for each of {self.num_envs}. Set algorithm.replay_capacity={num_slots * num_envs} "
                f"rollout.num_envs={num_envs}"
            )
        self._check_shapes(state)
        for name, tensor in self.tensors.items():
            if state[name].data_ptr() != tensor.data_ptr():  # otherwise already read into the buffer (`tensor_for`)
                tensor[: len(state[name])] = state[name]
        self.counts.copy_(state["counts"])
        self.generator.set_state(state["generator"])
        self._changed = (0, self.num_slots - 1)

    def _check_shapes(self, state: dict[str, Tensor]) -> None:
        """Raise CheckpointError if the dimensions of a ``state_dict`` differ."""
        # Check here, because indexed assignment would silently broadcast a dimension of size 1.
        for name, tensor in self.tensors.items():
            if state[name].shape[2:] != tensor.shape[2:]:
                raise CheckpointError(
                    f"'{name}' has the shape {list(state[name].shape[2:])} per observation in the checkpoint's replay buffer, but "
                    f"{list(tensor.shape[2:])} here. Use the model and algorithm sections of its config.yaml"
                )


def gather_rows(tensor: Tensor, rows: Tensor) -> Tensor:
    """Return the rows with indices ``slot * num_envs + env`` from a tensor ``[slots, envs, ...]``."""
    # index_select on the flattened tensor is faster than indexing with two index tensors.
    return tensor.flatten(0, 1).index_select(0, rows)


def replay_bytes(config: OffPolicyConfig, model: Any, num_observations: int | None = None) -> int:
    """Return the size in bytes of a buffer for ``num_observations`` (None: ``algorithm.replay_capacity``); ``model`` may be on "meta"."""
    size = config.replay_capacity if num_observations is None else num_observations
    actor = ACTORS.get(config.actor.name)
    numbers = actor.num_candidates_for(config.actor) * actor.base_dim_for(model) + actor.output_dim_for(model)
    return size * (model.feature_dim * model.feature_dtype.itemsize + 4 * numbers + 5 * model.action_chunks_len + 2)


def offline_bytes(config: OffPolicyConfig, model: Any) -> int:
    """Return an upper bound on the demonstrations' size in bytes; 0 without any, or if their number of frames is unknown."""
    if config.offline_dataset is None:
        return 0
    info = describe_dataset(config.offline_dataset, "algorithm.offline_dataset")
    if info.num_rows is None:
        return 0
    # Each episode may have a shorter last policy call and an additional last observation.
    return replay_bytes(config, model, info.num_rows // model.action_chunks_len + 2 * info.num_episodes)


def check_replay_size(config: RunConfig, algorithm: OffPolicyConfig, model: Any) -> None:
    """Check that the replay buffer (and the policy, if it is on the CPU) fits into main memory, and has slots for every env."""
    capacity, num_envs = algorithm.replay_capacity, config.rollout.num_envs
    if capacity < 2 * num_envs:
        problem = f"algorithm.replay_capacity={capacity} for rollout.num_envs={num_envs}"
        reject(problem, "at least 2 observations per env", f"algorithm.replay_capacity={1000 * num_envs}")
    on_cpu = resolve_device(config.cluster.device, 1) == "cpu"
    ranks = started_here(config.cluster.num_processes)  # each rank stores the complete buffer
    policy = ranks * sum(tensor.numel() * tensor.element_size() for tensor in model.parameters()) if on_cpu else 0
    size, offline = ranks * replay_bytes(algorithm, model), ranks * offline_bytes(algorithm, model)
    available = LARGEST_FRACTION * main_memory_bytes()
    if policy + offline + size > available:
        fitting = int(max(0, available - policy - offline) / size * capacity)
        reject(
            f"algorithm.replay_capacity={capacity} observations take {size / 1e9:.1f} GB"
            + (f", demonstrations {offline / 1e9:.1f} GB" if offline else "")
            + (f", and the policy {policy / 1e9:.1f} GB" if on_cpu else "")
            + (f", in {ranks} ranks" if ranks > 1 else ""),
            f"at most {available / 1e9:.1f} GB, {LARGEST_FRACTION:.0%} of the memory of this machine",
            f"algorithm.replay_capacity={fitting}"
            if fitting >= 2 * num_envs
            else "model.precision=bf16, or a smaller policy",
        )
