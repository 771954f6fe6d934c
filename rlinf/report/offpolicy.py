"""Report section on an off-policy actor with a frozen base policy: sample efficiency, baselines and curves."""

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from rlinf.evaluation.result import Success
from rlinf.report.charts import NUM_COLOURS
from rlinf.report.page import Curves, curve_cards
from rlinf.report.run_data import RunData

TARGETS = (0.5, 0.8, 0.9)
"""Success-rate thresholds in the table of env steps."""

SHAKEN_ACTORS = ("residual", "expo", "rlt")
"""Actors that execute the base policy's actions plus noise during warm-up."""


def actor_section(data: RunData) -> dict[str, Any] | None:
    """Return the template values for ``pages/actor.html``, or None for a run without an actor."""
    lines = [line for line in data.lines if "rollout/base_policy_queries" in line]
    if not lines:
        return None
    return {
        "reached": _reached(data), "controls": _controls(data), "curves": _curves(lines),
        "is_calibrated": any("train/q_initial" in line for line in lines),
    }  # fmt: skip


def warmup_success(lines: Sequence[dict[str, Any]], algorithm: dict[str, Any]) -> Success | None:
    """Return the success of the base policy plus uniform noise over all iterations that are entirely warm-up; None without any."""
    actor, warmup = algorithm.get("actor") or {}, algorithm.get("learning_starts", 0)
    if actor.get("name") not in SHAKEN_ACTORS:
        return None
    warmup_lines = [
        line
        for line in lines
        if "rollout/success_rate" in line and "rollout/base_policy_queries" in line and line["rollout/env_steps_total"] <= warmup
    ]  # fmt: skip
    successes = sum(line["rollout/success_rate"] * line["rollout/num_episodes"] for line in warmup_lines)
    episodes = sum(line["rollout/num_episodes"] for line in warmup_lines)
    return Success(round(successes), int(episodes)) if episodes else None


def actor_warnings(data: RunData) -> list[str]:
    """Return a warning if noise without learning is as successful as the actor."""
    noise = warmup_success(data.lines, data.settings.get("algorithm") or {})
    if noise is None or data.after is None or data.after.result.total.interval[0] > noise.interval[1]:
        return []
    return [
        f"The base policy with uniform noise, without learning, solved {noise} of the training episodes of the warm-up. The actor's "
        f"{data.after.result.total} is not clearly higher: the 95 % intervals overlap"
    ]


def _reached(data: RunData) -> list[tuple[float, float, int, Success | None]]:
    """Return for each of ``TARGETS`` the env steps, queries and success of the first evaluation to reach it (success None: not reached)."""
    queries, evaluations = 0, []
    for line in data.lines:
        queries = line.get("rollout/base_policy_queries", queries)  # missing in lines from evaluations
        if line["phase"] == "rl" and line.get("eval/success_rate") is not None:
            success = Success(int(line["eval/successes"]), int(line["eval/episodes"]))
            evaluations.append((line["rollout/env_steps_total"], queries, success, line["eval/success_rate"]))
    if not evaluations:
        return []
    last = (evaluations[-1][0], 0, None, None)
    firsts = [(target, next((point for point in evaluations if point[3] >= target), last)) for target in TARGETS]
    return [(target, *point[:3]) for target, point in firsts]


def _controls(data: RunData) -> list[tuple[str, Success, int]]:
    """Return name, success and colour for the noise baseline and the evaluations; empty without the baseline."""
    rows = []
    noise = warmup_success(data.lines, data.settings.get("algorithm") or {})
    if noise is not None:
        rows.append(("base policy and uniform noise: the warm-up (training episodes)", noise, 3))
    evaluated = [
        (f"{evaluation.name} ({data.episodes})", evaluation.result.total, colour)
        for evaluation, colour in data.in_the_table
    ]
    return rows and rows + evaluated


def _curves(lines: Sequence[dict[str, Any]]) -> list[Markup]:
    names = sorted({name for line in lines for name in line if name.startswith("rollout/residual_norm/")})
    by_task = {name: name.rpartition("/")[2] for name in names[: NUM_COLOURS - 1]} if len(names) > 1 else {}
    curves: Curves = (
        (
            "Critics against returns",
            {"train/q_initial": "predicted by the critics", "train/return_initial": "observed until the end or the time limit"},
            "discounted return", {},
        ),
        ("Residual norm", {"rollout/residual_norm": "all tasks", **by_task}, "normalised action", {"zero": True}),
        ("Action saturation", {"train/action_saturation": "fraction"}, "fraction at the bound", {"percent": True}),
        ("Base actions taken", {"rollout/base_action_fraction": "fraction"}, "fraction of chunks", {"percent": True}),
        ("Critic loss", {"train/critic_loss": "critic loss"}, "squared error", {"zero": True}),
        ("Values of sampled transitions", {"train/q_mean": "value", "train/target_mean": "target"}, "value", {}),
        ("Entropy coefficient", {"train/alpha": "alpha"}, "alpha", {"log": True}),
    )  # fmt: skip
    return curve_cards(lines, "rollout/env_steps_total", "env steps", curves)
