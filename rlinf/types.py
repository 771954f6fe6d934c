"""Types that cross module boundaries, with their shapes.

Axes: ``B`` parallel envs (or batch rows), ``T`` chunks of a rollout, ``C`` actions per chunk, ``D`` action dimensions, ``A``
log-probability columns per policy call (``C * D`` for a token policy), ``K`` values of a sample (``A`` tokens, or an entire
denoising chain), ``H, W`` pixels, ``S`` state dimensions.

Time: an *env step* is one simulator step. A *chunk* is one policy call and its ``C`` env steps. An *iteration* is one rollout and its
updates. Within an update, an *optimiser step* trains one minibatch. A bare ``step`` is an iteration in ``rlinf.rollout`` and
``rlinf.training``, an env step in ``rlinf.envs``, an optimiser step in behaviour cloning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

# Simulator processes import this module; torch would cost each of them seconds and memory.
if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, order=True)
class EpisodeSpec:
    """The initial conditions of an episode: equal specs give bit-equal first observations.

    Attributes:
        suite: Name of the task suite (``"tabletop"``).
        task_id: Index into the suite's tasks.
        init_state_id: Index of the task's initial state; training and evaluation ranges are disjoint.
        seed: Seed of all randomness in the episode.
    """

    suite: str
    task_id: int
    init_state_id: int
    seed: int


@dataclass(frozen=True)
class EnvSpec:
    """The observation space of an environment, known from its settings before it is built.

    Attributes:
        name: ``env.name``.
        cameras: Names of the images, in order.
        default_cameras: Cameras without an explicit setting.
        image_size: Height and width of an image in pixels.
        state_dim: Dimensions of ``Observation.state``; 0: no state; None: unknown.
        override_for_state: ``(min_dim, max_dim) -> override``, such as ``env.state=proprio``, for a state of these dimensions; None:
            impossible.
    """

    name: str
    cameras: Sequence[str]
    default_cameras: Sequence[str]
    image_size: int
    state_dim: int | None
    override_for_state: Callable[[int, int], str | None] = lambda narrowest, widest: None


@dataclass
class Observation:
    """The observations of ``B`` envs.

    Attributes:
        images: Camera name to uint8 ``[B, H, W, 3]``.
        state: float32 ``[B, S]`` or None.
        instruction: ``B`` strings.
        is_resized: ``ActionModel.resize_images`` has resized the images.
        is_cropped: The images have a random crop (``sft.augment``), which replaces the policy's centre crop.
        suffixes: Text after each instruction in the prompt; None: the policy's ``prompt_suffix``.
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
        """Return the rows ``index`` (integers) as a new observation; a slice gives views instead of copies."""
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
        """Return a new observation with ``rows`` in the places ``index`` (int64 ``[K]``)."""
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
        """Join observations along the row axis."""
        first = parts[0]
        return Observation(
            images={name: np.concatenate([part.images[name] for part in parts]) for name in first.images},
            state=None if first.state is None else np.concatenate([part.state for part in parts]),
            instruction=[instruction for part in parts for instruction in part.instruction],
            is_resized=first.is_resized,
        )

    @staticmethod
    def stack_history(history: Sequence[Observation]) -> Observation:
        """Stack ``M`` consecutive observations, the latest last: images ``[B, M, H, W, 3]``, state ``[B, M, S]``."""
        latest = history[-1]
        return Observation(
            images={name: np.stack([observation.images[name] for observation in history], 1) for name in latest.images},
            state=None if latest.state is None else np.stack([observation.state for observation in history], 1),
            instruction=latest.instruction,
            is_resized=latest.is_resized,
        )


class ActionPrediction(NamedTuple):
    """The result of ``predict_action_batch``, in this order.

    Attributes:
        actions: ``[B, C, D]`` float32 in env units.
        sequences: Token policies: ``[B, L + A]`` prompt and action tokens. Other policies: ``[B, K]``, the input of
            ``evaluate_actions`` for the same actions (flow policies: the denoising chain).
        logits: Token policies: ``[B, A, n_bins or V]``. Gaussian policies: ``[B, A, 2]`` means and log-stds.
        values: ``[B]`` float32.
    """

    actions: Tensor
    sequences: Tensor
    logits: Tensor
    values: Tensor


