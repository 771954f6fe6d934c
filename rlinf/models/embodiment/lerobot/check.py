"""The report of ``rlinf check-policy`` on a folder."""

from __future__ import annotations

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
    """Return rows of what a folder's policy reads and gives, and a sentence for each of its faults.

    Weights are compared where a Python has lerobot. ``migrated`` names a new folder, which is written from an old one and read
    instead. Raise CheckpointError without a folder.
    """
    if migrated is not None:
        migrate(folder, migrated, interpreter)
        folder = migrated
    found = check_folder(folder)
    config = None
    if not any(each.feature == "config.json" for each in found):
        config = override_fields(LerobotConfig.from_pretrained(folder), dict(overrides or {}), "override_config")
        found = check_folder(folder, config)
    wrong = [str(each) for each in found]
    rows = [] if config is None else [*facts(config).items()]
    if not wrong and config is not None:
        try:
            runner = start_runner(str(folder), config, interpreter)
            rows += [("weights", "fit"), ("features of an actor", str(runner.feature_dim))]
        except MissingDependencyError as error:
            rows += [("weights", f"not compared: {error}")]
        except RLinfError as error:
            wrong = [str(error)]
    if not wrong and config is not None:
        words = ["model=lerobot", f"model.model_path={folder}", f"model.action_token_len={config.action_dim}"]
        words += [f"model.action_chunks_len={config.n_action_steps}"]
        words += [
            f"model.override_config.{name}={override_text(value)}" for name, value in dict(overrides or {}).items()
        ]
        rows += [("to evaluate it", f"rlinf evaluate {shlex.join(words)} env=<name>")]
    return rows, wrong
