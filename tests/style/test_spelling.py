"""No common misspelling in code or documents; the words that are let pass: ``[tool.codespell]`` in pyproject.toml."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("codespell_lib") is None, reason="codespell is not installed: bash scripts/setup.sh --dev"
)


def codespell(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "codespell_lib", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)


def test_words_are_spelt_right():
    result = codespell(".", ".ci", ".github")
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_misspelling_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("A reciev" + "er.\n")
    assert "receiver" in codespell(str(page)).stdout
