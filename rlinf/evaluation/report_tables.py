"""The parts of the report about success: headline, warnings, tasks, and comparisons of two evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from rlinf.evaluation.charts import difference_bar, interval_bar
from rlinf.evaluation.report_data import RunData
from rlinf.evaluation.result import Success
from rlinf.number_formats import format_interval, format_p_value, format_points


def headline(data: RunData) -> str:
    """Return tiles with success before and after RL, or of the newest evaluation."""
    before, after = data.before, data.after
    if after is None and not data.evaluations:
        return ""
    if after is None:
        last = data.evaluations[-1]
        tiles = [_tile("Success" if last.folder == "." else f"Success {last.name}", last.result.total, 1)]
    else:
        tiles = [_tile("Success after RL", after.result.total, 1)]
        if before is not None:
            gain = _gain_tile(before.result.success_rate, after.result.success_rate, data.gain)
            tiles = [_tile(f"Success {before.name}", before.result.total, 2), *tiles, gain]
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
    return (
        f'<div class="card"><div class="name">Gain by RL</div><div class="value">{format_points(after - before)}</div>'
        f'<div class="detail">{escape(detail)}</div></div>'
    )


def _tile(name: str, success: Success, colour: int) -> str:
    low, high = success.interval
    return (
        f'<div class="card"><div class="name">{escape(name)}</div><div class="value">{success.success_rate:.1%}</div>'
        f'<div class="detail">{success.count} episodes, 95 % interval {format_interval(low, high)}</div>'
        f"{interval_bar(success.success_rate, low, high, colour)}</div>"
    )


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
        cells = [_success_cell(success, colour) for success, colour in successes]
        if len(successes) > 1:
            first, second = (success for success, _ in successes)
            gain = format_points(second.success_rate - first.success_rate) if first and second else ""
            cells.append(f"<td>{gain}</td>")
        body.append(row(task, cells, style))
    columns = ["task", *(escape(one.name) for one, _ in shown), *(["gain"] if len(shown) > 1 else [])]
    return (
        f"<h2>Success per task</h2>{table(columns, body, 'card scroll')}"
        f'<p class="note">{data.episodes.capitalize()}, each run once; the intervals are 95 % Wilson intervals.</p>'
    )


def row(name: str, cells: Sequence[str], style: str = "") -> str:
    """Return a table row of ``<td>`` cells after ``name``; the style ``total`` is bold."""
    style = f' class="{style}"' if style else ""
    return f'<tr{style}><td class="wrap">{escape(name)}</td>{"".join(cells)}</tr>'


def table(columns: Sequence[str], rows: Sequence[str], style: str = "scroll") -> str:
    """Return a table of ``rows`` below the names of its columns."""
    head = "".join(f"<th>{name}</th>" for name in columns)
    body = f"<tbody>{''.join(rows)}</tbody>"
    return f'<div class="{style}"><table><thead><tr>{head}</tr></thead>{body}</table></div>'


def _success_cell(success: Success | None, colour: int) -> str:
    if success is None:
        return "<td>not run</td>"
    low, high = success.interval
    return (
        f"<td>{interval_bar(success.success_rate, low, high, colour)} <small>{success.success_rate:.1%} "
        f"({success.count}, {format_interval(low, high)})</small></td>"
    )


def warnings(data: RunData) -> str:
    """Return the warnings of the newest evaluation and of the parity gate."""
    lines = list(data.evaluations[-1].result.warnings) if data.evaluations else []
    checked = [line for line in data.lines if "rollout/parity_exceeded" in line]
    beyond = [line["step"] for line in checked if line["rollout/parity_exceeded"]]
    if beyond:
        lines.append(
            f"At {len(beyond)} of {len(checked)} iterations (the first: {beyond[0]}) rollout and trainer differed by more than the "
            "parity gate accepts; see the curve of the parity gap"
        )
    if not lines:
        return ""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<section class="card warning"><h3>Before you trust these numbers</h3><ul>{items}</ul></section>'


def comparisons(data: RunData) -> str:
    """Return a table of the paired comparison of two evaluations."""
    found = data.comparison
    if found is None:
        return ""
    rows = [row(task, _pair_cells(pairs)) for task, pairs in found["per_task"].items()]
    if len(rows) > 1:
        rows.append(row("all tasks", _pair_cells(found["total"]), "total"))
    notes = [
        f"{found['total']['episodes']} episodes that both have run; the difference is b - a in percentage points.",
        f"{found['method']}.",
        f"{found['num_unpaired']} episodes that only one has run are left out." if found["num_unpaired"] else "",
        *(f"Accepted: {mismatch}." for mismatch in found["mismatches"]),
    ]
    return (
        f'<h2>Paired comparison</h2><div class="facts"><span>a <b>{escape(found["a"])}</b></span>'
        f"<span>b <b>{escape(found['b'])}</b></span></div>"
        f"{table(('task', 'a', 'b', 'difference', 'only a', 'only b', 'p (McNemar)'), rows, 'card scroll')}"
        f'<p class="note">{escape(" ".join(note for note in notes if note))}</p>'
    )


def _pair_cells(pairs: dict[str, Any]) -> list[str]:
    count, difference, interval = pairs["episodes"], pairs["difference"], pairs["interval"]
    points = f"{format_points(difference)} ({format_points(*interval)})"
    cells = [
        f"{wins / count:.1%} <small>{wins}/{count}</small>" for wins in (pairs["successes_a"], pairs["successes_b"])
    ]
    cells += [f"{difference_bar(difference, *interval)} <small>{points}</small>", pairs["only_a"], pairs["only_b"]]
    cells.append(escape(format_p_value(pairs["p_value"]).removeprefix("p = ")))
    return [f"<td>{cell}</td>" for cell in cells]


def all_evaluations(data: RunData) -> str:
    """Return a table with a line per evaluation, if there are three or more."""
    if len(data.evaluations) < 3:
        return ""
    rows = [
        row(one.name, [_success_cell(one.result.total, 1), f"<td>{'greedy' if one.result.greedy else 'sampled'}</td>"])
        for one in data.evaluations
    ]
    return details(f"All {len(data.evaluations)} evaluations", table(("evaluation", "success", "actions"), rows))


def details(summary: str, content: str) -> str:
    """Return a card that opens at a click."""
    return f'<details class="card"><summary>{summary}</summary>{content}</details>'
