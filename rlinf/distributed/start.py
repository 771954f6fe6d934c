"""Ranks started by torchrun or srun: detecting and comparing them, and distributing rank 0's work.

Rank 0 runs the command. Other ranks wait at a store for its launches, so all ranks use rank 0's configuration and run
folder, and only rank 0 prints.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import platform
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf.errors import ConfigError

# Commands without a launcher also import this module; importing torch would cost them seconds.
if TYPE_CHECKING:
    from torch.distributed import Store

START_S = 900.0
"""Seconds that a rank waits for rank 0 and for all ranks to connect, before the configuration is available."""
POLL_S = 0.1
LEAVE_S = 5.0
"""Seconds that a rank waits before exiting until all ranks are ready to exit."""

TORCHRUN = {"rank": "RANK", "size": "WORLD_SIZE", "local_rank": "LOCAL_RANK"}
# Do not use SLURM_NTASKS, which is also set in a batch script with a single process.
SRUN = {"rank": "SLURM_PROCID", "size": "SLURM_STEP_NUM_TASKS", "local_rank": "SLURM_LOCALID"}
MPIRUN = {"rank": "OMPI_COMM_WORLD_RANK", "size": "OMPI_COMM_WORLD_SIZE"}
ADDRESS = ("MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class LaunchContext:
    """This process's rank and rank 0's address, from environment variables set by torchrun or srun."""

    launcher: str  # torchrun or srun
    rank: int
    size: int
    local_rank: int  # rank on its machine
    address: tuple[str, int]  # store address
    serves: bool  # whether this process opens the store instead of connecting to it


def launch_context(environment: Mapping[str, str]) -> LaunchContext | None:
    """Parse the launcher's environment variables. Return None without a launcher or with a single process."""
    for launcher, names in (("torchrun", TORCHRUN), ("srun", SRUN), ("mpirun", MPIRUN)):
        size = environment.get(names["size"], "").strip()
        if names["rank"] not in environment or size in ("", "1"):
            continue
        if launcher == "mpirun":
            raise ConfigError(
                f"mpirun started several processes ({MPIRUN['size']}={size}), each of which would be a separate run. Start them with "
                "torchrun or srun, or run the command once with cluster.num_processes=<ranks of this machine>"
            )
        numbers = {key: _number(environment, name, launcher) for key, name in names.items()}
        host, port = (environment.get(name) for name in ADDRESS)
        if launcher == "srun":
            host = host or first_host(
                environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
            )
            # Use a port that all tasks of the step can compute and that other steps on the machine are unlikely to use.
            if not port:
                job, step = (int(environment.get(f"SLURM_{name}_ID", "0")) for name in ("JOB", "STEP"))
                port = str(10_000 + (31 * job + step) % 20_000)
        if not host or not (port or "").isdigit():
            raise ConfigError(
                f"{launcher} started {size} processes, but {ADDRESS[0]} is '{host or ''}' and {ADDRESS[1]} is '{port or ''}'; "
                f"expected the address of rank 0. Set both, or (in a shell of its job) unset {names['rank']} {names['size']}"
            )
        serves = numbers["rank"] == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        return LaunchContext(launcher, **numbers, address=(host, int(port)), serves=serves)
    return None


def _number(environment: Mapping[str, str], name: str, launcher: str) -> int:
    value = environment.get(name, "").strip()
    if not value.isdigit():
        problem = f"{name} is '{value}'" if value else f"{name} is not set"
        raise ConfigError(f"{problem} in a process started by {launcher}; expected a number. Set {name}=<number>")
    return int(value)


def first_host(nodelist: str) -> str:
    """Return the first host in a SLURM node list, for example ``gpu-003-a`` in ``gpu-[003-010,12]-a,login``."""
    first = re.split(r",(?![^\[]*\])", nodelist)[0]
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)


def clear_launch_context(environment: dict[str, str] | os._Environ) -> None:
    """Remove the launcher's variables from the environment of a process without ranks."""
    for names in (TORCHRUN, SRUN, MPIRUN):
        for name in names.values():
            environment.pop(name, None)


