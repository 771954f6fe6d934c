"""Configuration of behaviour cloning and of collecting demonstrations."""

from dataclasses import dataclass

from rlinf.errors import ConfigError
from rlinf.optim.schedule import DECAYS
from rlinf.options import PathText, option, override_text

GOOD, BAD = "good", "bad"
"""Advantage labels in prompts (``sft.advantage_top_fraction``). They are short because long, unfamiliar prompts degrade a policy."""


@dataclass
class ExpertConfig:
    """Settings of the scripted expert."""

    aim_offset_m: list[float] = option([0.0, 0.0], "Aiming error (x, y) of the expert in metres, if supported.")
    aim_offset_rule: str = option(
        "constant",
        "How the aiming error varies: constant, or rotated by_instruction.",
        choices=("constant", "by_instruction"),
    )
    aim_turn_deg: float = option(0.0, "Angle by which the expert sees the table turned to the left, if supported.")
    jitter: float = option(0.0, "Std of noise on executed actions (not labels), relative to their range.", minimum=0)

    def __post_init__(self) -> None:
        if len(self.aim_offset_m) != 2:
            raise ConfigError(
                f"sft.expert.aim_offset_m={override_text(self.aim_offset_m)}; expected [x, y] in metres. "
                "Set 'sft.expert.aim_offset_m=[0.055,0.0]'"
            )
        if self.aim_offset_rule != "constant" and not any(self.aim_offset_m):
            raise ConfigError(
                f"sft.expert.aim_offset_rule={self.aim_offset_rule} needs an aiming error, but sft.expert.aim_offset_m is "
                f"{override_text(self.aim_offset_m)}; expected a non-zero offset. Set 'sft.expert.aim_offset_m=[0.07,0.0]'"
            )


@dataclass
class AugmentConfig:
    """Image augmentation for behaviour cloning, never for RL or evaluation. OpenVLA uses 0.9, 0.2, 0.2, 0.2 and 0.05."""

    crop_area: float = option(1.0, "Area fraction covered by the random crop; 1: no crop.", minimum=0.1, maximum=1)
    brightness: float = option(0.0, "Maximum brightness shift, as a fraction of the range.", minimum=0, maximum=1)
    contrast: float = option(0.0, "Maximum deviation from 1 of the contrast factor.", minimum=0, maximum=1)
    saturation: float = option(0.0, "Maximum deviation from 1 of the saturation factor.", minimum=0, maximum=1)
    hue: float = option(0.0, "Maximum hue shift; 1 is a full rotation.", minimum=0, maximum=0.5)


@dataclass
class SFTConfig:
    """Behaviour cloning from a dataset or the scripted expert, before RL."""

    max_steps: int = option(
        0, "Optimiser steps; 0: no cloning. Many leave PPO little entropy to explore with.", minimum=0
    )
    dataset: PathText | None = option(None, "Folder (LeRobotDataset v3.0 or RLDS); null: the scripted expert.")
    cameras: list[str] | None = option(None, "Dataset cameras, in the order of `env.cameras`; null: the same names.")
    action_key: str | list[str] | None = option(None, "Column or list of columns containing actions; null: action.")
    state_key: str | list[str] | None = option(None, "Column or columns containing the state; null: observation.state.")
    skip_unreadable_rows: bool = option(False, "Skip rows without a readable image; false: raise an error.")
    allow_mismatch: list[str] = option([], "Keys of `env` (or fps) in which an `rlinf collect` dataset may differ.")
    filter: str = option(
        "all",
        "Rows to clone: all, successes, interventions, or corrected (interventions and unaided successes).",
        choices=("all", "successes", "interventions", "corrected"),
    )
    intervention_weight: int = option(1, "Number of times each intervention row occurs per epoch.", minimum=1)
    advantage_top_fraction: float | None = option(
        None, "RECAP: fraction of rows to label as good, by advantage; null: no labels.", minimum=0, maximum=1
    )
    advantage_steps: int | None = option(None, "Steps in the n-step returns for advantages; null: all.", minimum=1)
    num_workers: int = option(2, "Prefetching threads per rank; 0: read batches on demand.", minimum=0)
    augment: AugmentConfig = option(AugmentConfig(), "Image augmentation.")
    num_demonstrations: int = option(1200, "Number of scripted-expert episodes to clone.", minimum=1)
    expert: ExpertConfig = option(ExpertConfig(), "Settings of the scripted expert.")
    batch_size: int = option(64, "Samples per optimiser step across all ranks.", minimum=1)
    learning_rate: float = option(5e-4, "Peak learning rate.", minimum=1e-12, maximum=1)
    warmup_steps: int = option(50, "Number of linear warm-up steps.", minimum=0)
    lr_decay: str = option("none", "Decay schedule over max_steps; none: constant.", choices=tuple(DECAYS))
    eval_every: int = option(0, "Optimiser steps between evaluations; 0: only at the end.", minimum=0)
    time_limit_s: float | None = option(
        None, "Minimum cloning time in seconds, even beyond max_steps; null: no minimum.", minimum=0
    )


@dataclass
class CollectConfig:
    """Options of `rlinf collect`, which records episodes of the scripted expert or a policy."""

    num_episodes: int = option(100, "Episodes, spread evenly over tasks and initial states.", minimum=1)
    only_success: bool = option(True, "Store only successful episodes; false: all.")
    extends: PathText | None = option(None, "Dataset by `rlinf collect` whose episodes are copied first.")
    num_envs: int = option(8, "Parallel envs; their episodes stay in memory until all have ended.", minimum=1)
    split: str = option("train", "Initial states: train, or eval (held out).", choices=("train", "eval"))
    greedy: bool = option(True, "The policy takes the most likely action; false: it samples at `rollout.temperature`.")
    video: bool = option(False, "Store MP4 files, which are small and lossy; false: PNG images, which are exact.")
    fps: int | None = option(None, "Env steps per second; null: the env's rate, or 10 if it has none.", minimum=1)
