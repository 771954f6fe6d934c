"""Selects how a run collects rollouts: in threads of the rank, in child processes, or in rollout workers on any machine."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch

from rlinf.cluster.factory import collector_factory, threads_of_rank
from rlinf.cluster.rollout_workers import RemoteCollector, RolloutWorkers
from rlinf.config.plugins import load_plugins
from rlinf.config.schema import RunConfig
from rlinf.distributed.process_group import local_world_size, rank, world_size
from rlinf.envs.base import VectorEnv
from rlinf.models.embodiment.base import ActionModel
from rlinf.number_formats import format_count
from rlinf.rollout.collector import Collector
from rlinf.rollout.process_collector import ProcessCollector, ProcessSettings


def make_collector(
    config: RunConfig,
    eval_env: VectorEnv,
    model: ActionModel,
    autocast: Callable[[], AbstractContextManager],
    workers: RolloutWorkers | None = None,
) -> Collector:
    """Return the collector for this rank's rollouts. It uses rollout workers if there are any, otherwise ``model`` under ``autocast()``.

    ``model`` is not copied, so rollouts and updates use the same memory.
    """
    if workers is not None:
        return RemoteCollector(workers)
    rollout, ahead = config.rollout, config.cluster.max_staleness
    num_workers = 1 if rollout.worker_processes else threads_of_rank(config, eval_env, world_size())
    make = collector_factory(config, eval_env, num_workers, num_workers * local_world_size())
    if not rollout.worker_processes:
        return make(autocast=autocast, rank=rank(), num_ranks=world_size())
    settings = ProcessSettings(
        # If rollouts run ahead of updates, this process computes at the same time and also needs cores.
        num_threads=max(1, torch.get_num_threads() // (rollout.worker_processes + (ahead > 0))),
        precision=config.model.precision,
        seed=config.seed,
        prepare=partial(load_plugins, config.plugins),
    )
    return ProcessCollector(
        make,
        model,
        settings,
        num_env_groups=rollout.num_envs // rollout.group_size,
        num_processes=rollout.worker_processes,
        max_ahead=ahead,
        rank=rank(),
        num_ranks=world_size(),
    )


def rollout_workers(collector: Collector) -> str:
    """Describe a rank's collector, for example "2 threads"."""
    if isinstance(collector, RemoteCollector):
        return format_count(collector.workers.placement.num_rollout_workers // world_size(), "worker")
    if isinstance(collector, ProcessCollector):
        return format_count(collector.num_processes, "process")
    return format_count(len(collector.worker_threads), "thread")
