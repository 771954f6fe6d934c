"""Start the ranks of a run on this machine, and end them together."""

from __future__ import annotations

import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rlinf.distributed.devices import isolate_rank, own_device, rank_environment, visible_gpus
from rlinf.distributed.process_group import backend_of
from rlinf.errors import RankError, RLinfError

GRACE_S = 5.0
"""Seconds that the other ranks have to end on their own after one has failed."""

TIMEOUT_S = 3600.0
"""Seconds that a rank waits for another: longer than any work that one rank does alone, such as saving weights."""

TIMEOUT_HINT = (
    " It waited {:g} s for another rank. If that one only needs longer, set cluster.timeout_s=<more>; else its stack, or "
    "the log of its simulators, shows what it waits for."
)
KILLED_HINT = (
    "SIGKILL: usually out of memory (see `dmesg`). SIGSEGV, SIGABRT: a crash in native code; its Python stack is printed "
    "above. Continue from the last checkpoint with rlinf train resume=<run folder>"
)


def launch(
    function: Callable[[Any], None],
    argument: Any,
    num_processes: int,
    device: str,
    process_group: bool = False,
    timeout_s: float = TIMEOUT_S,
) -> None:
    """Run ``function(argument)`` on ``num_processes`` ranks with a process group.

    A single rank runs in this process, with a process group only if ``process_group`` is set. Each of several ranks sees
    only its own GPU (``rlinf.distributed.devices``) and fails after waiting ``timeout_s`` seconds for the others.

    A rank that fails or is killed ends the others, and the first error is raised here. SIGINT, SIGTERM and SIGHUP reach
    every rank as SIGTERM; a second SIGINT kills them. No rank outlives this call or this process.

    Raises:
        RLinfError: That of a rank, unchanged; ConfigError if there are fewer GPUs than ranks.
        RankError: Any other error of a rank, with its traceback, or the signal that killed a rank.
        SystemExit: 128 + signal number, after a signal and an orderly end of all ranks.
        KeyboardInterrupt: SIGINT came before the ranks could end in an orderly way.
    """
    if num_processes == 1:
        if process_group:
            _join_group(device, dist.HashStore(), 0, 1)
        try:
            function(argument)
        finally:
            if process_group:
                dist.destroy_process_group()
        return
    gpus = visible_gpus(os.environ, torch.cuda.device_count()) if device == "cuda" else []
    if device == "cuda":
        rank_environment(os.environ, gpus, num_processes - 1)  # raises if the last rank has no GPU
    # The store listens before its port is passed on: a port that is merely looked up may be taken before it is used.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    errors = multiprocessing.get_context("spawn").SimpleQueue()
    arguments = (function, argument, num_processes, store.port, device, errors, gpus, timeout_s)
    processes: list[Any] = []
    received: list[int] = []
    killed: list[str] = []

    def forward(number: int, _frame: object) -> None:
        kill = bool(received) and number == signal.SIGINT
        received.append(number)
        for process in processes:
            if process.is_alive():
                process.kill() if kill else process.terminate()

    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    if previous[signal.SIGHUP] == signal.SIG_IGN:  # nohup
        del previous[signal.SIGHUP]
    try:
        for number in previous.keys() - {signal.SIGTERM}:
            signal.signal(number, signal.SIG_IGN)  # inherited by the ranks, which a terminal would signal too
        context = mp.start_processes(_run_rank, arguments, nprocs=num_processes, join=False, start_method="spawn")
        processes += context.processes
        for number in previous:
            signal.signal(number, forward)
        # The other ranks would wait for a failed one forever, so its end ends them all.
        while alive := [process for process in processes if process.is_alive()]:
            # Checked before each wait: a process closes its sentinel a moment before it has an exit code.
            if received or not any(process.exitcode for process in processes):
                multiprocessing.connection.wait([process.sentinel for process in alive])
                continue
            # A rank inside a collective call cannot run its signal handler, so it is killed.
            for index, process in enumerate(processes):
                process.join(GRACE_S)
                if process.exitcode is None:
                    process.kill()
                    process.join()
                elif process.exitcode < 0:
                    killed.append(f"Rank {index} was killed by {signal.Signals(-process.exitcode).name}")
            break
        error = None if errors.empty() else errors.get()
        if isinstance(error, RLinfError):
            raise error
        if received:
            if received[0] == signal.SIGINT and processes[0].exitcode == -signal.SIGTERM:
                raise KeyboardInterrupt  # the ranks had not installed their handlers yet
            sys.exit(128 + received[0])
        if killed:  # the errors of the others (lost connections) are only its consequence
            raise RankError(f"{'; '.join(killed)}. {KILLED_HINT}")
        if error is not None:
            raise error
        while not context.join():
            pass
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        for process in processes:
            if process.is_alive():
                process.terminate()
            process.join()


def _join_group(device: str, store: dist.Store, rank: int, size: int, timeout: timedelta | None = None) -> None:
    gpu = own_device() if device == "cuda" else None
    dist.init_process_group(backend_of(device), timeout=timeout, world_size=size, rank=rank, store=store, device_id=gpu)


def _run_rank(
    rank: int, function: Callable, argument: Any, num_processes: int, port: int, device: str, errors: Any,
    gpus: Sequence[str], timeout_s: float,
) -> None:  # fmt: skip
    if gpus:
        isolate_rank(gpus, rank)  # before CUDA starts
    faulthandler.enable()
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    os.environ["LOCAL_RANK"] = str(rank)
    timeout = timedelta(seconds=timeout_s)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    _join_group(device, store, rank, num_processes, timeout)
    try:
        function(argument)
        dist.barrier()  # gloo aborts if one rank closes its connections while another still uses them
    except Exception as error:
        # Reported before this rank closes its connections, which makes the other ranks fail with errors that hide the cause.
        if errors.empty():
            if isinstance(error, RLinfError):
                errors.put(type(error)("\n".join([str(error), *getattr(error, "__notes__", [])])))
            else:
                waited = TIMEOUT_HINT.format(timeout_s) if waited_for_a_rank(error) else ""
                errors.put(RankError(f"Rank {rank} failed.{waited}\n{traceback.format_exc()[-20000:]}"))
        raise
    finally:
        dist.destroy_process_group()


def waited_for_a_rank(error: Exception) -> bool:
    """Return whether a collective timed out: a torch.distributed error, or gloo's, which has no class of its own."""
    if isinstance(error, dist.DistError):
        return any(word in str(error).lower() for word in ("timed out", "timeout"))
    return isinstance(error, RuntimeError) and "Timed out waiting" in str(error)
