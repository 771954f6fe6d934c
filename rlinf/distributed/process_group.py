"""Ranks of one machine: starting them, and the few collectives that the training loop needs."""

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
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rlinf.distributed.devices import isolate_rank, own_device, rank_environment, visible_gpus
from rlinf.errors import ConfigError, RankError, RLinfError
from rlinf.types import Observation, RolloutBatch

GRACE_S = 5.0
"""Seconds that the other ranks have to end by themselves once one has failed."""

TIMEOUT_S = 3600.0
"""Seconds that a rank waits for another one: longer than any part of a run in which one works alone (saving weights, say)."""

TIMEOUT_HINT = (
    " It waited {:g} s for another rank. If that one only needs longer, set cluster.timeout_s=<more>; else its stack, or "
    "the log of its simulators, tells what it waits for."
)
KILLED_HINT = (
    "SIGKILL: mostly out of memory (`dmesg` tells). SIGSEGV, SIGABRT: a crash in native code, whose Python stack stands "
    "above. Go on from the last checkpoint with rlinf train resume=<run folder>"
)


def rank() -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def set_num_threads(num_threads: int | None, num_processes: int) -> None:
    """Give each rank its share of the cores (or ``num_threads``)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(num_threads or max(1, cores // num_processes))


def resolve_device(device: str, num_processes: int) -> str:
    """Turn ``auto`` into ``cuda`` or ``cpu``, once for all ranks.

    Raises:
        ConfigError: There are fewer GPUs than ranks.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and torch.cuda.device_count() < num_processes:
        raise ConfigError(
            f"cluster.num_processes={num_processes} ranks need a GPU each, and torch sees {torch.cuda.device_count()}. "
            "Set cluster.device=cpu, or fewer processes"
        )
    return device


GLOO = "gloo_one_thread"


def _gloo_with_one_thread(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    """Make torch's gloo with one worker thread instead of two.

    The two threads of PyTorch 2.13 assign the name of the collective that ended to one string without a lock. Names of
    more than 15 letters, as those of the gathers of FSDP, are on the heap, and now and then it is freed twice.
    """
    options = dist.ProcessGroupGloo._Options()
    options._timeout, options._threads = timeout, 1
    options._devices = [dist.ProcessGroupGloo.create_default_device()]
    return dist.ProcessGroupGloo(store, rank, size, options)


dist.Backend.register_backend(GLOO, _gloo_with_one_thread, devices=["cpu"])


def backend_of(device: str) -> str:
    """Collective backends of a device: gloo with one thread, and on GPUs nccl for what lies there.

    So numbers and objects of the loop do not take the way through the GPU, which would wait for all work on it.
    """
    return f"cpu:{GLOO},cuda:nccl" if device == "cuda" else GLOO


def launch(
    function: Callable[[Any], None],
    argument: Any,
    num_processes: int,
    device: str,
    process_group: bool = False,
    timeout_s: float = TIMEOUT_S,
) -> None:
    """Run ``function(argument)`` on ``num_processes`` ranks with a process group; in this process when it is one.

    One process has a process group only when ``process_group`` asks for it. Of several, each sees one GPU alone
    (``rlinf.distributed.devices``), and fails when it has waited ``timeout_s`` for the others.

    A rank that fails or is killed ends the others, and the first error is raised here: an ``RLinfError`` as it is.
    SIGINT, SIGTERM and SIGHUP reach every rank as SIGTERM; a second SIGINT kills them. No process outlives the call, nor this process.

    Raises:
        ConfigError: There are fewer GPUs than ranks.
        RankError: Another error of a rank, with its traceback, or the signal that killed a rank.
        SystemExit: With 128 + signal number, after a signal and an orderly end of all ranks.
        KeyboardInterrupt: After SIGINT, where it came before the ranks could end in an orderly way.
    """
    if num_processes == 1:
        if process_group:
            dist.init_process_group(
                backend_of(device),
                store=dist.HashStore(),
                rank=0,
                world_size=1,
                device_id=own_device() if device == "cuda" else None,
            )
        try:
            function(argument)
        finally:
            if process_group:
                dist.destroy_process_group()
        return
    gpus = visible_gpus(os.environ, torch.cuda.device_count()) if device == "cuda" else []
    if device == "cuda":
        rank_environment(os.environ, gpus, num_processes - 1)  # there is one for the last rank, too
    # The store listens before its port is told: a free port that is only looked for may be another's when it is used.
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
            signal.signal(number, signal.SIG_IGN)  # as the ranks do from their start: a terminal tells them too
        context = mp.start_processes(_run_rank, arguments, nprocs=num_processes, join=False, start_method="spawn")
        processes += context.processes
        for number in previous:
            signal.signal(number, forward)
        # A rank that fails leaves the others waiting for it, so its end ends them all.
        while alive := [process for process in processes if process.is_alive()]:
            # Asked before each wait: a process closes its sentinel a moment before it has an exit code.
            if received or not any(process.exitcode for process in processes):
                multiprocessing.connection.wait([process.sentinel for process in alive])
                continue
            # A rank inside a collective call cannot run its handler, so it is killed.
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
                raise KeyboardInterrupt  # before the ranks had begun to listen
            sys.exit(128 + received[0])
        if killed:  # the others then fail because its connections are gone, which is not the cause
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
    dist.init_process_group(
        backend_of(device),
        store=store,
        rank=rank,
        world_size=num_processes,
        timeout=timeout,
        device_id=own_device() if device == "cuda" else None,
    )
    try:
        function(argument)
        dist.barrier()  # gloo aborts when one rank closes its connections while another still uses them
    except Exception as error:
        # Told before this rank closes its connections, which then fails the other ranks: theirs is not the cause.
        if errors.empty():
            text = "\n".join([str(error), *getattr(error, "__notes__", [])])
            own = isinstance(error, RLinfError)
            waited = TIMEOUT_HINT.format(timeout_s) if waited_for_a_rank(error) else ""
            errors.put(
                type(error)(text)
                if own
                else RankError(f"Rank {rank} failed.{waited}\n{traceback.format_exc()[-20000:]}")
            )
        raise
    finally:
        dist.destroy_process_group()


def waited_for_a_rank(error: Exception) -> bool:
    """Whether a collective ended because another rank did not come: an error of torch.distributed, or gloo's, which has no class."""
    if isinstance(error, dist.DistError):
        return any(word in str(error).lower() for word in ("timed out", "timeout"))
    return isinstance(error, RuntimeError) and "Timed out waiting" in str(error)


def sum_over_ranks(values: list[float]) -> list[float]:
    """Add numbers over all ranks."""
    return _reduce(values, dist.ReduceOp.SUM)


def max_over_ranks(value: float) -> float:
    """Return the largest of the ranks' numbers."""
    return _reduce([value], dist.ReduceOp.MAX)[0]


def _reduce(values: list[float], operation: dist.ReduceOp) -> list[float]:
    if world_size() == 1:
        return values
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total, operation)
    return total.tolist()


