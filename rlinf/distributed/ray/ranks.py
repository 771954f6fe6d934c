"""Ranks placed by Ray. Each is a child process of an actor, which forwards its output, signals and exit status.

``rlinf.distributed.launch`` defines what a rank runs, how ranks connect, and how they end together.
"""

from __future__ import annotations

import os
import pickle
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rlinf.distributed.child_process import Failure, exit_with_parent, failure_in
from rlinf.distributed.devices import CHOSEN_EGL_DEVICE, EGL_DEVICE
from rlinf.errors import EXIT_FAULT, ConfigError, RankKilledError

KILL_S = 10.0
"""Time allowed for an actor to kill its rank before its machine is considered lost, in seconds."""
DRAIN_S = 1.0
"""Seconds to continue reading a rank's output after it ends, because its children may still have it open."""
FORWARDED = (
    "HF_",
    "MUJOCO_",
    "NCCL_",
    "GLOO_",
    "OMP_",
    "MKL_",
    "PYTORCH_",
    "TOKENIZERS_",
    "TORCH",
    "TRANSFORMERS_",
    "WANDB_",
)
"""Prefixes of variables copied from the command. All other variables come from Ray's daemon on the rank's machine."""
_START = """
import os, sys
# A rank runs the code of the command, so the command's import path comes before this machine's.
path = sys.argv[1].split(os.pathsep)
sys.path[:] = path + [entry for entry in sys.path[1:] if entry not in path]
from rlinf.distributed.ray.ranks import run_rank
run_rank()
"""


class RankAgent:
    """A Ray actor that starts one rank as a child process, like a torchrun agent."""

    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None
        self._started = threading.Event()

    def where(self) -> str:
        """Return Ray's node ID for this machine."""
        import ray

        return ray.get_runtime_context().get_node_id()

    def check(self, check: Callable[[], None]) -> Failure | None:
        """Run a check on this machine, and return its error if it fails."""
        return failure_in(check)

    def run(
        self, work: bytes, path: Sequence[str], environment: Mapping[str, str], folder: str
    ) -> Iterator[tuple[int, bytes] | int]:
        """Start the rank. Yield (stream number, output) as output arrives, and finally the exit status.

        Args:
            work: Pickled function and arguments for ``run_rank``.
            path: First entries of the rank's ``sys.path``.
            environment: Additional environment variables.
            folder: Working directory of the rank.
        """
        # Ray sets OMP_NUM_THREADS to the actor's CPU count, but the command chooses the rank's thread count.
        inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        self._process = process = subprocess.Popen(
            [sys.executable, "-c", _START, os.pathsep.join(path), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=inherited | dict(environment),
            cwd=folder,
            start_new_session=True,  # on this machine, a terminal should signal only the command, which forwards signals
        )
        self._started.set()
        with process.stdin:
            process.stdin.write(work)
        yield from _output(process)
        yield process.wait()

    def signal(self, number: int) -> None:
        """Send a signal to the rank if it has not ended."""
        self._started.wait()
        self._process.send_signal(number)


def _output(process: subprocess.Popen) -> Iterator[tuple[int, bytes]]:
    """Yield a process's output until it ends, tagged 1 for stdout or 2 for stderr."""
    end = None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ, 1)
        selector.register(process.stderr, selectors.EVENT_READ, 2)
        while selector.get_map() and (end is None or time.monotonic() < end):
            for key, _ in selector.select(timeout=0.5):
                data = os.read(key.fd, 1 << 16)
                if data:
                    yield key.data, data
                else:
                    selector.unregister(key.fileobj)
            if end is None and process.poll() is not None:
                end = time.monotonic() + DRAIN_S


def run_rank() -> None:
    """Run the function sent by the command to stdin, as a rank."""
    threading.Thread(target=exit_with_parent, args=(int(sys.argv[2]),), daemon=True).start()
    # Clear sys.argv because some simulators parse it.
    del sys.argv[1:]
    function, arguments = pickle.load(sys.stdin.buffer)
    function(*arguments)


