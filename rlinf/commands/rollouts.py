"""What plays the rollouts of a run: threads of the rank, or processes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch

from rlinf.config.plugins import load_plugins
from rlinf.config.schema import RunConfig
from rlinf.distributed.process_group import local_world_size, rank, world_size
from rlinf.envs.base import VectorEnv
from rlinf.envs.config import default_num_worker_threads, with_share_of_cores
from rlinf.models.embodiment.base import ActionModel
from rlinf.rollout.collector import RolloutCollector
from rlinf.rollout.process_collector import ProcessCollector
from rlinf.rollout.sampler import EpisodeSampler


def make_collector(
    config: RunConfig, eval_env: VectorEnv, model: ActionModel, autocast: Callable[[], AbstractContextManager]
) -> RolloutCollector | ProcessCollector:
    """Return what plays this rank's rollouts.

    Args:
        config: Of the run.
        eval_env: An env of the run's settings.
        model: The policy that plays, in the memory in which it is updated.
        autocast: Makes the context in which it computes.
    """
    rollout = config.rollout
    num_blocks = rollout.num_envs // rollout.group_size
    sampler = EpisodeSampler(
        eval_env.episode_specs("train"),
        len(eval_env.task_names),
        num_groups=num_blocks,
        group_size=rollout.group_size,
        seed=config.seed,
        init_states=rollout.init_states,
    )
    # A simulation on the GPU steps all of its rows at once: two of half the size would take as long each, one after the other.
    num_threads = rollout.num_lanes or default_num_worker_threads(config.env, rollout.num_envs // world_size())
    num_threads = 1 if eval_env.on_gpu else num_threads
    num_workers = 1 if rollout.worker_processes else num_threads
    env_config = with_share_of_cores(config.env, num_workers * local_world_size())
    make = partial(
        RolloutCollector,
        partial(type(eval_env), env_config, auto_reset=rollout.auto_reset),
        sampler,
        num_envs=rollout.num_envs,
        num_chunks=rollout.num_chunks,
        temperature=rollout.temperature,
        num_worker_threads=num_workers,
        offload_envs=rollout.offload_envs,
    )
    if not rollout.worker_processes:
        return make(autocast=autocast, rank=rank(), num_ranks=world_size())
    return ProcessCollector(
        make,
        model,
        num_blocks=num_blocks,
        num_processes=rollout.worker_processes,
        num_threads=max(1, torch.get_num_threads() // rollout.worker_processes),
        precision=config.model.precision,
        rank=rank(),
        num_ranks=world_size(),
        seed=config.seed,
        prepare=partial(load_plugins, config.plugins),
    )


def players(collector: RolloutCollector | ProcessCollector) -> str:
    """Return in words what plays the rollouts of a rank."""
    if isinstance(collector, ProcessCollector):
        return f"{collector.num_processes} process{'es' if collector.num_processes > 1 else ''}"
    count = len(collector.worker_threads)
    return f"{count} thread{'s' if count > 1 else ''}"
