"""Tables for the terminal."""

import shutil
import textwrap
from collections.abc import Sequence

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