class RemoteRank:
    """The command's handle for a remote rank, with the ``multiprocessing.Process`` methods used by ``launch``."""

    def __init__(self, agent: Any, output: Any) -> None:
        self._agent, self._output = agent, output
        self.exitcode: int | None = None
        self.lost: str | None = None  # the reason if its exit status is unknown
        self.fault: str | None = None  # an actor error: the rank did not run, or its outcome is unknown
        self._killed_at: float | None = None
        self._ending = threading.Lock()
        self.sentinel, self._writer = os.pipe()
        self._thread = threading.Thread(target=self._follow, name="rank output", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        """Copy the rank's output to this process's streams until the rank ends."""
        import ray

        try:
            for reference in self._output:
                message = ray.get(reference)
                if isinstance(message, int):
                    self._end(message)
                    continue
                stream, data = message
                # Ignore errors such as a closed stream or a full disk, so that the exit status is still received.
                with suppress(OSError):
                    while data:
                        data = data[os.write(stream, data) :]
            self._end(-signal.SIGKILL, "its actor ended without an exit status")
        except ray.exceptions.RayTaskError as error:
            self._end(EXIT_FAULT, fault=str(error).strip().rpartition("\n")[2])
        except ray.exceptions.RayError as error:
            self._end(-signal.SIGKILL, str(error).strip().partition("\n")[0].rstrip("."))
        except Exception as error:  # noqa: BLE001 - the command must learn that the rank has ended
            self._end(-signal.SIGKILL, f"{type(error).__name__}: {error}")

    def _end(self, exitcode: int, lost: str | None = None, fault: str | None = None) -> None:
        """Record that the rank has ended."""
        # Only the first call has an effect, because both `join` and the thread of `_follow` may call this.
        with self._ending:
            if self.exitcode is None:
                self.lost, self.fault = lost, fault
                self.exitcode = exitcode
                os.close(self._writer)

    def is_alive(self) -> bool:
        """Return whether the rank is not known to have ended."""
        return self.exitcode is None

    def send_signal(self, number: int) -> None:
        """Send a signal to the rank without waiting."""
        self._agent.signal.remote(number)

    def terminate(self) -> None:
        """Send SIGTERM to the rank."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the rank. ``join`` then returns within ``KILL_S``."""
        self._killed_at = time.monotonic()
        self.send_signal(signal.SIGKILL)

    def join(self, timeout: float | None = None) -> None:
        """Wait until the rank has ended."""
        if self._killed_at is not None:
            timeout = max(0.0, self._killed_at + KILL_S - time.monotonic())
        self._thread.join(timeout)
        if self._killed_at is not None and self.is_alive():
            self._end(-signal.SIGKILL, "its machine does not respond")

    def end_agent(self) -> None:
        """End the actor along with the rank's remaining processes."""
        import ray

        ray.kill(self._agent)


@dataclass(frozen=True)
class RankPlaces:
    """Actors that can start ranks, in rank order. Ranks on the same machine are consecutive."""

    host: str  # this machine's address, as seen by the ranks
    agents: Sequence[Any]
    nodes: Sequence[str]  # node ID of each actor's machine

    @classmethod
    def of(cls, group: str, host: str, start_s: float, check: Callable[[], None] | None = None) -> RankPlaces:
        """Start an actor in each place of a Ray placement group, and run ``check`` in each actor.

        Raise ConfigError if a check fails or no capacity becomes free within ``start_s``; raise RankKilledError if an actor is lost.
        """
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        places = placement_group(group)
        agents: list[Any] = []
        for bundle, needs in enumerate(places.bundle_specs):
            place = PlacementGroupSchedulingStrategy(places, placement_group_bundle_index=bundle)
            options = {"num_cpus": needs["CPU"], "num_gpus": needs.get("GPU", 0), "max_concurrency": 2}
            agents.append(ray.remote(scheduling_strategy=place, **options)(RankAgent).remote())
        try:
            nodes = _nodes_of(agents, start_s, check)
        except Exception:
            # Otherwise, the actors would occupy their places, and new actors could not start there.
            for agent in agents:
                ray.kill(agent)
            raise
        order = neighbours_first(nodes, ray.get_runtime_context().get_node_id())
        return cls(host, [agents[index] for index in order], [nodes[index] for index in order])

    def start(self, function: Callable[..., None], arguments: Sequence[Any], port: int) -> list[RemoteRank]:
        """Start all ranks with torchrun's environment variables. Each rank calls ``function(rank, *arguments)``."""
        common = {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}
        # This package chose the value for this machine's first GPU, so it is wrong for a rank.
        if common.get(EGL_DEVICE) == os.environ.get(CHOSEN_EGL_DEVICE):
            common.pop(EGL_DEVICE, None)
        common |= {"WORLD_SIZE": str(len(self.agents)), "MASTER_ADDR": self.host, "MASTER_PORT": str(port)}
        path = [os.path.abspath(entry) for entry in sys.path]
        ranks = []
        for rank, (agent, node) in enumerate(zip(self.agents, self.nodes, strict=True)):
            local_rank, local_size = self.nodes[:rank].count(node), self.nodes.count(node)
            numbers = {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(local_size)}
            work = pickle.dumps((function, (rank, *arguments)))
            ranks.append(RemoteRank(agent, agent.run.remote(work, path, common | numbers, os.getcwd())))
        return ranks


def _nodes_of(agents: Sequence[Any], start_s: float, check: Callable[[], None] | None) -> list[str]:
    """Return the node IDs of the actors' machines after running ``check`` in each actor."""
    import ray

    try:
        nodes = ray.get([agent.where.remote() for agent in agents], timeout=start_s)
        failures = [] if check is None else ray.get([agent.check.remote(check) for agent in agents], timeout=start_s)
    except ray.exceptions.GetTimeoutError:
        raise ConfigError(
            f"The Ray cluster has had no free places for {len(agents)} ranks for {start_s:g} s, or a machine does not respond. Replace "
            "lost machines, or set a longer cluster.deadlines.start"
        ) from None
    except ray.exceptions.RayError as error:
        lost = ray.exceptions
        died = isinstance(error, (lost.RayActorError, lost.NodeDiedError, lost.OutOfMemoryError))
        # `actor_init_failed` means that the actor could not import its class: rlinf is missing or different on its machine.
        if died and not getattr(error, "actor_init_failed", False):
            first = str(error).strip().partition("\n")[0].rstrip(".")
            raise RankKilledError(f"A rank was lost before it could start: {first}") from error
        raise ConfigError(
            f"A machine in the Ray cluster cannot report its rlinf version: {error}\nInstall the same version on all machines"
        ) from error
    raise_failure(failures)
    return nodes


def raise_failure(failures: Sequence[Failure | None]) -> None:
    """Raise the first machine's failure, if any, as a ConfigError."""
    for failure in filter(None, failures):
        raise ConfigError(failure.message)


def placement_group(number: str) -> Any:
    """Return the Ray placement group with an ID."""
    from ray import PlacementGroupID
    from ray.util.placement_group import PlacementGroup

    return PlacementGroup(PlacementGroupID(bytes.fromhex(number)))


def neighbours_first(nodes: Sequence[str], first: str) -> list[int]:
    """Order places so that places on the same machine are consecutive, starting with machine ``first``."""
    return sorted(range(len(nodes)), key=lambda index: (nodes[index] != first, nodes.index(nodes[index]), index))
