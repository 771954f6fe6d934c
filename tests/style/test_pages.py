"""Pages have short lines and table cells, places in the code that exist, and links that lead somewhere on the site, too."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
MAX_LINE, MAX_CELL = 120, 300
UNIT = re.compile(r"!?\[[^\]]*\]\([^)]*\)|`[^`]*`")
"""Links, images and code, in which a line is not broken."""


def too_long(text: str) -> list[str]:
    """Return lines of prose that could be broken earlier, and cells of tables; code is left out."""
    found = []
    for line in re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE).splitlines():
        if line.lstrip().startswith("|"):
            found += [cell for cell in re.split(r"(?<!\\)\|", line) if len(cell.strip()) > MAX_CELL]
        elif len(line) > MAX_LINE and len(UNIT.sub("unit", line).split()) > 2:  # a unit, perhaps behind a list mark
            found.append(line)
    return found


def missing_places(text: str) -> list[str]:
    """Return each ``file.py:name`` in backticks whose class, method or function is not there."""
    found = []
    for file, name in re.findall(r"`(rlinf/[\w/]+\.py):([\w.]+)`", text):
        nodes: list[ast.AST] = [ast.parse((ROOT / file).read_text(encoding="utf-8"))] if (ROOT / file).is_file() else []
        for part in name.split("."):
            nodes = [each for node in nodes for each in getattr(node, "body", []) if getattr(each, "name", "") == part]
        found += [] if nodes else [f"{file}:{name}"]
    return found


def missing_paths(text: str) -> list[str]:
    """Return files in backticks, such as ``rlinf/types.py``, that the project does not have."""
    named = re.findall(r"`((?:rlinf|tests|docs|examples|benchmarks|scripts)/[\w./-]*)(?:::\w+)?`", text)
    return [path for path in named if not (ROOT / path).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_and_cells_are_short_and_places_exist(page):
    text = page.read_text(encoding="utf-8")
    assert too_long(text) == [] and missing_places(text) == [] and missing_paths(text) == []


def test_the_page_for_assistants_is_short_and_lists_every_folder_of_the_package():
    text = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    rows = text.partition("## Layout")[2].partition("\n## ")[0].splitlines()
    named = [name for row in rows if row.startswith("|") for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    folders = {path.parent.name for path in (ROOT / "rlinf").glob("*/__init__.py")}
    assert len(text.splitlines()) <= 60 and set(named) == folders and len(named) == len(folders)


def test_the_table_of_places_answers_every_question():
    section = (
        (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("## Find it")[2].partition("\n## ")[0]
    )
    rows = [line for line in section.splitlines() if line.endswith(" |")][1:]
    assert len(rows) >= 12 and all(re.search(r"`rlinf/[\w/]+\.py:\w", row) for row in rows)


def test_a_long_line_a_long_cell_and_a_wrong_place_are_found():
    long, cell = "word " * 24 + "word", "c" * 301
    text = f"{long}\n| a | {cell} |\n- `{long}`\n[{long}](a.md)\n```\n{long}\n```\n| {'c' * 300} | \\| |\n"
    assert too_long(text) == [long, f" {cell} "]
    assert too_long(f"{long} [a](b.md)") == [f"{long} [a](b.md)"]
    places = "`rlinf/registry.py:Registry.get` `rlinf/registry.py:Registry.gett` `rlinf/no_such.py:f`"
    assert missing_places(places) == ["rlinf/registry.py:Registry.gett", "rlinf/no_such.py:f"]
    paths = "`rlinf/types.py` `rlinf/no_such.py` `tests/unit/test_cli.py::test_x`"
    assert missing_paths(paths) == ["rlinf/no_such.py"]


@pytest.mark.parametrize(
    ("page", "markdown", "on_site"),
    [
        ("index.md", "[a](docs/results.md#grpo) ![b](docs/images/c.png)", "[a](results.md#grpo) ![b](images/c.png)"),
        ("results.md", "[a](../README.md) [b](metrics.md) [c](#d)", "[a](index.md) [b](metrics.md) [c](#d)"),
        ("results.md", "[`a.py`](../rlinf/a.py), [b](https://c.org)", "[`a.py`](R/blob/main/rlinf/a.py), [b](https://c.org)"),
        ("guides/a.md", "[b](../results.md) [c](../../README.md)", "[b](../results.md) [c](../index.md)"),
        ("results.md", "`[a](../b.md)`\n```\n[a](../b.md)\n```\n", "`[a](../b.md)`\n```\n[a](../b.md)\n```\n"),
    ],
)  # fmt: skip
def test_links_of_the_project_become_links_of_the_site(page, markdown, on_site):
    hooks = load_hooks()
    assert hooks.LINK.sub(lambda match: hooks.site_link(match, page, "R/"), markdown) == on_site


def test_without_a_repository_a_link_to_code_becomes_text():
    hooks = load_hooks()
    links = "[`a.py`](../rlinf/a.py), [b](python.md)"
    assert hooks.LINK.sub(lambda match: hooks.site_link(match, "results.md", None), links) == "`a.py`, [b](python.md)"


def load_hooks():
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "scripts" / "site_hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
