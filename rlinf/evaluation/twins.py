"""Paired effect of perturbations: each episode of a perturbed task against its twin.

The twin is the episode of the unperturbed task with the same initial state, seed and random numbers of the policy.
"""

from collections.abc import Sequence

import numpy as np

from rlinf.evaluation.compare import Pairs
from rlinf.evaluation.intervals import difference_of_differences_interval
from rlinf.evaluation.result import EvaluationResult
from rlinf.evaluation.stopping import Episode, episode_of
from rlinf.files import Json
from rlinf.number_formats import format_p_value, format_points

TOTAL = "all kinds"
EFFECT_METHOD = (
    "95 % interval of the paired difference: Newcombe 1998, method 10; it describes the choice of variants, for these tasks and initial "
    "states"
)

Outcomes = dict[Episode, tuple[str, bool, bool]]
"""Maps each perturbed episode to its kind, and to success without and with the perturbation."""


def outcomes(result: EvaluationResult) -> Outcomes:
    """Return the outcomes of all perturbed episodes whose twin was run, in list order."""
    success = {episode_of(row): bool(row.success) for row in result.results}
    pairs = {}
    for (suite, task, state, seed), perturbed in success.items():
        kind, twin = result.twins.get(task, ("", ""))
        plain = success.get((suite, twin, state, seed))
        if plain is not None:
            pairs[suite, task, state, seed] = kind, plain, perturbed
    return pairs


def effects(result: EvaluationResult) -> list[Json]:
    """Return one row per kind of perturbation and one for all: ``kind`` and ``Pairs.as_dict``; ``a`` is without the perturbation."""
    rows = outcomes(result).values()
    kinds = [*dict.fromkeys(kind for kind, *_ in rows), TOTAL]
    cells = ((True, True), (True, False), (False, True), (False, False))
    table = {kind: [row[1:] for row in rows if kind in (row[0], TOTAL)] for kind in kinds} if rows else {}
    return [{"kind": kind, **Pairs(*map(pairs.count, cells)).as_dict()} for kind, pairs in table.items()]


def unpaired_warning(result: EvaluationResult) -> list[str]:
    """Return a warning if perturbed episodes were run without their twins."""
    num_unpaired = sum(row.task in result.twins for row in result.results) - len(outcomes(result))
    if not num_unpaired:
        return []
    return [
        f"{num_unpaired} perturbed episodes are not in the effects of perturbations, because the list (evaluation.first_episode, env.tasks) "
        "lacks the unperturbed task with the same initial state"
    ]


def effect_table(rows: Sequence[Json]) -> str:
    """Return the rows of ``effects`` as a text table."""
    width = max(len(row["kind"]) for row in rows)
    lines = [
        f"{'perturbation'.ljust(width)}     n  plain  perturbed  difference  95 % interval     only plain  only pert.  p"
    ]
    for row in rows:
        n = row["episodes"]
        lines.append(
            f"{row['kind'].ljust(max(width, 12))} {n:>5} {row['successes_a'] / n:>6.1%} {row['successes_b'] / n:>10.1%} "
            f"{format_points(row['difference']):>11}  {format_points(*row['interval']):<16} {row['only_a']:>11} {row['only_b']:>11}  "
            f"{format_p_value(row['p_value']).removeprefix('p = ')}"
        )
    return "\n".join([*lines, f"{EFFECT_METHOD}."])


def changes(before: EvaluationResult, after: EvaluationResult) -> list[Json]:
    """Return how the effect of each kind of perturbation differs between two policies, over the pairs that both have run.

    Each row has ``kind``, ``episodes``, the effects ``a`` and ``b`` (success with the perturbation minus without), their ``difference`` (b
    minus a) and its ``interval``; the last row is over all kinds.
    """
    first, second = outcomes(before), outcomes(after)
    common = [key for key in first if key in second]
    kinds = [*dict.fromkeys(first[key][0] for key in common), TOTAL] if common else []
    rows = []
    for kind in kinds:
        keys = [key for key in common if kind in (first[key][0], TOTAL)]
        tables = [np.array([table[key][1:] for key in keys], dtype=int) for table in (first, second)]
        low, high = difference_of_differences_interval(*tables)
        a, b = ((table[:, 1] - table[:, 0]).mean().item() for table in tables)
        rows.append({"kind": kind, "episodes": len(keys), "a": a, "b": b, "difference": b - a, "interval": [low, high]})
    return rows
