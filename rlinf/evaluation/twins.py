"""Paired effect of perturbations: each episode of a perturbed task against its twin.

The twin is the episode of the unperturbed task with the same initial state, seed and random numbers of the policy.
"""

from collections.abc import Sequence

from rlinf.evaluation.compare import TOTAL, Pairs, perturbed_outcomes
from rlinf.evaluation.result import EvaluationResult
from rlinf.files import Json
from rlinf.number_formats import format_p_value, format_points

EFFECT_METHOD = "95 % interval of the paired difference: Newcombe 1998, method 10; it describes the choice of variants, for these tasks and initial states"


def effects(result: EvaluationResult) -> list[Json]:
    """Return one row per kind of perturbation and one for all: ``kind`` and ``Pairs.as_dict``; ``a`` is without the perturbation."""
    rows = perturbed_outcomes(result).values()
    kinds = [*dict.fromkeys(kind for kind, *_ in rows), TOTAL]
    cells = ((True, True), (True, False), (False, True), (False, False))
    table = {kind: [row[1:] for row in rows if kind in (row[0], TOTAL)] for kind in kinds} if rows else {}
    return [{"kind": kind, **Pairs(*map(pairs.count, cells)).as_dict()} for kind, pairs in table.items()]


def unpaired_warning(result: EvaluationResult) -> list[str]:
    """Return a warning if perturbed episodes were run without their twins."""
    num_unpaired = sum(row.task in result.twins for row in result.results) - len(perturbed_outcomes(result))
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