def any_rank(flag: bool) -> bool:
    """True on every rank when ``flag`` is true on one."""
    return sum_over_ranks([float(flag)])[0] > 0


def gather_objects(value: Any) -> list[Any]:
    """Return what each rank has given, in rank order, on every rank."""
    if world_size() == 1:
        return [value]
    values = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def gather_rollout(batch: RolloutBatch) -> RolloutBatch:
    """Join the rollouts of all ranks along the env axis, in rank order, on every rank.

    Every rank then computes advantages over, and draws minibatches from, the same global batch, which makes results
    independent of the number of ranks. Images travel as uint8, straight to their places in the joined batch.
    """
    if world_size() == 1:
        return batch
    seen, num_chunks = batch.observation, len(batch.loss_mask)
    parts = gather_objects(replace(batch, observation=Observation(images={}, state=None, instruction=seen.instruction)))
    num_envs = batch.loss_mask.shape[1]
    rows = [slice(t * num_envs, (t + 1) * num_envs) for t in range(num_chunks)]
    observation = Observation(
        images={name: _gather_rows(image, num_chunks) for name, image in seen.images.items()},
        state=None if seen.state is None else _gather_rows(seen.state, num_chunks),
        instruction=[words for chunk in rows for part in parts for words in part.observation.instruction[chunk]],
    )
    return RolloutBatch.concatenate(parts, observation)


def _gather_rows(array: np.ndarray, num_chunks: int) -> np.ndarray:
    """Gather time-major rows ``[T * B, ...]`` of each rank to ``[T * ranks * B, ...]``, chunk by chunk.

    The rows of a chunk lie together in the result, so each collective call writes them where they stay.
    """
    device = own_device() if "nccl" in dist.get_backend_config() else "cpu"
    mine = torch.from_numpy(np.ascontiguousarray(array)).unflatten(0, (num_chunks, -1))
    joined = torch.empty((num_chunks, world_size() * mine.shape[1], *mine.shape[2:]), dtype=mine.dtype)
    for own, all_rows in zip(mine, joined, strict=True):
        found = all_rows.to(device)
        dist.all_gather_into_tensor(found, own.to(device))
        all_rows.copy_(found)  # on the CPU these are one tensor, and nothing is copied
    return joined.flatten(0, 1).numpy()
