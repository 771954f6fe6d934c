"""Evaluation of a policy on a robot, in real time."""

import logging
import os
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from rlinf.config.schema import RunConfig
from rlinf.data.formats import describe_dataset
from rlinf.envs import ENVS
from rlinf.errors import reject
from rlinf.evaluation.compare import Comparison
from rlinf.evaluation.result import EvaluationResult
from rlinf.options import require_values, to_mapping
from rlinf.preflight.compatibility import require_package
from rlinf.preflight.folders import check_writable
from rlinf.robot.blind import blind
from rlinf.robot.config import RobotConfig
from rlinf.robot.evaluation import evaluate_on_robot
from rlinf.robot.page import listening
from rlinf.robot.recorder import recorded_env
from rlinf.training.stop_signal import sigterm_is_ctrl_c

logger = logging.getLogger("rlinf")


def robot(config: RunConfig, settings: RobotConfig, baseline: RunConfig | None = None) -> EvaluationResult | Comparison:
    """Evaluate a policy on one simulated or physical robot, or compare it blindly with the policy of ``baseline``; raise as ``evaluate``."""
    evaluation, single = config.evaluation, "one process, because there is one robot"
    require_values(
        config,
        "`rlinf robot`",
        ("cluster.num_processes", 1, single),
        ("cluster.num_rollout_workers", None, single),
        ("evaluation.record_episodes", 0, "no recordings, because the policy runs beside the robot"),
    )
    if settings.blind is not None and settings.record is not None:
        required = "record=null, because the dataset would mix the episodes of both policies"
        reject(f"record={settings.record} with blind={settings.blind}", required, "record=null")
    _check_arm(config, settings)
    _check_take_over(config, settings)
    if settings.success == "page" or settings.teleoperator == "browser":
        # Fail now if the port is occupied, not after minutes of loading the policy.
        listening(settings.page_host, settings.page_port, BaseHTTPRequestHandler).server_close()
    config = replace(
        config, evaluation=replace(evaluation, num_envs=1, num_videos_per_task=0, probe=False, baselines=False)
    )
    with sigterm_is_ctrl_c():
        return evaluate_on_robot(config, settings) if baseline is None else blind(config, baseline, settings)


def _check_arm(config: RunConfig, settings: RobotConfig) -> None:
    """Check that no setting of a simulated robot is given to a lerobot robot, and that actions are clipped joint positions in its units."""
    if settings.arm is None:
        return
    arm, simulated = f"arm={settings.arm}", "the default, because the key applies only to simulated robots"
    rules = [("success", "human", "a human's label, because no env reports it")] if settings.success == "env" else []
    rules += [
        ("relative_dims", [], "none, because its actions are positions"),
        ("real_time", True, "true, because its clock cannot be simulated"),
        ("delay_steps", 0, simulated),
        ("drop_frames", 0.0, simulated),
        ("noise", 0.0, simulated),
    ]
    rules += [("teleoperator", "none", simulated)] if settings.teleoperator == "scripted" else []
    require_values(settings, arm, *rules)
    if settings.max_relative_target is None:
        required = "a maximum position change per step, because the arm may jump"
        reject(f"max_relative_target=null with {arm}", required, "max_relative_target=2.0, in the env's units")
    for key, required in (("control", "joints"), ("units", "lerobot")):
        if (value := getattr(config.env, key, None)) != required:
            actual = f"env.{key}={value}" if value else f"env.name={config.env.name}, which has no env.{key},"
            fix = f"env.{key}={required}" if value else "env=so101 env.control=joints env.units=lerobot"
            reject(f"{actual} with {arm}", f"env.{key}={required}, as for the arm's joint positions", fix)


def _check_take_over(config: RunConfig, settings: RobotConfig) -> None:
    """Check that a scripted operator has an expert, that an operator at a browser has time, and that ``record`` is new or contains episodes of the same kind."""
    if settings.teleoperator == "scripted":
        ENVS.get(config.env.name).check_expert(config.env, {}, "teleoperator=none")
    if settings.teleoperator == "browser":
        clock = "true, because an operator needs real time"
        require_values(settings, "teleoperator=browser", ("real_time", True, clock))
    if settings.record is None:
        return
    require_package("pyarrow", f"record={settings.record}", "pyarrow", "record=null")
    check_writable(settings.record, "record")
    if os.path.lexists(folder := Path(settings.record).expanduser()):
        info = describe_dataset(folder, "record")
        if not info.reports_intervention or info.env != recorded_env(to_mapping(config.env)):
            required = f"a new folder, or episodes recorded with env.name={config.env.name} and its current settings"
            reject(f"record={settings.record} contains episodes of a different kind", required, "record=<a new folder>")
    if config.evaluation.split == "eval":
        logger.warning(
            "record=%s with evaluation.split=eval: a policy that is trained on these episodes must not be evaluated on them. Set "
            "evaluation.split=train",
            settings.record,
        )
