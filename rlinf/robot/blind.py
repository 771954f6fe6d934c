"""Blind comparison of two policies on a robot: no observer knows which policy is acting."""

import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from rlinf import run_folder
from rlinf.cluster.factory import env_maker
from rlinf.commands.evaluation_output import check_output, report_saved, write_result
from rlinf.commands.open_evaluation import (
    OpenedPolicy,
    open_evaluation,
    sampling_settings,
    unknown_policy_warning,
)
from rlinf.commands.ranks import prepare_rank
from rlinf.config.schema import RunConfig
from rlinf.distributed.process_group import resolve_device, set_num_threads
from rlinf.envs.base import VectorEnv
from rlinf.errors import RLinfError
from rlinf.evaluation.compare import Comparison
from rlinf.evaluation.evaluator import EvaluationPlan, Video, evaluate_policy
from rlinf.evaluation.partial import PartialResults, partial_files
from rlinf.evaluation.result import EvaluationResult
from rlinf.evaluation.stopping import DECIDED, Episode, UntilDecided, episode_of, note_stopping, stop_rule
from rlinf.models.precision import evaluation_mode
from rlinf.report.compare_folders import check_conditions, compare_folders
from rlinf.report.run_page import write_report
from rlinf.robot.config import RobotConfig
from rlinf.robot.evaluation import make_robot, robot_episodes, write_timing
from rlinf.robot.loop import RobotEpisodes
from rlinf.seeding import derive_seed, seed_everything
from rlinf.tracking.progress import Progress
from rlinf.types import EpisodeResult, EpisodeSpec

logger = logging.getLogger("rlinf")

SIDES = ("a", "b")
"""Subfolders of ``output_dir`` for the baseline (the policy given by ``blind``) and for the evaluated policy."""


def blind(config: RunConfig, baseline: RunConfig, settings: RobotConfig) -> Comparison:
    """Run each episode of ``rlinf.commands.evaluate.evaluate`` with both policies, in random order.

    Nothing reveals which policy runs an episode until all are done. Then both results are written, as by ``evaluate``, and compared.
    Repeat the call with the same ``output_dir`` to resume an interrupted comparison. ``baseline`` specifies the other policy; env,
    episodes and sampling of both policies come from ``config``. Raise as ``evaluate`` does.
    """
    output, evaluation = Path(config.output_dir), replace(config.evaluation, compare=None)
    check_output(output, None)
    if not partial_files(output):
        check_output(output / SIDES[1], None)
    config = replace(config, evaluation=evaluation)
    baseline = replace(
        baseline,
        env=config.env,
        evaluation=evaluation,
        cluster=config.cluster,
        seed=config.seed,
        rollout=replace(baseline.rollout, temperature=config.rollout.temperature),
    )
    names = [side.checkpoint or side.model.url for side in (baseline, config)]
    with report_saved(output), ExitStack() as stack:
        prepare_rank(config)
        set_num_threads(config.cluster.num_threads, 1)
        seed_everything(config.seed, config.trainer.deterministic)
        sides = zip((baseline, config), SIDES, strict=True)
        configs = [replace(side, output_dir=str(output / name)) for side, name in sides]
        _run(configs, settings, output, stack)
    comparison = compare_folders(*(output / side for side in SIDES), evaluation.allow_mismatch)
    print(f"{comparison.table()}\na is {names[0]}\nb is {names[1]}", flush=True)
    return comparison


def _run(configs: list[RunConfig], settings: RobotConfig, output: Path, stack: ExitStack) -> None:
    """Open both policies, run the episodes, and write both results."""
    config, device, starts = configs[1], resolve_device(configs[1].cluster.device, 1), output / run_folder.STARTS_FOLDER
    env = env_maker(config, 1)(1, auto_reset=False)
    stack.callback(env.close)
    opened = [open_evaluation(side, env) for side in configs]
    check_conditions(*(policy.manifest for policy in opened), config.evaluation.allow_mismatch)
    settings = replace(settings, fps=settings.fps or opened[1].manifest.fps)
    num_episodes = 2 * len(opened[0].specs)
    # Both policies share the initial images, so that the second run of an episode can reproduce the start of the first.
    robot, operator = make_robot(replace(config, output_dir=str(output)), env, settings, num_episodes, starts, stack)
    sides, present = [], {"robot": settings.conditions(), "seed": config.seed}
    for name, side, policy in zip(SIDES, configs, opened, strict=True):
        policy.model = policy.model.to(device)
        stack.enter_context(evaluation_mode(policy.model))
        sides.append(stack.enter_context(robot_episodes(side, env, robot, operator, policy, settings)))
        present |= {f"{name}.{key}": value for key, value in policy.conditions.items()}
    with PartialResults(output, present) as saved:
        num_known = len(saved.known)
        with _anonymous(configs):
            results = _results(config, env, opened, sides, saved)
        for side, policy, episodes, result in zip(configs, opened, sides, results, strict=True):
            if num_known and policy.is_unverified:
                policy.warnings.append(unknown_policy_warning(side.model.url, f"{num_known} episodes"))
            write_result(side, result, saved.earlier_s, policy.manifest, policy.warnings)
            write_timing(Path(side.output_dir), settings, episodes)
            if starts.is_dir():
                shutil.copytree(starts, Path(side.output_dir) / starts.name, dirs_exist_ok=True)
            print(f"report: {write_report(side.output_dir)}\n", flush=True)


