"""Where the simulators of a run are: in this process and its worker processes, or on other machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

from rlinf.config.plugins import load_plugins
from rlinf.config.schema import RunConfig
from rlinf.envs import ENVS, make_env
from rlinf.envs.base import VectorEnv
from rlinf.envs.config import with_share_of_cores
from rlinf.envs.remote.env import EnvNodes, RemoteVectorEnv


def env_maker(config: RunConfig, num_sharers: int, num_threads: int = 1) -> Callable[..., VectorEnv]:
    """Return ``make(num_envs, auto_reset=)``, which builds an env of the run.

    Args:
        config: Of the run.
        num_sharers: Envs that share the cores of this machine.
        num_threads: Worker threads of each rank or player, which have an env each and play at the same time.
    """
    cluster = config.cluster
    if not cluster.env_nodes:
        return partial(make_env, with_share_of_cores(config.env, num_sharers))
    nodes = EnvNodes(
        cluster.env_nodes,
        num_envs_at_once=num_threads * (cluster.num_players or cluster.num_processes),
        start_s=cluster.deadlines.start,
        timeout_s=cluster.env_node_timeout_s,
        max_restarts=cluster.env_node_restarts,
        prepare=partial(load_plugins, config.plugins),
    )
    return partial(RemoteVectorEnv.of(ENVS.get(config.env.name), nodes), config.env)


def describe_places(env: VectorEnv) -> str:
    """Return in words where the simulators of an env are."""
    if not isinstance(env, RemoteVectorEnv):
        return "in the process that acts, or in worker processes of it"
    hosts = Counter(host for host, _ in env.places())
    return "in actors of Ray: " + ", ".join(f"{count} on {host}" for host, count in sorted(hosts.items()))
