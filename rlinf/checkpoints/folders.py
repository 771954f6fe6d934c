"""Discovery of checkpoints, runs and exports, and saved configurations. Neither imports torch nor reads weights."""

import functools
import json
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rlinf import run_folder
from rlinf.errors import CheckpointError
from rlinf.files import Json, follow_latest
from rlinf.manifest import Manifest, verify_files
from rlinf.run_folder import CONFIG_FILE
from rlinf.tracking.tracker import PHASES

logger = logging.getLogger("rlinf")

SUPERSEDED = re.compile(r"superseded_(\d+)")
"""Name of a folder for checkpoints that became obsolete when the run was resumed from an earlier step."""
FORMAT = 2
"""Number of the layout of ``state.json``; increase it when a field is renamed or moves."""


def read_loop_state(folder: str | os.PathLike) -> Json:
    """Return a checkpoint's ``loop_state`` without reading any other files."""
    return read_state(Path(folder))["loop_state"]


def saved_at(folder: str | os.PathLike) -> float:
    """Return the Unix time when a checkpoint was written, or its folder's modification time if it is damaged."""
    return _moment(Path(folder))[2]


def is_checkpoint(folder: str | os.PathLike) -> bool:
    """Return whether a folder is a checkpoint, possibly a damaged one."""
    return (Path(folder) / run_folder.STATE_FILE).is_file()


def is_export(folder: str | os.PathLike) -> bool:
    """Return whether a folder is an export, which contains a policy and its conditions but no training state."""
    folder = Path(folder)
    has_files = (folder / run_folder.MANIFEST_FILE).is_file() and (folder / run_folder.CONFIG_FILE).is_file()
    return has_files and _has_policy(folder)


def is_run(folder: str | os.PathLike) -> bool:
    """Return whether a folder is a run folder or a ``latest`` link to a run folder."""
    folder = follow_latest(folder)
    has_started = (folder / run_folder.METRICS_FILE).is_file() or (folder / run_folder.CHECKPOINTS_FOLDER).is_dir()
    return has_started and not _has_policy(folder)


def policy_folder(folder: str | os.PathLike) -> Path:
    """Return the folder for ``from_pretrained``: a checkpoint's ``model/`` or ``adapter/``, or the export folder itself."""
    places = _places(Path(folder))
    for place in places:
        if _has_policy(place):
            return place
    looked = ", ".join(map(str, places))
    raise CheckpointError(
        f"{folder} contains no policy: no config.json, adapter_config.json or {run_folder.ACTOR_SETTINGS} was found in {looked}."
    )


def _places(folder: Path) -> tuple[Path, ...]:
    return folder / run_folder.MODEL_FOLDER, folder / run_folder.ADAPTER_FOLDER, folder


def _has_policy(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("config.json", "adapter_config.json", run_folder.ACTOR_SETTINGS))


def has_policy(checkpoint: Path) -> bool:
    """Return whether a checkpoint or export has files for ``from_pretrained``. Token-policy checkpoints do not."""
    return any(map(_has_policy, _places(checkpoint)))


def resolve_checkpoint(path: str | os.PathLike) -> Path:
    """Resolve a user's path to a checkpoint folder; raise CheckpointError if there is none.

    The path of a checkpoint or an export is returned unchanged. A run folder or its ``checkpoints`` folder resolves to the last
    undamaged checkpoint. In a folder of runs, ``latest`` is used, or if it does not exist, the run with the most recent save.
    """
    path = follow_latest(path)
    if not path.exists():
        raise CheckpointError(f"There is no folder {path}; expected a checkpoint folder or a run folder.")
    if is_checkpoint(path) or is_export(path):
        return path
    parent = path / run_folder.CHECKPOINTS_FOLDER if (path / run_folder.CHECKPOINTS_FOLDER).is_dir() else path
    candidates = checkpoints_in(parent)
    for folder in reversed(candidates):
        damage = damage_of(folder, fingerprint(folder))
        if damage is None:
            return folder
        _warn_once(f"{folder} is skipped: {damage}")
    runs = [run for run in path.glob("*") if has_checkpoints(run)]
    if runs:
        newest = max(runs, key=lambda run: max(map(saved_at, checkpoints_in(run / run_folder.CHECKPOINTS_FOLDER))))
        return resolve_checkpoint(path / run_folder.LATEST if path / run_folder.LATEST in runs else newest)
    looked = f"no {run_folder.STATE_FILE} in {path} or in {parent}/*"
    if candidates:
        looked = f"{len(candidates)} checkpoints in {parent} are all damaged"
    siblings = sorted(
        run for run in path.parent.glob("*") if run != path and not run.is_symlink() and has_checkpoints(run)
    )
    instead = f" The newest run with a checkpoint in {path.parent} is {siblings[-1]}" if siblings else ""
    raise CheckpointError(
        f"{path} contains no usable checkpoint: {looked}. Specify a checkpoint folder or a run folder; a run that ended before its "
        f"first checkpoint cannot be resumed, only restarted.{instead}"
    )


