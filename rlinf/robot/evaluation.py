"""Evaluation of a policy on a robot: its parts, and the evaluation of one policy."""

import json
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from rlinf import run_folder
from rlinf.cluster.factory import env_maker
from rlinf.commands.evaluate import run_episodes
from rlinf.commands.evaluation_output import check_output, report_saved
from rlinf.commands.open_evaluation import OpenedPolicy, open_evaluation, sampling_settings
from rlinf.commands.ranks import prepare_rank
from rlinf.config.schema import RunConfig
from rlinf.distributed.process_group import resolve_device, set_num_threads
from rlinf.envs.base import VectorEnv
from rlinf.errors import reject
from rlinf.evaluation.evaluator import BatchedPolicy
from rlinf.evaluation.partial import PartialResults, num_saved
from rlinf.evaluation.result import EvaluationResult
from rlinf.files import write_text
from rlinf.models.precision import autocast
from rlinf.options import to_mapping
from rlinf.preflight.compatibility import env_spec
from rlinf.report.compare_folders import evaluation_folder
from rlinf.robot.arm import Arm, connected_robot, connected_teleoperator, disconnect
from rlinf.robot.browser import HOLD_S, BrowserTeleoperator, TeleoperationPage
from rlinf.robot.config import RobotConfig
from rlinf.robot.human import HumanLabelledRobot, WatchedRobot
from rlinf.robot.loop import RobotEpisodes
from rlinf.robot.page import Page, PageTeleoperator
from rlinf.robot.recorder import EpisodeRecorder
from rlinf.robot.robot import EnvRobot, EpisodicRobot
from rlinf.robot.teleoperator import ScriptedOperator, Teleoperator
from rlinf.seeding import seed_everything


def evaluate_on_robot(config: RunConfig, settings: RobotConfig) -> EvaluationResult:
    """Evaluate like ``commands.evaluate.evaluate``, but on a robot, in this process and without deadlines; also write ``timing.json``."""
    output, compare = Path(config.output_dir), config.evaluation.compare
    check_output(output, evaluation_folder(compare) if compare else None)
    device = resolve_device(config.cluster.device, 1)
    with report_saved(output), ExitStack() as stack:
        prepare_rank(config)
        set_num_threads(config.cluster.num_threads, 1)
        seed_everything(config.seed, config.trainer.deterministic)
        env = env_maker(config, 1)(1, auto_reset=False)
        stack.callback(env.close)
        opened = open_evaluation(config, env)
        opened.model = opened.model.to(device)
        settings = replace(settings, fps=settings.fps or opened.manifest.fps)
        starts = None if opened.baseline is None else opened.baseline / run_folder.STARTS_FOLDER
        robot, operator = make_robot(config, env, settings, len(opened.specs), starts, stack)
        episodes = stack.enter_context(robot_episodes(config, env, robot, operator, opened, settings))
        present = {**opened.conditions, "robot": settings.conditions()}
        with PartialResults(output, present) as saved, autocast(opened.model, config.model.precision):
            result = run_episodes(config, env, opened, saved, episodes)
            if episodes.recorder is not None:
                print(f"recorded: {episodes.recorder.write(result.results)}", flush=True)
        write_timing(output, settings, episodes)
    return EvaluationResult.from_json(output / run_folder.RESULT_FILE)


def make_robot(
    config: RunConfig, env: VectorEnv, settings: RobotConfig, num_episodes: int, starts: Path | None, stack: ExitStack
) -> tuple[EpisodicRobot, Teleoperator | None]:
    """Return the simulated robot or ``arm``, and its teleoperator; ``starts``: folder of initial images for a human to reproduce."""
    simulated = EnvRobot(env, settings)
    robot: EpisodicRobot = simulated
    if settings.arm is not None:
        arm = connected_robot(settings.arm)
        stack.callback(disconnect, arm)
        robot = Arm(arm, env, 0.5 / settings.rate)
    operator: Teleoperator | None = None
    if settings.teleoperator == "scripted":
        operator = ScriptedOperator(simulated, settings)
    elif settings.teleoperator == "browser":
        robot = watched = WatchedRobot(robot)
        operator = _browser_operator(watched, env, settings, stack)
    elif settings.teleoperator != "none":
        operator = connected_teleoperator(settings.teleoperator)
        stack.callback(disconnect, operator)
    if settings.success != "env":
        output = Path(config.output_dir)
        robot = labelled = HumanLabelledRobot(robot, output / run_folder.STARTS_FOLDER, starts)
        labelled.number, labelled.num_episodes = num_saved(output), num_episodes
        if settings.success == "page":
            page = Page(labelled, settings.page_host, settings.page_port)
            stack.callback(page.close)
            print(f"page: {page.url}", flush=True)
            if operator is not None and not hasattr(operator, "get_teleop_events"):
                operator = PageTeleoperator(operator, page)
    return robot, operator


def _browser_operator(
    robot: WatchedRobot, env: VectorEnv, settings: RobotConfig, stack: ExitStack
) -> BrowserTeleoperator:
    """Serve the operator's page, and return the teleoperator; if ``success=page`` has the port, use any free one."""
    if settings.rate < (lowest := 2 / HOLD_S):
        required = f"at least {lowest:g}, because the robot must hold {HOLD_S} s after the browser's last message"
        reject(f"fps={settings.rate:g} with teleoperator=browser", required, f"fps={lowest:g}")
    names, port = list(robot.action_features), 0 if settings.success == "page" else settings.page_port
    # The last action lasts for a period, and the next step may be late.
    expires_s = HOLD_S - 1.2 / settings.rate
    page = TeleoperationPage(names, lambda: robot.seen, expires_s, settings.page_host, port)
    page.text = "The policy acts, and you while you hold the switch."
    stack.callback(page.close)
    print(f"teleoperation: {page.url}", flush=True)
    steps = [step for step in (settings.handover_max_step, settings.max_relative_target) if step is not None]
    return BrowserTeleoperator(
        page, robot, settings.is_relative(len(names)), env.action_low, env.action_high, min(steps, default=None)
    )


def robot_episodes(
    config: RunConfig,
    env: VectorEnv,
    robot: EpisodicRobot,
    operator: Teleoperator | None,
    opened: OpenedPolicy,
    settings: RobotConfig,
) -> RobotEpisodes:
    """Return an ``Episodes`` that runs the policy on a robot, where an operator may intervene."""
    # Call with one row, not the usual NUM_ROWS: latency matters, and no batched evaluation has to be matched bit for bit.
    policy = BatchedPolicy(opened.model, env.task_names, **sampling_settings(config), num_rows=1)
    recorder = None
    if operator is not None:
        opened.warnings.append(
            f"An operator could intervene: successes are due to policy and operator together (teleoperator={settings.teleoperator})"
        )
    if settings.record is not None:
        pending, fps = Path(config.output_dir) / run_folder.ROBOT_EPISODES_FOLDER, max(1, round(settings.rate))
        recorder = EpisodeRecorder(Path(settings.record).expanduser(), pending, fps, to_mapping(config.env))
    context = partial(autocast, opened.model, config.model.precision)
    return RobotEpisodes(policy, robot, env_spec(config), settings, context, operator, recorder)


def write_timing(output: Path, settings: RobotConfig, episodes: RobotEpisodes) -> None:
    """Write and print the timing statistics."""
    timing = {"settings": asdict(settings), **episodes.timing.as_dict()}
    write_text(output / run_folder.TIMING_FILE, json.dumps(timing, indent=2))
    print(f"{episodes.timing}\ntiming: {output / run_folder.TIMING_FILE}", flush=True)
