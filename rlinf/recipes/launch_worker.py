"""What a dataset script calls: ``launch_worker(dataset=..., data_packer=..., reward_fns=...)``.

``rlinf launch`` runs the script as ``__main__`` on every rank. The recipe is then in place, so that the call trains.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlinf.errors import ConfigError
from rlinf.recipes.config import DatasetConfig, RecipeConfig
from rlinf.recipes.datasets import SECTION, load_rows
from rlinf.recipes.load import packaged_recipes
from rlinf.recipes.packers import ChatPacker, Packer, PromptPacker
from rlinf.recipes.rewards import make_rewards
from rlinf.recipes.rollout_workers import RolloutWorkerPlaces
from rlinf.recipes.run import run

SCRIPTS = Path("tools") / "dataset"
"""Folder of the packaged dataset scripts below ``packaged_recipes()``."""


@dataclass
class _Launch:
    """The recipe that a script trains, where its rollout workers may be, and whether it has called ``launch_worker``."""

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
    """Train the recipe of ``rlinf launch`` with rows, packers and rewards of a script. Every rank calls it. Return the folder of the run.

    Raise ConfigError if ``rlinf launch`` has not started the script, or the run's settings and data do not fit.

    Args:
        dataset: Rows, or a function of the recipe that returns them: a list of dicts, ``Rows``, a ``datasets.Dataset`` or
            ``IterableDataset``. None: ``train.train_policy.dataset`` names them.
        data_packer: Turns rows into tokens. None: ``PromptPacker`` for GRPO, else ``ChatPacker``.
        reward_fns: Rewards, instead of ``train.train_policy.reward_function``: see ``make_rewards``.
        val_dataset, val_data_packer: The same for validation. None: ``validation.dataset`` if it has a name, else the first
            rows of ``dataset``; and ``data_packer``.
    """
    if _launch is None:
        script = sys.argv[0] or "<script>"
        raise ConfigError(f"launch_worker has no recipe. Run rlinf launch --config <recipe> {script}")
    config, method = _launch.config, _launch.config.train.train_policy
    if method.type == "grpo":
        make_rewards(reward_fns or method.reward_function)  # names are checked before data and model are read
    if config.validation.reward_function:
        make_rewards(config.validation.reward_function, setting="validation.reward_function")
    if val_dataset is None and config.validation.enable and config.validation.dataset.name:
        val_dataset = rows_of(config.validation.dataset, "validation.dataset")
    _launch.folder = run(
        config,
        dataset=rows_of(method.dataset) if dataset is None else _made(dataset, config),
        data_packer=data_packer or (PromptPacker() if method.type == "grpo" else ChatPacker()),
        reward_fns=reward_fns,
        val_dataset=_made(val_dataset, config),
        val_data_packer=val_data_packer,
        places=_launch.places,
    )
    return _launch.folder


def rows_of(dataset: DatasetConfig, section: str = SECTION) -> Any:
    """Load the rows that a recipe names; see ``load_rows``."""
    return load_rows(dataset.name, dataset.split, dataset.subset, dataset.revision or None, dataset.streaming, section)


def _made(dataset: Any, config: RecipeConfig) -> Any:
    return dataset(config) if callable(dataset) else dataset


def find_script(name: str) -> Path:
    """Return the file of a dataset script. Raise ConfigError if it is missing.

    Args:
        name: A path or a dotted name, which may end in ``.py``. It is looked up below the working directory, then among the packaged
            scripts (``tools.dataset.dummy_sft`` with or without the name of a package before it), then among installed modules.
    """
    folder, given = packaged_recipes(), Path(name).expanduser()
    stem = name.removesuffix(".py")
    parts = stem.split(".") if given.parent == Path(".") else []
    dotted = [Path(*parts[first:]).with_suffix(".py") for first in range(len(parts))]
    for each in (
        given,
        folder / given,
        *dotted[:1],
        *(folder / path for path in dotted),
        *(folder / SCRIPTS / d for d in dotted[-1:]),
    ):
        if each.is_file():
            return each
    if parts and all(part.isidentifier() for part in parts):
        with suppress(ModuleNotFoundError):
            spec = importlib.util.find_spec(stem)  # it imports the parent packages
            if spec is not None and spec.origin and spec.origin.endswith(".py"):
                return Path(spec.origin)
    known = ", ".join(sorted(path.stem for path in (folder / SCRIPTS).glob("*.py")))
    raise ConfigError(
        f"There is no dataset script '{name}' here, in {folder} or among the installed modules. Known: {known}."
    )


def train(config: RecipeConfig, script: Path | None = None, places: RolloutWorkerPlaces | None = None) -> Path:
    """Train a recipe on this rank, with the rows of a dataset script or, without one, those that it names.

    Raise ConfigError if the script does not call ``launch_worker``. Return the folder of the run.

    Args:
        places: Where rollout workers may be; None: the ranks generate.
    """
    with _launched(config, places) as launched:
        if script is None:
            return launch_worker()
        with _first_on_path(script.absolute().parent):
            runpy.run_path(str(script), run_name="__main__")
    if launched.folder is None:
        raise ConfigError(
            f"{script} has ended without a call of launch_worker. Call launch_worker(dataset=...) under "
            "if __name__ == '__main__'"
        )
    return launched.folder


@contextmanager
def _launched(config: RecipeConfig, places: RolloutWorkerPlaces | None) -> Iterator[_Launch]:
    """Put a recipe in place for ``launch_worker``."""
    global _launch
    _launch = _Launch(config, places)
    try:
        yield _launch
    finally:
        _launch = None


@contextmanager
def _first_on_path(folder: Path) -> Iterator[None]:
    """Let a script import what lies next to it, and keep the words of the command from it."""
    path, words = list(sys.path), sys.argv
    sys.path.insert(0, str(folder))
    sys.argv = words[:1]
    try:
        yield
    finally:
        sys.path[:], sys.argv = path, words
