"""Line charts as inline SVG with values on hover; they need no script, so a report is a single file."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from html import escape

from rlinf.number_formats import format_interval, format_number

LARGE, SMALL = (520, 270), (400, 232)
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 44
MAX_POINTS, MAX_HOVER_POINTS = 400, 120
NUM_COLOURS = 8

Interval = tuple[float, float]


@dataclass
class Series:
    """One curve.

    Attributes:
        points: ``(x, y)`` pairs; a ``y`` of None leaves a gap.
        colour: Index into the palette, 1 to ``NUM_COLOURS``.
        bands: Interval for each point, drawn as error bars; may be empty.
        filled: Draw the intervals as an area instead; the y axis range then depends only on the points.
        thin: Draw a thin, pale line.
        label: Name in the legend and on hover; "" omits the curve from both.
    """

    label: str
    points: list[tuple[float, float | None]]
    colour: int = 1
    bands: list[Interval | None] = field(default_factory=list)
    markers: bool = False
    filled: bool = False
    thin: bool = False


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return evenly spaced round numbers that enclose ``low`` and ``high``."""
    if high <= low:
        high = low + (abs(low) or 1.0)
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return at most six evenly spaced powers of ten that enclose ``low`` and ``high``."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    last = max(last, first + 1)
    step = math.ceil((last - first) / 5)
    return [10.0**exponent for exponent in range(first, last + step, step)]


def _thin(points: Sequence, limit: int) -> list:
    """Return at most ``limit`` evenly spaced points, including the first and the last."""
    if len(points) <= limit:
        return list(points)
    return [points[round(i * (len(points) - 1) / (limit - 1))] for i in range(limit)]


class _Axis:
    """Maps values to pixels; the range ends at the outermost ticks."""

    def __init__(self, ticks: list[float], start: float, end: float, log: bool = False) -> None:
        self.ticks, self.log = ticks, log
        self._low, self._high = self._of(ticks[0]), self._of(ticks[-1])
        self.start, self.end = start, end

    def _of(self, value: float) -> float:
        return math.log10(value) if self.log else value

    def __call__(self, value: float) -> float:
        fraction = (self._of(value) - self._low) / (self._high - self._low)
        return round(self.start + fraction * (self.end - self.start), 1)


def line_chart(
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    percent: bool = False,
    log: bool = False,
    zero: bool = False,
    size: tuple[int, int] = LARGE,
) -> str:
    """Return an ``<svg>`` element with the curves, or "" if there is nothing to draw.

    Args:
        series: Curves; values that are not finite, or not positive on a logarithmic axis, are omitted.
        log: Use a logarithmic y axis, unless all values are 0.
    """
    log = log and any(y for curve in series for _, y in curve.points)

    def is_drawn(y: float | None) -> bool:
        return y is not None and math.isfinite(y) and (y > 0 or not log)

    series = [replace(curve, points=[(x, y if is_drawn(y) else None) for x, y in curve.points]) for curve in series]
    series = [curve for curve in series if any(y is not None for _, y in curve.points)]
    if not series:
        return ""
    xs = sorted({x for curve in series for x, _ in curve.points})
    ys = [y for curve in series for _, y in curve.points if y is not None]
    ys += [end for curve in series if not curve.filled for band in curve.bands if band for end in band]
    width, height = size
    right, bottom = width - RIGHT, height - BOTTOM
    first = 0.0 if 0 < xs[0] <= xs[-1] / 2 else xs[0]  # start at 0, unless this would waste half of the width
    x_ticks = nice_ticks(first, xs[-1], 6)
    if percent:
        y_ticks = [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    elif log:
        y_ticks = log_ticks(min(ys), max(ys))
    else:
        y_ticks = nice_ticks(min(0.0, *ys) if zero else min(ys), max(ys))
    # The x axis ends at the last point, not at the next tick, so that no space is wasted.
    x_axis = _Axis([first, xs[-1] if xs[-1] > first else x_ticks[-1]], LEFT, right)
    y_axis = _Axis(y_ticks, bottom, TOP, log)
    visible = [tick for tick in x_ticks if x_axis.ticks[0] <= tick <= x_axis.ticks[-1] * (1 + 1e-9)]
    label = f"{y_label} against {x_label}: {', '.join(curve.label for curve in series if curve.label)}"
    parts = [f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label, quote=True)}">']
    for tick in y_ticks:
        y = y_axis(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y}" y2="{y}"/>')
        parts.append(_text("tick", f'x="{LEFT - 7}" y="{y + 3.5}"', "end", format_number(tick, percent)))
    for tick in visible:
        x = x_axis(tick)
        parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{bottom}" y2="{bottom + 4}"/>')
        anchor = "end" if x > right - 12 else "middle"
        parts.append(_text("tick", f'x="{x}" y="{bottom + 17}"', anchor, format_number(tick)))
    parts.append(_text("label", f'x="{(LEFT + right) / 2}" y="{height - 7}"', "middle", x_label))
    parts.append(_text("label", f'transform="translate(13 {(TOP + bottom) / 2}) rotate(-90)"', "middle", y_label))
    for curve in series:
        parts += _curve(curve, x_axis, y_axis)
    parts += _hover(series, _thin(xs, MAX_HOVER_POINTS), x_axis, y_axis, x_label.split(" (")[0], percent)
    parts.append("</svg>")
    return "".join(parts)


