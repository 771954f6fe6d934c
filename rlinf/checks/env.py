"""The contract checker for environments, your own included: every violated property becomes a sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from gymnasium.vector import AutoresetMode

from rlinf.checks.env_recording import CHUNK_LEN, equal_rows, first_difference, play, seeded_actions, spread_specs
from rlinf.envs.base import VectorEnv
from rlinf.errors import ConfigError, MissingDependencyError, NonFiniteError
from rlinf.types import ChunkStep, EpisodeSpec, Observation

EnvFactory = Callable[[int, bool], VectorEnv]
"""``env_factory(num_envs, auto_reset)``: a new environment with the same settings each time."""

NUM_ENVS = 3


PROPERTIES = {
    "declarations": "suite, tasks, action bounds, statistics and auto-reset mode are declared",
    "splits": "training and evaluation episodes are disjoint, and go round robin over the tasks",
    "observation": "images, state and instructions have the declared shapes and types",
    "repeatability": "an episode depends on its spec and the actions alone, not on its row or num_envs",
    "chunks": "a chunk equals its actions one by one, and actions are clipped to the bounds",
    "ends": "episodes end in time, in one way, and finished rows stand still",
    "auto_reset": "auto-reset shows the next episode and keeps the true last observation",
    "bad_actions": "actions of a wrong shape and NaN are refused",
    "optional": "expert, frames and fixed instructions, where there are any",
    "idle": "rows without an episode stand still, and their neighbours do not notice",
}
"""What is checked, in this order."""


def check_env(env_factory: EnvFactory, max_steps: int = 64) -> list[str]:
    """Check the contract of ``rlinf.envs.base.VectorEnv`` on a real environment.

    Episodes are driven by seeded uniform actions. A property that needs the end of an episode (truncation, frozen
    rows, auto-reset) is checked up to ``max_steps`` env steps; give the factory a short ``max_episode_steps``.

    Args:
        env_factory: ``env_factory(num_envs, auto_reset)`` returns a new environment.
        max_steps: Env steps per trajectory.

    Returns:
        One sentence per violated property; empty when there is none.

    Raises:
        ConfigError: ``max_episode_steps`` of the environment is larger than ``max_steps``.
    """
    return [sentence for _, found in check_properties(env_factory, max_steps) for sentence in found]


def check_properties(env_factory: EnvFactory, max_steps: int = 64) -> Iterator[tuple[str, list[str]]]:
    """Check one property after the other; see ``check_env``.

    Yields:
        Key in ``PROPERTIES`` and what violates it. After a violation in declarations, splits or observation, on which the
        others build, nothing else is checked.
    """
    report: list[str] = []
    envs = [env_factory(*how) for how in ((NUM_ENVS, False), (NUM_ENVS, True), (1, False), (NUM_ENVS, False))]
    try:
        frozen, running, single, untouched = envs
        if frozen.max_episode_steps > max_steps:
            raise ConfigError(
                f"max_episode_steps is {frozen.max_episode_steps}, but the checker looks at {max_steps} steps. "
                "Build the env with a smaller max_episode_steps, or call check_env(..., max_steps=...)."
            )
        specs = []

        def first_observation() -> None:
            specs.extend(spread_specs(frozen, NUM_ENVS))
            try:
                observation, _ = frozen.reset(options={"episodes": specs})
            except ConfigError as error:
                report.append(str(error))
                return
            check_observation(frozen, observation, NUM_ENVS, report)

        checks: dict[str, Callable[[], None]] = {
            "declarations": lambda: check_declarations(frozen, running, report),
            "splits": lambda: check_splits(frozen, report),
            "observation": first_observation,
            "repeatability": lambda: check_repeatability(frozen, single, specs, max_steps, report),
            "chunks": lambda: check_chunks(frozen, specs, report),
            "ends": lambda: check_ends(frozen, specs, max_steps, report),
            "auto_reset": lambda: check_auto_reset(running, single, max_steps, report),
            "bad_actions": lambda: check_bad_actions(frozen, specs, report),
            "optional": lambda: check_optional(frozen, specs, report),
            "idle": lambda: check_idle(untouched, frozen, specs, max_steps, report),
        }
        for name in PROPERTIES:
            if report and name == "observation":  # needs tasks and splits
                return
            known, is_finite = len(report), True
            try:
                checks[name]()
            except NonFiniteError as error:
                report.append(str(error))
                is_finite = False
            yield name, report[known:]
            if not is_finite or (report and name == "observation"):
                return
    finally:
        for env in envs:
            env.close()
            env.close()


def check_declarations(frozen: VectorEnv, running: VectorEnv, report: list[str]) -> None:
    """Attributes of the class and the instance."""
    env = frozen
    _require(
        report,
        isinstance(env.suite, str) and bool(env.suite),
        f"`suite` is {env.suite!r}; it must be a non-empty string.",
    )
    names = env.task_names
    _require(
        report,
        bool(names) and len(set(names)) == len(names),
        f"`task_names` must be non-empty and without repeats: {names}.",
    )
    for name in ("action_low", "action_high"):
        bound = getattr(env, name)
        _require(
            report,
            bound.dtype == np.float32 and bound.shape == (env.action_dim,),
            f"`{name}` is {bound.dtype} {bound.shape}; it must be float32 [{env.action_dim}].",
        )
    _require(report, bool((env.action_low < env.action_high).all()), "`action_low` must be smaller than `action_high`.")
    for one, mode in ((frozen, AutoresetMode.DISABLED), (running, AutoresetMode.SAME_STEP)):
        declared = one.metadata.get("autoreset_mode")
        _require(
            report,
            declared == mode,
            f"metadata['autoreset_mode'] is {declared} with auto_reset={one.auto_reset}; it must be {mode}.",
        )
    statistics = env.action_statistics().get("action", {})
    for name in ("q01", "q99", "mask", "min", "max", "mean", "std"):
        _require(
            report,
            len(statistics.get(name, ())) == env.action_dim,
            f"action_statistics()['action']['{name}'] must have {env.action_dim} numbers.",
        )


def check_splits(env: VectorEnv, report: list[str]) -> None:
    """Splits are disjoint, round robin over the tasks, and of this suite."""
    num_tasks, seen = len(env.task_names), {}
    for split in ("train", "eval"):
        specs = env.episode_specs(split)
        if not len(specs):
            report.append(f"The split '{split}' is empty.")
            return
        ends = list(range(min(len(specs), 300))) + list(range(max(0, len(specs) - 300), len(specs)))
        sample = [specs[index] for index in ends]
        _require(
            report,
            all(spec.suite == env.suite for spec in sample),
            f"Episodes of '{split}' must have suite '{env.suite}'.",
        )
        first = [spec.task_id for spec in sample[:num_tasks]]
        _require(
            report,
            sorted(first) == list(range(num_tasks)),
            f"The first {num_tasks} episodes of '{split}' have the tasks {first}, not each task once (round robin).",
        )
        seen[split] = {(spec.task_id, spec.init_state_id, spec.seed) for spec in sample}
    common = seen["train"] & seen["eval"]
    _require(
        report,
        not common,
        f"The splits are not disjoint: both hold (task_id, init_state_id, seed) = {min(common, default=None)}.",
    )


def check_observation(env: VectorEnv, observation: Observation, rows: int, report: list[str]) -> None:
    """Shapes, dtypes and instructions."""
    size = env.config.image_size
    _require(
        report,
        list(observation.images) == list(env.config.cameras),
        f"Images are {list(observation.images)}; they must be the cameras of the config, {list(env.config.cameras)}.",
    )
    for name, image in observation.images.items():
        _require(
            report,
            image.dtype == np.uint8 and image.shape == (rows, size, size, 3),
            f"Images of '{name}' are {image.dtype} {image.shape}; they must be uint8 [{rows}, {size}, {size}, 3].",
        )
    state = observation.state
    if env.state_dim == 0:
        _require(report, state is None, "`state` must be None where `state_dim` is 0.")
    elif state is None:
        report.append(f"`state` is None; `state_dim` says {env.state_dim}.")
    else:
        _require(
            report,
            state.dtype == np.float32 and state.shape == (rows, env.state_dim) and bool(np.isfinite(state).all()),
            f"`state` is {state.dtype} {state.shape}; it must be finite float32 [{rows}, {env.state_dim}].",
        )
    sentences = observation.instruction
    _require(
        report,
        len(sentences) == rows and all(isinstance(one, str) and one for one in sentences),
        f"`instruction` must be {rows} non-empty sentences: {sentences}.",
    )


def check_repeatability(
    env: VectorEnv, single: VectorEnv, specs: list[EpisodeSpec], max_steps: int, report: list[str]
) -> None:
    """An episode is a function of its spec and the actions: not of what ran before, of the row, or of ``num_envs``."""
    first = play(env, specs, max_steps)
    again = play(env, specs, max_steps)
    for row in range(NUM_ENVS):
        if (difference := first_difference(first, row, again, row)) is not None:
            report.append(f"Not repeatable: two episodes of {specs[row]} in the same row differ in {difference}.")
            return
    order = [2, 0, 1]
    moved = play(env, [specs[i] for i in order], max_steps)
    for row, source in enumerate(order):
        if (difference := first_difference(first, source, moved, row)) is not None:
            report.append(
                f"An episode depends on its row: {specs[source]} in rows {source} and {row} differs in {difference}."
            )
            return
    for row, spec in enumerate(specs):
        alone = play(single, [spec], max_steps)
        if (difference := first_difference(first, row, alone, 0)) is not None:
            report.append(
                f"An episode depends on num_envs: {spec} among {NUM_ENVS} envs and alone differs in {difference}."
            )
            return


def check_idle(
    untouched: VectorEnv, full: VectorEnv, specs: list[EpisodeSpec], max_steps: int, report: list[str]
) -> None:
    """Rows that never had an episode stand still, and their neighbour does not notice."""
    some, idle = [None, specs[1], None], [0, 2]
    lone = play(untouched, some, max_steps)
    check_observation(untouched, lone.first, NUM_ENVS, report)
    for step in lone.steps:
        active = step.executed[idle].any() or step.rewards[idle].any() or (step.terminated | step.truncated)[idle].any()
        _require(report, not active, "A row without an episode must stay idle: no reward, nothing executed, no end.")
    if (difference := first_difference(play(full, specs, max_steps), 1, lone, 1)) is not None:
        report.append(
            f"An episode of {specs[1]} is another one where its neighbours are idle: it differs in {difference}."
        )
    if untouched.has_expert():
        finite = bool(np.isfinite(untouched.expert_actions()).all())
        _require(report, finite, "expert_actions() must be finite in rows without an episode, too.")


def check_chunks(env: VectorEnv, specs: list[EpisodeSpec], report: list[str]) -> None:
    """A chunk equals its actions one by one, ``step`` a chunk of one; arrays handed out are not written again."""
    actions = seeded_actions(env, specs, CHUNK_LEN)
    observation, _ = env.reset(options={"episodes": specs})
    copies = {name: image.copy() for name, image in observation.images.items()}
    state = None if observation.state is None else observation.state.copy()
    chunk = env.chunk_step(actions)
    same = all(np.array_equal(copies[name], observation.images[name]) for name in copies)
    same &= state is None or np.array_equal(state, observation.state)
    _require(report, same, "A step writes into the observation that was handed out before it; return fresh arrays.")
    env.reset(options={"episodes": specs})
    rewards, executed = np.zeros_like(chunk.rewards), np.zeros_like(chunk.executed)
    terminated, truncated = np.zeros(NUM_ENVS, bool), np.zeros(NUM_ENVS, bool)
    for position in range(CHUNK_LEN):
        alive = ~(terminated | truncated)
        seen, reward, over, late, _ = env.step(actions[:, position])
        rewards[:, position], executed[:, position] = reward, alive
        terminated, truncated = terminated | over, truncated | late
    for name, one, other in (
        ("rewards", rewards, chunk.rewards),
        ("executed", executed, chunk.executed),
        ("terminated", terminated, chunk.terminated),
        ("truncated", truncated, chunk.truncated),
    ):
        _require(
            report,
            np.array_equal(one, other),
            f"`{name}` of a chunk differ from the same actions one by one: {other.tolist()} and {one.tolist()}.",
        )
    _require(
        report,
        equal_rows(seen, chunk.observation),
        "The observation after a chunk differs from that after the same actions one by one.",
    )
    over = np.clip(actions * 1e3, env.action_low, env.action_high)
    env.reset(options={"episodes": specs})
    clipped = env.chunk_step(over).observation
    env.reset(options={"episodes": specs})
    _require(
        report,
        equal_rows(clipped, env.chunk_step(actions * 1e3).observation),
        "Actions outside the bounds must act like actions clipped to them.",
    )


def check_ends(env: VectorEnv, specs: list[EpisodeSpec], max_steps: int, report: list[str]) -> None:
    """Without auto-reset: episodes end in time, in one way, and their rows freeze."""
    env.reset(options={"episodes": specs})
    ended, last = np.zeros(env.num_envs, bool), None
    lengths = np.zeros(env.num_envs, int)
    for position in range(0, max_steps + CHUNK_LEN, CHUNK_LEN):
        step = env.chunk_step(seeded_actions(env, specs, CHUNK_LEN, position))
        _check_step(env, step, report)
        check_observation(env, step.observation, env.num_envs, report)
        lengths += step.executed.sum(1)
        if (ended & (step.executed.any(1) | (step.rewards != 0).any(1) | step.terminated | step.truncated)).any():
            report.append(
                "A finished row must freeze without auto-reset: no reward, nothing executed, not ended again."
            )
        if last is not None and not equal_rows(
            step.observation.select(np.flatnonzero(ended)), last.select(np.flatnonzero(ended))
        ):
            report.append("A finished row must keep its last observation without auto-reset.")
        for row, result in zip(step.final_env_ids, step.episodes, strict=True):
            horizon = env.horizon_of(env.config, env.task_names[specs[row].task_id])
            _require(
                report,
                result.spec == specs[row],
                f"The result of row {row} carries {result.spec}; it ran {specs[row]}.",
            )
            _require(
                report,
                result.num_env_steps == lengths[row] and lengths[row] <= horizon,
                f"The episode of row {row} reports {result.num_env_steps} steps; {lengths[row]} were executed, "
                f"and the limit is {horizon}.",
            )
            _require(
                report,
                bool(step.terminated[row]) or lengths[row] == horizon,
                f"Row {row} was truncated after {lengths[row]} of {horizon} steps.",
            )
        ended |= step.terminated | step.truncated
        last = step.observation
        if report:
            return
    _require(
        report,
        bool(ended.all()),
        f"Rows {np.flatnonzero(~ended).tolist()} did not end within {max_steps} steps "
        f"(max_episode_steps={env.max_episode_steps}).",
    )


def check_auto_reset(env: VectorEnv, single: VectorEnv, max_steps: int, report: list[str]) -> None:
    """With auto-reset: the next episode is shown at once, the true last observation is kept."""
    pool = spread_specs(env, 4 * NUM_ENVS)
    queue = iter(pool[NUM_ENVS:])
    handed: dict[int, EpisodeSpec] = {}

    def next_episode(row: int) -> EpisodeSpec:
        return handed.setdefault(row, next(queue))

    specs = pool[:NUM_ENVS]
    env.reset(options={"episodes": specs, "next_episode": next_episode})
    for position in range(0, max_steps + CHUNK_LEN, CHUNK_LEN):
        step = env.chunk_step(seeded_actions(env, specs, CHUNK_LEN, position))
        _check_step(env, step, report)
        rows = step.final_env_ids
        if len(rows):
            ended, asked = rows.tolist(), list(handed)
            if asked != ended:
                report.append(f"The rows {ended} ended; next_episode was called for the rows {asked}.")
                return
            current = env.current_specs()
            _require(
                report,
                all(current[row] == handed[row] for row in ended),
                "current_specs() must name the next episodes after auto-reset.",
            )
            alone = [play(single, [specs[row]], max_steps).steps[-1].observation for row in ended]
            fresh = [single.reset(options={"episodes": [spec]})[0] for spec in handed.values()]
            _require(
                report,
                equal_rows(Observation.concatenate(fresh), step.observation.select(rows)),
                "After auto-reset, the observation must be the first one of the next episode.",
            )
            _require(
                report,
                equal_rows(Observation.concatenate(alone), step.final_observation),
                "`final_observation` must be the true last observation of the episode that ended.",
            )
            return
    report.append(f"No episode ended within {max_steps} steps under auto-reset.")


def check_bad_actions(env: VectorEnv, specs: list[EpisodeSpec], report: list[str]) -> None:
    """Actions of a wrong shape and numbers that are not finite are refused."""
    env.reset(options={"episodes": specs})
    shape = (env.num_envs, 1, env.action_dim)
    bad = {
        "of a wrong width": np.zeros((*shape[:2], env.action_dim + 1), np.float32),
        "for too few envs": np.zeros((env.num_envs - 1, *shape[1:]), np.float32),
        "that are NaN": np.full(shape, np.nan, np.float32),
    }
    for words, actions in bad.items():
        try:
            env.chunk_step(actions)
            report.append(f"Actions {words} must raise ConfigError; they were accepted.")
        except ConfigError:
            continue
        except (ValueError, TypeError, LookupError, RuntimeError) as error:
            report.append(f"Actions {words} must raise ConfigError, not {type(error).__name__}.")


def check_optional(env: VectorEnv, specs: list[EpisodeSpec], report: list[str]) -> None:
    """Scripted expert, frames and fixed instructions, where the environment has them."""
    observation, _ = env.reset(options={"episodes": specs})
    if env.has_expert():
        actions = env.expert_actions()
        fits = actions.shape == (env.num_envs, env.action_dim) and actions.dtype == np.float32
        _require(
            report,
            fits,
            f"expert_actions() is {actions.dtype} {actions.shape}; "
            f"it must be float32 [{env.num_envs}, {env.action_dim}].",
        )
        inside = fits and bool(((actions >= env.action_low) & (actions <= env.action_high)).all())
        _require(report, inside, "expert_actions() must lie within the action bounds.")
    if type(env).render_frames is not VectorEnv.render_frames and _can_draw(env):
        frames = env.render_frames([1], 48)
        _require(
            report,
            frames.dtype == np.uint8 and frames.shape == (1, 48, 48, 3),
            f"render_frames([1], 48) is {frames.dtype} {frames.shape}; it must be uint8 [1, 48, 48, 3].",
        )
    for spec, sentence in zip(specs, observation.instruction, strict=True):
        fixed = env.instruction_of(spec.task_id)
        _require(
            report,
            fixed in (None, sentence),
            f"instruction_of({spec.task_id}) is '{fixed}', but an episode says '{sentence}'.",
        )


def _can_draw(env: VectorEnv) -> bool:
    """Whether the env itself expects that drawing works here; packages for it may be missing."""
    try:
        type(env).check_drawing(env.config)
    except (ConfigError, MissingDependencyError):
        return False
    return True


def _check_step(env: VectorEnv, step: ChunkStep, report: list[str]) -> None:
    shapes = {"rewards": (np.float32, (env.num_envs, CHUNK_LEN)), "executed": (np.bool_, (env.num_envs, CHUNK_LEN))}
    shapes |= {name: (np.bool_, (env.num_envs,)) for name in ("terminated", "truncated", "success")}
    for name, (dtype, shape) in shapes.items():
        array = getattr(step, name)
        _require(
            report,
            array.dtype == dtype and array.shape == shape,
            f"`{name}` is {array.dtype} {array.shape}; it must be {np.dtype(dtype)} {shape}.",
        )
    _require(report, bool(np.isfinite(step.rewards).all()), "`rewards` must be finite.")
    _require(
        report, not (step.terminated & step.truncated).any(), "`terminated` and `truncated` must not both be true."
    )
    _require(report, not step.rewards[~step.executed].any(), "`rewards` must be 0 where nothing was executed.")
    _require(
        report,
        not (np.diff(step.executed.astype(int), axis=1) > 0).any(),
        "`executed` must not start again within a chunk.",
    )
    rows = np.flatnonzero(step.terminated | step.truncated)
    complete = np.array_equal(step.final_env_ids, rows) and len(step.episodes) == len(rows)
    complete &= (step.final_observation is None) == (not len(rows))
    _require(
        report,
        complete,
        f"Rows {rows.tolist()} ended; the final fields tell of {step.final_env_ids.tolist()}.",
    )


def _require(report: list[str], holds: bool, sentence: str) -> None:
    if not holds and sentence not in report:
        report.append(sentence)
