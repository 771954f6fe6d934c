"""Baselines beside a result: policies that do not learn, and policies that do not see.

A success rate shows neither that RL was needed nor that the policy uses its inputs; baselines with a similar rate show the opposite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from rlinf.errors import ConfigError
from rlinf.evaluation.disturbed_env import (
    DisturbedEnv,
    EpisodeRecord,
    NoPolicy,
    RunningEpisodes,
    Sight,
    map_images,
    replace_instruction,
    still_images,
    successors,
    swapped,
)
from rlinf.evaluation.evaluator import EvaluationPlan, evaluate_policy, start_episodes
from rlinf.evaluation.result import EvaluationResult, Success, success_table
from rlinf.files import Json
from rlinf.seeding import derive_seed
from rlinf.types import EpisodeResult, EpisodeSpec

if TYPE_CHECKING:
    from rlinf.envs.base import VectorEnv
    from rlinf.models.embodiment.base import ActionModel
    from rlinf.types import SupportsAct

    Policy = ActionModel | SupportsAct

LENGTHS, NOISES = (0.5, 1.0, 1.5, 2.0), (0.5, 1.0, 1.5)
"""Lengths of constants and bounds of noise, in units of half the action range."""
NUM_TRAINING, NUM_HELD_OUT, NUM_SPOILT = 36, 200, 100
"""Maximum number of episodes: to choose constants, to evaluate them, and to evaluate noise and spoilt inputs."""


def shifted(env: VectorEnv, shift_of: Callable[[EpisodeSpec, str, np.ndarray], np.ndarray]) -> VectorEnv:
    """Return the env with a shift added to each action, from the nearest bound if the action is outside its bounds, and clipped.

    ``shift_of`` maps an episode, its instruction and the env steps ``[C]`` of a chunk to shifts ``[C, D]`` or ``[D]``, in units of half
    the action range.
    """
    low, high = env.action_low, env.action_high

    def motion(actions: np.ndarray, running: RunningEpisodes) -> np.ndarray:
        executed = np.clip(actions, low, high)
        for row, spec in enumerate(running.specs):
            if spec is not None:
                steps = running.steps[row] + np.arange(actions.shape[1])
                executed[row] += (high - low) / 2 * shift_of(spec, running.first.instruction[row], steps)
        return np.clip(executed, low, high)

    return cast("VectorEnv", DisturbedEnv(env, motion=motion))


def noisy(env: VectorEnv, noise: float, seed: int = 0) -> VectorEnv:
    """Return the env with uniform noise of at most ``noise`` added to each action value; it depends on ``seed`` and the episode only."""
    shape = (env.max_episode_steps, env.action_dim)

    @cache
    def draws(spec: EpisodeSpec) -> np.ndarray:
        key = ("noise", spec.suite, env.task_names[spec.task_id], spec.init_state_id, spec.seed)
        return np.random.default_rng(derive_seed(seed, *key)).uniform(-noise, noise, shape)

    return shifted(env, lambda spec, instruction, steps: draws(spec)[np.minimum(steps, shape[0] - 1)])


def plane_offsets(action_dim: int, lengths: Sequence[float] = LENGTHS, num_directions: int = 8) -> np.ndarray:
    """Return offsets ``[len(lengths) * num_directions, D]``, evenly spaced in the plane of the first two action values."""
    angles = np.tile(2 * np.pi * np.arange(num_directions) / num_directions, len(lengths))
    offsets = np.zeros((len(angles), max(action_dim, 2)))
    offsets[:, 0], offsets[:, 1] = np.cos(angles), np.sin(angles)
    return (np.repeat(lengths, num_directions)[:, None] * offsets)[:, :action_dim]


@dataclass(frozen=True)
class Constants:
    """The constant offset ``[D]`` with the most successes (if tied, the highest return), overall and for each instruction."""

    best: np.ndarray
    by_instruction: dict[str, np.ndarray]

    @classmethod
    def choose(
        cls,
        model: Policy,
        env: VectorEnv,
        specs: Sequence[EpisodeSpec],
        offsets: np.ndarray,
        **options: Any,
    ) -> Constants:
        """Evaluate a policy with each row of ``offsets [N, D]``; ``options`` are for ``evaluate_policy``.

        Take ``specs`` of the training split, and evaluate the winner on held-out episodes, because the best of many is partly luck.
        """
        results = [evaluate_policy(model, cls(offset, {}).apply(env), specs, **options) for offset in offsets]
        instructions = {spec: record.instruction for spec, record in first_observations(env, specs).items()}

        def best(group: Sequence[EpisodeSpec]) -> np.ndarray:
            def score(result: EvaluationResult) -> tuple[float, float]:
                episodes = [episode for episode in result.results if episode.spec in group]
                return sum(episode.success for episode in episodes), sum(episode.episode_return for episode in episodes)

            scores = [score(result) for result in results]
            return offsets[scores.index(max(scores))]

        groups = {text: [spec for spec in specs if instructions[spec] == text] for text in instructions.values()}
        return cls(best(specs), {text: best(group) for text, group in groups.items()})

    def apply(self, env: VectorEnv) -> VectorEnv:
        """Return the env with the offset of each episode's instruction (``best`` if it has none) added to the actions."""
        return shifted(env, lambda spec, instruction, steps: self.by_instruction.get(instruction, self.best))


def first_observations(env: VectorEnv, specs: Sequence[EpisodeSpec]) -> dict[EpisodeSpec, EpisodeRecord]:
    """Start each episode and return its first observation."""
    records: dict[EpisodeSpec, EpisodeRecord] = {}
    recording = cast("VectorEnv", DisturbedEnv(env, records=records))
    for first in range(0, len(specs), env.num_envs):
        start_episodes(recording, specs[first : first + env.num_envs])
    return records


