"""What a frozen policy says of the rows of a dataset: asked once, and kept on disk for the next run."""

from __future__ import annotations

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
class Answers:
    """What a frozen policy says of ``K`` rows.

    Attributes:
        features: float32 ``[K, F]``.
        chunks: float32 ``[K, N, C, D]`` in env units.
        num_asked: Rows about which it was asked; 0: they were on disk.
    """

    features: Tensor
    chunks: Tensor
    num_asked: int


def answers_about(
    dataset: StoredDemonstrations,
    rows: np.ndarray,
    policy: ActorPolicy,
    *,
    conditions: Mapping[str, Any],
    batch_size: int,
    autocast: Callable[[], AbstractContextManager],
    seed: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Answers:
    """Return the answers from disk, or ask for them and keep them there.

    Args:
        rows: int64 ``[K]``.
        policy: Its ``base_sha256`` must be known.
        conditions: What else decides on the answers, besides weights and rows.
        autocast: Makes the context in which it computes.
        seed: Of the sampled candidates.
        progress: Is told how many of how many rows are done.
    """
    about = {
        "base": policy.base_sha256,
        "dataset": dataset.digest(),
        "rows": hashlib.sha256(rows.tobytes()).hexdigest(),
        "columns": list(dataset.frames),
        "has_state": dataset.state is not None,
        "features": policy.base.feature_kind,
        "candidates": policy.actor.num_candidates,
        "chunk": policy.action_chunks_len,
        "seed": seed if policy.actor.num_candidates > 1 else None,
        "conditions": conditions,
        "rounding": [policy.device.type, batch_size],  # of sums, which differ a little
    }
    key = hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = cache / "rlinf" / "proposals" / f"{key}.safetensors"
    if path.is_file():
        try:
            return Answers(**load_file(path), num_asked=0)
        except (OSError, SafetensorError) as error:
            logger.warning("%s cannot be read (%s), so the frozen policy is asked again", path, error)
    generator, features, chunks = torch.Generator().manual_seed(seed), [], []
    for start in range(0, len(rows), batch_size):
        observation, _ = dataset.rows(rows[start : start + batch_size])
        uniforms = torch.rand(len(observation), policy.num_base_uniforms, generator=generator)
        uniforms = uniforms.clamp_min_(torch.finfo(torch.float32).tiny).to(policy.device)
        with autocast():
            found = policy.query_base(policy.preprocess(observation), uniforms)
        features.append(found.features.cpu())
        chunks.append(found.chunks.cpu())
        progress(start + len(observation), len(rows))
    answers = Answers(torch.cat(features), torch.cat(chunks), len(rows))
    try:
        _save({"features": answers.features, "chunks": answers.chunks}, path)
    except (OSError, SafetensorError) as error:
        logger.warning("the answers of the frozen policy cannot be kept, so the next run asks again: %s", error)
    return answers


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a file under a temporary name, and rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.stem}.{os.getpid()}.tmp")
    try:
        with naming(path):
            save_file(tensors, partial)
            os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
