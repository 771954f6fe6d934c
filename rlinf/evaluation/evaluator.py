"""Measure a policy's success on a fixed list of episodes, running each once without auto-reset.

The result depends only on the policy and the list, not on the number of environments or on which episodes run at the same time.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch

from rlinf.errors import ConfigError, RejectedInputError
from rlinf.evaluation.config import NUM_ROWS
from rlinf.evaluation.result import EvaluationResult, actions_clipped, clipping_warning, far_warning
from rlinf.evaluation.stopping import StopRule
from rlinf.evaluation.twins import effects, unpaired_warning
from rlinf.evaluation.video import write_video
from rlinf.files import Json
from rlinf.models.precision import evaluation_mode
from rlinf.seeding import derive_seed
from rlinf.types import ActionPrediction, EpisodeResult, EpisodeSpec, Observation

if TYPE_CHECKING:
    from rlinf.envs.base import VectorEnv
    from rlinf.models.embodiment.base import ActionModel
    from rlinf.types import ChunkStep, SupportsAct

T = TypeVar("T")

MAX_SLUG_LEN = 100
"""Maximum length of the task name in a video's file name; file names are limited to 255 characters."""


class EpisodeContext(np.random.Generator):
    """Random generator for one episode, together with the policy's observation history and pending actions.

    Attributes:
        seen: The episode's most recent observations, one row each, padded at the start with the first one.
        planned: Actions ``[D]`` from the last chunk that have not been executed yet.
        far: Whether each state was far outside the policy's statistics (``Range.far``).
    """

    def __init__(self, seed: int, num_observations: int = 1) -> None:
        super().__init__(np.random.PCG64(seed))
        self.seen: deque[Observation] = deque(maxlen=num_observations)
        self.planned: list[np.ndarray] = []
        self.far: list[bool] = []

    def see(self, row: Observation) -> None:
        """Append an observation; the first one fills the history."""
        self.seen.extend([row] * (1 if self.seen else self.seen.maxlen or 1))


@dataclass
class BatchedPolicy:
    """Act for a batch of episodes, each with its own random generator, in model calls of ``num_rows`` rows.

    A model with ``num_observations > 1`` must see every env step, so ``act`` returns one action at a time; the remaining actions of the
    chunk are stored in the episode's context.
    """

    model: ActionModel
    stream_names: Sequence[str]
    greedy: bool
    temperature: float
    seed: int
    num_rows: int = NUM_ROWS

    def __post_init__(self) -> None:
        self.state_range = getattr(self.model, "state_range", None)

    def start_episode(self, spec: EpisodeSpec) -> EpisodeContext:
        """Return the context of an episode, seeded by its spec."""
        # Keyed by task name: unlike task_id, it does not depend on env.tasks, and neither must the random draws.
        key = ("evaluation", spec.suite, self.stream_names[spec.task_id], spec.init_state_id, spec.seed)
        return EpisodeContext(derive_seed(self.seed, *key), getattr(self.model, "num_observations", 1))

    def act(self, observation: Observation, contexts: Sequence[EpisodeContext]) -> np.ndarray:
        """Return float32 actions ``[K, C, D]`` for ``K`` rows; ``C`` is 1 for a model with ``num_observations > 1``."""
        if self.state_range is not None and observation.state is not None:
            for context, far in zip(contexts, self.state_range.far(observation.state), strict=True):
                context.far.append(bool(far))
        if getattr(self.model, "num_observations", 1) == 1:
            return act_for_rows(self.model, observation, self.draws(contexts), self.temperature, self.num_rows)
        for row, context in enumerate(contexts):
            context.see(observation.select([row]))
        planning = [context for context in contexts if not context.planned]
        if planning:
            seen = Observation.concatenate([Observation.stack_history(list(context.seen)) for context in planning])
            chunks = act_for_rows(self.model, seen, self.draws(planning), self.temperature, self.num_rows)
            for context, chunk in zip(planning, chunks, strict=True):
                context.planned = list(chunk)
        return np.stack([context.planned.pop(0)[None] for context in contexts])

    def draws(self, contexts: Sequence[EpisodeContext]) -> np.ndarray | None:
        """Return each episode's next random numbers, float32 ``[K, U]``, or None for greedy actions."""
        if self.greedy:
            return None
        uniforms = [context.random(self.model.num_uniforms, dtype=np.float32) for context in contexts]
        return np.maximum(np.stack(uniforms), np.finfo(np.float32).tiny)  # the logarithm of 0 is infinite


