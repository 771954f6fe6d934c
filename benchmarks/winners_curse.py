"""Measures how much too high the success of the best of several evaluations is, and that a fresh evaluation is not.

A policy that does not learn succeeds in a fraction ``p`` of the episodes. Of ``m`` evaluations on ``n`` episodes each, the best one is
too high by about ``E[max of m standard normals] * sqrt(p (1 - p) / n)``; the table compares this with simulated evaluations. Then
``--runs`` simulated runs choose a checkpoint with ``LoopState.best_evaluation``, as `rlinf train` does, and evaluate it once more.

    python benchmarks/winners_curse.py [--runs 2000]

``ours`` is the mean error of the fresh evaluation in these runs, ``peer`` the mean error of the evaluation that chose the checkpoint,
both in points; ``standard_error`` is the fresh one's.
"""

from __future__ import annotations

import argparse
import json
import math

import numpy as np

from rlinf.training.state import LoopState

P = 0.7
COUNTS, EPISODES = (3, 5, 10, 13, 30), (50, 100, 200, 500)
NUM_DRAWS = 100_000


def expected_maximum(count: int) -> float:
    """Return the expected maximum of ``count`` independent standard normals, by numeric integration of its density."""
    x = np.linspace(-8, 8, 20_001)
    cumulative = np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in x])
    density = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    return float(np.sum(x * count * density * cumulative ** (count - 1)) * (x[1] - x[0]))


def theory(count: int, episodes: int) -> float:
    """Return the bias of the best of ``count`` evaluations on ``episodes`` episodes each, as a success rate."""
    return expected_maximum(count) * math.sqrt(P * (1 - P) / episodes)


def simulated_runs(num_runs: int, count: int, episodes: int, generator: np.random.Generator) -> np.ndarray:
    """Return the success rates ``[num_runs, 2]`` of the chosen checkpoint: in the evaluation that chose it, and in a fresh one."""
    rates = []
    names = [f"rl_{step:06d}" for step in range(1, count + 1)]
    for draws in generator.binomial(episodes, P, (num_runs, count)) / episodes:
        evaluations = {
            name: {"success_rate": rate, "checkpoint": name} for name, rate in zip(names, draws, strict=True)
        }
        tag = LoopState(evaluations=evaluations).best_evaluation(names)
        rates.append((evaluations[tag]["success_rate"], generator.binomial(episodes, P) / episodes))
    return np.array(rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=2000, help="number of simulated runs")
    num_runs, generator = parser.parse_args().runs, np.random.default_rng(0)
    print(f"bias of the best of m evaluations at p = {P} in points: simulated (theory)")
    print("  m" + "".join(f"{f'n = {episodes}':>16}" for episodes in EPISODES))
    table = {}
    for count in COUNTS:
        cells = []
        for episodes in EPISODES:
            best = generator.binomial(episodes, P, (NUM_DRAWS, count)).max(axis=1) / episodes
            table[f"{count} of {episodes}"] = points = round(100 * (best.mean() - P), 2)
            cells.append(f"{points:5.1f} ({100 * theory(count, episodes):.1f})")
        print(f"{count:3}" + "".join(f"{cell:>16}" for cell in cells))
    count, episodes = 13, 200
    chosen, fresh = 100 * (simulated_runs(num_runs, count, episodes, generator) - P).T
    error = fresh.std() / math.sqrt(num_runs)
    print(f"{num_runs} runs without learning, {count} evaluations of {episodes} episodes: the chosen number is {chosen.mean():+.2f} "
          f"points too high (theory {100 * theory(count, episodes):+.2f}), the fresh one {fresh.mean():+.2f} (standard error {error:.2f})")  # fmt: skip
    result = {
        "name": "winners_curse", "ours": round(fresh.mean(), 3), "peer": round(chosen.mean(), 3), "ratio": round(fresh.mean() / chosen.mean(), 3),
        "theory": round(100 * theory(count, episodes), 3), "standard_error": round(error, 3),
        "sizes": {"p": P, "runs": num_runs, "evaluations": count, "episodes": episodes, "draws": NUM_DRAWS, "table": table},
    }  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main()
