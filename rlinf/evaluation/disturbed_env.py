"""An env that shows a policy other observations than its own, or executes other actions than the policy's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rlinf.seeding import derive_seed
from rlinf.types import ChunkStep, EpisodeSpec, Observation

if TYPE_CHECKING:
    from rlinf.envs.base import VectorEnv

Sight = Callable[[Observation, "Playing"], Observation]
"""Returns what the policy sees of an observation of ``B`` rows."""
Motion = Callable[[np.ndarray, "Playing"], np.ndarray]
"""Returns the actions that are executed in place of float32 ``[B, C, D]``."""


@dataclass
class Playing:
    """The episodes that run now.

    Attributes:
        specs: Episode of each row; None: the row is idle.
        first: Observation at the start of the episodes.
        steps: int64 ``[B]``, env steps since then.
    """

    specs: list[EpisodeSpec | None]
    first: Observation
    steps: np.ndarray


@dataclass
class EpisodeRecord:
    """The first observation of an episode, with images ``[H, W, 3]`` and state ``[S]``, and its executed actions, float32 ``[D]``."""

    images: dict[str, np.ndarray]
    state: np.ndarray | None
    instruction: str
    actions: list[np.ndarray] = field(default_factory=list)


class DisturbedEnv:
    """Wraps a ``VectorEnv`` without auto-reset for ``evaluate_policy``.

    Args:
        sight: Changes the observations before the policy sees them.
        motion: Replaces the policy's actions before the env executes them.
        records: Filled with each episode's observation before ``sight`` and its actions after ``motion``.
    """

    def __init__(
        self,
        env: VectorEnv,
        sight: Sight | None = None,
        motion: Motion | None = None,
        records: dict[EpisodeSpec, EpisodeRecord] | None = None,
    ) -> None:
        self.env, self.sight, self.motion, self.records = env, sight, motion, records

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    def reset(self, *, options: dict[str, Any]) -> tuple[Observation, dict[str, Any]]:
        """Start the episodes of ``options``."""
        observation, infos = self.env.reset(options=options)
        specs = list(options["episodes"])
        self.playing = Playing(specs, observation, np.zeros(len(specs), dtype=np.int64))
        for row in range(len(specs)):
            self._begin(row)
        return self._shown(observation), infos

    def chunk_step(self, actions: np.ndarray) -> ChunkStep:
        """Execute actions ``[B, C, D]``."""
        playing = self.playing
        actions = actions if self.motion is None else self.motion(actions, playing)
        step = self.env.chunk_step(actions)
        for row in np.flatnonzero(step.executed.any(1)):
            spec = playing.specs[row]
            if self.records is not None and spec is not None:
                self.records[spec].actions += list(actions[row][step.executed[row]])
        playing.steps += step.executed.sum(1)
        for row in step.lost_env_ids.tolist():  # the episode starts again
            playing.steps[row] = 0
            self._begin(row)
        return replace(step, observation=self._shown(step.observation))

    def _begin(self, row: int) -> None:
        spec, first = self.playing.specs[row], self.playing.first
        if self.records is not None and spec is not None:
            images = {name: image[row].copy() for name, image in first.images.items()}
            state = None if first.state is None else first.state[row].copy()
            self.records[spec] = EpisodeRecord(images, state, first.instruction[row])

    def _shown(self, observation: Observation) -> Observation:
        return observation if self.sight is None else self.sight(observation, self.playing)


class NoPolicy:
    """SupportsAct by zeros ``[C, D]``, which ``motion`` replaces."""

    def __init__(self, action_dim: int, num_actions: int = 16) -> None:
        self.shape = (num_actions, action_dim)

    def act(self, observation: Observation) -> np.ndarray:
        """Return float32 zeros ``[B, C, D]``."""
        return np.zeros((len(observation), *self.shape), dtype=np.float32)


def replace_instruction(sentences: Mapping[str, str]) -> Sight:
    """Show another sentence for each; one that is not in the mapping stays."""
    return lambda seen, playing: replace(seen, instruction=[sentences.get(one, one) for one in seen.instruction])


def through(cameras: Sequence[str], change: Callable[[np.ndarray], np.ndarray]) -> Sight:
    """Change the images ``[B, H, W, 3]`` of some cameras."""

    def sight(seen: Observation, playing: Playing) -> Observation:
        return replace(seen, images=seen.images | {name: change(seen.images[name]) for name in cameras})

    return sight


def images_of(images: Mapping[EpisodeSpec, Mapping[str, np.ndarray]]) -> Sight:
    """Show a still image ``[H, W, 3]`` of each camera throughout an episode; episodes that are not in the mapping stay unmodified."""

    def sight(seen: Observation, playing: Playing) -> Observation:
        shown = {name: image.copy() for name, image in seen.images.items()}
        for row, spec in enumerate(playing.specs):
            for name, still in images.get(spec, {}).items() if spec is not None else ():
                shown[name][row] = still
        return replace(seen, images=shown)

    return sight


def states_of(states: Mapping[EpisodeSpec, np.ndarray]) -> Sight:
    """Show a state ``[S]`` throughout an episode; episodes that are not in the mapping stay unmodified."""

    def sight(seen: Observation, playing: Playing) -> Observation:
        shown = None if seen.state is None else seen.state.copy()
        for row, spec in enumerate(playing.specs):
            if shown is not None and spec in states:
                shown[row] = states[spec]
        return replace(seen, state=shown)

    return sight


def both(one: Sight, other: Sight) -> Sight:
    """Show what two changes make of an observation."""
    return lambda seen, playing: other(one(seen, playing), playing)


def fixed(sequences: Mapping[EpisodeSpec, np.ndarray]) -> Motion:
    """Execute actions ``[steps, D]`` of each episode, one after the other, and zeros after the last."""

    def motion(actions: np.ndarray, playing: Playing) -> np.ndarray:
        executed = np.zeros_like(actions)
        for row, spec in enumerate(playing.specs):
            if spec is not None:
                part = sequences[spec][playing.steps[row] :][: actions.shape[1]]
                executed[row, : len(part)] = part
        return executed

    return motion


@dataclass(frozen=True)
class TimedPush:
    """A push by something else: ``action [D]`` is executed in place of the policy's from env step ``start`` to before ``end``."""

    start: int
    end: int
    action: np.ndarray