def act_for_rows(
    model: ActionModel,
    observation: Observation,
    uniforms: np.ndarray | None,
    temperature: float,
    num_rows: int = NUM_ROWS,
) -> np.ndarray:
    """Return float32 actions ``[K, C, D]``; a row's actions do not depend on the remaining rows.

    Args:
        uniforms: Uniform random numbers used for sampling, float32 ``[K, U]`` in (0, 1). If None, take the most likely actions.
        num_rows: Batch size of a model call; smaller batches are padded.
    """
    actions: dict[int, np.ndarray] = {}
    for rows, _, prediction in predictions_for_rows(model, observation, uniforms, temperature, num_rows):
        actions |= zip(rows, prediction.actions[: len(rows)].float().cpu().numpy(), strict=True)
    return np.stack([actions[row] for row in range(len(observation))])


def predictions_for_rows(
    model: ActionModel,
    observation: Observation,
    uniforms: np.ndarray | None,
    temperature: float,
    num_rows: int = NUM_ROWS,
) -> Iterator[tuple[list[int], dict[str, Any], ActionPrediction]]:
    """Yield the row indices, inputs and prediction of each model call made by ``act_for_rows``; padding rows are last."""
    # Matrix products of different shapes, and attention with padding, may round differently. To make a row's actions independent of
    # the batch, every call has num_rows rows (the last row is repeated) and prompts of equal length.
    groups: dict[Hashable, list[int]] = {}
    for row, length in enumerate(model.prompt_lengths(observation)):
        groups.setdefault(length, []).append(row)
    for rows in (group[at : at + num_rows] for group in groups.values() for at in range(0, len(group), num_rows)):
        padded = rows + [rows[-1]] * (num_rows - len(rows) if getattr(model, "fills_calls", True) else 0)
        inputs = model.preprocess(observation.select(padded))
        prediction = model.predict_action_batch(
            do_sample=uniforms is not None,
            temperature=temperature,
            uniforms=None if uniforms is None else torch.from_numpy(uniforms[padded]),
            **inputs,
        )
        yield rows, inputs, prediction


class CallablePolicy(BatchedPolicy):
    """Act with a function, or with any object that has ``act``; these use their own random generators."""

    def start_episode(self, spec: EpisodeSpec) -> EpisodeContext:
        """Call the policy's ``reset``, if it has one, and return the context."""
        if remembers(self.model):
            self.model.reset()
        return super().start_episode(spec)

    def act(self, observation: Observation, contexts: Sequence[EpisodeContext]) -> np.ndarray:
        """Return float32 actions ``[K, C, D]`` for the ``K`` rows of ``observation``, checked."""
        try:
            returned = getattr(self.model, "act", self.model)(observation)
        except ConfigError as error:
            raise RejectedInputError(*error.args, **error.fix) from error
        actions = np.asarray(returned, dtype=np.float32)
        actions = actions[:, None] if actions.ndim == 2 else actions
        bad = actions[~np.isfinite(actions)]
        if actions.ndim != 3 or len(actions) != len(contexts) or bad.size:
            name = type(self.model).__name__
            function = f"act of {name}" if hasattr(self.model, "act") else getattr(self.model, "__name__", name)
            not_finite = f", {bad.size} of whose numbers are not finite (the first: {bad[0]})" if bad.size else ""
            raise RejectedInputError(
                f"{function} returned actions of the shape {list(actions.shape)}{not_finite}; expected finite "
                f"numbers [{len(contexts)}, C, D] or [{len(contexts)}, D], one row for each observation"
            )
        return actions


def remembers(policy: Any) -> bool:
    """Return whether a policy that is not an ``ActionModel`` has ``reset`` and may therefore keep per-episode state."""
    return not hasattr(policy, "predict_action_batch") and callable(getattr(policy, "reset", None))


