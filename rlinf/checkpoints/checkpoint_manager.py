"""Checkpoints of a run: when they are written, which of them stay, and from which one a run continues."""

from __future__ import annotations

import glob
import logging
import math
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.optim import Optimizer

from rlinf.checkpoints.checkpoint import (
    RunState,
    Snapshot,
    load_checkpoint,
    on_rank_zero,
    take_snapshot,
    write_snapshot,
)
from rlinf.checkpoints.folders import is_checkpoint, resolve_checkpoint, saved_at
from rlinf.distributed.process_group import new_group, world_size
from rlinf.errors import CheckpointError, ConfigError, UploadError
from rlinf.files import mark_latest
from rlinf.manifest import Manifest, check
from rlinf.run_folder import CHECKPOINTS_FOLDER, FINAL_FOLDER, SAFETENSORS_FOLDER, STATE_FILE

logger = logging.getLogger("rlinf")

SAVE_MODES = ("sync", "async")


class Export(Protocol):
    """Writes the policy of a checkpoint as a folder for ``from_pretrained`` (``rlinf.checkpoints.hf_folder``)."""

    def __call__(self, checkpoint: Path, output: Path) -> None:
        """Write ``output`` on one rank."""


class Upload(Protocol):
    """Takes finished folders of a run elsewhere (``rlinf.checkpoints.upload``): with ``every``, not only at the end."""

    every: bool

    def upload(self, run_folder: Path, folders: Sequence[Path], is_final: bool) -> None:
        """Take ``folders`` of ``run_folder`` there; raise CheckpointError if that fails."""

    def by_hand(self, run_folder: Path, folders: Sequence[Path]) -> list[str]:
        """Return the commands that take ``folders`` there without this package."""


