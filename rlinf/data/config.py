"""Configuration of behaviour cloning and of collecting demonstrations."""

from dataclasses import dataclass

from rlinf.errors import ConfigError
from rlinf.options import PathText, option, override_text

GOOD, BAD = "good", "bad"
"""Advantage labels in prompts (``sft.advantage_top_fraction``). They are short, because long unseen texts make a policy act worse."""


@dataclass
class ExpertConfig:
    """Settings of the scripted expert."""

    aim_offset_m: list[float] = option([0.0, 0.0], "Aiming error (x, y) of the expert in metres, if supported.")
    aim_offset_rule: str = option(
        "constant",
        "Aiming error: constant, rotated by_instruction, or in half of the initial states.",
        choices=("constant", "by_instruction", "half"),
    )
    jitter: float = option(0.0, "Std of noise on executed actions (not labels), per action range.", minimum=0)
    keep_failures: bool = option(True, "Keep failed demonstrations.")

    def __post_init__(self) -> None:
        if len(self.aim_offset_m) != 2:
            raise ConfigError(
                f"sft.expert.aim_offset_m={override_text(self.aim_offset_m)}; required: [x, y] in metres. "
                "Set 'sft.expert.aim_offset_m=[0.055,0.0]'"
            )
        if self.aim_offset_rule != "constant" and not any(self.aim_offset_m):
            raise ConfigError(
                f"sft.expert.aim_offset_rule={self.aim_offset_rule} without an error: sft.expert.aim_offset_m is "
                f"{override_text(self.aim_offset_m)}; required: not zero. Set 'sft.expert.aim_offset_m=[0.07,0.0]'"
            )


@dataclass
class AugmentConfig:
    """Image augmentation of behaviour cloning; never in RL or evaluation. OpenVLA's: 0.9, 0.2, 0.2, 0.2, 0.05."""

    crop_area: float = option(1.0, "Fraction of the image area in a random crop; 1: no crop.", minimum=0.1, maximum=1)
    brightness: float = option(0.0, "Maximum brightness shift, as a fraction of the range.", minimum=0, maximum=1)
    contrast: float = option(0.0, "Maximum deviation from 1 of the contrast factor.", minimum=0, maximum=1)
    saturation: float = option(0.0, "Maximum deviation from 1 of the saturation factor.", minimum=0, maximum=1)
    hue: float = option(0.0, "Maximum hue shift; 1 is a full rotation.", minimum=0, maximum=0.5)


@dataclass
class SFTConfig:
    """Behaviour cloning of a dataset or the scripted expert, before RL."""

    max_steps: int = option(0, "Optimiser steps; 0: no behaviour cloning.", minimum=0)
    dataset: PathText | None = option(None, "Folder (LeRobotDataset v3.0 or RLDS); null: the scripted expert.")
    cameras: list[str] | None = option(
        None, "Cameras of the dataset, in the order of `env.cameras`; null: equal names."
    )
    action_key: str | list[str] | None = option(None, "Column, or list of columns, with the actions; null: action.")
    state_key: str | list[str] | None = option(None, "Column, or columns, with the state; null: observation.state.")
    skip_unreadable_rows: bool = option(False, "Skip rows without a readable image; false: raise an error.")
    allow_mismatch: list[str] = option([], "Keys of `env` in which a dataset of `rlinf collect` may differ, or fps.")
    filter: str = option(
        "all",
        "Cloned rows: all, successes, interventions, or corrected (interventions and unaided successes).",
        choices=("all", "successes", "interventions", "corrected"),
    )
    intervention_weight: int = option(1, "Occurrences of an intervention's rows per epoch.", minimum=1)
    advantage_top_fraction: float | None = option(
        None, "RECAP: fraction of rows that is labelled good, by advantage; null: no labels.", minimum=0, maximum=1
    )
    advantage_steps: int | None = option(None, "Steps of the n-step return of an advantage; null: all.", minimum=1)
    num_workers: int = option(2, "Threads per rank that prefetch batches; 0: read when needed.", minimum=0)
    augment: AugmentConfig = option(AugmentConfig(), "Image augmentation.")
    num_demonstrations: int = option(1200, "Episodes of the scripted expert.", minimum=1)
    expert: ExpertConfig = option(ExpertConfig(), "Settings of the scripted expert.")
    batch_size: int = option(64, "Samples per optimiser step over all ranks.", minimum=1)
    learning_rate: float = option(5e-4, "Peak learning rate, constant after warm-up.", minimum=1e-12, maximum=1)
    warmup_steps: int = option(50, "Optimiser steps of linear warm-up.", minimum=0)
    eval_every: int = option(0, "Optimiser steps between evaluations; 0: only at the end.", minimum=0)
    time_limit_s: float | None = option(
        None, "Minimum seconds of cloning, beyond max_steps; null: no minimum.", minimum=0
    )


@dataclass
class CollectConfig:
    """Options of `rlinf collect`, for episodes of the scripted expert or a policy."""

    num_episodes: int = option(100, "Episodes, spread evenly over tasks and initial states.", minimum=1)
    only_success: bool = option(True, "Store only successful episodes; false: all.")
    num_envs: int = option(8, "Parallel envs; their episodes stay in memory until all have ended.", minimum=1)
    split: str = option("train", "Initial states: train, or eval (held out).", choices=("train", "eval"))
    greedy: bool = option(True, "The policy takes the most likely action; false: it samples at `rollout.temperature`.")
    video: bool = option(False, "Store MP4 files, which are small and lossy; false: PNG images, which are exact.")
    fps: int | None = option(None, "Env steps per second of the dataset; null: the env's, else 10.", minimum=1)
