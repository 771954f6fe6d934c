"""Configuration that every environment shares."""

from __future__ import annotations

from dataclasses import dataclass

from rlinf.config.options import option


@dataclass
class EnvConfig:
    """Settings that the base class of all environments implements; a simulator adds its own in a subclass."""

    name: str = option("tabletop", "Registered environment.")
    tasks: list[str] | None = option(None, "Task names to draw from; null: all tasks of the suite.")
    max_episode_steps: int = option(16, "Env steps after which a running episode is truncated.", minimum=1)
    image_size: int = option(64, "Height and width of the camera images in pixels.", minimum=16)
    cameras: list[str] = option(["front"], "Cameras to render, in the order in which the policy gets them.")
    reward_mode: str = option(
        "shaped",
        "sparse: success bonus only; shaped: dense reward of the simulator plus the bonus; relative: change of "
        "the dense reward since the previous step plus the bonus.",
        choices=("sparse", "shaped", "relative"),
    )
    success_bonus: float = option(1.0, "Reward added at the step of success.")
    terminate_on_success: bool = option(True, "End the episode at success.")
    num_train_init_states: int = option(100_000, "Initial states per task in the training split.", minimum=1)
    num_eval_init_states: int = option(1_000, "Initial states per task in the evaluation split (disjoint).", minimum=1)
