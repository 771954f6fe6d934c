"""Independent random streams derived from the run's seed, one per purpose."""

import os
import random
import zlib

import numpy as np

_made_deterministic = False


def derive_seed(seed: int, *purpose: str | int) -> int:
    """Return the 63-bit seed for a purpose, such as ``derive_seed(0, "minibatches", 12)``. It is the same on every platform."""
    entropy = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    # Use crc32 instead of `hash`, which Python salts differently in every process.
    entropy += [zlib.crc32(part.encode()) if isinstance(part, str) else part & 0xFFFFFFFF for part in purpose]
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> 1)


def seed_everything(seed: int, deterministic: bool = False) -> None:
    """Seed Python, NumPy and torch. Code that needs reproducible random numbers should use a ``derive_seed`` stream instead.

    With ``deterministic``, only bitwise reproducible kernels are used, including on GPUs; operations without one raise an error.
    Call this before the first matrix product on a GPU. A later call without ``deterministic`` restores torch's defaults.
    """
    global _made_deterministic
    # Import torch here because simulator processes import this module, and torch would cost each of them seconds and memory.
    import torch

    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS when it starts
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # no code here reads such memory
    # Reset only if this function has set it; do not change a caller's own `use_deterministic_algorithms`.
    elif _made_deterministic:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True  # torch's default
    _made_deterministic = deterministic
