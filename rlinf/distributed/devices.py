"""GPU selection for a rank, its simulators and its engines. No other file in the package refers to specific CUDA devices.

Before CUDA starts, ``CUDA_VISIBLE_DEVICES`` is set to the rank's GPU alone. Code that uses "the first GPU" (a new thread,
ManiSkill, a simulator process, a restarted engine) then uses the correct GPU.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rlinf.errors import ConfigError

# Simulator processes import this module; importing torch would cost each of them seconds and memory.
if TYPE_CHECKING:
    import torch

VISIBLE = "CUDA_VISIBLE_DEVICES"
EGL_DEVICE = "MUJOCO_EGL_DEVICE_ID"
CHOSEN_EGL_DEVICE = "RLINF_CHOSEN_EGL_DEVICE_ID"
"""Copy of ``EGL_DEVICE`` if set by this package. A process with a different GPU may replace such a value, but not a user's."""


def visible_gpus(environment: Mapping[str, str], count: int) -> list[str]:
    """Return the names of the ``count`` GPUs visible to CUDA (numbers, UUIDs or MIG names), in CUDA's order.

    ``CUDA_VISIBLE_DEVICES`` is parsed as in CUDA, where a negative number ends the list.
    """
    if VISIBLE not in environment:
        return [str(number) for number in range(count)]
    names = [name.strip() for name in environment[VISIBLE].split(",")]
    end = next((k for k, name in enumerate(names) if not name or name.startswith("-")), len(names))
    return names[: min(end, count)]


def rank_environment(environment: Mapping[str, str], gpus: Sequence[str], rank: int) -> dict[str, str]:
    """Return the launcher's ``environment`` for one rank, with only the rank's GPU, ``gpus[rank]``, visible to CUDA.

    A user-set ``MUJOCO_EGL_DEVICE_ID`` is not changed.
    """
    if rank >= len(gpus):
        raise ConfigError(
            f"Rank {rank} needs its own GPU, but CUDA sees {len(gpus)} ({', '.join(gpus) or 'none'}). "
            f"Set cluster.num_processes={max(1, len(gpus))}, or cluster.device=cpu"
        )
    variables = dict(environment)
    # This package chose the value for the launcher's first GPU, so it is wrong for this rank.
    if variables.get(EGL_DEVICE) == variables.pop(CHOSEN_EGL_DEVICE, None):
        variables.pop(EGL_DEVICE, None)
    return variables | {VISIBLE: gpus[rank]}


def isolate_rank(gpus: Sequence[str], rank: int) -> None:
    """Hide all GPUs except the rank's own from this process. Call this before CUDA starts."""
    variables = rank_environment(os.environ, gpus, rank)
    for name in set(os.environ) - set(variables):
        del os.environ[name]
    os.environ.update(variables)


def hide_gpus() -> None:
    """Hide all GPUs from this process and its children. Call this before CUDA starts."""
    os.environ[VISIBLE] = ""


def engine_gpus(gpus: Sequence[str], first: int, count: int, key: str) -> list[str]:
    """Return the GPUs for an engine with ``count`` ranks, starting at this process's GPU ``gpus[first]``; empty on the CPU.

    If there are too few GPUs, raise a ConfigError that suggests a smaller value for the config key ``key``.
    """
    if gpus and first + count > len(gpus):
        raise ConfigError(
            f"{key}={count} needs {count} GPUs starting at '{gpus[first]}', but this process sees {', '.join(gpus)}. "
            f"Set {key}={len(gpus) - first}"
        )
    return list(gpus[first : first + count])


def own_engine_gpus(count: int, key: str) -> list[str]:
    """Return this process's ``engine_gpus``. Call this on the main thread, the only one whose current device is the rank's."""
    import torch

    if not torch.cuda.is_available():
        return []
    return engine_gpus(visible_gpus(os.environ, torch.cuda.device_count()), own_index(), count, key)


def own_index() -> int:
    """Return the index of this rank's GPU among the GPUs visible to this process; see ``rank_index``."""
    import torch
    import torch.distributed as dist

    return rank_index(os.environ, torch.cuda.device_count(), torch.cuda.current_device(), dist.is_initialized())


def rank_index(environment: Mapping[str, str], count: int, current: int, has_ranks: bool) -> int:
    """Return the current device if it was set or only one is visible, otherwise ``LOCAL_RANK``."""
    # With torchrun, all GPUs are visible to every rank.
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
    """Set this rank's GPU as the current device of this thread, and return it."""
    import torch

    device = own_device()
    torch.cuda.set_device(device)
    return device


def gpu_uuids() -> list[str]:
    """Return the UUIDs of the GPUs visible to this process, in device order."""
    import torch

    return [str(torch.cuda.get_device_properties(k).uuid) for k in range(torch.cuda.device_count())]


def index_of_gpu(uuid: str, visible: Sequence[str]) -> int | None:
    """Return the index of GPU ``uuid`` in ``visible``, or None if it is absent."""
    return list(visible).index(uuid) if uuid in visible else None
