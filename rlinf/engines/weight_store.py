"""Buckets of weights that hold their bytes, for a store of objects between machines."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from rlinf.engines.weight_handle import WeightBuckets, WeightsHandle

BUCKET_BYTES = 64 * 1024**2


@dataclass(frozen=True)
class StoredBucket(WeightsHandle):
    """A bucket with its own copy of the bytes. Every process that has it can open it at any time.

    Attributes:
        data: uint8 ``[nbytes]``; read-only where a store of objects has it.
    """

    data: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint8))

    def _map(self, mapped: dict[str, Tensor]) -> Tensor:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(self.data)  # which is only read


def stored_buckets(tensors: Iterable[tuple[str, Tensor]], version: int) -> Iterator[StoredBucket]:
    """Yield tensors, which must be on one device, bucket by bucket. A bucket is valid until the next but one is asked for."""
    buckets = WeightBuckets(BUCKET_BYTES)
    try:
        for handle in buckets.pack(tensors, version):
            end = max(entry.offset + entry.padded_nbytes for entry in handle.manifest.values())
            data = handle._map({})[:end].cpu().numpy()
            yield StoredBucket(version, handle.manifest, end, handle.nonce, data=data)
    finally:
        buckets.close()
