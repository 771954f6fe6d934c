"""Ranks that Ray places: each is a child process of an actor, which forwards its output, signals and exit status.

``rlinf.distributed.launch`` defines the work of a rank, how ranks connect and how they end together.
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
"""Seconds in which an actor must have killed its rank; else its machine counts as lost."""
DRAIN_S = 1.0
"""Seconds after the end of a rank in which its own children may still hold its output open."""
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
"""Prefixes of variables that are copied from the command; all remaining variables come from Ray's daemon on the rank's machine."""
_START = """
import os, sys
# A rank runs the code of the command, so the command's import path comes before this machine's.
path = sys.argv[1].split(os.pathsep)
sys.path[:] = path + [entry for entry in sys.path[1:] if entry not in path]
from rlinf.distributed.ray.ranks import run_rank
run_rank()
"""


class RankAgent:
    """A Ray actor that starts one rank as a child process, like an agent of torchrun."""

    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None
        self._started = threading.Event()

    def where(self) -> str:
        """Return Ray's id of this machine."""
        import ray

        return ray.get_runtime_context().get_node_id()

    def check(self, check: Callable[[], None]) -> Failure | None:
        """Run a check of this machine; return its error."""
        return failure_in(check)

    def run(
        self, work: bytes, path: Sequence[str], environment: Mapping[str, str], folder: str
    ) -> Iterator[tuple[int, bytes] | int]:
        """Start the rank; yield its output with the number of the stream as it arrives, and finally its exit status.

        Args:
            work: Function and arguments for ``run_rank``, pickled.
            path: First entries of the rank's ``sys.path``.
            environment: Additional variables.
            folder: Its working folder.
        """
        # Ray sets OMP_NUM_THREADS to the CPUs of the actor; the command decides on the rank's threads.
        inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        self._process = process = subprocess.Popen(
            [sys.executable, "-c", _START, os.pathsep.join(path), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=inherited | dict(environment),
            cwd=folder,
            start_new_session=True,  # a terminal on this machine signals the command, which forwards it
        )
        self._started.set()
        with process.stdin:
            process.stdin.write(work)
        yield from _output(process)
        yield process.wait()

    def signal(self, number: int) -> None:
        """Send a signal to the rank, unless it has ended."""
        self._started.wait()
        self._process.send_signal(number)


def _output(process: subprocess.Popen) -> Iterator[tuple[int, bytes]]:
    """Yield a process's output, with 1 or 2 for stdout or stderr, until it has ended."""
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
    """Run the function that the command has sent to stdin, as a rank."""
    threading.Thread(target=exit_with_parent, args=(int(sys.argv[2]),), daemon=True).start()
    # Some simulators parse sys.argv.
    del sys.argv[1:]
    function, arguments = pickle.load(sys.stdin.buffer)
    function(*arguments)


class RemoteRank:
    """The command's handle of a rank, with the methods of ``multiprocessing.Process`` that ``launch`` uses."""

    def __init__(self, agent: Any, output: Any) -> None:
        self._agent, self._output = agent, output
        self.exitcode: int | None = None
        self.lost: str | None = None  # why its exit status is unknown
        self.fault: str | None = None  # an error of its actor: the rank did not run, or its end is unknown
        self._killed_at: float | None = None
        self._ending = threading.Lock()
        self.sentinel, self._writer = os.pipe()
        self._thread = threading.Thread(target=self._follow, name="rank output", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        """Copy the rank's output to the streams of this process, until it has ended."""
        import ray

        try:
            for reference in self._output:
                message = ray.get(reference)
                if isinstance(message, int):
                    self._end(message)
                    continue
                stream, data = message
                # Errors of a closed stream or a full disk are suppressed: the exit status must still be received.
                with suppress(OSError):
                    while data:
                        data = data[os.write(stream, data) :]
            self._end(-signal.SIGKILL, "its actor has ended without an exit status")
        except ray.exceptions.RayTaskError as error:
            self._end(EXIT_FAULT, fault=str(error).strip().rpartition("\n")[2])
        except ray.exceptions.RayError as error:
            self._end(-signal.SIGKILL, str(error).strip().partition("\n")[0].rstrip("."))
        except Exception as error:  # noqa: BLE001 - the command waits for the end of the rank in any case
            self._end(-signal.SIGKILL, f"{type(error).__name__}: {error}")

    def _end(self, exitcode: int, lost: str | None = None, fault: str | None = None) -> None:
        """Record the end of the rank."""
        # Only the first call counts: the thread of `_follow` and `join` may both call this.
        with self._ending:
            if self.exitcode is None:
                self.lost, self.fault = lost, fault
                self.exitcode = exitcode
                os.close(self._writer)

    def is_alive(self) -> bool:
        """Return whether the end of the rank is not known yet."""
        return self.exitcode is None

    def send_signal(self, number: int) -> None:
        """Send a signal to the rank; do not wait."""
        self._agent.signal.remote(number)

    def terminate(self) -> None:
        """Send SIGTERM to the rank."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the rank; ``join`` then takes ``KILL_S`` at most."""
        self._killed_at = time.monotonic()
        self.send_signal(signal.SIGKILL)

    def join(self, timeout: float | None = None) -> None:
        """Wait until the rank has ended."""
        if self._killed_at is not None:
            timeout = max(0.0, self._killed_at + KILL_S - time.monotonic())
        self._thread.join(timeout)
        if self._killed_at is not None and self.is_alive():
            self._end(-signal.SIGKILL, "its machine does not reply")

    def end_agent(self) -> None:
        """End the actor, and with it the rank's remaining processes."""
        import ray

        ray.kill(self._agent)


@dataclass(frozen=True)
class RankPlaces:
    """Actors that can start ranks, in rank order; the ranks of a machine are consecutive."""

    host: str  # address of this machine for the ranks
    agents: Sequence[Any]
    nodes: Sequence[str]  # the id of each actor's machine

    @classmethod
    def of(cls, group: str, host: str, start_s: float, check: Callable[[], None] | None = None) -> RankPlaces:
        """Start an actor in each place of a Ray placement group, and run ``check`` on each machine.

        Raise ConfigError if a check fails, or no machine has free capacity within ``start_s``; RankKilledError if an actor is lost.
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
            # Otherwise they would hold their places, and the next actors could not start there.
            for agent in agents:
                ray.kill(agent)
            raise
        order = neighbours_first(nodes, ray.get_runtime_context().get_node_id())
        return cls(host, [agents[index] for index in order], [nodes[index] for index in order])

    def start(self, function: Callable[..., None], arguments: Sequence[Any], port: int) -> list[RemoteRank]:
        """Start all ranks, with torchrun's environment variables; each calls ``function(rank, *arguments)``."""
        common = {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}
        # Chosen by this package for the first GPU of this machine, so wrong for a rank's.
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
    """Return the ids of the actors' machines, after ``check`` has run on each."""
    import ray

    try:
        nodes = ray.get([agent.where.remote() for agent in agents], timeout=start_s)
        failures = [] if check is None else ray.get([agent.check.remote(check) for agent in agents], timeout=start_s)
    except ray.exceptions.GetTimeoutError:
        raise ConfigError(
            f"The Ray cluster has had no free places for {len(agents)} ranks for {start_s:g} s, or a machine does not reply. Replace lost "
            "machines, or set a longer cluster.deadlines.start"
        ) from None
    except ray.exceptions.RayError as error:
        lost = ray.exceptions
        died = isinstance(error, (lost.RayActorError, lost.NodeDiedError, lost.OutOfMemoryError))
        # `actor_init_failed`: the actor could not import its class, because the machine has a different rlinf or none.
        if died and not getattr(error, "actor_init_failed", False):
            first = str(error).strip().partition("\n")[0].rstrip(".")
            raise RankKilledError(f"A rank was lost before it could start: {first}") from error
        raise ConfigError(
            f"A machine of the Ray cluster cannot report its version of rlinf: {error}\nInstall the same rlinf on all machines"
        ) from error
    raise_failure(failures)
    return nodes


def raise_failure(failures: Sequence[Failure | None]) -> None:
    """Raise the first failure of a machine, if there is any, as ConfigError."""
    for failure in filter(None, failures):
        raise ConfigError(failure.message)


def placement_group(number: str) -> Any:
    """Return Ray's placement group by its id."""
    from ray import PlacementGroupID
    from ray.util.placement_group import PlacementGroup

    return PlacementGroup(PlacementGroupID(bytes.fromhex(number)))


def neighbours_first(nodes: Sequence[str], first: str) -> list[int]:
    """Return an order of places in which those of a machine are consecutive, starting with the machine ``first``."""
    return sorted(range(len(nodes)), key=lambda index: (nodes[index] != first, nodes.index(nodes[index]), index))
