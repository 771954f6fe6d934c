"""The page of an audit: its answers, and success in each condition."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from rlinf.evaluation.audit import Audit
from rlinf.evaluation.charts import difference_bar
from rlinf.evaluation.report_data import REPORT_FILE
from rlinf.evaluation.report_page import clipped_text, header, page, row, success_cell, table, warning_card
from rlinf.evaluation.verdicts import LEAST_SHARE, Row, Verdict
from rlinf.files import write_text
from rlinf.number_formats import format_points

AUDIT_FILE = "audit.json"

RULE = (
    f"An answer is yes (with the part of what there is to lose that it explains) if the 95 % interval of an effect lies above {LEAST_SHARE:.0%} of what there is to lose, no if it lies below, and else "
    "unclear. What there is to lose is the success beyond that of random actions and of doing nothing. All conditions but the last play the "
    "same episodes; changes are paired (Newcombe 1998, method 10)."
)


def write_audit(audit: Audit, folder: str | os.PathLike, title: str, facts: Mapping[str, Any]) -> Path:
    """Write ``audit.json`` and ``report.html`` into a folder, and return the page's path."""
    folder = Path(folder)
    write_text(folder / AUDIT_FILE, json.dumps({**audit.as_dict(), **facts}, indent=1, default=str))
    sections = [
        header(title, {**facts, "episodes": audit.num_episodes, "actions cut": clipped_text(audit)}),
        warning_card(audit.warnings),
        _answers(audit),
        _conditions(audit),
    ]
    return write_text(folder / REPORT_FILE, page(title, sections))


def _answers(audit: Audit) -> str:
    rows = [
        row(one.question, [f"<td>{_badge(one)}</td>", f'<td class="wrap">{escape(one.reason)}</td>'])
        for one in audit.verdicts
    ]
    shown = table(("question", "answer", "numbers"), rows, "card scroll")
    return f'<h2>{escape(audit.summary())}</h2>{shown}<p class="note">{escape(RULE)}</p>'


def _badge(verdict: Verdict) -> str:
    style = "no" if verdict.is_fault else "yes" if verdict.answer in ("yes", "no") else ""
    return f'<span class="badge {style}">{escape(verdict.shown)}</span>'


def _conditions(audit: Audit) -> str:
    shown = table(("condition", "success", "change"), [_condition(one) for one in audit.rows], "card scroll")
    return f"<h2>Success in each condition</h2>{shown}"


def _condition(found: Row) -> str:
    if found.success is None:
        return row(found.title, [f'<td class="wrap" colspan="2">not possible here: {escape(found.note)}</td>'])
    change = escape(found.note)
    if found.pairs is not None:
        low, high = found.pairs.interval
        points = f"{format_points(found.pairs.difference)} ({format_points(low, high)})"
        change = f"{difference_bar(found.pairs.difference, low, high)} <small>{points} {change}</small>"
    return row(
        found.title, [success_cell(found.success, 1), f"<td>{change}</td>"], "total" if found.key == "clean" else ""
    )
