"""Confidence intervals for success rates, means, and differences, paired or independent."""

import math
from collections.abc import Sequence

import numpy as np

Z_95 = 1.959963984540054  # 97.5 % quantile of the standard normal distribution


def wilson_interval(successes: int, trials: int, z: float = Z_95) -> tuple[float, float]:
    """Return the score interval for a binomial proportion (Wilson 1927, JASA 22:209, without continuity correction).

    ``(p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)`` with ``p = successes / n`` and ``n = trials``.
    Unlike ``p +- z sqrt(p(1-p)/n)``, it stays inside [0, 1] and has a positive width at 0 and n successes. With no trials, it is (0, 1).
    """
    if not 0 <= successes <= trials:
        raise ValueError(f"{successes} successes in {trials} trials: successes must be in 0..{trials}.")
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
    """Return the 95 % interval for the difference (first minus second) between two proportions over the same trials.

    Method 10 of Newcombe 1998 (Statistics in Medicine 17:2635) combines the Wilson intervals ``(l, u)`` of both
    proportions with their correlation ``phi``:

    ``lower = p1 - p2 - sqrt((p1-l1)^2 - 2 phi (p1-l1)(u2-p2) + (u2-p2)^2)`` and
    ``upper = p1 - p2 + sqrt((u1-p1)^2 - 2 phi (u1-p1)(p2-l2) + (p2-l2)^2)``,

    where ``phi = c / sqrt((e+f)(g+h)(e+g)(f+h))`` for the cells e, f, g, h in the order of the arguments. ``c`` is
    ``eh - fg``; if positive, it is reduced by n/2 (but not below 0). phi is 0 if a margin is 0. With no trials, the interval
    is (-1, 1).
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


def difference_of_differences_interval(first: np.ndarray, second: np.ndarray) -> tuple[float, float]:
    """Return the 95 % interval for how much a paired difference between two proportions changes, second minus first.

    ``first`` and ``second`` are 0 or 1, int ``[N, 2]``: the outcomes of each trial's two arms. With the differences ``d`` (second arm minus
    first) and their intervals ``(l, u)`` by ``paired_difference_interval``, MOVER (Zou 2007, Psychological Methods 12:399) gives

    ``lower = d2 - d1 - sqrt((d2-l2)^2 - 2 r (d2-l2)(u1-d1) + (u1-d1)^2)`` and
    ``upper = d2 - d1 + sqrt((u2-d2)^2 - 2 r (u2-d2)(d1-l1) + (d1-l1)^2)``,

    where ``r`` is the correlation of the trials' two differences times N / (N + 4), so that equal outcomes do not give width 0.
    """
    count, cells = len(first), ((1, 1), (0, 1), (1, 0), (0, 0))
    tables = [[int((rows == cell).all(1).sum()) for cell in cells] for rows in (first, second)]
    (l1, u1), (l2, u2) = (paired_difference_interval(*table) for table in tables)
    changes1, changes2 = (rows[:, 1] - rows[:, 0] for rows in (first, second))
    d1, d2 = changes1.mean().item(), changes2.mean().item()
    deviations = changes1 - d1, changes2 - d2
    norm = math.sqrt(math.prod((values**2).sum() for values in deviations))
    r = (deviations[0] * deviations[1]).sum() / norm * count / (count + 4) if norm else 0.0
    below = math.sqrt((d2 - l2) ** 2 - 2 * r * (d2 - l2) * (u1 - d1) + (u1 - d1) ** 2)
    above = math.sqrt((u2 - d2) ** 2 - 2 * r * (u2 - d2) * (d1 - l1) + (d1 - l1) ** 2)
    return max(-2.0, d2 - d1 - below), min(2.0, d2 - d1 + above)


STUDENT_T_95 = (
    12.7062, 4.30265, 3.18245, 2.77645, 2.57058, 2.44691, 2.36462, 2.30600, 2.26216, 2.22814, 2.20099, 2.17881, 2.16037, 2.14479,
    2.13145, 2.11991, 2.10982, 2.10092, 2.09302, 2.08596, 2.07961, 2.07387, 2.06866, 2.06390, 2.05954, 2.05553, 2.05183, 2.04841,
    2.04523, 2.04227,
)  # fmt: skip
"""97.5 % quantiles of Student's t distribution for 1 to 30 degrees of freedom."""


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean over independent runs and the ends of its 95 % Student's t interval (Student 1908, Biometrika 6:1).

    The interval is ``m +- t s / sqrt(n)``, where the std ``s`` has ``n - 1`` degrees of freedom. For a single value, it is infinite.
    """
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return mean, -math.inf, math.inf
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    degrees = count - 1
    # Beyond the table, the first terms of the expansion in 1 / degrees (Abramowitz and Stegun 1964, 26.7.5) suffice.
    z = Z_95
    tail = z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
    t = STUDENT_T_95[degrees - 1] if degrees <= len(STUDENT_T_95) else tail
    spread = t * std / math.sqrt(count)
    return mean, mean - spread, mean + spread


NUM_RESAMPLES = 10_000


def bootstrap_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of the 95 % percentile bootstrap interval for a mean (Efron 1979, Annals of Statistics 7:1).

    They are the 2.5 % and 97.5 % quantiles of the means of ``NUM_RESAMPLES`` resamples with a fixed seed; infinite for a single value.
    """
    if len(values) == 1:
        return -math.inf, math.inf
    numbers, generator, count = np.asarray(values, dtype=np.float64), np.random.default_rng(0), len(values)
    means = [numbers[generator.integers(count, size=(100, count))].mean(1) for _ in range(NUM_RESAMPLES // 100)]
    low, high = np.quantile(means, (0.025, 0.975)).tolist()
    return low, high


def difference_interval(successes: tuple[int, int], trials: tuple[int, int], z: float = Z_95) -> tuple[float, float]:
    """Return the 95 % interval for the difference (first minus second) between two proportions over independent trials.

    Method 10 of Newcombe 1998 (Statistics in Medicine 17:873): ``lower = p1 - p2 - sqrt((p1-l1)^2 + (u2-p2)^2)`` and
    ``upper = p1 - p2 + sqrt((u1-p1)^2 + (p2-l2)^2)`` with the Wilson intervals ``(l, u)`` of both. With no trials, it is (-1, 1).
    """
    if not all(trials):
        return -1.0, 1.0
    (l1, u1), (l2, u2) = (wilson_interval(k, n, z) for k, n in zip(successes, trials, strict=True))
    p1, p2 = (k / n for k, n in zip(successes, trials, strict=True))
    return p1 - p2 - math.hypot(p1 - l1, u2 - p2), p1 - p2 + math.hypot(u1 - p1, p2 - l2)
