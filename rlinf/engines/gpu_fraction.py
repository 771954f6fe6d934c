"""GPU memory fraction of an engine, on a separate GPU or colocated with the policy."""

import logging

from rlinf.errors import ConfigError

logger = logging.getLogger("rlinf")

SEPARATE_GPU_FRACTION = 0.8
"""Fraction on a GPU without the policy."""
PASSES_BYTES = 10 * 10**9
"""Assumed bytes for the passes of a policy on the same GPU, and for libraries."""
PASSES_FRACTION, LEAST_PASSES = 0.25, 3 * 10**9
"""Small GPUs reserve this fraction instead, or at least these bytes, half of them for libraries."""
LEAST_CACHE = 10**9
"""Minimum bytes of an engine's cache."""


def passes_bytes(gpu_bytes: int) -> int:
    """Return the bytes reserved for the policy's passes."""
    return min(PASSES_BYTES, max(LEAST_PASSES, int(PASSES_FRACTION * gpu_bytes)))


def colocated_fraction(gpu_bytes: int, policy_bytes: int) -> float:
    """Return the fraction of an engine next to a policy that takes ``policy_bytes`` between its passes."""
    return min(SEPARATE_GPU_FRACTION, max(0, gpu_bytes - policy_bytes - passes_bytes(gpu_bytes)) / gpu_bytes)


def engine_fraction(
    configured: float | None, gpu_bytes: int, policy_bytes: int, engine_weights: int, *, key: str, apart: str
) -> float:
    """Return the fraction of an engine that is colocated with a policy.

    Raise ConfigError if both do not fit; warn if a configured fraction leaves less for passes than is assumed.

    Args:
        configured: Configured fraction; None: ``colocated_fraction``.
        policy_bytes: Bytes of the policy on the GPU between its passes.
        apart: Overrides that avoid colocation, or shrink the policy.
    """
    default, free, passes = (
        colocated_fraction(gpu_bytes, policy_bytes),
        gpu_bytes - policy_bytes,
        passes_bytes(gpu_bytes),
    )
    beside = f"next to a policy that takes {policy_bytes / 1e9:.1f} GB"
    card = f"on a GPU of {gpu_bytes / 1e9:.0f} GB"
    minimum = engine_weights + LEAST_CACHE
    if (free if configured is not None else default * gpu_bytes) < minimum:
        left = "" if configured is not None else f", and {passes / 1e9:.0f} GB for its passes,"
        need = f"An engine needs {engine_weights / 1e9:.1f} GB for weights and {LEAST_CACHE / 1e9:.0f} GB for its cache {beside}{left} {card}"
        smaller = (
            f"{key}={_rounded_up(minimum / gpu_bytes)} for smaller passes, or "
            if configured is None and free >= minimum
            else ""
        )
        raise ConfigError(f"{need}; required: a GPU for both. Set {smaller}{apart}")
    if configured is None:
        return default
    actual = f"{key}={configured:g} is {configured * gpu_bytes / 1e9:.1f} GB {beside}"
    if configured * gpu_bytes > free:
        limit = f"at most {free / gpu_bytes:.2f}, and less for passes"
        raise ConfigError(f"{actual} {card}; required: {limit}. Set {key}={int(100 * default) / 100:g}, or {key}=null")
    # Only a warning: the passes are an assumption, and the user may know better.
    if configured * gpu_bytes > free - passes:
        logger.warning(
            "%s %s, which leaves %.1f GB for its passes; with %s=null it would leave %.1f GB.",
            actual, card, free / 1e9 - configured * gpu_bytes / 1e9, key, passes / 1e9,
        )  # fmt: skip
    return configured


def _rounded_up(fraction: float) -> float:
    return -(-100 * fraction // 1) / 100
