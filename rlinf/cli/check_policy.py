"""``rlinf check-policy``: checks a lerobot policy folder, without an env."""

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
    report = import_target(MODELS.get("lerobot").check_folder)
    rows, problems = report(folders[0], settings.interpreter, settings.override_config, settings.migrate)
    folder = settings.migrate or folders[0]
    if rows:
        print(format_table(("part", folder), rows))
    for problem in problems:
        print(f"BLIND: {problem}")
    print(f"\n{folder}: {f'{len(problems)} problems, so it is rejected' if problems else 'no problem found'}")
    return int(bool(problems))
