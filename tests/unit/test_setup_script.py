"""``scripts/setup.sh`` asks for the build of torch that ``RLINF_TORCH_INDEX`` names; pip and uv are stubs that record."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TORCH = re.search(r'"(torch==[^"]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))[1]
RECORD = '#!/bin/sh\necho "$(basename "$0") $*" >>"$LOG"\n'


def set_up(folder: Path, index: str | None, has_cpu_build: bool = True, uv_status: int = 0):
    """Run the script with an environment of stubs; returns its result and the recorded commands."""
    (folder / "venv" / "bin").mkdir(parents=True)
    (folder / "path").mkdir()
    refuse = "" if has_cpu_build else 'case "$*" in *+cpu) exit 1 ;; esac\n'
    for name, code in {
        "venv/bin/python": RECORD + refuse, "venv/bin/uv": f"{RECORD}exit {uv_status}\n", "venv/bin/rlinf": RECORD,
        "path/id": "#!/bin/sh\necho 1000\n",  # not root: nothing is installed into the system
    }.items():  # fmt: skip
        (folder / name).write_text(code)
        (folder / name).chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "RLINF_TORCH_INDEX"}
    environment |= {
        "RLINF_VENV": str(folder / "venv"), "PYTHON": sys.executable, "LOG": str(folder / "log"),
        "PATH": f"{folder / 'path'}{os.pathsep}{environment['PATH']}",
    }  # fmt: skip
    if index is not None:
        environment["RLINF_TORCH_INDEX"] = index
    command = ["bash", str(ROOT / "scripts" / "setup.sh")]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    log = folder / "log"
    return result, [line for line in log.read_text().splitlines() if "torch" in line or line.startswith("uv")]


@pytest.mark.parametrize(
    ("index", "has_cpu_build", "asked"),
    [
        (None, True, [f"install -qq {TORCH}"]),
        ("https://example.org/simple", True, [f"install -qq --extra-index-url https://example.org/simple {TORCH}"]),
        ("cpu", True, [f"install -qq {TORCH}+cpu"]),
        ("cpu", False, [f"install -qq {TORCH}+cpu", f"--torch-backend cpu {TORCH}"]),
    ],
)
def test_the_build_of_torch_is_the_one_that_was_named(index, has_cpu_build, asked, tmp_path):
    result, commands = set_up(tmp_path, index, has_cpu_build)
    assert result.returncode == 0, result.stderr
    assert len(commands) == len(asked)
    for command, words in zip(commands, asked, strict=True):
        assert command.endswith(words)


def test_a_cpu_build_that_cannot_be_had_ends_the_set_up_with_what_to_type(tmp_path):
    result, _ = set_up(tmp_path, "cpu", has_cpu_build=False, uv_status=1)
    assert result.returncode == 1
    assert "Type RLINF_TORCH_INDEX=<URL of an index that has it>" in result.stderr
    assert "installing rlinf[" not in result.stdout
