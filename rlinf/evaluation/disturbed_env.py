"""Env wrapper that changes the observations before the policy sees them, or the actions before they are executed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rlinf.seeding import derive_seed
from rlinf.types import ChunkStep, EpisodeSpec, Observation

if TYPE_CHECKING:
    from rlinf.envs.base import VectorEnv

Sight = Callable[[Observation, "RunningEpisodes"], Observation]
"""Function that maps the observation of ``B`` env slots to the one shown to the policy."""
Motion = Callable[[np.ndarray, "RunningEpisodes"], np.ndarray]
"""Function that maps the policy's actions, float32 ``[B, C, D]``, to the executed actions."""


@dataclass
class RunningEpisodes:
    """The episodes that are currently running.

    Attributes:
        specs: Episode of each env slot, or None if the slot is idle.
        first: Observation at the start of each episode.
        steps: Number of env steps since then, int64 ``[B]``.
    """

    specs: list[EpisodeSpec | None]
    first: Observation
    steps: np.ndarray


@dataclass
class EpisodeRecord:
    """An episode's first observation, with images ``[H, W, 3]`` and state ``[S]``, and its executed actions, float32 ``[D]``."""

    images: dict[str, np.ndarray]
    state: np.ndarray | None
    instruction: str
    actions: list[np.ndarray] = field(default_factory=list)


class DisturbedEnv:
    """Wraps a ``VectorEnv`` that does not auto-reset, for use with ``evaluate_policy``.

    Args:
        sight: Changes the observations before the policy sees them.
        records: Stores each episode's observation before ``sight`` and its actions after ``motion``.
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
        """Start the episodes in ``options``."""
        observation, infos = self.env.reset(options=options)
        specs = list(options["episodes"])
        self.running = RunningEpisodes(specs, observation, np.zeros(len(specs), dtype=np.int64))
        for row in range(len(specs)):
            self._begin(row)
        return self._shown(observation), infos

    def chunk_step(self, actions: np.ndarray) -> ChunkStep:
        """Execute actions ``[B, C, D]``."""
        running = self.running
        actions = actions if self.motion is None else self.motion(actions, running)
        step = self.env.chunk_step(actions)
        for row in np.flatnonzero(step.executed.any(1)):
            spec = running.specs[row]
            if self.records is not None and spec is not None:
                self.records[spec].actions += list(actions[row][step.executed[row]])
        running.steps += step.executed.sum(1)
        for row in step.lost_env_ids.tolist():  # the episode restarts
            running.steps[row] = 0
            self._begin(row)
        return replace(step, observation=self._shown(step.observation))

    def _begin(self, row: int) -> None:
        spec, first = self.running.specs[row], self.running.first
        if self.records is not None and spec is not None:
            images = {name: image[row].copy() for name, image in first.images.items()}
            state = None if first.state is None else first.state[row].copy()
            self.records[spec] = EpisodeRecord(images, state, first.instruction[row])

    def _shown(self, observation: Observation) -> Observation:
        return observation if self.sight is None else self.sight(observation, self.running)


class NoPolicy:
    """Policy that returns zeros ``[C, D]``, to be replaced by ``motion``."""

    def __init__(self, action_dim: int, num_actions: int = 16) -> None:
        self.shape = (num_actions, action_dim)

    def act(self, observation: Observation) -> np.ndarray:
        """Return float32 zeros ``[B, C, D]``."""
        return np.zeros((len(observation), *self.shape), dtype=np.float32)


def replace_instruction(instructions: Mapping[str, str]) -> Sight:
    """Replace every instruction that has an entry in the mapping."""
    return lambda seen, running: replace(seen, instruction=[instructions.get(text, text) for text in seen.instruction])


def map_images(cameras: Sequence[str], change: Callable[[np.ndarray], np.ndarray]) -> Sight:
    """Apply ``change`` to the images ``[B, H, W, 3]`` of the given cameras."""

    def sight(seen: Observation, running: RunningEpisodes) -> Observation:
        return replace(seen, images=seen.images | {name: change(seen.images[name]) for name in cameras})

    return sight


def still_images(images: Mapping[EpisodeSpec, Mapping[str, np.ndarray]]) -> Sight:
    """Show a fixed image ``[H, W, 3]`` per camera throughout each episode in the mapping."""

    def sight(seen: Observation, running: RunningEpisodes) -> Observation:
        shown = {name: image.copy() for name, image in seen.images.items()}
        for row, spec in enumerate(running.specs):
            for name, still in images.get(spec, {}).items() if spec is not None else ():
                shown[name][row] = still
        return replace(seen, images=shown)

    return sight


def still_states(states: Mapping[EpisodeSpec, np.ndarray]) -> Sight:
    """Show a fixed state ``[S]`` throughout each episode in the mapping."""

    def sight(seen: Observation, running: RunningEpisodes) -> Observation:
        shown = None if seen.state is None else seen.state.copy()
        for row, spec in enumerate(running.specs):
            if shown is not None and spec in states:
                shown[row] = states[spec]
        return replace(seen, state=shown)

    return sight


def compose(first: Sight, second: Sight) -> Sight:
    """Apply two changes one after the other."""
    return lambda seen, running: second(first(seen, running), running)


def fixed(sequences: Mapping[EpisodeSpec, np.ndarray]) -> Motion:
    """Replay each episode's actions ``[steps, D]``, followed by zeros."""

    def motion(actions: np.ndarray, running: RunningEpisodes) -> np.ndarray:
        executed = np.zeros_like(actions)
        for row, spec in enumerate(running.specs):
            if spec is not None:
                part = sequences[spec][running.steps[row] :][: actions.shape[1]]
                executed[row, : len(part)] = part
        return executed

    return motion


