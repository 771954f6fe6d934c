"""Results of model checks in the table printed by ``rlinf diagnose``, and the batch sizes of the checks."""

from collections.abc import Sequence
from dataclasses import dataclass

from rlinf.errors import RLinfError
from rlinf.number_formats import format_table

BATCH_SIZES = (1, 4)
RESULTS = {True: "pass", False: "FAIL", None: "note"}


@dataclass(frozen=True)
class Check:
    """A row of the table: property, result (None if not applicable, with the reason in ``detail``) and measured values."""

    name: str
    passed: bool | None
    detail: str


def rejected_by_vllm(checks: list[Check], error: RLinfError) -> str:
    """Add a failed check; return the note below the table."""
    checks.append(Check("vllm: runs the model", False, f"{type(error).__name__}, see below"))
    return f"vllm: {error}"


def print_checks(checks: Sequence[Check], note: str | None) -> int:
    """Print the table and return the exit status."""
    rows = [(check.name, RESULTS[check.passed], check.detail) for check in checks]
    print(format_table(("check", "result", "detail"), rows))
    if note is not None:
        print(note)
    return int(any(check.passed is False for check in checks))