def _text(style: str, place: str, anchor: str, text: str) -> str:
    return f'<text class="{style}" {place} text-anchor="{anchor}">{escape(text)}</text>'


def legend(series: Sequence[Series]) -> str:
    """Return the legend as HTML, or "" for a single curve."""
    drawn = [curve for curve in series if any(y is not None for _, y in curve.points)]
    if len(drawn) < 2:
        return ""
    items = "".join(f'<span><i class="c{curve.colour}"></i>{escape(curve.label)}</span>' for curve in drawn)
    return f'<div class="legend">{items}</div>'


def _curve(curve: Series, x_axis: _Axis, y_axis: _Axis) -> list[str]:
    parts, pieces, piece = [_area(curve, x_axis, y_axis)] if curve.filled else [], [], []
    for x, y in _thin(curve.points, MAX_POINTS):
        if y is None:
            pieces, piece = [*pieces, piece], []
        else:
            piece.append(f"{x_axis(x)},{y_axis(y)}")
    for points in [*pieces, piece]:
        if len(points) > 1:
            parts.append(f'<polyline class="curve s{curve.colour}{" thin" * curve.thin}" points="{" ".join(points)}"/>')
        elif points:
            x, y = points[0].split(",")
            parts.append(f'<circle class="dot s{curve.colour}" cx="{x}" cy="{y}" r="3"/>')
    for (x, y), band in zip(curve.points, curve.bands or [None] * len(curve.points), strict=True):
        if band is not None and not curve.filled:
            px, low, high = x_axis(x), y_axis(band[0]), y_axis(band[1])
            parts.append(
                f'<path class="bar s{curve.colour}" d="M{px} {low}V{high}M{px - 4} {low}h8M{px - 4} {high}h8"/>'
            )
        if curve.markers and y is not None:
            parts.append(f'<circle class="dot s{curve.colour}" cx="{x_axis(x)}" cy="{y_axis(y)}" r="3.5"/>')
    return parts


def _area(curve: Series, x_axis: _Axis, y_axis: _Axis) -> str:
    """Return a curve's intervals as an area, clipped to the range of the y axis."""
    bottom, top = y_axis.ticks[0], y_axis.ticks[-1]
    upper, lower = [], []
    for (x, y), band in _thin(list(zip(curve.points, curve.bands, strict=True)), MAX_POINTS):
        if y is not None and band is not None:
            low, high = (min(max(end, bottom), top) for end in band)
            lower.append(f"{x_axis(x)},{y_axis(low)}")
            upper.append(f"{x_axis(x)},{y_axis(high)}")
    return f'<polygon class="area s{curve.colour}" points="{" ".join([*upper, *reversed(lower)])}"/>' if upper else ""


