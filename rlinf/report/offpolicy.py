"""The part of the report about an actor on a frozen policy: env steps, corrections, and how well the critics predict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from rlinf.evaluation.result import Success
from rlinf.report.charts import NUM_COLOURS
from rlinf.report.page import Curves, curve_cards
from rlinf.report.run_data import RunData

TARGETS = (0.5, 0.8, 0.9)
"""Success-rate thresholds of the table of env steps."""

SHAKEN_ACTORS = ("residual", "expo", "rlt")
"""Actors whose warm-up plays the frozen policy and noise."""


def actor_section(data: RunData) -> dict[str, Any] | None:
    """Return the values of ``pages/actor.html``; None for a run without an actor."""
    lines = [line for line in data.lines if "rollout/base_policy_queries" in line]
    if not lines:
        return None
    return {
        "reached": _reached(data), "controls": _controls(data), "curves": _curves(lines),
        "is_calibrated": any("train/q_initial" in line for line in lines),
    }  # fmt: skip


def warmup_success(lines: Sequence[dict[str, Any]], algorithm: dict[str, Any]) -> Success | None:
    """Return the success of the frozen policy and uniform noise, in the whole iterations of the warm-up; None without any."""
    actor, warmup = algorithm.get("actor") or {}, algorithm.get("learning_starts", 0)
    if actor.get("name") not in SHAKEN_ACTORS:
        return None
    played = [
        line
        for line in lines
        if "rollout/success_rate" in line and "rollout/base_policy_queries" in line and line["rollout/env_steps_total"] <= warmup
    ]  # fmt: skip
    successes = sum(line["rollout/success_rate"] * line["rollout/num_episodes"] for line in played)
    episodes = sum(line["rollout/num_episodes"] for line in played)
    return Success(round(successes), int(episodes)) if episodes else None


def actor_warnings(data: RunData) -> list[str]:
    """Return what a reader should know of the success of an actor: whether noise alone would have reached it."""
    noise = warmup_success(data.lines, data.settings.get("algorithm") or {})
    if noise is None or data.after is None or data.after.result.total.interval[0] > noise.interval[1]:
        return []
    return [
        f"Uniform noise around the frozen policy, without any learning, solved {noise} of the training episodes of the warm-up. The "
        f"actor's {data.after.result.total} are not clearly more: their 95 % intervals overlap"
    ]


def _reached(data: RunData) -> list[tuple[float, float, int, Success | None]]:
    """Return each of ``TARGETS`` with env steps, calls and success of the first evaluation there; None: in none of these env steps."""
    calls, found = 0, []
    for line in data.lines:
        calls = line.get("rollout/base_policy_queries", calls)  # an evaluation has a line of its own
        if line["phase"] == "rl" and line.get("eval/success_rate") is not None:
            success = Success(int(line["eval/successes"]), int(line["eval/episodes"]))
            found.append((line["rollout/env_steps_total"], calls, success, line["eval/success_rate"]))
    if not found:
        return []
    last = (found[-1][0], 0, None, None)
    firsts = [(target, next((each for each in found if each[3] >= target), last)) for target in TARGETS]
    return [(target, *each[:3]) for target, each in firsts]


def _controls(data: RunData) -> list[tuple[str, Success, int]]:
    """Return name, success and colour of what the frozen policy reaches without any learning, and of the evaluations."""
    rows = []
    noise = warmup_success(data.lines, data.settings.get("algorithm") or {})
    if noise is not None:
        rows.append(("frozen policy and uniform noise: the warm-up (training episodes)", noise, 3))
    evaluated = [(f"{one.name} ({data.episodes})", one.result.total, colour) for one, colour in data.in_the_table]
    return rows and rows + evaluated


def _curves(lines: Sequence[dict[str, Any]]) -> list[Markup]:
    names = sorted({name for line in lines for name in line if name.startswith("rollout/residual_norm/")})
    by_task = {name: name.rpartition("/")[2] for name in names[: NUM_COLOURS - 1]} if len(names) > 1 else {}
    curves: Curves = (
        (
            "Critics against returns",
            {"train/q_initial": "expected by the critics", "train/return_initial": "reached until the end or the time limit"},
            "discounted return", {},
        ),
        ("Size of corrections", {"rollout/residual_norm": "all tasks", **by_task}, "halves of the range", {"zero": True}),
        ("Numbers of the actor at their bound", {"train/action_saturation": "share"}, "share", {"percent": True}),
        ("Chunks left as they were", {"rollout/base_action_fraction": "share"}, "share", {"percent": True}),
        ("Critic loss", {"train/critic_loss": "critic loss"}, "squared error", {"zero": True}),
        ("Values of drawn transitions", {"train/q_mean": "value", "train/target_mean": "target"}, "value", {}),
        ("Weight of the entropy", {"train/alpha": "alpha"}, "alpha", {"log": True}),
    )  # fmt: skip
    return curve_cards(lines, "rollout/env_steps_total", "env steps", curves)
