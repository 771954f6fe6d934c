"""The comparison of two policies on a robot, while nobody who watches knows which one acts."""

from __future__ import annotations

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
    on_robot,
    open_evaluation,
    results_are_kept,
    robot_of,
    sampling_of,
    server_untold,
    stop_warning,
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
"""Folders below ``output_dir``: of the policy of ``blind``, which is the baseline, and of the other one."""


def blind(config: RunConfig, other: RunConfig, settings: RobotConfig) -> Comparison:
    """Play each episode of ``rlinf.commands.evaluate.evaluate`` with both policies, in an order that is drawn.

    Nothing tells whose episode it is until all are played; then the two results are written, each as ``evaluate`` does, and compared.
    The same call with the same ``output_dir`` continues after an interruption, in the same order. Raise as ``evaluate``.

    Args:
        other: Names the policy that is the baseline; ``config`` has env, episodes and sampling of both.
    """
    output, asked = Path(config.output_dir), replace(config.evaluation, compare=None)
    check_output(output, None)
    if not partial_files(output):
        check_output(output / SIDES[1], None)
    config = replace(config, evaluation=asked)
    other = replace(
        other,
        env=config.env,
        evaluation=asked,
        cluster=config.cluster,
        seed=config.seed,
        rollout=replace(other.rollout, temperature=config.rollout.temperature),
    )
    names = [each.checkpoint or each.model.url for each in (other, config)]
    with results_are_kept(output), ExitStack() as stack:
        prepare_rank(config)
        set_num_threads(config.cluster.num_threads, 1)
        seed_everything(config.seed, config.trainer.deterministic)
        configs = [
            replace(each, output_dir=str(output / side)) for each, side in zip((other, config), SIDES, strict=True)
        ]
        _play(configs, settings, output, stack)
    comparison = compare_folders(*(output / side for side in SIDES), asked.allow_mismatch)
    print(f"{comparison.table()}\na is {names[0]}\nb is {names[1]}", flush=True)
    return comparison


def _play(configs: list[RunConfig], settings: RobotConfig, output: Path, stack: ExitStack) -> None:
    """Open both policies, play, and write both results."""
    config, device, starts = configs[1], resolve_device(configs[1].cluster.device, 1), output / run_folder.STARTS_FOLDER
    env = env_maker(config, 1)(1, auto_reset=False)
    stack.callback(env.close)
    opened = [open_evaluation(each, env, settings.first_episode) for each in configs]
    check_conditions(*(each.manifest for each in opened), config.evaluation.allow_mismatch)
    settings = replace(settings, fps=settings.fps or opened[1].manifest.fps)
    here, plays = replace(config, output_dir=str(output)), 2 * len(opened[0].specs)
    acting, person = robot_of(here, env, settings, plays, starts, stack)
    sides, present = [], {"device": device, "robot": settings.conditions(), "seed": config.seed}
    for name, each, policy in zip(SIDES, configs, opened, strict=True):
        policy.model = policy.model.to(device)
        stack.enter_context(evaluation_mode(policy.model))
        sides.append(stack.enter_context(on_robot(each, env, acting, person, policy, settings)))
        present |= {f"{name}.{key}": value for key, value in policy.conditions.items()}
    with PartialResults(output, present) as kept:
        num_known = len(kept.known)
        with _unnamed(configs):
            results = _results(config, env, opened, sides, kept)
        for each, policy, side, result in zip(configs, opened, sides, results, strict=True):
            if num_known and policy.untold:
                policy.warnings.append(server_untold(each.model.url, f"{num_known} episodes"))
            write_result(each, result, kept.earlier_s, policy.manifest, policy.warnings)
            write_timing(Path(each.output_dir), settings, side)
            if starts.is_dir():
                shutil.copytree(starts, Path(each.output_dir) / starts.name, dirs_exist_ok=True)
            print(f"report: {write_report(each.output_dir)}\n", flush=True)


def _results(
    config: RunConfig,
    env: VectorEnv,
    opened: Sequence[OpenedPolicy],
    sides: Sequence[RobotEpisodes],
    kept: PartialResults,
) -> list[EvaluationResult]:
    """Play the episodes that are not known yet; return the results of both policies."""
    asked, specs, line = config.evaluation, opened[0].specs, Progress(updates=config.tracking.progress)

    def keep(result: EpisodeResult) -> None:
        kept.add(result)
        line.update("episodes of both", kept.num_results, 2 * len(specs))

    pairs = BlindPairs(sides, kept.known, keep, config.seed)
    first, second = pairs.results
    decided = UntilDecided(pairs.baseline, len(specs))
    rule = decided if asked.stop_when == DECIDED else stop_rule(asked.stop_when, None, len(specs))
    whole = [result for spec, result in second.items() if spec in first]
    plan = EvaluationPlan(known=whole, episodes=pairs, stop=rule, look_every=1)
    found = evaluate_policy(opened[1].model, env, specs, **sampling_of(config), plan=plan)
    played, plan = [one.spec for one in found.results], EvaluationPlan(known=list(first.values()), episodes=pairs)
    results = [evaluate_policy(opened[0].model, env, played, **sampling_of(config), plan=plan), found]
    results[0].wall_s = found.wall_s
    for result in results if asked.stop_when is not None else ():
        result.stopping = {"stop_when": asked.stop_when, "num_planned": len(specs)}
        result.warnings += stop_warning(result)
    return results


@contextmanager
def _unnamed(configs: Sequence[RunConfig]) -> Iterator[None]:
    """Leave the names of the policies out of messages and errors."""
    names = sorted({name for each in configs for name in (each.checkpoint, each.model.url) if name}, key=len)

    def without(text: str) -> str:
        for name in reversed(names):
            text = text.replace(name, "one of the two policies")
        return text

    def rewrite(record: logging.LogRecord) -> bool:
        record.msg, record.args = without(record.getMessage()), ()
        return True

    logger.addFilter(rewrite)
    try:
        yield
    except RLinfError as error:
        raise RLinfError(without(str(error))) from None
    finally:
        logger.removeFilter(rewrite)
