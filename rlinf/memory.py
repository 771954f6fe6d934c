"""Memory of this machine, this process and its GPU."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import torch

from rlinf.number_formats import GIB


def main_memory_bytes() -> int:
    """Return the main memory of this machine, or the container's limit if that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(total, int(text)) if text.isdigit() else total


def memory_metrics() -> dict[str, float]:
    """Return ``memory/rss_gib`` (peak resident size) and, with a GPU, ``memory/cuda_gib`` (peak allocation)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    metrics = {"memory/rss_gib": peak * (1 if sys.platform == "darwin" else 1024) / GIB}
    if torch.cuda.is_available():
        metrics["memory/cuda_gib"] = torch.cuda.max_memory_allocated() / GIB
    return metrics
