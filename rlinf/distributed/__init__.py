"""Ranks, weights and token batches of distributed runs; classes are imported at first use."""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    "BatchedDataDict": "rlinf.distributed.batched_data_dict",
    "RayVirtualCluster": "rlinf.distributed.virtual_cluster",
}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(importlib.import_module(_EXPORTS[name]), name)
