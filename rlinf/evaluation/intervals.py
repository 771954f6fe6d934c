"""Confidence intervals of a success rate, and of the difference of two on the same episodes."""

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


def paired_difference_interval(both: int, only_first: int, only_second: int, neither: int) -> tuple[float, float]:
    """95 % interval of the difference of two proportions seen on the same trials.

    Method 10 of Newcombe 1998 (Statistics in Medicine 17:2635): the Wilson intervals ``(l, u)`` of both proportions,
    squared and added with their correlation ``phi``,

    ``lower = p1 - p2 - sqrt((p1-l1)^2 - 2 phi (p1-l1)(u2-p2) + (u2-p2)^2)`` and
    ``upper = p1 - p2 + sqrt((u1-p1)^2 - 2 phi (u1-p1)(p2-l2) + (p2-l2)^2)``,

    where ``phi = c / sqrt((e+f)(g+h)(e+g)(f+h))`` for the cells e, f, g, h in the order of the arguments, ``c`` is
    ``eh - fg``, less n/2 (but not below 0) where that is positive, and phi = 0 where a margin is 0.

    Args:
        both: Trials on which both succeeded.
        only_first, only_second: Trials on which one did.
        neither: Trials on which none did.

    Returns:
        Lower and upper end of first minus second, within [-1, 1]; (-1, 1) without trials.
    """
    trials = both + only_first + only_second + neither
    if trials == 0:
        return -1.0, 1.0
    successes = (both + only_first, both + only_second)
    (p1, p2) = (count / trials for count in successes)
    (l1, u1), (l2, u2) = (wilson_interval(count, trials) for count in successes)
    margins = math.prod(count * (trials - count) for count in successes)
    cross = both * neither - only_first * only_second
    if cross > 0:
        cross = max(0.0, cross - trials / 2)
    phi = cross / math.sqrt(margins) if margins else 0.0
    below = math.sqrt((p1 - l1) ** 2 - 2 * phi * (p1 - l1) * (u2 - p2) + (u2 - p2) ** 2)
    above = math.sqrt((u1 - p1) ** 2 - 2 * phi * (u1 - p1) * (p2 - l2) + (p2 - l2) ** 2)
    return max(-1.0, p1 - p2 - below), min(1.0, p1 - p2 + above)
