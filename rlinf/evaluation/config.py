"""Configuration of evaluation."""

from dataclasses import dataclass

from rlinf.errors import reject
from rlinf.options import PathText, option

NUM_ROWS = 16
"""Batch size of a policy call. Larger batches are hardly faster, and waste more when few episodes are still running."""

TRAINING_SPLIT = (
    "evaluation.split=train: these are training episodes, so the success rate does not apply to held-out episodes"
)
"""Warning printed when the training split is evaluated."""


@dataclass
class EvaluationConfig:
    """A fixed list of held-out episodes, each run once."""

    num_episodes: int | None = option(
        200, "Number of episodes, spread evenly over the tasks; null: every initial state once.", minimum=1
    )
    first_episode: int = option(0, "Number of episodes of the split to skip.", minimum=0)
    num_fresh_episodes: int | None = option(
        None,
        "Number of episodes after these for the chosen checkpoint of a run; null: as many as num_episodes, if left; 0: none.",
        minimum=0,
    )
    num_envs: int = option(64, "Number of parallel environments across all ranks; does not affect results.", minimum=1)
    greedy: bool = option(True, "Take the most likely action; false: sample.")
    temperature: float | None = option(
        None, "Divisor of the logits of sampled actions; null: rollout.temperature.", minimum=1e-6
    )
    split: str = option("eval", "Which initial states: eval (held out) or train.", choices=("eval", "train"))
    num_videos_per_task: int = option(2, "Number of MP4s per task: first success, first failure; 0: none.", minimum=0)
    record_episodes: int = option(
        0, "Number of recorded episodes per task, shown step by step in the report; 0: none.", minimum=0
    )
    video_size: int = option(224, "Width and height of a video frame, in pixels.", minimum=32)
    probe: bool = option(True, "Fingerprint the simulator on a few fixed episodes, and warn if it has changed.")
    compare: PathText | None = option(
        None, "Folder of an earlier evaluation on the same episodes for a paired comparison (McNemar)."
    )
    baselines: bool = option(False, "After the evaluation, also evaluate baselines that do not learn or do not see.")
    stop_when: str | float | None = option(
        None,
        "When to stop early: 'decided' (sequential paired test against evaluation.compare), or a 95 % interval width (0.1: 10 points).",
    )
    allow_mismatch: list[str] = option(
        [],
        "Manifest fields that may differ, e.g. [env.max_episode_steps]; for comparisons also episodes, conditions, greedy, temperature, seed.",
    )

    def fresh_episodes(self, num_available: int, end: int = 0) -> range:
        """Return the numbers of the episodes that follow these in a split of ``num_available``, for ``num_fresh_episodes``.

        Raise ConfigError if fewer are left. ``end`` is the end of the evaluations before the run was resumed.
        """
        used = num_available if self.num_episodes is None else max(end, self.first_episode + self.num_episodes)
        used = min(num_available, used)
        left, count = num_available - used, self.num_fresh_episodes
        if count is None:
            count = min(left, self.num_episodes or 0)
        if count > left:
            actual = f"evaluation.num_fresh_episodes={count}, but {used} of the {num_available} episodes of the split '{self.split}' are used"
            fix = f"evaluation.num_fresh_episodes={left}, or raise env.num_{self.split}_init_states"
            reject(actual, f"at most {left}", fix)
        return range(used, used + count)