def evaluate_baselines(
    policy: Policy,
    base: Policy | None,
    env: VectorEnv,
    specs: Sequence[EpisodeSpec],
    *,
    plan: EvaluationPlan = EvaluationPlan(),
    on_result: Callable[[EpisodeResult], None] = lambda result: None,
    after_base: Callable[[], None] = lambda: None,
    **sampling: Any,
) -> list[Json]:
    """Evaluate the baselines of a policy on ``specs``, and return a row for each (see ``EvaluationResult.baselines``).

    Args:
        base: The policy with which RL started; None uses ``policy`` instead.
        plan: Only ``ranks`` is used; a collective call.
        after_base: Called once ``base`` has run all of its episodes, before ``policy`` runs any; e.g. exchanges them on a device.
        sampling: ``greedy``, ``temperature`` and ``seed`` of ``evaluate_policy``.
    """
    options: Json = {"plan": EvaluationPlan(ranks=plan.ranks), "on_result": on_result, **sampling}
    held_out, spoilt = specs[:NUM_HELD_OUT], specs[:NUM_SPOILT]
    rows: list[Json] = []

    def add(name: str, shows: str, model: Policy, changed: VectorEnv | str, specs: Sequence[EpisodeSpec]) -> None:
        """Evaluate in the env ``changed``; a text is the reason why that is not possible."""
        success, note = None, f"not run: {changed}"
        if not isinstance(changed, str):
            success, note = evaluate_policy(model, changed, specs, **options).total.as_dict(), ""
        rows.append(
            {"name": name, "meaning": f"Close to the result, it shows that {shows}.", "note": note, "success": success}
        )

    start, name = (policy, "policy") if base is None else (base, "BC policy")
    offsets = plane_offsets(env.action_dim)
    constants = Constants.choose(start, env, env.episode_specs("train")[:NUM_TRAINING], offsets, **options)
    constant = Constants(constants.best, {})
    add(f"{name} + constant", "RL only removed a constant error", start, constant.apply(env), held_out)
    shows = "RL only removed a constant error per instruction"
    add(f"{name} + constant per instruction", shows, start, constants.apply(env), held_out)
    for noise in NOISES:
        noisy_env = noisy(env, noise, sampling.get("seed", 0))
        add(f"{name} + noise of {noise:g}", "random motion suffices", start, noisy_env, spoilt)
    if base is None:
        for row in rows:
            row["note"] = "without a different checkpoint from before RL, the evaluated policy"
    after_base()
    for name, shows, changed in _spoilt_inputs(env, spoilt):
        add(f"policy with {name}", shows, policy, changed, spoilt)
    script = NoPolicy(env.action_dim, num_actions=1)
    add("script without the instruction", "the instruction does not matter", script, _scripted(env, held_out), held_out)
    return rows


def _spoilt_inputs(env: VectorEnv, specs: Sequence[EpisodeSpec]) -> Iterator[tuple[str, str, VectorEnv | str]]:
    """Yield the name, the conclusion and the env of each change of the observations, or the reason why it is not possible."""

    def changed(sight: Sight) -> VectorEnv:
        return cast("VectorEnv", DisturbedEnv(env, sight))

    records, partners = first_observations(env, specs), successors(specs)
    grey: VectorEnv | str = "the env shows no images"
    still: VectorEnv | str = grey
    if cameras := list(records[specs[0]].images):
        level = round(np.mean([np.mean(image) for record in records.values() for image in record.images.values()]))
        grey = changed(map_images(cameras, lambda images: np.full_like(images, level)))
        still = f"a task has only one of the {len(specs)} episodes"
    if cameras and len(partners) == len(specs):
        still = changed(still_images({spec: records[partner].images for spec, partner in partners.items()}))
    yield "a grey image", "the policy does not need images", grey
    yield "a still image", "the places of the objects do not matter: the image is from a different episode", still
    by_task: dict[str, list[str]] = {}
    for spec, record in records.items():
        by_task.setdefault(env.task_names[spec.task_id], []).append(record.instruction)
    different: VectorEnv | str = "all episodes have the same instruction"
    fixed: VectorEnv | str = different
    if replacements := swapped(by_task):
        different = changed(replace_instruction(replacements))
        fixed = changed(replace_instruction(dict.fromkeys(replacements, records[specs[0]].instruction)))
    yield "a different instruction", "the policy does not read its instruction", different
    yield "one instruction for all", "the policy does not read its instruction", fixed


def _scripted(env: VectorEnv, specs: Sequence[EpisodeSpec]) -> VectorEnv | str:
    """Return the env in which ``uninstructed_actions`` replace the policy's, or the reason why it has none for one of the episodes."""
    try:
        for first in range(0, len(specs), env.num_envs):
            start_episodes(env, specs[first : first + env.num_envs])
            env.uninstructed_actions()
    except ConfigError as error:
        return str(error)
    return cast("VectorEnv", DisturbedEnv(env, motion=lambda actions, running: env.uninstructed_actions()[:, None]))


def baseline_table(rows: Sequence[Json]) -> str:
    """Return the rows of ``evaluate_baselines`` as a text table, followed by their notes."""
    ran = [(row["name"], Success.from_dict(row["success"])) for row in rows if row["success"] is not None]
    names: dict[str, list[str]] = {}
    for row in rows:
        names.setdefault(row["note"], []).append(row["name"])
    notes = [f"{', '.join(group)}: {note}" for note, group in names.items() if note]
    return "\n".join([success_table(ran, "baseline", "success"), *notes])
