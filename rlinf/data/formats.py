"""Open a dataset on disk in any known format, and match its columns to an env."""

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
"""File that identifies a format, to the module with its ``describe`` and ``open_dataset``."""


def describe_dataset(folder: str | os.PathLike, key: str = "sft.dataset") -> DatasetInfo:
    """Read the description of a dataset, but no rows; raise ConfigError, with the ``key`` that names it, without a dataset."""
    return _reader(folder, key).describe(Path(folder).expanduser())


def open_dataset(
    sft: SFTConfig, env: VectorEnv, folder: str | None = None, outcomes: bool = False
) -> StoredDemonstrations:
    """Open ``sft.dataset``, or another ``folder``, for a policy of ``env``, with cameras under the env's names.

    With ``outcomes``, the consequences of the actions are read, too. The state is read if the dataset has one of the
    env's width. The dataset must be whole, and have the cameras, and actions of the same width and meaning.
    """
    folder = sft.dataset if folder is None else folder
    info = describe_dataset(folder)
    if info.action_dim != env.action_dim:
        raise ConfigError(
            f"The actions of {info.folder} have {info.action_dim} numbers, but actions of env.name={env.config.name} have "
            f"{env.action_dim}. Set sft.dataset=<another folder>, or env=<another env>"
        )
    cameras = env.config.cameras
    columns = dict(zip(cameras, image_columns(info, cameras, sft.cameras), strict=True))
    state = state_column(info, sft.state_key)
    has_state = env.state_dim > 0 and state is not None and info.state_dims[state] == env.state_dim
    dataset = _reader(folder).open_dataset(info.folder, columns, state if has_state else None, outcomes)
    env.check_statistics(env.config, dataset.statistics())
    dataset.rows(np.zeros(1, dtype=np.int64))  # unreadable images are reported before the weights load
    return dataset


def image_columns(info: DatasetInfo, env_cameras: Sequence[str], cameras: Sequence[str] | None) -> list[str]:
    """Return the dataset's column for each camera of the env; ``front`` is short for ``observation.images.front``."""
    wanted = list(env_cameras if cameras is None else cameras)
    known = list(info.image_shapes)
    named = f"sft.cameras is [{','.join(wanted)}]"
    example = f"Set sft.cameras=[{','.join(known[: len(env_cameras)])}]"
    if len(wanted) != len(env_cameras):
        raise ConfigError(
            f"{named}, but env.cameras is [{','.join(env_cameras)}]; required: one column for each camera, in their "
            f"order. {example}"
        )
    found = []
    for name in wanted:
        column = name if name in info.image_shapes else f"{IMAGES}{name}"
        if column not in info.image_shapes:
            raise ConfigError(f"{info.folder} has no camera '{name}'.{did_you_mean(name, known)} {example}")
        if column in found:
            raise ConfigError(f"{named}, which names '{column}' twice; required: one column for each camera. {example}")
        found.append(column)
    return found


def state_column(info: DatasetInfo, state_key: str | None) -> str | None:
    """Return the state's column, ``state_key`` or the usual one; None if the dataset lacks the usual one."""
    if state_key is None:
        return info.state_key if info.state_key in info.state_dims else None
    if state_key not in info.state_dims:
        hint = f"{did_you_mean(state_key, info.state_dims)} Set sft.state_key=null"
        raise ConfigError(f"sft.state_key is '{state_key}', which {info.folder} does not have.{hint}")
    return state_key


def _reader(folder: str | os.PathLike, key: str = "sft.dataset") -> ModuleType:
    path = Path(folder).expanduser()
    for marker, reader in READERS.items():
        if (path / marker).is_file():
            return reader
    inside = sorted(child for child in path.glob("*") if any((child / marker).is_file() for marker in READERS))
    wanted = " or ".join(READERS)
    cure = f"Set {key}={inside[0] if inside else f'<folder with {wanted}>'}"
    missing = " (meta/info.json is missing)" if (path / "meta").is_dir() else ""
    what = f"which is not a dataset{missing}" if path.is_dir() else "which is not a folder"
    raise ConfigError(f"{key} is '{folder}', {what}. {cure}")
