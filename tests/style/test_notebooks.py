"""The notebooks are committed without outputs, in one form, so that a diff shows what was changed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
ALLOWED_METADATA = {"kernelspec", "language_info"}


def faults(text: str) -> list[str]:
    """Return what a committed notebook must not have."""
    notebook = json.loads(text)
    cells = notebook["cells"]
    found = [f"cell {number} has outputs" for number, cell in enumerate(cells) if cell.get("outputs")]
    found += [f"cell {number} was executed" for number, cell in enumerate(cells) if cell.get("execution_count")]
    found += [f"cell {number} has metadata" for number, cell in enumerate(cells) if cell["metadata"]]
    found += [f"metadata {key}" for key in notebook["metadata"].keys() - ALLOWED_METADATA]
    if cells[0]["cell_type"] != "markdown" or not cells[0]["source"][0].startswith("# "):
        found.append("no title")
    code = "".join(line for cell in cells if cell["cell_type"] == "code" for line in cell["source"])
    if 'SHORT = os.environ.get("RLINF_NOTEBOOK_SHORT") == "1"' not in code:
        found.append("no short settings")
    if "assert " not in code:
        found.append("nothing is asserted")
    return found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_no_outputs_and_a_title_and_short_settings(path):
    assert faults(path.read_text(encoding="utf-8")) == []


def test_an_executed_notebook_is_refused():
    output = {"output_type": "stream", "name": "stdout", "text": ["1"]}
    cell = {
        "cell_type": "code",
        "execution_count": 1,
        "metadata": {"scrolled": True},
        "outputs": [output],
        "source": ["1"],
    }
    found = faults(json.dumps({"cells": [cell], "metadata": {"kernelspec": {}, "widgets": {}}}))
    assert found == [
        "cell 0 has outputs", "cell 0 was executed", "cell 0 has metadata", "metadata widgets", "no title", "no short settings",
        "nothing is asserted",
    ]  # fmt: skip


def links_of(path: Path) -> list[str]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    text = "".join(line for cell in cells if cell["cell_type"] == "markdown" for line in cell["source"])
    return re.findall(r"\]\(([^)#\s]+)", text)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_of_a_notebook_lead_to_files(path):
    assert [link for link in links_of(path) if not (path.parent / link).exists()] == []
    assert links_of(path), "every notebook leads on"


def test_the_page_lists_every_notebook():
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    assert re.findall(r"\]\(\.\./examples/notebooks/(\w+)\.ipynb\)", page) == [path.stem for path in NOTEBOOKS]
    assert len(NOTEBOOKS) == 7
