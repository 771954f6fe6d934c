"""The process group of a run: this process's rank and device, and the few collectives that the training loop needs."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rlinf.distributed.devices import own_device
from rlinf.errors import ConfigError
from rlinf.types import Observation, RolloutBatch


def rank() -> int:
    """Return this process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def local_world_size() -> int:
    """Return the number of ranks on this machine; without a launcher's word, all of them are."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size())) if dist.is_initialized() else 1


def set_num_threads(num_threads: int | None, num_processes: int) -> None:
    """Set the threads of torch: ``num_threads``, or this rank's share of the cores among ``num_processes`` on this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(num_threads or max(1, cores // num_processes))


def resolve_device(device: str, num_processes: int) -> str:
    """Return ``cuda`` or ``cpu`` for ``auto``; raise ConfigError if ``cuda`` has fewer GPUs than ranks."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and torch.cuda.device_count() < num_processes:
        raise ConfigError(
            f"cluster.num_processes={num_processes} ranks need a GPU each, but torch sees {torch.cuda.device_count()}. "
            "Set cluster.device=cpu, or fewer processes"
        )
    return device


GLOO = "gloo_one_thread"


def _gloo_with_one_thread(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    """Create torch's gloo group with one worker thread instead of two.

    PyTorch 2.13 has a race: its two threads assign the name of the finished collective to one string without a lock. A
    name of more than 15 letters, such as those of FSDP's gathers, lies on the heap and is sometimes freed twice.
    """
    options = dist.ProcessGroupGloo._Options()
    options._timeout, options._threads = timeout, 1
    options._devices = [dist.ProcessGroupGloo.create_default_device()]
    return dist.ProcessGroupGloo(store, rank, size, options)


dist.Backend.register_backend(GLOO, _gloo_with_one_thread, devices=["cpu"])


def backend_of(device: str) -> str:
    """Return the collective backends of a device: gloo with one thread for CPU tensors, nccl for GPU tensors.

    Numbers and objects of the loop then bypass the GPU, where they would wait for all queued work.
    """
    return f"cpu:{GLOO},cuda:nccl" if device == "cuda" else GLOO


def sum_over_ranks(values: list[float]) -> list[float]:
    """Return the sums of numbers over all ranks."""
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
    """Return True on every rank if ``flag`` is true on any."""
    return sum_over_ranks([float(flag)])[0] > 0


def gather_objects(value: Any) -> list[Any]:
    """Return the values of all ranks, in rank order, on every rank."""
    if world_size() == 1:
        return [value]
    values = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def gather_rollout(batch: RolloutBatch) -> RolloutBatch:
    """Return the rollouts of all ranks joined along the env axis, in rank order, on every rank.

    All ranks compute advantages over, and draw minibatches from, this global batch, so results do not depend on the
    number of ranks. Images travel as uint8, straight to their places in the joined batch.
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
        is_resized=seen.is_resized,
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
