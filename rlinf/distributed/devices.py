"""The GPU of a rank, its simulators and its engines. No other file of the package names a CUDA device.

``CUDA_VISIBLE_DEVICES`` names only the rank's GPU before CUDA starts. Code that uses "the first GPU" (a new thread,
ManiSkill, a simulator process, a restarted engine) then uses the correct GPU.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rlinf.errors import ConfigError

# Simulator processes import this module; torch would cost each of them seconds and memory.
if TYPE_CHECKING:
    import torch

VISIBLE = "CUDA_VISIBLE_DEVICES"
EGL_DEVICE = "MUJOCO_EGL_DEVICE_ID"
CHOSEN_EGL_DEVICE = "RLINF_CHOSEN_EGL_DEVICE_ID"
"""Copy of an ``EGL_DEVICE`` that this package set. A process with a different GPU may replace it, but not a user's value."""


def visible_gpus(environment: Mapping[str, str], count: int) -> list[str]:
    """Return the names of the ``count`` GPUs that CUDA shows: numbers, UUIDs or MIG names, in its order.

    ``CUDA_VISIBLE_DEVICES`` is read as CUDA reads it: the list ends at a negative number.
    """
    if VISIBLE not in environment:
        return [str(number) for number in range(count)]
    names = [name.strip() for name in environment[VISIBLE].split(",")]
    end = next((k for k, name in enumerate(names) if not name or name.startswith("-")), len(names))
    return names[: min(end, count)]


def rank_environment(environment: Mapping[str, str], gpus: Sequence[str], rank: int) -> dict[str, str]:
    """Return the launcher's ``environment`` for one rank, in which CUDA shows only the rank's GPU, ``gpus[rank]``.

    A ``MUJOCO_EGL_DEVICE_ID`` of the user is not changed.
    """
    if rank >= len(gpus):
        raise ConfigError(
            f"Rank {rank} needs its own GPU, but CUDA shows {len(gpus)} ({', '.join(gpus) or 'none'}). "
            f"Set cluster.num_processes={max(1, len(gpus))}, or cluster.device=cpu"
        )
    variables = dict(environment)
    # Chosen by this package for the launcher's first GPU, so wrong for this rank's.
    if variables.get(EGL_DEVICE) == variables.pop(CHOSEN_EGL_DEVICE, None):
        variables.pop(EGL_DEVICE, None)
    return variables | {VISIBLE: gpus[rank]}


def isolate_rank(gpus: Sequence[str], rank: int) -> None:
    """Hide all GPUs except the rank's from this process. Call it before CUDA starts."""
    variables = rank_environment(os.environ, gpus, rank)
    for name in set(os.environ) - set(variables):
        del os.environ[name]
    os.environ.update(variables)


def hide_gpus() -> None:
    """Hide all GPUs from this process and its children. Call it before CUDA starts."""
    os.environ[VISIBLE] = ""


def engine_gpus(gpus: Sequence[str], first: int, count: int, key: str) -> list[str]:
    """Return the GPUs of an engine with ``count`` ranks, starting at this process's GPU ``gpus[first]``; none on the CPU.

    Raise ConfigError, which names the override ``key`` of ``count``, if there are fewer GPUs.
    """
    if gpus and first + count > len(gpus):
        raise ConfigError(
            f"{key}={count} needs {count} GPUs from '{gpus[first]}' on, but this process sees {', '.join(gpus)}. "
            f"Set {key}={len(gpus) - first}"
        )
    return list(gpus[first : first + count])


def own_engine_gpus(count: int, key: str) -> list[str]:
    """Return ``engine_gpus`` of this process, empty without GPUs. Call it on the main thread: only there the device is the rank's."""
    import torch

    if not torch.cuda.is_available():
        return []
    return engine_gpus(visible_gpus(os.environ, torch.cuda.device_count()), own_index(), count, key)


def own_index() -> int:
    """Return the index of this rank's GPU in this process; see ``rank_index``."""
    import torch
    import torch.distributed as dist

    return rank_index(os.environ, torch.cuda.device_count(), torch.cuda.current_device(), dist.is_initialized())


def rank_index(environment: Mapping[str, str], count: int, current: int, has_ranks: bool) -> int:
    """Return the current device if one was set or only one is visible, else ``LOCAL_RANK``."""
    # torchrun shows all GPUs to every rank.
    local = environment.get("LOCAL_RANK", "")
    if not has_ranks or current or count <= 1 or not local.isdigit():
        return current
    if int(local) >= count:
        raise ConfigError(f"LOCAL_RANK={local} needs its own GPU, but torch sees {count}. Start {count} ranks here")
    return int(local)


def own_device() -> torch.device:
    """Return this rank's GPU."""
    import torch

    return torch.device("cuda", own_index())


def take_own_device() -> torch.device:
    """Make this rank's GPU the current device of this thread, and return it."""
    import torch

    device = own_device()
    torch.cuda.set_device(device)
    return device


def gpu_uuids() -> list[str]:
    """Return the UUIDs of the GPUs that this process sees, in its order."""
    import torch

    return [str(torch.cuda.get_device_properties(k).uuid) for k in range(torch.cuda.device_count())]


def index_of_gpu(uuid: str, visible: Sequence[str]) -> int | None:
    """Return the index of the GPU ``uuid`` among the ``visible`` ones, or None."""
    return list(visible).index(uuid) if uuid in visible else None
