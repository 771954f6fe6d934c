"""Blind comparison of two policies on a robot: no observer knows which policy is acting."""

import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from rlinf import run_folder
from rlinf.cluster.factory import env_maker
from rlinf.commands.evaluate import (
    OpenedPolicy,
    check_output,
    make_robot,
    open_evaluation,
    report_saved_results,
    robot_episodes,
    sampling_settings,
    stop_warning,
    unknown_policy_warning,
    write_result,
    write_timing,
)
from rlinf.commands.ranks import prepare_rank
from rlinf.config.schema import RunConfig
from rlinf.distributed.process_group import resolve_device, set_num_threads
from rlinf.envs.base import VectorEnv
from rlinf.errors import RLinfError
from rlinf.evaluation.compare import Comparison
from rlinf.evaluation.evaluator import EvaluationPlan, evaluate_policy
from rlinf.evaluation.partial import PartialResults, partial_files
from rlinf.evaluation.result import EvaluationResult
from rlinf.evaluation.stopping import DECIDED, UntilDecided, stop_rule
from rlinf.models.precision import evaluation_mode
from rlinf.report.compare_folders import check_conditions, compare_folders
from rlinf.report.run_page import write_report
from rlinf.robot.blind import BlindPairs
from rlinf.robot.config import RobotConfig
from rlinf.robot.loop import RobotEpisodes
from rlinf.seeding import seed_everything
from rlinf.tracking.progress import Progress
from rlinf.types import EpisodeResult

logger = logging.getLogger("rlinf")

SIDES = ("a", "b")
"""Subfolders of ``output_dir`` for the baseline (the policy given by ``blind``) and for the evaluated policy."""


def blind(config: RunConfig, other: RunConfig, settings: RobotConfig) -> Comparison:
    """Run each episode of ``rlinf.commands.evaluate.evaluate`` with both policies, in random order.

    Nothing reveals which policy runs an episode until all are done. Then both results are written, as by ``evaluate``, and compared.
    Repeat the call with the same ``output_dir`` to resume an interrupted comparison. ``other`` specifies the baseline policy; env,
    episodes and sampling of both policies come from ``config``. Raise as ``evaluate`` does.
    """
    output, evaluation = Path(config.output_dir), replace(config.evaluation, compare=None)
    check_output(output, None)
    if not partial_files(output):
        check_output(output / SIDES[1], None)
    config = replace(config, evaluation=evaluation)
    other = replace(
        other,
        env=config.env,
        evaluation=evaluation,
        cluster=config.cluster,
        seed=config.seed,
        rollout=replace(other.rollout, temperature=config.rollout.temperature),
    )
    names = [side.checkpoint or side.model.url for side in (other, config)]
    with report_saved_results(output), ExitStack() as stack:
        prepare_rank(config)
        set_num_threads(config.cluster.num_threads, 1)
        seed_everything(config.seed, config.trainer.deterministic)
        sides = zip((other, config), SIDES, strict=True)
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
    opened = [open_evaluation(side, env, settings.first_episode) for side in configs]
    check_conditions(*(policy.manifest for policy in opened), config.evaluation.allow_mismatch)
    settings = replace(settings, fps=settings.fps or opened[1].manifest.fps)
    num_episodes = 2 * len(opened[0].specs)
    # Both policies share the initial images, so that the second run of an episode can reproduce the start of the first.
    robot, operator = make_robot(replace(config, output_dir=str(output)), env, settings, num_episodes, starts, stack)
    sides, present = [], {"device": device, "robot": settings.conditions(), "seed": config.seed}
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
    for side in results if evaluation.stop_when is not None else ():
        side.stopping = {"stop_when": evaluation.stop_when, "num_planned": len(specs)}
        side.warnings += stop_warning(side)
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
