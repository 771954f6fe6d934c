"""Runs a function on all ranks, started by a launcher or by this module, and ends them together."""

import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rlinf.distributed.config import DeadlinesConfig
from rlinf.distributed.deadlines import GRACE_S, DeadlineError, Watchdog, deadline, portable, report, reported
from rlinf.distributed.devices import (
    gpu_uuids,
    hide_gpus,
    isolate_rank,
    own_device,
    rank_environment,
    visible_gpus,
)
from rlinf.distributed.process_group import GROUP_TIMEOUT, backend_of
from rlinf.distributed.ray.ranks import RankPlaces, RemoteRank
from rlinf.distributed.stack_dump import DUMP_SIGNAL
from rlinf.distributed.start import START_S, LaunchContext, LauncherRanks, agree, reject_shared_gpus
from rlinf.errors import EXIT_FAULT, RankError, RankKilledError, RLinfError, exit_status, print_error

FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
# Make ``torch.cuda.is_available`` query NVML, so that it does not start CUDA before a rank has hidden other GPUs.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
ALLOCATOR = "PYTORCH_ALLOC_CONF"
"""Environment variable with settings of torch's GPU allocator, read when CUDA starts."""
KILLED_HINT = (
    "SIGKILL: usually out of memory (see `dmesg`). SIGSEGV, SIGABRT: a crash in native code; its Python stack is printed "
    "above. Continue from the last checkpoint with rlinf train resume=<run folder>"
)


_launcher_ranks: LauncherRanks | None = None
"""The ranks started by torchrun or srun. Set on rank 0 while the command runs."""


class Work(NamedTuple):
    """A call of ``function(argument)`` on every rank. ``deadlines`` are in seconds, named as in ``DeadlinesConfig``."""

    function: Callable[[Any], None]
    argument: Any
    device: str
    deadlines: Mapping[str, float | None]


def launch(
    function: Callable[[Any], None],
    argument: Any,
    num_processes: int,
    device: str,
    process_group: bool = False,
    deadlines: Mapping[str, float | None] | None = None,
    places: RankPlaces | None = None,
) -> None:
    """Run ``function(argument)`` on ``num_processes`` ranks with a process group.

    Inside ``run_with_ranks``, these are the launcher's ranks. Otherwise, a single rank runs in this process, with a process
    group only if ``process_group`` is set. Multiple ranks are started on this machine, or by Ray in ``places``; each sees
    only its own GPU (see ``rlinf.distributed.devices``) and is subject to ``deadlines``, in seconds by name (by default,
    those in ``DeadlinesConfig``).

    If a rank fails or is killed, all ranks end, and the first error is raised here: an RLinfError unchanged, RankKilledError
    after an external signal, otherwise RankError with the traceback. SIGINT, SIGTERM, SIGUSR1 and SIGHUP are forwarded as
    SIGTERM to every rank started here, and end this call with SystemExit. A second SIGINT kills the ranks. No rank outlives this call.
    """
    work = Work(function, argument, device, asdict(DeadlinesConfig()) if deadlines is None else dict(deadlines))
    if _launcher_ranks is not None:
        allocator = os.environ.get(ALLOCATOR)
        _launcher_ranks.send((work, allocator))
        return _run_with_launcher(_launcher_ranks, work, allocator)
    if num_processes == 1 and not process_group:
        return function(argument)
    if num_processes == 1:
        _join_group(device, dist.HashStore(), 0, 1)
        try:
            return function(argument)
        finally:
            dist.destroy_process_group()
    gpus: Sequence[str] = ()
    if device == "cuda" and places is None:
        gpus = visible_gpus(os.environ, torch.cuda.device_count())
        # Raise an error before any rank starts if there are too few GPUs.
        rank_environment(os.environ, gpus, num_processes - 1)
    with Ranks(places) as ranks:
        ranks.start(work, num_processes, gpus)
        ranks.wait()
        ranks.raise_verdict()


