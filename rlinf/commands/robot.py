"""The evaluation of a policy on a robot, in real time."""

from __future__ import annotations

from dataclasses import replace

from rlinf.commands.evaluate import evaluate
from rlinf.commands.signals import sigterm_is_ctrl_c
from rlinf.config.schema import RunConfig
from rlinf.errors import ConfigError
from rlinf.evaluation.result import EvaluationResult
from rlinf.robot.config import RobotConfig


def robot(config: RunConfig, settings: RobotConfig) -> EvaluationResult:
    """Play the episodes of ``rlinf.commands.evaluate.evaluate`` on a robot that is one row of the env; raise as it does.

    Raise ConfigError for ranks, players, videos or recorded episodes, which a single robot does not have.
    """
    asked, cluster = config.evaluation, config.cluster
    for key, found, required in (
        ("cluster.num_processes", cluster.num_processes, 1),
        ("cluster.num_players", cluster.num_players, None),
        ("evaluation.record_episodes", asked.record_episodes, 0),
    ):
        if found not in (required, 0):
            value = "null" if required is None else required
            raise ConfigError(
                f"{key}={found} with `rlinf robot`; required: {value}, because there is one robot. Set {key}={value}"
            )
    single = replace(asked, num_envs=1, num_videos_per_task=0, probe=False)
    with sigterm_is_ctrl_c():
        return evaluate(replace(config, evaluation=single), settings)
