"""``rlinf check-policy``: whether a policy folder of lerobot is whole, without an env."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlinf.cli.table import format_table
from rlinf.errors import ConfigError
from rlinf.models import MODELS, import_target
from rlinf.options import PathText, from_mapping, option
from rlinf.recipes.load import with_overrides


@dataclass
class PolicyCheckConfig:
    """How a folder is read."""

    interpreter: PathText | None = option(None, "Python with lerobot, as `model.interpreter`.")
    override_config: dict[str, Any] = option({}, "Fields to replace, as `model.override_config`.")
    migrate: PathText | None = option(None, "New folder, to be written from the folder of an old lerobot, and checked.")


def check_policy(arguments: Sequence[str]) -> int:
    """Print what a policy folder of lerobot reads and gives, and what would make it blind.

    Found are lost or foreign statistics, swapped images, other units, weights that do not fit, and a tokenizer that is not here. Each
    line names the feature and the fix. Weights are compared where a Python has lerobot: this one, interpreter=<python>, or
    .venv-lerobot. override_config={...} lays changes over the folder's configuration. migrate=<new folder> first writes the folder
    of an old lerobot as the present one would. The exit status is 1 if something was found.
    """
    folders = [word for word in arguments if "=" not in word]
    if len(folders) != 1:
        found = f"`rlinf check-policy` got {', '.join(folders) or 'no folder'}"
        raise ConfigError(f"{found}; required: one folder that lerobot has saved. Run rlinf check-policy <folder>")
    settings = from_mapping(PolicyCheckConfig, with_overrides({}, [word for word in arguments if "=" in word]))
    report = import_target(MODELS.get("lerobot").check_folder)
    rows, wrong = report(folders[0], settings.interpreter, settings.override_config, settings.migrate)
    folder = settings.migrate or folders[0]
    if rows:
        print(format_table(("part", folder), rows))
    for sentence in wrong:
        print(f"BLIND: {sentence}")
    print(f"\n{folder}: {f'{len(wrong)} found, so it is rejected' if wrong else 'nothing is wrong'}")
    return int(bool(wrong))