def _results(
    config: RunConfig,
    env: VectorEnv,
    opened: Sequence[OpenedPolicy],
    sides: Sequence[RobotEpisodes],
    saved: PartialResults,
) -> list[EvaluationResult]:
    """Run the remaining episodes; return the results of both policies."""
    evaluation, specs, line = config.evaluation, opened[0].specs, Progress(updates=config.tracking.progress)

    def save(result: EpisodeResult) -> None:
        saved.add(result)
        line.update("episodes of both policies", saved.num_results, 2 * len(specs))

    pairs = BlindPairs(sides, saved.known, save, config.seed)
    first, second = pairs.results
    decided = UntilDecided(pairs.baseline, len(specs))
    rule = decided if evaluation.stop_when == DECIDED else stop_rule(evaluation.stop_when, None, len(specs))
    # After an interruption, the last episode may have only one result. It is incomplete, so `pairs` runs the missing half.
    complete = [result for spec, result in second.items() if spec in first]
    plan = EvaluationPlan(known=complete, episodes=pairs, stop=rule, look_every=1)
    result = evaluate_policy(opened[1].model, env, specs, **sampling_settings(config), plan=plan)
    done, plan = (
        [episode.spec for episode in result.results],
        EvaluationPlan(known=list(first.values()), episodes=pairs),
    )
    results = [evaluate_policy(opened[0].model, env, done, **sampling_settings(config), plan=plan), result]
    results[0].wall_s = result.wall_s
    for side in results:
        note_stopping(side, evaluation.stop_when, len(specs))
    return results


@contextmanager
def _anonymous(configs: Sequence[RunConfig]) -> Iterator[None]:
    """Remove the policies' names from log messages and errors."""
    names = sorted({name for side in configs for name in (side.checkpoint, side.model.url) if name}, key=len)

    def without_names(text: str) -> str:
        # Longest first: one name may be a prefix of the other.
        for name in reversed(names):
            text = text.replace(name, "one of the two policies")
        return text

    def rewrite(record: logging.LogRecord) -> bool:
        record.msg, record.args = without_names(record.getMessage()), ()
        return True

    logger.addFilter(rewrite)
    try:
        yield
    except RLinfError as error:
        raise RLinfError(without_names(str(error))) from None
    finally:
        logger.removeFilter(rewrite)


class BlindPairs:
    """Runs each episode with both policies (an ``Episodes`` that returns the second policy's results).

    Args:
        sides: Episodes of the baseline and of the second policy, on the same robot.
        known: Results of earlier processes, in execution order.
        save: Called with each result as soon as it is known, without the policy's name.
    """

    def __init__(
        self,
        sides: Sequence[RobotEpisodes],
        known: Sequence[EpisodeResult],
        save: Callable[[EpisodeResult], None],
        seed: int,
    ) -> None:
        self.sides, self.save, self.seed = sides, save, seed
        self.results: tuple[dict[EpisodeSpec, EpisodeResult], ...] = ({}, {})
        self.baseline: dict[Episode, bool] = {}
        # Both policies compute a chunk before each episode, so the pause before the first action reveals nothing.
        for side in sides:
            side.warmed_up = sides
        # Saved results contain no policy name. The drawn order depends only on the seed, so it assigns them again after a restart.
        for result in known:
            self._note(next(side for side in self.order(result.spec) if result.spec not in self.results[side]), result)

    @property
    def num_restarts(self) -> int:
        return self.sides[0].num_restarts

    def order(self, spec: EpisodeSpec) -> tuple[int, int]:
        """Return the policies' indices in the order in which they run an episode."""
        first = derive_seed(self.seed, "blind", spec.suite, spec.task_id, spec.init_state_id, spec.seed) % 2
        return first, 1 - first

    def run(self, specs: Sequence[EpisodeSpec], on_result: Callable[[EpisodeResult], None]) -> list[EpisodeResult]:
        for spec in specs:
            for side in self.order(spec):
                if spec not in self.results[side]:
                    self._note(side, self.sides[side].run([spec], self.save)[0])
        return [self.results[1][spec] for spec in specs]

    def record(self, numbered: Sequence[tuple[int, EpisodeResult]], folder: Path, size: int) -> list[Video]:
        return []

    def _note(self, side: int, result: EpisodeResult) -> None:
        self.results[side][result.spec] = result
        if side == 0:
            self.baseline[episode_of(result)] = bool(result.success)
