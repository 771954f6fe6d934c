"""Types shared between modules, with their shapes.

Axes: ``B`` parallel envs (or batch rows), ``T`` chunks of a rollout, ``C`` actions per chunk, ``D`` action dimensions, ``A``
log-probability columns per policy call (``C * D`` for a token policy), ``K`` values per sample (``A`` tokens, or an entire
denoising chain), ``H, W`` pixels, ``S`` state dimensions.

Time: an *env step* is one simulator step. A *chunk* is one policy call and its ``C`` env steps. An *iteration* is one rollout and its
updates. Within an update, an *optimiser step* trains on one minibatch. Unqualified, ``step`` means an iteration in ``rlinf.rollout``
and ``rlinf.training``, an env step in ``rlinf.envs``, and an optimiser step in behaviour cloning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

# Simulator processes import this module; importing torch would cost each of them seconds and memory.
if TYPE_CHECKING:
    from torch import Tensor


ClassAndConfig = tuple[type[Any], Any]
"""A policy's class, an ``ActionModel``, and its configuration."""

Statistics = dict[str, Any]
"""Bounds of actions and states, of one data set or by its name: ``{"action": {"q01": [...], ...}, "proprio": ...}``."""


@dataclass(frozen=True, order=True)
class EpisodeSpec:
    """The initial conditions of an episode. Equal specs yield bitwise identical first observations.

    Attributes:
        suite: Name of the task suite (``"tabletop"``).
        task_id: Index into the suite's tasks.
        init_state_id: Index of the task's initial state. Training and evaluation ranges are disjoint.
        seed: Seed for all randomness in the episode.
    """

    suite: str
    task_id: int
    init_state_id: int
    seed: int


@dataclass(frozen=True)
class EnvSpec:
    """An environment's observation space, which is known from its settings before it is built.

    Attributes:
        name: ``env.name``.
        cameras: Names of the images, in order.
        default_cameras: Cameras used without an explicit setting.
        image_size: Height and width of images in pixels.
        state_dim: Number of dimensions of ``Observation.state``. 0 means no state, and None unknown.
        override_for_state: ``(min_dim, max_dim) -> override``, which returns an override such as ``env.state=proprio`` for a state
            within these dimensions, or None if there is none.
    """

    name: str
    cameras: Sequence[str]
    default_cameras: Sequence[str]
    image_size: int
    state_dim: int | None
    override_for_state: Callable[[int, int], str | None] = lambda narrowest, widest: None


