"""Compute base-policy outputs for the frames of a dataset once, and cache them on disk."""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlinf.data.stored import StoredDemonstrations
from rlinf.files import naming
from rlinf.models.embodiment.actor_policy import ActorPolicy

logger = logging.getLogger("rlinf")


@dataclass
class DatasetOutputs:
    """Base-policy outputs for ``K`` frames.

    Attributes:
        features: float32 ``[K, F]``.
        chunks: float32 ``[K, N, C, D]`` in env units.
        num_queries: Number of frames for which outputs were computed; 0 if all are from the cache.
    """

    features: Tensor
    chunks: Tensor
    num_queries: int


def query_dataset(
    dataset: StoredDemonstrations,
    rows: np.ndarray,
    policy: ActorPolicy,
    *,
    conditions: Mapping[str, Any],
    batch_size: int,
    autocast: Callable[[], AbstractContextManager],
    seed: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> DatasetOutputs:
    """Return the outputs from the cache, or compute and cache them.

    Args:
        policy: Policy with ``base_sha256`` set.
        conditions: Additional settings that affect the outputs.
    """
    dependencies = {
        "base": policy.base_sha256,
        "dataset": dataset.digest(),
        "rows": hashlib.sha256(rows.tobytes()).hexdigest(),
        "columns": list(dataset.frames),
        "has_state": dataset.state is not None,
        "features": [policy.base.feature_kind, policy.base.feature_dim],
        "candidates": policy.actor.num_candidates,
        "chunk": policy.action_chunks_len,
        "seed": seed if policy.actor.num_candidates > 1 else None,
        "conditions": conditions,
        "rounding": [policy.device.type, batch_size],  # these affect the rounding of sums
    }
    key = hashlib.sha256(json.dumps(dependencies, sort_keys=True, default=str).encode()).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = cache / "rlinf" / "proposals" / f"{key}.safetensors"
    if path.is_file():
        try:
            return DatasetOutputs(**load_file(path), num_queries=0)
        except (OSError, SafetensorError) as error:
            logger.warning("%s cannot be read (%s), so the outputs of the frozen policy are recomputed", path, error)
    generator, features, chunks = torch.Generator().manual_seed(seed), [], []
    for start in range(0, len(rows), batch_size):
        observation, _ = dataset.rows(rows[start : start + batch_size])
        uniforms = torch.rand(len(observation), policy.num_base_uniforms, generator=generator)
        uniforms = uniforms.clamp_min_(torch.finfo(torch.float32).tiny).to(policy.device)
        with autocast():
            batch = policy.query_base(policy.preprocess(observation), uniforms)
        features.append(batch.features.cpu())
        chunks.append(batch.chunks.cpu())
        progress(start + len(observation), len(rows))
    outputs = DatasetOutputs(torch.cat(features), torch.cat(chunks), len(rows))
    try:
        _save({"features": outputs.features, "chunks": outputs.chunks}, path)
    except (OSError, SafetensorError) as error:
        logger.warning("the outputs of the frozen policy cannot be cached, so the next run recomputes them: %s", error)
    return outputs


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a file atomically."""
    # Include the process id in the name, because two runs with the same dataset may write at the same time.
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.stem}.{os.getpid()}.tmp")
    try:
        with naming(path):
            save_file(tensors, partial)
            os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