def pushed(pushes: Mapping[EpisodeSpec, TimedPush], motion: Motion | None = None) -> Motion:
    """Push in each episode; otherwise execute the actions of the policy, or of another ``motion``."""

    def disturbed(actions: np.ndarray, playing: Playing) -> np.ndarray:
        executed = actions.copy() if motion is None else motion(actions, playing)
        for row, spec in enumerate(playing.specs):
            if spec is not None:
                push, steps = pushes[spec], playing.steps[row] + np.arange(actions.shape[1])
                executed[row, (push.start <= steps) & (steps < push.end)] = push.action
        return executed

    return disturbed


def random_actions(spec: EpisodeSpec, low: np.ndarray, high: np.ndarray, count: int) -> np.ndarray:
    """Return uniform actions ``[count, D]`` of an episode, the same in every audit."""
    generator = np.random.default_rng(derive_seed(spec.seed, "random actions", spec.task_id, spec.init_state_id))
    return generator.uniform(low, high, (count, len(low))).astype(np.float32)


def push_of(spec: EpisodeSpec, low: np.ndarray, high: np.ndarray, num_steps: int) -> TimedPush:
    """Return the push of an episode that takes ``num_steps`` without it: to a corner of the action space, after a third, for a quarter of them."""
    generator = np.random.default_rng(derive_seed(spec.seed, "push", spec.task_id, spec.init_state_id))
    start = num_steps // 3
    corner = np.where(generator.random(len(low)) < 0.5, low, high).astype(np.float32)
    return TimedPush(start, start + max(2, num_steps // 4), corner)
