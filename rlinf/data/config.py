"""Configuration of behaviour cloning and of collecting demonstrations."""

from __future__ import annotations

from dataclasses import dataclass

from rlinf.errors import ConfigError
from rlinf.options import PathText, option, override_text

GOOD, BAD = "good", "bad"
"""What a row's prompt says of its actions (``sft.advantage_top_fraction``). A policy acts worse behind long texts that it has never read."""


@dataclass
class ExpertConfig:
    """The scripted demonstrator and its faults."""

    aim_offset_m: list[float] = option(
        [0.0, 0.0],
        "Error (x, y) of the demonstrator's aim in metres; of envs whose expert takes it (tabletop, Meta-World, SO-101).",
    )
    aim_offset_rule: str = option(
        "constant",
        "Where the error lies: constant; by_sentence, turned by another angle for each task and colour named first, evenly over "
        "the circle; half, only in episodes with an odd initial state. Of tabletop.",
        choices=("constant", "by_sentence", "half"),
    )
    jitter: float = option(
        0.0,
        "Standard deviation of noise on executed actions (labels stay clean), in units of the action range.",
        minimum=0,
    )
    keep_failures: bool = option(True, "Keep demonstrations that failed.")

    def __post_init__(self) -> None:
        if len(self.aim_offset_m) != 2:
            raise ConfigError(
                f"sft.expert.aim_offset_m={override_text(self.aim_offset_m)}; required: [x, y] in metres. "
                "Set 'sft.expert.aim_offset_m=[0.055,0.0]'"
            )
        if self.aim_offset_rule != "constant" and not any(self.aim_offset_m):
            raise ConfigError(
                f"sft.expert.aim_offset_rule={self.aim_offset_rule} without an error to place: sft.expert.aim_offset_m is "
                f"{override_text(self.aim_offset_m)}; required: not zero. Set 'sft.expert.aim_offset_m=[0.07,0.0]'"
            )


@dataclass
class AugmentConfig:
    """Random changes of the training images of behaviour cloning; never in RL or evaluation. OpenVLA's: 0.9, 0.2, 0.2, 0.2, 0.05."""

    crop_area: float = option(
        1.0,
        "Fraction of an image's area that is cut out at a random place and enlarged; 1: no crop.",
        minimum=0.1,
        maximum=1,
    )
    brightness: float = option(
        0.0, "Largest shift of all channels, as a fraction of the full range.", minimum=0, maximum=1
    )
    contrast: float = option(
        0.0,
        "Largest change of the factor around 1 of the distance from the image's mean colour.",
        minimum=0,
        maximum=1,
    )
    saturation: float = option(0.0, "Largest change of the factor around 1 of the saturation.", minimum=0, maximum=1)
    hue: float = option(0.0, "Largest turn of the hue; 1 is the whole circle.", minimum=0, maximum=0.5)


@dataclass
class SFTConfig:
    """Behaviour cloning of a dataset or, without one, of the scripted expert. It runs before RL if `max_steps` > 0."""

    max_steps: int = option(0, "Optimiser steps; 0: no behaviour cloning.", minimum=0)
    dataset: PathText | None = option(
        None,
        "Folder of demonstrations (LeRobotDataset v3.0 or RLDS); null: the scripted expert plays them now, in memory.",
    )
    cameras: list[str] | None = option(
        None, "Cameras of the dataset that are used as `env.cameras`, in the same order; null: the same names."
    )
    action_key: str | list[str] | None = option(
        None, "Column of the dataset with the actions, or columns, which are joined; null: action."
    )
    state_key: str | list[str] | None = option(
        None, "Column, or columns, with the robot's state; null: observation.state (LeRobot), observation/state (RLDS)."
    )
    skip_unreadable_rows: bool = option(
        False, "Leave out rows without a readable image, all of which are read to tell; false: they are an error."
    )
    allow_mismatch: list[str] = option(
        [], "Keys of `env` in which a dataset of `rlinf collect` may differ; fps: any dataset may have another rate."
    )
    filter: str = option(
        "all",
        "Rows of the dataset that are cloned: all; successes: of episodes that reached the goal; interventions: at which a person acted "
        "who had taken over; corrected: interventions, and the episodes that reached the goal without one.",
        choices=("all", "successes", "interventions", "corrected"),
    )
    intervention_weight: int = option(
        1, "How often a row of an intervention occurs in an epoch; the others occur once.", minimum=1
    )
    advantage_top_fraction: float | None = option(
        None,
        "RECAP: the prompts of this fraction of the rows of each instruction, whose advantages are largest, and of interventions say so, "
        "and the policy acts by such prompts; null: no labels.",
        minimum=0,
        maximum=1,
    )
    advantage_steps: int | None = option(
        None,
        "Rows after which the value model takes over in an advantage; null: none, the episode's return.",
        minimum=1,
    )
    num_workers: int = option(
        2, "Threads per rank that read batches of the dataset ahead; 0: read when needed.", minimum=0
    )
    augment: AugmentConfig = option(AugmentConfig(), "Random changes of the training images.")
    num_demonstrations: int = option(1200, "Episodes of the scripted expert.", minimum=1)
    expert: ExpertConfig = option(ExpertConfig(), "The demonstrator.")
    batch_size: int = option(64, "Samples of one optimiser step over all ranks.", minimum=1)
    learning_rate: float = option(5e-4, "Peak learning rate, constant after warm-up.", minimum=1e-12, maximum=1)
    warmup_steps: int = option(50, "Optimiser steps of linear warm-up.", minimum=0)
    eval_every: int = option(0, "Optimiser steps between evaluations; 0: only at the end.", minimum=0)
    time_limit_s: float | None = option(
        None,
        "Least seconds of cloning, in spite of the name: it continues beyond max_steps until they have passed, and max_steps are always "
        "taken; null: stop at max_steps.",
        minimum=0,
    )


@dataclass
class CollectConfig:
    """Options of `rlinf collect`, which plays and stores the scripted expert (see `sft.expert`), or a policy."""

    num_episodes: int = option(
        100, "Episodes to play, spread evenly over the tasks, each with an initial state of its own.", minimum=1
    )
    only_success: bool = option(True, "Store the episodes that succeeded; false: all.")
    num_envs: int = option(
        8, "Environments stepped together; their episodes are held in memory until all have ended.", minimum=1
    )
    split: str = option("train", "Which initial states: train, or eval (held out).", choices=("train", "eval"))
    greedy: bool = option(True, "The policy takes the most likely action; false: it samples at `rollout.temperature`.")
    video: bool = option(False, "Store MP4 files, which are small and lossy; false: PNG images, which are exact.")
    fps: int | None = option(
        None, "Env steps per second, for time stamps and videos; null: what the env says of itself, else 10.", minimum=1
    )
