"""Opens a dataset on disk, whatever its format, and fits its columns to an env."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import numpy as np

from rlinf.data import lerobot_dataset, rlds_dataset
from rlinf.data.config import SFTConfig
from rlinf.data.lerobot_format import IMAGES, INFO
from rlinf.data.stored import DatasetInfo, StoredDemonstrations
from rlinf.envs.base import VectorEnv
from rlinf.errors import ConfigError, did_you_mean

READERS: dict[str, ModuleType] = {INFO: lerobot_dataset, rlds_dataset.FEATURES: rlds_dataset}
"""File by which a format is known, to the module with its ``describe`` and ``open_dataset``."""


def describe_dataset(folder: str | os.PathLike) -> DatasetInfo:
    """Read the description of a dataset, and no row.

    Raises:
        ConfigError: There is no folder, or no dataset in it.
    """
    return _reader(folder).describe(Path(folder).expanduser())


def open_dataset(sft: SFTConfig, env: VectorEnv) -> StoredDemonstrations:
    """Open ``sft.dataset`` for a policy of an env; its cameras are read under the env's names.

    A state is read where the dataset has one of the env's width.

    Raises:
        ConfigError: The folder is not a whole dataset, has no such cameras, or actions of another width or meaning.
        MissingDependencyError: A package that the format needs is not installed.
    """
    info = describe_dataset(sft.dataset)
    if info.action_dim != env.action_dim:
        raise ConfigError(
            f"The actions of {info.folder} have {info.action_dim} numbers, and those of env.name={env.config.name} {env.action_dim}; "
            "required: the same. Set sft.dataset=<another folder>, or env=<another env>"
        )
    cameras = env.config.cameras
    columns = dict(zip(cameras, image_columns(info, cameras, sft.cameras), strict=True))
    state = state_column(info, sft.state_key)
    has_state = env.state_dim > 0 and state is not None and info.state_dims[state] == env.state_dim
    dataset = _reader(sft.dataset).open_dataset(info.folder, columns, state if has_state else None)
    env.check_statistics(env.config, dataset.statistics())
    dataset.rows(np.zeros(1, dtype=np.int64))  # damage of all images shows before the weights load
    return dataset


def image_columns(info: DatasetInfo, env_cameras: Sequence[str], cameras: Sequence[str] | None) -> list[str]:
    """Return the columns that stand for the env's cameras; ``front`` is short for ``observation.images.front``.

    Raises:
        ConfigError: There is no such column, or not as many as cameras.
    """
    wanted = list(env_cameras if cameras is None else cameras)
    known = list(info.image_shapes)
    example = f"Set sft.cameras=[{','.join(known[: len(env_cameras)])}]"
    if len(wanted) != len(env_cameras):
        raise ConfigError(
            f"sft.cameras is [{','.join(wanted)}], and env.cameras is [{','.join(env_cameras)}]; required: one column of the dataset "
            f"for each camera, in their order. {example}"
        )
    found = []
    for name in wanted:
        column = name if name in info.image_shapes else f"{IMAGES}{name}"
        if column not in info.image_shapes:
            raise ConfigError(f"{info.folder} has no camera '{name}'.{did_you_mean(name, known)} {example}")
        if column in found:
            raise ConfigError(
                f"sft.cameras is [{','.join(wanted)}], which names the column '{column}' twice; required: one for each camera. {example}"
            )
        found.append(column)
    return found


def state_column(info: DatasetInfo, state_key: str | None) -> str | None:
    """Return the column of the state; None where ``state_key`` is null and the dataset has not the usual one.

    Raises:
        ConfigError: ``state_key`` is not a column of numbers.
    """
    if state_key is None:
        return info.state_key if info.state_key in info.state_dims else None
    if state_key not in info.state_dims:
        hint = did_you_mean(state_key, info.state_dims)
        raise ConfigError(
            f"sft.state_key is '{state_key}', which {info.folder} does not have.{hint} Set sft.state_key=null"
        )
    return state_key


def _reader(folder: str | os.PathLike) -> ModuleType:
    path = Path(folder).expanduser()
    for marker, reader in READERS.items():
        if (path / marker).is_file():
            return reader
    if not path.is_dir():
        raise ConfigError(
            f"sft.dataset is '{folder}', which is not a folder. Set sft.dataset=<folder with {' or '.join(READERS)}>"
        )
    inside = sorted(child for child in path.glob("*") if any((child / marker).is_file() for marker in READERS))
    hint = f"Set sft.dataset={inside[0]}" if inside else f"Set sft.dataset=<folder with {' or '.join(READERS)}>"
    old = " (meta/info.json is missing)" if (path / "meta").is_dir() else ""
    raise ConfigError(
        f"sft.dataset is '{folder}', a folder that is not a dataset{old}: required is {' or '.join(READERS)}. {hint}"
    )
