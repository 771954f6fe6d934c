"""One random stream per purpose, derived from the run's seed, so that no use of random numbers disturbs another."""

from __future__ import annotations

import random
import zlib

import numpy as np


def derive_seed(seed: int, *purpose: str | int) -> int:
    """Return the 63-bit seed of a purpose, e.g. ``derive_seed(0, "minibatches", 12)``. It is the same on every platform."""
    words = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    words += [zlib.crc32(word.encode()) if isinstance(word, str) else word & 0xFFFFFFFF for word in purpose]
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> 1)


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch. Code that needs repeatable numbers draws from a ``derive_seed`` stream instead."""
    import torch  # not at the top: simulator processes import this module and do without torch

    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)
