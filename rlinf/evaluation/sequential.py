"""Sequential paired test of two policies, valid after every episode.

Checking a fixed-sample p-value after every episode finds differences between equal policies: with 200 episodes, in up to one in five
comparisons.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

LEVEL = 0.05
"""Upper bound on the probability that two equally good policies are ever declared different."""
PRIOR = 3.0
"""Both parameters of the beta prior over the fraction of wins; larger values put more weight on small differences."""


def log_e_value(wins: int, differing: int) -> float:
    """Return the log e-value if the second policy has ``wins`` wins in the ``differing`` episodes on which the two policies differ.

    Robbins 1970 (Annals of Mathematical Statistics 41:1397), section 2, for coin tosses: the likelihood of the sequence, averaged
    over a Beta(a, a) distribution of the fraction of wins, divided by its likelihood ``2^-d`` if neither policy is better:

    ``E = 2^d B(a + w, a + d - w) / B(a, a)`` with ``a = PRIOR``. It is a martingale with mean 1 if neither is better.
    """
    return (
        math.lgamma(PRIOR + wins)
        + math.lgamma(PRIOR + differing - wins)
        - math.lgamma(2 * PRIOR + differing)
        - 2 * math.lgamma(PRIOR)
        + math.lgamma(2 * PRIOR)
        + differing * math.log(2)
    )


def crossing_probability(log_level: float, num_episodes: int) -> float:
    """Return the probability that the e-value ever reaches a level within ``num_episodes`` if neither policy is better.

    Computed exactly with a symmetric random walk that stops when it reaches the level. Ville's bound, ``exp(-log_level)``, holds for
    any number of episodes but is larger.
    """
    # Only compute the case in which the two policies differ on all episodes, because it has the highest probability.
    gammas = np.array([math.lgamma(PRIOR + number) for number in range(num_episodes + 1)])
    running, reached = np.ones(1), 0.0
    for differing in range(1, num_episodes + 1):
        halves = np.zeros(differing + 1)
        halves[:-1] += running / 2
        halves[1:] += running / 2
        values = gammas[: differing + 1] + gammas[: differing + 1][::-1]
        values += log_e_value(0, differing) - values[0]  # add the terms that do not depend on the wins
        beyond = values >= log_level - 1e-12
        reached += halves[beyond].sum()
        running = np.where(beyond, 0.0, halves)
    return float(reached)


@cache
def log_threshold(num_episodes: int) -> float:
    """Return the smallest log level that equally good policies reach with a probability of at most ``LEVEL``."""
    low, high = 0.0, math.log(1 / LEVEL)
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if crossing_probability(middle, num_episodes) <= LEVEL else (middle, high)
    return high


def log_e_values(signs: Sequence[int]) -> list[float]:
    """Return the log e-value after each episode; a sign is 1 (only the second policy succeeded), -1 (only the first) or 0."""
    wins = differing = 0
    values = []
    for sign in signs:
        wins += sign > 0
        differing += sign != 0
        values.append(log_e_value(wins, differing))
    return values


def decided_at(signs: Sequence[int], num_episodes: int) -> int | None:
    """Return the number of episodes after which the test on a list of ``num_episodes`` decides; None if it is still undecided."""
    threshold = log_threshold(num_episodes) - 1e-12
    return next((1 + place for place, value in enumerate(log_e_values(signs)) if value >= threshold), None)


def sequential_p_value(signs: Sequence[int], num_episodes: int) -> float:
    """Return the current two-sided p-value, which is valid after every episode of a list of ``num_episodes``.

    It is the probability that equally good policies ever reach the largest e-value observed so far, so it never increases.
    """
    return min(1.0, crossing_probability(max([0.0, *log_e_values(signs)]), num_episodes))


def rate_confidence_sequence(successes: int, episodes: int) -> tuple[float, float]:
    """Return an interval for the success rate; with a probability of at least 95 %, the intervals after every episode all contain it.

    Robbins 1970, section 2: all rates ``p`` at which ``B(1/2 + k, 1/2 + n - k) / B(1/2, 1/2)``, the likelihood of ``k`` successes in ``n``
    episodes averaged over a Beta(1/2, 1/2) distribution, is less than ``1 / LEVEL`` times ``p^k (1 - p)^(n - k)``.
    """

    def log_likelihood(rate: float) -> float:
        return _times_log(successes, rate) + _times_log(episodes - successes, 1 - rate)

    least = _log_mixture(successes, episodes - successes) + math.log(LEVEL)
    best = successes / episodes if episodes else 0.5
    return _outermost(log_likelihood, least, best, 0.0), _outermost(log_likelihood, least, best, 1.0)


def difference_confidence_sequence(only_first: int, only_second: int, same: int) -> tuple[float, float]:
    """Return a 95 % confidence sequence for the paired difference between two success rates, second minus first.

    The mixture is Dirichlet(1/2, 1/2, 1/2) over the probabilities of the three outcomes. The likelihood of a difference is the maximum
    over all probabilities that have this difference, so the interval contains a difference if any of them is in the confidence set.
    """

    def log_likelihood(difference: float) -> float:
        less, more = (only_first, only_second) if difference >= 0 else (only_second, only_first)
        probability = _likeliest_probability(less, more, same, abs(difference))
        rest = 1 - 2 * probability - abs(difference)
        return _times_log(less, probability) + _times_log(more, probability + abs(difference)) + _times_log(same, rest)

    episodes = only_first + only_second + same
    least = _log_mixture(only_first, only_second, same) + math.log(LEVEL)
    best = (only_second - only_first) / episodes if episodes else 0.0
    return _outermost(log_likelihood, least, best, -1.0), _outermost(log_likelihood, least, best, 1.0)


def _likeliest_probability(less: int, more: int, same: int, difference: float) -> float:
    """Return the most likely probability ``x`` of an outcome if the opposite outcome has probability ``x + difference``.

    Setting the derivative of ``less ln x + more ln(x + d) + same ln(1 - 2 x - d)`` to zero yields a quadratic equation.
    """
    episodes = less + more + same
    if not episodes:
        return (1 - difference) / 3
    linear = (1 - difference) * (less + more) - 2 * difference * (less + same)
    root = math.sqrt(linear * linear + 8 * episodes * (1 - difference) * less * difference)
    return min(max((linear + root) / (4 * episodes), 0.0), (1 - difference) / 2)


def _log_mixture(*counts: int) -> float:
    """Return the log of the counts' likelihood averaged over a Dirichlet distribution with parameters 1/2."""
    parts = sum(math.lgamma(count + 0.5) - math.lgamma(0.5) for count in counts)
    return parts + math.lgamma(len(counts) / 2) - math.lgamma(sum(counts) + len(counts) / 2)


def _times_log(count: int, probability: float) -> float:
    """Return ``count ln(probability)``, or 0 if ``count`` is 0."""
    if not count:
        return 0.0
    return count * math.log(probability) if probability > 0 else -math.inf


def _outermost(log_likelihood: Callable[[float], float], least: float, inside: float, end: float) -> float:
    """Return the point closest to ``end`` where a likelihood that decreases from ``inside`` to ``end`` is still at least ``least``."""
    if log_likelihood(end) >= least:
        return end
    outside = end
    for _ in range(50):
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if log_likelihood(middle) >= least else (inside, middle)
    return outside
