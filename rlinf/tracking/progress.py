"""Live progress line of a run: phase, step, success, speed and remaining time."""

import sys
import time
from collections.abc import Callable
from typing import TextIO

from rlinf.number_formats import format_duration


class Progress:
    """A progress line, updated in place on a terminal and otherwise printed at most every ``interval_s`` seconds.

    Args:
        enabled: If false, do not print at all.
        updates: If false, only print notes.
        clock: Returns the time of a monotonic clock, in seconds.
    """

    def __init__(
        self,
        enabled: bool = True,
        updates: bool = True,
        stream: TextIO | None = None,
        interval_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream or sys.stderr
        self._enabled, self._updates, self._interval_s, self._clock = enabled, updates, interval_s, clock
        self._live = enabled and self._stream.isatty()
        self._phase: str | None = None
        self._phase_start = (0.0, 0)  # time and step at which this process entered the phase
        self._printed_at = float("-inf")
        self._width = 0

    def update(
        self,
        phase: str,
        step: int,
        num_steps: int,
        success_rate: float | None = None,
        env_steps_per_s: float | None = None,
        **extra: float,
    ) -> None:
        """Show a new state.

        Args:
            phase: ``"sft"``, ``"rl"``, ``"eval"``, ...; remaining time is estimated per phase.
            step: Number of finished steps; in the first call of a resumed run, the step at which it resumes.
            env_steps_per_s, **extra: Additional values to show, by name.
        """
        if not (self._enabled and self._updates):
            return
        now = self._clock()
        if phase != self._phase:
            self._finish_line()
            self._phase, self._phase_start = phase, (now, step)
        parts = [f"{phase} {step}/{num_steps}"]
        if success_rate is not None:
            parts.append(f"success {success_rate:.1%}")
        if env_steps_per_s is not None:
            parts.append(f"{env_steps_per_s:,.0f} env steps/s")
        parts += [f"{name} {value:.4g}" for name, value in extra.items()]
        start, first = self._phase_start
        if step > first:
            # Estimate the speed from this process only, because steps before a resume were run by an earlier process.
            parts.append(f"{format_duration((now - start) / (step - first) * (num_steps - step))} left")
        self._show(" | ".join(parts), now, last=step >= num_steps)

    def _show(self, line: str, now: float, last: bool) -> None:
        if self._live:
            self._write("\r" + line.ljust(self._width))
            self._width = len(line)
            if last:
                self._finish_line()
        elif last or now - self._printed_at >= self._interval_s:
            self._printed_at = now
            self._write(line + "\n")

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:  # a closed terminal must not end the run before SIGHUP saves it
            self._enabled = False

    def _finish_line(self) -> None:
        if self._width:
            self._write("\n")
            self._width = 0

    def note(self, text: str) -> None:
        """Print a separate line without disrupting the live line."""
        if self._enabled:
            self._finish_line()
            self._write(text + "\n")

    def close(self) -> None:
        """End the live line."""
        self._finish_line()
