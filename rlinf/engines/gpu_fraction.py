"""The fraction of a GPU that an engine takes, alone or beside the policy."""

from __future__ import annotations

import logging

from rlinf.errors import ConfigError

logger = logging.getLogger("rlinf")

ALONE = 0.8
"""Fraction of a GPU of its own."""
PASSES_BYTES = 10 * 10**9
"""Bytes that are left to the passes of a policy on the same GPU, and to libraries: an assumption."""
PASSES_FRACTION, LEAST_PASSES = 0.25, 3 * 10**9
"""On a small GPU, this fraction is left to them instead, or these bytes, half of which are libraries."""
LEAST_CACHE = 10**9
"""Bytes besides its weights without which an engine is not worth starting."""


def passes_beside(gpu_bytes: int) -> int:
    """Return the bytes that an engine leaves to passes."""
    return min(PASSES_BYTES, max(LEAST_PASSES, int(PASSES_FRACTION * gpu_bytes)))


def share_beside(gpu_bytes: int, policy_bytes: int) -> float:
    """Return the fraction of an engine on a GPU where a policy takes ``policy_bytes`` between its passes."""
    return min(ALONE, max(0, gpu_bytes - policy_bytes - passes_beside(gpu_bytes)) / gpu_bytes)


def engine_fraction(
    given: float | None, gpu_bytes: int, policy_bytes: int, engine_weights: int, *, key: str, apart: str
) -> float:
    """Return the fraction of an engine beside a policy.

    Raise ConfigError if both do not fit; warn if a configured share leaves less to passes than is assumed.

    Args:
        given: The configured share; None: the result of ``share_beside``.
        policy_bytes: Bytes of the policy on the GPU between its passes.
        engine_weights: Bytes of the engine's own weights.
        key: The setting of the fraction.
        apart: Overrides with which the engine has a GPU of its own, or none is needed.
    """
    usual, room, passes = share_beside(gpu_bytes, policy_bytes), gpu_bytes - policy_bytes, passes_beside(gpu_bytes)
    beside = f"beside a policy that takes {policy_bytes / 1e9:.1f} GB"
    card = f"on a GPU of {gpu_bytes / 1e9:.0f} GB"
    least = engine_weights + LEAST_CACHE
    if (room if given is not None else usual * gpu_bytes) < least:
        left = "" if given is not None else f", and {passes / 1e9:.0f} GB for its passes,"
        found = f"An engine needs {engine_weights / 1e9:.1f} GB for weights and {LEAST_CACHE / 1e9:.0f} GB for its cache {beside}{left} {card}"
        smaller = (
            f"{key}={_rounded_up(least / gpu_bytes)} for passes that take less, or "
            if given is None and room >= least
            else ""
        )
        raise ConfigError(f"{found}; required: a GPU for both. Set {smaller}{apart}")
    if given is None:
        return usual
    found = f"{key}={given:g} is {given * gpu_bytes / 1e9:.1f} GB {beside}"
    if given * gpu_bytes > room:
        most = f"at most {room / gpu_bytes:.2f}, and less for passes"
        raise ConfigError(f"{found} {card}; required: {most}. Set {key}={int(100 * usual) / 100:g}, or {key}=null")
    if given * gpu_bytes > room - passes:
        logger.warning(
            "%s %s, which leaves %.1f GB for its passes; with %s=null it would leave %.1f GB.",
            found, card, room / 1e9 - given * gpu_bytes / 1e9, key, passes / 1e9,
        )  # fmt: skip
    return given


def _rounded_up(share: float) -> float:
    return -(-100 * share // 1) / 100