class Ranks:
    """The ranks of one ``launch``, run as local or Ray processes. As a context manager, it ends them on exit."""

    def __init__(self, places: RankPlaces | None) -> None:
        self.places = places
        # `RemoteRank` implements the methods of `multiprocessing.Process` that are used here.
        self.processes: list[Any] = []
        self.signals: list[int] = []  # received and forwarded
        self.hung: set[int] = set()  # killed because a different rank had failed
        # The store must be listening before its port is passed on: a port that is free now may be in use later.
        self._store = _store("127.0.0.1" if places is None else places.host)
        self._spawned: mp.ProcessContext | None = None
        self._handlers = {number: signal.getsignal(number) for number in FORWARDED_SIGNALS}
        if self._handlers[signal.SIGHUP] == signal.SIG_IGN:  # nohup
            del self._handlers[signal.SIGHUP]

    def __enter__(self) -> Self:
        return self

    def start(self, work: Work, num_processes: int, gpus: Sequence[str]) -> None:
        """Start all ranks, then forward signals to them."""
        for number in self._handlers.keys() - {signal.SIGTERM}:
            # Ranks inherit this setting: a terminal signals the entire process group, but ranks should only be signalled by `_forward`.
            signal.signal(number, signal.SIG_IGN)
        if self.places is None:
            arguments = (work, num_processes, self._store.port, gpus)
            self._spawned = mp.start_processes(
                _run_rank, arguments, nprocs=num_processes, join=False, start_method="spawn"
            )
            self.processes += self._spawned.processes
        else:
            host, port = self.places.host, self._store.port
            self.processes += self.places.start(_run_placed_rank, (work, num_processes, host, port), port)
        for number in self._handlers:
            signal.signal(number, self._forward)

    def _forward(self, number: int, _frame: object) -> None:
        kill = bool(self.signals) and number == signal.SIGINT
        self.signals.append(number)
        for process in self.processes:
            if process.is_alive():
                process.kill() if kill else process.terminate()

    def wait(self) -> None:
        """Wait until all ranks have ended. If one fails, end the remaining ranks, which would otherwise wait for it forever."""
        while alive := [process for process in self.processes if process.is_alive()]:
            # Check before each wait: a process closes its sentinel slightly before its exit code is available.
            if not self.signals and any(process.exitcode for process in self.processes):
                return self._end_remaining()
            multiprocessing.connection.wait([process.sentinel for process in alive])

    def _end_remaining(self) -> None:
        hangs = isinstance(reported(self._store), DeadlineError)
        for process in self.processes:
            # A rank still alive after the deadline could not reply, perhaps because it is holding the GIL.
            if hangs and process.is_alive():
                _signal(process, DUMP_SIGNAL)
        for rank, process in enumerate(self.processes):
            process.join(1.0 if hangs else GRACE_S)
            if process.exitcode is None:
                self.hung.add(rank)
                # Use SIGKILL because a rank inside a collective call cannot run its SIGTERM handler.
                process.kill()
                process.join()

    def raise_verdict(self) -> None:
        """Raise the error that ended the ranks, unless all succeeded."""
        # Check possible causes first: a user error, a signal to the command, a lost or killed rank. Then check for consequences.
        error = reported(self._store)
        if isinstance(error, (RLinfError, DeadlineError)):
            raise error
        if self.signals:
            if self.signals[0] == signal.SIGINT and self.processes[0].exitcode == -signal.SIGTERM:
                # The ranks had not installed their handlers yet, so no run can be resumed.
                raise KeyboardInterrupt
            sys.exit(128 + self.signals[0])
        remote = [(rank, process) for rank, process in enumerate(self.processes) if isinstance(process, RemoteRank)]
        if faults := [f"Rank {rank} could not be run: {process.fault}" for rank, process in remote if process.fault]:
            raise RankError("; ".join(faults))
        if killed := [text for rank, process in enumerate(self.processes) if (text := self._killed(rank, process))]:
            raise RankKilledError(f"{'; '.join(killed)}. {KILLED_HINT}")
        if error is not None:
            raise error
        for rank, process in remote:
            if process.exitcode:
                raise RankError(f"Rank {rank} ended with status {process.exitcode}; its error is in the log")
        # `join` raises the error of a rank that ended before it could report it.
        while self._spawned is not None and not self._spawned.join():
            pass

    def _killed(self, rank: int, process: Any) -> str | None:
        """Describe how a rank was lost or killed externally, or return None."""
        if isinstance(process, RemoteRank) and process.lost:
            return f"Rank {rank} was lost: {process.lost}"
        if process.exitcode < 0 and rank not in self.hung:
            return f"Rank {rank} was killed by {signal.Signals(-process.exitcode).name}"
        return None

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        for process in self.processes:
            if process.is_alive():
                process.terminate()
            process.join()
            if isinstance(process, RemoteRank):
                process.end_agent()


def _store(host: str) -> dist.TCPStore:
    """Open a store on a single address of this machine."""
    # By default, torch listens on all addresses. Store values are unpickled, so anyone with access to it can execute code.
    listener = socket.socket()
    listener.bind((host, 0))
    listener.listen()
    port = listener.getsockname()[1]
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _signal(process: Any, number: int) -> None:
    if isinstance(process, RemoteRank):
        process.send_signal(number)
    else:
        os.kill(process.pid, number)


def run_with_ranks(context: LaunchContext, arguments: Sequence[str], command: Callable[[], int]) -> int:
    """Run a command on rank 0 of a launcher's processes, while other ranks take part in its launches. Return the exit status.

    Every rank prints user errors and rank errors. ``arguments``, the command line, must be identical on all ranks.
    """
    faulthandler.enable()
    address = ":".join(map(str, context.address))
    try:
        store = dist.TCPStore(
            *context.address, is_master=context.serves, timeout=timedelta(seconds=START_S), multi_tenant=True
        )
    except dist.DistError as error:
        print_error(RankError(f"Rank {context.rank} cannot reach rank 0 at {address}: {error}"))
        return EXIT_FAULT
    # torchrun --max-restarts reuses the same store for restarted ranks.
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
    ranks = LauncherRanks(context, dist.PrefixStore(f"rlinf/{restarts}", store))
    try:
        ranks.compare(arguments)
        gpus = visible_gpus(os.environ, torch.cuda.device_count())
        if context.local_rank < len(gpus):
            _isolate(gpus, context.local_rank)
        if context.rank == 0:
            return _lead(ranks, command)
        while not isinstance(received := ranks.take(), int):
            _run_with_launcher(ranks, *received)
        return received
    except (RLinfError, RankError) as error:
        print_error(error)
        return exit_status(error)
    except dist.DistError as error:
        print_error(RankError(f"Rank {context.rank} lost the connection to other ranks: {error}"))
        return EXIT_FAULT
    finally:
        ranks.leave()


