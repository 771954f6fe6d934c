"""Configuration of how ranks store a model, and of their deadlines."""

from dataclasses import dataclass

from rlinf.options import option

SHARDINGS = ("replicate", "auto", "fsdp2")
"""How a trained model is distributed over ranks; see ``rlinf.distributed.parallel``."""


@dataclass
class DeadlinesConfig:
    """Deadlines in seconds for joint work of the ranks. When one expires, the stacks of all ranks are printed and the run ends."""

    start: float = option(900.0, "Seconds to connect all ranks and build model and simulators.", minimum=1)
    push: float = option(1800.0, "Seconds to push new weights to the rollout policy.", minimum=1)
    # Derived because the first rollout compiles kernels, and the duration of later ones depends on the env. See `Clock.limit_of`.
    rollout: float | None = option(
        None, "Seconds of a rollout; null: derived from the last five (at least 1200).", minimum=1
    )
    update: float = option(600.0, "Seconds without an optimiser step or a scored micro-batch.", minimum=1)
    save: float = option(1800.0, "Seconds to save a checkpoint or write the final report.", minimum=1)
    evaluate: float = option(7200.0, "Seconds of an evaluation without a new result.", minimum=1)