def _hover(
    series: Sequence[Series], xs: Sequence[float], x_axis: _Axis, y_axis: _Axis, x_name: str, percent: bool
) -> list[str]:
    """Return an invisible strip for each x value that shows a line, dots and a box with the values on hover."""
    right, bottom = x_axis.end, y_axis.start
    lookup = [dict(curve.points) for curve in series]
    bands = [
        dict(zip([x for x, _ in curve.points], curve.bands, strict=True)) if curve.bands else {} for curve in series
    ]
    pixels = [x_axis(x) for x in xs]
    parts = []
    for number, (x, px) in enumerate(zip(xs, pixels, strict=True)):
        start = (pixels[number - 1] + px) / 2 if number else LEFT
        end = (px + pixels[number + 1]) / 2 if number + 1 < len(xs) else right
        lines, dots = [f"{x_name} {format_number(x)}"], []
        for curve, values, intervals in zip(series, lookup, bands, strict=True):
            y = values.get(x)
            if y is None or not curve.label:
                continue
            text = f"{curve.label.split(' (')[0]} {format_number(y, percent)}"
            if intervals.get(x):
                text += f" ({' to '.join(format_number(round(end_, 3), percent) for end_ in intervals[x])})"
            lines.append(text)
            dots.append(f'<circle class="dot s{curve.colour}" cx="{px}" cy="{y_axis(y)}" r="3.5"/>')
        if not dots:
            continue
        width = 6.1 * max(map(len, lines)) + 14
        left = px + 8 if px + 8 + width < right else max(2, px - 8 - width)
        rows = "".join(
            f'<text x="{left + 7:.1f}" y="{TOP + 15 + 14 * row}">{escape(line)}</text>'
            for row, line in enumerate(lines)
        )
        parts.append(
            f'<g class="hit"><rect class="strip" x="{start:.1f}" y="{TOP}" width="{max(end - start, 0.5):.1f}" '
            f'height="{bottom - TOP}"/><g class="tip"><line x1="{px}" x2="{px}" y1="{TOP}" y2="{bottom}"/>'
            f'{"".join(dots)}<rect x="{left:.1f}" y="{TOP + 1}" width="{width:.1f}" height="{14 * len(lines) + 8}" '
            f'rx="4"/>{rows}</g></g>'
        )
    return parts


def interval_bar(rate: float, low: float, high: float, colour: int) -> str:
    """Return a small ``<svg>`` for tables that shows a success rate and its interval on a scale from 0 to 100 %."""
    return _bar(format_interval(low, high), rate, low, high, colour)


def difference_bar(difference: float, low: float, high: float) -> str:
    """Return a small ``<svg>`` that shows a difference in success rates and its interval on a scale from -100 to +100 %."""
    zero = '<line class="zero" x1="80.0" x2="80.0" y1="1" y2="15"/>'
    fractions = ((value + 1) / 2 for value in (difference, low, high))
    return _bar(f"{difference:+.1%}, {low:+.1%} to {high:+.1%}", *fractions, 1, zero)


def _bar(label: str, value: float, low: float, high: float, colour: int, marks: str = "") -> str:
    """Return a dot and its interval on a track; values are fractions of the track's width of 160 units."""
    return (
        f'<svg class="interval" viewBox="0 0 160 16" role="img" aria-label="{label}">'
        f'<rect class="track" x="0" y="6.5" width="160" height="3" rx="1.5"/>{marks}<rect class="range s{colour}" '
        f'x="{low * 160:.1f}" y="4" width="{max((high - low) * 160, 1):.1f}" height="8" rx="3"/>'
        f'<circle class="dot s{colour}" cx="{min(max(value * 160, 4), 156):.1f}" cy="8" r="4"/></svg>'
    )
