"""Fraction of GPU memory reserved for an engine, on a separate GPU or colocated with the policy."""

import logging

from rlinf.errors import ConfigError

logger = logging.getLogger("rlinf")

SEPARATE_GPU_FRACTION = 0.8
"""Fraction used on a GPU without the policy."""
PASSES_BYTES = 10 * 10**9
"""Bytes assumed for libraries and for the forward and backward passes of a policy on the same GPU."""
PASSES_FRACTION, LEAST_PASSES = 0.25, 3 * 10**9
"""On small GPUs, this fraction is reserved instead, but at least this number of bytes, half of them for libraries."""
LEAST_CACHE = 10**9
"""Minimum size of an engine's cache in bytes."""


def passes_bytes(gpu_bytes: int) -> int:
    """Return the number of bytes reserved for the policy's passes."""
    return min(PASSES_BYTES, max(LEAST_PASSES, int(PASSES_FRACTION * gpu_bytes)))


def colocated_fraction(gpu_bytes: int, policy_bytes: int) -> float:
    """Return the fraction for an engine next to a policy that needs ``policy_bytes`` between its passes."""
    return min(SEPARATE_GPU_FRACTION, max(0, gpu_bytes - policy_bytes - passes_bytes(gpu_bytes)) / gpu_bytes)


def engine_fraction(
    configured: float | None, gpu_bytes: int, policy_bytes: int, engine_weights: int, *, key: str, apart: str
) -> float:
    """Return the fraction for an engine colocated with a policy.

    Raise ConfigError if the two do not fit together; warn if a configured fraction leaves less memory for passes than assumed.

    Args:
        configured: Configured fraction; None uses ``colocated_fraction``.
        policy_bytes: Bytes that the policy needs on the GPU between its passes.
        apart: Overrides that avoid colocation or shrink the policy.
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
        raise ConfigError(f"{need}; expected a GPU for both. Set {smaller}{apart}")
    if configured is None:
        return default
    actual = f"{key}={configured:g} is {configured * gpu_bytes / 1e9:.1f} GB {beside}"
    if configured * gpu_bytes > free:
        limit = f"at most {free / gpu_bytes:.2f}, and less for passes"
        raise ConfigError(f"{actual} {card}; expected {limit}. Set {key}={int(100 * default) / 100:g}, or {key}=null")
    # Only warn, because the memory for passes is an assumption, and the user may know better.
    if configured * gpu_bytes > free - passes:
        logger.warning(
            "%s %s, which leaves %.1f GB for its passes; with %s=null it would leave %.1f GB.",
            actual, card, free / 1e9 - configured * gpu_bytes / 1e9, key, passes / 1e9,
        )  # fmt: skip
    return configured


def _rounded_up(fraction: float) -> float:
    return -(-100 * fraction // 1) / 100
