"""The share of a GPU that an engine takes, alone or beside the policy."""

from __future__ import annotations

from rlinf.errors import ConfigError

ALONE = 0.8
"""Share of a GPU of its own."""
PASSES_BYTES = 10 * 10**9
"""Bytes that are left to the passes of a policy on the same GPU, and to libraries."""
LEAST_CACHE = 10**9
"""Bytes besides its weights without which an engine is not worth starting."""


def share_beside(gpu_bytes: int, policy_bytes: int) -> float:
    """Return the largest share for an engine on a GPU whose policy takes ``policy_bytes`` in training."""
    return min(ALONE, max(0, gpu_bytes - policy_bytes - PASSES_BYTES) / gpu_bytes)


def engine_share(
    given: float | None, gpu_bytes: int, policy_bytes: int, engine_weights: int, *, key: str, apart: str
) -> float:
    """Return the share of an engine beside a policy; raise ConfigError if both do not fit.

    Args:
        given: The configured share; None: the largest that fits.
        engine_weights: Bytes of the engine's own weights.
        key: The setting of the share.
        apart: Overrides with which the engine has a GPU of its own, or none is needed.
    """
    most = share_beside(gpu_bytes, policy_bytes)
    beside = f"beside a policy that takes {policy_bytes / 1e9:.1f} GB, and {PASSES_BYTES / 1e9:.0f} GB for its passes, on a GPU of {gpu_bytes / 1e9:.0f} GB"
    least = (engine_weights + LEAST_CACHE) / gpu_bytes
    if most < least:
        found = f"An engine needs {engine_weights / 1e9:.1f} GB for weights and {LEAST_CACHE / 1e9:.0f} GB for its cache {beside}"
        raise ConfigError(f"{found}; required: a GPU for both. Set {apart}")
    if given is not None and given > most:
        found = f"{key}={given:g} is {given * gpu_bytes / 1e9:.1f} GB {beside}"
        raise ConfigError(f"{found}; required: at most {most:.2f}. Set {key}={int(100 * most) / 100:g}, or {key}=null")
    return most if given is None else given
