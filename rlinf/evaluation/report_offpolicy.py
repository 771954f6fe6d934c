"""The part of the report about a head on a frozen policy: env steps, corrections, and how well the critics predict."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from rlinf.evaluation.charts import NUM_COLOURS, SMALL, Series
from rlinf.evaluation.report_data import RunData
from rlinf.evaluation.report_page import card, charts, row, success_cell, table
from rlinf.evaluation.result import Success

TARGETS = (0.5, 0.8, 0.9)
"""Success rates of which the report says after how many env steps they were reached."""

SHAKEN_HEADS = ("residual", "edit", "chunk")
"""Heads whose warm-up plays the frozen policy and noise."""

MAX_SENTENCES = 24

CALIBRATION_NOTE = (
    "Critics against returns: the first episode of each env in an iteration, if it ended there. An episode that a time limit cut "
    "counts with what it had reached until then. The critics also value what would have followed, so they may be above such returns "
    "and right. Without these episodes, most of which failed, the returns would flatter."
)


def head_section(data: RunData) -> str:
    """Return the section; "" for a run without a head."""
    lines = [line for line in data.lines if "rollout/base_calls_total" in line]
    if not lines:
        return ""
    parts = (_env_steps(data), _controls(data), _curves(lines), _sentences(data), _largest(data))
    return f"<h2>Head on a frozen policy</h2>{''.join(parts)}"


def warmup_success(lines: Sequence[dict[str, Any]], algorithm: dict[str, Any]) -> Success | None:
    """Return the success of the frozen policy and uniform noise, in the whole iterations of the warm-up; None without any.

    Args:
        lines: Of ``metrics.jsonl``.
        algorithm: That section of the configuration.
    """
    head, warmup = algorithm.get("head") or {}, algorithm.get("warmup_env_steps", 0)
    if head.get("name") not in SHAKEN_HEADS:
        return None
    played = [
        line
        for line in lines
        if "rollout/success_rate" in line and "rollout/base_calls_total" in line and line["rollout/env_steps_total"] <= warmup
    ]  # fmt: skip
    successes = sum(line["rollout/success_rate"] * line["rollout/num_episodes"] for line in played)
    episodes = sum(line["rollout/num_episodes"] for line in played)
    return Success(round(successes), int(episodes)) if episodes else None


def head_warnings(data: RunData) -> list[str]:
    """Return what a reader should know of the success of a head: whether noise alone would have reached it."""
    noise = warmup_success(data.lines, data.settings.get("algorithm") or {})
    if noise is None or data.after is None or data.after.result.interval[0] > noise.interval[1]:
        return []
    return [
        f"Uniform noise around the frozen policy, without any learning, solved {noise} of the training episodes of the warm-up. The "
        f"head's {data.after.result.total} are not clearly more: their 95 % intervals overlap"
    ]


def _env_steps(data: RunData) -> str:
    """Return a table of the env steps after which the evaluations reached a success rate."""
    calls, found = 0, []
    for line in data.lines:
        calls = line.get("rollout/base_calls_total", calls)  # an evaluation has a line of its own
        if line["phase"] == "rl" and line.get("eval/success_rate") is not None:
            found.append((line["rollout/env_steps_total"], calls, line))
    if not found:
        return ""
    body = []
    for target in TARGETS:
        reached = next((each for each in found if each[2]["eval/success_rate"] >= target), None)
        if reached is None:
            cells = [f"<td>not within {found[-1][0]:,.0f}</td>", "<td></td>", "<td></td>"]
        else:
            success = Success(int(reached[2]["eval/successes"]), int(reached[2]["eval/episodes"]))
            cells = [f"<td>{reached[0]:,.0f}</td>", f"<td>{reached[1]:,.0f}</td>", success_cell(success, 1)]
        body.append(row(f"{target:.0%}", cells))
    columns = ("success", "env steps", "calls of the frozen policy", "evaluation")
    return (
        f"{table(columns, body, 'card scroll')}"
        '<p class="note">The first evaluation at or above each rate. Evaluations in between may have passed it earlier: '
        "trainer.eval_every says how often one was made.</p>"
    )


def _controls(data: RunData) -> str:
    """Return a table of what the frozen policy reaches without any learning."""
    rows = []
    noise = warmup_success(data.lines, data.settings.get("algorithm") or {})
    if noise is not None:
        rows.append(row("frozen policy and uniform noise: the warm-up (training episodes)", [success_cell(noise, 3)]))
    for control in data.controls:
        success = Success(control["successes"], control["episodes"])
        rows.append(row(f"{control['name']} ({data.episodes})", [success_cell(success, 3)]))
    if not rows:
        return ""
    for one, colour in data.in_the_table:
        rows.append(row(f"{one.name} ({data.episodes})", [success_cell(one.result.total, colour)]))
    note = "What noise or a constant correction reaches says how much of the gap had to be learnt."
    return f'<h4>Without any learning</h4>{table(("policy", "success"), rows, "card scroll")}<p class="note">{note}</p>'


def _curves(lines: Sequence[dict[str, Any]]) -> str:
    names = sorted({name for line in lines for name in line if name.startswith("rollout/correction/")})
    by_task = {name: name.rpartition("/")[2] for name in names[: NUM_COLOURS - 1]} if len(names) > 1 else {}
    groups: tuple[tuple[str, dict[str, str], str, dict[str, bool]], ...] = (
        (
            "Critics against returns",
            {"train/q_first": "what the critics expected", "train/return_first": "what came of it until the end or the time limit"},
            "discounted return", {},
        ),
        (
            "Size of corrections", {"rollout/correction": "all tasks", **by_task}, "halves of the range", {"zero": True},
        ),
        ("Numbers of the head at their bound", {"train/at_bound": "share"}, "share", {"percent": True}),
        ("Chunks left as they were", {"rollout/base_chosen": "share"}, "share", {"percent": True}),
        ("Critic loss", {"train/critic_loss": "critic loss"}, "squared error", {"zero": True}),
        ("Values of drawn transitions", {"train/q_mean": "value", "train/target_mean": "target"}, "value", {}),
        ("Weight of the entropy", {"train/alpha": "alpha"}, "alpha", {"log": True}),
    )  # fmt: skip
    cards = []
    for title, shown, y_label, options in groups:
        series = [
            Series(label, [(line["rollout/env_steps_total"], line[name]) for line in lines if name in line], 1 + number)
            for number, (name, label) in enumerate(shown.items())
        ]
        cards.append(card(title, series, "env steps", y_label, size=SMALL, **options))
    note = f'<p class="note">{CALIBRATION_NOTE}</p>' if any("train/q_first" in line for line in lines) else ""
    return charts(cards, style="charts small") + note


def _sentences(data: RunData) -> str:
    """Return a table of the corrections of the last iteration by sentence, the largest first."""
    rows = sorted(data.corrections.get("sentences", []), key=lambda each: -each["size"])
    if not rows:
        return ""
    body = []
    for each in rows[:MAX_SENTENCES]:
        constant = sum(map(abs, each["change"])) / len(each["change"])
        share = f"{constant / each['size']:.0%}" if each["size"] else ""
        cells = (escape(each["task"]), each["calls"], f"{each['size']:.3f}", _numbers(each["change"]), share)
        body.append(row(each["instruction"], [f"<td>{cell}</td>" for cell in cells]))
    left_out = (
        f" {len(rows) - MAX_SENTENCES} more sentences are in corrections.json." if len(rows) > MAX_SENTENCES else ""
    )
    columns = ("sentence", "task", "policy calls", "mean size", "mean change of an action", "constant part")
    note = (
        f"Iteration {data.corrections['step']}, the head without noise against the greedy action of the frozen policy, in halves of "
        "the range of the env. The constant part is the size of the mean change, in shares of the mean size: at 100 % one vector "
        f"would do the same.{left_out}"
    )
    return f'<h4>Corrections by sentence</h4>{table(columns, body, "card scroll")}<p class="note">{note}</p>'


def _largest(data: RunData) -> str:
    """Return a table of the largest corrections of the last iteration, one of each episode, with what the policy saw."""
    rows = data.corrections.get("largest", [])
    if not rows:
        return ""
    has_pictures = any(each["picture"] for each in rows)
    body = []
    for each in rows:
        image = f'<img src="data:image/png;base64,{each["picture"]}" alt="first camera">' if each["picture"] else ""
        cells = [f"<td>{image}</td>"] if has_pictures else []
        cells += [
            f"<td>{escape(each['task'])}, init state {each['init_state_id']}</td>", f"<td>{each['call']}</td>",
            f"<td>{each['size']:.3f}</td>", f"<td>{_numbers(each['base'])}</td>", f"<td>{_numbers(each['action'])}</td>",
        ]  # fmt: skip
        body.append(row(each["instruction"], cells))
    pictures = ("seen",) if has_pictures else ()
    columns = ("sentence", *pictures, "episode", "policy call", "size", "frozen policy", "with the head")
    note = "The episodes with the largest corrections, and where these were; an action is the mean over its chunk."
    return f'<h4>Largest corrections</h4>{table(columns, body, "card scroll")}<p class="note">{note}</p>'


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:+.2f}" for value in values)
