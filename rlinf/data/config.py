"""Configuration of collecting demonstrations."""

from __future__ import annotations

from dataclasses import dataclass

from rlinf.config.options import option


@dataclass
class CollectConfig:
    """What `rlinf collect` plays and stores: the scripted expert (as `sft.expert` has it), or the policy of `checkpoint`."""

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
