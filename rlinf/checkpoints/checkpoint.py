"""Saving and loading of checkpoints. Each checkpoint is a folder that is written atomically.

::

    sft_000700/
      model/            or adapter/: safetensors weights for from_pretrained; off-policy runs save only the actor
      trainer_state/    float32 master weights and optimiser state (torch.distributed.checkpoint), for any number of ranks
      rng/rank_0.pt     random number generator states, one file per rank
      state.json        counters of the training loop
      config.yaml       resolved configuration
      manifest.json     conditions of the run (see rlinf/manifest.py) and the SHA-256 of every file above

The folder is written under a temporary name and then renamed, so a folder with its final name is complete. No file is
loaded with an unrestricted pickle.
"""

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

import torch.distributed as dist
import yaml
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.optim import Optimizer

from rlinf.checkpoints import folders
from rlinf.checkpoints.trainer_state import (
    frozen_names,
    is_adapter,
    leaves_base,
    load_rng_state,
    load_trainer_state,
    rng_state,
    save_rng_state,
    trainer_tensors,
    weights_to_save,
    write_tensors,
)
from rlinf.distributed.parallel import full_tensor, local_part
from rlinf.distributed.process_group import gather_objects, rank, world_size
from rlinf.distributed.transfers import check_loaded
from rlinf.errors import CheckpointError
from rlinf.files import Json, naming, replace_folder, write_text
from rlinf.manifest import Manifest, hash_files
from rlinf.run_folder import (
    ADAPTER_FOLDER,
    CONFIG_FILE,
    MODEL_FOLDER,
    RANDOM_FOLDER,
    SAFETENSORS_FOLDER,
    STATE_FILE,
    STATISTICS_FILE,
    TRAINER_FOLDER,
)

logger = logging.getLogger("rlinf")

Result = TypeVar("Result")


@dataclass
class RunState:
    """Everything that a checkpoint saves.

    Attributes:
        model: The policy, sharded or not.
        optimizer: Its optimiser. With None, no optimiser state is saved.
        loop_state, run_config: The loop's counters and the resolved configuration, as JSON values.
        best: Name of the checkpoint with the best evaluation so far, which is never deleted.
        more: Additional tensors for ``trainer_state`` by name, sharded or not.
    """

    model: nn.Module
    optimizer: Optimizer | None
    loop_state: Json
    run_config: Json
    manifest: Manifest
    best: str | None = None
    more: Mapping[str, Tensor] | None = None


@dataclass
class Snapshot:
    """This rank's part of a checkpoint that has not been written yet.

    Attributes:
        tensors: This rank's shards of ``trainer_tensors`` and ``RunState.more``.
        model: The model, which determines the policy files to write; its weights are not read.
        weights: The full weights on rank 0 (with adapters, the master weights), or None for a checkpoint without policy files.
        state: Content of ``state.json``, except for the time.
        config: Content of ``config.yaml``.
        manifest: Conditions of the run; ``files`` is filled in after all other files are written.
    """

    tensors: dict[str, Tensor]
    rng: dict[str, Any]
    model: nn.Module
    weights: dict[str, Tensor] | None
    state: Json
    config: str
    manifest: Manifest


def take_snapshot(
    run: RunState, with_policy: bool = True, copy: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict
) -> Snapshot:
    """Collect the contents of a checkpoint (a collective call).

    Frozen weights stored elsewhere are omitted: an adapter's base weights if the manifest records their digest, and an actor's base
    policy if it is in the run folder. ``with_policy`` includes ``model/`` or ``adapter/``. ``copy`` copies tensors to separate memory;
    by default they are not copied, and must not change before the snapshot is written.
    """
    model, optimizer = run.model, run.optimizer
    with_base = not (leaves_base(model) or (is_adapter(model) and "base_sha256" in run.manifest.lora))
    state = {
        "format": folders.FORMAT,
        "world_size": world_size(),
        "best_checkpoint": run.best,
        "loop_state": run.loop_state,
    }
    return Snapshot(
        tensors=copy(trainer_tensors(model, optimizer, with_base) | dict(run.more or {})),
        rng=rng_state(),
        model=model,
        weights=copy(_full_weights(model, optimizer)) if with_policy else None,
        state=json.loads(json.dumps(state)),
        # Convert through JSON: for an object that occurs twice, YAML would write an alias, which `PlainLoader` rejects.
        config=yaml.safe_dump(json.loads(json.dumps(run.run_config)), sort_keys=False),
        manifest=replace(run.manifest),
    )


