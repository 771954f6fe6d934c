"""The core packages pass mypy; which files, and how strict: ``[tool.mypy]`` in pyproject.toml."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mypy") is None, reason="mypy is not installed: bash scripts/setup.sh --dev"
)


def mypy(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "mypy", "--no-color-output", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=840)


def test_the_core_has_no_type_error():
    result = mypy()
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_type_error_is_found(tmp_path):
    wrong = tmp_path / "wrong.py"
    wrong.write_text("def half(number: int):\n    return number / 2\n\n\ndef first():\n    return half('four')\n")
    result = mypy(str(wrong))
    assert result.returncode == 1
    assert 'Argument 1 to "half" has incompatible type "str"; expected "int"' in result.stdout


def test_a_misspelt_public_name_is_found(tmp_path):
    """Two lines of a user: names of `rlinf` are known to a type checker, although they load at their first use."""
    lines = tmp_path / "lines.py"
    lines.write_text("import rlinf\nrlinf.evaluate('a'), rlinf.evalute('b')\n")
    result = mypy("--follow-imports=skip", "rlinf/__init__.py", str(lines))  # what the names stand for takes minutes
    assert 'Module has no attribute "evalute"; maybe "evaluate"?' in result.stdout and "Found 1 error" in result.stdout
