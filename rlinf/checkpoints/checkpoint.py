"""Checkpoints: one folder per moment of a run, complete or absent.

::

    sft_000700/
      model/            or adapter/: weights as safetensors, loads with from_pretrained; of a head on a frozen policy, the head
      trainer_state/    float32 masters and optimiser state as torch.distributed.checkpoint, for any number of ranks
      rng/rank_0.pt     random states of each rank
      state.json        counters of the loop
      config.yaml       resolved configuration
      manifest.json     conditions (see rlinf/manifest.py) and the SHA-256 of every file above

The folder is written under a temporary name and then renamed, so one under its final name is complete. Nothing is read
back through an unrestricted pickle.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import yaml
from torch import Tensor, nn
from torch.optim import Optimizer

from rlinf.checkpoints.model_files import ADAPTER_FOLDER, MODEL_FOLDER, is_adapter, leaves_base, save_model_files
from rlinf.checkpoints.rng_state import load_rng_state, rng_state, save_rng_state
from rlinf.checkpoints.trainer_state import (
    frozen_names,
    load_trainer_state,
    trainer_tensors,
    weights_to_save,
    write_tensors,
)
from rlinf.distributed.parallel import full_tensor, local_part
from rlinf.distributed.process_group import gather_objects, rank, world_size
from rlinf.errors import CheckpointError
from rlinf.files import follow_latest, naming, replace_folder, write_text
from rlinf.manifest import MANIFEST_FILE, Manifest, hash_files, verify_files
from rlinf.models.base_weights import HEAD_SETTINGS
from rlinf.optim.finite import check_loaded
from rlinf.tracking.tracker import METRICS_FILE, PHASES

logger = logging.getLogger("rlinf")

STATE_FILE, CONFIG_FILE = "state.json", "config.yaml"
CHECKPOINTS_FOLDER, SAFETENSORS_FOLDER, TRAINER_FOLDER = "checkpoints", "safetensors", "trainer_state"
SUPERSEDED = re.compile(r"superseded_(\d+)")
"""Name of folders next to checkpoints that hold those whose steps a resumed run repeats."""
FORMAT = 1
Result = TypeVar("Result")


@dataclass
class Snapshot:
    """What a rank adds to a checkpoint, taken at one moment.

    Attributes:
        tensors: Of ``trainer_tensors``, and more: the parts that this rank holds.
        rng: Of ``rng_state``.
        model: Names the files of the policy; its weights are not read.
        weights: The whole acting weights (of adapters: the masters) on rank 0; None: the checkpoint has no files of the policy.
        state: ``state.json`` without the time.
        config: ``config.yaml``.
        manifest: Conditions; ``files`` are filled in when the others are written.
    """

    tensors: dict[str, Tensor]
    rng: dict[str, Any]
    model: nn.Module
    weights: dict[str, Tensor] | None
    state: dict[str, Any]
    config: str
    manifest: Manifest


def take_snapshot(
    *,
    model: nn.Module,
    optimizer: Optimizer | None,
    loop_state: dict[str, Any],
    run_config: dict[str, Any],
    manifest: Manifest,
    best: str | None = None,
    generators: Mapping[str, torch.Generator] | None = None,
    more: Mapping[str, Tensor] | None = None,
    with_policy: bool = True,
    copy: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict,
) -> Snapshot:
    """Collect what a checkpoint holds; a collective call on all ranks.

    Base weights below adapters are left out if the manifest has their digest, and those below a head if the run folder has them, so that
    they can be read where they lie.

    Args:
        model: The policy, sharded or not.
        optimizer: Its optimiser; None omits the state.
        loop_state, run_config: Counters and the resolved configuration, as JSON values.
        manifest: Conditions.
        best: Name of the checkpoint with the best evaluation.
        generators: Random generators of this rank, by name, beside those of Python, NumPy and torch.
        more: Further tensors for ``trainer_state``, by name.
        with_policy: Add ``model/`` or ``adapter/``.
        copy: Copies tensors to memory of their own. Without it, nothing may change before the snapshot is written.
    """
    with_base = not (leaves_base(model) or (is_adapter(model) and "base_sha256" in manifest.lora))
    state = {"format": FORMAT, "world_size": world_size(), "best_checkpoint": best, "loop_state": loop_state}
    return Snapshot(
        tensors=copy(trainer_tensors(model, optimizer, with_base) | dict(more or {})),
        rng=rng_state(generators),
        model=model,
        weights=copy(_full_weights(model, optimizer)) if with_policy else None,
        state=json.loads(json.dumps(state)),
        config=yaml.safe_dump(json.loads(json.dumps(run_config)), sort_keys=False),  # copies, so it needs no aliases
        manifest=replace(manifest),
    )


def write_snapshot(
    folder: Path, snapshot: Snapshot, max_keep: int = -1, group: dist.ProcessGroup | None = None
) -> None:
    """Write a checkpoint, which replaces one of that name, and delete others; a collective call of ``group``, or of all ranks.

    Args:
        folder: Final name, ``<run folder>/checkpoints/<phase>_<step>``.
        snapshot: Of this rank.
        max_keep: Number of newest checkpoints of the same phase to keep beside the best; -1 keeps all.
        group: Of all ranks, for a thread beside the one that trains.

    Raises:
        CheckpointError: A file cannot be written; nothing is left behind.
    """
    partial = folder.with_name(f".{folder.name}.tmp")
    try:
        on_rank_zero(lambda: _start_folder(partial), f"create {partial}", group)
        write_tensors(partial / TRAINER_FOLDER, snapshot.tensors, group)
        path = partial / "rng" / f"rank_{rank()}.pt"
        on_every_rank(lambda: save_rng_state(path, snapshot.rng), "write random states", group)

        def finish() -> None:
            if snapshot.weights is not None:
                with naming(partial):
                    save_model_files(partial, snapshot.model, snapshot.weights)
            state = snapshot.state | {"saved_at": time.time()}
            write_text(partial / STATE_FILE, json.dumps(state, indent=1))
            write_text(partial / CONFIG_FILE, snapshot.config)
            replace(snapshot.manifest, files=hash_files(partial)).save(partial)
            replace_folder(partial, folder)
            _prune(folder, max_keep, state["best_checkpoint"])

        on_rank_zero(finish, f"write {folder}", group)
    finally:
        if rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)


def save_checkpoint(folder: str | os.PathLike, *, max_keep: int = -1, **snapshot: Any) -> Path:
    """Write a checkpoint now and return its folder; arguments and errors of ``take_snapshot`` and ``write_snapshot``."""
    folder = Path(folder)
    write_snapshot(folder, take_snapshot(**snapshot), max_keep)
    return folder


def load_checkpoint(
    folder: str | os.PathLike,
    *,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    generators: Mapping[str, torch.Generator] | None = None,
) -> dict[str, Any]:
    """Restore weights, optimiser state and random states, and return ``loop_state``; a collective call on all ranks.

    Base weights that the checkpoint leaves out (``take_snapshot``) stay as they are. ``model`` may be sharded in another way and over other ranks than at saving; ranks without a saved random state keep
    their present one. Hyperparameters of the optimiser (learning rate, betas, ...) are those of the present configuration.

    Raises:
        CheckpointError: The folder is not a checkpoint, is damaged, or does not fit the model.
    """
    folder = Path(folder)
    verify_checkpoint(folder)
    state = _read_state(folder)
    _load_state(folder, model, optimizer)
    if state["world_size"] != world_size() and rank() == 0:
        logger.warning(
            "%s was saved by %d ranks and is loaded by %d: training continues, but not bit for bit.",
            folder, state["world_size"], world_size(),
        )  # fmt: skip
    random_file = folder / "rng" / f"rank_{rank()}.pt"
    if random_file.exists():
        load_rng_state(random_file, generators)
    return state["loop_state"]


def load_weights(folder: str | os.PathLike, model: nn.Module) -> None:
    """Load only the weights of a checkpoint into ``model``; otherwise like ``load_checkpoint``."""
    folder = Path(folder)
    verify_checkpoint(folder)
    _load_state(folder, model, None)


def _load_state(folder: Path, model: nn.Module, optimizer: Optimizer | None) -> None:
    load_trainer_state(folder / TRAINER_FOLDER, model, optimizer)
    check_loaded({name: local_part(tensor)[0] for name, tensor in model.state_dict().items()}, folder)


def verify_checkpoint(folder: Path) -> None:
    """Raise CheckpointError if a file of a checkpoint or an export is missing or differs from its manifest.

    Rank 0 checks while the others wait. A folder whose files stay the same is hashed once in a process.
    """

    def verify() -> None:
        damage = _damage_of(folder, _fingerprint(folder))
        if damage is not None:
            raise CheckpointError(damage)

    on_rank_zero(verify, f"read {folder}")


def read_loop_state(folder: str | os.PathLike) -> dict[str, Any]:
    """Return the ``loop_state`` of a checkpoint without loading anything else."""
    return _read_state(Path(folder))["loop_state"]


def saved_at(folder: str | os.PathLike) -> float:
    """Return when a checkpoint was written, in seconds; damaged ones have the time of their folder."""
    return _moment(Path(folder))[2]


def is_checkpoint(folder: str | os.PathLike) -> bool:
    """Return whether a folder has the files of a checkpoint, whatever their content."""
    return (Path(folder) / STATE_FILE).is_file()


def is_export(folder: str | os.PathLike) -> bool:
    """Return whether ``rlinf export`` wrote a folder: it holds a policy, but nothing to resume from."""
    folder = Path(folder)
    return all((folder / name).is_file() for name in (MANIFEST_FILE, CONFIG_FILE)) and _has_policy(folder)


def is_run(folder: str | os.PathLike) -> bool:
    """Return whether a folder is a run folder, or ``latest``, which names one."""
    folder = follow_latest(folder)
    return ((folder / METRICS_FILE).is_file() or (folder / CHECKPOINTS_FOLDER).is_dir()) and not _has_policy(folder)


def policy_folder(folder: str | os.PathLike) -> Path:
    """Return the folder for ``from_pretrained``: ``model/`` or ``adapter/`` of a checkpoint, or an export itself."""
    folder = Path(folder)
    places = (folder / MODEL_FOLDER, folder / ADAPTER_FOLDER, folder)
    for place in places:
        if _has_policy(place):
            return place
    looked = ", ".join(map(str, places))
    raise CheckpointError(
        f"{folder} holds no policy: no config.json, adapter_config.json or {HEAD_SETTINGS} in {looked}."
    )


def _has_policy(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("config.json", "adapter_config.json", HEAD_SETTINGS))


def has_policy(checkpoint: Path) -> bool:
    """Return whether a checkpoint or an export has files for ``from_pretrained``; checkpoints of token policies have none."""
    return any(_has_policy(place) for place in (checkpoint / MODEL_FOLDER, checkpoint / ADAPTER_FOLDER, checkpoint))


def resolve_checkpoint(path: str | os.PathLike) -> Path:
    """Return the checkpoint folder that a user's path means; raise CheckpointError if there is none.

    A checkpoint or an export is returned as it is. A run folder, or its ``checkpoints``, means the last undamaged checkpoint
    in it. ``latest`` means the newest run.
    """
    path = follow_latest(path)
    if not path.exists():
        raise CheckpointError(f"There is no folder {path}; required: a checkpoint folder or a run folder.")
    if is_checkpoint(path) or is_export(path):
        return path
    parent = path / CHECKPOINTS_FOLDER if (path / CHECKPOINTS_FOLDER).is_dir() else path
    found = _checkpoints_in(parent)
    for folder in reversed(found):
        damage = _damage_of(folder, _fingerprint(folder))
        if damage is None:
            return folder
        _warn_once(f"{folder} is skipped: {damage}")
    looked = f"no {STATE_FILE} in {path} or in {parent}/*"
    if found:
        looked = f"{len(found)} checkpoints in {parent} are all damaged"
    others = sorted(
        run for run in path.parent.glob("*") if run != path and not run.is_symlink() and has_checkpoints(run)
    )
    instead = f" The newest run beside it that has one is {others[-1]}" if others else ""
    raise CheckpointError(
        f"{path} holds no usable checkpoint: {looked}. Name a checkpoint folder or a run folder; a run that ended before its "
        f"first checkpoint can only be started again.{instead}"
    )


def on_rank_zero(action: Callable[[], Result], what: str, group: dist.ProcessGroup | None = None) -> Result:
    """Run ``action`` on rank 0 while the others wait; every rank returns its result, or raises like ``on_every_rank``."""
    return on_every_rank(action if rank() == 0 else lambda: None, what, group)[0]


def on_every_rank(action: Callable[[], Result], what: str, group: dist.ProcessGroup | None = None) -> list[Result]:
    """Run ``action`` on all ranks and return their results.

    If it raises an ``OSError`` or a ``CheckpointError`` on one rank, every rank raises a ``CheckpointError``.
    """
    result, failure = None, None
    try:
        result = action()
    except CheckpointError as error:
        failure = str(error)
    except OSError as error:
        failure = f"Cannot {what}: {error}. Check space and permissions, or choose another output_dir."
    parts = gather_objects((result, failure), group)
    for _, message in parts:
        if message is not None:
            raise CheckpointError(message)
    return [each for each, _ in parts]


def _start_folder(partial: Path) -> None:
    for leftover in partial.parent.glob(".*.tmp"):  # of a process that was killed while writing
        shutil.rmtree(leftover, ignore_errors=True)
    (partial / "rng").mkdir(parents=True)


def _full_weights(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Tensor]:
    """Return the whole acting weights (masters, if the model has adapters) on the CPU of rank 0; a collective call."""
    adapter, weights = is_adapter(model), {}
    tensors = weights_to_save(model, optimizer) if adapter else model.state_dict()
    if leaves_base(model):
        left_out = frozen_names(model)
        tensors = {name: tensor for name, tensor in tensors.items() if name not in left_out}
    dtypes = {} if adapter else getattr(model, "compute_dtypes", {})
    for name, tensor in tensors.items():
        full = full_tensor(tensor)
        if rank() == 0:
            weights[name] = full.detach().to("cpu", dtypes.get(name))
    return weights


def _prune(newest: Path, max_keep: int, best: str | None) -> None:
    """Delete checkpoints of the same phase except ``newest``, the ``max_keep - 1`` before it, and the best one.

    The policy that was exported from a checkpoint, to the folder of its name in ``safetensors``, goes with it.
    """
    if max_keep < 0:
        return
    phase = newest.name.rpartition("_")[0]
    others = [
        path for path in _checkpoints_in(newest.parent)
        if path != newest and re.fullmatch(rf"{re.escape(phase)}_\d+", path.name)
    ]  # fmt: skip
    for path in others[: max(0, len(others) + 1 - max(1, max_keep))]:
        if path.name != best:
            _remove(path)
            _remove(newest.parent.parent / SAFETENSORS_FOLDER / path.name)


def _remove(folder: Path) -> None:
    """Delete a folder, if it is there, under a name that nobody takes for a whole one while it is being deleted."""
    if folder.is_dir():
        hidden = folder.with_name(f".{folder.name}.tmp")
        os.rename(folder, hidden)
        shutil.rmtree(hidden)


def set_aside_later(resumed: Path) -> None:
    """Move checkpoints later than ``resumed`` into ``superseded_<n>`` next to them; call it on one rank.

    The run repeats these steps, and a later resume must not take the old ones.
    """
    later = later_checkpoints(resumed)
    if not later:
        return
    former = [SUPERSEDED.fullmatch(path.name) for path in resumed.parent.iterdir()]
    folder = resumed.parent / f"superseded_{1 + max((int(found[1]) for found in former if found), default=0)}"
    folder.mkdir()
    for path in later:
        os.rename(path, folder / path.name)
    names = ", ".join(path.name for path in later)
    logger.warning("The run continues from %s; its later checkpoints (%s) are now in %s", resumed, names, folder)


def later_checkpoints(resumed: Path) -> list[Path]:
    """Return the checkpoints next to ``resumed`` that are later by phase or step, oldest first."""
    point = _moment(resumed)[:2]
    return [path for path in _checkpoints_in(resumed.parent) if _moment(path)[:2] > point]


def has_checkpoints(run: Path) -> bool:
    """Return whether a run folder holds any checkpoint, whole or damaged."""
    return bool(_checkpoints_in(run / CHECKPOINTS_FOLDER))


def _checkpoints_in(parent: Path) -> list[Path]:
    """Return checkpoint folders, oldest first by phase and step; the time of saving decides between equals."""
    paths = parent.iterdir() if parent.is_dir() else ()
    return sorted((path for path in paths if not path.name.startswith(".") and is_checkpoint(path)), key=_moment)


def _moment(folder: Path) -> tuple[int, int, float, str]:
    """Return phase and step (from the folder's name, or else its state), time of saving, and name."""
    try:
        state = _read_state(folder)
        saved_at, loop = float(state["saved_at"]), state["loop_state"]
        phase = str(loop.get("phase"))
        step = int(loop.get("sft_step" if phase == "sft" else "step", 0))
    except (CheckpointError, AttributeError, TypeError, ValueError):
        saved_at, phase, step = folder.stat().st_mtime, "", 0
    named = re.fullmatch(rf"({'|'.join(PHASES)}|step)_(\d+)", folder.name)
    if named:
        phase, step = named[1], int(named[2])
    return PHASES.index(phase) if phase in PHASES else -1, step, saved_at, folder.name


def _fingerprint(folder: Path) -> tuple:
    """Return names, sizes and times of the files; while they stay the same, a verified folder is not hashed again."""
    files = [(path, path.stat()) for path in sorted(folder.rglob("*")) if path.is_file()]
    # The time of the last change of the inode, which no copy or touch can set back as it can st_mtime_ns.
    return tuple((str(path), state.st_size, state.st_mtime_ns, state.st_ctime_ns) for path, state in files)


@functools.cache
def _damage_of(folder: Path, fingerprint: tuple) -> str | None:
    """Return what is wrong with a checkpoint or an export; None: nothing."""
    try:
        verify_files(folder, Manifest.load(folder))
    except CheckpointError as error:
        return str(error)
    return None


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning(text)


def _read_state(folder: Path) -> dict[str, Any]:
    path = folder / STATE_FILE
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        complete = state["format"] == FORMAT and {"saved_at", "world_size", "loop_state"} <= state.keys()
    except FileNotFoundError as error:
        hint = "Name a checkpoint or a run folder."
        if is_export(folder):
            hint = "It is an exported policy, which can start a run (init_from=) but not resume one."
        raise CheckpointError(f"{folder} is not a checkpoint: it has no {STATE_FILE}. {hint}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{path} cannot be read ({reason}). Use another checkpoint.") from error
    if not complete:
        raise CheckpointError(f"{path} is not of format {FORMAT}, which this version of rlinf reads.")
    return state