def write_snapshot(
    folder: Path, snapshot: Snapshot, max_keep: int = -1, group: dist.ProcessGroup | None = None
) -> None:
    """Write or replace a checkpoint and delete old ones. All ranks of ``group`` must call this.

    Raise CheckpointError if a file cannot be written. No partial folder is left behind.

    Args:
        folder: Final path, ``<run folder>/checkpoints/<phase>_<step>``.
        max_keep: Number of recent checkpoints of the same phase to keep in addition to the best; -1 keeps all.
        group: A separate process group of all ranks, required when called outside the training thread.
    """
    partial = folder.with_name(f".{folder.name}.tmp")
    try:
        on_rank_zero(lambda: _start_folder(partial), f"create {partial}", group)
        write_tensors(partial / TRAINER_FOLDER, snapshot.tensors, group)
        path = partial / RANDOM_FOLDER / f"rank_{rank()}.pt"
        on_every_rank(lambda: save_rng_state(path, snapshot.rng), "write random states", group)

        def finish() -> None:
            if snapshot.weights is not None:
                with naming(partial):
                    save_model_files(partial, snapshot.model, snapshot.weights)
            state = snapshot.state | {"saved_at": time.time()}
            write_text(partial / STATE_FILE, json.dumps(state, indent=1))
            write_text(partial / CONFIG_FILE, snapshot.config)
            # The manifest contains the hashes of all other files, so it is written last.
            replace(snapshot.manifest, files=hash_files(partial)).save(partial)
            replace_folder(partial, folder)
            _prune(folder, max_keep, state["best_checkpoint"])

        on_rank_zero(finish, f"write {folder}", group)
    finally:
        if rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)


def save_checkpoint(folder: str | os.PathLike, *, max_keep: int = -1, with_policy: bool = True, **run: Any) -> Path:
    """Write a checkpoint and return its folder. ``run`` contains the fields of ``RunState``; see also ``write_snapshot``."""
    folder = Path(folder)
    write_snapshot(folder, take_snapshot(RunState(**run), with_policy), max_keep)
    return folder


def load_checkpoint(folder: str | os.PathLike, *, model: nn.Module, optimizer: Optimizer | None = None) -> Json:
    """Restore weights, optimiser state and random states, and return ``loop_state`` (a collective call).

    Base weights omitted from the checkpoint (see ``take_snapshot``) are not changed. The number of ranks and the sharding may have
    changed since the save; a rank without a saved random state retains its current state. Hyperparameters of the optimiser, such as
    the learning rate, are not restored. Raise CheckpointError if the folder is not a checkpoint, is damaged, or does not fit the model.
    """
    folder = Path(folder)
    verify_checkpoint(folder)
    state = folders.read_state(folder)
    _load_state(folder, model, optimizer)
    if state["world_size"] != world_size() and rank() == 0:
        logger.warning(
            "%s was saved by %d ranks and is loaded by %d: training continues, but is not bit-for-bit reproducible.",
            folder, state["world_size"], world_size(),
        )  # fmt: skip
    random_file = folder / RANDOM_FOLDER / f"rank_{rank()}.pt"
    if random_file.exists():
        load_rng_state(random_file)
    return state["loop_state"]


def load_weights(folder: str | os.PathLike, model: nn.Module) -> None:
    """Load a checkpoint's weights into ``model`` like ``load_checkpoint``, without optimiser or random states."""
    folder = Path(folder)
    verify_checkpoint(folder)
    _load_state(folder, model, None)


def _load_state(folder: Path, model: nn.Module, optimizer: Optimizer | None) -> None:
    load_trainer_state(folder / TRAINER_FOLDER, model, optimizer)
    check_loaded({name: local_part(tensor)[0] for name, tensor in model.state_dict().items()}, folder)


def verify_checkpoint(folder: Path) -> None:
    """Raise CheckpointError if any file of a checkpoint or export is missing or does not match the manifest."""

    def verify() -> None:
        # Cached by fingerprint: hashing a large model takes minutes, and several callers verify the same folder.
        if (damage := folders.damage_of(folder, folders.fingerprint(folder))) is not None:
            raise CheckpointError(damage)

    on_rank_zero(verify, f"read {folder}")


def on_rank_zero(action: Callable[[], Result], what: str, group: dist.ProcessGroup | None = None) -> Result:
    """Run ``action`` on rank 0 and return its result on every rank. Errors are raised as by ``on_every_rank``."""
    return on_every_rank(action if rank() == 0 else lambda: None, what, group)[0]


