"""One random stream per purpose, derived from the run's seed, so that no use of random numbers disturbs another."""

from __future__ import annotations

import os
import random
import zlib

import numpy as np

_made_deterministic = False


def derive_seed(seed: int, *purpose: str | int) -> int:
    """Return the 63-bit seed of a purpose, e.g. ``derive_seed(0, "minibatches", 12)``. It is the same on every platform."""
    words = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    words += [zlib.crc32(word.encode()) if isinstance(word, str) else word & 0xFFFFFFFF for word in purpose]
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> 1)


def seed_everything(seed: int, deterministic: bool = False) -> None:
    """Seed Python, NumPy and torch. Code that needs repeatable numbers draws from a ``derive_seed`` stream instead.

    ``deterministic``: use only kernels that give equal bits for equal inputs, on GPUs too; an operation without one raises. Call
    it before the first matrix product on a GPU. A later call without it takes that back.
    """
    global _made_deterministic
    import torch  # not at the top: simulator processes import this module and do without torch

    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # no code here reads such memory
    elif _made_deterministic:  # what the caller has chosen without us stays
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True  # torch's default
    _made_deterministic = deterministic
