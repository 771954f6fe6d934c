"""Rollout workers, which run episodes with a policy trained in a different process. This module does not depend on Ray."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlinf.cluster.factory import collector_factory, env_maker, threads_of_rank
from rlinf.config.schema import RunConfig
from rlinf.distributed.process_group import given_num_threads, resolve_device
from rlinf.engines.vllm_engine import expandable_segments
from rlinf.errors import ConfigError
from rlinf.evaluation.evaluator import BatchedPolicy, LocalEpisodes, Video
from rlinf.memory import num_cores
from rlinf.models.embodiment.base import ActionModel
from rlinf.models.precision import autocast, evaluation_mode
from rlinf.preflight.placement import Placement
from rlinf.rollout.policy_skeleton import PolicyReplica, PolicySkeleton
from rlinf.seeding import derive_seed, seed_everything
from rlinf.types import EpisodeResult, EpisodeSpec, RolloutBatch

if TYPE_CHECKING:
    from rlinf.rollout.vllm_policy import VllmPolicy


def worker_maker(config: RunConfig, shell: PolicySkeleton, placement: Placement) -> Callable[[int, int], RolloutWorker]:
    """Return ``make(number, num_neighbours)``, which builds a rollout worker."""
    # Resolve the thread count here because Ray overwrites OMP_NUM_THREADS in the worker's process.
    cluster = replace(config.cluster, num_threads=given_num_threads(config.cluster.num_threads))
    return partial(RolloutWorker, replace(config, cluster=cluster), shell, placement)


class RolloutWorker(PolicyReplica):
    """Runs envs with a copy of the policy. If the placement has no env groups, it is used only for evaluation.

    With ``rollout.backend=vllm``, an engine samples the actions of rollouts. The engine is updated from the policy copy, which is
    still used for evaluation, preprocessing and values.

    Any rollout worker can run any env groups, up to its fraction of ``placement.num_env_groups`` per call, because a rollout depends
    only on the weights, the iteration, the attempt and the env group.

    Args:
        number: Index of this rollout worker across all machines.
        num_neighbours: Number of rollout workers on this machine, including this one, among which its cores are divided.
    """

    def __init__(
        self, config: RunConfig, shell: PolicySkeleton, placement: Placement, number: int, num_neighbours: int
    ) -> None:
        self.config = config
        torch.set_num_threads(placement.torch_threads(config.cluster.num_threads, num_cores() // num_neighbours))
        seed_everything(derive_seed(config.seed, "rollout worker", number), config.trainer.deterministic)
        super().__init__(shell, resolve_device(config.cluster.device, 1))
        self.engine = _engine(config, self.model, placement) if placement.num_env_groups else None
        self.policy: Any = self.model if self.engine is None else self.engine
        self.merged, self._merged_version = None, None
        if placement.num_env_groups and config.rollout.merge_adapters:
            from rlinf.models.lora import MergedCopy  # imports peft

            self.merged = MergedCopy(self.model)
            self.policy = self.merged.policy
        num_envs = -(-config.evaluation.num_envs // placement.num_rollout_workers)
        self.env = env_maker(config, num_neighbours)(num_envs, auto_reset=False)
        self._autocast = partial(autocast, self.model, config.model.precision)
        self.collector = None
        if placement.num_env_groups:
            num_threads = placement.worker_threads(threads_of_rank(config, self.env, placement.num_ranks))
            make = collector_factory(config, self.env, num_threads, num_threads * num_neighbours)
            self.collector = make(autocast=self._autocast, rank=number, num_ranks=placement.num_rollout_workers)
        settings = config.evaluation
        policy = BatchedPolicy(
            self.model, self.env.stream_names, settings.greedy, config.evaluation_temperature, config.seed
        )
        self._episodes = LocalEpisodes(policy, self.env)

    @property
    def version(self) -> int | None:
        """See ``PolicyReplica.version``; also None if the engine or the merged weights have a different version."""
        held = super().version
        used = self._merged_version if self.merged is not None else held if self.engine is None else self.engine.version
        return held if used == held else None

    def commit(self) -> int:
        """Complete a push, update the engine or the merged adapters, and return the version."""
        version = super().commit()
        if self.merged is not None:
            self._merged_version = None
            self.merged.refresh()
            self._merged_version = version
        if self.engine is not None:
            self.engine.update_weights(version)
        return version

    def collect(self, step: int, needs_values: bool, attempt: int, env_groups: Sequence[int]) -> RolloutBatch:
        """Collect a rollout of some env groups with the current weights; see ``RolloutCollector.collect``."""
        version = self._complete_version()
        # Free memory used by the envs of the last evaluation.
        self.env.offload()
        return self.collector.collect(self.policy, step, version, needs_values, attempt, env_groups)

    def evaluate(self, specs: Sequence[EpisodeSpec]) -> tuple[list[EpisodeResult], int]:
        """Run evaluation episodes, and return their results and the number of replaced simulators."""
        self._complete_version()
        before = self.env.num_restarts
        with evaluation_mode(self.model), self._autocast():
            results = self._episodes.run(specs, lambda result: None)
        return results, self.env.num_restarts - before

    def record(
        self, numbered: Sequence[tuple[int, EpisodeResult]], folder: str, size: int
    ) -> list[tuple[Video, bytes]]:
        """Record videos of evaluated episodes (see ``Episodes.record``), and return them with their file contents."""
        # The rank writes the files to `folder` because this machine may not have access to the run folder.
        self._complete_version()
        with evaluation_mode(self.model), self._autocast(), tempfile.TemporaryDirectory(prefix="rlinf-") as parent:
            videos = self._episodes.record(numbered, Path(parent, folder), size)
            return [(video, Path(parent, video[1]["path"]).read_bytes()) for video in videos]

    def close(self) -> None:
        """Close the envs and shut down the engine."""
        try:
            if self.collector is not None:
                self.collector.close()
            self.env.close()
        finally:
            if self.engine is not None:
                self.engine.close()


def _engine(config: RunConfig, model: ActionModel, placement: Placement) -> VllmPolicy | None:
    """Start the engine of ``rollout.backend=vllm`` on this process's GPUs, so that it fails before training if at all."""
    rollout = config.rollout
    if rollout.backend == "torch":
        return None
    segments = expandable_segments() if model.device.type == "cuda" else None
    if segments is not None:
        required = "required with rollout.backend=vllm: no expandable segments, whose memory the engine cannot share"
        fix = "Start Ray on that machine without the variable, or set rollout.backend=torch"
        raise ConfigError(f"{segments} in a rollout worker on {socket.gethostname()}; {required}. {fix}")
    # Imported here: it imports PEFT and transformers, which workers that only evaluate do not need.
    from rlinf.rollout.vllm_policy import VllmPolicy

    policy = VllmPolicy(model, rollout.vllm, rollout.num_envs // placement.num_rollout_workers, torch.get_num_threads())
    policy.engine.start()
    return policy
