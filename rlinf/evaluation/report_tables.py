"""The parts of the report about success: headline, warnings, tasks, and comparisons of two evaluations."""

from __future__ import annotations

from html import escape
from typing import Any

from rlinf.evaluation.charts import difference_bar, interval_bar
from rlinf.evaluation.report_data import RunData
from rlinf.evaluation.result import Success
from rlinf.number_formats import format_interval, format_p_value, format_points


def headline(data: RunData) -> str:
    """Return tiles with success before and after RL, or of the newest evaluation."""
    before, after = data.before, data.after
    if after is None:
        last = data.evaluations[-1] if data.evaluations else None
        name = "Success" if last is None or last.folder == "." else f"Success {last.name}"
        tiles = [_tile(name, last.result.total, 1)] if last else []
        return f'<section class="headline">{"".join(tiles)}</section>' if tiles else ""
    tiles = []
    if before is not None:
        tiles.append(_tile(f"Success {before.name}", before.result.total, 2))
    tiles.append(_tile("Success after RL", after.result.total, 1))
    if before is not None:
        tiles.append(_gain_tile(before.result.success_rate, after.result.success_rate, data.gain))
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
    shown = [one for one in (data.before, data.after) if one]
    shown = shown or data.evaluations[-1:]
    if not shown:
        return ""
    colours = [1] if len(shown) == 1 else [2, 1]
    tasks = list(dict.fromkeys(task for one in shown for task in one.result.per_task))
    rows = [(task, [one.result.per_task.get(task) for one in shown], "") for task in tasks]
    if len(tasks) > 1:
        rows.append(("all tasks", [one.result.total for one in shown], ' class="total"'))
    head = "".join(f"<th>{escape(one.name)}</th>" for one in shown) + ("<th>gain</th>" if len(shown) > 1 else "")
    body = []
    for task, successes, style in rows:
        cells = "".join(_success_cell(success, colour) for success, colour in zip(successes, colours, strict=True))
        if len(successes) > 1:
            gain = format_points(successes[1].success_rate - successes[0].success_rate) if all(successes) else ""
            cells += f"<td>{gain}</td>"
        body.append(f'<tr{style}><td class="wrap">{escape(task)}</td>{cells}</tr>')
    return (
        f'<h2>Success per task</h2><div class="card scroll"><table><thead><tr><th>task</th>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
        f'<p class="note">{data.episodes.capitalize()}, each run once; the intervals are 95 % Wilson intervals.</p>'
    )


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
    rows = [(task, pairs, "") for task, pairs in found["per_task"].items()]
    if len(rows) > 1:
        rows.append(("all tasks", found["total"], ' class="total"'))
    body = "".join(
        f'<tr{style}><td class="wrap">{escape(task)}</td>{_count_cell(pairs, "a")}{_count_cell(pairs, "b")}'
        f"<td>{_difference(pairs)}</td><td>{pairs['only_a']}</td><td>{pairs['only_b']}</td>"
        f"<td>{escape(format_p_value(pairs['p_value']).removeprefix('p = '))}</td></tr>"
        for task, pairs, style in rows
    )
    notes = [
        f"{found['total']['episodes']} episodes that both have run; the difference is b - a in percentage points.",
        f"{found['method']}.",
        f"{found['num_unpaired']} episodes that only one has run are left out." if found["num_unpaired"] else "",
        *(f"Accepted: {mismatch}." for mismatch in found["mismatches"]),
    ]
    return (
        f'<h2>Paired comparison</h2><div class="facts"><span>a <b>{escape(found["a"])}</b></span>'
        f"<span>b <b>{escape(found['b'])}</b></span></div>"
        '<div class="card scroll"><table><thead><tr><th>task</th><th>a</th><th>b</th><th>difference</th><th>only a</th>'
        f"<th>only b</th><th>p (McNemar)</th></tr></thead><tbody>{body}</tbody></table></div>"
        f'<p class="note">{escape(" ".join(note for note in notes if note))}</p>'
    )


def _count_cell(pairs: dict[str, Any], which: str) -> str:
    successes = pairs[f"successes_{which}"]
    return f"<td>{successes / pairs['episodes']:.1%} <small>{successes}/{pairs['episodes']}</small></td>"


def _difference(pairs: dict[str, Any]) -> str:
    interval = pairs["interval"]
    return (
        f"{difference_bar(pairs['difference'], *interval)} <small>{format_points(pairs['difference'])} "
        f"({format_points(*interval)})</small>"
    )


def all_evaluations(data: RunData) -> str:
    """Return a table with a line per evaluation, if there are three or more."""
    if len(data.evaluations) < 3:
        return ""
    rows = "".join(
        f'<tr><td class="wrap">{escape(one.name)}</td>{_success_cell(one.result.total, 1)}'
        f"<td>{'greedy' if one.result.greedy else 'sampled'}</td></tr>"
        for one in data.evaluations
    )
    return (
        f'<details class="card"><summary>All {len(data.evaluations)} evaluations</summary><div class="scroll"><table>'
        f"<thead><tr><th>evaluation</th><th>success</th><th>actions</th></tr></thead><tbody>{rows}</tbody></table></div></details>"
    )
