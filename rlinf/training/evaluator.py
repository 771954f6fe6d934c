"""Evaluate on held-out episodes during a run."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager

from rlinf.config.schema import RunConfig
from rlinf.distributed.deadlines import heartbeat
from rlinf.distributed.process_group import rank, world_size
from rlinf.envs.base import VectorEnv
from rlinf.evaluation.evaluator import Episodes, EvaluationPlan, RankGroup, episode_list, evaluate_policy
from rlinf.evaluation.recording import record_episodes, recording_failed
from rlinf.evaluation.result import EvaluationResult
from rlinf.models.embodiment.base import ActionModel
from rlinf.run_folder import RECORDINGS_FOLDER, VIDEOS_FOLDER
from rlinf.training.outcome import SUMMARY_TAGS, evaluation_folder
from rlinf.training.stop_signal import StopRequested, StopSignal

logger = logging.getLogger("rlinf")


class Evaluator:
    """Evaluates a policy on all ranks.

    Args:
        env: Created with ``auto_reset=False``; offloaded after each evaluation.
        episodes: Runs the episodes elsewhere. If None, they run on this rank.
    """

    def __init__(
        self,
        config: RunConfig,
        env: VectorEnv,
        stop_signal: StopSignal,
        autocast: Callable[[], AbstractContextManager],
        episodes: Episodes | None = None,
    ) -> None:
        self.config, self.env, self.stop_signal, self.autocast = config, env, stop_signal, autocast
        self.episodes = episodes

    def run(self, model: ActionModel, tag: str) -> EvaluationResult | None:
        """Evaluate and return the result on all ranks (a collective call), or None after a signal."""
        settings = self.config.evaluation
        is_summary, folder = tag in SUMMARY_TAGS.values(), evaluation_folder(self.config, tag)
        with_videos = is_summary and settings.num_videos_per_task > 0
        plan = EvaluationPlan(
            video_folder=folder / VIDEOS_FOLDER if with_videos else None,
            num_videos_per_task=settings.num_videos_per_task,
            video_size=settings.video_size,
            ranks=self._ranks(),
            episodes=self.episodes,
        )
        try:
            with self.autocast():
                return evaluate_policy(
                    model,
                    self.env,
                    episode_list(self.env, settings.split, settings.num_episodes, settings.first_episode),
                    greedy=settings.greedy,
                    temperature=self.config.evaluation_temperature,
                    seed=self.config.seed,
                    on_result=lambda _: heartbeat(),
                    plan=plan,
                )
        except StopRequested:
            return None
        finally:
            self.env.offload()

    def _ranks(self) -> RankGroup:
        return RankGroup(rank(), world_size(), self.stop_signal.together)

    def record(self, model: ActionModel, tag: str, result: EvaluationResult) -> None:
        """Record episodes of a saved evaluation (a collective call) unless interrupted by a signal; raise RLinfError on failure."""
        settings, folder = self.config.evaluation, evaluation_folder(self.config, tag)
        if tag not in SUMMARY_TAGS.values() or not settings.record_episodes:
            return
        try:
            with self.autocast():
                record_episodes(
                    model,
                    self.env,
                    result,
                    folder / RECORDINGS_FOLDER,
                    settings.record_episodes,
                    settings.video_size,
                    self._ranks(),
                )
        except StopRequested:
            logger.warning("The episodes of %s are not recorded because of a signal. Its result is saved.", folder)
        except Exception as error:
            raise recording_failed(error, folder) from error
        finally:
            self.env.offload()
