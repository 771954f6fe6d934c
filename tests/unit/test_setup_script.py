"""``scripts/setup.sh`` asks for the build of torch that ``RLINF_TORCH_INDEX`` names, and for the versions of the lock where it is told to;
pip and uv are stubs that record. The lock fits pyproject.toml."""

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
TORCH = re.search(r'"(torch==[^"]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))[1]
LOCK = ROOT / "scripts" / "constraints.txt"
RECORD = '#!/bin/sh\necho "$(basename "$0") $*" >>"$LOG"\n'


def set_up(
    folder: Path, index: str | None, has_cpu_build: bool = True, uv_status: int = 0, options: tuple[str, ...] = ()
):
    """Run the script with an environment of stubs; returns its result and the recorded commands that install."""
    (folder / "venv" / "bin").mkdir(parents=True)
    (folder / "path").mkdir()
    reject = "" if has_cpu_build else 'case "$*" in *+cpu) exit 1 ;; esac\n'
    for name, code in {
        "venv/bin/python": RECORD + reject, "venv/bin/uv": f"{RECORD}exit {uv_status}\n", "venv/bin/rlinf": RECORD,
        "path/id": "#!/bin/sh\necho 1000\n",  # not root: nothing is installed into the system
    }.items():  # fmt: skip
        (folder / name).write_text(code)
        (folder / name).chmod(0o755)
    result = repeat(folder, *options, index=index)
    log = folder / "log"
    return result, [line for line in log.read_text().splitlines() if " install " in line]


def repeat(folder: Path, *options: str, index: str | None = None):
    """Run the script with the stubs of ``set_up``."""
    environment = {name: value for name, value in os.environ.items() if name != "RLINF_TORCH_INDEX"}
    environment |= {
        "RLINF_VENV": str(folder / "venv"), "PYTHON": sys.executable, "LOG": str(folder / "log"),
        "PATH": f"{folder / 'path'}{os.pathsep}{environment['PATH']}", **({} if index is None else {"RLINF_TORCH_INDEX": index}),
    }  # fmt: skip
    command = ["bash", str(ROOT / "scripts" / "setup.sh"), *options]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


def of_torch(commands: list[str]) -> list[str]:
    return [line for line in commands if "torch" in line or line.startswith("uv")]


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
    assert len(of_torch(commands)) == len(asked)
    for command, words in zip(of_torch(commands), asked, strict=True):
        assert command.endswith(words)


def test_locked_gives_the_lock_to_every_command_that_installs_and_nothing_else_does(tmp_path):
    _, free = set_up(tmp_path / "free", "cpu", has_cpu_build=False, options=("--sims",))
    result, locked = set_up(tmp_path / "locked", "cpu", has_cpu_build=False, options=("--sims", "--locked"))
    assert result.returncode == 0, result.stderr
    assert len(free) == len(locked) == 7  # torch+cpu, uv, torch by uv, rlinf, simulators, LIBERO-PRO, LIBERO-Plus
    assert [f"-c {LOCK}" in line for line in free] == [False] * 7
    assert [f"-c {LOCK}" in line for line in locked] == [True] * 7
    shares = [f"--no-deps --upgrade --target {tmp_path}/free/venv/share/libero_{name} " for name in ("pro", "plus")]
    assert all(share in line for share, line in zip(shares, free[-2:], strict=True))


def test_an_environment_that_is_up_to_date_is_not_when_it_is_to_be_locked(tmp_path):
    first, _ = set_up(tmp_path, None)
    again, locked = repeat(tmp_path), repeat(tmp_path, "--locked")
    assert again.returncode == locked.returncode == 0
    assert ["up to date" in each.stdout for each in (first, again, locked)] == [False, True, False]


def locked_versions() -> dict[str, str]:
    lines = [line for line in LOCK.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return dict(line.split("==") for line in lines)


def load_lock_script():
    spec = importlib.util.spec_from_file_location("lock", ROOT / "scripts" / "lock.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_lock_has_a_version_that_fits_for_everything_that_pyproject_names():
    versions = locked_versions()
    assert [version for version in versions.values() if "+" in version] == [], "an index may lack builds such as +cpu"
    declared = load_lock_script().declared(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8")))
    requirements = [Requirement(line) for line in declared]
    assert len(requirements) > 60
    unfit = []
    for requirement in requirements:
        name = canonicalize_name(requirement.name)
        if name in ("rlinf", "vllm"):  # the build of vLLM for GPUs is not in the lock
            continue
        if name not in versions or not requirement.specifier.contains(versions[name]):
            unfit.append(f"{requirement}: {versions.get(name)}")
    assert unfit == []


def test_the_lock_holds_what_is_needed_and_what_that_needs_and_public_versions():
    asked = ["pytest", "torch", "no-such-package", 'pyyaml; python_version < "3"']
    found = load_lock_script().installed_versions(asked)
    assert {"pytest", "pluggy", "torch", "sympy", "mpmath"} <= set(found)
    assert not {"no-such-package", "pyyaml", "numpy"} & set(found)
    assert found["torch"] == TORCH.removeprefix("torch==")
