"""Configuration of the built-in tabletop simulator."""

from __future__ import annotations

from dataclasses import dataclass

from rlinf.envs.config import EnvConfig
from rlinf.options import option


@dataclass
class TabletopConfig(EnvConfig):
    """The built-in tabletop simulator (MuJoCo)."""

    max_episode_steps: int | None = option(
        None,
        "Env steps after which a running episode is truncated; null: the task's own (reach, reach_zone 16; "
        "touch_two 28; push 48).",
        minimum=1,
    )
    tolerance_m: float = option(
        0.045,
        "Distance in metres to the point that is asked for, below which it counts as reached.",
        minimum=1e-3,
        maximum=0.1,
    )
    distractors: bool = option(False, "Show zones in tasks about blocks, and blocks in tasks about zones.")
    state: str = option(
        "full",
        "full: positions and the asked-for target (enough to solve every task); proprio: pusher position and "
        "velocity only; none.",
        choices=("full", "proprio", "none"),
    )