@dataclass
class Observation:
    """Observations of ``B`` envs.

    Attributes:
        images: Maps camera names to uint8 ``[B, H, W, 3]``.
        state: float32 ``[B, S]`` or None.
        instruction: ``B`` strings.
        is_resized: Whether ``ActionModel.resize_images`` has resized the images.
        is_cropped: Whether images have been randomly cropped (``sft.augment``), replacing the policy's centre crop.
        suffixes: Text added after each instruction in the prompt. None uses the policy's ``prompt_suffix``.
    """

    images: dict[str, np.ndarray]
    state: np.ndarray | None
    instruction: list[str]
    is_resized: bool = False
    is_cropped: bool = False
    suffixes: list[str] | None = None

    def __len__(self) -> int:
        return len(self.instruction)

    def select(self, index: Sequence[int] | np.ndarray | slice) -> Observation:
        """Select the rows ``index`` (integers) as a new observation. A slice returns views instead of copies."""
        rows: Any = index if isinstance(index, slice) else np.asarray(index, dtype=np.int64)
        return Observation(
            images={name: image[rows] for name, image in self.images.items()},
            state=None if self.state is None else self.state[rows],
            instruction=self.instruction[rows] if isinstance(index, slice) else [self.instruction[i] for i in rows],
            is_resized=self.is_resized,
            is_cropped=self.is_cropped,
            suffixes=None if self.suffixes is None else [self.suffixes[row] for row in np.arange(len(self))[rows]],
        )

    def replaced(self, index: np.ndarray, rows: Observation) -> Observation:
        """Return a new observation in which ``rows`` replace the rows at ``index`` (int64 ``[K]``)."""
        images = {name: image.copy() for name, image in self.images.items()}
        for name, image in images.items():
            image[index] = rows.images[name]
        state = None if self.state is None else self.state.copy()
        if state is not None:
            state[index] = rows.state
        instructions = dict(zip(index.tolist(), rows.instruction, strict=True))
        return Observation(images, state, [instructions.get(row, old) for row, old in enumerate(self.instruction)])

    @staticmethod
    def concatenate(parts: Sequence[Observation]) -> Observation:
        """Concatenate observations along the row axis."""
        first = parts[0]
        return Observation(
            images={name: np.concatenate([part.images[name] for part in parts]) for name in first.images},
            state=None if first.state is None else np.concatenate([part.state for part in parts]),
            instruction=[instruction for part in parts for instruction in part.instruction],
            is_resized=first.is_resized,
        )

    def append(self, rows: Observation) -> None:
        """Append rows in place. Arrays must own their memory, which grows without a copy, so no row is in memory twice."""
        arrays = [(self.images[name], image) for name, image in rows.images.items()]
        for array, added in arrays if rows.state is None else [*arrays, (self.state, rows.state)]:
            array.resize((len(array) + len(added), *array.shape[1:]), refcheck=False)
            array[-len(added) :] = added
        self.instruction += rows.instruction

    @staticmethod
    def stack_history(history: Sequence[Observation]) -> Observation:
        """Stack ``M`` consecutive observations, oldest first: images ``[B, M, H, W, 3]``, state ``[B, M, S]``."""
        latest = history[-1]
        return Observation(
            images={name: np.stack([observation.images[name] for observation in history], 1) for name in latest.images},
            state=None if latest.state is None else np.stack([observation.state for observation in history], 1),
            instruction=latest.instruction,
            is_resized=latest.is_resized,
        )


class ActionPrediction(NamedTuple):
    """The result of ``predict_action_batch``.

    Attributes:
        actions: ``[B, C, D]`` float32 in env units.
        sequences: For token policies, ``[B, L + A]`` prompt and action tokens. For other policies, ``[B, K]``, the input to
            ``evaluate_actions`` for the same actions (for flow policies, the denoising chain).
        logits: For token policies, ``[B, A, n_bins or V]``. For Gaussian policies, ``[B, A, 2]`` means and log-stds.
        values: ``[B]`` float32.
    """

    actions: Tensor
    sequences: Tensor
    logits: Tensor
    values: Tensor


class BaseActions(NamedTuple):
    """The result of ``ActionModel.propose`` for ``B`` observations.

    Attributes:
        chunks: float32 ``[B, N, C, D]`` in env units. The first of the ``N`` candidates is the greedy chunk.
        features: float32 ``[B, F]``, the model's features for the observation.
        sample: Samples more chunks ``[B, K, C, D]`` with uniform random numbers ``[B, K, num_candidate_uniforms]``, reusing stored
            results of the pass over images and prompt. None if not requested.
    """

    chunks: Tensor
    features: Tensor
    sample: Callable[[Tensor], Tensor] | None = None


class ActionEvaluation(NamedTuple):
    """The result of ``evaluate_actions``: float32 ``logprobs [B, A]``, ``entropy [B, A]``, ``values [B]``."""

    logprobs: Tensor
    entropy: Tensor
    values: Tensor


@dataclass
class EpisodeResult:
    """The result of a finished episode.

    Attributes:
        actions_clipped_fraction: Fraction of action values that were out of bounds and clipped, or None if not recorded.
        actions_max_abs: Maximum absolute action value before clipping, or None if not recorded.
        states_far_fraction: Fraction of states with a value far outside the policy's statistics, or None without statistics.
        success_reported: Whether the env reported at any step if the goal was reached.
        true_success: The simulator's success if a classifier detects ``success``. None without a classifier, or if the simulator does not
            report success.
    """

    spec: EpisodeSpec
    task: str
    success: bool
    episode_return: float
    num_env_steps: int
    actions_clipped_fraction: float | None = None
    actions_max_abs: float | None = None
    success_reported: bool = False
    true_success: bool | None = None
    states_far_fraction: float | None = None


