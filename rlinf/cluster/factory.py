"""Factories for the rollout collectors of ranks and rollout workers."""

from collections import Counter
from collections.abc import Callable
from functools import partial

from rlinf.config.plugins import load_plugins
from rlinf.config.schema import RunConfig
from rlinf.distributed.parallel import rank_memory_bytes
from rlinf.distributed.process_group import resolve_device
from rlinf.envs import ENVS, make_env
from rlinf.envs.base import VectorEnv
from rlinf.envs.config import default_num_worker_threads, most_simulators, with_share_of_cores
from rlinf.envs.episodes import EpisodeSampler
from rlinf.envs.remote.env import EnvNodes, RemoteVectorEnv
from rlinf.rollout.collector import RolloutCollector


def threads_of_rank(config: RunConfig, env: VectorEnv, num_ranks: int) -> int:
    """Return the number of worker threads that step a rank's envs."""
    # A GPU env steps all its slots in one kernel. Two envs half the size would run one after the other, each taking as long.
    if env.on_gpu:
        return 1
    num_envs = config.rollout.num_envs // num_ranks
    on_gpu = resolve_device(config.cluster.device, 1) == "cuda" and config.rollout.backend == "torch"
    return config.rollout.pipeline_stages or default_num_worker_threads(config.env, num_envs, on_gpu)


def episode_sampler(config: RunConfig, env: VectorEnv) -> EpisodeSampler:
    """Return the sampler of training episodes for the run's env."""
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
    """Return ``make(rank=, num_ranks=, autocast=)`` for a machine with a total of ``num_sharers`` worker threads."""
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
        continue_episodes=rollout.continue_episodes,
        device=resolve_device(config.cluster.device, 1),
    )


def env_maker(config: RunConfig, num_sharers: int, num_threads: int = 1) -> Callable[..., VectorEnv]:
    """Return ``make(num_envs, auto_reset=)``, which builds one of this machine's ``num_sharers`` envs.

    Each of a rank's or rollout worker's ``num_threads`` worker threads builds one.
    """
    cluster = config.cluster
    if not cluster.num_env_workers:
        gpu_bytes = rank_memory_bytes("cuda", 1) if resolve_device(cluster.device, 1) == "cuda" else None
        most = most_simulators(config.env, gpu_bytes, num_threads)
        return partial(make_env, with_share_of_cores(config.env, num_sharers, most))
    nodes = EnvNodes(
        cluster.num_env_workers,
        num_parallel_envs=num_threads * (cluster.num_rollout_workers or cluster.num_processes),
        start_s=cluster.deadlines.start,
        timeout_s=cluster.env_worker_timeout_s,
        max_restarts=cluster.env_worker_restarts,
        prepare=partial(load_plugins, config.plugins),
    )
    return partial(RemoteVectorEnv.of(ENVS.get(config.env.name), nodes), config.env)


def describe_places(env: VectorEnv) -> str:
    """Describe where an env's simulators run."""
    if not isinstance(env, RemoteVectorEnv):
        return "in the process of the policy, or in its worker processes"
    hosts = Counter(host for host, _ in env.places())
    return "in Ray actors: " + ", ".join(f"{count} on {host}" for host, count in sorted(hosts.items()))
