"""Configuration of ranks: how they hold a model, and their deadlines."""

from __future__ import annotations

from dataclasses import dataclass

from rlinf.options import option

SHARDINGS = ("replicate", "auto", "fsdp2")
"""How ranks hold a trained model; see ``rlinf.distributed.parallel``."""


@dataclass
class DeadlinesConfig:
    """Seconds that each thing which several ranks do together may take before the run ends with the stacks of all ranks."""

    start: float = option(
        900.0, "Reaching the other ranks, opening files, building the model and the simulators.", minimum=1
    )
    push: float = option(1800.0, "Bringing new weights to the rollout policy.", minimum=1)
    rollout: float | None = option(
        None,
        "One rollout; also the demonstrations of an expert. null: an hour for the first, then ten times the "
        "median of the last five, at least 1200. Where several ranks train, a silent rollout worker is replaced after half of any deadline, before the ranks' own ends the run.",
        minimum=1,
    )
    update: float = option(
        600.0,
        "Scoring and updates of an iteration, or cloning, in which the rank has finished no optimiser step and "
        "scored no micro-batch.",
        minimum=1,
    )
    save: float = option(1800.0, "One checkpoint, or the report at the end.", minimum=1)
    evaluate: float = option(7200.0, "An evaluation without a new result of the rank.", minimum=1)
