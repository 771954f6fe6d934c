"""Creates the report of ``rlinf check-policy`` on a folder."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlinf.errors import MissingDependencyError, RLinfError
from rlinf.models.building import override_fields
from rlinf.models.embodiment.lerobot.config import LerobotConfig
from rlinf.models.embodiment.lerobot.folder import check_folder, facts
from rlinf.models.embodiment.lerobot.migrate import migrate
from rlinf.models.embodiment.lerobot.policy import start_runner
from rlinf.options import override_text


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
