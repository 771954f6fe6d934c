"""Run a function on all ranks of a run, those of a launcher or new ones on this machine, and end them together."""

from __future__ import annotations

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
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rlinf.distributed.config import DeadlinesConfig
from rlinf.distributed.deadlines import GRACE_S, DeadlineError, Watchdog, portable, report, reported, waiting
from rlinf.distributed.devices import hide_gpus, isolate_rank, own_device, rank_environment, visible_gpus
from rlinf.distributed.process_group import backend_of
from rlinf.distributed.ray.ranks import RankPlaces, RemoteRank
from rlinf.distributed.stack_dump import DUMP_SIGNAL
from rlinf.distributed.start import START_S, Place, Ranks
from rlinf.errors import EXIT_FAULT, RankError, RankKilledError, RLinfError, exit_status, print_error

GROUP_TIMEOUT = timedelta(days=1)
"""torch's own limit of a collective call, beyond every deadline: it would name no wait and show no stacks."""

ALLOCATOR = "PYTORCH_ALLOC_CONF"
"""Settings of torch's memory on GPUs, which it reads when CUDA starts."""
KILLED_HINT = (
    "SIGKILL: usually out of memory (see `dmesg`). SIGSEGV, SIGABRT: a crash in native code; its Python stack is printed "
    "above. Continue from the last checkpoint with rlinf train resume=<run folder>"
)