class CheckpointManager:
    """Writes the checkpoints of one run, ``<folder>/checkpoints/<name>``. Every rank has one; its methods are collective calls.

    A checkpoint gets its name when it is whole on all ranks. If a thread writes it (``save_mode="async"``), all tensors are copied
    first, also in main memory, so it shows the moment of the call. A second save waits for the first.

    Args:
        folder: The run folder.
        save_mode: ``sync``: a save returns when the checkpoint is whole. ``async``: it returns when the copy is taken, and the next
            call raises an error of the writing.
        max_keep: Number of newest checkpoints to keep beside the best one; -1 keeps all.
        keeps_any: Write checkpoints; without, only the last policy is exported.
        with_policy: Checkpoints hold ``model/`` or ``adapter/``, as for action policies.
        export: Writes ``<folder>/safetensors/final`` from the last checkpoint.
        exports_all: It also writes ``<folder>/safetensors/<name>`` from every other one, which goes when its checkpoint goes.
        latest: Folder that the link ``latest`` beside it names, from the first checkpoint on; None: none does.
        uploads: Take the written folders on rank 0; at the end, an upload with ``every`` also takes all checkpoints on the
            disk. ``close`` raises their errors, when everything is on the disk.
    """

    def __init__(
        self,
        folder: Path,
        *,
        save_mode: str = "sync",
        max_keep: int = -1,
        keeps_any: bool = True,
        with_policy: bool = True,
        export: Export | None = None,
        exports_all: bool = False,
        latest: Path | None = None,
        uploads: Sequence[Upload] = (),
    ) -> None:
        if save_mode not in SAVE_MODES:
            raise ConfigError(f"save_mode={save_mode}; required: one of {', '.join(SAVE_MODES)}.", save_mode="async")
        self.folder, self.save_mode, self.max_keep = Path(folder), save_mode, max_keep
        self.keeps_any, self.with_policy = keeps_any, with_policy
        self.export, self.exports_all, self.uploads, self.latest = export, exports_all, list(uploads), latest
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._upload_failures: dict[tuple[Upload, tuple[Path, ...]], str] = {}
        self._stager: DefaultStager | None = None
        self._group: dist.ProcessGroup | None = None
        if save_mode == "async":
            on_gpu = torch.cuda.is_available()
            # It copies tensors on the CPU too, and keeps the memory of its copies for the next save.
            options = StagingOptions(
                use_pinned_memory=on_gpu, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=on_gpu
            )
            self._stager = DefaultStager(options)
            if world_size() > 1:  # collective calls of the thread and of the training must not mix
                self._group = new_group()

    def save(self, name: str, *, is_last: bool = False, **run: Any) -> None:
        """Save the present state as ``checkpoints/<name>``.

        Raise CheckpointError on all ranks if this checkpoint, or with ``async`` the one before, could not be written.

        Args:
            name: ``<phase>_<step>``; a checkpoint of that name is replaced.
            is_last: The run is complete: the policy is exported as ``final``, and uploaded.
            **run: Fields of ``RunState``.
        """
        state = RunState(**run)
        self.wait()
        if not self.keeps_any and not (is_last and self.export):
            return
        if not self.keeps_any:
            state.optimizer = None
        # Without use_async_staging, stage returns the copies and no future.
        copy = (
            dict if self._stager is None else cast(Callable[[dict[str, Tensor]], dict[str, Tensor]], self._stager.stage)
        )
        snapshot = take_snapshot(state, self.with_policy, copy)
        self._run(lambda: self._write(name, snapshot, is_last))

    def finish(self, checkpoint: Path) -> None:
        """Export and upload the last checkpoint of a run that was interrupted before that.

        Raise CheckpointError if the export cannot be written.
        """
        self.wait()

        def finish() -> None:
            exported = self._export(checkpoint, self.folder / SAFETENSORS_FOLDER / FINAL_FOLDER)
            self._upload([checkpoint, *exported], is_final=True)

        on_rank_zero(finish, f"export {checkpoint}")

    def load(
        self,
        checkpoint: Path,
        *,
        model: nn.Module,
        optimizer: Optimizer | None,
        present: Manifest | None = None,
        allow_mismatch: Sequence[str] = (),
        generators: Mapping[str, torch.Generator] | None = None,
    ) -> dict[str, Any]:
        """Restore a checkpoint into ``model``, ``optimizer`` and ``generators`` in place, and return its ``loop_state``.

        Raise CheckpointError if it is damaged or does not fit the model; ManifestMismatchError if a condition of ``present`` that
        is not in ``allow_mismatch`` differs, for example the base weights of adapters.
        """
        if present is not None:
            check(Manifest.load(checkpoint), present, allow_mismatch)
        return load_checkpoint(checkpoint, model=model, optimizer=optimizer, generators=generators)

    def wait(self) -> None:
        """Wait until nothing is being written; raise its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Wait, free the memory of the copies, and raise errors, on rank 0 also of uploads; nothing can be saved afterwards."""
        try:
            self.wait()
        finally:
            if self._stager is not None:
                self._stager.close()
        if self._upload_failures:
            failures = "; ".join(self._upload_failures.values())
            commands = [
                command
                for upload, folders in self._upload_failures
                for command in upload.by_hand(self.folder, [folder for folder in folders if folder.is_dir()])
            ]
            later = f". To upload it later, type {' and '.join(commands)}" if commands else ""
            raise UploadError(f"{self.folder} is complete, but not all of it was uploaded: {failures}{later}")

    def names(self) -> list[str]:
        """Return the names of the whole checkpoints."""
        return [path.parent.name for path in self.folder.glob(f"{CHECKPOINTS_FOLDER}/[!.]*/{STATE_FILE}")]

    def best_of(self, scores: Mapping[str, float], also: str | None = None) -> str | None:
        """Return the existing checkpoint, or ``also``, with the highest score (``comparable``), the newest of equals.

        ``scores`` are by name, in the order of the evaluations.
        """
        there = {*self.names(), also}
        found = [name for name in reversed(list(scores)) if name in there]
        return max(found, key=lambda name: comparable(scores[name]), default=None)

    def _run(self, work: Callable[[], None]) -> None:
        if self.save_mode == "sync":
            work()
            return

        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - the next call raises it
                self._failure = error

        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    def _write(self, name: str, snapshot: Snapshot, is_last: bool) -> None:
        """Write, export and upload a checkpoint; a collective call of the writing threads."""
        exported = self.folder / SAFETENSORS_FOLDER / (FINAL_FOLDER if is_last else name)
        if self.keeps_any:
            checkpoint = self.folder / CHECKPOINTS_FOLDER / name
            folders = [checkpoint]
            write_snapshot(checkpoint, snapshot, self.max_keep, self._group)
        else:
            checkpoint, folders = exported.with_name(".weights"), []
            write_snapshot(checkpoint, snapshot, group=self._group)

        def finish() -> None:
            if is_last or self.exports_all:
                folders.extend(self._export(checkpoint, exported))
            if not self.keeps_any:
                shutil.rmtree(checkpoint)
            if self.latest is not None:
                mark_latest(self.latest)
                self.latest = None  # a run that starts later keeps the link
            self._upload(folders, is_last)

        on_rank_zero(finish, f"write {exported}", self._group)

    def _export(self, checkpoint: Path, exported: Path) -> list[Path]:
        """Export a checkpoint, and return the folders that were written."""
        if self.export is None:
            return []
        for leftover in exported.parent.glob(".*.tmp"):  # of a process that was killed while writing
            shutil.rmtree(leftover, ignore_errors=True)
        self.export(checkpoint, exported)
        return [exported]

    def _upload(self, folders: Sequence[Path], is_final: bool) -> None:
        for each in self.uploads:
            if is_final and each.every:
                for earlier in self._earlier(folders):
                    self._try_upload(each, earlier, is_final=False)
            if is_final or each.every:
                self._try_upload(each, folders, is_final)

    def _earlier(self, folders: Sequence[Path]) -> list[list[Path]]:
        """Return the other whole checkpoints of the run, each with its export."""
        checkpoints = [self.folder / CHECKPOINTS_FOLDER / name for name in sorted(self.names())]
        found = [[path, self.folder / SAFETENSORS_FOLDER / path.name] for path in checkpoints if path not in folders]
        return [[path for path in pair if path.is_dir()] for pair in found]

    def _try_upload(self, upload: Upload, folders: Sequence[Path], is_final: bool) -> None:
        """Upload folders; forget the error of an earlier try."""
        key = (upload, tuple(folders))
        self._upload_failures.pop(key, None)
        try:
            upload.upload(self.folder, folders, is_final)
        except CheckpointError as error:
            logger.error("%s", error)
            self._upload_failures[key] = str(error)


def newest_checkpoint(output_dir: Path, name: str = "") -> Path | None:
    """Return the newest whole checkpoint of the runs in ``<output_dir>/<name>`` (``name`` empty: of any run), or None.

    A collective call. The run that saved last counts; a damaged checkpoint is skipped with a warning.
    """

    def find() -> Path | None:
        saved: dict[Path, float] = {}
        for path in Path(output_dir).glob(f"{glob.escape(name) or '[!.]*'}/{CHECKPOINTS_FOLDER}/step_*"):
            if is_checkpoint(path):
                run = path.parent.parent
                saved[run] = max(saved.get(run, 0.0), saved_at(path))
        for run in sorted(saved, key=saved.__getitem__, reverse=True):
            try:
                return resolve_checkpoint(run)
            except CheckpointError as error:
                logger.warning("%s is skipped: %s", run, error)
        return None

    return on_rank_zero(find, f"read {output_dir}")


def comparable(score: float) -> float:
    """Return a score by which checkpoints are compared: one that is NaN or infinite is the lowest."""
    return score if math.isfinite(score) else -math.inf
