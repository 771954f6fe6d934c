"""``rlinf.audit``, the public function, which runs the same code as the command."""

import os
from collections.abc import Callable, Sequence
from typing import Any

from rlinf.api import check_overrides, code_overrides, command_arguments, opened_object
from rlinf.audits import command
from rlinf.audits.auditor import Audit, Auditor, check_episodes, check_held_out
from rlinf.commands.open_evaluation import sampling_settings
from rlinf.envs import make_env
from rlinf.envs.base import VectorEnv
from rlinf.envs.config import EnvConfig
from rlinf.evaluation.evaluator import episode_list
from rlinf.policy import Policy
from rlinf.types import Observation, SupportsAct


def audit(
    policy: str | os.PathLike | Policy | SupportsAct | Callable[[Observation], Any],
    env: str | EnvConfig | None = None,
    *,
    episodes: int = command.NUM_EPISODES,
    overrides: Sequence[str] = (),
    plugins: Sequence[str] = (),
    trust_remote_code: bool = False,
) -> Audit:
    """Test whether a policy uses its instruction, its images and its latest observations, like ``rlinf audit``.

    A folder is audited like ``rlinf audit checkpoint=<folder>``, and a report is written. An object is audited in memory, without
    writing files; the first initial states of the training split are assumed to be its training states.

    Args:
        policy, env, overrides: See ``evaluate``.
        episodes: Number of episodes per condition.

    Returns:
        An audit with ``rows``, ``verdicts`` and ``faults``. ``print(audit.table())`` prints a summary.
    """
    check_overrides(overrides, "audit")
    overrides = [*overrides, *code_overrides(plugins, trust_remote_code), f"evaluation.num_episodes={episodes}"]
    if isinstance(policy, (str, os.PathLike)):
        return command.audit(command.configured(command_arguments(policy, env, overrides, "audit")))
    with opened_object(policy, env, overrides, "audit") as (model, made, config):
        settings = config.evaluation
        check_held_out(settings.split)
        specs = episode_list(made, settings.split, settings.num_episodes)
        check_episodes(specs)

        def moved(what: str) -> VectorEnv | None:
            env_config = made.moved(config.env, what)
            return None if env_config is None else make_env(env_config, made.num_envs, auto_reset=False)

        seen = made.episode_specs("train")[: len(specs)]
        return Auditor(model, made, specs, **sampling_settings(config)).run(seen, command.NOT_KNOWN, moved)
