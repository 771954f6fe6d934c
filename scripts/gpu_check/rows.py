"""Rows of the table: a number, its threshold, and whether it holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

GIB = 2**30
GB = 1e9


@dataclass
class Row:
    """One number of the table.

    Attributes:
        check: Name of the check, such as G1.
        what: What was measured.
        value: The number as text.
        required: The threshold as text; empty: stated only.
        passed: None: it was stated only, or could not be measured here (``value`` says why).
        commit: The commit that was measured.
    """

    check: str
    what: str
    value: str
    required: str = ""
    passed: bool | None = None
    commit: str = ""


@dataclass
class Setting:
    """Where a check runs.

    Attributes:
        device: cuda or cpu.
        tiny: Tiny models, which show that the checks run.
        folder: Empty folder of this check.
        cache: Folder of the drawn models.
        num_gpus: Ranks of the checks for several GPUs.
        measured: Values of earlier checks on this machine, by ``what``.
    """

    device: str
    tiny: bool
    folder: Path
    cache: Path
    num_gpus: int = 2
    measured: dict[str, str] = field(default_factory=dict)

    @property
    def model(self) -> Path:
        """Folder of the drawn OpenVLA, which checks share."""
        return self.cache / f"openvla{'_tiny' * self.tiny}"

    @property
    def is_gpu(self) -> bool:
        """Whether a GPU is measured."""
        return self.device == "cuda"

    @property
    def is_full(self) -> bool:
        """Whether models of full size run on a GPU."""
        return self.is_gpu and not self.tiny


class Rows:
    """The rows of one check; each method passes one to ``save`` as soon as it is measured."""

    def __init__(self, check: str, commit: str, save: Callable[[Row], None]) -> None:
        self.check, self.commit, self.save = check, commit, save

    def _add(self, what: str, value: str, required: str = "", passed: bool | None = None) -> None:
        self.save(Row(self.check, what, value, required, passed, self.commit))

    def state(self, what: str, value: object) -> None:
        """Add a number without a threshold."""
        self._add(what, str(value))

    def at_most(self, what: str, value: float, limit: float, unit: str = "") -> None:
        """Add a number that must not exceed ``limit``."""
        self._add(what, f"{value:.4g}{unit}", f"at most {limit:.4g}{unit}", bool(value <= limit))

    def at_least(self, what: str, value: float, limit: float, unit: str = "") -> None:
        """Add a number that must reach ``limit``."""
        self._add(what, f"{value:.4g}{unit}", f"at least {limit:.4g}{unit}", bool(value >= limit))

    def holds(self, what: str, value: object, required: object) -> None:
        """Add a value that must equal ``required``."""
        self._add(what, str(value), str(required), value == required)

    def not_measured(self, what: str, why: str) -> None:
        """Add a row that says why there is no number."""
        self._add(what, f"not measured: {why}")


NEEDS_GPU = "needs a GPU"
NEEDS_FULL_SIZE = "needs the full size on a GPU"
