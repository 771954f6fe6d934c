"""Checkpoints: one folder per moment of a run, complete or absent.

::

    sft_000700/
      model/            or adapter/: weights as safetensors, loads with from_pretrained
      trainer_state/    weights and optimiser state as torch.distributed.checkpoint, for any number of ranks
      rng/rank_0.pt     random states of each rank
      state.json        counters of the loop
      config.yaml       resolved configuration
      manifest.json     conditions (see rlinf/manifest.py) and the SHA-256 of every file above

Rank 0 collects everything under a temporary name and renames it, so a folder under its final name is complete. Nothing
is read back through an unrestricted pickle.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import pickle
import random
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import yaml
from torch import nn
from torch.optim import Optimizer

from rlinf.distributed.process_group import rank, world_size
from rlinf.errors import CheckpointError
from rlinf.files import write_text
from rlinf.manifest import MANIFEST_FILE, Manifest, changed_files, hash_files, verify_files
from rlinf.training.model_files import ADAPTER_FOLDER, MODEL_FOLDER, save_model_files
from rlinf.training.trainer_state import load_trainer_state, save_trainer_state

logger = logging.getLogger("rlinf")

STATE_FILE, CONFIG_FILE, CHECKPOINTS_FOLDER = "state.json", "config.yaml", "checkpoints"
FORMAT = 1


def save_checkpoint(
    folder: str | os.PathLike,
    *,
    model: nn.Module,
    optimizer: Optimizer | None,
    loop_state: dict[str, Any],
    run_config: dict[str, Any],
    manifest: Manifest,
    max_keep: int = -1,
) -> Path:
    """Write a checkpoint; a collective call on all ranks. A folder of this name is replaced.

    Args:
        folder: Final name, ``<run folder>/checkpoints/<phase>_<step>``.
        model: The policy, sharded or not.
        optimizer: Its optimiser; None leaves its state out.
        loop_state: Counters as JSON values.
        run_config: Resolved configuration.
        manifest: Its ``files`` are filled in here.
        max_keep: Newest checkpoints of the same phase that are kept beside each other; -1 keeps all.

    Returns:
        ``folder``.

    Raises:
        CheckpointError: It cannot be written; nothing of it is left behind.
    """
    folder = Path(folder)
    partial = folder.with_name(f".{folder.name}.tmp")
    try:
        on_rank_zero(lambda: _start_folder(partial), f"create {partial}")
        save_trainer_state(partial / "trainer_state", model, optimizer)
        on_every_rank(lambda: torch.save(_rng_state(), partial / "rng" / f"rank_{rank()}.pt"), "write random states")
        weights = _full_weights(model)

        def finish() -> None:
            save_model_files(partial, model, weights)
            state = {"format": FORMAT, "saved_at": time.time(), "world_size": world_size(), "loop_state": loop_state}
            write_text(partial / STATE_FILE, json.dumps(state, indent=1))
            write_text(partial / CONFIG_FILE, yaml.safe_dump(run_config, sort_keys=False))
            replace(manifest, files=hash_files(partial)).save(partial)
            _move(partial, folder)
            _prune(folder, max_keep)

        on_rank_zero(finish, f"write {folder}")
    finally:
        if rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def load_checkpoint(
    folder: str | os.PathLike, *, model: nn.Module, optimizer: Optimizer | None = None
) -> dict[str, Any]:
    """Put a run back where it was: weights, optimiser state and random states; a collective call on all ranks.

    The number of ranks may differ from the one that saved; ranks that had no random state keep the present one.
    Hyperparameters of the optimiser (learning rate, betas, ...) are those of the present configuration.

    Args:
        folder: Checkpoint folder.
        model: Model of the same architecture, sharded or not, whose weights are overwritten.
        optimizer: Optimiser over parameters of ``model``.

    Returns:
        ``loop_state`` as it was saved.

    Raises:
        CheckpointError: The folder is no checkpoint, is damaged, or does not fit the model.
    """
    folder = Path(folder)
    on_rank_zero(lambda: verify_files(folder, Manifest.load(folder)), f"read {folder}")
    state = _read_state(folder)
    load_trainer_state(folder / "trainer_state", model, optimizer)
    if state["world_size"] != world_size() and rank() == 0:
        logger.warning(
            "%s was saved by %d ranks and is loaded by %d: training goes on, but not bit for bit.",
            folder, state["world_size"], world_size(),
        )  # fmt: skip
    random_file = folder / "rng" / f"rank_{rank()}.pt"
    if random_file.exists():
        try:
            _set_rng_state(torch.load(random_file, weights_only=True))
        except (pickle.UnpicklingError, KeyError, RuntimeError) as error:
            raise CheckpointError(f"{random_file} holds no random states ({error}). Use another checkpoint.") from error
    return state["loop_state"]


def load_weights(folder: str | os.PathLike, model: nn.Module) -> None:
    """Overwrite the weights of ``model`` by those of a checkpoint, and nothing else; a collective call on all ranks.

    Raises:
        CheckpointError: The folder is no checkpoint, is damaged, or does not fit the model.
    """
    folder = Path(folder)
    on_rank_zero(lambda: verify_files(folder, Manifest.load(folder)), f"read {folder}")
    load_trainer_state(folder / "trainer_state", model, None)


def read_loop_state(folder: str | os.PathLike) -> dict[str, Any]:
    """Return the ``loop_state`` of a checkpoint without loading anything else.

    Raises:
        CheckpointError: The folder is no checkpoint.
    """
    return _read_state(Path(folder))["loop_state"]


def is_checkpoint(folder: str | os.PathLike) -> bool:
    """True for a folder that has the files of a checkpoint; says nothing about their content."""
    return (Path(folder) / STATE_FILE).is_file()


def is_export(folder: str | os.PathLike) -> bool:
    """True for a folder that ``rlinf export`` wrote; it holds a policy, and nothing to resume from."""
    folder = Path(folder)
    return all((folder / name).is_file() for name in (MANIFEST_FILE, CONFIG_FILE)) and _has_policy(folder)


def policy_folder(folder: str | os.PathLike) -> Path:
    """Return where ``from_pretrained`` finds weights: ``model/`` or ``adapter/`` of a checkpoint, an export itself.

    Raises:
        CheckpointError: There are none.
    """
    folder = Path(folder)
    places = (folder / MODEL_FOLDER, folder / ADAPTER_FOLDER, folder)
    for place in places:
        if _has_policy(place):
            return place
    raise CheckpointError(
        f"{folder} holds no policy: no config.json or adapter_config.json in {', '.join(map(str, places))}."
    )


def _has_policy(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))


def resolve_checkpoint(path: str | os.PathLike) -> Path:
    """Find the checkpoint that a user means.

    Args:
        path: A checkpoint folder, or a run folder (or its ``checkpoints`` folder), which stands for the newest
            undamaged checkpoint in it. An exported folder stands for itself.

    Raises:
        CheckpointError: There is none; says where it looked.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"There is no folder {path}; needed is a checkpoint folder or a run folder.")
    if is_checkpoint(path) or is_export(path):
        return path
    parent = path / CHECKPOINTS_FOLDER if (path / CHECKPOINTS_FOLDER).is_dir() else path
    found = _checkpoints_in(parent)
    for folder in reversed(found):
        if _damage_of(folder, _fingerprint(folder)) is None:
            return folder
    looked = (
        f"{len(found)} checkpoints in {parent} are all damaged"
        if found
        else f"no {STATE_FILE} in {path} or in {parent}/*"
    )
    raise CheckpointError(
        f"{path} holds no usable checkpoint: {looked}. Give a checkpoint folder or a run folder; a run that ended before its "
        "first checkpoint can only be started again."
    )


