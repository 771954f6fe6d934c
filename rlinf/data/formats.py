"""Open a dataset on disk in any supported format, and match its columns to an env."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import numpy as np

from rlinf.data import lerobot_dataset, rlds_dataset
from rlinf.data.config import SFTConfig
from rlinf.data.lerobot_format import IMAGES, INFO
from rlinf.data.stored import DatasetInfo, StoredDemonstrations, column_names
from rlinf.envs.base import VectorEnv
from rlinf.errors import ConfigError, UnreadableRowError, did_you_mean
from rlinf.options import override_text

logger = logging.getLogger("rlinf")

SKIP = "Set sft.skip_unreadable_rows=true to leave such rows out"

READERS: dict[str, ModuleType] = {INFO: lerobot_dataset, rlds_dataset.FEATURES: rlds_dataset}
"""Maps the file that identifies a format to the module that implements ``describe`` and ``open_dataset`` for it."""


def describe_dataset(folder: str | os.PathLike, key: str = "sft.dataset") -> DatasetInfo:
    """Read a dataset's description without its rows. Without a dataset, raise a ConfigError that names the option ``key``."""
    return _reader(folder, key).describe(Path(folder).expanduser())


def open_dataset(
    sft: SFTConfig, env: VectorEnv, folder: str | None = None, outcomes: bool = False, checks_statistics: bool = True
) -> StoredDemonstrations:
    """Open a dataset for a policy of ``env``, with the env's cameras and, if ``outcomes`` is set, the consequences of actions.

    ``checks_statistics``: reject action statistics that contradict the env's conventions, which a policy's own actions may.
    """
    folder = sft.dataset if folder is None else folder
    info = describe_dataset(folder)
    actions, width = action_columns(info, sft.action_key, env.action_dim)
    if width != env.action_dim:
        raise ConfigError(
            f"{info.folder} has action_dim={width}; expected {env.action_dim} for env.name={env.config.name}. "
            "Set sft.dataset=<a different folder>, or env=<a different env>"
        )
    cameras = env.config.cameras
    columns = dict(zip(cameras, image_columns(info, cameras, sft.cameras), strict=True))
    state, state_dim = state_columns(info, sft.state_key)
    _compare_rates(info, env, sft.allow_mismatch)
    try:
        dataset = _reader(folder).open_dataset(
            info.folder, columns, state if 0 < env.state_dim == state_dim else None, outcomes,
            action_key=actions, skip_unreadable=sft.skip_unreadable_rows,
        )  # fmt: skip
        dataset.rows(np.zeros(1, dtype=np.int64))  # to report unreadable images before the weights load
    except UnreadableRowError as error:
        raise error.with_message(f"{str(error).rstrip('.')}. {SKIP}") from error
    if checks_statistics:
        env.check_statistics(env.config, dataset.statistics())
    return dataset


def _compare_rates(info: DatasetInfo, env: VectorEnv, allow_mismatch: Sequence[str]) -> None:
    """Warn if the dataset's rate differs from the env's by more than rounding to an integer would explain."""
    rate = env.metadata.get("render_fps")
    if info.fps and rate and abs(info.fps - rate) >= max(1, 0.05 * rate) and "fps" not in allow_mismatch:
        logger.warning(
            "%s has %g rows per second, but env.name=%s runs at %g steps per second, so a cloned action lasts longer or shorter than "
            "in the dataset. Set 'sft.allow_mismatch=%s' if that is intended",
            info.folder, info.fps, env.config.name, rate, override_text([*allow_mismatch, "fps"]),
        )  # fmt: skip


def image_columns(info: DatasetInfo, env_cameras: Sequence[str], cameras: Sequence[str] | None) -> list[str]:
    """Return the dataset column for each env camera; ``front`` is short for ``observation.images.front``."""
    wanted = list(env_cameras if cameras is None else cameras)
    known = list(info.image_shapes)
    named = f"sft.cameras is [{','.join(wanted)}]"
    example = f"Set sft.cameras=[{','.join(known[: len(env_cameras)])}]"
    if len(wanted) != len(env_cameras):
        raise ConfigError(
            f"{named}, but env.cameras is [{','.join(env_cameras)}]; expected one column per camera, in that "
            f"order. {example}"
        )
    columns: list[str] = []
    for name in wanted:
        column = name if name in info.image_shapes else f"{IMAGES}{name}"
        if column not in info.image_shapes:
            raise ConfigError(f"{info.folder} has no camera '{name}'.{did_you_mean(name, known)} {example}")
        if column in columns:
            raise ConfigError(f"{named}, which selects '{column}' twice; expected one column per camera. {example}")
        columns.append(column)
    return columns


def action_columns(info: DatasetInfo, action_key: str | Sequence[str] | None, wanted: int) -> tuple[list[str], int]:
    """Return the action columns and their total width. If one is missing, raise a ConfigError suggesting columns of width ``wanted``."""
    names, known = column_names(action_key or "action"), dict(info.state_dims)
    known |= {"action": info.action_dim} if info.action_dim else {}
    missing = next((name for name in names if name not in known), None)
    if missing is None:
        return names, sum(known[name] for name in names)
    likely = [name for name in known if "action" in name] or [*known, "<column>"]
    fix = f"sft.action_key={next((name for name in likely if known.get(name) == wanted), likely[0])}"
    if len(likely) > 1 and sum(known.get(name, 0) for name in likely) == wanted:
        fix = f"'sft.action_key={override_text(likely)}'"
    columns = ", ".join(f"{name} ({width})" for name, width in known.items())
    raise ConfigError(
        f"{info.folder} has no numeric column '{missing}' for the actions; it has {columns or 'none'}. Set {fix}"
    )


def state_columns(info: DatasetInfo, state_key: str | Sequence[str] | None) -> tuple[list[str], int]:
    """Return the state columns (``state_key`` or the default) and their total width; none if the default is missing."""
    names = column_names(info.state_key if state_key is None else state_key)
    missing = next((name for name in names if name not in info.state_dims), None)
    if missing is None:
        return names, sum(info.state_dims[name] for name in names)
    if state_key is None:
        return [], 0
    hint = f"{did_you_mean(missing, info.state_dims)} Set sft.state_key=null"
    raise ConfigError(f"sft.state_key is '{missing}', which {info.folder} does not have.{hint}")


def _reader(folder: str | os.PathLike, key: str = "sft.dataset") -> ModuleType:
    path = Path(folder).expanduser()
    for marker, reader in READERS.items():
        if (path / marker).is_file():
            return reader
    inside = sorted(child for child in path.glob("*") if any((child / marker).is_file() for marker in READERS))
    wanted = " or ".join(READERS)
    fix = f"Set {key}={inside[0] if inside else f'<folder with {wanted}>'}"
    missing = " (meta/info.json is missing)" if (path / "meta").is_dir() else ""
    what = f"which is not a dataset{missing}" if path.is_dir() else "which is not a folder"
    raise ConfigError(f"{key} is '{folder}', {what}. {fix}")
