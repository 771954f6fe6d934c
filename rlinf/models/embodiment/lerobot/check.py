"""``rlinf check-policy``: checks a lerobot policy folder, without an env."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlinf.config.overrides import with_overrides
from rlinf.errors import ConfigError, MissingDependencyError, RLinfError
from rlinf.models.building import override_fields
from rlinf.models.embodiment.lerobot.config import LerobotConfig
from rlinf.models.embodiment.lerobot.folder import check_folder, facts
from rlinf.models.embodiment.lerobot.migrate import migrate
from rlinf.models.embodiment.lerobot.policy import start_runner
from rlinf.number_formats import format_table
from rlinf.options import PathText, from_mapping, option, override_text


@dataclass
class PolicyCheckConfig:
    """Settings of ``rlinf check-policy``."""

    interpreter: PathText | None = option(None, "Python interpreter with lerobot, like `model.interpreter`.")
    override_config: dict[str, Any] = option({}, "Fields to replace, like `model.override_config`.")
    migrate: PathText | None = option(None, "New folder for the converted policy of an older lerobot version.")


def check_policy(arguments: Sequence[str]) -> int:
    """Print the inputs and outputs of a lerobot policy folder, and the problems (BLIND) that would corrupt them.

    Problems are missing or foreign statistics, swapped images, wrong units, mismatched weights, and a missing tokenizer. Each
    line names the feature and the fix. Weights are compared only if lerobot is installed in this Python, interpreter=<python> or
    .venv-lerobot. override_config={...} changes the folder's configuration. migrate=<new folder> first converts a folder written
    by an older lerobot version. The exit status is 1 if there is a problem.
    """
    folders = [argument for argument in arguments if "=" not in argument]
    if len(folders) != 1:
        actual = f"`rlinf check-policy` was given {', '.join(folders) or 'no folder'}"
        raise ConfigError(f"{actual}; expected one folder saved by lerobot. Run rlinf check-policy <folder>")
    overrides = [argument for argument in arguments if "=" in argument]
    settings = from_mapping(PolicyCheckConfig, with_overrides({}, overrides))
    rows, problems = report(folders[0], settings.interpreter, settings.override_config, settings.migrate)
    folder = settings.migrate or folders[0]
    if rows:
        print(format_table(("part", folder), rows))
    for problem in problems:
        print(f"BLIND: {problem}")
    print(f"\n{folder}: {f'{len(problems)} problems, so it is rejected' if problems else 'no problem found'}")
    return int(bool(problems))


def report(
    folder: str | Path,
    interpreter: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    migrated: str | None = None,
) -> tuple[list[tuple[str, str]], list[str]]:
    """Return table rows describing a folder's policy, and a message for each fault.

    Weights are compared if a Python with lerobot is available. If ``migrated`` is set, the folder is first migrated to this
    new folder, which is checked instead. Raise CheckpointError if the folder does not exist.
    """
    if migrated is not None:
        migrate(folder, migrated, interpreter)
        folder = migrated
    findings, config = check_folder(folder), None
    if not any(finding.feature == "config.json" for finding in findings):
        config = override_fields(LerobotConfig.from_pretrained(folder), dict(overrides or {}), "override_config")
        findings = check_folder(folder, config)
    faults = [str(finding) for finding in findings]
    rows = [] if config is None else [*facts(config).items()]
    if not faults and config is not None:
        try:
            runner = start_runner(str(folder), config, interpreter)
            rows += [("weights", "fit"), ("features of an actor", str(runner.feature_dim))]
        except MissingDependencyError as error:
            rows += [("weights", f"not compared: {error}")]
        except RLinfError as error:
            faults = [str(error)]
    if not faults and config is not None:
        arguments = ["model=lerobot", f"model.model_path={folder}", f"model.action_token_len={config.action_dim}"]
        arguments += [f"model.action_chunks_len={config.n_action_steps}"]
        arguments += [f"model.override_config.{key}={override_text(value)}" for key, value in (overrides or {}).items()]
        rows += [("to evaluate it", f"rlinf evaluate {shlex.join(arguments)} env=<name>")]
    return rows, faults