@dataclass
class ChunkStep:
    """The result of ``VectorEnv.chunk_step``.

    Attributes:
        observation: The next observation. With auto-reset, slots whose episodes ended have the new episode's first observation.
        rewards: float32 ``[B, C]``; 0 for actions that were not executed.
        executed: bool ``[B, C]``, whether the action was applied. False for actions after the episode ended within the chunk, and
            without auto-reset, in env slots that had already finished.
        terminated: bool ``[B]``, whether the episode reached a terminal state during this chunk.
        truncated: bool ``[B]``, whether the time limit or simulator truncated the episode. Never set along with ``terminated``.
        success: bool ``[B]``, success at the end of this chunk, or of the episode that ended in it.
        final_env_ids: int64 ``[K]``, env slots whose episodes ended during this chunk.
        final_observation: The true last observation of these K episodes, or None if K is 0.
        episodes: The K results, in the order of ``final_env_ids``.
        lost_env_ids: int64 ``[L]``, env slots whose simulators were lost (crashed, hung or killed). Their episodes are void and have
            been restarted with the same ``EpisodeSpec``: the observation is the first, ``rewards`` and ``success`` are 0, and
            ``executed``, ``terminated`` and ``truncated`` are false.
    """

    observation: Observation
    rewards: np.ndarray
    executed: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    success: np.ndarray
    final_env_ids: np.ndarray
    final_observation: Observation | None
    episodes: list[EpisodeResult]
    lost_env_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))


class SupportsAct(Protocol):
    """Any object with a method ``act``."""

    def act(self, observation: Observation) -> np.ndarray:
        """Return actions for ``B`` observations in env units: float32 ``[B, C, D]`` or ``[B, D]``."""
        ...


