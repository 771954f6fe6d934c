"""Render report pages: fill the templates in ``pages`` and draw the charts."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from markupsafe import Markup

from rlinf import wings
from rlinf.files import Json, write_text
from rlinf.number_formats import format_bytes, format_interval, format_number, format_p_value, format_points
from rlinf.report.charts import NUM_COLOURS, SMALL, Series, difference_bar, interval_bar, legend, line_chart

if TYPE_CHECKING:
    from jinja2 import Environment

FOLDER = Path(__file__).parent


@functools.cache
def pages() -> Environment:
    """Return the template environment; it escapes everything except ``Markup``, and raises on undefined names."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader([FOLDER / "pages", *wings.folders()]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    formats = (format_bytes, format_interval, format_number, format_p_value, format_points, quote)
    environment.globals |= {function.__name__: function for function in formats}
    environment.globals["file"] = lambda name: Markup((FOLDER / name).read_text(encoding="utf-8"))
    for draw in (interval_bar, difference_bar):
        environment.globals[draw.__name__] = lambda *numbers, draw=draw: Markup(draw(*numbers))
    # Escape "<", because "</script>" in the data would end the script.
    environment.filters["script"] = lambda value: Markup(json.dumps(value).replace("<", "\\u003c"))
    return environment


def write_page(path: str | os.PathLike, template: str, tab: str, **values: Any) -> Path:
    """Render ``template`` (in ``pages`` or a wing) with the title ``tab``, write the page to ``path`` and return the path."""
    return write_text(Path(path), pages().get_template(template).render(tab=tab, **values))


def card(
    title: str, series: Sequence[Series], x_label: str, y_label: str, has_legend: bool = True, **options: Any
) -> Markup:
    """Return a chart with its title and legend; "" if there is nothing to draw."""
    chart, names = line_chart(series, x_label=x_label, y_label=y_label, **options), legend(series) if has_legend else ""
    return Markup(f'<div class="card"><h3>{escape(title)}</h3>{names}{chart}</div>' if chart else "")


Curves = tuple[tuple[str, dict[str, str], str, dict[str, bool]], ...]
"""For each chart: title, mapping from metrics to labels, y axis and options. Metrics with the same label form a single curve."""


def curve_cards(lines: Sequence[Json], x: str, x_label: str, curves: Curves) -> list[Markup]:
    """Return a small chart over ``x`` for each of ``curves``."""
    cards = []
    for title, names, y_label, options in curves:
        series = [
            series_of(lines, x, [name for name in names if names[name] == label], label, 1 + number % NUM_COLOURS)
            for number, label in enumerate(dict.fromkeys(names.values()))
        ]
        cards.append(card(title, series, x_label, y_label, size=SMALL, **options))
    return cards


def series_of(lines: Sequence[Json], x: str, names: Sequence[str], label: str, colour: int) -> Series:
    """Return a single curve of the given metrics over ``x``."""
    return Series(label, [(line[x], line[name]) for line in lines for name in names if name in line], colour)


def clipped_text(fraction: float | None, max_abs: float | None) -> str | None:
    """Format the fraction of clipped action values and the maximum magnitude; None if not recorded."""
    return None if fraction is None else f"{fraction:.1%} (largest: {max_abs:.4g})"
