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
    object_offset_m: float = option(
        0.0,
        "Each object starts this many metres from where its initial state has it, in a direction of its own.",
        minimum=0,
        maximum=0.05,
    )
    camera_offset_m: float = option(
        0.0, "All cameras are this many metres to the right of their place.", minimum=-0.2, maximum=0.2
    )
    state: str = option(
        "full",
        "full: positions and the asked-for target (enough to solve every task); proprio: pusher position and "
        "velocity only; none.",
        choices=("full", "proprio", "none"),
    )
