"""Rows of the table: a number, its threshold, and whether it holds."""

from __future__ import annotations

from dataclasses import dataclass
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
    """

    check: str
    what: str
    value: str
    required: str = ""
    passed: bool | None = None


@dataclass
class Setting:
    """Where a check runs.

    Attributes:
        device: cuda or cpu.
        tiny: Tiny models, which show that the checks run.
        folder: Empty folder of this check.
        model: Folder of the drawn OpenVLA, which checks share.
        num_gpus: Ranks of the checks for several GPUs.
    """

    device: str
    tiny: bool
    folder: Path
    model: Path
    num_gpus: int = 2

    @property
    def is_gpu(self) -> bool:
        """Whether a GPU is measured."""
        return self.device == "cuda"

    @property
    def is_full(self) -> bool:
        """Whether models of full size run on a GPU."""
        return self.is_gpu and not self.tiny


class Rows(list[Row]):
    """The rows of one check; each method adds one."""

    def __init__(self, check: str) -> None:
        super().__init__()
        self.check = check

    def state(self, what: str, value: object) -> None:
        """Add a number without a threshold."""
        self.append(Row(self.check, what, str(value)))

    def at_most(self, what: str, value: float, limit: float, unit: str = "") -> None:
        """Add a number that must not exceed ``limit``."""
        row = Row(self.check, what, f"{value:.4g}{unit}", f"at most {limit:.4g}{unit}", bool(value <= limit))
        self.append(row)

    def at_least(self, what: str, value: float, limit: float, unit: str = "") -> None:
        """Add a number that must reach ``limit``."""
        row = Row(self.check, what, f"{value:.4g}{unit}", f"at least {limit:.4g}{unit}", bool(value >= limit))
        self.append(row)

    def holds(self, what: str, value: object, required: object) -> None:
        """Add a value that must equal ``required``."""
        self.append(Row(self.check, what, str(value), str(required), value == required))

    def not_measured(self, what: str, why: str) -> None:
        """Add a row that says why there is no number."""
        self.append(Row(self.check, what, f"not measured: {why}"))


NEEDS_GPU = "needs a GPU"
NEEDS_FULL_SIZE = "needs the full size on a GPU"
