"""Result of a model check in the table printed by ``rlinf diagnose``, and the batch sizes of the checks."""

from dataclasses import dataclass

BATCH_SIZES = (1, 4)


@dataclass(frozen=True)
class Check:
    """A row of the table: property, result (None if not applicable, with the reason in ``detail``) and measured values."""

    name: str
    passed: bool | None
    detail: str
