"""The contract checker for environments: it returns one sentence per violated property."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from gymnasium.vector import AutoresetMode

from rlinf.envs.base import VectorEnv
from rlinf.errors import ConfigError, MissingDependencyError, NonFiniteError
from rlinf.seeding import derive_seed
from rlinf.types import ChunkStep, EpisodeSpec, Observation

EnvFactory = Callable[[int, bool], VectorEnv]
"""``env_factory(num_envs, auto_reset)`` returns a new environment with the same settings each time."""

NUM_ENVS = 3
CHUNK_LEN = 3

PROPERTIES = {
    "declarations": "suite, tasks, action bounds, statistics and auto-reset mode are declared",
    "splits": "training and evaluation episodes are disjoint, and go round robin over the tasks",
    "observation": "images, state and instructions have the declared shapes and types",
    "repeatability": "an episode depends on its spec and the actions alone, not on its row or num_envs",
    "chunks": "a chunk equals its actions one by one, and actions are clipped to the bounds",
    "ends": "episodes end in time, in one way, and finished rows stand still",
    "auto_reset": "auto-reset shows the next episode and keeps the true last observation",
    "bad_actions": "actions of a wrong shape and NaN are rejected",
    "optional": "expert, frames and fixed instructions, where there are any",
    "idle": "rows without an episode stand still, and their neighbours do not notice",
}
"""Name of a method of ``_EnvChecker`` to what it checks, in the order of the checks."""


def check_env(env_factory: EnvFactory, max_steps: int = 64) -> list[str]:
    """Check the contract of ``rlinf.envs.base.VectorEnv`` on a real environment.

    Episodes are driven by seeded uniform actions. Properties that need the end of an episode (truncation, frozen
    rows, auto-reset) are checked up to ``max_steps`` env steps, so build the env with a short ``max_episode_steps``. Raise ConfigError if
    ``max_episode_steps`` of the environment is larger than ``max_steps``. Return one sentence per violation; empty if the contract holds.
    """
    return [sentence for _, found in check_properties(env_factory, max_steps) for sentence in found]


def check_properties(env_factory: EnvFactory, max_steps: int = 64) -> Iterator[tuple[str, list[str]]]:
    """Yield each key of ``PROPERTIES`` and its violations; see ``check_env``.

    The later checks build on declarations, splits and observation, so a violation there ends the check.
    """
    reported: set[str] = set()
    envs = [env_factory(*how) for how in ((NUM_ENVS, False), (NUM_ENVS, True), (1, False), (NUM_ENVS, False))]
    try:
        if envs[0].max_episode_steps > max_steps:
            raise ConfigError(
                f"max_episode_steps is {envs[0].max_episode_steps}, but the checker looks at {max_steps} steps. "
                "Build the env with a smaller max_episode_steps, or call check_env(..., max_steps=...)."
            )
        checker = _EnvChecker(*envs, max_steps)
        for name in PROPERTIES:
            if reported and name == "observation":
                return
            found, is_finite = [], True
            try:
                for sentence in getattr(checker, name)():
                    if sentence not in reported:
                        found.append(sentence)
                        reported.add(sentence)
            except NonFiniteError as error:
                found.append(str(error))
                is_finite = False
            yield name, found
            if not is_finite or (found and name == "observation"):
                return
    finally:
        for env in envs:
            env.close()
            env.close()


@dataclass
class Recording:
    """What ``play`` saw: the observation after the reset, and every chunk until all rows had ended."""

    first: Observation
    steps: list[ChunkStep]


def spread_specs(env: VectorEnv, count: int) -> list[EpisodeSpec]:
    """Return the first ``count`` training episodes; a shorter list is repeated."""
    specs = env.episode_specs("train")
    return [specs[index % len(specs)] for index in range(count)]


def seeded_actions(env: VectorEnv, specs: list[EpisodeSpec | None], chunk_len: int, first: int = 0) -> np.ndarray:
    """Return uniform actions ``[B, C, D]`` that depend on the episode and the step only; 0 in idle rows."""
    actions = np.zeros((len(specs), chunk_len, env.action_dim), dtype=np.float32)
    for row, spec in enumerate(specs):
        for position in range(0 if spec is None else chunk_len):
            seed = derive_seed(spec.seed, "checker", spec.task_id, spec.init_state_id, first + position)
            actions[row, position] = np.random.default_rng(seed).uniform(env.action_low, env.action_high)
    return actions


def play(env: VectorEnv, specs: list[EpisodeSpec | None], max_steps: int) -> Recording:
    """Run ``specs`` to their ends in an env without auto-reset, with seeded actions."""
    recording = Recording(env.reset(options={"episodes": specs})[0], [])
    for position in range(0, max_steps + CHUNK_LEN, CHUNK_LEN):
        recording.steps.append(env.chunk_step(seeded_actions(env, specs, CHUNK_LEN, position)))
        if not recording.steps[-1].executed.any():
            break
    return recording


def first_difference(one: Recording, row: int, two: Recording, other: int) -> str | None:
    """Return the first field in which row ``row`` of one recording and row ``other`` of another differ, or None."""
    if not equal_rows(one.first.select([row]), two.first.select([other])):
        return "the first observation"
    for number, (mine, theirs) in enumerate(zip(one.steps, two.steps, strict=False)):
        for name in ("rewards", "executed", "terminated", "truncated", "success"):
            if not np.array_equal(getattr(mine, name)[row], getattr(theirs, name)[other]):
                return f"`{name}` of chunk {number}"
        if not equal_rows(mine.observation.select([row]), theirs.observation.select([other])):
            return f"the observation after chunk {number}"
    return None


def equal_rows(one: Observation, other: Observation) -> bool:
    """Return whether two observations are equal bit for bit."""
    if one.instruction != other.instruction or list(one.images) != list(other.images):
        return False
    if (one.state is None) != (other.state is None):
        return False
    same = one.state is None or np.array_equal(one.state, other.state)
    return same and all(np.array_equal(one.images[name], other.images[name]) for name in one.images)


@dataclass
class _EnvChecker:
    """One method per property; each yields a sentence per violation.

    ``running`` has auto-reset, the other envs do not. ``single`` has one row, the others ``NUM_ENVS``. ``untouched`` is not reset
    before ``idle`` is checked. A trajectory has ``max_steps`` env steps.
    """

    frozen: VectorEnv
    running: VectorEnv
    single: VectorEnv
    untouched: VectorEnv
    max_steps: int

    def declarations(self) -> Iterator[str]:
        env = self.frozen
        if not (isinstance(env.suite, str) and env.suite):
            yield f"`suite` is {env.suite!r}; it must be a non-empty string."
        if not env.task_names or len(set(env.task_names)) < len(env.task_names):
            yield f"`task_names` must be non-empty and without repeats: {env.task_names}."
        for name in ("action_low", "action_high"):
            bound = getattr(env, name)
            if bound.dtype != np.float32 or bound.shape != (env.action_dim,):
                yield f"`{name}` is {bound.dtype} {bound.shape}; it must be float32 [{env.action_dim}]."
        if not (env.action_low < env.action_high).all():
            yield "`action_low` must be smaller than `action_high`."
        for one, mode in ((env, AutoresetMode.DISABLED), (self.running, AutoresetMode.SAME_STEP)):
            declared = one.metadata.get("autoreset_mode")
            if declared != mode:
                yield f"metadata['autoreset_mode'] is {declared} with auto_reset={one.auto_reset}; it must be {mode}."
        statistics = env.action_statistics().get("action", {})
        for name in ("q01", "q99", "mask", "min", "max", "mean", "std"):
            if len(statistics.get(name, ())) != env.action_dim:
                yield f"action_statistics()['action']['{name}'] must have {env.action_dim} numbers."

    def splits(self) -> Iterator[str]:
        env, seen = self.frozen, {}
        num_tasks = len(env.task_names)
        for split in ("train", "eval"):
            specs = env.episode_specs(split)
            if not len(specs):
                yield f"The split '{split}' is empty."
                return
            ends = [*range(min(len(specs), 300)), *range(max(0, len(specs) - 300), len(specs))]
            sample = [specs[index] for index in ends]
            if any(spec.suite != env.suite for spec in sample):
                yield f"Episodes of '{split}' must have suite '{env.suite}'."
            tasks = [spec.task_id for spec in sample[:num_tasks]]
            if sorted(tasks) != list(range(num_tasks)):
                yield f"The first {num_tasks} episodes of '{split}' have the tasks {tasks}, not each once (round robin)."
            seen[split] = {(spec.task_id, spec.init_state_id, spec.seed) for spec in sample}
        if common := seen["train"] & seen["eval"]:
            yield f"The splits are not disjoint: both hold (task_id, init_state_id, seed) = {min(common)}."

    def observation(self) -> Iterator[str]:
        self.specs = spread_specs(self.frozen, NUM_ENVS)
        try:
            observation, _ = self.frozen.reset(options={"episodes": self.specs})
        except ConfigError as error:
            yield str(error)
        else:
            yield from self._observation_faults(observation)

    def repeatability(self) -> Iterator[str]:
        """An episode does not depend on what ran before it, on its row, or on ``num_envs``."""
        first = play(self.frozen, self.specs, self.max_steps)
        again = "Not repeatable: two episodes of {} in the same row differ in {}."
        moved = "An episode depends on its row: {} in two rows differs in {}."
        alone = f"An episode depends on num_envs: {{}} among {NUM_ENVS} envs and alone differs in {{}}."
        trials = [(again, self.frozen, [0, 1, 2]), (moved, self.frozen, [2, 0, 1])]
        for sentence, env, order in [*trials, *((alone, self.single, [row]) for row in range(NUM_ENVS))]:
            other = play(env, [self.specs[source] for source in order], self.max_steps)
            for row, source in enumerate(order):
                if (difference := first_difference(first, source, other, row)) is not None:
                    yield sentence.format(self.specs[source], difference)
                    return

    def chunks(self) -> Iterator[str]:
        env, start = self.frozen, {"episodes": self.specs}
        actions = seeded_actions(env, self.specs, CHUNK_LEN)
        observation, _ = env.reset(options=start)
        copy = observation.select(range(NUM_ENVS))
        chunk = env.chunk_step(actions)
        if not equal_rows(copy, observation):
            yield "A step writes into the observation that was handed out before it; return fresh arrays."
        env.reset(options=start)
        single = {"rewards": np.zeros_like(chunk.rewards), "executed": np.zeros_like(chunk.executed)}
        single |= {name: np.zeros(NUM_ENVS, bool) for name in ("terminated", "truncated")}
        for position in range(CHUNK_LEN):
            alive = ~(single["terminated"] | single["truncated"])
            seen, reward, terminated, truncated, _ = env.step(actions[:, position])
            single["rewards"][:, position], single["executed"][:, position] = reward, alive
            single["terminated"] |= terminated
            single["truncated"] |= truncated
        for name, one in single.items():
            other = getattr(chunk, name)
            if not np.array_equal(one, other):
                yield f"`{name}` of a chunk differ from the same actions one by one: {other.tolist()} and {one.tolist()}."
        if not equal_rows(seen, chunk.observation):
            yield "The observation after a chunk differs from that after the same actions one by one."
        ends = []
        for outside in (np.clip(actions * 1e3, env.action_low, env.action_high), actions * 1e3):
            env.reset(options=start)
            ends.append(env.chunk_step(outside).observation)
        if not equal_rows(*ends):
            yield "Actions outside the bounds must act like actions clipped to them."

    def ends(self) -> Iterator[str]:
        """Without auto-reset, episodes end in time and in one way, and their rows freeze."""
        env, last = self.frozen, None
        env.reset(options={"episodes": self.specs})
        ended, lengths = np.zeros(NUM_ENVS, bool), np.zeros(NUM_ENVS, int)
        for position in range(0, self.max_steps + CHUNK_LEN, CHUNK_LEN):
            step = env.chunk_step(seeded_actions(env, self.specs, CHUNK_LEN, position))
            lengths += step.executed.sum(1)
            faults = [*self._step_faults(step), *self._observation_faults(step.observation)]
            faults += [*self._end_faults(step, ended, last, lengths)]
            yield from faults
            if faults:
                return
            ended |= step.terminated | step.truncated
            last = step.observation
        if not ended.all():
            limits = f"{self.max_steps} steps (max_episode_steps={env.max_episode_steps})"
            yield f"Rows {np.flatnonzero(~ended).tolist()} did not end within {limits}."

    def auto_reset(self) -> Iterator[str]:
        env, pool = self.running, spread_specs(self.running, 4 * NUM_ENVS)
        specs, queue = pool[:NUM_ENVS], iter(pool[NUM_ENVS:])
        handed: dict[int, EpisodeSpec] = {}

        def next_episode(row: int) -> EpisodeSpec:
            return handed.setdefault(row, next(queue))

        env.reset(options={"episodes": specs, "next_episode": next_episode})
        for position in range(0, self.max_steps + CHUNK_LEN, CHUNK_LEN):
            step = env.chunk_step(seeded_actions(env, specs, CHUNK_LEN, position))
            yield from self._step_faults(step)
            ended = step.final_env_ids.tolist()
            if not ended:
                continue
            if list(handed) != ended:
                yield f"The rows {ended} ended; next_episode was called for the rows {list(handed)}."
                return
            current = env.current_specs()
            if any(current[row] != handed[row] for row in ended):
                yield "current_specs() must name the next episodes after auto-reset."
            alone = [play(self.single, [specs[row]], self.max_steps).steps[-1].observation for row in ended]
            fresh = [self.single.reset(options={"episodes": [spec]})[0] for spec in handed.values()]
            if not equal_rows(Observation.concatenate(fresh), step.observation.select(ended)):
                yield "After auto-reset, the observation must be the first one of the next episode."
            if not equal_rows(Observation.concatenate(alone), step.final_observation):
                yield "`final_observation` must be the true last observation of the episode that ended."
            return
        yield f"No episode ended within {self.max_steps} steps under auto-reset."

    def bad_actions(self) -> Iterator[str]:
        env = self.frozen
        env.reset(options={"episodes": self.specs})
        bad = {
            "of a wrong width": np.zeros((NUM_ENVS, 1, env.action_dim + 1), np.float32),
            "for too few envs": np.zeros((NUM_ENVS - 1, 1, env.action_dim), np.float32),
            "that are NaN": np.full((NUM_ENVS, 1, env.action_dim), np.nan, np.float32),
        }
        for words, actions in bad.items():
            try:
                env.chunk_step(actions)
                yield f"Actions {words} must raise ConfigError; they were accepted."
            except ConfigError:
                continue
            except (ValueError, TypeError, LookupError, RuntimeError) as error:
                yield f"Actions {words} must raise ConfigError, not {type(error).__name__}."

    def optional(self) -> Iterator[str]:
        env = self.frozen
        observation, _ = env.reset(options={"episodes": self.specs})
        if env.has_expert(env.config):
            actions, shape = env.expert_actions(), (NUM_ENVS, env.action_dim)
            if actions.shape != shape or actions.dtype != np.float32:
                yield f"expert_actions() is {actions.dtype} {actions.shape}; it must be float32 {list(shape)}."
            if actions.shape != shape or not ((actions >= env.action_low) & (actions <= env.action_high)).all():
                yield "expert_actions() must lie within the action bounds."
        if type(env).render_frames is not VectorEnv.render_frames and _can_draw(env):
            frames = env.render_frames([1], 48)
            if frames.dtype != np.uint8 or frames.shape != (1, 48, 48, 3):
                yield f"render_frames([1], 48) is {frames.dtype} {frames.shape}; it must be uint8 [1, 48, 48, 3]."
        for spec, sentence in zip(self.specs, observation.instruction, strict=True):
            fixed = env.instruction_of(spec.task_id)
            if fixed not in (None, sentence):
                yield f"instruction_of({spec.task_id}) is '{fixed}', but an episode says '{sentence}'."

    def idle(self) -> Iterator[str]:
        """Rows that never had an episode stand still, and their neighbour runs as it does among running rows."""
        env, rows = self.untouched, [0, 2]
        lone = play(env, [None, self.specs[1], None], self.max_steps)
        yield from self._observation_faults(lone.first)
        for step in lone.steps:
            if step.executed[rows].any() or step.rewards[rows].any() or (step.terminated | step.truncated)[rows].any():
                yield "A row without an episode must stay idle: no reward, nothing executed, no end."
        full = play(self.frozen, self.specs, self.max_steps)
        if (difference := first_difference(full, 1, lone, 1)) is not None:
            yield f"An episode of {self.specs[1]} is another one where its neighbours are idle: it differs in {difference}."
        if env.has_expert(env.config) and not np.isfinite(env.expert_actions()).all():
            yield "expert_actions() must be finite in rows without an episode, too."

    def _observation_faults(self, observation: Observation) -> Iterator[str]:
        """Shapes, dtypes and instructions of ``NUM_ENVS`` rows."""
        env, cameras, state = self.frozen, self.frozen.config.cameras, observation.state
        if list(observation.images) != list(cameras):
            yield f"Images are {list(observation.images)}; they must be the cameras of the config, {list(cameras)}."
        shape = (NUM_ENVS, env.config.image_size, env.config.image_size, 3)
        for name, image in observation.images.items():
            if image.dtype != np.uint8 or image.shape != shape:
                yield f"Images of '{name}' are {image.dtype} {image.shape}; they must be uint8 {list(shape)}."
        shape = (NUM_ENVS, env.state_dim)
        if env.state_dim == 0 and state is not None:
            yield "`state` must be None where `state_dim` is 0."
        elif env.state_dim and state is None:
            yield f"`state` is None; `state_dim` says {env.state_dim}."
        elif state is not None and (state.dtype != np.float32 or state.shape != shape or not np.isfinite(state).all()):
            yield f"`state` is {state.dtype} {state.shape}; it must be finite float32 {list(shape)}."
        sentences = observation.instruction
        if len(sentences) != NUM_ENVS or not all(isinstance(one, str) and one for one in sentences):
            yield f"`instruction` must be {NUM_ENVS} non-empty sentences: {sentences}."

    def _step_faults(self, step: ChunkStep) -> Iterator[str]:
        """Shapes, dtypes and consistency of the fields of a chunk."""
        wanted = dict.fromkeys(("rewards", "executed"), (NUM_ENVS, CHUNK_LEN))
        wanted |= dict.fromkeys(("terminated", "truncated", "success"), (NUM_ENVS,))
        for name, shape in wanted.items():
            array, dtype = getattr(step, name), np.dtype(np.float32 if name == "rewards" else np.bool_)
            if array.dtype != dtype or array.shape != shape:
                yield f"`{name}` is {array.dtype} {array.shape}; it must be {dtype} {shape}."
        if not np.isfinite(step.rewards).all():
            yield "`rewards` must be finite."
        if (step.terminated & step.truncated).any():
            yield "`terminated` and `truncated` must not both be true."
        if step.rewards[~step.executed].any():
            yield "`rewards` must be 0 where nothing was executed."
        if (np.diff(step.executed.astype(int), axis=1) > 0).any():
            yield "`executed` must not start again within a chunk."
        rows = np.flatnonzero(step.terminated | step.truncated)
        complete = np.array_equal(step.final_env_ids, rows) and len(step.episodes) == len(rows)
        if not complete or (step.final_observation is None) != (not len(rows)):
            yield f"Rows {rows.tolist()} ended; the final fields tell of {step.final_env_ids.tolist()}."

    def _end_faults(
        self, step: ChunkStep, ended: np.ndarray, last: Observation | None, lengths: np.ndarray
    ) -> Iterator[str]:
        """What a chunk does in rows that ``ended`` before it, and the results of rows that end in it."""
        if (ended & (step.executed.any(1) | (step.rewards != 0).any(1) | step.terminated | step.truncated)).any():
            yield "A finished row must freeze without auto-reset: no reward, nothing executed, not ended again."
        finished = np.flatnonzero(ended)
        if last is not None and not equal_rows(step.observation.select(finished), last.select(finished)):
            yield "A finished row must keep its last observation without auto-reset."
        for row, result in zip(step.final_env_ids, step.episodes, strict=True):
            spec, length = self.specs[row], lengths[row]
            horizon = self.frozen.horizon_of(self.frozen.config, self.frozen.task_names[spec.task_id])
            if result.spec != spec:
                yield f"The result of row {row} carries {result.spec}; it ran {spec}."
            if result.num_env_steps != length or length > horizon:
                counts = f"{result.num_env_steps} steps; {length} were executed, and the limit is {horizon}"
                yield f"The episode of row {row} reports {counts}."
            if not step.terminated[row] and length != horizon and not self.frozen._stats.sim_truncated[row]:
                yield f"Row {row} was truncated after {length} of {horizon} steps."


def _can_draw(env: VectorEnv) -> bool:
    """Return whether the env itself expects that drawing works here; packages for it may be missing."""
    try:
        type(env).check_drawing(env.config)
    except (ConfigError, MissingDependencyError):
        return False
    return True
