"""Memory and cores of this machine, this process and its GPU."""

import os
import resource
import sys
from pathlib import Path

from rlinf.number_formats import GIB

CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""File that contains a container's CPU quota in microseconds (or ``max``), followed by the period."""


def main_memory_bytes() -> int:
    """Return this machine's main memory in bytes, or the container's limit if it is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(total, int(text)) if text.isdigit() else total


def num_cores() -> int:
    """Return the number of cores available to this process, or the container's CPU quota if it is lower."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = (CPU_QUOTA.read_text() if CPU_QUOTA.is_file() else "max").partition(" ")
    # With 64 cores and a quota of 2, using all cores would start 64 threads, which would be throttled.
    return min(cores, max(1, int(quota) // int(period))) if quota.isdigit() else cores


def memory_metrics() -> dict[str, float]:
    """Return ``memory/rss_gib`` (peak resident size) and, with a GPU, ``memory/cuda_gib`` (peak allocation)."""
    import torch

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    metrics = {"memory/rss_gib": peak * (1 if sys.platform == "darwin" else 1024) / GIB}
    if torch.cuda.is_available():
        metrics["memory/cuda_gib"] = torch.cuda.max_memory_allocated() / GIB
    return metrics
