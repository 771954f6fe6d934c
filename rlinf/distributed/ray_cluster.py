"""The connection of a process to a Ray cluster: that of ``RAY_ADDRESS``, or one that it starts on this machine."""

from __future__ import annotations

import os
import signal
import socket
import threading
from types import ModuleType
from typing import Any

from rlinf.distributed.process_group import gather_objects, rank
from rlinf.errors import ConfigError, MissingDependencyError

CONNECT_S = 5.0
"""Seconds that the machine of RAY_ADDRESS has to accept a connection."""
OBJECT_STORE_BYTES = 2 * 2**30
"""Shared memory of a cluster on this machine that has simulators only; Ray would take 30 % of the main memory."""


def import_ray(needed_by: str) -> ModuleType:
    """Return the module ``ray``; raise MissingDependencyError, naming the setting that needs it, if it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise MissingDependencyError(
            f"{needed_by} needs Ray, which is not installed ({error}). Run: pip install 'rlinf[ray]'"
        ) from error
    return ray


def check_address(needed_by: str) -> str | None:
    """Return ``RAY_ADDRESS``, or None where it is not set or asks for a cluster of this machine's own.

    Raises:
        ConfigError: It is not ``host:port``, or nothing listens there.
    """
    address = os.environ.get("RAY_ADDRESS", "").strip()
    if address in ("", "local"):
        return None
    if address == "auto":
        return address
    host, _, port = address.rpartition(":")
    cure = "Set RAY_ADDRESS=<host of `ray start --head`>:6379, or unset it to start Ray on this machine"
    if not host or not port.isdigit() or "/" in host:
        raise ConfigError(f"RAY_ADDRESS is '{address}', and {needed_by} needs host:port. {cure}")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"RAY_ADDRESS is '{address}', but no Ray cluster answers there ({error}). {cure}") from error
    return address


def connect(needed_by: str) -> ModuleType:
    """Connect to the Ray cluster of ``RAY_ADDRESS``, or start one on this machine; a collective call.

    All ranks use the cluster that rank 0 has found or started.

    Args:
        needed_by: The setting that needs it, such as ``cluster.env_nodes=2``, for errors.

    Returns:
        The module ``ray``.

    Raises:
        MissingDependencyError: Ray is not installed.
        ConfigError: The cluster cannot be reached.
    """
    ray = import_ray(needed_by)
    address = None
    if rank() == 0:
        address = ray.get_runtime_context().gcs_address if ray.is_initialized() else None
        address = address or initialise(ray, check_address(needed_by), object_store_memory=OBJECT_STORE_BYTES)
    address = gather_objects(address)[0]
    if not ray.is_initialized():
        initialise(ray, address)
    return ray


def initialise(ray: ModuleType, address: str | None, log_to_driver: bool = False, **of_new: Any) -> str:
    """Connect to a cluster, and return its address.

    Args:
        ray: The module.
        address: Of the cluster; None: start one on this machine.
        log_to_driver: Whether what actors print appears here.
        of_new: Arguments of ``ray.init`` for a cluster that is started.

    Raises:
        ConfigError: Ray cannot connect or start.
    """
    how: dict[str, Any] = {"address": address}
    if address is None:
        how = {"address": "local", "include_dashboard": False, **of_new}
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(**how, log_to_driver=log_to_driver, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"Ray cannot {'start on this machine' if address is None else f'connect to {address}'}: {error}. All machines need "
            "the same versions of Python and Ray. A cluster that asks for a token needs RAY_AUTH_MODE=token on all of them"
        ) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray's would end the process; ours saves a checkpoint first
    return ray.get_runtime_context().gcs_address