Video = tuple[int, Json, str]
"""Episode number, description for ``result.json``, and the episode's name if its replay ended differently (otherwise "")."""


class Episodes(Protocol):
    """Runs one rank's episodes."""

    @property
    def num_restarts(self) -> int:
        """Number of simulator processes that have been lost and replaced so far."""
        ...

    def run(self, specs: Sequence[EpisodeSpec], on_result: Callable[[EpisodeResult], None]) -> list[EpisodeResult]:
        """Return the results in the order of ``specs``; call ``on_result`` as each episode ends."""
        ...

    def record(self, numbered: Sequence[tuple[int, EpisodeResult]], folder: Path, size: int) -> list[Video]:
        """Write a video of each numbered episode, with square frames of ``size`` pixels."""
        ...


@dataclass
class LocalEpisodes:
    """Runs episodes in this process (an ``Episodes``)."""

    policy: BatchedPolicy
    env: VectorEnv

    @property
    def num_restarts(self) -> int:
        return self.env.num_restarts

    def run(self, specs: Sequence[EpisodeSpec], on_result: Callable[[EpisodeResult], None]) -> list[EpisodeResult]:
        size = self.env.num_envs
        batches = (specs[first : first + size] for first in range(0, len(specs), size))
        return [result for batch in batches for result in _run(self.policy, self.env, batch, on_result)]

    def record(self, numbered: Sequence[tuple[int, EpisodeResult]], folder: Path, size: int) -> list[Video]:
        return _record(self.policy, self.env, numbered, folder, size)


def episode_list(env: VectorEnv, split: str, num_episodes: int | None, first: int = 0) -> list[EpisodeSpec]:
    """Return ``num_episodes`` (None: all) episodes of a split, starting at number ``first`` and spread evenly over the tasks."""
    available = env.episode_specs(split)
    if first >= len(available):
        raise ConfigError(
            f"evaluation.first_episode={first}, but the split '{split}' has {len(available)} episodes. Set evaluation.first_episode=0"
        )
    if num_episodes is None:
        return [available[number] for number in range(first, len(available))]
    if len(available) < first + num_episodes:
        offset = f" from episode {first} on" if first else ""
        raise ConfigError(
            f"evaluation.num_episodes={num_episodes}{offset}, but the split '{split}' has {len(available)} episodes. "
            f"Set evaluation.num_episodes={max(1, len(available) - first)}, or raise env.num_{split}_init_states"
        )
    return [available[number] for number in range(first, first + num_episodes)]


