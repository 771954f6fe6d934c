"""A comparison that ends when it has decided, next to McNemar's test on a list of fixed length; both on the same simulated episodes.

First, how often equally good policies are told apart: by the sequential test whenever it is read, and by McNemar's p-value read after
every episode. Then, for a policy that succeeds on 60 % of the episodes against one that succeeds on 80 %: the length of the list with
which McNemar's test finds that with a given probability (its power), the length that the sequential test needs for the same power, and
the episodes that it plays on average. A part ``--together`` of the episodes is equally hard for both policies.

    python benchmarks/sequential.py [--runs 2000] [--episodes 200] [--rates 0.6 0.8]
"""

from __future__ import annotations

import argparse
import json

import numpy as np

from rlinf.evaluation.compare import mcnemar_exact
from rlinf.evaluation.sequential import LEVEL, log_e_value, log_threshold

POWERS = (0.8, 0.9, 0.95)
LONGEST = 600


def outcomes(generator: np.random.Generator, rates: tuple[float, float], together: float, shape: tuple[int, int]):
    """Return the successes of two policies, bool ``[2, runs, episodes]``; the part ``together`` shares its difficulty."""
    own = generator.random((2, *shape))
    own[1] = np.where(generator.random(shape) < together, own[0], own[1])
    return own < np.array(rates)[:, None, None]


class Tables:
    """What both tests say of ``wins`` in ``differing`` episodes, looked up instead of computed."""

    def __init__(self, most: int) -> None:
        self.values = np.full((most + 1, most + 1), -np.inf)
        self.rejects = np.zeros((most + 1, most + 1), dtype=bool)
        least = 0
        for differing in range(most + 1):
            while mcnemar_exact(least, differing - least) <= LEVEL:
                least += 1
            for wins in range(differing + 1):
                self.values[differing, wins] = log_e_value(wins, differing)
                self.rejects[differing, wins] = min(wins, differing - wins) < least


def read(tables: Tables, played: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return for each run and moment ``[runs, episodes]``: e-value (logarithm), whether McNemar rejects, and whether the second leads."""
    signs = played[1].astype(np.int32) - played[0]
    wins, differing = np.cumsum(signs > 0, axis=1), np.cumsum(signs != 0, axis=1)
    return tables.values[differing, wins], tables.rejects[differing, wins], 2 * wins > differing


def first_time(values: np.ndarray, num_episodes: int) -> np.ndarray:
    """Return after which episode each run decides; more than ``num_episodes`` if it does not."""
    reached = values[:, :num_episodes] >= log_threshold(num_episodes) - 1e-12
    return np.where(reached.any(1), 1 + reached.argmax(1), num_episodes + 1)


def false_positives(tables: Tables, runs: int, num_episodes: int) -> float:
    """Print the table of equally good policies, and return the largest rate of the sequential test."""
    generator, worst = np.random.default_rng(0), 0.0
    print(f"equally good policies, {runs} runs of {num_episodes} episodes: told apart at some moment")
    print("rate  together  sequential  McNemar, read after every episode")
    for rate in (0.1, 0.3, 0.5, 0.7, 0.9):
        for together in (0.0, 0.5, 0.9):
            values, rejects, _ = read(tables, outcomes(generator, (rate, rate), together, (runs, num_episodes)))
            found = float((first_time(values, num_episodes) <= num_episodes).mean())
            worst = max(worst, found)
            print(f"{rate:4.0%}  {together:8.0%}  {found:10.1%}  {rejects.any(1).mean():.1%}")
    return worst


def lengths(tables: Tables, rates: tuple[float, float], runs: int) -> dict[str, float]:
    """Print the table of episodes needed, and return the row of the last power with ``together`` 0."""
    found: dict[str, float] = {}
    print(f"\n{rates[0]:.0%} against {rates[1]:.0%}: episodes, {runs} runs")
    print("together  power  fixed list  sequential list  played on average  part of the fixed list")
    for together in (0.5, 0.0):
        played = outcomes(np.random.default_rng(1), rates, together, (runs, LONGEST))
        values, rejects, leads = read(tables, played)
        for power in POWERS:
            right = (rejects & leads).mean(0) >= power
            if not right[-1]:
                raise SystemExit(
                    f"McNemar's test has no power of {power:.0%} within {LONGEST} episodes; use other --rates"
                )
            fixed = int(1 + np.flatnonzero(~right)[-1] + 1)  # from here on the power stays
            length = fixed
            while True:
                times = first_time(values, length)
                decided = times <= length
                right_ones = decided & leads[np.arange(runs), np.minimum(times, length) - 1]
                if right_ones.mean() >= power:
                    break
                if length >= LONGEST:
                    raise SystemExit(
                        f"The sequential test has no power of {power:.0%} within {LONGEST} episodes; use other --rates"
                    )
                length += 1
            mean = float(np.minimum(times, length).mean())
            print(f"{together:8.0%}  {power:5.0%}  {fixed:10}  {length:15}  {mean:17.1f}  {mean / fixed:.2f}")
            found = {"power": power, "fixed": fixed, "list": length, "ours": mean}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--rates", type=float, nargs=2, default=(0.6, 0.8))
    args = parser.parse_args()
    tables = Tables(LONGEST)
    worst = false_positives(tables, args.runs, args.episodes)
    needed = lengths(tables, tuple(args.rates), args.runs)
    print(json.dumps({
        "name": "sequential", "ours": needed["ours"], "peer": needed["fixed"], "ratio": needed["fixed"] / needed["ours"],
        "power": needed["power"], "sequential_list": needed["list"], "rates": list(args.rates), "runs": args.runs,
        "episodes": args.episodes, "worst_false_positive_rate": worst,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
