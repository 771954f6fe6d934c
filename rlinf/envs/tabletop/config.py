"""Configuration of the built-in tabletop simulator."""

from dataclasses import dataclass

from rlinf.envs.config import EnvConfig
from rlinf.options import option


@dataclass
class TabletopConfig(EnvConfig):
    """The built-in tabletop simulator (MuJoCo)."""

    max_episode_steps: int | None = option(
        None, "Env steps until truncation; null: 16, touch_two 28, push 48.", minimum=1
    )
    tolerance_m: float = option(0.045, "Distance in metres below which a goal is reached.", minimum=1e-3, maximum=0.1)
    hold_steps: int = option(1, "Consecutive env steps for which a goal must be reached.", minimum=1)
    wrong_object_ends: bool = option(
        False,
        "End the episode as a failure after `hold_steps` at an object that the instruction does not name (reach tasks).",
    )
    distractors: bool = option(False, "Show zones in block tasks and blocks in zone tasks.")
    object_offset_m: float = option(0.0, "Displacement of each object in a random direction.", minimum=0, maximum=0.05)
    camera_offset_m: float = option(0.0, "Shift of all cameras to the right, in metres.", minimum=-0.2, maximum=0.2)
    state: str = option(
        "full", "full: all positions and the target; proprio: pusher only; none.", choices=("full", "proprio", "none")
    )
