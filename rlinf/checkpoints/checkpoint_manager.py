"""Saving and deletion of a run's checkpoints."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from rlinf.checkpoints.checkpoint import RunState, Snapshot, on_rank_zero, take_snapshot, write_snapshot
from rlinf.distributed.process_group import new_group, world_size
from rlinf.files import mark_latest
from rlinf.run_folder import CHECKPOINTS_FOLDER, STATE_FILE


class CheckpointManager:
    """Writes a run's checkpoints to ``<folder>/checkpoints/<name>``. Every rank has a manager, whose methods are collective calls.

    With ``save_mode="async"``, ``save`` copies all tensors, including those on the CPU, and a thread writes the copies. A second save
    waits for the first.

    Args:
        folder: The run folder.
        save_mode: With ``sync``, a save returns when the checkpoint is complete. With ``async``, it returns once tensors are copied, and
            the next call raises any write error.
        max_keep: Number of recent checkpoints to keep in addition to the best; -1 keeps all.
        with_policy: Whether checkpoints contain ``model/`` or ``adapter/``, as for action policies.
        latest: After the first checkpoint, point the adjacent link ``latest`` to this folder. With None, no link is made.

    Attributes:
        closes_in_time: Whether ``close`` only waits for files, so that it can have a deadline.
    """

    closes_in_time = True

    def __init__(
        self,
        folder: Path,
        *,
        save_mode: str = "sync",
        max_keep: int = -1,
        with_policy: bool = True,
        latest: Path | None = None,
    ) -> None:
        self.folder, self.save_mode, self.max_keep = Path(folder), save_mode, max_keep
        self.with_policy, self.latest = with_policy, latest
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
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
            is_last: Whether the run is complete.
            **run: Fields of ``RunState``.
        """
        state = RunState(**run)
        self.wait()
        # Without use_async_staging, stage returns the copies instead of a future.
        copy = (
            dict if self._stager is None else cast(Callable[[dict[str, Tensor]], dict[str, Tensor]], self._stager.stage)
        )
        snapshot = take_snapshot(state, self.with_policy, copy)
        self._run(lambda: self._write(name, snapshot, is_last))

    def wait(self) -> None:
        """Wait until the thread has written the last checkpoint, and raise any error it encountered."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Wait for the last write, free the copies, and raise any error. Do not save afterwards."""
        try:
            self.wait()
        finally:
            if self._stager is not None:
                self._stager.close()

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
        """Write a checkpoint (a collective call, from the writing threads in async mode)."""
        checkpoint = self.folder / CHECKPOINTS_FOLDER / name
        write_snapshot(checkpoint, snapshot, self.max_keep, self._group)
        on_rank_zero(lambda: self._complete(checkpoint, is_last), f"write {checkpoint}", self._group)

    def _complete(self, checkpoint: Path, is_last: bool) -> None:
        """Process a checkpoint that was written (on rank 0)."""
        if self.latest is not None:
            mark_latest(self.latest)
            # Only once: a later run may have redirected the link.
            self.latest = None