def on_every_rank(action: Callable[[], Result], what: str, group: dist.ProcessGroup | None = None) -> list[Result]:
    """Run ``action`` on every rank and return the results of all ranks.

    If any rank encounters an ``OSError`` or ``CheckpointError``, every rank raises a ``CheckpointError``.
    """
    # Gather errors instead of raising them immediately: if only one rank raised, the rest would hang in the next collective call.
    result, failure = None, None
    try:
        result = action()
    except CheckpointError as error:
        failure = str(error)
    except OSError as error:
        failure = f"Cannot {what}: {error}. Check disk space and permissions, or choose a different output_dir."
    outcomes = gather_objects((result, failure), group)
    if message := next((text for _, text in outcomes if text is not None), None):
        raise CheckpointError(message)
    return [value for value, _ in outcomes]


def _start_folder(partial: Path) -> None:
    # Remove leftovers of a process that was killed during a write.
    for leftover in partial.parent.glob(".*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    (partial / RANDOM_FOLDER).mkdir(parents=True)


def _full_weights(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Tensor]:
    """Gather the full weights (with adapters, the master weights) on rank 0's CPU (a collective call)."""
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
    """Delete old checkpoints of a phase and their exports, except ``newest``, the ``max_keep - 1`` before it, and the best."""
    if max_keep < 0:
        return
    phase = newest.name.rpartition("_")[0]
    former = [
        path for path in folders.checkpoints_in(newest.parent)
        if path != newest and re.fullmatch(rf"{re.escape(phase)}_\d+", path.name)
    ]  # fmt: skip
    for path in former[: max(0, len(former) + 1 - max(1, max_keep))]:
        if path.name != best:
            _remove(path)
            _remove(newest.parent.parent / SAFETENSORS_FOLDER / path.name)


def _remove(folder: Path) -> None:
    """Delete a folder if it exists."""
    if folder.is_dir():
        # Rename first: a process killed during deletion must not leave half a checkpoint under a valid name.
        hidden = folder.with_name(f".{folder.name}.tmp")
        os.rename(folder, hidden)
        shutil.rmtree(hidden)


def set_aside_later(resumed: Path) -> None:
    """Move checkpoints later than ``resumed`` to an adjacent folder ``superseded_<n>``. Only one rank may call this."""
    # The run repeats these steps, and a later resume must not use the old checkpoints.
    later = folders.later_checkpoints(resumed)
    if not later:
        return
    former = [folders.SUPERSEDED.fullmatch(path.name) for path in resumed.parent.iterdir()]
    folder = resumed.parent / f"superseded_{1 + max((int(match[1]) for match in former if match), default=0)}"
    folder.mkdir()
    for path in later:
        os.rename(path, folder / path.name)
    names = ", ".join(path.name for path in later)
    logger.warning("The run continues from %s; later checkpoints (%s) were moved to %s", resumed, names, folder)


def save_model_files(folder: Path, model: Any, weights: dict[str, Tensor]) -> None:
    """Write the full state dict ``weights`` to ``folder/model``, or to ``folder/adapter`` if the model has adapters."""
    write_policy(folder / (ADAPTER_FOLDER if is_adapter(model) else MODEL_FOLDER), model, weights)


def write_policy(folder: Path, model: Any, weights: dict[str, Tensor]) -> None:
    """Write weights (or adapters), config, processor and action statistics to ``folder`` on one rank. May raise OSError."""
    try:
        if is_adapter(model):
            from rlinf.models.lora import save_adapter  # imports peft and transformers

            save_adapter(model, folder, weights)
        else:
            if any(hasattr(module, "generation_config") for module in model.modules()):
                from rlinf.models.layers import accept_saving  # imports transformers

                accept_saving(model)
            model.save_pretrained(folder, state_dict=weights)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    if leaves_base(model):
        return
    processor = getattr(model, "processor", None)
    if processor is not None and not is_adapter(model):
        processor.save_pretrained(folder)
    statistics = getattr(model.config, "norm_stats", None)
    if statistics:
        write_text(folder / STATISTICS_FILE, json.dumps(statistics, indent=1))


def check_adapters(checkpoint: Path, manifest: Manifest, merge_lora: bool) -> None:
    """Raise CheckpointError if an export cannot merge adapters as asked, or if manifest and config.json disagree about them."""
    state = manifest.lora.get("state")
    if merge_lora and state != "adapter":
        reason = "are already merged, and would be added twice" if state == "merged" else "do not exist"
        raise CheckpointError(f"merge_lora=true, but the adapters of {checkpoint} {reason}. Set merge_lora=false")
    if not folders.has_policy(checkpoint):
        return
    source = folders.policy_folder(checkpoint)
    if state == "merged" and (source / "config.json").is_file():
        merged = json.loads((source / "config.json").read_text(encoding="utf-8")).get("merged_adapters")
        if not merged:
            raise CheckpointError(
                f"The manifest of {checkpoint} records merged adapters, but its config.json has none."
            )
