"""Result of a model check in the table of ``rlinf diagnose``, and the batch sizes of the checks."""

from dataclasses import dataclass

BATCH_SIZES = (1, 4)


@dataclass(frozen=True)
class Check:
    """A row of the table: property, result (None: nothing to check, for the reason in ``detail``) and numbers."""

    name: str
    passed: bool | None
    detail: str