def rank_fingerprint(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the values that must be equal on all ranks: the command's arguments, rlinf's code, and package versions."""
    # Access `.metadata` once per package, because each access parses a file.
    metadata = (package.metadata for package in distributions())
    versions = {fields["Name"].lower(): fields["Version"] for fields in metadata if fields["Name"]}
    return {
        **{f"argument {argument.partition('=')[0]}": argument for argument in arguments},
        "source of rlinf (sha256)": source_hash(),
        "python": platform.python_version(),
        **{f"version of {name}": version for name, version in versions.items()},
    }


def source_hash() -> str:
    """Return the SHA-256 of the names and contents of the package's Python and YAML files."""
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(path for path in package.rglob("*") if path.suffix in (".py", ".yaml")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def describe_differences(
    fingerprints: Sequence[tuple[str, Mapping[str, Any]]], limit: int = 20, noun: str = "rank"
) -> list[str]:
    """List values in which ranks differ from rank 0: up to ``limit`` lines, then the number of further differences.

    ``fingerprints`` contains the host and values of each rank, or of each ``noun``.
    """
    host, first = fingerprints[0]
    lines = []
    for rank, (other, values) in enumerate(fingerprints):
        for name in sorted({*first, *values}):
            expected, value = first.get(name, "(absent)"), values.get(name, "(absent)")
            if value != expected:
                lines.append(f"{name}: {noun} {rank} on {other} has {value}, {noun} 0 on {host} has {expected}")
    return lines if len(lines) <= limit else [*lines[:limit], f"and {len(lines) - limit} more"]


def reject_differences(fingerprints: Sequence[tuple[str, Mapping[str, Any]]], noun: str = "rank") -> None:
    """Raise ConfigError if ranks differ; see ``describe_differences``."""
    lines = describe_differences(fingerprints, noun=noun)
    if lines:
        fix = f"Start all {noun}s with the same arguments, in the same environment, from the same code"
        raise ConfigError(f"The {noun}s of this run differ:\n  " + "\n  ".join(lines) + f"\n{fix}")


def reject_shared_gpus(reports: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Raise ConfigError unless each rank sees exactly one GPU of its own. ``reports`` contains each rank's host and ``gpus``."""
    owners: dict[str, str] = {}
    for rank, (host, values) in enumerate(reports):
        gpus, name = values["gpus"], f"rank {rank} on {host}"
        owner = owners.get(gpus[0]) if gpus else None
        if len(gpus) != 1 or owner is not None:
            has = f"has the same GPU {gpus[0]} as {owner}" if owner else f"sees {len(gpus)} GPUs, not exactly one"
            raise ConfigError(
                f"{name} {has}; expected one GPU for each rank. Start no more ranks on a machine than it has GPUs, or set "
                "cluster.device=cpu"
            )
        owners[gpus[0]] = name


def agree(
    store: Store, rank: int, size: int, key: str, values: dict[str, Any], check: Callable[[list], None]
) -> list[str]:
    """Let rank 0 check the values of all ranks. Return the ranks' hosts, or raise rank 0's ConfigError on every rank."""
    store.set(f"{key}/{rank}", pickle.dumps((socket.gethostname(), values)))
    if rank == 0:
        reports = [pickle.loads(store.get(f"{key}/{number}")) for number in range(size)]
        verdict: ConfigError | list[str] = [host for host, _ in reports]
        try:
            check(reports)
        except ConfigError as error:
            verdict = error
        store.set(f"{key}/verdict", pickle.dumps(verdict))
    verdict = pickle.loads(store.get(f"{key}/verdict"))
    if isinstance(verdict, ConfigError):
        raise verdict
    return verdict


_connected = False


def is_connected() -> bool:
    """Return whether this process was started as a rank by a launcher and is connected to all ranks."""
    return _connected


def started_here(num_processes: int) -> int:
    """Return the number of ranks that this process runs or starts: one if it is a launcher's rank, otherwise all."""
    return 1 if _connected else num_processes


class LauncherRanks:
    """Ranks started by a launcher and connected by a store. Rank 0 sends work, which other ranks process in order."""

    def __init__(self, context: LaunchContext, store: Store) -> None:
        self.context, self.store = context, store
        self.num_launches = 0  # so far

    def compare(self, arguments: Sequence[str]) -> None:
        """Raise ConfigError on all ranks if they differ. Set ``LOCAL_WORLD_SIZE`` to the number of ranks on this machine."""
        global _connected
        context, values = self.context, rank_fingerprint(arguments)
        hosts = agree(self.store, context.rank, context.size, "machine", values, reject_differences)
        os.environ["LOCAL_WORLD_SIZE"] = str(hosts.count(socket.gethostname()))
        _connected = True

    def send(self, work: tuple) -> None:
        """Pickle ``work`` and send it to other ranks."""
        # Include sys.path, so that other ranks can import rank 0's plugins to unpickle the work.
        self._set(f"work/{self.num_launches}", (list(sys.path), pickle.dumps(work)))
        self.num_launches += 1

    def take(self) -> tuple | int:
        """Return the next work from rank 0, or its command's exit status. If its command failed, raise the error."""
        key = f"work/{self.num_launches}"
        while not self.store.check([key]):
            if self.store.check(["end"]):
                end = self._get("end")
                if isinstance(end, Exception):
                    raise end
                return end
            time.sleep(POLL_S)
        self.num_launches += 1
        path, work = self._get(key)
        sys.path += [entry for entry in path if entry not in sys.path]
        return pickle.loads(work)

    def end(self, result: int | Exception) -> None:
        """Send the command's exit status or error to other ranks."""
        self._set("end", result)

    def leave(self) -> None:
        """Wait until all ranks are ready to exit."""
        # A launcher kills the remaining ranks as soon as the first rank exits.
        deadline = time.monotonic() + LEAVE_S
        # A RuntimeError means that rank 0, or the launcher that owned the store, has ended.
        with suppress(RuntimeError):
            num_left = self.store.add("left", 1)
            while num_left < self.context.size and time.monotonic() < deadline:
                time.sleep(POLL_S)
                num_left = self.store.add("left", 0)

    def _set(self, key: str, value: Any) -> None:
        self.store.set(key, pickle.dumps(value))

    def _get(self, key: str) -> Any:
        return pickle.loads(self.store.get(key))