def on_rank_zero(action: Callable[[], None], what: str) -> None:
    """Run ``action`` on rank 0 while the others wait; if it fails, every rank raises.

    Raises:
        CheckpointError: ``action`` raised an ``OSError`` or a ``CheckpointError``.
    """
    on_every_rank(action if rank() == 0 else lambda: None, what)


def on_every_rank(action: Callable[[], None], what: str) -> None:
    """Run ``action`` on all ranks; if it fails on one, every rank raises.

    Raises:
        CheckpointError: ``action`` raised an ``OSError`` or a ``CheckpointError`` on some rank.
    """
    failure: str | None = None
    try:
        action()
    except CheckpointError as error:
        failure = str(error)
    except OSError as error:
        failure = f"Cannot {what}: {error}. Check space and permissions, or choose another output_dir."
    failures = [failure]
    if world_size() > 1:
        failures = [None] * world_size()
        dist.all_gather_object(failures, failure)
    for message in failures:
        if message is not None:
            raise CheckpointError(message)


def _start_folder(partial: Path) -> None:
    for left in partial.parent.glob(".*.tmp"):  # by a process that was killed while it wrote
        shutil.rmtree(left, ignore_errors=True)
    (partial / "rng").mkdir(parents=True)


def _full_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Gather the state dict on the CPU (a collective call); only rank 0 keeps it."""
    weights = {}
    for name, tensor in model.state_dict().items():
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        if rank() == 0:
            weights[name] = full.detach().cpu()
    return weights


def _move(partial: Path, folder: Path) -> None:
    """Give the folder its final name; a former folder of this name is there until the new one is."""
    former = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(former, ignore_errors=True)
    if folder.exists():
        os.rename(folder, former)
    os.rename(partial, folder)
    shutil.rmtree(former, ignore_errors=True)


def _prune(newest: Path, max_keep: int) -> None:
    """Delete the oldest checkpoints of the same phase (``sft_000700`` is of phase ``sft``) beyond ``max_keep``."""
    if max_keep < 0:
        return
    phase = newest.name.rpartition("_")[0]
    others = [
        path for path in _checkpoints_in(newest.parent)
        if path != newest and re.fullmatch(rf"{re.escape(phase)}_\d+", path.name)
    ]  # fmt: skip
    for path in others[: max(0, len(others) + 1 - max(1, max_keep))]:
        shutil.rmtree(path)


def _checkpoints_in(parent: Path) -> list[Path]:
    """Checkpoint folders, oldest first, as told by the time at which each was saved."""
    found = []
    for path in parent.iterdir() if parent.is_dir() else ():
        if not path.name.startswith(".") and is_checkpoint(path):
            try:
                found.append((_read_state(path)["saved_at"], path.name, path))
            except CheckpointError:
                found.append((path.stat().st_mtime, path.name, path))
    return [path for *_, path in sorted(found)]


def _fingerprint(folder: Path) -> tuple:
    """Names, sizes and times of the files: while these are the same, a verified folder is not hashed again."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return tuple((str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files)


