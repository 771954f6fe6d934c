"""Confidence interval of a success rate."""

from __future__ import annotations

import math

Z_95 = 1.959963984540054  # 97.5 % quantile of the standard normal distribution


def wilson_interval(successes: int, trials: int, z: float = Z_95) -> tuple[float, float]:
    """Score interval of a binomial proportion (Wilson 1927, JASA 22:209, without continuity correction).

    ``(p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)`` with ``p = successes / n`` and ``n = trials``.
    Unlike ``p +- z sqrt(p(1-p)/n)`` it stays inside [0, 1] and has a width at 0 and n successes.

    Args:
        successes: ``k``, 0 to ``trials``.
        trials: ``n``; 0 gives (0, 1): nothing is known.
        z: Normal quantile; the default makes 95 %.

    Returns:
        Lower and upper end.

    Raises:
        ValueError: ``successes`` is not in 0..``trials``.
    """
    if not 0 <= successes <= trials:
        raise ValueError(f"{successes} successes of {trials} trials: successes must lie in 0..{trials}.")
    if trials == 0:
        return 0.0, 1.0
    rate = successes / trials
    centre = rate + z * z / (2 * trials)
    spread = z * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    low = 0.0 if successes == 0 else (centre - spread) / scale
    high = 1.0 if successes == trials else (centre + spread) / scale
    return low, high