@dataclass(frozen=True)
class TimedPush:
    """External push: ``action [D]`` replaces the policy's action from env step ``start`` up to, but not including, ``end``."""

    start: int
    end: int
    action: np.ndarray


def pushed(pushes: Mapping[EpisodeSpec, TimedPush], motion: Motion | None = None) -> Motion:
    """Apply each episode's push; at all other steps, execute the policy's actions or, if given, the output of ``motion``."""

    def disturbed(actions: np.ndarray, running: RunningEpisodes) -> np.ndarray:
        executed = actions.copy() if motion is None else motion(actions, running)
        for row, spec in enumerate(running.specs):
            if spec is not None:
                push, steps = pushes[spec], running.steps[row] + np.arange(actions.shape[1])
                executed[row, (push.start <= steps) & (steps < push.end)] = push.action
        return executed

    return disturbed


def random_actions(spec: EpisodeSpec, low: np.ndarray, high: np.ndarray, count: int) -> np.ndarray:
    """Return uniformly random actions ``[count, D]``, seeded by the episode."""
    generator = np.random.default_rng(derive_seed(spec.seed, "random actions", spec.task_id, spec.init_state_id))
    return generator.uniform(low, high, (count, len(low))).astype(np.float32)


def draw_push(spec: EpisodeSpec, low: np.ndarray, high: np.ndarray, num_steps: int) -> TimedPush:
    """Return an episode's push: a corner of the action space, applied after a third of ``num_steps`` for a quarter of them."""
    generator = np.random.default_rng(derive_seed(spec.seed, "push", spec.task_id, spec.init_state_id))
    start = num_steps // 3
    corner = np.where(generator.random(len(low)) < 0.5, low, high).astype(np.float32)
    return TimedPush(start, start + max(2, num_steps // 4), corner)


def successors(
    specs: Sequence[EpisodeSpec], fits: Callable[[EpisodeSpec, EpisodeSpec], bool] = lambda spec, partner: True
) -> dict[EpisodeSpec, EpisodeSpec]:
    """Map each episode to the next suitable episode of its task, if there is one."""
    partners = {}
    for index, spec in enumerate(specs):
        following = [*specs[index + 1 :], *specs[:index]]
        partner = next((other for other in following if other.task_id == spec.task_id and fits(spec, other)), None)
        if partner is not None:
            partners[spec] = partner
    return partners


def swapped(task_instructions: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Map each instruction to a different one, from the same task if it has several; empty if there is only one instruction."""
    tasks = {task: sorted(set(instructions)) for task, instructions in task_instructions.items()}
    all_instructions = sorted({text for instructions in tasks.values() for text in instructions})
    replacements = {}
    for instructions in tasks.values():
        choices = instructions if len(instructions) > 1 else all_instructions
        # Shift by half of the sorted list, so that instructions that name two objects also differ in the first object.
        for text in instructions:
            replacements[text] = choices[(choices.index(text) + max(1, len(choices) // 2)) % len(choices)]
    return {text: replacement for text, replacement in replacements.items() if text != replacement}