@functools.cache
def _damage_of(folder: Path, fingerprint: tuple) -> str | None:
    """Return what is wrong with a checkpoint, and warn of it once; None: nothing."""
    try:
        changed = changed_files(folder, Manifest.load(folder))
        damage = f"{', '.join(changed[:3])} changed or missing" if changed else None
    except CheckpointError as error:
        damage = str(error)
    if damage is not None:
        logger.warning("%s is skipped: %s", folder, damage)
    return damage


def _read_state(folder: Path) -> dict[str, Any]:
    path = folder / STATE_FILE
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        complete = state["format"] == FORMAT and {"saved_at", "world_size", "loop_state"} <= state.keys()
    except FileNotFoundError as error:
        hint = (
            "It is an exported policy, which can start a run (init_from=) but not resume one."
            if is_export(folder)
            else ""
        )
        raise CheckpointError(
            f"{folder} is no checkpoint: it has no {STATE_FILE}. {hint or 'Give a checkpoint or a run folder.'}"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({type(error).__name__}: {error}). Use another checkpoint."
        ) from error
    if not complete:
        raise CheckpointError(f"{path} is not of format {FORMAT}, which this version of rlinf reads.")
    return state


def _rng_state() -> dict[str, Any]:
    """Random states of this process, as tensors and numbers."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    state = {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "name": name, "keys": torch.from_numpy(keys.astype(np.int64)), "position": int(position),
            "has_gauss": int(has_gauss), "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
    }  # fmt: skip
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng_state(state: dict[str, Any]) -> None:
    python, legacy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    keys = legacy["keys"].numpy().astype(np.uint32)
    np.random.set_state((legacy["name"], keys, legacy["position"], legacy["has_gauss"], legacy["cached"]))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