_of_launcher: Ranks | None = None
"""On rank 0, the ranks that torchrun or srun has started, while its command runs."""


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

    These are the ranks of ``run_with_ranks``, if a launcher has started some. Otherwise a single rank runs in this process,
    with a process group only if ``process_group`` is set, and several are started on this machine, or in ``places`` by Ray. Each
    of several ranks sees only its own GPU (``rlinf.distributed.devices``) and has ``deadlines`` in seconds by name (None: those
    of ``DeadlinesConfig``).

    A rank that fails or is killed ends the others, and the first error is raised here. SIGINT, SIGTERM, SIGUSR1 and SIGHUP
    reach every rank that is started here as SIGTERM; a second SIGINT kills them. None of these ranks outlives this call or this process.

    Raises:
        RLinfError: That of a rank, unchanged; ConfigError if there are fewer GPUs than ranks.
        DeadlineError: The ranks waited for each other for too long.
        RankKilledError: A signal has killed a rank.
        RankError: Any other error of a rank, with its traceback.
        SystemExit: 128 + signal number, after a signal and an orderly end of all ranks.
        KeyboardInterrupt: SIGINT came before the ranks could end in an orderly way.
    """
    deadlines = asdict(DeadlinesConfig()) if deadlines is None else deadlines
    if _of_launcher is not None:
        work = (function, argument, device, dict(deadlines), os.environ.get(ALLOCATOR))
        _of_launcher.send(work)
        return _run_with_launcher(_of_launcher, *work)
    if num_processes == 1:
        if process_group:
            _join_group(device, dist.HashStore(), 0, 1)
        try:
            function(argument)
        finally:
            if process_group:
                dist.destroy_process_group()
        return
    on_gpus_here = device == "cuda" and places is None
    gpus = visible_gpus(os.environ, torch.cuda.device_count()) if on_gpus_here else []
    if on_gpus_here:
        rank_environment(os.environ, gpus, num_processes - 1)  # raises if the last rank has no GPU
    # The store listens before its port is passed on: a port that is merely looked up may be taken before it is used.
    store = _store("127.0.0.1" if places is None else places.host)
    processes: list[Any] = []
    received: list[int] = []
    killed: list[str] = []
    faults: list[str] = []
    hung: set[int] = set()

    def forward(number: int, _frame: object) -> None:
        kill = bool(received) and number == signal.SIGINT
        received.append(number)
        for process in processes:
            if process.is_alive():
                process.kill() if kill else process.terminate()

    previous = {
        number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    }
    if previous[signal.SIGHUP] == signal.SIG_IGN:  # nohup
        del previous[signal.SIGHUP]
    try:
        for number in previous.keys() - {signal.SIGTERM}:
            signal.signal(number, signal.SIG_IGN)  # inherited by the ranks, which a terminal would signal too
        context = None
        if places is None:
            arguments = (function, argument, num_processes, store.port, device, gpus, deadlines)
            context = mp.start_processes(_run_rank, arguments, nprocs=num_processes, join=False, start_method="spawn")
            processes += context.processes
        else:
            arguments = (function, argument, num_processes, places.host, store.port, device, deadlines)
            processes += places.start(_run_placed_rank, arguments, store.port)
        for number in previous:
            signal.signal(number, forward)
        # The other ranks would wait for a failed one forever, so its end ends them all.
        while alive := [process for process in processes if process.is_alive()]:
            # Checked before each wait: a process closes its sentinel a moment before it has an exit code.
            if received or not any(process.exitcode for process in processes):
                multiprocessing.connection.wait([process.sentinel for process in alive])
                continue
            hangs = isinstance(reported(store), DeadlineError)
            for process in processes:
                if hangs and process.is_alive():
                    _signal(process, DUMP_SIGNAL)  # it could not answer, perhaps because it holds Python's lock
            # A rank inside a collective call cannot run its signal handler, so it is killed.
            for index, process in enumerate(processes):
                process.join(1.0 if hangs else GRACE_S)
                if process.exitcode is None:
                    hung.add(index)
                    process.kill()
                    process.join()
            break
        for index, process in enumerate(processes):
            if isinstance(process, RemoteRank) and process.fault:
                faults.append(f"Rank {index} could not be run: {process.fault}")
            elif isinstance(process, RemoteRank) and process.lost:
                killed.append(f"Rank {index} was lost: {process.lost}")
            elif process.exitcode < 0 and index not in hung:
                killed.append(f"Rank {index} was killed by {signal.Signals(-process.exitcode).name}")
        error = reported(store)
        if isinstance(error, (RLinfError, DeadlineError)):
            raise error
        if received:
            if received[0] == signal.SIGINT and processes[0].exitcode == -signal.SIGTERM:
                raise KeyboardInterrupt  # the ranks had not installed their handlers yet
            sys.exit(128 + received[0])
        if faults:
            raise RankError("; ".join(faults))
        if killed:  # the errors of the others (lost connections) are only its consequence
            raise RankKilledError(f"{'; '.join(killed)}. {KILLED_HINT}")
        if error is not None:
            raise error
        for index, process in enumerate(processes):
            if process.exitcode and context is None:
                raise RankError(f"Rank {index} ended with status {process.exitcode}; the log says why")
        while context is not None and not context.join():
            pass
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        for process in processes:
            if process.is_alive():
                process.terminate()
            process.join()
            if isinstance(process, RemoteRank):
                process.end_agent()


def _store(host: str) -> dist.TCPStore:
    """Open a store at one address of this machine: by itself it listens on all, and what is in it is unpickled."""
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


def run_with_ranks(place: Place, words: Sequence[str], command: Callable[[], int]) -> int:
    """Run a command on rank 0 of the processes that a launcher has started; the others take part in what it launches.

    An error of the user, or of a rank, is printed by every rank. Return the exit status.

    Args:
        place: Of this process.
        words: The command with its arguments, which must be the same on all ranks.
        command: Called on rank 0 only.
    """
    faulthandler.enable()
    try:
        store = dist.TCPStore(
            *place.address, is_master=place.serves, timeout=timedelta(seconds=START_S), multi_tenant=True
        )
    except dist.DistError as error:
        print_error(RankError(f"Rank {place.rank} cannot reach rank 0 at {':'.join(map(str, place.address))}: {error}"))
        return EXIT_FAULT
    # torchrun --max-restarts starts the ranks again at the same store.
    ranks = Ranks(place, dist.PrefixStore(f"rlinf/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store))
    try:
        ranks.compare(words)
        gpus = visible_gpus(os.environ, torch.cuda.device_count())
        if place.local_rank < len(gpus):
            isolate_rank(gpus, place.local_rank)  # before CUDA starts
        if place.rank == 0:
            return _lead(ranks, command)
        while not isinstance(work := ranks.take(), int):
            _run_with_launcher(ranks, *work)
        return work
    except (RLinfError, RankError) as error:
        print_error(error)
        return exit_status(error)
    except dist.DistError as error:
        print_error(RankError(f"Rank {place.rank} has lost the other ranks: {error}"))
        return EXIT_FAULT
    finally:
        ranks.leave()


def _lead(ranks: Ranks, command: Callable[[], int]) -> int:
    """Run the command of rank 0 and tell the others how it has ended."""
    global _of_launcher
    _of_launcher, end = ranks, RankError("Rank 0 failed; its traceback is in the log")
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
        _of_launcher = None
        ranks.end(end)


def _run_with_launcher(
    ranks: Ranks, function: Callable, argument: Any, device: str, deadlines: Mapping[str, float | None],
    allocator: str | None,
) -> None:  # fmt: skip
    if allocator is not None:  # what rank 0 has set before CUDA starts
        os.environ.setdefault(ALLOCATOR, allocator)
    if device == "cuda":
        ranks.refuse_shared_gpus()
    store = dist.PrefixStore(f"launch/{ranks.num_launches}", ranks.store)
    _take_part(store, ranks.place.rank, ranks.place.size, function, argument, device, deadlines, ends_process=True)


def _run_rank(
    rank: int, function: Callable, argument: Any, num_processes: int, port: int, device: str, gpus: Sequence[str],
    deadlines: Mapping[str, float | None],
) -> None:  # fmt: skip
    if gpus:
        isolate_rank(gpus, rank)  # before CUDA starts
    faulthandler.enable()
    faulthandler.register(DUMP_SIGNAL)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(num_processes)}
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=deadlines["start"]))
    _take_part(store, rank, num_processes, function, argument, device, deadlines, ends_process=False)


def _run_placed_rank(
    rank: int, function: Callable, argument: Any, num_processes: int, host: str, port: int, device: str,
    deadlines: Mapping[str, float | None],
) -> None:  # fmt: skip
    """Be a rank that Ray has placed. An error is told to the command, which prints it."""
    if device == "cuda":
        isolate_rank(visible_gpus(os.environ, 1), 0)  # Ray shows it the GPU of its place
    else:
        hide_gpus()
    faulthandler.enable()
    faulthandler.register(DUMP_SIGNAL)
    try:
        store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=deadlines["start"]))
    except dist.DistError as error:
        print_error(
            RankError(f"Rank {rank} on {socket.gethostname()} cannot reach the command at {host}:{port}: {error}")
        )
        sys.exit(EXIT_FAULT)
    try:
        _take_part(store, rank, num_processes, function, argument, device, deadlines, ends_process=False)
    except Exception as error:  # noqa: BLE001 - it is in the store
        sys.exit(exit_status(error))


def _take_part(
    store: dist.Store, rank: int, size: int, function: Callable, argument: Any, device: str,
    deadlines: Mapping[str, float | None], ends_process: bool,
) -> None:  # fmt: skip
    """Run ``function(argument)`` as one rank of a process group; an error is raised as all ranks raise it."""
    with Watchdog(store, rank, size, deadlines, ends_process):
        try:
            with waiting("start"):
                _join_group(device, store, rank, size)
            function(argument)
            with waiting("save"):
                dist.barrier()  # gloo aborts if one rank closes its connections while another still uses them
        except Exception as error:
            # Reported before this rank closes its connections, which makes the others fail with errors that hide the cause.
            raise report(store, portable(error, rank)) from error
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def _join_group(device: str, store: dist.Store, rank: int, size: int) -> None:
    gpu = own_device() if device == "cuda" else None
    backend = backend_of(device)
    dist.init_process_group(backend, timeout=GROUP_TIMEOUT, world_size=size, rank=rank, store=store, device_id=gpu)
