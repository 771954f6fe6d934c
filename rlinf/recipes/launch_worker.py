"""Entry point for dataset scripts: ``launch_worker(dataset=..., data_packer=..., reward_fns=...)``.

``rlinf launch`` sets the recipe and runs the script as ``__main__`` on every rank; the script's call to ``launch_worker`` trains.
"""

import importlib.util
import runpy
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlinf.errors import ConfigError
from rlinf.recipes.build import RecipeData
from rlinf.recipes.config import DatasetConfig, RecipeConfig
from rlinf.recipes.datasets import SECTION, load_rows
from rlinf.recipes.load import packaged_recipes
from rlinf.recipes.packers import ChatPacker, Packer, PromptPacker
from rlinf.recipes.rewards import make_rewards
from rlinf.recipes.rollout_workers import RolloutWorkerPlaces
from rlinf.recipes.run import run

SCRIPTS = Path("tools") / "dataset"
"""Folder with the packaged dataset scripts, relative to ``packaged_recipes()``."""


@dataclass
class _Launch:
    """The current recipe, the placement of its rollout workers, and the run folder once ``launch_worker`` has returned."""

    config: RecipeConfig
    places: RolloutWorkerPlaces | None = None
    folder: Path | None = None


_launch: _Launch | None = None


def launch_worker(
    dataset: Callable[[RecipeConfig], Any] | Any = None,
    data_packer: Packer | None = None,
    reward_fns: Any = None,
    val_dataset: Callable[[RecipeConfig], Any] | Any = None,
    val_data_packer: Packer | None = None,
) -> Path:
    """Train the recipe passed to ``rlinf launch`` with a script's data and rewards, and return the run folder. Call it on every rank.

    Raise ConfigError outside ``rlinf launch``, or if settings and data are incompatible.

    Args:
        dataset: Rows (list of dicts, ``Rows``, ``datasets.Dataset`` or ``IterableDataset``), or a function that returns rows for a
            recipe. None uses ``train.train_policy.dataset``.
        data_packer: Tokenizes rows. None uses ``PromptPacker`` for GRPO, otherwise ``ChatPacker``.
        reward_fns: Rewards that replace ``train.train_policy.reward_function``; see ``make_rewards``.
        val_dataset: Validation rows. None uses ``validation.dataset`` if it has a name, otherwise the first rows of ``dataset``.
        val_data_packer: Tokenizes validation rows. None uses ``data_packer``.
    """
    if _launch is None:
        script = sys.argv[0] or "<script>"
        raise ConfigError(f"launch_worker has no recipe. Run rlinf launch --config <recipe> {script}")
    config, method = _launch.config, _launch.config.train.train_policy
    if config.is_grpo:
        # Call it only for its checks, before the slow loading of data and model.
        make_rewards(reward_fns or method.reward_function)
    if config.validation.reward_function:
        make_rewards(config.validation.reward_function, setting="validation.reward_function")
    if val_dataset is None and config.validation.enable and config.validation.dataset.name:
        val_dataset = rows_of(config.validation.dataset, "validation.dataset")
    data = RecipeData(
        dataset=rows_of(method.dataset) if dataset is None else _made(dataset, config),
        data_packer=data_packer or (PromptPacker() if config.is_grpo else ChatPacker()),
        reward_fns=reward_fns,
        val_dataset=_made(val_dataset, config),
        val_data_packer=val_data_packer,
        places=_launch.places,
    )
    _launch.folder = run(config, data)
    return _launch.folder


def rows_of(dataset: DatasetConfig, section: str = SECTION) -> Any:
    """Load the rows configured in a recipe's dataset section; see ``load_rows``."""
    return load_rows(dataset.name, dataset.split, dataset.subset, dataset.revision or None, dataset.streaming, section)


def _made(dataset: Any, config: RecipeConfig) -> Any:
    return dataset(config) if callable(dataset) else dataset


def find_script(name: str) -> Path:
    """Return the path of a dataset script; raise ConfigError if it is missing.

    ``name`` is a path or a dotted name, which may end in ``.py``. It is looked up in the working directory, then among the packaged
    scripts (``tools.dataset.dummy_sft``, with or without a package prefix), and finally among installed modules.
    """
    folder, path = packaged_recipes(), Path(name).expanduser()
    stem = name.removesuffix(".py")
    parts = stem.split(".") if path.parent == Path(".") else []
    dotted = [Path(*parts[first:]).with_suffix(".py") for first in range(len(parts))]
    packaged = [
        *(folder / candidate for candidate in dotted),
        *(folder / SCRIPTS / candidate for candidate in dotted[-1:]),
    ]
    for candidate in (path, folder / path, *dotted[:1], *packaged):
        if candidate.is_file():
            return candidate
    if parts and all(part.isidentifier() for part in parts):
        with suppress(ModuleNotFoundError):
            # Try find_spec last, because it imports the parent packages.
            spec = importlib.util.find_spec(stem)
            if spec is not None and spec.origin and spec.origin.endswith(".py"):
                return Path(spec.origin)
    known = ", ".join(sorted(path.stem for path in (folder / SCRIPTS).glob("*.py")))
    raise ConfigError(f"There is no dataset script '{name}' here, in {folder} or installed. Known: {known}.")


def train(config: RecipeConfig, script: Path | None = None, places: RolloutWorkerPlaces | None = None) -> Path:
    """Train a recipe on this rank, with data from ``script`` or the recipe, and return the run folder."""
    global _launch
    _launch = launched = _Launch(config, places)
    path, arguments = list(sys.path), sys.argv
    try:
        if script is None:
            return launch_worker()
        # As if Python ran the script: its folder is first on the import path, and it does not see our arguments.
        sys.path.insert(0, str(script.absolute().parent))
        sys.argv = arguments[:1]
        runpy.run_path(str(script), run_name="__main__")
    finally:
        _launch = None
        sys.path[:], sys.argv = path, arguments
    if launched.folder is None:
        raise ConfigError(f"{script} ended without calling launch_worker. Call it under if __name__ == '__main__'")
    return launched.folder
