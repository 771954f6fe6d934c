"""Formatting of numbers and tables for the terminal and the report."""

import shutil
import sys
import textwrap
from collections.abc import Sequence

GIB = 1024**3


def format_bytes(size: float) -> str:
    """Format a size in bytes, such as ``12.5 MiB`` or ``1.25 GiB``."""
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / 1024**2:.1f} MiB"


def format_count(number: int, noun: str) -> str:
    """Format a count, such as ``1 env``, ``2 envs`` or ``1,024 micro-batches``."""
    plural = f"{noun}es" if noun.endswith(("batch", "s")) else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def format_duration(seconds: float) -> str:
    """Format a duration given in seconds, such as ``45s``, ``3m20s`` or ``2h05m``."""
    seconds = max(0, round(seconds))
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"


def format_interval(low: float, high: float, between: str = " to ") -> str:
    """Format an interval of fractions, such as ``12.5% to 25.0%``."""
    return f"{low:.1%}{between}{high:.1%}"


def format_points(*differences: float) -> str:
    """Format differences of fractions in percentage points: a value such as ``+12.5`` or an interval such as ``-1.0 to +2.5``."""
    return " to ".join(f"{100 * difference:+.1f}" for difference in differences)


def format_p_value(p_value: float) -> str:
    """Format a p-value, such as ``p = 0.00012``, or an upper bound if it underflows float64."""
    return f"p = {p_value:.3g}" if p_value else f"p < {sys.float_info.min:.0e}"


def format_number(value: float, percent: bool = False) -> str:
    """Format a number compactly for an axis, such as ``85%``, ``12.5k`` or ``3.1e-05``."""
    if percent:
        return f"{100 * value:.3g}%"
    size = abs(value)
    for limit, unit, suffix in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if size >= limit:
            return f"{value / unit:.4g}{suffix}"
    return f"{value:.2g}" if size and size < 1e-3 else f"{value:.4g}"


MIN_WIDTH = 40
"""Minimum width of a wrapped column, even in a narrower terminal."""
UNLIMITED = 1 << 16


def terminal_width() -> int:
    """Return the terminal's width, unlimited if the output is redirected, so that each row stays on one line."""
    return shutil.get_terminal_size((UNLIMITED, 24)).columns


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with left-aligned columns; the last one is wrapped to the terminal's width."""
    lines = [tuple(map(str, header)), *(tuple(map(str, row)) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    indent = sum(widths[:-1]) + 2 * len(widths[:-1])
    widths[-1] = min(widths[-1], max(MIN_WIDTH, terminal_width() - indent))
    rule = tuple("-" * width for width in (*widths[:-1], min(widths[-1], MIN_WIDTH)))
    shown = []
    for cells in (lines[0], rule, *lines[1:]):
        first = "".join(cell.ljust(width) + "  " for cell, width in zip(cells[:-1], widths[:-1], strict=True))
        last = textwrap.wrap(cells[-1], widths[-1], break_long_words=False, break_on_hyphens=False)
        shown.append((first + f"\n{' ' * indent}".join(last)).rstrip())
    return "\n".join(shown)


def format_columns(names: Sequence[str], indent: int) -> str:
    """Arrange names in columns across the terminal's width, sorted downwards; lines after the first are indented."""
    width = max(map(len, names), default=0) + 2
    num_columns = max(1, (terminal_width() - indent) // width)
    num_lines = -(-len(names) // num_columns)
    lines = ("".join(name.ljust(width) for name in names[row::num_lines]).rstrip() for row in range(num_lines))
    return f"\n{' ' * indent}".join(lines)
