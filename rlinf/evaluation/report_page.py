"""The parts that all reports share: page, header, cards, charts and tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from rlinf.evaluation.charts import Series, difference_bar, interval_bar, legend, line_chart
from rlinf.evaluation.result import Success
from rlinf.number_formats import format_interval, format_p_value, format_points

if TYPE_CHECKING:
    from rlinf.evaluation.audit import Audit
    from rlinf.evaluation.result import EvaluationResult

STYLE = Path(__file__).with_name("report.css")


def page(tab: str, sections: Sequence[str]) -> str:
    """Return an HTML page with ``tab`` as its title and ``sections`` as its body."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(tab)} - rlinf</title><style>{STYLE.read_text(encoding='utf-8')}</style></head><body><main>"
        f"{''.join(sections)}</main></body></html>\n"
    )


def header(title: str, facts: Mapping[str, Any]) -> str:
    """Return the title and, below it, the facts that are not None."""
    given = {name: escape(str(value)) for name, value in facts.items() if value is not None}
    chips = "".join(f"<span>{name} <b>{value}</b></span>" for name, value in given.items())
    return f'<header><h1>{escape(title)}</h1><div class="facts">{chips}</div></header>'


def charts(cards: Sequence[str], heading: str = "", style: str = "charts") -> str:
    """Return a section of cards below its heading; "" if all of them are empty."""
    return f'{heading}<section class="{style}">{"".join(cards)}</section>' if any(cards) else ""


def training_curves(cards: Sequence[str]) -> str:
    """Return the section of small charts over iterations."""
    return charts(cards, "<h2>Training curves</h2>", "charts small")


def card(title: str, series: Sequence[Series], x_label: str, y_label: str, **options: Any) -> str:
    """Return a chart with its title and legend; "" if there is nothing to draw."""
    chart = line_chart(series, x_label=x_label, y_label=y_label, **options)
    return f'<div class="card"><h3>{escape(title)}</h3>{legend(series)}{chart}</div>' if chart else ""


def warning_card(lines: Sequence[str], title: str = "Before you trust these numbers") -> str:
    """Return a card with what a reader should know; "" without any."""
    if not lines:
        return ""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<section class="card warning"><h3>{escape(title)}</h3><ul>{items}</ul></section>'


def tile(name: str, success: Success, colour: int, unit: str = "episodes") -> str:
    """Return a tile of the headline with a rate, its interval and the return; with the return alone where there is no success."""
    if not success.is_told:
        mean, low, high = success.returns
        interval = "" if math.isinf(high) else f", 95 % interval {low:.4g} to {high:.4g}"
        name = name.replace("Success", "Return", 1)
        return (
            f'<div class="card"><div class="name">{escape(name)}</div><div class="value">{mean:.4g}</div>'
            f'<div class="detail">{success.episodes} {unit}{interval}; the env tells no success</div></div>'
        )
    low, high = success.interval
    returns = "" if success.returns is None else f'<div class="detail">return {escape(success.return_text)}</div>'
    return (
        f'<div class="card"><div class="name">{escape(name)}</div><div class="value">{success.success_rate:.1%}</div>'
        f'<div class="detail">{success.count} {unit}, 95 % interval {format_interval(low, high)}</div>{returns}'
        f"{interval_bar(success.success_rate, low, high, colour)}</div>"
    )


def clipped_text(result: EvaluationResult | Audit) -> str | None:
    """Return the share of cut numbers of actions and the largest magnitude as text; None: not recorded."""
    if result.actions_clipped_fraction is None:
        return None
    return f"{result.actions_clipped_fraction:.1%} (largest: {result.actions_max_abs:.4g})"


def gain_tile(name: str, difference: float, detail: str) -> str:
    """Return a tile of the headline with a difference of rates in percentage points."""
    return (
        f'<div class="card"><div class="name">{escape(name)}</div><div class="value">{format_points(difference)}</div>'
        f'<div class="detail">{escape(detail)}</div></div>'
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


def success_cell(success: Success | None, colour: int) -> str:
    """Return the ``<td>`` of a rate with its interval and the return."""
    if success is None:
        return "<td>not run</td>"
    if not success.is_told:
        return f"<td>{escape(success.return_text)}</td>"
    low, high = success.interval
    returns = "" if success.returns is None else f"<br><small>return {escape(success.return_text)}</small>"
    return (
        f"<td>{interval_bar(success.success_rate, low, high, colour)} <small>{success.success_rate:.1%} "
        f"({success.count}, {format_interval(low, high)})</small>{returns}</td>"
    )


def comparisons(found: dict[str, Any] | None) -> str:
    """Return a table of a paired comparison (``compare.json``); "" for None."""
    if found is None:
        return ""
    unit = found.get("unit", "episodes")
    p_value = f"p ({found.get('test', 'McNemar')})"
    rows = [row(task, _pair_cells(pairs)) for task, pairs in found["per_task"].items()]
    if len(rows) > 1:
        rows.append(row("all tasks", _pair_cells(found["total"]), "total"))
    notes = [
        f"{found['total']['episodes']} {unit} that both have run; the difference is b - a in percentage points.",
        f"{found['method']}.",
        f"{found['num_unpaired']} {unit} that only one has run are left out." if found["num_unpaired"] else "",
        *(f"Accepted: {mismatch}." for mismatch in found["mismatches"]),
    ]
    return (
        f'<h2>Paired comparison</h2><div class="facts"><span>a <b>{escape(found["a"])}</b></span>'
        f"<span>b <b>{escape(found['b'])}</b></span></div>"
        f"{table(('task', 'a', 'b', 'difference', 'only a', 'only b', p_value), rows, 'card scroll')}"
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


def details(summary: str, content: str) -> str:
    """Return a card that opens at a click."""
    return f'<details class="card"><summary>{summary}</summary>{content}</details>'


def texts(config: str, manifest: str) -> str:
    """Return the section with the texts of ``config.yaml`` and ``manifest.json``; "" without any."""
    blocks = [
        details(name, f"<pre>{escape(text)}</pre>") for name, text in (("Configuration", config), ("Manifest", manifest)) if text
    ]  # fmt: skip
    return f"<h2>Configuration and manifest</h2>{''.join(blocks)}" if blocks else ""


def profile(traces: Sequence[str], steps: Sequence[int] | None) -> str:
    """Return the section that links the traces of the recorded steps, of which ``steps`` is the first and the last."""
    if not traces:
        return ""
    links = ", ".join(f'<a href="{quote(path)}" download>{escape(path)}</a>' for path in traces)
    of_steps = f" of the steps {steps[0]} to {steps[1]}" if steps else ""
    note = f"What torch ran in each thread{of_steps}. Open a file in ui.perfetto.dev, chrome://tracing or TensorBoard."
    return f'<h2>Profile</h2><p class="note">{note}</p><p>{links}</p>'