def rank_slice(episodes: Sequence[T], rank: int, num_ranks: int) -> Sequence[T]:
    """Return the contiguous slice of the episodes run by a rank."""
    # Lists cycle through the tasks, so a slice covers all tasks. With every num_ranks-th episode, one rank could get all the long tasks.
    count = len(episodes)
    return episodes[count * rank // num_ranks : count * (rank + 1) // num_ranks]


@dataclass(frozen=True)
class RankGroup:
    """The processes among which an evaluation's episodes are divided.

    Attributes:
        rank, count: Index of this process, and total number of processes.
        gather: Calls a function on this rank and returns the results of all ranks, in rank order.
    """

    rank: int = 0
    count: int = 1
    gather: Callable[[Callable[[], Any]], list[Any]] = lambda part: [part()]


@dataclass(frozen=True)
class EvaluationPlan:
    """Where an evaluation runs, when it stops, and which videos it records.

    Attributes:
        video_folder: Folder for the MP4s; None: no videos.
        num_videos_per_task: 1 records each task's first success, 2 also its first failure, and larger values further pairs.
        known: The same policy's results on some of the episodes, which are not run again.
        ranks: Divides the episodes among processes; this one runs its ``rank_slice``.
        episodes: Runs the episodes elsewhere, with the same settings and weights. If None, they run in this process.
        stop: Rule for early stopping; the result then covers the first episodes of the list, at least one per task (if perturbed, per
            kind and unperturbed task). None: the full list.
        look_every: Number of episodes across all ranks between checks of ``stop``; None: one per env. It does not affect the result.
    """

    video_folder: Path | None = None
    num_videos_per_task: int = 2
    video_size: int = 224
    known: Sequence[EpisodeResult] = ()
    ranks: RankGroup = RankGroup()
    episodes: Episodes | None = None
    stop: StopRule | None = None
    look_every: int | None = None


def evaluate_policy(
    model: ActionModel | SupportsAct,
    env: VectorEnv,
    specs: Sequence[EpisodeSpec],
    *,
    greedy: bool = True,
    temperature: float = 1.0,
    seed: int = 0,
    on_result: Callable[[EpisodeResult], None] = lambda result: None,
    plan: EvaluationPlan = EvaluationPlan(),
) -> EvaluationResult:
    """Run every episode of a list once, and return the results in the order of ``specs``.

    With several ranks, each runs its slice, and all return the same result as a single process would (except ``wall_s``).

    Args:
        model: The policy, any object with ``act``, or a function; the last two are called with the batch of all running episodes. A
            policy with ``reset`` needs a single env and is reset before each episode.
        env: Any number of environments, created with ``auto_reset=False``.
        seed: Sampling seed; an episode's random numbers depend only on this seed and the spec.
    """
    if not specs:
        raise ConfigError("The list of episodes (specs) is empty; expected at least one")
    if remembers(model) and env.num_envs > 1:
        raise ConfigError(
            f"{type(model).__name__} has reset, so it can only run one episode at a time, but env has num_envs={env.num_envs}; "
            "expected 1. Create env with num_envs=1"
        )
    start = time.monotonic()
    episodes = plan.episodes
    if episodes is None:
        kind = BatchedPolicy if hasattr(model, "predict_action_batch") else CallablePolicy
        episodes = LocalEpisodes(kind(model, env.stream_names, greedy, temperature, seed), env)
    restarts_before = episodes.num_restarts
    with evaluation_mode(model):
        results = _run_all(episodes, specs, plan, env, on_result)
        evaluation = EvaluationResult(
            results, greedy, temperature, seed, reports_success=env.reports_success(env.config)
        )
        twins = {row.task: env.twin_of(env.config, row.task) for row in results}
        evaluation.twins = {task: twin for task, twin in twins.items() if twin is not None}
        evaluation.perturbations = effects(evaluation)
        evaluation.warnings += env.caveats(env.config) + unpaired_warning(evaluation)
        evaluation.warnings += evaluation.success_label_warning()
        evaluation.warnings += clipping_warning(*actions_clipped(results)) + far_warning(evaluation.states_far_fraction)
        if plan.video_folder is not None:
            _add_videos(evaluation, episodes, plan)
    num_restarts = sum(plan.ranks.gather(lambda: episodes.num_restarts - restarts_before))
    if num_restarts:
        evaluation.warnings.append(
            f"{num_restarts} simulator worker processes were lost and replaced, and their episodes restarted; see the log"
        )
    num_missing = len(env.task_names) - len({spec.task_id for spec in specs})
    if num_missing:
        evaluation.warnings.append(
            f"{num_missing} of {len(env.task_names)} tasks have no episode in the list of {len(specs)} "
            "(evaluation.num_episodes), so the total excludes them"
        )
    evaluation.wall_s = time.monotonic() - start
    return evaluation


def _run_all(
    episodes: Episodes,
    specs: Sequence[EpisodeSpec],
    plan: EvaluationPlan,
    env: VectorEnv,
    on_result: Callable[[EpisodeResult], None],
) -> list[EpisodeResult]:
    """Return the results of all ranks, up to the episode at which ``plan.stop`` ends the evaluation."""
    ranks, stop, results = plan.ranks, plan.stop, {result.spec: result for result in plan.known}
    size = len(specs) if stop is None else plan.look_every or env.num_envs * ranks.count
    names = [env.task_names[spec.task_id] for spec in specs]
    # Every task at least once; perturbed tasks, which may have one episode each, are one per kind of each unperturbed task.
    groups = [env.twin_of(env.config, name) or name for name in names]
    least = 1 + max(groups.index(group) for group in set(groups))
    for first in range(0, len(specs), size):
        queue = rank_slice(
            [spec for spec in specs[first : first + size] if spec not in results], ranks.rank, ranks.count
        )
        for rank_results in ranks.gather(partial(episodes.run, queue, on_result)):
            results |= {result.spec: result for result in rank_results}
        done = specs[: first + size]
        # Check the rule in list order and truncate to its count, so the outcome depends neither on `size` nor on the number of ranks.
        count = None if stop is None else stop.stop_at([results[spec] for spec in done])
        if count is not None and len(done) >= least:
            specs = specs[: max(count, least)]
            break
    return [results[spec] for spec in specs]


def _add_videos(evaluation: EvaluationResult, episodes: Episodes, plan: EvaluationPlan) -> None:
    """Replay and record selected episodes on all ranks, and warn if any of them ends differently."""
    ranks, folder = plan.ranks, Path(plan.video_folder)
    chosen = _select_videos(evaluation, plan.num_videos_per_task)
    rank_episodes = list(enumerate(chosen))[ranks.rank :: ranks.count]
    parts = ranks.gather(lambda: episodes.record(rank_episodes, folder, plan.video_size))
    recorded = sorted((item for part in parts for item in part), key=lambda item: item[0])
    evaluation.videos = [video for _, video, _ in recorded]
    changed = [episode for _, _, episode in recorded if episode]
    if changed:
        evaluation.warnings.append(
            f"{len(changed)} of {len(chosen)} episodes ended differently when replayed for the videos (first: "
            f"{changed[0]}): the simulator or the policy is not deterministic, so a second evaluation may have different results"
        )


def start_episodes(env: VectorEnv, specs: Sequence[EpisodeSpec]) -> Observation:
    """Start ``specs`` in the first env slots, leave the remaining slots idle, and return the observation."""
    idle = [None] * (env.num_envs - len(specs))
    observation, _ = env.reset(options={"episodes": [*specs, *idle]})
    return observation


def _step(
    policy: BatchedPolicy, env: VectorEnv, observation: Observation, running: np.ndarray, contexts: list
) -> np.ndarray:
    """Return actions ``[B, C, D]``, with zeros for idle env slots."""
    chosen = policy.act(observation.select(running), [contexts[row] for row in running])
    actions = np.zeros((env.num_envs, *chosen.shape[1:]), np.float32)
    actions[running] = chosen
    return actions


def _run(
    policy: BatchedPolicy, env: VectorEnv, specs: Sequence[EpisodeSpec], on_result: Callable[[EpisodeResult], None]
) -> list[EpisodeResult]:
    """Run up to ``num_envs`` episodes in parallel until all have ended; restart an episode if its simulator is lost."""
    observation = start_episodes(env, specs)
    contexts = [policy.start_episode(spec) for spec in specs]
    results: dict[int, EpisodeResult] = {}
    horizon = max(env.horizon_of(env.config, task) for task in env.task_names)
    calls_left = horizon
    while calls_left > 0:
        running = np.array([row for row in range(len(specs)) if row not in results])
        step = env.chunk_step(_step(policy, env, observation, running, contexts))
        observation = step.observation
        # Give a restarted episode a fresh context, so that its random draws are the same as if the simulator had not been lost.
        for row in step.lost_env_ids.tolist():
            contexts[row] = policy.start_episode(specs[row])
        calls_left = horizon if len(step.lost_env_ids) else calls_left - 1
        for row, result in zip(step.final_env_ids.tolist(), step.episodes, strict=True):
            far = contexts[row].far
            results[row] = replace(result, states_far_fraction=float(np.mean(far)) if far else None)
            on_result(results[row])
        if len(results) == len(specs):
            return [results[row] for row in range(len(specs))]
    missing = [specs[row] for row in range(len(specs)) if row not in results]
    raise ConfigError(
        f"{len(missing)} episodes, the first of them {missing[0]}, were neither terminated nor truncated within "
        f"their horizon of {horizon} env steps (env.max_episode_steps); the env must truncate them."
    )


def _select_videos(evaluation: EvaluationResult, num_per_task: int) -> list[EpisodeResult]:
    """Return the first successes and failures of each task, or its first episodes if the env reports no success."""
    chosen: dict[tuple[str, bool], list[EpisodeResult]] = {}
    is_reported = evaluation.total.is_reported
    limits = {True: (num_per_task + 1) // 2, False: num_per_task // 2 if is_reported else num_per_task}
    for result in evaluation.results:
        group = chosen.setdefault((evaluation.group_of(result.task), result.success), [])
        if len(group) < limits[result.success]:
            group.append(result)
    return [result for key in sorted(chosen, key=lambda key: (key[0], not key[1])) for result in chosen[key]]


def _record(
    policy: BatchedPolicy, env: VectorEnv, queue: Sequence[tuple[int, EpisodeResult]], folder: Path, size: int
) -> list[Video]:
    """Replay numbered episodes."""
    videos = []
    for first in range(0, len(queue), env.num_envs):
        batch = queue[first : first + env.num_envs]
        replays = replay_episodes(policy, env, [counted.spec for _, counted in batch], size)
        for (number, counted), (result, instruction, frames) in zip(batch, replays, strict=True):
            same = (result.success, result.num_env_steps) == (counted.success, counted.num_env_steps)
            success = success_of(result, env)
            outcome = {True: "success", False: "failure", None: "episode"}[success]
            name = f"{slug(result.task)}_{outcome}_{number:03d}.mp4"
            path = write_video(folder / name, frames, instruction, success)
            about = {"task": result.task, "instruction": instruction, "success": success}
            changed = "" if same else f"{result.task}, init state {result.spec.init_state_id}"
            videos.append((number, {"path": f"{folder.name}/{path.name}", **about}, changed))
    return videos


def success_of(result: EpisodeResult, env: VectorEnv) -> bool | None:
    """Return whether an episode succeeded, or None if the env does not report success."""
    is_reported = result.success_reported or result.success or env.reports_success(env.config)
    return bool(result.success) if is_reported else None


def slug(task: str) -> str:
    """Return a task name in a form suitable for file names."""
    return re.sub(r"[^a-z0-9]+", "_", task.lower()).strip("_")[:MAX_SLUG_LEN]


class Watcher(Protocol):
    """Callbacks for ``replay_episodes``."""

    def reset(self) -> None:
        """Called when the episodes start, and when they restart because a simulator was lost."""
        ...

    def decided(self, rows: np.ndarray, chunks: np.ndarray) -> None:
        """Called with the policy's ``chunks [K, C, D]`` for the env slots ``rows [K]``, before they are executed."""
        ...

    def stepped(self, rows: np.ndarray, step: ChunkStep) -> None:
        """Called after the env slots ``rows`` have executed one action."""
        ...


def replay_episodes(
    policy: BatchedPolicy, env: VectorEnv, specs: Sequence[EpisodeSpec], size: int, watcher: Watcher | None = None
) -> list[tuple[EpisodeResult, str, list[np.ndarray]]]:
    """Run up to ``env.num_envs`` episodes and record their frames; if a simulator is lost, restart all of them.

    Returns:
        Each episode's result, instruction and frames: ``uint8 [size, size, 3]``, one for the first observation and one after each
        env step.
    """
    if watcher is not None:
        watcher.reset()
    observation = start_episodes(env, specs)
    instructions = observation.instruction[: len(specs)]
    contexts = [policy.start_episode(spec) for spec in specs]
    frames = [[frame] for frame in env.render_frames(np.arange(len(specs)), size)]
    results: dict[int, EpisodeResult] = {}
    while len(results) < len(specs):
        running = np.array([row for row in range(len(specs)) if row not in results])
        actions = _step(policy, env, observation, running, contexts)
        if watcher is not None:
            watcher.decided(running, actions[running])
        # Execute one action at a time instead of the full chunk, so that every env step has a frame.
        for position in range(actions.shape[1]):
            alive = np.array([row for row in running if row not in results])
            if not len(alive):
                break
            step = env.chunk_step(actions[:, position : position + 1])
            if len(step.lost_env_ids):
                return replay_episodes(policy, env, specs, size, watcher)
            observation = step.observation
            if watcher is not None:
                watcher.stepped(alive, step)
            for row, frame in zip(alive, env.render_frames(alive, size), strict=True):
                frames[row].append(frame)
            results |= dict(zip(step.final_env_ids.tolist(), step.episodes, strict=True))
    return [(results[row], instructions[row], frames[row]) for row in range(len(specs))]
