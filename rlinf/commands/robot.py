"""The evaluation of a policy on a robot, in real time."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from rlinf.commands.blind import blind
from rlinf.commands.evaluate import evaluate
from rlinf.commands.signals import sigterm_is_ctrl_c
from rlinf.config.schema import RunConfig
from rlinf.data.formats import describe_dataset
from rlinf.envs import ENVS
from rlinf.errors import ConfigError
from rlinf.evaluation.compare import Comparison
from rlinf.evaluation.result import EvaluationResult
from rlinf.options import override_text, to_mapping
from rlinf.preflight.compatibility import require_package
from rlinf.preflight.folders import check_writable
from rlinf.preflight.reject import reject
from rlinf.robot.config import RobotConfig
from rlinf.robot.page import listening
from rlinf.robot.recorder import recorded_env

logger = logging.getLogger("rlinf")


def robot(config: RunConfig, settings: RobotConfig, other: RunConfig | None = None) -> EvaluationResult | Comparison:
    """Play the episodes of ``rlinf.commands.evaluate.evaluate`` on a robot: a row of the env, or an arm; raise as it does.

    With ``other``, the configuration of ``blind``, compare both policies (``rlinf.commands.blind``). Raise ConfigError for ranks, rollout workers, videos or recorded episodes, which a single robot does not have.
    """
    asked, cluster = config.evaluation, config.cluster
    for key, found, required in (
        ("cluster.num_processes", cluster.num_processes, 1),
        ("cluster.num_rollout_workers", cluster.num_rollout_workers, None),
        ("evaluation.record_episodes", asked.record_episodes, 0),
    ):
        if found not in (required, 0):
            value = "null" if required is None else required
            raise ConfigError(
                f"{key}={found} with `rlinf robot`; required: {value}, because there is one robot. Set {key}={value}"
            )
    if settings.blind is not None and settings.record is not None:
        reject(
            f"record={settings.record} with blind={settings.blind}",
            "record=null, because the dataset would not say whose episodes they are",
            "record=null",
        )
    _check_arm(config, settings)
    _check_take_over(config, settings)
    if settings.success == "page":  # before a policy loads for minutes
        listening(settings.page_host, settings.page_port, BaseHTTPRequestHandler).server_close()
    single = replace(asked, num_envs=1, num_videos_per_task=0, probe=False)
    config = replace(config, evaluation=single)
    with sigterm_is_ctrl_c():
        return evaluate(config, settings) if other is None else blind(config, other, settings)


def _check_arm(config: RunConfig, settings: RobotConfig) -> None:
    """Check that nothing is asked of a robot of lerobot which an env alone can do, and that its actions are limited positions in its units."""
    if settings.arm is None:
        return
    needed = {"success": "person"} if settings.success == "env" else {}
    needed |= {"displacements": [], "real_time": True, "delay_steps": 0, "drop_frames": 0.0, "noise": 0.0}
    needed |= {"teleoperator": "none"} if settings.teleoperator == "scripted" else {}
    reasons = {
        "success": "no env tells it",
        "displacements": "its actions are positions",
        "real_time": "its clock does not jump",
    }
    for key, value in needed.items():
        found = getattr(settings, key)
        if found != value:
            text = override_text(value)
            reason = reasons.get(key, "that belongs to a simulated robot")
            reject(
                f"{key}={override_text(found)} with arm={settings.arm}",
                f"{key}={text}, because {reason}",
                f"{key}={text}",
            )
    if settings.max_relative_target is None:
        required = "the largest change of a position from one action to the next, or the arm may jump"
        reject(
            f"max_relative_target=null with arm={settings.arm}", required, "max_relative_target=2.0, in the env's units"
        )
    for key, value in (("control", "joints"), ("units", "lerobot")):
        if (found := getattr(config.env, key, None)) != value:
            named = f"env.{key}={found}" if found else f"env.name={config.env.name}, which has no env.{key},"
            fix = f"env.{key}={value}" if found else "env=so101 env.control=joints env.units=lerobot"
            reject(f"{named} with arm={settings.arm}", f"env.{key}={value}, positions of joints as the arm's", fix)


def _check_take_over(config: RunConfig, settings: RobotConfig) -> None:
    """Check that a scripted person has an expert, and that the folder of the episodes is new, or has some of the same kind."""
    if settings.teleoperator == "scripted":
        ENVS.get(config.env.name).check_expert(config.env, {}, "teleoperator=none")
    if settings.record is None:
        return
    require_package("pyarrow", f"record={settings.record}", "pyarrow", "record=null")
    check_writable(settings.record, "record")
    if os.path.lexists(folder := Path(settings.record).expanduser()):
        info = describe_dataset(folder, "record")
        if not info.reports_intervention or info.env != recorded_env(to_mapping(config.env)):
            required = f"a new folder, or episodes that were recorded with the present env.name={config.env.name} and its settings"
            reject(f"record={settings.record} holds other episodes", required, "record=<a new folder>")
    if config.evaluation.split == "eval":
        logger.warning(
            "record=%s with evaluation.split=eval: a policy that learns from these episodes must not be evaluated on them. Set "
            "evaluation.split=train to keep them apart",
            settings.record,
        )
