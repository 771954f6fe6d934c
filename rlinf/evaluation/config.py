"""Configuration of evaluation."""

from __future__ import annotations

from dataclasses import dataclass

from rlinf.options import PathText, option

NUM_ROWS = 16
"""Rows of a policy call; larger calls gain little, and waste more when few episodes are still running."""

TRAINING_SPLIT = (
    "evaluation.split=train: these are episodes of training, so the success rate says nothing of held-out episodes"
)
"""Warning on the terminal when the training split is evaluated."""


@dataclass
class EvaluationConfig:
    """A fixed list of held-out episodes, each run once."""

    num_episodes: int | None = option(
        200,
        "Episodes, spread evenly over the tasks; null: every initial state of every task of the split once.",
        minimum=1,
    )
    num_envs: int = option(64, "Environments stepped together, over all ranks; does not change any result.", minimum=1)
    greedy: bool = option(True, "Take the most likely action; false: sample.")
    split: str = option("eval", "Which initial states: eval (held out) or train.", choices=("eval", "train"))
    num_videos_per_task: int = option(2, "MP4s per task: the first success and the first failure; 0: none.", minimum=0)
    record_episodes: int = option(
        0,
        "Episodes of each task, the first ones of the list, that the report plays step by step with what the policy "
        "wanted and thought (docs/evaluation.md); 0: none.",
        minimum=0,
    )
    video_size: int = option(224, "Pixels of a video frame's side.", minimum=32)
    probe: bool = option(
        True,
        "Record the simulator's fingerprint (what it shows and does in a few fixed episodes), and warn if it has changed since.",
    )
    compare: PathText | None = option(
        None, "Folder of an earlier evaluation on the same episodes, to compare with pair by pair (McNemar's test)."
    )
    stop_when: str | float | None = option(
        None,
        "End before the list does: 'decided', when a sequential paired test tells the policy from evaluation.compare; a number, "
        "when the 95 % interval of the success rate that holds at any moment is at most so wide (0.1: 10 percentage points).",
    )
    allow_mismatch: list[str] = option(
        [],
        "Manifest fields in which a checkpoint may differ from the present conditions, e.g. [env.max_episode_steps]; "
        "of a comparison also: episodes (the lists differ), conditions (a manifest is missing), greedy, temperature, seed.",
    )