@dataclass
class RolloutBatch:
    """A time-major rollout. Tensors are ``[T, B, ...]``, or after ``flatten``, ``[N, ...]`` with ``N = T * B``.

    Attributes:
        observation: ``T * B`` rows, time-major.
        action_tokens: ``[T, B, K]`` samples, which are int64 tokens, or float32 values for continuous policies.
        rollout_logprobs: float32 ``[T, B, A]``, computed by the rollout policy.
        action_rewards: float32 ``[T, B, C]``.
        action_mask: bool ``[T, B, C]``, whether the action was executed.
        loss_mask: bool ``[T, B]``, whether the policy call is included in the loss. False after an episode's end, and for all calls
            of an episode whose simulator was lost.
        terminated, truncated: bool ``[T, B]``.
        bootstrap_values: float32 ``[T, B]``. If ``truncated``, value of the true final observation; at the last call of an unfinished
            episode, value of the observation after the last chunk; otherwise 0.
        group_ids: int64 ``[T, B]``, which are equal for episodes with the same ``EpisodeSpec``.
        episode_ids: int64 ``[T, B]``. An episode restarted after the loss of its simulator has a new ID.
        policy_version: int64 ``[T, B]``, number of weight updates before sampling.
        rollout_values: float32 ``[T, B]``, computed by the rollout policy. None if it has no values or they are not needed.
        values, old_logprobs, ref_logprobs: ``[T, B]``, ``[T, B, A]``, ``[T, B, A]``, filled in by the trainer.
        advantages, returns: ``[T, B, C]``, ``[T, B]``, filled in by ``Algorithm.compute_advantages``.
        episodes: Each env's index across all ranks and the result of its first episode. An env is absent if its simulator's process
            was lost during this episode.
        specs: Maps ``episode_ids`` to ``EpisodeSpec``.
    """

    # `episodes` excludes later episodes because they are a biased sample: short episodes, which are mostly successes, are more likely
    # to finish within the rollout.

    observation: Observation
    action_tokens: Tensor
    rollout_logprobs: Tensor
    action_rewards: Tensor
    action_mask: Tensor
    loss_mask: Tensor
    terminated: Tensor
    truncated: Tensor
    bootstrap_values: Tensor
    group_ids: Tensor
    episode_ids: Tensor
    policy_version: Tensor
    rollout_values: Tensor | None = None
    values: Tensor | None = None
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None
    episodes: list[tuple[int, EpisodeResult]] = field(default_factory=list)
    specs: dict[int, EpisodeSpec] = field(default_factory=dict)

    @property
    def rewards(self) -> Tensor:
        """Total reward per chunk, float32 ``[T, B]``."""
        return self.action_rewards.sum(-1)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensor fields that are not None by name."""
        from torch import Tensor

        return {f.name: value for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)}

    @classmethod
    def concatenate(cls, parts: Sequence[RolloutBatch], observation: Observation | None = None) -> RolloutBatch:
        """Concatenate time-major rollouts of different envs along ``B``. All must have the same number of chunks.

        ``observation`` contains the concatenated ``T * B`` rows, if available; with None, the parts' observations are concatenated.
        """
        import torch

        if observation is None:
            observation = _join_time_major([part.observation for part in parts], len(parts[0].loss_mask))
        joined: dict[str, Any] = {name: [part.tensors()[name] for part in parts] for name in parts[0].tensors()}
        joined = {name: torch.cat(tensors, dim=1) for name, tensors in joined.items()}
        episodes = [episode for part in parts for episode in part.episodes]
        specs = {key: spec for part in parts for key, spec in part.specs.items()}
        return replace(parts[0], observation=observation, episodes=episodes, specs=specs, **joined)

    def _changed(self, change: Callable[[Tensor], Tensor], observation: Observation) -> RolloutBatch:
        """Return a copy with ``change`` applied to every tensor and with a new observation."""
        tensors: dict[str, Any] = {name: change(tensor) for name, tensor in self.tensors().items()}
        return replace(self, observation=observation, **tensors)

    def flatten(self) -> RolloutBatch:
        """Merge ``T`` and ``B`` into a single row axis ``N``."""
        return self._changed(lambda tensor: tensor.flatten(0, 1), self.observation)

    def to(self, device: Any) -> RolloutBatch:
        """Start copying the tensors from main memory to a device, without waiting for completion."""
        return self._changed(lambda tensor: tensor.to(device, non_blocking=True), self.observation)

    def select(self, index: Tensor | slice, observation: bool = True) -> RolloutBatch:
        """Select the rows ``index`` of a flattened batch. With ``observation=False``, the observation is not changed."""
        chosen = index if isinstance(index, slice) else index.cpu().numpy()
        seen = self.observation.select(chosen) if observation else self.observation
        return self._changed(lambda tensor: tensor[index], seen)


def _join_time_major(parts: Sequence[Observation], num_chunks: int) -> Observation:
    """Join rollouts of different envs, each with ``T * B`` time-major rows, along ``B``."""

    def join(arrays: Sequence[np.ndarray]) -> np.ndarray:
        joined = np.concatenate([array.reshape(num_chunks, -1, *array.shape[1:]) for array in arrays], axis=1)
        return joined.reshape(-1, *joined.shape[2:])

    first, widths = parts[0], [len(part) // num_chunks for part in parts]
    return Observation(
        images={name: join([part.images[name] for part in parts]) for name in first.images},
        state=None if first.state is None else join([part.state for part in parts]),
        instruction=[
            instruction
            for t in range(num_chunks)
            for part, width in zip(parts, widths, strict=True)
            for instruction in part.instruction[t * width : (t + 1) * width]
        ],
        is_resized=first.is_resized,
    )


@dataclass
class LossOutput:
    """A scalar loss for ``backward``, and detached metrics, which are summed over micro-batches for logging."""

    loss: Tensor
    metrics: dict[str, Any]
