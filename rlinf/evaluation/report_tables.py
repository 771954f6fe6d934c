"""The parts of the report about success: headline, warnings, tasks and all evaluations."""

from __future__ import annotations

from html import escape
from typing import Any

from rlinf.evaluation.report_data import RunData
from rlinf.evaluation.report_offpolicy import head_warnings
from rlinf.evaluation.report_page import details, gain_tile, row, success_cell, table, tile, warning_card
from rlinf.number_formats import format_p_value, format_points


def headline(data: RunData) -> str:
    """Return tiles with success before and after RL, or of the newest evaluation."""
    before, after = data.before, data.after
    if after is None and not data.evaluations:
        return ""
    if after is None:
        last = data.evaluations[-1]
        tiles = [tile("Success" if last.folder == "." else f"Success {last.name}", last.result.total, 1)]
    else:
        tiles = [tile("Success after RL", after.result.total, 1)]
        if before is not None:
            tiles = [tile(f"Success {before.name}", before.result.total, 2), *tiles]
        if before is not None and after.result.total.is_told:
            gain = _gain_tile(before.result.success_rate, after.result.success_rate, data.gain)
            tiles.append(gain)
    return f'<section class="headline">{"".join(tiles)}</section>'


def _gain_tile(before: float, after: float, paired: dict[str, Any] | None) -> str:
    """Return a tile with the gain and, given ``RunData.gain``, its paired test."""
    if paired is None:
        detail = "percentage points, not tested: the two did not play the same episodes in the same way"
    else:
        total = paired["total"]
        detail = (
            f"percentage points, 95 % interval {format_points(*total['interval'])}; of the same {total['episodes']} episodes, "
            f"{total['only_b']} were solved only after RL and {total['only_a']} only before: "
            f"{format_p_value(total['p_value'])} (McNemar)"
        )
    return gain_tile("Gain by RL", after - before, detail)


def tasks(data: RunData) -> str:
    """Return a table of success per task, with intervals."""
    shown = data.in_the_table
    if not shown:
        return ""
    tasks = list(dict.fromkeys(task for one, _ in shown for task in one.result.per_task))
    rows = [(task, [(one.result.per_task.get(task), colour) for one, colour in shown], "") for task in tasks]
    if len(tasks) > 1:
        rows.append(("all tasks", [(one.result.total, colour) for one, colour in shown], "total"))
    body = []
    for task, successes, style in rows:
        cells = [success_cell(success, colour) for success, colour in successes]
        if len(successes) > 1:
            first, second = (success for success, _ in successes)
            gain = format_points(second.success_rate - first.success_rate) if first and second else ""
            if first and second and not second.is_told:
                gain = f"{second.returns[0] - first.returns[0]:+.4g}"
            cells.append(f"<td>{gain}</td>")
        body.append(row(task, cells, style))
    columns = ["task", *(escape(one.name) for one, _ in shown), *(["gain"] if len(shown) > 1 else [])]
    return (
        f"<h2>{'Success' if shown[-1][0].result.total.is_told else 'Return'} per task</h2>{table(columns, body, 'card scroll')}"
        f'<p class="note">{data.episodes.capitalize()}, each run once; the intervals are 95 %: Wilson of success, Student\'s t of returns.</p>'
    )


def warnings(data: RunData) -> str:
    """Return the warnings of the newest evaluation, of the parity gate, and of a head that noise equals."""
    lines = list(data.evaluations[-1].result.warnings) if data.evaluations else []
    checked = [line for line in data.lines if "rollout/parity_exceeded" in line]
    beyond = [line["step"] for line in checked if line["rollout/parity_exceeded"]]
    if beyond:
        lines.append(
            f"At {len(beyond)} of {len(checked)} iterations (the first: {beyond[0]}) rollout and trainer differed by more than the "
            "parity gate accepts; see the curve of the parity gap"
        )
    return warning_card([*lines, *head_warnings(data)])


def all_evaluations(data: RunData) -> str:
    """Return a table with a line per evaluation, if there are three or more."""
    if len(data.evaluations) < 3:
        return ""
    rows = [
        row(one.name, [success_cell(one.result.total, 1), f"<td>{'greedy' if one.result.greedy else 'sampled'}</td>"])
        for one in data.evaluations
    ]
    return details(f"All {len(data.evaluations)} evaluations", table(("evaluation", "success", "actions"), rows))
