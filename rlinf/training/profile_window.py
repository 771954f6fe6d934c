"""Profile a few steps of a run with ``torch.profiler``, for Perfetto, TensorBoard or ``chrome://tracing``."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig  # the only way to record threads that are already running
from torch.profiler import ProfilerActivity, profile, record_function

from rlinf.run_folder import PROFILE_FOLDER


class ProfileWindow:
    """Profiles all threads of this process on CPU and GPU over a range of steps.

    The trace is written to ``profile/trace_rank<rank>.json.gz`` after the last step, or at the end of the run.

    Args:
        steps: First and last step, inclusive; None: do not profile.
    """

    def __init__(self, steps: list[int] | None, phase: str, folder: Path, rank: int) -> None:
        self._phase = phase
        self._steps = range(0) if steps is None else range(steps[0], steps[1] + 1)
        self.path = folder / PROFILE_FOLDER / f"trace_rank{rank}.json.gz"
        self._profiler: profile | None = None

    @contextlib.contextmanager
    def step(self, phase: str, number: int) -> Iterator[None]:
        """Profile the body of the ``with`` statement if this step is in the window."""
        if phase != self._phase or number not in self._steps:
            yield
            return
        if self._profiler is None:
            self._profiler = _start()
        with record_function(f"{phase} step {number}"):
            yield
        if number == self._steps[-1]:
            self.close()

    def close(self) -> None:
        """Write the trace, if there is one."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        profiler.stop()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # The suffix must be .gz, because torch uses it to decide whether to compress.
        partial = self.path.with_name(f".{self.path.name.partition('.')[0]}.tmp.json.gz")
        profiler.export_chrome_trace(str(partial))
        os.replace(partial, self.path)


def _start() -> profile:
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    profiler = profile(activities=activities, experimental_config=_ExperimentalConfig(profile_all_threads=True))
    profiler.start()
    return profiler
