"""Random streams derived from the run's seed, one per purpose, so that streams do not depend on each other."""

import os
import random
import zlib

import numpy as np

_made_deterministic = False


def derive_seed(seed: int, *purpose: str | int) -> int:
    """Return the 63-bit seed of a purpose, e.g. ``derive_seed(0, "minibatches", 12)``, equal on every platform."""
    entropy = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    # crc32, not `hash`, which Python salts in every process.
    entropy += [zlib.crc32(part.encode()) if isinstance(part, str) else part & 0xFFFFFFFF for part in purpose]
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> 1)


def seed_everything(seed: int, deterministic: bool = False) -> None:
    """Seed Python, NumPy and torch. Code that needs repeatable numbers draws from a ``derive_seed`` stream instead.

    With ``deterministic``, use only kernels with equal bits for equal inputs, also on GPUs; an operation without such a kernel raises.
    Call it before the first matrix product on a GPU. A later call without it restores torch's defaults.
    """
    global _made_deterministic
    # Not at the top: simulator processes import this module without torch, which would cost each of them seconds and memory.
    import torch

    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # no code here reads such memory
    # Only if this function has set it: a caller's own `use_deterministic_algorithms` is not changed.
    elif _made_deterministic:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True  # torch's default
    _made_deterministic = deterministic
