"""Checkpoints of a recipe's run, and exports and uploads of them."""

import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlinf.checkpoints.checkpoint import Snapshot, on_rank_zero, write_snapshot
from rlinf.checkpoints.checkpoint_manager import CheckpointManager
from rlinf.errors import CheckpointError, UploadError
from rlinf.recipes.upload import Upload
from rlinf.run_folder import CHECKPOINTS_FOLDER, FINAL_FOLDER, SAFETENSORS_FOLDER

logger = logging.getLogger("rlinf")


class RecipeCheckpoints(CheckpointManager):
    """Also exports and uploads what it writes.

    Args:
        export: Exports a checkpoint to a folder for ``from_pretrained``; called on one rank. The last checkpoint is exported to
            ``<folder>/safetensors/final``.
        exports_all: Also export earlier checkpoints to ``<folder>/safetensors/<name>``. Each is deleted with its checkpoint.
        keeps_any: Whether to write checkpoints. If False, only the final policy is exported.
        uploads: Uploads of the written folders, run on rank 0. At the end, an upload with ``every`` retries all checkpoints still on
            disk. ``close`` raises upload errors, after everything has been written to disk.
        **options: See ``CheckpointManager``.
    """

    closes_in_time = False

    def __init__(
        self,
        folder: Path,
        *,
        export: Callable[[Path, Path], None],
        exports_all: bool = False,
        keeps_any: bool = True,
        uploads: Sequence[Upload] = (),
        **options: Any,
    ) -> None:
        super().__init__(folder, with_policy=False, **options)
        self.export, self.exports_all, self.keeps_any, self.uploads = export, exports_all, keeps_any, uploads
        self._upload_failures: dict[tuple[Upload, tuple[Path, ...]], str] = {}

    def save(self, name: str, *, is_last: bool = False, **run: Any) -> None:
        """Save the current state, and export it if it is the last; see ``CheckpointManager``."""
        if self.keeps_any:
            super().save(name, is_last=is_last, **run)
        elif is_last:
            super().save(name, is_last=is_last, **run | {"optimizer": None})

    def finish(self, checkpoint: Path) -> None:
        """Export and upload an interrupted run's last checkpoint. Raise CheckpointError if the export cannot be written."""
        on_rank_zero(
            lambda: self._upload([checkpoint, self._export(checkpoint, FINAL_FOLDER)], True), f"export {checkpoint}"
        )

    def close(self) -> None:
        """Wait for the last write, and raise any errors (including upload errors on rank 0). Do not save afterwards."""
        super().close()
        if self._upload_failures:
            failures = "; ".join(self._upload_failures.values())
            commands = [
                command
                for upload, folders in self._upload_failures
                for command in upload.commands(self.folder, [folder for folder in folders if folder.is_dir()])
            ]
            later = f". To upload it later, run {' and '.join(commands)}" if commands else ""
            raise UploadError(f"{self.folder} is complete, but not all of it was uploaded: {failures}{later}")

    def _write(self, name: str, snapshot: Snapshot, is_last: bool) -> None:
        if self.keeps_any:
            super()._write(name, snapshot, is_last)
            return
        checkpoint = self.folder / SAFETENSORS_FOLDER / ".weights"
        write_snapshot(checkpoint, snapshot, group=self._group)
        on_rank_zero(lambda: self._complete(checkpoint, is_last), f"export {checkpoint}", self._group)

    def _complete(self, checkpoint: Path, is_last: bool) -> None:
        """Export and upload a checkpoint that was written (on rank 0)."""
        folders = [checkpoint] if self.keeps_any else []
        if is_last or self.exports_all:
            folders.append(self._export(checkpoint, FINAL_FOLDER if is_last else checkpoint.name))
        if not self.keeps_any:
            shutil.rmtree(checkpoint)
        super()._complete(checkpoint, is_last)
        self._upload(folders, is_last)

    def _export(self, checkpoint: Path, name: str) -> Path:
        exported = self.folder / SAFETENSORS_FOLDER / name
        # Remove leftovers of a process that was killed during a write.
        for leftover in exported.parent.glob(".*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)
        self.export(checkpoint, exported)
        return exported

    def _upload(self, folders: Sequence[Path], is_final: bool) -> None:
        for upload in self.uploads:
            if is_final and upload.every:
                for earlier in self._earlier(folders):
                    self._try_upload(upload, earlier)
            if is_final or upload.every:
                self._try_upload(upload, folders)

    def _earlier(self, folders: Sequence[Path]) -> list[list[Path]]:
        """Return the run's complete checkpoints, except those in ``folders``, each paired with its export if there is one."""
        checkpoints = [self.folder / CHECKPOINTS_FOLDER / name for name in sorted(self.names())]
        pairs = [[path, self.folder / SAFETENSORS_FOLDER / path.name] for path in checkpoints if path not in folders]
        return [[path for path in pair if path.is_dir()] for pair in pairs]

    def _try_upload(self, upload: Upload, folders: Sequence[Path]) -> None:
        """Upload folders and record any error, replacing the error of an earlier attempt."""
        key = (upload, tuple(folders))
        self._upload_failures.pop(key, None)
        try:
            upload.upload(self.folder, folders)
        except CheckpointError as error:
            logger.error("%s", error)
            self._upload_failures[key] = str(error)
