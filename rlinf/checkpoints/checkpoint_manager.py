"""Management of a run's checkpoints: saving, deleting, exporting and uploading."""

import logging
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
from rlinf.distributed.process_group import new_group, world_size
from rlinf.errors import CheckpointError, ConfigError, UploadError
from rlinf.files import Json, mark_latest
from rlinf.manifest import Manifest, check
from rlinf.run_folder import CHECKPOINTS_FOLDER, FINAL_FOLDER, SAFETENSORS_FOLDER, STATE_FILE

logger = logging.getLogger("rlinf")

SAVE_MODES = ("sync", "async")


class Export(Protocol):
    """Exports a checkpoint's policy to a folder for ``from_pretrained`` (see ``rlinf.recipes.hf_folder``)."""

    def __call__(self, checkpoint: Path, output: Path) -> None:
        """Write the export to ``output``; called on one rank."""


class Upload(Protocol):
    """Uploads complete folders of a run at its end, or with ``every``, after each save (see ``rlinf.recipes.upload``)."""

    every: bool

    def upload(self, run_folder: Path, folders: Sequence[Path], is_final: bool) -> None:
        """Upload ``folders`` of ``run_folder``; raise CheckpointError if that fails."""

    def commands(self, run_folder: Path, folders: Sequence[Path]) -> list[str]:
        """Return shell commands that upload ``folders`` without this package."""


class CheckpointManager:
    """Writes a run's checkpoints to ``<folder>/checkpoints/<name>``. Every rank has a manager, whose methods are collective calls.

    With ``save_mode="async"``, ``save`` copies all tensors, including those on the CPU, and a thread writes the copies. A second save
    waits for the first.

    Args:
        folder: The run folder.
        save_mode: With ``sync``, a save returns when the checkpoint is complete. With ``async``, it returns once tensors are copied, and
            the next call raises any write error.
        max_keep: Number of recent checkpoints to keep in addition to the best; -1 keeps all.
        keeps_any: Whether to write checkpoints. If False, only the final policy is exported.
        with_policy: Whether checkpoints contain ``model/`` or ``adapter/``, as for action policies.
        export: Writes ``<folder>/safetensors/final`` from the last checkpoint.
        exports_all: Also export earlier checkpoints to ``<folder>/safetensors/<name>``. Each is deleted with its checkpoint.
        latest: After the first checkpoint, point the adjacent link ``latest`` to this folder. With None, no link is made.
        uploads: Uploads of the written folders, run on rank 0. At the end, an upload with ``every`` retries all checkpoints still on
            disk. ``close`` raises upload errors, after everything has been written to disk.
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
            raise ConfigError(f"save_mode={save_mode}; expected one of {', '.join(SAVE_MODES)}.", save_mode="async")
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
            # The stager also copies CPU tensors, and reuses its buffers for the next save.
            options = StagingOptions(
                use_pinned_memory=on_gpu, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=on_gpu
            )
            self._stager = DefaultStager(options)
            # Use a separate group so that the writing thread's and training's collective calls do not mix.
            if world_size() > 1:
                self._group = new_group()

    def save(self, name: str, *, is_last: bool = False, **run: Any) -> None:
        """Save the current state as ``checkpoints/<name>``.

        Raise CheckpointError on all ranks if this checkpoint (with ``async``, the previous one) could not be written.

        Args:
            name: ``<phase>_<step>``. An existing checkpoint with this name is replaced.
            is_last: Whether the run is complete. If so, export the policy as ``final`` and upload it.
            **run: Fields of ``RunState``.
        """
        state = RunState(**run)
        self.wait()
        if not self.keeps_any and not (is_last and self.export):
            return
        if not self.keeps_any:
            state.optimizer = None
        # Without use_async_staging, stage returns the copies instead of a future.
        copy = (
            dict if self._stager is None else cast(Callable[[dict[str, Tensor]], dict[str, Tensor]], self._stager.stage)
        )
        snapshot = take_snapshot(state, self.with_policy, copy)
        self._run(lambda: self._write(name, snapshot, is_last))

    def finish(self, checkpoint: Path) -> None:
        """Export and upload an interrupted run's last checkpoint. Raise CheckpointError if the export cannot be written."""
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
    ) -> Json:
        """Restore ``model``, ``optimizer`` and ``generators`` in place when a recipe resumes a run, and return ``loop_state``.

        RL runs use ``commands/open_checkpoint.py:open_checkpoint`` instead. Raise CheckpointError if the checkpoint is damaged or does not
        fit the model; ManifestMismatchError if a condition in ``present``, such as the adapters' base weights, differs from the
        checkpoint's and is not in ``allow_mismatch``.
        """
        if present is not None:
            check(Manifest.load(checkpoint), present, allow_mismatch)
        return load_checkpoint(checkpoint, model=model, optimizer=optimizer, generators=generators)

    def wait(self) -> None:
        """Wait until the thread has written the last checkpoint, and raise any error it encountered."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Wait for the last write, free the copies, and raise any errors (including upload errors on rank 0). Do not save afterwards."""
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
                for command in upload.commands(self.folder, [folder for folder in folders if folder.is_dir()])
            ]
            later = f". To upload it later, run {' and '.join(commands)}" if commands else ""
            raise UploadError(f"{self.folder} is complete, but not all of it was uploaded: {failures}{later}")

    def names(self) -> list[str]:
        """Return the names of the complete checkpoints."""
        return [path.parent.name for path in self.folder.glob(f"{CHECKPOINTS_FOLDER}/[!.]*/{STATE_FILE}")]

    def _run(self, work: Callable[[], None]) -> None:
        if self.save_mode == "sync":
            work()
            return

        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - raised by the next call
                self._failure = error

        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    def _write(self, name: str, snapshot: Snapshot, is_last: bool) -> None:
        """Write, export and upload a checkpoint (a collective call, from the writing threads in async mode)."""
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
                # Only once: a later run may have redirected the link.
                self.latest = None
            self._upload(folders, is_last)

        on_rank_zero(finish, f"write {exported}", self._group)

    def _export(self, checkpoint: Path, exported: Path) -> list[Path]:
        """Export a checkpoint and return the list of written folders."""
        if self.export is None:
            return []
        # Remove leftovers of a process that was killed during a write.
        for leftover in exported.parent.glob(".*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)
        self.export(checkpoint, exported)
        return [exported]

    def _upload(self, folders: Sequence[Path], is_final: bool) -> None:
        for upload in self.uploads:
            if is_final and upload.every:
                for earlier in self._earlier(folders):
                    self._try_upload(upload, earlier, is_final=False)
            if is_final or upload.every:
                self._try_upload(upload, folders, is_final)

    def _earlier(self, folders: Sequence[Path]) -> list[list[Path]]:
        """Return the run's complete checkpoints, except those in ``folders``, each paired with its export if there is one."""
        checkpoints = [self.folder / CHECKPOINTS_FOLDER / name for name in sorted(self.names())]
        pairs = [[path, self.folder / SAFETENSORS_FOLDER / path.name] for path in checkpoints if path not in folders]
        return [[path for path in pair if path.is_dir()] for pair in pairs]

    def _try_upload(self, upload: Upload, folders: Sequence[Path], is_final: bool) -> None:
        """Upload folders and record any error, replacing the error of an earlier attempt."""
        key = (upload, tuple(folders))
        self._upload_failures.pop(key, None)
        try:
            upload.upload(self.folder, folders, is_final)
        except CheckpointError as error:
            logger.error("%s", error)
            self._upload_failures[key] = str(error)