def later_checkpoints(resumed: Path) -> list[Path]:
    """Return the run's checkpoints from a later phase or step than ``resumed``, oldest first."""
    point = _moment(resumed)[:2]
    return [path for path in checkpoints_in(resumed.parent) if _moment(path)[:2] > point]


def has_checkpoints(run: Path) -> bool:
    """Return whether a run folder contains any checkpoints, complete or damaged."""
    return bool(checkpoints_in(run / run_folder.CHECKPOINTS_FOLDER))


def checkpoints_in(parent: Path) -> list[Path]:
    """Return the checkpoint folders in ``parent``, sorted by phase, step and save time, oldest first."""
    paths = parent.iterdir() if parent.is_dir() else ()
    return sorted((path for path in paths if not path.name.startswith(".") and is_checkpoint(path)), key=_moment)


def _moment(folder: Path) -> tuple[int, int, float, str]:
    """Return the sort key: phase and step (from the folder's name or its state), save time, and name."""
    try:
        state = read_state(folder)
        saved_at, loop = float(state["saved_at"]), state["loop_state"]
        phase = str(loop.get("phase"))
        step = int(loop.get("sft_step" if phase == "sft" else "step", 0))
    except (CheckpointError, AttributeError, TypeError, ValueError):
        saved_at, phase, step = folder.stat().st_mtime, "", 0
    named = re.fullmatch(rf"({'|'.join(PHASES)}|step)_(\d+)", folder.name)
    if named:
        phase, step = named[1], int(named[2])
    return PHASES.index(phase) if phase in PHASES else -1, step, saved_at, folder.name


def fingerprint(folder: Path) -> tuple:
    """Return the names, sizes and times of a folder's files, to avoid rehashing a verified folder that has not changed."""
    files = [(path, path.stat()) for path in sorted(folder.rglob("*")) if path.is_file()]
    # Include st_ctime_ns: a copy or touch can reset st_mtime_ns, but not the time of the inode's last change.
    return tuple((str(path), state.st_size, state.st_mtime_ns, state.st_ctime_ns) for path, state in files)


@functools.cache
def damage_of(folder: Path, fingerprint: tuple) -> str | None:
    """Describe the damage to a checkpoint or export; return None if it is intact."""
    try:
        verify_files(folder, Manifest.load(folder))
    except CheckpointError as error:
        return str(error)
    return None


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning(text)


def read_state(folder: Path) -> Json:
    """Read a checkpoint's ``state.json``; raise CheckpointError if it is missing, damaged or in an unsupported format."""
    path = folder / run_folder.STATE_FILE
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        complete = state["format"] == FORMAT and {"saved_at", "world_size", "loop_state"} <= state.keys()
    except FileNotFoundError as error:
        hint = "Specify a checkpoint or a run folder."
        if is_export(folder):
            hint = "It is an exported policy, which can start a run (init_from=) but not resume one."
        raise CheckpointError(f"{folder} is not a checkpoint: it has no {run_folder.STATE_FILE}. {hint}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{path} cannot be read ({reason}). Use a different checkpoint.") from error
    if not complete:
        raise CheckpointError(f"{path} is not in format {FORMAT}, the only one that this version of rlinf can read.")
    return state


class PlainLoader(yaml.SafeLoader):
    """A YAML loader that rejects aliases."""

    # Nested aliases let a small file expand to any size in memory ("billion laughs").
    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node:
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, "it has an alias (*name)")
        return super().compose_node(parent, index)


def read_saved_config(folder: Path) -> Json:
    """Return the resolved configuration stored in a checkpoint; raise CheckpointError if it is missing or damaged."""
    path = folder / CONFIG_FILE
    try:
        saved = yaml.load(path.read_text(encoding="utf-8"), PlainLoader)
    except (OSError, yaml.YAMLError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{path} cannot be read ({reason}). Use a different checkpoint.") from error
    if not isinstance(saved, dict):
        raise CheckpointError(f"{path} contains no configuration. Use a different checkpoint.")
    return saved


def flat(mapping: Mapping[str, Any], path: str = "") -> Json:
    """Flatten a nested mapping to dotted keys."""
    result: Json = {}
    for key, value in mapping.items():
        result |= flat(value, f"{path}{key}.") if isinstance(value, Mapping) else {f"{path}{key}": value}
    return result