def _lead(ranks: LauncherRanks, command: Callable[[], int]) -> int:
    """Run the command on rank 0, and send its exit status or error to other ranks."""
    global _launcher_ranks
    _launcher_ranks, end = ranks, RankError("Rank 0 failed; its traceback is in the log")
    try:
        end = command()
        return end
    except SystemExit as error:
        end = error.code if isinstance(error.code, int) else EXIT_FAULT
        raise
    except Exception as error:
        end = portable(error, 0)
        raise
    finally:
        _launcher_ranks = None
        ranks.end(end)


def _run_with_launcher(ranks: LauncherRanks, work: Work, allocator: str | None) -> None:
    """Run work as one of the launcher's ranks. ``allocator`` is rank 0's ``ALLOCATOR`` value."""
    if allocator is not None:
        os.environ.setdefault(ALLOCATOR, allocator)
    store = dist.PrefixStore(f"launch/{ranks.num_launches}", ranks.store)
    _take_part(work, store, ranks.context.rank, ranks.context.size, ends_process=True)


def _dump_stacks_on_signals() -> None:
    faulthandler.enable()
    faulthandler.register(DUMP_SIGNAL)


def _run_rank(rank: int, work: Work, num_processes: int, port: int, gpus: Sequence[str]) -> None:
    _dump_stacks_on_signals()
    parent = multiprocessing.parent_process()
    # A killed parent sends no signal, and collective calls block the main thread, so a separate thread waits for the parent.
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(num_processes)}
    store = _connected_store("127.0.0.1", port, work)
    _take_part(work, store, rank, num_processes, ends_process=False, gpus=gpus)


def _run_placed_rank(rank: int, work: Work, num_processes: int, host: str, port: int) -> None:
    """Run as a rank started by Ray. The command prints this rank's error."""
    if work.device == "cuda":
        isolate_rank(visible_gpus(os.environ, 1), 0)  # Ray exposes only this place's GPU
    else:
        hide_gpus()
    _dump_stacks_on_signals()
    try:
        store = _connected_store(host, port, work)
    except dist.DistError as error:
        here = socket.gethostname()
        print_error(RankError(f"Rank {rank} on {here} cannot reach the command at {host}:{port}: {error}"))
        sys.exit(EXIT_FAULT)
    try:
        _take_part(work, store, rank, num_processes, ends_process=False)
    except Exception as error:  # noqa: BLE001 - already in the store
        sys.exit(exit_status(error))


def _connected_store(host: str, port: int, work: Work) -> dist.TCPStore:
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=work.deadlines["start"]))


def _isolate(gpus: Sequence[str], rank: int) -> None:
    """Hide all GPUs except the rank's own; raise RankError if CUDA has already started."""
    # CUDA reads the visible GPUs when it starts; later changes to the environment have no effect.
    if torch.cuda.is_initialized():
        raise RankError(
            f"Rank {rank} started CUDA while importing modules, so it cannot hide the GPUs of other ranks. Remove code that starts "
            "CUDA, such as tensors on a GPU or torch.cuda.current_device(), from the top level of your modules"
        )
    isolate_rank(gpus, rank)


def _take_part(
    work: Work, store: dist.Store, rank: int, size: int, ends_process: bool, gpus: Sequence[str] = ()
) -> None:
    """Run work as one rank of a process group. Every rank raises the first error of any rank.

    ``gpus`` lists this machine's GPUs if the rank's own GPU, ``gpus[rank]``, has not been isolated yet.
    """
    with Watchdog(store, rank, size, work.deadlines, ends_process):
        try:
            with deadline("start"):
                if gpus:
                    _isolate(gpus, rank)
                if work.device == "cuda":
                    agree(store, rank, size, "gpus", {"gpus": gpu_uuids()}, reject_shared_gpus)
                _join_group(work.device, store, rank, size)
            work.function(work.argument)
            # gloo aborts if a rank closes its connections while a different rank is still using them.
            with deadline("save"):
                dist.barrier()
        except Exception as error:
            # Report the error before this rank closes its connections, which causes errors on other ranks that would hide it.
            raise report(store, portable(error, rank)) from error
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def _join_group(device: str, store: dist.Store, rank: int, size: int) -> None:
    gpu = own_device() if device == "cuda" else None
    backend = backend_of(device)
    dist.init_process_group(backend, timeout=GROUP_TIMEOUT, world_size=size, rank=rank, store=store, device_id=gpu)
