"""Memory of this process and its device."""

from __future__ import annotations

import resource
import sys

import torch

GIB = 1024**3


def memory_metrics() -> dict[str, float]:
    """Return ``memory/rss_gib`` (largest resident size so far) and, with a GPU, ``memory/cuda_gib`` (peak)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    metrics = {"memory/rss_gib": peak * (1 if sys.platform == "darwin" else 1024) / GIB}
    if torch.cuda.is_available():
        metrics["memory/cuda_gib"] = torch.cuda.max_memory_allocated() / GIB
    return metrics
