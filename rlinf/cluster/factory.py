"""What a rank and a player have in common: how the collector of a run is made."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from rlinf.cluster.envs import env_maker
from rlinf.config.schema import RunConfig
from rlinf.envs.base import VectorEnv
from rlinf.envs.config import default_num_worker_threads
from rlinf.rollout.collector import RolloutCollector
from rlinf.rollout.sampler import EpisodeSampler


def threads_of_rank(config: RunConfig, env: VectorEnv, num_ranks: int) -> int:
    """Return the worker threads with which a rank plays its envs."""
    # A simulation on the GPU steps all of its rows at once: two of half the size would take as long each, one after the other.
    if env.on_gpu:
        return 1
    return config.rollout.num_lanes or default_num_worker_threads(config.env, config.rollout.num_envs // num_ranks)


def episode_sampler(config: RunConfig, env: VectorEnv) -> EpisodeSampler:
    """Return what chooses the training episodes of a run, whose settings ``env`` has."""
    rollout = config.rollout
    return EpisodeSampler(
        env.episode_specs("train"),
        len(env.task_names),
        num_groups=rollout.num_envs // rollout.group_size,
        group_size=rollout.group_size,
        seed=config.seed,
        init_states=rollout.init_states,
    )


def collector_factory(
    config: RunConfig, env: VectorEnv, num_worker_threads: int, num_sharers: int
) -> Callable[..., RolloutCollector]:
    """Return what makes a collector from ``rank``, ``num_ranks`` and ``autocast``.

    Args:
        config: Of the run.
        env: An env of the run's settings.
        num_worker_threads: Of the collector.
        num_sharers: Worker threads that share the cores of this machine.
    """
    rollout = config.rollout
    return partial(
        RolloutCollector,
        partial(env_maker(config, num_sharers, num_worker_threads), auto_reset=rollout.auto_reset),
        episode_sampler(config, env),
        num_envs=rollout.num_envs,
        num_chunks=rollout.num_chunks,
        temperature=rollout.temperature,
        num_worker_threads=num_worker_threads,
        offload_envs=rollout.offload_envs,
    )
