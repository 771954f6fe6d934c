"""Connects to the Ray cluster at ``RAY_ADDRESS``, or starts a cluster on this machine."""

import os
import random
import signal
import socket
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

from rlinf.distributed.process_group import gather_objects, rank
from rlinf.distributed.ray.end import children, end_with_this_process
from rlinf.errors import ConfigError, MissingDependencyError

CONNECT_S = 5.0
"""Timeout for connections to the machine at RAY_ADDRESS, in seconds."""
OBJECT_STORE_BYTES = 2 * 2**30
"""Shared memory for a local cluster that only runs simulators, in bytes; Ray's default is 30 % of main memory."""


def import_ray(needed_by: str) -> ModuleType:
    """Import ``ray``. If it is not installed, raise a MissingDependencyError that names the setting that needs it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise MissingDependencyError(
            f"{needed_by} needs Ray, which is not installed ({error}). Run: pip install -e '.[ray]' in the clone of rlinf"
        ) from error
    return ray


def check_address(needed_by: str) -> str | None:
    """Return ``RAY_ADDRESS``, or None if it is unset or requests a new cluster on this machine.

    Raise ConfigError if it is not ``host:port``, no server is listening there, or the cluster requires a different token.
    """
    address = os.environ.get("RAY_ADDRESS", "").strip()
    if address in ("", "local"):
        return None
    if address == "auto":
        return address
    host, _, port = address.rpartition(":")
    fix = "Set RAY_ADDRESS=<host of `ray start --head`>:6379, or unset it to start Ray on this machine"
    if not host or not port.isdigit() or "/" in host:
        raise ConfigError(f"RAY_ADDRESS is '{address}', but {needed_by} needs host:port. {fix}")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"RAY_ADDRESS is '{address}', but no Ray cluster listens there ({error}). {fix}") from error
    _check_token(address)
    return address


def _check_token(address: str) -> None:
    """Raise ConfigError if a cluster requires a token and this machine's token is missing or wrong."""
    # Without this check, Ray would retry for a minute and then raise a less specific error.
    import grpc

    token = _token() if os.environ.get("RAY_AUTH_MODE") == "token" else None
    with grpc.insecure_channel(address) as channel:
        get_cluster_id = channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetClusterId")
        try:
            get_cluster_id(
                b"", timeout=CONNECT_S, metadata=[] if token is None else [("authorization", f"Bearer {token}")]
            )
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.UNAUTHENTICATED:
                return  # Ray will report the error
        else:
            return
    who = f"The Ray cluster at RAY_ADDRESS={address}"
    if token is not None:
        fix = "Copy ~/.ray/auth_token of the machine of `ray start --head`, or set RAY_AUTH_TOKEN to its content"
        raise ConfigError(f"{who} rejected this machine's token. {fix}")
    raise ConfigError(
        f"{who} requires a token, but RAY_AUTH_MODE is '{os.environ.get('RAY_AUTH_MODE', '')}' here. Copy the ~/.ray/auth_token of its "
        f"head to this machine, then run: RAY_AUTH_MODE=token RAY_ADDRESS={address} rlinf ..."
    )


def _token() -> str:
    """Return this machine's token from where Ray expects it; raise ConfigError if there is none."""
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if not path.is_file():
        raise ConfigError(
            f"RAY_AUTH_MODE is 'token', but {path} does not exist. Copy that file from the machine of `ray start --head`, set "
            "RAY_AUTH_TOKEN to its content, or unset RAY_AUTH_MODE for a cluster without tokens"
        )
    return path.read_text(encoding="utf-8").strip()


def connect(needed_by: str) -> ModuleType:
    """Connect all ranks to the Ray cluster at rank 0's ``RAY_ADDRESS``, or start one, and return the module ``ray``.

    This is a collective call. Error messages mention ``needed_by``, the setting that needs Ray, such as ``cluster.num_env_workers=2``.
    """
    ray = import_ray(needed_by)
    address = ray.get_runtime_context().gcs_address if ray.is_initialized() else None
    if rank() == 0 and address is None:
        address = initialise(ray, check_address(needed_by), object_store_memory=OBJECT_STORE_BYTES)
    address = gather_objects(address)[0]
    if not ray.is_initialized():
        initialise(ray, address)
    return ray


def initialise(ray: ModuleType, address: str | None, log_to_driver: bool = False, **of_new: Any) -> str:
    """Connect to a cluster, or start one with additional ``ray.init`` arguments ``of_new``, and return its address.

    ``log_to_driver`` forwards the output of actors to this process.
    """
    how = {"address": "local", "include_dashboard": False, **of_new} if address is None else {"address": address}
    handler, numbers = signal.getsignal(signal.SIGTERM), random.getstate()
    # Ray names connections with Python's random module. Equally seeded ranks would get the same name, receive each other's messages
    # and poll continuously.
    random.seed()
    children_before = children(os.getpid())
    try:
        ray.init(**how, log_to_driver=log_to_driver, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError) as error:
        what = "start on this machine" if address is None else f"connect to {address}"
        raise ConfigError(
            f"Ray cannot {what}: {error}. All machines need the same versions of Python and Ray"
        ) from error
    finally:
        random.setstate(numbers)
        if threading.current_thread() is threading.main_thread():
            # Ray installs a handler that ends the process; restore the run's handler, which first saves a checkpoint.
            signal.signal(signal.SIGTERM, handler)
    if address is None:
        end_with_this_process([pid for pid in children(os.getpid()) if pid not in children_before])
    return ray.get_runtime_context().gcs_address
