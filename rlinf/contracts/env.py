"""Contract checker for environments, which returns one message per violation."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from gymnasium.vector import AutoresetMode

from rlinf.envs.base import VectorEnv
from rlinf.errors import ConfigError, MissingDependencyError, NonFiniteError
from rlinf.seeding import derive_seed
from rlinf.types import ChunkStep, EpisodeSpec, Observation

EnvFactory = Callable[[int, bool], VectorEnv]
"""``env_factory(num_envs, auto_reset)`` creates a new environment, with the same settings each time."""

NUM_ENVS = 3
CHUNK_LEN = 3

PROPERTIES = {
    "declarations": "suite, tasks, action bounds, statistics and auto-reset mode are declared",
    "splits": "training and evaluation episodes are disjoint, and cycle through the tasks",
    "observation": "images, state and instructions have the declared shapes and types",
    "repeatability": "an episode depends only on its spec and the actions, not on its env slot or num_envs",
    "chunks": "a chunk acts like its actions one by one, and actions are clipped to the bounds",
    "ends": "episodes end within the limit, terminated or truncated, and finished envs do not change",
    "auto_reset": "auto-reset returns the next episode and the true last observation",
    "bad_actions": "NaN and actions of the wrong shape are rejected",
    "optional": "expert, frames and fixed instructions, if provided",
    "idle": "envs without an episode do not change or affect other envs",
}
"""Maps the methods of ``_EnvChecker``, in order, to the property that each of them checks."""


def check_env(env_factory: EnvFactory, max_steps: int = 64) -> list[str]:
    """Check the contract of ``rlinf.envs.base.VectorEnv`` with seeded uniform actions; return one message per violation.

    Raise ConfigError if the env's ``max_episode_steps`` exceeds ``max_steps``, because several checks run episodes to their end.
    """
    return [message for _, violations in check_properties(env_factory, max_steps) for message in violations]


def check_properties(env_factory: EnvFactory, max_steps: int = 64) -> Iterator[tuple[str, list[str]]]:
    """Yield each key of ``PROPERTIES`` with its violations; see ``check_env``."""
    reported: set[str] = set()
    envs = [env_factory(*how) for how in ((NUM_ENVS, False), (NUM_ENVS, True), (1, False), (NUM_ENVS, False))]
    try:
        if envs[0].max_episode_steps > max_steps:
            raise ConfigError(
                f"max_episode_steps is {envs[0].max_episode_steps}, but the checker only runs {max_steps} steps. "
                "Build the env with a smaller max_episode_steps, or call check_env(..., max_steps=...)."
            )
        checker = _EnvChecker(*envs, max_steps)
        # Later checks rely on declarations, splits and observation, so stop if any of these is violated.
        for name in PROPERTIES:
            if reported and name == "observation":
                return
            violations, is_finite = [], True
            try:
                for message in getattr(checker, name)():
                    if message not in reported:
                        violations.append(message)
                        reported.add(message)
            except NonFiniteError as error:
                violations.append(str(error))
                is_finite = False
            yield name, violations
            if not is_finite or (violations and name == "observation"):
                return
    finally:
        for env in envs:
            env.close()
            env.close()  # must be idempotent


@dataclass
class Recording:
    """The observation after the reset, and all chunks until every episode has ended."""

    first: Observation
    steps: list[ChunkStep]


def spread_specs(env: VectorEnv, count: int) -> list[EpisodeSpec]:
    """Return the first ``count`` training episodes, repeating the list if it is shorter."""
    specs = env.episode_specs("train")
    return [specs[index % len(specs)] for index in range(count)]


def seeded_actions(env: VectorEnv, specs: list[EpisodeSpec | None], chunk_len: int, first: int = 0) -> np.ndarray:
    """Return uniform random actions ``[B, C, D]`` that depend only on the episode and the step; 0 for idle envs."""
    actions = np.zeros((len(specs), chunk_len, env.action_dim), dtype=np.float32)
    for row, spec in enumerate(specs):
        for position in range(0 if spec is None else chunk_len):
            seed = derive_seed(spec.seed, "checker", spec.task_id, spec.init_state_id, first + position)
            actions[row, position] = np.random.default_rng(seed).uniform(env.action_low, env.action_high)
    return actions


def run_episodes(env: VectorEnv, specs: list[EpisodeSpec | None], max_steps: int) -> Recording:
    """Run episodes to their end with seeded actions, in an env without auto-reset."""
    recording = Recording(env.reset(options={"episodes": specs})[0], [])
    for position in range(0, max_steps + CHUNK_LEN, CHUNK_LEN):
        recording.steps.append(env.chunk_step(seeded_actions(env, specs, CHUNK_LEN, position)))
        if not recording.steps[-1].executed.any():
            break
    return recording


def first_difference(a: Recording, row_a: int, b: Recording, row_b: int) -> str | None:
    """Return the first field that differs between an env in recording ``a`` and an env in recording ``b``, or None."""
    if not equal_rows(a.first.select([row_a]), b.first.select([row_b])):
        return "the first observation"
    for number, (step_a, step_b) in enumerate(zip(a.steps, b.steps, strict=False)):
        for name in ("rewards", "executed", "terminated", "truncated", "success"):
            if not np.array_equal(getattr(step_a, name)[row_a], getattr(step_b, name)[row_b]):
                return f"`{name}` of chunk {number}"
        if not equal_rows(step_a.observation.select([row_a]), step_b.observation.select([row_b])):
            return f"the observation after chunk {number}"
    return None


def equal_rows(a: Observation, b: Observation) -> bool:
    """Return whether two observations are bitwise equal."""
    if a.instruction != b.instruction or list(a.images) != list(b.images) or (a.state is None) != (b.state is None):
        return False
    same = a.state is None or np.array_equal(a.state, b.state)
    return same and all(np.array_equal(a.images[name], b.images[name]) for name in a.images)


@dataclass
class _EnvChecker:
    """Has one method per property that yields a message per violation.

    Only ``running`` uses auto-reset. ``single`` has one env, all remaining ones ``NUM_ENVS``. ``untouched`` is first reset in ``idle``.
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
            yield f"`task_names` must be non-empty and unique: {env.task_names}."
        for name in ("action_low", "action_high"):
            bound = getattr(env, name)
            if bound.dtype != np.float32 or bound.shape != (env.action_dim,):
                yield f"`{name}` is {bound.dtype} {bound.shape}; it must be float32 [{env.action_dim}]."
        if not (env.action_low < env.action_high).all():
            yield "`action_low` must be smaller than `action_high`."
        for checked, mode in ((env, AutoresetMode.DISABLED), (self.running, AutoresetMode.SAME_STEP)):
            declared = checked.metadata.get("autoreset_mode")
            if declared != mode:
                yield f"metadata['autoreset_mode'] is {declared} with auto_reset={checked.auto_reset}; it must be {mode}."
        statistics = env.action_statistics().get("action", {})
        for name in ("q01", "q99", "mask", "min", "max", "mean", "std"):
            if len(statistics.get(name, ())) != env.action_dim:
                yield f"action_statistics()['action']['{name}'] must have {env.action_dim} values."

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
                yield f"Episodes in '{split}' must have the suite '{env.suite}'."
            tasks = [spec.task_id for spec in sample[:num_tasks]]
            if sorted(tasks) != list(range(num_tasks)):
                yield f"The first {num_tasks} episodes of '{split}' have the tasks {tasks}; each task must occur once (round robin)."
            seen[split] = {(spec.task_id, spec.init_state_id, spec.seed) for spec in sample}
        if common := seen["train"] & seen["eval"]:
            yield f"The splits are not disjoint: both contain (task_id, init_state_id, seed) = {min(common)}."

    def observation(self) -> Iterator[str]:
        self.specs = spread_specs(self.frozen, NUM_ENVS)
        try:
            observation, _ = self.frozen.reset(options={"episodes": self.specs})
        except ConfigError as error:
            yield str(error)
        else:
            yield from self._observation_faults(observation)

    def repeatability(self) -> Iterator[str]:
        """Check that an episode does not depend on earlier episodes, on its row, or on ``num_envs``."""
        first = run_episodes(self.frozen, self.specs, self.max_steps)
        again = "Not repeatable: two episodes of {} in the same env slot differ in {}."
        moved = "An episode depends on its env slot: {} in two slots differs in {}."
        single = f"An episode depends on num_envs: {{}} with num_envs={NUM_ENVS} and with num_envs=1 differs in {{}}."
        trials = [(again, self.frozen, [0, 1, 2]), (moved, self.frozen, [2, 0, 1])]
        for message, env, order in [*trials, *((single, self.single, [row]) for row in range(NUM_ENVS))]:
            second = run_episodes(env, [self.specs[source] for source in order], self.max_steps)
            for row, source in enumerate(order):
                if (difference := first_difference(first, source, second, row)) is not None:
                    yield message.format(self.specs[source], difference)
                    return

    def chunks(self) -> Iterator[str]:
        env, start = self.frozen, {"episodes": self.specs}
        actions = seeded_actions(env, self.specs, CHUNK_LEN)
        observation, _ = env.reset(options=start)
        copy = observation.select(range(NUM_ENVS))
        chunk = env.chunk_step(actions)
        if not equal_rows(copy, observation):
            yield "A step modified a previously returned observation; return new arrays."
        env.reset(options=start)
        single = {"rewards": np.zeros_like(chunk.rewards), "executed": np.zeros_like(chunk.executed)}
        single |= {name: np.zeros(NUM_ENVS, bool) for name in ("terminated", "truncated")}
        for position in range(CHUNK_LEN):
            alive = ~(single["terminated"] | single["truncated"])
            seen, reward, terminated, truncated, _ = env.step(actions[:, position])
            single["rewards"][:, position], single["executed"][:, position] = reward, alive
            single["terminated"] |= terminated
            single["truncated"] |= truncated
        for name, expected in single.items():
            value = getattr(chunk, name)
            if not np.array_equal(expected, value):
                yield f"`{name}` of a chunk differ from the same actions one by one: {value.tolist()} and {expected.tolist()}."
        if not equal_rows(seen, chunk.observation):
            yield "The observation after a chunk differs from the observation after the same actions one by one."
        ends = []
        for outside in (np.clip(actions * 1e3, env.action_low, env.action_high), actions * 1e3):
            env.reset(options=start)
            ends.append(env.chunk_step(outside).observation)
        if not equal_rows(*ends):
            yield "Actions outside the bounds must act like actions clipped to them."

    def ends(self) -> Iterator[str]:
        """Check that, without auto-reset, episodes end within the limit, either terminated or truncated, and then do not change."""
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
            yield f"Env slots {np.flatnonzero(~ended).tolist()} did not end within {limits}."

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
                yield f"Env slots {ended} ended; next_episode was called for {list(handed)}."
                return
            current = env.current_specs()
            if any(current[row] != handed[row] for row in ended):
                yield "current_specs() must return the next episodes after auto-reset."
            last = [run_episodes(self.single, [specs[row]], self.max_steps).steps[-1].observation for row in ended]
            fresh = [self.single.reset(options={"episodes": [spec]})[0] for spec in handed.values()]
            if not equal_rows(Observation.concatenate(fresh), step.observation.select(ended)):
                yield "After auto-reset, the observation must be the first one of the next episode."
            if not equal_rows(Observation.concatenate(last), step.final_observation):
                yield "`final_observation` must be the true last observation of the episode that ended."
            return
        yield f"No episode ended within {self.max_steps} steps under auto-reset."

    def bad_actions(self) -> Iterator[str]:
        env = self.frozen
        env.reset(options={"episodes": self.specs})
        bad = {
            "of the wrong dimension": np.zeros((NUM_ENVS, 1, env.action_dim + 1), np.float32),
            "for too few envs": np.zeros((NUM_ENVS - 1, 1, env.action_dim), np.float32),
            "that are NaN": np.full((NUM_ENVS, 1, env.action_dim), np.nan, np.float32),
        }
        for description, actions in bad.items():
            try:
                env.chunk_step(actions)
                yield f"Actions {description} must raise ConfigError; they were accepted."
            except ConfigError:
                continue
            except (ValueError, TypeError, LookupError, RuntimeError) as error:
                yield f"Actions {description} must raise ConfigError, not {type(error).__name__}."

    def optional(self) -> Iterator[str]:
        env = self.frozen
        observation, _ = env.reset(options={"episodes": self.specs})
        if env.has_expert(env.config):
            actions, shape = env.expert_actions(), (NUM_ENVS, env.action_dim)
            if actions.shape != shape or actions.dtype != np.float32:
                yield f"expert_actions() is {actions.dtype} {actions.shape}; it must be float32 {list(shape)}."
            if actions.shape != shape or not ((actions >= env.action_low) & (actions <= env.action_high)).all():
                yield "expert_actions() must be within the action bounds."
        if type(env).render_frames is not VectorEnv.render_frames and _can_draw(env):
            frames = env.render_frames([1], 48)
            if frames.dtype != np.uint8 or frames.shape != (1, 48, 48, 3):
                yield f"render_frames([1], 48) is {frames.dtype} {frames.shape}; it must be uint8 [1, 48, 48, 3]."
        for spec, instruction in zip(self.specs, observation.instruction, strict=True):
            fixed = env.instruction_of(spec.task_id)
            if fixed not in (None, instruction):
                yield f"instruction_of({spec.task_id}) is '{fixed}', but an episode has '{instruction}'."

    def idle(self) -> Iterator[str]:
        """Check that envs that never had an episode do not change and do not affect running envs."""
        env, rows = self.untouched, [0, 2]
        partial = run_episodes(env, [None, self.specs[1], None], self.max_steps)
        yield from self._observation_faults(partial.first)
        for step in partial.steps:
            if step.executed[rows].any() or step.rewards[rows].any() or (step.terminated | step.truncated)[rows].any():
                yield "An env without an episode must stay idle: no reward, no executed actions, no end of an episode."
        full = run_episodes(self.frozen, self.specs, self.max_steps)
        if (difference := first_difference(full, 1, partial, 1)) is not None:
            yield f"An episode of {self.specs[1]} depends on idle envs: it differs in {difference}."
        if env.has_expert(env.config) and not np.isfinite(env.expert_actions()).all():
            yield "expert_actions() must also be finite for envs without an episode."

    def _observation_faults(self, observation: Observation) -> Iterator[str]:
        """Yield violations in the shapes, dtypes and instructions of ``NUM_ENVS`` envs."""
        env, cameras, state = self.frozen, self.frozen.config.cameras, observation.state
        if list(observation.images) != list(cameras):
            yield f"Images are {list(observation.images)}; they must match the config's cameras, {list(cameras)}."
        shape = (NUM_ENVS, env.config.image_size, env.config.image_size, 3)
        for name, image in observation.images.items():
            if image.dtype != np.uint8 or image.shape != shape:
                yield f"Images of '{name}' are {image.dtype} {image.shape}; they must be uint8 {list(shape)}."
        shape = (NUM_ENVS, env.state_dim)
        if env.state_dim == 0 and state is not None:
            yield "`state` must be None if `state_dim` is 0."
        elif env.state_dim and state is None:
            yield f"`state` is None, but `state_dim` is {env.state_dim}."
        elif state is not None and (state.dtype != np.float32 or state.shape != shape or not np.isfinite(state).all()):
            yield f"`state` is {state.dtype} {state.shape}; it must be finite float32 {list(shape)}."
        instructions = observation.instruction
        if len(instructions) != NUM_ENVS or not all(isinstance(text, str) and text for text in instructions):
            yield f"`instruction` must be {NUM_ENVS} non-empty strings: {instructions}."

    def _step_faults(self, step: ChunkStep) -> Iterator[str]:
        """Yield violations in a chunk's shapes, dtypes and consistency."""
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
            yield "`rewards` must be 0 where `executed` is false."
        if (np.diff(step.executed.astype(int), axis=1) > 0).any():
            yield "`executed` must not become true again within a chunk."
        rows = np.flatnonzero(step.terminated | step.truncated)
        complete = np.array_equal(step.final_env_ids, rows) and len(step.episodes) == len(rows)
        if not complete or (step.final_observation is None) != (not len(rows)):
            yield f"Env slots {rows.tolist()} ended; the final fields have {step.final_env_ids.tolist()}."

    def _end_faults(
        self, step: ChunkStep, ended: np.ndarray, last: Observation | None, lengths: np.ndarray
    ) -> Iterator[str]:
        """Yield violations in envs that ``ended`` before a chunk, and in the results of envs that end during it."""
        if (ended & (step.executed.any(1) | (step.rewards != 0).any(1) | step.terminated | step.truncated)).any():
            yield "Without auto-reset, a finished env must not change: no reward, no executed actions, no second end."
        finished = np.flatnonzero(ended)
        if last is not None and not equal_rows(step.observation.select(finished), last.select(finished)):
            yield "Without auto-reset, a finished env must keep its last observation."
        for row, result in zip(step.final_env_ids, step.episodes, strict=True):
            spec, length = self.specs[row], lengths[row]
            horizon = self.frozen.horizon_of(self.frozen.config, self.frozen.task_names[spec.task_id])
            if result.spec != spec:
                yield f"The result of env slot {row} has {result.spec}, but it ran {spec}."
            if result.num_env_steps != length or length > horizon:
                counts = f"{result.num_env_steps} steps; {length} were executed, and the limit is {horizon}"
                yield f"The episode of env slot {row} reports {counts}."
            if not step.terminated[row] and length != horizon and not self.frozen._stats.sim_truncated[row]:
                yield f"Env slot {row} was truncated after {length} of {horizon} steps."


def _can_draw(env: VectorEnv) -> bool:
    """Return whether rendering works on this machine; required packages may be missing."""
    try:
        type(env).check_drawing(env.config)
    except (ConfigError, MissingDependencyError):
        return False
    return True