class BaseActions(NamedTuple):
    """The result of ``ActionModel.propose`` for ``B`` observations.

    Attributes:
        chunks: float32 ``[B, N, C, D]`` in env units; the first of the ``N`` candidates is the greedy one.
        features: float32 ``[B, F]``, the model's features of the observation.
        sample: Draws more chunks ``[B, K, C, D]`` from uniforms ``[B, K, num_candidate_uniforms]``, without a second pass over
            images and prompt, whose results it holds. None: not requested.
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
    """One finished episode.

    Attributes:
        actions_clipped_fraction: Fraction of its action values that were outside the bounds and clipped; None: not recorded.
        actions_max_abs: Largest magnitude of an action value before clipping; None: not recorded.
        states_far_fraction: Fraction of its states with a value far outside the policy's statistics; None: no statistics.
        success_reported: The env reported at some step whether the goal is reached.
        true_success: The simulator's success, if ``success`` comes from a classifier or has label noise; None: ``success`` is the
            simulator's, or it reports none.
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
        observation: The next observation. With auto-reset, env slots of finished episodes show the new episode.
        rewards: float32 ``[B, C]``; 0 if not executed.
        executed: bool ``[B, C]``: the action was applied. False after the end of the episode inside the chunk and, without
            auto-reset, in env slots that had already finished.
        terminated: bool ``[B]``: the episode reached a terminal state during this chunk.
        truncated: bool ``[B]``: the time limit, or the simulator, truncated the episode during this chunk (never both).
        success: bool ``[B]``: success at the end of this chunk, or of the episode that ended in it.
        final_env_ids: int64 ``[K]``: env slots with an episode that ended during this chunk.
        final_observation: True last observation of these K episodes, or None if K is 0.
        episodes: The K results, in the order of ``final_env_ids``.
        lost_env_ids: int64 ``[L]``: env slots with a lost simulator (it crashed, hung or was killed). Their episode is void, and
            the same ``EpisodeSpec`` has restarted: the observation is its first, ``rewards`` and ``success`` are 0, ``executed``,
            ``terminated`` and ``truncated`` are false.
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
    """Anything with ``act``."""

    def act(self, observation: Observation) -> np.ndarray:
        """Return actions for ``B`` observations in env units: float32 ``[B, C, D]`` or ``[B, D]``."""
        ...


@dataclass
class RolloutBatch:
    """A time-major rollout: every tensor is ``[T, B, ...]``, after ``flatten`` ``[N, ...]`` with ``N = T * B``.

    Attributes:
        observation: ``T * B`` rows, time-major.
        action_tokens: ``[T, B, K]``, the samples: int64 tokens, or float32 for continuous policies.
        rollout_logprobs: float32 ``[T, B, A]``, computed by the rollout policy.
        action_rewards: float32 ``[T, B, C]``.
        action_mask: bool ``[T, B, C]``: the action was executed.
        loss_mask: bool ``[T, B]``: the policy call counts. False after an episode's end, and in all calls of an episode
            with a lost simulator.
        terminated, truncated: bool ``[T, B]``.
        bootstrap_values: float32 ``[T, B]``: value of the true final observation if ``truncated``; at the last call of a
            running episode, value of the observation after its last chunk; else 0.
        group_ids: int64 ``[T, B]``: equal for episodes with the same ``EpisodeSpec``.
        episode_ids: int64 ``[T, B]``. An episode that restarts after the loss of its simulator has a new id.
        policy_version: int64 ``[T, B]``: number of weight updates before the sample.
        rollout_values: float32 ``[T, B]``, computed by the rollout policy; None if it has none or they are not needed.
        values, old_logprobs, ref_logprobs: ``[T, B]``, ``[T, B, A]``, ``[T, B, A]``, filled in by the trainer.
        advantages, returns: ``[T, B, C]``, ``[T, B]``, filled in by ``Algorithm.compute_advantages``.
        episodes: Env index over all ranks, and result of its first episode. An env has none if its simulator's process was lost
            during that episode.
        specs: ``episode_ids`` to ``EpisodeSpec``.
    """

    # `episodes` leaves later episodes out, because they are a biased sample: quick ones, mostly successes, are more likely to finish
    # within the rollout.

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
        """Sum of the rewards of each chunk, float32 ``[T, B]``."""
        return self.action_rewards.sum(-1)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensor fields that are set, by name."""
        from torch import Tensor

        return {f.name: value for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)}

    def select_envs(self, columns: Tensor) -> RolloutBatch:
        """Return the envs ``columns`` of a time-major batch, with all of its ``episodes``."""
        num_chunks, num_envs = self.loss_mask.shape
        rows = np.arange(num_chunks)[:, None] * num_envs + columns.numpy()
        return self._changed(lambda tensor: tensor[:, columns], self.observation.select(rows.ravel()))

    @classmethod
    def concatenate(cls, parts: Sequence[RolloutBatch], observation: Observation | None = None) -> RolloutBatch:
        """Concatenate time-major rollouts of different envs along ``B``; all have the same number of chunks.

        ``observation`` is the concatenated ``T * B`` rows if the caller has them; None concatenates the parts' observations.
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
        """Return a copy with ``change`` applied to every tensor, and a new observation."""
        tensors: dict[str, Any] = {name: change(tensor) for name, tensor in self.tensors().items()}
        return replace(self, observation=observation, **tensors)

    def flatten(self) -> RolloutBatch:
        """Merge ``T`` and ``B`` into one row axis ``N``."""
        return self._changed(lambda tensor: tensor.flatten(0, 1), self.observation)

    def to(self, device: Any) -> RolloutBatch:
        """Copy the tensors from main memory to a device, without waiting for the copies."""
        return self._changed(lambda tensor: tensor.to(device, non_blocking=True), self.observation)

    def select(self, index: Tensor | slice, observation: bool = True) -> RolloutBatch:
        """Return the rows ``index`` of a flattened batch; ``observation=False`` does not select in the observation."""
        chosen = index if isinstance(index, slice) else index.cpu().numpy()
        seen = self.observation.select(chosen) if observation else self.observation
        return self._changed(lambda tensor: tensor[index], seen)


def _join_time_major(parts: Sequence[Observation], num_chunks: int) -> Observation:
    """Join the ``T * B`` rows of rollouts of different envs along ``B``."""

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
    """A scalar loss for ``backward``, and detached metrics; their sums over micro-batches are logged."""

    loss: Tensor
    metrics: dict[str, Any]
